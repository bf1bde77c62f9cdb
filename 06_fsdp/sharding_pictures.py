"""Pictures of a step with sharded parameters: which units are whole at which moment, and what a GPU's two streams do.

What happens in which order comes from a real step. When it happens on GPUs is simulated: `simulate` gives the spans
that `draw_streams` draws.
"""

from dataclasses import dataclass

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting
from common.lab.sliders import Sliders

FORWARD, BACKWARD = plotting.BLUE, plotting.PURPLE
GATHER, REDUCE = plotting.ORANGE, plotting.GREEN


@dataclass(frozen=True)
class StreamSpan:
    """What a stream does from `start` to `end`, in seconds: unit `unit` is in "forward" or "backward" on the stream
    that computes, "gather" or "reduce" on the one that sends."""

    kind: str
    unit: int
    start: float
    end: float


def simulate(forward: list[float], gather: list[float], reduce: list[float], ahead: int = 1) -> list[StreamSpan]:
    """A step of ZeRO stage 3 on a GPU with two streams; seconds for each unit, in the order of the forward pass.

    * A unit computes when it has been gathered, and the one before it has computed. Its backward pass takes twice as
      long as its forward pass.
    * Messages are sent one at a time, in the order in which they were asked for.
    * `ahead` units may be gathered in advance: when a unit is done and freed, the next gather is asked for. With 0,
      nothing is gathered before the unit that needs it is the next to compute.
    * The last unit stays gathered for the backward pass. A unit's gradients are sent when its backward pass is over.
    """
    count = len(forward)
    order = [*((unit, "forward") for unit in range(count)), *((unit, "backward") for unit in reversed(range(count)))]
    spans, gathered, network, compute = [], {}, 0.0, 0.0

    def send(kind, unit, asked):
        nonlocal network
        start = max(network, asked)
        network = start + (gather if kind == "gather" else reduce)[unit]
        spans.append(StreamSpan(kind, unit, start, network))

    def ask(number, now):
        if number < len(order):
            if number != count:  # the first of the backward pass has never been freed
                send("gather", order[number][0], now)
            gathered[number] = network if number != count else 0.0

    for number in range(ahead + 1):
        ask(number, 0.0)
    for number, (unit, kind) in enumerate(order):
        start = max(compute, gathered[number])
        compute = start + forward[unit] * (2 if kind == "backward" else 1)
        spans.append(StreamSpan(kind, unit, start, compute))
        if kind == "backward":
            send("reduce", unit, compute)
        ask(number + ahead + 1, compute)
    return spans


def computing(spans: list[StreamSpan]) -> list[StreamSpan]:
    return [span for span in spans if span.kind in ("forward", "backward")]


def length(spans: list[StreamSpan]) -> float:
    """Seconds until both streams are done."""
    return max(span.end for span in spans)


def exposed(spans: list[StreamSpan]) -> float:
    """Seconds in which the GPU does not compute, because of messages that it waits for."""
    return length(spans) - sum(span.end - span.start for span in computing(spans))


