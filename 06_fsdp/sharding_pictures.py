"""Pictures of a step with sharded parameters: which units are whole at which moment, and what a GPU's two streams do.

What happens in which order comes from a real step. When it happens on GPUs is simulated: `simulate` gives the spans
that `draw_streams` draws.
"""

import itertools
import math
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
    * With ahead=0, nothing is gathered before the unit that needs it is the next to compute.
    * With ahead=1, as `fully_shard` does where Python is early enough: in the forward pass, the gather of unit k+1
      waits until unit k-1 has been copied out of its message, and so begins to compute
      (FSDPParamGroup.wait_for_unshard in torch 2.13); in the backward pass, unit k asks for unit k-1 when it has been
      copied out itself (pre_backward). With more, each unit asks for so many after it.
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
        if number < len(order) and number not in gathered:
            if number != count:  # the first of the backward pass has never been freed
                send("gather", order[number][0], now)
            gathered[number] = network if number != count else 0.0

    for number in range(ahead + 1):
        ask(number, 0.0)
    for number, (unit, kind) in enumerate(order):
        ask(number, compute)  # if nobody has asked before
        start = max(compute, gathered[number])
        if kind == "forward" and ahead and number + ahead + 1 < count:
            ask(number + ahead + 1, start)
        for following in range(number + 1, number + ahead + 1 if kind == "backward" else 0):
            ask(following, start)
        compute = start + forward[unit] * (2 if kind == "backward" else 1)
        spans.append(StreamSpan(kind, unit, start, compute))
        if kind == "backward":
            send("reduce", unit, compute)
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
        waits = f"{1e3 * length(spans):.1f} ms, GPU idle {1e3 * exposed(spans):.1f} ms"
        ax.set_title(f"{title}: {waits}", fontsize=12, loc="left")
    axes.flat[-1].set_xlabel("time (ms)")
    shown = {"forward": FORWARD, "backward": BACKWARD, "gather parameters": GATHER, "reduce-scatter gradients": REDUCE}
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in shown.values()]
    handles.append(Rectangle((0, 0), 1, 1, fc="white", ec="#999999", hatch="////", lw=0))
    fig.legend(handles, [*shown, "GPU idle"], loc="outside upper center", ncols=5, fontsize=11)
    return fig


COLOURS_OF_KINDS = {
    "parameters": plotting.BLUE,
    "optimizer": plotting.GREEN,
    "gradients": plotting.ORANGE,
    "buffers": plotting.PURPLE,
    "activations": plotting.SKY,
}
PASSES = {"forward": 1.0, "backward": 2.0, "optimizer": 1.1}  # how wide each is drawn


def all_ranks(states: dict[str, list], unit: str):
    """What every rank held at some moments, as heat maps: a row for each rank, from the top, a column for each element.

    states: caption -> the ranks' tensors of one length, in rank order; NaN is an empty place, and white
    unit:   what the numbers are, for the scale of colours
    """
    rows = {caption: [tensor.tolist() for tensor in tensors] for caption, tensors in states.items()}
    known = [value for held in rows.values() for row in held for value in row if not math.isnan(value)]
    fig, axes = plt.subplots(1, len(rows), figsize=(9.5, 3.4), sharey=True, squeeze=False)
    for ax, (caption, held) in zip(axes[0], rows.items(), strict=True):
        image = ax.imshow(held, "viridis", aspect="auto", interpolation="nearest", vmin=min(known), vmax=max(known))
        ax.set(xlabel="element")
        ax.set_title(caption, fontsize=13)
    axes[0, 0].set_ylabel("rank")
    fig.colorbar(image, ax=axes[0], label=unit, pad=0.02)
    return fig


