"""The chapter's own pictures: a schedule step by step, how long stages and steps take, where stages and groups of
ranks are placed, a backward pass in two halves, and a recorded step in numbers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import recordings
from common.lab.plotting import ACTIONS, BLACK, BLUE, IDLE, ORANGE, PALETTE, PURPLE, SKY, VERMILION, png
from course.pipeline import simulator
from course.pipeline.schedules import Schedule, build, parse

HEIGHT = 0.7  # of a row's boxes


class Step(NamedTuple):
    """A PNG for a flipbook, the time that it shows, what the ranks do and store in words, and what begins."""

    png: bytes
    time: str
    words: str
    caption: str


def steps(timeline: simulator.Timeline, unit: str = "units", until: float | None = None) -> list[Step]:
    """A picture for each moment at which some rank begins an action.

    It shows what has been done so far; what each rank does now, or which message it waits for; and of which
    micro-batches it stores the activations. An arrow is a message whose receiver begins to use it now. The axis ends
    at `until`, or with the timeline.
    """
    events = [event for own in timeline.ranks for event in own]
    ended = {event.action: event.end for event in events}
    rank_of = {event.action.stage: rank for rank, own in enumerate(timeline.ranks) for event in own}
    moments = sorted({event.start for event in events})
    end = float(timeline.makespan) if until is None else until
    return [_step(timeline, now, ended, rank_of, unit, end) for now in moments if now < end]


def _step(timeline, now, ended, rank_of, unit, end):
    ranks = len(timeline.ranks)
    events = [event for own in timeline.ranks for event in own]
    fig = plt.figure(figsize=(9.5, 0.62 * ranks + 0.6), layout="none")  # a fixed layout: frames are many
    ax = fig.add_axes((0.07, 0.6 / (0.62 * ranks + 0.6), 0.92, 1 - 0.62 / (0.62 * ranks + 0.6)))
    captions, room = [], 0.62 * end  # to the right of the timeline, for words
    until = float(min(event.end for event in events if event.start <= now < event.end))
    for rank, own in enumerate(timeline.ranks):
        ax.add_patch(Rectangle((0, rank), until, HEIGHT, fc=IDLE, lw=0))  # what comes later stays white
        for event in (event for event in own if event.start <= now):
            _box(ax, rank, event, event.end > now, inches=8.7 * float(event.end - event.start) / (end + room))
        doing = next((event.action for event in own if event.start <= now < event.end), None)
        coming = next((event.action for event in own if event.start > now), None)
        source = _input(doing or coming, ended) if doing or coming else None
        words = "done"
        if doing:
            words = _name(doing)
            if source and rank_of[source.stage] != rank and any(event.start == now for event in own):
                _arrow(ax, source, rank_of[source.stage], rank, float(ended[source]), float(now))
                words += f", with {_message(source)} from rank {rank_of[source.stage]}"
        elif coming:
            words = f"waits for {_message(source)} {source.microbatch} from rank {rank_of[source.stage]}"
        stored = sorted(_stored(own, now))
        colour = ACTIONS[doing.kind][1] if doing else BLACK
        ax.text(end * 1.02, rank + 0.2, words, va="center", size=11, color=colour)
        stores = f"stores micro-batch {', '.join(map(str, stored))}" if stored else "stores nothing"
        captions.append(f"rank {rank}: {words}, {stores}")
        ax.text(end * 1.02, rank + 0.56, stores, va="center", size=11)
    ax.axvline(float(now), color=BLACK, lw=1.2, ls=":")
    ax.set(xlim=(0, end + room), ylim=(ranks - 0.2, -0.05))
    ax.text(end * 1.04, ranks - 0.02, f"time ({unit})", va="center", size=11)
    ax.set_xticks(range(0, int(end) + 1, 2))
    ax.set_yticks([rank + HEIGHT / 2 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0, labelsize=11)
    ax.spines[:].set_visible(False)
    begun = [f"rank {rank} begins {_name(event.action)}" for rank, own in enumerate(timeline.ranks) for event in own
             if event.start == now]  # fmt: skip
    return Step(png(fig, dpi=100), f"{float(now):g}", "; ".join(captions), f"Time {float(now):g}: {', '.join(begun)}.")


def _box(ax, rank, event, running, inches):
    start, end = float(event.start), float(event.end)
    _, kind, microbatch = event.action
    edge = {"ec": BLACK, "lw": 2.2, "zorder": 3} if running else {"ec": "white", "lw": 0.8}
    ax.add_patch(Rectangle((start, rank), end - start, HEIGHT, fc=ACTIONS[kind][1], **edge))
    ink = "white" if kind in "FB" else "black"
    size = min(12, 72 * inches / 1.1)
    ax.text((start + end) / 2, rank + HEIGHT / 2 + 0.01, str(microbatch), ha="center", va="center", size=size,
            color=ink, zorder=4)  # fmt: skip


def _arrow(ax, action, sender, rank, sent, now):
    """From the box that computed a message to the one that uses it, in the message's colour."""
    down = sender < rank
    begin = (sent - 0.35, sender + (HEIGHT if down else 0))
    tip = (now + (0.7 if down else 0.3), rank + (0 if down else HEIGHT))
    style = {"arrowstyle": "-|>", "lw": 2, "color": ACTIONS[action.kind][1], "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", tip, begin, arrowprops=style, zorder=5)