def draw_streams(panels: dict[str, list[StreamSpan]]):
    """For each title a step as two rows: what the GPU computes and what is on the network, with the numbers of the
    units from 1. Where it does not compute is hatched."""
    fig, axes = plt.subplots(len(panels), 1, figsize=(11, 1.75 * len(panels) + 0.9), sharex=True, squeeze=False)
    longest = max(length(spans) for spans in panels.values())
    for ax, (title, spans) in zip(axes.flat, panels.items(), strict=True):
        ax.broken_barh([(0, 1e3 * length(spans))], (0.05, 0.9), fc="white", ec="#999999", hatch="////", lw=0)
        turn = max(span.end for span in spans if span.kind == "forward")
        for span in spans:
            colour = {"forward": FORWARD, "backward": BACKWARD, "gather": GATHER, "reduce": REDUCE}[span.kind]
            row = 0 if span.kind in ("forward", "backward") else 1
            left, width = 1e3 * span.start, 1e3 * (span.end - span.start)
            ax.broken_barh([(left, width)], (row + 0.05, 0.9), fc=colour, ec="white", lw=0.8)
            if width > 0.011e3 * longest:
                ax.text(left + width / 2, row + 0.52, span.unit + 1, ha="center", va="center", size=9, color="white")
        ax.axvline(1e3 * turn, color="black", lw=1, ls=":")
        ax.text(1e3 * turn, -0.05, "backward pass ", ha="left", va="bottom", size=10)
        ax.set_yticks([0.5, 1.5], ["computes", "sends"])
        ax.set(ylim=(2, -0.45), xlim=(0, 1e3 * longest))
        waits = f"{1e3 * length(spans):.1f} ms, of which the GPU does not compute {1e3 * exposed(spans):.1f} ms"
        ax.set_title(f"{title}: {waits}", fontsize=12, loc="left")
    axes.flat[-1].set_xlabel("time (ms)")
    shown = {"forward": FORWARD, "backward": BACKWARD, "gather parameters": GATHER, "reduce-scatter gradients": REDUCE}
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
    handles.append(Rectangle((0, 0), 1, 1, fc="white", ec="#999999", hatch="////", lw=0))
    fig.legend(handles, [*shown, "does not compute"], loc="outside upper center", ncols=5, fontsize=11)
    return fig


def draw_kept(kept: dict[str, dict[str, float]], whole: dict[str, float], ranks: int):
    """What each rank keeps: for each title the bytes per parameter by kind, beside those of a rank that keeps all."""
    colours = dict(zip(whole, (plotting.BLUE, plotting.ORANGE, plotting.GREEN), strict=True))
    fig, axes = plt.subplots(1, len(kept), figsize=(10.5, 3.3), sharey=True)
    for ax, (title, sizes) in zip(axes, kept.items(), strict=True):
        left = 0.0
        for kind, colour in colours.items():
            for rank in range(ranks):
                cut = whole[kind] / ranks if sizes[kind] < whole[kind] else 0  # each rank has another part
                ax.add_patch(Rectangle((left, rank - 0.35), whole[kind], 0.7, fc="#eeeeee", ec="#999999", lw=0.8))
                ax.add_patch(Rectangle((left + rank * cut, rank - 0.35), sizes[kind], 0.7, color=colour, lw=0))
            left += whole[kind]
        ax.set(xlim=(-0.3, left + 0.3), ylim=(ranks - 0.4, -0.6), xlabel="bytes per parameter", xticks=[])
        ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        ax.set_title(f"{title}: {sum(sizes.values()):g} bytes", fontsize=13)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    fig.legend(handles, [f"{kind} ({whole[kind]:g} bytes)" for kind in colours], loc="outside upper center", ncols=3)
    return fig


def draw_alive(curves: dict[str, list[float]], shard: float):
    """For each title how many elements of gradients are alive, over P, as one gradient after another arrives."""
    fig, ax = plt.subplots(figsize=(9, 3.2))
    for (name, curve), colour in zip(curves.items(), (plotting.ORANGE, plotting.BLUE), strict=True):
        ax.plot(range(1, len(curve) + 1), curve, color=colour)
        ax.annotate(f"{name}, at most {max(curve):.2f}", (1, max(curve) + 0.03), color=colour)
    ax.axhline(shard, color="#777777", lw=1.2, ls=":")
    ax.annotate(f"the shard of all gradients, {shard:.2f}", (len(curve), shard - 0.12), ha="right", color="#777777")
    ax.set(xlabel="gradients that have arrived", ylabel="elements alive / P", ylim=(0, 1.15))
    return fig