def draw_stages(panels: dict[str, tuple[list[dict[str, int]], int, int]]):
    """Memory over a step, one panel for each title, from `memory.over_a_step`, on the same two axes: each pass has the
    same width in all of them, however many operators it takes."""
    fig, axes = plt.subplots(1, len(panels), figsize=(11, 3.9), sharey=True, sharex=True)
    top = 1.2 * max(sum(line.values()) for lines, *_ in panels.values() for line in lines) / 2**20
    for ax, (title, (lines, *begins)) in zip(axes, panels.items(), strict=True):
        borders, times, left = [0, *begins, len(lines)], [], 0.0
        for (begin, end), (name, width) in zip(itertools.pairwise(borders), PASSES.items(), strict=True):
            times += [left + width * number / (end - begin) for number in range(end - begin)]
            ax.axvline(left, color="black", lw=1, ls=":")
            ax.text(left + width / 2, 0.985 * top, name, ha="center", va="top", size=10)
            left += width
        below = [0.0] * len(lines)
        for kind, colour in COLOURS_OF_KINDS.items():
            above = [low + line[kind] / 2**20 for low, line in zip(below, lines, strict=True)]
            ax.fill_between(times, below, above, color=colour, label=kind, lw=0, step="post")
            below = above
        highest = max(range(len(lines)), key=below.__getitem__)
        ax.annotate(f"{below[highest]:.1f}", (times[highest], below[highest]), (4, 2), textcoords="offset points",
                    weight="bold")  # fmt: skip
        ax.annotate(f"{below[-1]:.1f}", (left, below[-1]), (-3, -3), textcoords="offset points", ha="right", va="top",
                    color="white", weight="bold")  # fmt: skip
        ax.set(xlim=(0, left), ylim=(0, top), xticks=[], title=title)
    axes[0].set_ylabel("memory of a rank (MiB)")
    handles, _ = axes[0].get_legend_handles_labels()
    names = [
        "parameters",
        "optimizer state",
        "gradients",
        "whole for a moment, for messages",
        "activations and temporaries",
    ]
    fig.legend(handles, names, loc="outside upper center", ncols=5, fontsize=11, columnspacing=1.2)
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
        events.append(("forward" if following > place else "backward", number[trained.flats[place]]))

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
                words = ["The optimizer steps the shards."]
                words += [f"Still whole, and freed right afterwards: {names[kept]}." for kept in sorted(gathered)]
            words += [f"Meanwhile {names[other]} is gathered." for other in sorted(flying)]
            words += [f"The gradients of {names[other]} are reduce-scattered." for other in sorted(sent)]
            found.append(
                (_frame(names, ranks, (what, unit), gathered, flying, gradient, sent, shards), " ".join(words))
            )
    return found