def _message(source):
    return "activations" if source.kind == "F" else "gradient"


def _name(action):
    return f"{ACTIONS[action.kind][0]} {action.microbatch}"


def _input(action, known):
    """The action whose result this one needs, of another stage; None for the first and the last stage."""
    stage, kind, m = action
    if kind == "F":
        wanted = [(stage - 1, "F", m)]
    elif kind in "BI":
        wanted = [(stage + 1, kind, m) for kind in "BI"]
    else:
        wanted = []
    return next((simulator.Action(*other) for other in wanted if other in known), None)


def _stored(own, now):
    """The micro-batches whose forward has begun and whose backward, weight part included, is not over."""
    begun = {(e.action.stage, e.action.microbatch) for e in own if e.action.kind == "F" and e.start <= now}
    over = {(e.action.stage, e.action.microbatch) for e in own if e.action.kind in "BW" and e.end <= now}
    return {microbatch for _, microbatch in begun - over}  # some stage of the rank stores it


def stage_times(cuts: dict[str, Sequence[int]], seconds: Sequence[float]) -> plt.Figure:
    """How long each stage takes, for several ways of cutting a model.

    cuts: title -> for each stage, the number of the first layer after it
    seconds: time of each layer; the first is the embedding and the last the output layer, all others are blocks
    """
    fig, axes = plt.subplots(1, len(cuts), figsize=(9.5, 3.4), sharey=True)
    for ax, (title, ends) in zip(axes, cuts.items(), strict=True):
        for stage, (begin, end) in enumerate(pairwise((0, *ends))):
            total = 1e3 * sum(seconds[begin:end])
            blocks = range(max(begin, 1), min(end, len(seconds) - 1))
            ax.bar(stage, total, color=PURPLE)
            ax.bar(stage, 1e3 * sum(seconds[layer] for layer in blocks), color=BLUE)
            words = f"{len(blocks)} block{'s' * (len(blocks) != 1)}"
            ax.text(stage, total, words, ha="center", va="bottom", size=11)
        ax.set(title=title, xticks=range(len(ends)), xlabel="stage")
        ax.margins(y=0.12)
    axes[0].set_ylabel("time of a micro-batch (ms)")
    fig.legend([Rectangle((0, 0), 1, 1, color=colour) for colour in (BLUE, PURPLE)],
               ["blocks", "embedding, output layer with loss"], loc="outside lower center", ncols=2)  # fmt: skip
    return fig