def count_gradients(trained) -> list[float]:
    """To this list is added, each time a gradient arrives, how many elements of gradients the notebook's class holds,
    whole ones and shards, over P."""
    alive, numel = [], sum(flat.length for flat in trained.flats)

    def count(_):
        held = [tensor for flat in trained.flats for tensor in (flat.gradient, flat.shard.grad) if tensor is not None]
        alive.append(sum(tensor.numel() for tensor in held) / numel)

    for parameter in trained.model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    return alive


def draw_by_ranks(ranks: list[int], curves: dict[str, list[float]], limit: float):
    """GB on each rank by the number of ranks, labelled at the end, and the GB that a GPU has."""
    fig, ax = plt.subplots(figsize=(9, 3.8))
    for (name, sizes), colour in zip(curves.items(), plotting.PALETTE, strict=False):
        ax.plot(ranks, sizes, color=colour)
        ax.annotate(f"{name}, {sizes[-1]:.1f}", (ranks[-1] * 1.1, sizes[-1] - 2), color=colour, annotation_clip=False)
    ax.axhline(limit, color="#666666", lw=1.2, ls="--")
    ax.annotate(f"a GPU's {limit} GB", (ranks[-2], limit + 3), ha="right", fontsize=11, color="#666666")
    ax.set_xscale("log", base=2)
    ax.set(xlabel="ranks", ylabel="GB on each rank", ylim=(0, None), xlim=(0.9, ranks[-1]))
    ax.set_xticks(ranks, list(map(str, ranks)))
    return fig


def watch(trained) -> list[tuple[str, int]]:
    """From now on, what a step of the notebook's class Zero3 does is added to this list, in the order of its calls.

    (what, unit). What: "gather" (the message is started), "forward", "backward" (the unit begins to compute), "reduce"
    (its gradients are sent), "reduced" (its shard of them is there), "free" (its parameters are given back), "step".
    """
    events, number = [], {flat: index for index, flat in enumerate(trained.flats)}
    start, prepare, free = trained.start, trained.prepare, trained.free
    reduce, finish_reduce, step = trained.reduce, trained.finish_reduce, trained.optimizer.step

    def noted_start(place):
        without = [flat for flat in trained.flats if flat.work is None]
        start(place)
        events.extend(("gather", number[flat]) for flat in without if flat.work is not None)

    def noted_prepare(place, following):
        prepare(place, following)
        events.append(("forward" if following > place else "backward", number[trained.units[place]]))

    def noted_finish():
        sent = trained.under_way
        finish_reduce()
        if sent:
            events.append(("reduced", number[sent[0]]))

    trained.start, trained.prepare, trained.finish_reduce = noted_start, noted_prepare, noted_finish

    def then(call, what, number_of=lambda *_args: 0):
        def noted(*args):
            call(*args)
            events.append((what, number_of(*args)))

        return noted

    trained.free, trained.reduce = then(free, "free", number.get), then(reduce, "reduce", number.get)
    trained.optimizer.step = then(step, "step")
    return events


def step_by_step(events: list[tuple[str, int]], names: list[str], ranks: int) -> list[tuple]:
    """(figure, caption) for each time something computes in a step that was watched, from `watch`."""
    gathered, flying, gradient, sent, shards, found = set(), set(), set(), set(), set(), []
    for what, unit in events:
        if what == "gather":
            flying.add(unit)
        if what in ("forward", "backward"):
            flying.discard(unit)
            gathered.add(unit)
            gradient |= {unit} if what == "backward" else set()
        if what == "free":
            gathered.discard(unit)
        if what == "reduce":
            sent.add(unit)
        if what == "reduced":
            gradient.discard(unit)
            sent.discard(unit)
            shards.add(unit)
        if what in ("forward", "backward", "step"):
            words = [f"{what.capitalize()} pass of {names[unit]}."]
            if what == "step":
                words = ["The optimizer steps the shards; all other memory has been given back."]
            words += [f"Meanwhile {names[other]} is gathered." for other in sorted(flying)]
            words += [f"The gradients of {names[other]} are reduce-scattered." for other in sorted(sent)]
            found.append(
                (_frame(names, ranks, (what, unit), gathered, flying, gradient, sent, shards), " ".join(words))
            )
    return found