def _frame(names, ranks, computes, gathered, flying, gradient, sent, shards):
    fig, ax = plt.subplots(figsize=(9, 3.7))
    what, current = computes
    for unit, name in enumerate(names):
        left = 1.25 * unit
        rows = (
            (0, plotting.BLUE, unit in gathered, "gathering" if unit in flying else "", True),
            (1.25, plotting.ORANGE, unit in gradient, "reducing" if unit in sent else "", unit in shards),
            (2.5, plotting.GREEN, False, "", True),
        )
        for top, colour, whole, travels, shard in rows:
            ax.add_patch(Rectangle((left, top), 1, 1, fc="white", ec="#999999", lw=1, ls=":"))
            if whole:
                ax.add_patch(Rectangle((left, top), 1, 1, fc=colour, alpha=0.35, lw=0))
            if travels:
                ax.add_patch(Rectangle((left, top), 1, 1, fc="none", ec=colour, hatch="///", lw=0))
            if shard:
                ax.add_patch(Rectangle((left, top), 1 / ranks, 1, fc=colour, lw=0))
            ground = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8 if travels else 0.0}
            text = travels or ("whole" if whole else "")
            ax.text(left + 0.62, top + 0.5, text, ha="center", va="center", size=11, bbox=ground if text else None)
        active = what != "step" and unit == current
        ax.text(left + 0.5, -0.12, name, ha="center", va="bottom", size=12, weight="bold" if active else "normal")
        if active:
            ax.text(left + 0.5, 3.65, what, ha="center", va="top", size=12, weight="bold")
            ax.add_patch(Rectangle((left - 0.06, -0.06), 1.12, 3.62, fc="none", ec="black", lw=2))
    ax.set(xlim=(-0.15, 1.25 * len(names)), ylim=(4.0, -0.5), xticks=[])
    ax.set_yticks([0.5, 1.75, 3.0], ["parameters", "gradients", "optimizer"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


def step_of_blocks(tokens: int, bandwidth: float, ahead: int, larger: int = 1) -> list[StreamSpan]:
    """A simulated step of eight blocks of Llama 7B's size (202 million parameters) on GPUs that reach 500 TFLOP/s, with
    bf16 parameters and float32 gradients, among so many ranks that (N-1)/N is 1.

    tokens:    of each GPU
    bandwidth: of the ring, GB/s
    larger:    by how much every second block is larger for the network, as a mixture of experts is
    """
    block, seconds = 202e6, 1 / (bandwidth * 1e9)
    sizes = [block, block * larger] * 4
    gather, reduce = [2 * size * seconds for size in sizes], [4 * size * seconds for size in sizes]
    return simulate([2 * block * tokens / 500e12] * 8, gather, reduce, ahead)


# What the snapshot calls an allocation -> the line on which it is drawn.
LANES = {
    "unshard: all-gather buffer": "message of a gather",
    "unshard: full parameter": "whole parameters",
    "reduce-scatter: input": "whole gradients",
}


def snapshot_of_step(rows: list[dict], step: int) -> list[tuple[str, int, float, float]]:
    """What a memory snapshot of a training with fully_shard says of one step, as (line, unit, start, end): how long
    each unit's message, parameters and gradients were allocated. Units count from 1, in the order of the forward pass.
    The clock is the row of the snapshot: its order is known, its times are those of a debugger.

    rows: of the recording trace_memory_fsdp2_debug_3steps, which has 16 gathers and 8 reduce-scatters in each step
    """
    gathers = [number for number, row in enumerate(rows) if row["action"] == "alloc" and row["stream"] == "gather"]
    begin, end = gathers[16 * step], [*gathers, len(rows)][16 * step + 16]
    forward, backward = [*range(1, 9)], [*range(8, 0, -1)]
    order = dict(zip(LANES.values(), (forward + backward, forward + backward, backward), strict=True))
    spans: dict[str, list[list[int]]] = {line: [] for line in LANES.values()}  # [start, end, pieces that are alive]
    alive = {}
    for number, row in enumerate(rows[begin:end]):
        line, key = LANES.get(row["what"]), (row["block"], row["stream"])
        if row["action"] == "alloc" and line:
            if line != "whole parameters" or not spans[line] or not spans[line][-1][2]:
                spans[line].append([number, end - begin, 0])
            spans[line][-1][2] += 1  # a unit has several parameters
            alive[key] = spans[line][-1]
        if row["action"] == "free" and key in alive:
            span = alive.pop(key)
            span[2] -= 1
            span[1] = number
    return [
        (line, unit, start, end)
        for line, units in order.items()
        for unit, (start, end, _) in zip(units, spans[line], strict=True)
    ]


def backward_half(events: list[tuple[str, int, float, float]]) -> list[tuple[str, int, float, float]]:
    """Those events of `snapshot_of_step` that begin in the backward pass, in their order: from the second gather of
    the last unit on."""
    turn = max(start for line, unit, start, _ in events if (line, unit) == ("message of a gather", 8))
    return sorted((event for event in events if event[2] >= turn), key=lambda event: event[2])


def peak_of_last_step(rows: list[dict]) -> int:
    """The most bytes that the optimizer had at once in the last step of the recording, which is where its moments
    exist already. rows: of the recording trace_memory_fsdp2_debug_3steps."""
    gathers = [number for number, row in enumerate(rows) if row["stream"] == "gather"]
    alive, most = {}, 0
    for row in rows[gathers[-1] :]:
        if row["what"] == "optimizer":
            alive[row["block"]] = row["bytes"] * (row["action"] == "alloc")
            most = max(most, sum(alive.values()))
    return most


def draw_snapshot(events: list[tuple[str, int, float, float]]):
    """Events of `backward_half` in three rows, each with the number of its unit; grey is the time of unit 7."""
    rows = {"message of a gather": GATHER, "whole parameters": BACKWARD, "whole gradients": REDUCE}
    fig, ax = plt.subplots(figsize=(9.5, 2.7))
    for line, unit, start, end in events:
        row = list(rows).index(line)
        ax.barh(row, end - start, 0.75, start, color=rows[line], ec="white")
        if end - start > 12:
            ax.text((start + end) / 2, row, str(unit), ha="center", va="center", color="white")
        if (line, unit) == ("whole parameters", 7):
            ax.axvspan(start, end, color="#DDDDDD", zorder=0)
            ax.text(start + 1, -0.55, "unit 7 computes", va="bottom")
    ax.set(yticks=range(3), xticks=[], xlabel="what the allocator was asked for in the backward pass, in its order")
    ax.set_yticklabels(rows)
    ax.set_ylim(2.5, -1.1)
    return fig


# What the snapshot of the run that died calls an allocation -> the band in which it is drawn.
BANDS = {
    "parameters": ("sharded bf16 parameters",),
    "gathered": ("unshard",),
    "activations": ("forward", "batch"),
    "logits and loss": ("loss",),
}


def snapshot_bands(rows: list[dict]) -> list[dict[str, int]]:
    """After each event of the recording trace_memory_fsdp2_llama3_8b_4xa100_oom, the bytes by kind, as in BANDS; and
    "asked for", the request that fails at the end. The logits, which the model's last layer makes, are of the loss."""
    now = dict.fromkeys([*BANDS, "asked for"], 0)
    now["parameters"] = rows[0]["allocated_bytes"]
    alive, lines = {}, []
    for row in rows:
        band = next((band for band, words in BANDS.items() if row["what"].startswith(words)), "activations")
        key = row["block"], row["stream"]
        if row["action"] == "alloc":
            if row["bytes"] == 8192 * 128_256 * 2 and band == "activations":
                band = "logits and loss"
            alive[key] = band, row["bytes"]
            now[band] += row["bytes"]
        if row["action"] == "free" and key in alive:
            band, size = alive.pop(key)
            now[band] -= size
        if row["action"] == "oom":
            now["asked for"] = row["bytes"]
        lines.append(dict(now))
    return lines


def draw_out_of_memory(lines: list[dict[str, int]], limit: float, holes: float):
    """`snapshot_bands` as bands over the events of a snapshot, the GiB that PyTorch can have, and on the bands at the
    end those that its allocator held in holes when the request failed."""
    fig, ax = plt.subplots(figsize=(9.5, 4.2))
    colours = [*list(COLOURS_OF_KINDS.values())[:1], plotting.PURPLE, plotting.SKY, plotting.VERMILION]
    lines = [*lines, *[lines[-1]] * 40]  # what was asked for is seen, too
    below = [0.0] * len(lines)
    for kind, colour in zip(BANDS, colours, strict=True):
        above = [low + line[kind] / 2**30 for low, line in zip(below, lines, strict=True)]
        ax.fill_between(range(len(lines)), below, above, color=colour, lw=0, step="post", label=kind)
        below = above
    asked = [line["asked for"] > 0 for line in lines]
    above = [low + holes for low in below]
    ax.fill_between(range(len(lines)), below, above, asked, fc="#999999", lw=0, label="holes")
    below = above
    above = [low + line["asked for"] / 2**30 for low, line in zip(below, lines, strict=True)]
    ax.fill_between(range(len(lines)), below, above, asked, fc="white", ec=plotting.VERMILION, hatch="////", lw=1,
                    label="request that failed")  # fmt: skip
    ax.axhline(limit, color="black", lw=1.5, ls="--")
    ax.annotate(f"{limit:.1f} GiB that PyTorch can have", (0, limit), (4, 4), textcoords="offset points")
    ax.set(xlabel="events of the allocator, in their order", ylabel="GiB", xticks=[], xlim=(0, len(lines)),
           ylim=(0, 1.12 * limit))  # fmt: skip
    fig.legend(loc="outside upper center", ncols=6, fontsize=11, columnspacing=1.2)
    return fig


# The collectives of the recording trace_fsdp_llama70b_8xmi300x, and how the page calls them.
NCCL_NAMES = {"allgather_base": "all-gather", "reduce_scatter_base": "reduce-scatter"}


def waiting(rows: list[dict], collective: str) -> tuple[list[float], float]:
    """The milliseconds of each rank in one kind of collective, and those of the transfer, which is from the moment at
    which the last rank has come. rows: of the recording trace_fsdp_llama70b_8xmi300x."""
    found = [row for row in rows if row["collective"] == collective]
    ranks = sorted({row["rank"] for row in found if row["scope"] == "rank"})
    totals = [sum(row["total_ms"] for row in found if row["rank"] == rank) for rank in ranks]
    return totals, sum(row["total_ms"] for row in found if row["scope"] == "all ranks")


def draw_waiting(rows: list[dict]):
    """For each rank the seconds in each kind of collective: the transfer, and waiting for the last rank. rows: of the
    recording trace_fsdp_llama70b_8xmi300x."""
    fig, axes = plt.subplots(1, 2, figsize=(9.5, 3.3), sharex=True, sharey=True)
    for ax, (collective, name), colour in zip(axes, NCCL_NAMES.items(), (GATHER, REDUCE), strict=True):
        totals, transfer = waiting(rows, collective)
        ax.barh(range(len(totals)), transfer / 1e3, color=colour)
        bars = ax.barh(range(len(totals)), [(total - transfer) / 1e3 for total in totals], left=transfer / 1e3,
                       fc="white", ec="#999999", hatch="////")  # fmt: skip
        ax.bar_label(bars, [f"{total / 1e3:.1f} s" for total in totals], padding=4, size=11)
        ax.set(title=f"{name}s", xlabel="seconds of two steps")
    axes[0].set_yticks(range(len(totals)), [f"rank {rank}" for rank in range(len(totals))])
    axes[0].set(ylim=(len(totals) - 0.4, -0.6), xlim=(0, 13.8))
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (GATHER, REDUCE)]
    handles.append(Rectangle((0, 0), 1, 1, fc="white", ec="#999999", hatch="////"))
    names = ["the transfer of all-gathers", "of reduce-scatters", "waiting for the last rank"]
    fig.legend(handles, names, loc="outside upper center", ncols=3)
    return fig


def print_waiting(rows: list[dict]) -> None:
    """What `draw_waiting` shows, in numbers: how often, how long, and the share that is waiting."""
    for collective, name in NCCL_NAMES.items():
        totals, transfer = waiting(rows, collective)
        alone = next(row for row in rows if row["collective"] == collective and row["scope"] == "all ranks")
        share, bus = 1 - transfer * len(totals) / sum(totals), alone["busbw_GiBps"] * 2**30 / 1e9
        print(f"{name:14} of a layer: {alone['count']} times, {alone['mean_us'] / 1e3:5.2f} ms each; ", end="")
        print(f"bus bandwidth {bus:.0f} GB/s; {share:.0%} of all ranks' time is waiting")
        own = f"rank 0 {totals[0] / 1e3:.1f} s, rank 4 {totals[4] / 1e3:.1f} s"
        print(f"     {own}, the transfer alone {transfer / 1e3:.1f} s")
    rank_0 = sum(row["total_ms"] for row in rows if row["rank"] == 0 and row["scope"] == "rank")
    print(f"rank 0 in collectives: {rank_0 / 1e3:.1f} s")


class StreamLab(Sliders):
    """A step of eight blocks of Llama 7B's size, bf16 with float32 gradients, on GPUs that reach 500 TFLOP/s; every
    second block may be larger for the network, as a mixture of experts is."""

    def __init__(self):
        controls = {
            "tokens": self.choice("tokens per GPU", [1024, 2048, 4096, 8192, 16384, 32768], 4096),
            "bandwidth": self.choice("GB/s of the ring", [12.5, 25, 50, 100, 200, 300, 450], 300),
            "ahead": self.choice("units ahead", [0, 1, 2, 3], 1),
            "larger": self.choice("larger blocks", [1, 2, 4, 8], 4),
        }
        super().__init__(controls)

    @staticmethod
    def choice(what, options, value):
        return widgets.SelectionSlider(options=options, value=value, description=what, continuous_update=False)

    def draw(self, tokens, bandwidth, ahead, larger):
        spans = step_of_blocks(tokens, bandwidth, ahead, larger)
        return draw_streams({f"{tokens:,} tokens per GPU, {bandwidth} GB/s, {ahead} ahead": spans})