def times_by_size(sizes: Sequence[int], steps: dict[int, Sequence[float]]) -> plt.Figure:
    """Time of a step by the examples in a micro-batch, a line for each number of ranks, with a dot at the quickest.

    steps: number of ranks -> for each size the time of a step, as a multiple of the ideal one
    """
    fig, ax = plt.subplots(figsize=(8, 3.8))
    for colour, (ranks, times) in zip((SKY, BLUE, PURPLE), steps.items(), strict=True):
        ax.plot(sizes, times, color=colour)
        ax.plot(sizes[times.index(min(times))], min(times), "o", color=colour)
        ax.text(1.06 * sizes[-1], times[-1], f"{ranks} ranks", va="center", color=colour)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="examples in a micro-batch", xticks=sizes, xticklabels=sizes, xlim=(0.9, sizes[-1]))
    ax.set_ylim(0, None)
    ax.set_ylabel("time of a step (ideal: 1)")
    return fig


def bubbles_by_message(
    delays: Sequence[float], bubbles: dict[str, Sequence[float]], marks: dict[str, float]
) -> plt.Figure:
    """The bubble of several schedules by the time of a message; GPipe's, to compare with, is dashed.

    delays:  times of a message, in forward passes of a rank
    bubbles: schedule -> its bubble for each of them, in percent
    marks:   words -> where to draw a dotted line with them
    """
    fig, ax = plt.subplots(figsize=(8.5, 4.2))
    top = max(max(line) for line in bubbles.values())
    heights = _apart([line[-1] for line in bubbles.values()], 0.075 * top)
    for (name, line), height, colour in zip(bubbles.items(), heights, PALETTE, strict=False):
        ax.plot(delays, line, color=colour, ls="--" if name == "gpipe" else "-")
        ax.text(1.02 * delays[-1], height, name, va="center", color=colour, size=12)
    for words, delay in marks.items():
        ax.axvline(delay, color="#666666", ls=":", lw=1.5)
        ax.text(delay + 0.01, 1.19 * top, words, va="top", size=11, color="#666666")
    ax.set(xlabel="time of a message (forward pass of a rank = 1)", xlim=(0, delays[-1]), ylim=(0, 1.2 * top))
    ax.set_ylabel("bubble (% of the time)")
    return fig


def _apart(heights, least):
    """The same heights, the lower ones pushed down and the upper ones up until labels have room."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + least)
    return placed


def placements(ranks: int) -> plt.Figure:
    """Two stages on each rank, in a loop and in a V: which stage is where, and the way of a micro-batch forward."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 0.62 * ranks + 0.8))
    for ax, title in zip(axes, ("in a loop", "in a V"), strict=True):
        order = [(rank, 0) for rank in range(ranks)]
        order += [(rank, 1) for rank in (range(ranks) if title == "in a loop" else reversed(range(ranks)))]
        places = [(3 * column, rank) for rank, column in order]
        for stage, (x, y) in enumerate(places):
            # A rank's second stage is paler, as in the timelines.
            ax.add_patch(Rectangle((x - 0.7, y - 0.28), 1.4, 0.56, fc=BLUE if x == 0 else SKY, lw=0))
            ink = "white" if x == 0 else "black"
            ax.text(x, y, f"stage {stage}", ha="center", va="center", size=12, color=ink)
        for (x, y), (to_x, to_y) in pairwise(places):
            begin: tuple[float, float] = (x, y + 0.28)
            tip: tuple[float, float] = (to_x, to_y - 0.28)
            if to_x > x:  # from a rank's first stages to the second ones
                begin, tip = (x + 0.75, y), (to_x - 0.75, to_y)
            elif to_y < y:
                begin, tip = (x, y - 0.28), (to_x, to_y + 0.28)
            ax.annotate("", tip, begin, arrowprops={"arrowstyle": "-|>", "lw": 2, "color": BLACK, "shrinkA": 0})
        ax.set(title=title, xlim=(-1.2, 4.2), ylim=(ranks - 0.5, -0.5), xticks=[])
        ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return fig