def _frame(names, ranks, computes, gathered, flying, gradient, sent, shards):
    fig, ax = plt.subplots(figsize=(9, 3.0))
    what, current = computes
    for unit, name in enumerate(names):
        left = 1.25 * unit
        rows = (
            (0, plotting.BLUE, unit in gathered, "gathering" * (unit in flying), True),
            (1.25, plotting.ORANGE, unit in gradient, "reducing" * (unit in sent), unit in shards),
        )
        for top, colour, whole, travels, shard in rows:
            ax.add_patch(Rectangle((left, top), 1, 1, fc="white", ec="#999999", lw=1, ls=":"))
            if whole:
                ax.add_patch(Rectangle((left, top), 1, 1, fc=colour, alpha=0.35, lw=0))
            if travels:
                ax.add_patch(Rectangle((left, top), 1, 1, fc="none", ec=colour, hatch="///", lw=0))
            if shard:
                ax.add_patch(Rectangle((left, top), 1 / ranks, 1, fc=colour, lw=0))
            ground = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8 * bool(travels)}
            text = travels or "whole" * whole
            ax.text(left + 0.62, top + 0.5, text, ha="center", va="center", size=11, bbox=ground if text else None)
        active = what != "step" and unit == current
        ax.text(left + 0.5, -0.12, name, ha="center", va="bottom", size=12, weight="bold" if active else "normal")
        if active:
            ax.text(left + 0.5, 2.4, what, ha="center", va="top", size=12, weight="bold")
            ax.add_patch(Rectangle((left - 0.06, -0.06), 1.12, 2.37, fc="none", ec="black", lw=2))
    ax.set(xlim=(-0.15, 1.25 * len(names)), ylim=(2.75, -0.5), xticks=[])
    ax.set_yticks([0.5, 1.75], ["parameters", "gradients"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


def draw_bars(panels: dict[str, dict[str, float]]):
    """Panels side by side, each with the same bars, and their values."""
    fig, axes = plt.subplots(1, len(panels), figsize=(10, 2.6), sharey=True)
    for ax, (title, values), colour in zip(axes, panels.items(), (plotting.BLUE, plotting.ORANGE), strict=False):
        bars = ax.barh(list(values), list(values.values()), color=colour)
        ax.bar_label(bars, [f"{value:.0f}" for value in values.values()], padding=4)
        ax.set(xlabel=title, xlim=(0, 1.15 * max(values.values())))
    axes[0].invert_yaxis()
    return fig


class StreamLab(Sliders):
    """A step of eight blocks of Llama 7B's size, bf16 with float32 gradients, on GPUs that reach 500 TFLOP/s; every
    second block may be larger for the network, as a mixture of experts is."""

    def __init__(self):
        controls = {
            "tokens": self.choice("tokens per GPU", [1024, 2048, 4096, 8192, 16384, 32768], 4096),
            "bandwidth": self.choice("GB/s of the ring", [12.5, 25, 50, 100, 200, 300, 450], 300),
            "ahead": self.choice("units ahead", [0, 1, 2, 3], 1),
            "larger": self.choice("larger blocks", [1, 2, 4, 8], 1),
        }
        super().__init__(controls)

    @staticmethod
    def choice(what, options, value):
        return widgets.SelectionSlider(options=options, value=value, description=what, continuous_update=False)

    def draw(self, tokens, bandwidth, ahead, larger):
        block, seconds = 202e6, 1 / (bandwidth * 1e9)
        sizes = [block, block * larger] * 4
        gather, reduce = [2 * size * seconds for size in sizes], [4 * size * seconds for size in sizes]
        spans = simulate([2 * block * tokens / 500e12] * 8, gather, reduce, ahead)
        return draw_streams({f"{tokens:,} tokens per GPU, {bandwidth} GB/s, {ahead} ahead": spans})
