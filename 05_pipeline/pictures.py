"""The chapter's own pictures: a schedule step by step, how long stages and steps take, where stages and groups of
ranks are placed, and a backward pass in two halves."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

from common.lab.plotting import ACTIONS, BLACK, BLUE, IDLE, ORANGE, PALETTE, PURPLE, SKY, png
from course.pipeline import simulator

HEIGHT = 0.7  # of a row's boxes


class Step(NamedTuple):
    """A PNG for a flipbook, the time that it shows, what the ranks do and store in words, and what begins."""

    png: bytes
    time: str
    words: str
    caption: str


def steps(timeline: simulator.Timeline, unit: str = "units") -> list[Step]:
    """A picture for each moment at which some rank begins an action.

    It shows what has been done so far; what each rank does now, or which message it waits for; and of which
    micro-batches it stores the activations. An arrow is a message whose receiver begins to use it now.
    """
    events = [event for own in timeline.ranks for event in own]
    ended = {event.action: event.end for event in events}
    rank_of = {event.action.stage: rank for rank, own in enumerate(timeline.ranks) for event in own}
    moments = sorted({event.start for event in events})
    return [_step(timeline, now, ended, rank_of, unit) for now in moments]


def _step(timeline, now, ended, rank_of, unit):
    end, ranks = float(timeline.makespan), len(timeline.ranks)
    events = [event for own in timeline.ranks for event in own]
    fig = plt.figure(figsize=(9.5, 0.62 * ranks + 0.6), layout="none")  # a fixed layout: frames are many
    ax = fig.add_axes((0.07, 0.6 / (0.62 * ranks + 0.6), 0.92, 1 - 0.62 / (0.62 * ranks + 0.6)))
    told, room = [], 0.62 * end  # to the right of the timeline, for words
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
        told.append(f"rank {rank}: {words}, {stores}")
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
    return Step(png(fig, dpi=100), f"{float(now):g}", "; ".join(told), f"Time {float(now):g}: {', '.join(begun)}.")


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
    begun = {event.action.microbatch for event in own if event.action.kind == "F" and event.start <= now}
    return begun - {event.action.microbatch for event in own if event.action.kind in "BW" and event.end <= now}


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


def groups_on_nodes(axes: dict[str, int], axis: str, gpus_per_node: int) -> tuple[plt.Figure, list[list[int]]]:
    """The ranks of a mesh on their nodes, with the groups along one axis in colours; and those groups' ranks.

    axes: name -> size, outermost first, as for init_device_mesh: the last one varies fastest
    """
    names, sizes = list(axes), list(axes.values())
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    groups = ranks.movedim(names.index(axis), -1).flatten(0, -2).tolist()
    nodes, width = ranks.numel() // gpus_per_node, gpus_per_node * 1.6 - 0.36
    fig, ax = plt.subplots(figsize=(9, 1.75 * nodes + 0.5))
    for node in range(nodes):
        ax.add_patch(Rectangle((-0.62, 1.5 * node - 0.64), width, 1.28, fc="#F2F2F2", ec="#999999"))
        ax.text(-0.75, 1.5 * node, f"node {node}", ha="right", va="center", size=12)
    for number, group in enumerate(groups):
        places = [(1.6 * (rank % gpus_per_node), 1.5 * (rank // gpus_per_node)) for rank in group]
        for (x, y), (to_x, to_y) in pairwise(places):
            around = y + (0.55 if number % 2 else -0.55)  # other ranks that lie between
            line = [(x, y), (to_x, to_y)]
            if to_x - x > 1.7:  # not neighbours
                line[1:1] = [(x, around), (to_x, around)]
            ax.plot(*zip(*line, strict=True), color=PALETTE[number], lw=5, zorder=1)
        for rank, (x, y) in zip(group, places, strict=True):
            ax.add_patch(Rectangle((x - 0.52, y - 0.43), 1.04, 0.86, fc=PALETTE[number], lw=0, zorder=2))
            where = [int(place) for place in (ranks == rank).nonzero()[0]]
            words = "\n".join(f"{name} {place}" for name, place in zip(names, where, strict=True))
            ink = "black" if PALETTE[number] in (ORANGE, SKY) else "white"
            ax.text(x, y, f"rank {rank}\n{words}", ha="center", va="center", size=11, color=ink, zorder=3)
    ax.set(xlim=(-1.7, gpus_per_node * 1.6 - 0.9), ylim=(1.5 * nodes - 0.8, -0.7))
    ax.set_axis_off()
    return fig, groups