def two_halves() -> plt.Figure:
    """Backward of y = relu(x @ w1) @ w2, cut in the half for which the rank before waits and the half for which
    nobody does."""
    fig, ax = plt.subplots(figsize=(9.5, 3.3))
    columns = {"x": 0, "a": 3, "h": 6, "y": 9}

    def box(x, y, text, colour, ink="black", width=1.3):
        ax.add_patch(Rectangle((x - width / 2, y - 0.3), width, 0.6, fc=colour, lw=0))
        ax.text(x, y, text, ha="center", va="center", size=12, color=ink)

    def arrow(begin, tip, colour, style="-", words=""):
        how = {"arrowstyle": "-|>", "lw": 2, "color": colour, "ls": style, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", tip, begin, arrowprops=how)
        ax.text((begin[0] + tip[0]) / 2, begin[1] + 0.12, words, ha="center", va="bottom", size=11, color=colour)

    forward, given, later = (ACTIONS[kind][1] for kind in "FIW")
    for name, x in columns.items():
        box(x, 3, name, forward, "white")
        box(x, 1.7, f"grad_{name}", given)
    for (left, right), words in zip(pairwise(columns.values()), ("@ w1", "relu", "@ w2"), strict=True):
        arrow((left + 0.7, 3), (right - 0.7, 3), forward, words=words)
    for (left, right), words in zip(pairwise(columns.values()), ("@ w1.T", "* (a > 0)", "@ w2.T"), strict=True):
        arrow((right - 0.7, 1.7), (left + 0.7, 1.7), given, words=words)
    for (kept, known), words in zip((("x", "a"), ("h", "y")), ("x.T @ grad_a", "h.T @ grad_y"), strict=True):
        middle = (columns[kept] + columns[known]) / 2
        box(middle, 0.35, f"grad_w{1 if kept == 'x' else 2} = {words}", later, width=3.7)
        arrow((columns[known], 1.38), (middle + 1.0, 0.68), later, "--")
        arrow((columns[kept] + 0.62, 2.68), (middle - 0.3, 0.68), later, "--")
    arrow((-0.7, 1.7), (-1.9, 1.7), BLACK)
    ax.text(-1.3, 1.25, "sent\nat once", ha="center", va="top", size=11)
    for y, words, colour in ((3, "forward: F", forward), (1.7, "for input: I", given), (0.35, "for weight: W", later)):
        ax.text(10.1, y, words, va="center", size=12, color=colour)
    ax.set(xlim=(-2.1, 12.6), ylim=(-0.1, 3.6))
    ax.set_axis_off()
    return fig


def two_graphs() -> plt.Figure:
    """Two processes, each with an autograd graph of its own: what crosses between them, and where each graph ends."""
    forward, backward = ACTIONS["F"][1], ACTIONS["B"][1]
    fig, ax = plt.subplots(figsize=(9.5, 3.9))
    for left, right, words in ((-0.9, 5.15, "process of rank 0"), (6.65, 12.7, "process of rank 1")):
        ax.add_patch(Rectangle((left, -0.75), right - left, 4.4, fc="#F2F2F2", ec="#999999"))
        ax.text((left + right) / 2, 3.25, words, ha="center", va="center", size=13)

    def box(x, y, text, colour, ink="white", width=1.5):
        ax.add_patch(Rectangle((x - width / 2, y - 0.31), width, 0.62, fc=colour, lw=0))
        ax.text(x, y, text, ha="center", va="center", size=11, color=ink)

    def arrow(begin, tip, y, colour, words="", wide=2.0):
        how = {"arrowstyle": "-|>", "lw": wide, "color": colour, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (tip, y), (begin, y), arrowprops=how)
        ax.text((begin + tip) / 2, y + 0.16, words, ha="center", va="bottom", size=11, color=colour)

    for x, text in (
        (0.1, "images"),
        (2.1, "layers"),
        (4.1, "output"),
        (7.7, "received"),
        (9.7, "layers"),
        (11.7, "loss"),
    ):
        box(x, 2.2, text, forward if text != "layers" else "#777777")
    for x, text in (
        (2.1, "layers' .grad"),
        (4.1, "gradient"),
        (7.7, ".grad"),
        (9.7, "layers' .grad"),
        (11.7, "backward()"),
    ):
        box(x, 0.3, text, backward if text != "layers' .grad" else "#777777")
    for begin, tip in ((0.85, 1.35), (2.85, 3.35), (8.45, 8.95), (10.45, 10.95)):
        arrow(begin, tip, 2.2, forward)
    for begin, tip in ((3.35, 2.85), (8.95, 8.45), (10.95, 10.45)):
        arrow(begin, tip, 0.3, backward)
    arrow(4.85, 6.95, 2.2, forward, "numbers", 3.5)
    arrow(6.95, 4.85, 0.3, backward, "numbers", 3.5)
    for x, y, words in (
        (4.0, 1.72, "detach():\nnumbers only"), (8.05, 1.72, "requires_grad_():\na graph begins"),
        (3.4, -0.17, "output.backward(gradient)"), (7.7, -0.17, "received.grad"),
    ):  # fmt: skip
        ax.text(x, y, words, ha="center", va="top", size=10.5)
    ax.set(xlim=(-1.0, 12.8), ylim=(-0.85, 3.75))
    ax.set_axis_off()
    return fig


def two_axes() -> plt.Figure:
    """Four ranks as two pipelines of two stages: what goes along a pipeline, and what between its replicas."""
    fig, ax = plt.subplots(figsize=(9.5, 3.6))
    for replica, y in enumerate((2.2, 0.0)):
        ax.text(-1.35, y, f"replica {replica}\nreads half {replica}", ha="right", va="center", size=12)
        for stage, x in enumerate((0, 5)):
            ax.add_patch(Rectangle((x - 1.1, y - 0.42), 2.2, 0.84, fc=PURPLE if stage else BLUE, lw=0))
            ax.text(
                x, y, f"rank {2 * stage + replica}: stage {stage}", ha="center", va="center", size=12, color="white"
            )
        for begin, tip, up, words in ((1.2, 3.8, 0.14, "activations"), (3.8, 1.2, -0.14, "their gradients")):
            ax.annotate(
                "", (tip, y + up), (begin, y + up), arrowprops={"arrowstyle": "-|>", "lw": 2, "color": "#555555"}
            )
            side = "bottom" if up > 0 else "top"
            ax.text(2.5, y + up + up / 2, words, ha="center", va=side, size=11, color="#555555")
    for x in (0, 5):
        arrows = {"arrowstyle": "<|-|>", "lw": 3, "color": ACTIONS["B"][1]}
        ax.annotate("", (x, 0.47), (x, 1.73), arrowprops=arrows)
    words = "along data: gradients of weights,\nonce in a step"
    ax.text(2.5, 1.1, words, ha="center", va="center", size=11, color=ACTIONS["B"][1])
    ax.text(2.5, 2.95, "along pipeline: for each micro-batch", ha="center", va="center", size=11, color="#555555")
    ax.set(xlim=(-3.2, 6.3), ylim=(-0.65, 3.15))
    ax.set_axis_off()
    return fig


def whole_stages(orders: dict[str, Sequence[simulator.Action]]) -> plt.Figure:
    """When each stage of a rank is whole under fully_shard, as PyTorch's runtime decides it: in colour while it is,
    dark where it computes.

    orders: title -> what the rank computes, in its order; a backward pass takes two units, all others one
    """
    # Here, since in a browser the chapter's other pictures are drawn without PyTorch.
    from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard

    fig, axes = plt.subplots(len(orders), 1, figsize=(9.5, 1.9 * len(orders) + 0.5), sharex=True)
    for ax, (title, actions) in zip(axes, orders.items(), strict=True):
        stages = sorted({action.stage for action in actions})
        row = {stage: place for place, stage in enumerate(stages)}
        begun, gathers, now = {}, 0, 0
        for step in _add_unshard_reshard([_Action.from_str(str(action)) for action in actions], max_active_stages=3):
            kind, at = step.computation_type.name, row[step.stage_index]
            if kind == "UNSHARD":
                begun[at], gathers = now, gathers + 1
            elif kind == "RESHARD":
                ax.add_patch(Rectangle((begun[at], at), now - begun.pop(at), HEIGHT, fc=SKY, lw=0))
            else:
                length = 1 if kind == "FORWARD" else 2
                ax.add_patch(Rectangle((now, at), length, HEIGHT, fc=BLUE if length == 1 else VERMILION, zorder=3))
                now += length
        for at in row.values():
            ax.add_patch(Rectangle((0, at), now, HEIGHT, fc=IDLE, lw=0, zorder=0))
        ax.set(
            title=f"{title}: {gathers} gathers of {len(stages)} stages, {gathers / len(stages):g} of each in the mean"
        )
        ax.set(xlim=(0, now), ylim=(len(stages) - 0.3, -0.05), xticks=[])
        ax.set_yticks([at + HEIGHT / 2 for at in row.values()], [f"stage {stage}" for stage in stages])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    names = {"forward": BLUE, "backward": VERMILION, "whole": SKY, "in shards": IDLE}
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
    fig.legend(handles, names, loc="outside lower center", ncols=4)
    return fig


def print_recorded_step() -> None:
    """What a profiler has counted in one step of Llama 3 8B on four A100s, one pipeline: means over the four ranks."""
    rows = recordings.read("trace_summary_torchtitan_parallelism_a100")
    run: dict[Any, Any] = {row["item"]: row for row in rows if row["workload"] == "llama3-8b-pp"}
    step = 1e3 * run["idle"]["step_s"]
    mean = {item: row["ms_or_GiB_mean"] for item, row in run.items()}
    shares = {
        "compute": mean["compute kernels"],
        "other messages": mean["communication kernels"] - mean["all_reduce"],
        "all-reduce": mean["all_reduce"],
        "idle": mean["idle"],
    }
    shares["not in the recording"] = step - sum(shares.values())
    m = run["send"]["count_per_rank"] * 4 / (2 * 1 + 2 * 2)  # the two ends send once per micro-batch, the others twice
    print(f"{m:.0f} micro-batches; by the formula {3 / (m + 3):.1%} of the time is bubble")
    for name, ms in shares.items():
        print(f"{name:21} {ms:6.1f} ms, {ms / step:5.1%} of the step")
    print(f"all-reduce: from {run['all_reduce']['ms_min_rank']} to {run['all_reduce']['ms_max_rank']} ms, by rank")
    print(f"all communication kernels together: {mean['communication kernels'] / step:.1%} of {step:,.0f} ms")
    message = run["idle"]["seq_len"] * 4096 * 2  # one sequence of Llama 3 8B's width, in bfloat16
    print(f"a rank in the middle sends and receives {2 * 2 * m * message / 1e6:.0f} MB")


def deadlock_and_remedy() -> list[tuple[bytes, str]]:
    """1F1B on two ranks with two micro-batches, step by step, as PNGs, each with what happens in words.

    First with sends and receives that block, each where an action needs it, until both ranks wait; then, from where
    they hung on and in larger strides, with messages in a common order, which are started without waiting.
    """
    blocking = [
        parse("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
        parse("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
    ]
    ordered = simulator.with_messages(build("1f1b", 2, 2))
    frames = []
    for schedule, blocks in ((blocking, True), (ordered, False)):
        found = moments(schedule, blocks)
        for moment in found if blocks else [found[at] for at in (3, 4, 6, -1)]:
            words = f"rank 0: {moment.words[0]}; rank 1: {moment.words[1]}"
            how = "messages that block" if blocks else "messages in a common order, not waited for"
            frames.append((png(meeting(schedule, moment), dpi=100), f"With {how}: {words}"))
    return frames


class Moment(NamedTuple):
    """How far each rank has come in its list, and what it does there in words."""

    done: list[int]
    words: list[str]
    stuck: bool


def moments(schedule: Schedule, blocking: bool) -> list[Moment]:
    """Two ranks go through lists that contain their messages, one action each at a time.

    blocking: a send or a receive returns when the other rank has come to its counterpart, as `dist.send` and
    `dist.recv` do with large messages; else both return at once, and an action waits for the message that it uses
    """
    done, found = [0] * len(schedule), []
    while True:
        now = [actions[at] if at < len(actions) else None for actions, at in zip(schedule, done, strict=True)]
        started = {action for actions, at in zip(schedule, done, strict=True) for action in actions[:at]}
        ready = [_ready(action, now, started, blocking) for action in now]
        words = [_doing(action, able) for action, able in zip(now, ready, strict=True)]
        found.append(Moment(list(done), words, not any(ready) and any(action is not None for action in now)))
        if not any(ready):
            return found
        done = [at + able for at, able in zip(done, ready, strict=True)]


def _ready(action, now, started, blocking) -> bool:
    if action is None:
        return False
    if action.kind in simulator.MESSAGES:
        return not blocking or simulator.counterpart(action) in now
    receive = action._replace(kind=f"RECV_{action.kind}")  # the last stage has none for its backward pass
    return receive not in started or simulator.counterpart(receive) in started


def _doing(action, able) -> str:
    if action is None:
        return "done"
    what = _label(action).replace("\n", " ")
    return what if able else f"waits in {what}"


def _label(action) -> str:
    kind = action.kind
    return f"{kind}{action.microbatch}" if len(kind) == 1 else f"{kind[:4].lower()}\n{kind[-1]}{action.microbatch}"


def meeting(schedule: Schedule, moment: Moment) -> plt.Figure:
    """The lists of two ranks at one moment: what is done is filled, what a rank does now is framed, and arrows are
    messages: solid where both ranks have come to them, dashed where the receiver has not."""
    fig, ax = plt.subplots(figsize=(9.5, 2.9))
    place = {action: (at, rank) for rank, actions in enumerate(schedule) for at, action in enumerate(actions)}
    for action, (at, rank) in place.items():
        done, now = at < moment.done[rank], at == moment.done[rank]
        colour = ACTIONS[action.kind[-1]][1]
        message = action.kind in simulator.MESSAGES
        face = (SKY if action.kind[-1] == "F" else ORANGE) if message else colour
        edge = (VERMILION if moment.stuck else BLACK) if now else "#999999"
        box = Rectangle((at + 0.04, 2 * rank), 0.92, 0.8, fc=face if done or now else "white", zorder=3 if now else 2)
        box.set(edgecolor=edge, linewidth=3 if now else 0.8)
        ax.add_patch(box)
        ink = "white" if (done or now) and not message else BLACK
        ax.text(at + 0.5, 2 * rank + 0.42, _label(action), ha="center", va="center", size=11, color=ink, zorder=4)
        if not action.kind.startswith("SEND") or at > moment.done[rank]:
            continue
        to_at, to_rank = place[simulator.counterpart(action)]
        arrived = to_at < moment.done[to_rank] and done
        if now and not moment.stuck:
            continue
        begin, tip = (
            (at + 0.5, 2 * rank + 0.8 * (to_rank > rank)),
            (to_at + 0.5, 2 * to_rank + 0.8 * (to_rank < rank)),
        )
        how = {"arrowstyle": "-|>", "lw": 2.2, "color": BLACK if arrived else VERMILION, "ls": "-" if arrived else "--"}
        ax.annotate("", tip, begin, arrowprops={**how, "shrinkA": 0, "shrinkB": 0}, zorder=5)
    longest = max(map(len, schedule))
    for rank, words in enumerate(moment.words):
        colour = VERMILION if moment.stuck and words != "done" else BLACK
        ax.text(longest + 0.2, 2 * rank + 0.42, words, va="center", size=12, color=colour)
    ax.set(xlim=(-0.1, longest + 2.7), ylim=(3.0, -0.2), xticks=[])
    ax.set_yticks([0.4, 2.4], ["rank 0", "rank 1"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig
