"""Pictures of ranks that send each other something: who sends to whom, and which cells change.

A cell is painted in the colours of the ranks whose data is in it, as in `common.lab.plotting.collective`. Cells that an
operation has changed are lit: they have a thick frame on yellow ground, and all others are pale.
"""

from collections.abc import Callable, Iterator, Sequence
from math import cos, pi, sin, tan
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from common.lab.launch import launch
from common.lab.plotting import BLACK, BLUE, GREEN, ORANGE, PALETTE, PURPLE, SKY, VERMILION, YELLOW, digits
from course.intro import by_hand

LINK_GREY = "#B8B8B8"
FROM_0, TO_0 = [(0, rank) for rank in range(1, 4)], [(rank, 0) for rank in range(1, 4)]
ALL = [(source, target) for source in range(4) for target in range(4) if source != target]
Message = tuple[int, int, list]  # from rank, to rank, the numbers in it


def cell(ax, x: float, y: float, value, inch: float, lit: bool, scrap: bool = False) -> None:
    """One number in a box of 0.9 x 0.8 at (x, y): a stripe for each rank whose data is in it. None: an empty place."""
    ranks = [] if value is None else digits(value)
    pale = 0.0 if lit else 0.62
    if lit:
        ax.add_patch(Rectangle((x - 0.03, y + 0.02), 1.06, 0.96, color=YELLOW, lw=0))
    for stripe, rank in enumerate(ranks):
        colour = LINK_GREY if scrap else PALETTE[rank]
        mixed = [channel + (1 - channel) * pale for channel in to_rgb(colour)]
        ax.add_patch(Rectangle((x + 0.05 + stripe * 0.9 / len(ranks), y + 0.1), 0.9 / len(ranks), 0.8, fc=mixed, lw=0))
    edge: dict[str, Any] = {"lw": 2.5, "ec": BLACK} if lit else {"lw": 1, "ec": "#777777"}
    ax.add_patch(Rectangle((x + 0.05, y + 0.1), 0.9, 0.8, fill=False, ls="-" if ranks or value == 0 else ":", **edge))
    if value is not None:
        ground = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none"}
        size = min(13, 72 * 0.68 * inch / max(2.5, 0.62 * len(str(value))))
        ink = "#777777" if scrap else BLACK
        ax.text(x + 0.5, y + 0.52, str(value), ha="center", va="center", size=size, color=ink, bbox=ground)


def moved(
    title: str,
    before: Sequence[list],
    after: Sequence[list],
    arrows: list[tuple[int, int]],
    scrap: Sequence[int] = (),
    ranks_per_host: int = 0,
) -> Figure:
    """One operation: what each rank holds before and after, and an arrow for each pair (from rank, to rank).

    scrap:          the ranks whose cells hold no defined value afterwards; they are grey and not lit
    ranks_per_host: where not 0, so many ranks lie on a grey band together, and are named with their node
    """
    size, gap = len(before), 3.2
    left, right = (max(len(row) for row in state) for state in (before, after))
    width = left + gap + right
    inch = min(0.62, 8.0 / width)
    fig, ax = plt.subplots(figsize=(width * inch + 1.0, (size + 1.2) * 0.5))
    ax.set_title(title, fontsize=13)
    ax.text(left / 2, -0.15, "before", ha="center", va="bottom", size=12)
    ax.text(left + gap + right / 2, -0.15, "after", ha="center", va="bottom", size=12)
    for rank in range(size):
        for place, value in enumerate(before[rank]):
            cell(ax, place, rank, value, inch, lit=False)
        for place, value in enumerate(after[rank]):
            same = place < len(before[rank]) and before[rank][place] == value
            lit = not same and value is not None and rank not in scrap
            cell(ax, left + gap + place, rank, value, inch, lit, scrap=rank in scrap)
    names = [f"rank {rank}" for rank in range(size)]
    if ranks_per_host:
        for first in range(0, size, ranks_per_host):
            band = (-0.1, first), width + 0.2, ranks_per_host
            ax.add_patch(Rectangle(*band, fc="#e2e2e2", ec="white", lw=6, zorder=0))
        names = [f"node {rank // ranks_per_host}, {name}" for rank, name in enumerate(names)]
    for source, target in arrows:
        style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 16, "shrinkA": 0, "shrinkB": 0, "lw": 2.2}
        ends = (left + 0.15, source + 0.5), (left + gap - 0.15, target + 0.5)
        ax.add_patch(FancyArrowPatch(*ends, color=PALETTE[source], **style))
    ax.set(xlim=(-0.05, width + 0.05), ylim=(size + 0.1, -0.75), xticks=[])
    ax.set_yticks([rank + 0.5 for rank in range(size)], names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


def run(
    name: str, fn: Callable[[], tuple[list, list]], arrows: list[tuple[int, int]], scrap: Sequence[int] = ()
) -> tuple[Figure, str]:
    """Run `fn` on four ranks, print what each held before and holds after it; return the picture and its words.

    fn: called on every rank; returns the two; arrows: of ranks whose data goes where; scrap: as in `moved`
    """
    before, after = zip(*launch(fn, nproc=4), strict=True)
    lines = [f"rank {rank}: {before[rank]} -> {after[rank]}" for rank in range(4)]
    print("\n".join(lines))
    words = f"{name}: arrows from rank to rank {arrows}, and what they hold. {'; '.join(lines)}"
    return moved(name, before, after, arrows, scrap), words


def watch(algorithm: Callable, size: int = 4) -> list[tuple[list, list, list[Message]]]:
    """Run an all-reduce by hand on ranks that hold 1, 2, ..., then 10, 20, ..., and so on.

    algorithm: f(tensor, exchange=...), which sends by `exchange` alone, as course.intro.by_hand.ring

    Returns for each step what the ranks held before and after it, and its messages.
    """
    ranks = launch(_noted, size, (algorithm,))
    states = list(zip(*(held for held, _ in ranks), strict=True))
    messages = zip(*(sent for _, sent in ranks), strict=True)
    return [
        (list(before), list(after), list(sent))
        for before, after, sent in zip(states, states[1:], messages, strict=False)
    ]


def steps_of(ring: Callable) -> Iterator[tuple[Figure, str, str]]:
    """A frame (picture, words, caption) before a ring all-reduce on four ranks, and one after each of its six steps."""
    steps = watch(ring)
    start = f"Before the first step, four ranks on a circle hold {steps[0][0]}"
    yield circle(None, steps[0][0], []), start, "Before: every rank holds its own numbers."
    adds = "each rank adds what arrives to its copy of that chunk."
    captions = [f"Reduce-scatter, step {step}: {adds}" for step in range(3)]
    captions += [f"All-gather, step {step}: each rank keeps what arrives, a complete sum." for step in range(3)]
    for (before, after, sent), caption in zip(steps, captions, strict=True):
        words = f"Messages (from, to, numbers): {sent}. Afterwards the ranks on the circle hold {after}"
        yield circle(before, after, sent), words, caption


def _noted(algorithm: Callable) -> tuple[list, list[Message]]:
    """What this rank holds before each exchange and at the end, and its messages."""
    rank = dist.get_rank()
    tensor, states, messages = torch.arange(1, dist.get_world_size() + 1) * 10**rank, [], []

    def noting(outgoing, to, *rest):
        states.append(tensor.tolist())
        messages.append((rank, to, outgoing.tolist()))
        by_hand.exchange(outgoing, to, *rest)

    algorithm(tensor, exchange=noting)
    return [*states, tensor.tolist()], messages


def circle(before: list | None, held: list, messages: list[Message]) -> Figure:
    """Four ranks on a circle after one step, with what each holds beside it and this step's messages as lit links.

    before: what each rank held before the step; None: nothing has been sent yet, so nothing is lit
    """
    size, radius, inch = len(held), 1.75, 0.66
    angles = [0.75 * pi - 2 * pi * rank / size for rank in range(size)]
    places = [(radius * cos(angle), radius * sin(angle)) for angle in angles]
    fig, ax = plt.subplots(figsize=(8.4, 3.6))
    ax.add_patch(Circle((0, 0), radius, fill=False, color=LINK_GREY, lw=1.5, zorder=0))
    for source, target, values in messages:
        clockwise = target == (source + 1) % size
        bend = tan(pi / 2 / size) if clockwise else 0.16
        _lit_link(ax, places[source], places[target], -bend, 0.42)
        beside = (target - source) % size in (1, size - 1)
        share = 0.5 if beside else 0.22  # those of diagonals are not to meet in the middle
        (x0, y0), (x1, y1) = places[source], places[target]
        x, y = x0 + share * (x1 - x0), y0 + share * (y1 - y0)
        lift = bend * 2 * share * (1 - share)  # of a quadratic curve whose control point is `bend` off the chord
        x, y = x - lift * (y1 - y0), y + lift * (x1 - x0)
        ground = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": VERMILION, "lw": 1.5}
        label = ", ".join(map(str, values)) if len(values) < 3 else f"all {len(values)}"
        ax.text(x, y, label, ha="center", va="center", size=11, color=VERMILION, bbox=ground, zorder=4)
    for rank, (x, y) in enumerate(places):
        _disc(ax, x, y, rank, 0.36, "white")
        begin = x + 0.55 if x > 0 else x - 0.55 - len(held[rank])
        for place, value in enumerate(held[rank]):
            cell(ax, begin + place, y - 0.5, value, inch, before is not None and before[rank][place] != value)
    ax.set(xlim=(-6, 6), ylim=(-2.3, 2.3), aspect="equal")
    ax.set_axis_off()
    return fig


def _lit_link(ax, begin, end, bend: float, radius: float, colour: str = VERMILION, width: float = 3.5) -> None:
    """An arrow between two discs. radius: of the discs"""
    points = 72 * radius * ax.figure.get_figwidth() / 12
    style = {"arrowstyle": "-|>", "mutation_scale": 18, "shrinkA": points, "shrinkB": points, "zorder": 2}
    ax.add_patch(FancyArrowPatch(begin, end, connectionstyle=f"arc3,rad={bend}", color=colour, lw=width, **style))


def _disc(ax, x: float, y: float, rank: int, radius: float, colour: str) -> None:
    ax.add_patch(Circle((x, y), radius, fc=colour, ec=BLACK, lw=1.5, zorder=3))
    ink = "white" if colour == BLUE else BLACK
    ax.text(x, y - 0.02, str(rank), ha="center", va="center", size=12, color=ink, zorder=4)


# Where the ranks of a binomial tree over eight ranks are drawn: a child stands below its parent.
TREE = {0: (1.75, 3), 1: (0.5, 2), 2: (2, 2), 4: (3.4, 2), 3: (0, 1), 5: (1, 1), 6: (2, 1), 7: (0, 0)}


def ring_and_tree(step: int) -> Figure:
    """A broadcast over eight ranks after `step` steps: round a ring at the left, down a binomial tree at the right."""
    fig, ax = plt.subplots(figsize=(7.8, 3.4))
    angles = [pi / 2 - 2 * pi * rank / 8 for rank in range(8)]
    circle_places = {rank: (1.75 * cos(angle) - 3.3, 1.75 * sin(angle)) for rank, angle in enumerate(angles)}
    tree_places = {rank: (1.45 * x + 0.6, 1.1 * y - 1.65) for rank, (x, y) in TREE.items()}
    ring_links = [(rank, rank + 1, rank + 1) for rank in range(7)] + [(7, 0, 99)]
    tree_links = [(rank - top, rank, top.bit_length()) for rank in range(1, 8) for top in [1 << rank.bit_length() - 1]]
    for places, links, bend in ((circle_places, ring_links, -tan(pi / 16)), (tree_places, tree_links, 0)):
        arrived = {0: 0} | {target: when for _, target, when in links if when < 99}
        for source, target, when in links:
            if when == step:
                _lit_link(ax, places[source], places[target], bend, 0.36)
            else:
                colour, width = ("#555555", 2) if when < step else (LINK_GREY, 1.2)
                _lit_link(ax, places[source], places[target], bend, 0.36, colour, width)
        for rank, (x, y) in places.items():
            _disc(ax, x, y, rank, 0.32, BLUE if arrived[rank] <= step else "white")
    for x, name, have in ((-3.3, "ring", min(step + 1, 8)), (3.3, "binomial tree", min(2**step, 8))):
        ax.text(x, 2.25, f"{name}: {have} of 8 ranks have it", ha="center", size=13)
    ax.set(xlim=(-6, 6), ylim=(-2.3, 2.7), aspect="equal")
    ax.set_axis_off()
    return fig


def rings_and_trees() -> Iterator[tuple[Figure, str, str]]:
    """Frames (picture, words, caption) of `ring_and_tree`, until the ring has told all ranks."""
    for step in (0, 1, 2, 3, 7):
        have = min(step + 1, 8), min(2**step, 8)
        words = (
            f"Eight ranks in a ring and in a tree, steps taken: {step}; ranks with the tensor: {have[0]} and {have[1]}"
        )
        yield (
            ring_and_tree(step),
            words,
            f"Steps taken: {step}. Ranks that have it: {have[0]} by the ring, {have[1]} by the tree.",
        )


def waiting() -> Figure:
    """What `wait()` makes wait, drawn to no scale: the host's thread with gloo, the GPU's current stream with NCCL."""
    fig, axes = plt.subplots(2, 1, figsize=(9.2, 4.4), gridspec_kw={"height_ratios": [2, 3]}, sharex=True)
    blue, orange, green = (BLUE, "white"), (ORANGE, BLACK), (GREEN, "white")
    gloo = {
        "host thread": [(0, 0.85, "all_reduce", blue), (0.9, 2.05, "compute something else", green),
                        (3.0, 2.4, "wait()", orange), (5.45, 1.6, "use the sum", green)],
        "gloo's threads": [(0.5, 4.9, "the sum is made", (PURPLE, BLACK))],
    }  # fmt: skip
    nccl = {
        "host thread": [(0, 0.85, "all_reduce", blue), (0.9, 0.65, "launch", blue), (1.6, 0.6, "wait()", orange),
                        (2.25, 0.65, "launch", blue), (2.95, 2.05, "free to go on", (SKY, BLACK))],
        "current stream": [(1.1, 2.2, "compute something else", green), (3.35, 2.05, "waits for the event", orange),
                           (5.45, 1.6, "use the sum", green)],
        "NCCL's stream": [(0.5, 4.9, "the sum is made", (PURPLE, BLACK))],
    }  # fmt: skip
    panels = {"gloo, tensors on the CPU": gloo, "NCCL, tensors on the GPU": nccl}
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        for row, bars in enumerate(rows.values()):
            for start, length, text, (colour, ink) in bars:
                ax.add_patch(Rectangle((start, row + 0.08), length, 0.84, fc=colour, ec="white"))
                ax.text(start + length / 2, row + 0.5, text, ha="center", va="center", size=11, color=ink)
        ax.axvline(5.42, color=VERMILION, lw=1.5, ls="--")
        ax.set(xlim=(-0.05, 7.1), ylim=(len(rows), 0), xticks=[])
        ax.set_yticks([row + 0.5 for row in range(len(rows))], rows)
        ax.set_title(title, loc="left", fontsize=13)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[1].set_xlabel("time; dashed: the sum is complete")
    return fig


def grid(names: tuple[str, str], before: list[float], along: dict[str, list[float]]) -> Figure:
    """A mesh of 2 x 2 ranks: who is in a group with whom, and the sums of `before` along each dimension.

    names: of the dimension along which a row is numbered, then a column; along: name -> each rank's sum
    """
    fig, axes = plt.subplots(1, 2, figsize=(8.4, 3.0))
    for ax, name in zip(axes, names, strict=True):
        colour = ORANGE if name == names[0] else SKY
        for index in range(2):
            box = (index * 2 - 0.75, -0.45, 1.5, 2.4) if name == names[0] else (-0.75, 1.05 - 1.5 * index, 3.5, 0.9)
            ax.add_patch(Rectangle(box[:2], *box[2:], fc=colour, alpha=0.45, lw=0))
        for rank in range(4):
            x, y = 2 * (rank % 2), 1.5 - 1.5 * (rank // 2)
            label = f"rank {rank}\n{before[rank]:.0f} → {along[name][rank]:.0f}"
            ax.text(x, y, label, ha="center", va="center", size=12)
        ax.set(xlim=(-1, 3), ylim=(-0.6, 2.1))
        ax.set_title(f'mesh["{name}"]', fontsize=13)
        ax.set_axis_off()
    return fig


def paired(calls: list[list[str]], pairs: int, notes: list[str]) -> Figure:
    """How the collectives of two ranks find each other: by their number, whatever they are meant for.

    calls: what each rank calls, in order; pairs: how many calls have met; notes: what came of each of them. A call
    whose number the other rank never reaches waits.
    """
    fig, ax = plt.subplots(figsize=(9.2, 0.75 * max(map(len, calls)) + 0.7))
    for rank, names in enumerate(calls):
        ax.text(3.4 * rank + 1, -0.25, f"rank {rank}", ha="center", va="bottom", size=13)
        for place, name in enumerate(names):
            met: dict[str, Any] = {"fc": PALETTE[rank], "ec": BLACK, "lw": 2.5}
            style = met if place < pairs else {"fc": "white", "ec": LINK_GREY}
            ax.add_patch(Rectangle((3.4 * rank, place + 0.12), 2, 0.76, **style))
            ink = "white" if place < pairs and PALETTE[rank] == BLUE else BLACK
            ax.text(3.4 * rank + 1, place + 0.5, name, ha="center", va="center", size=12, color=ink)
    for place in range(pairs):
        both = all(place < len(names) for names in calls)
        right = both and calls[0][place] == calls[1][place]
        colour, line = (GREEN, "-") if right else (VERMILION, "--")
        if both:
            ax.plot([2.05, 3.35], [place + 0.5] * 2, color=colour, ls=line, lw=4)
        ax.text(5.6, place + 0.5, notes[place], va="center", size=12, color=colour)
    ax.set(xlim=(-0.1, 10.5), ylim=(max(map(len, calls)) + 0.1, -0.7))
    ax.set_axis_off()
    return fig


def a_step_skipped(first: str, second: str) -> Iterator[tuple[Figure, str, str]]:
    """Frames (picture, words, caption) of three steps, of which rank 1 skips the second. first, second: the sums."""
    calls = [["step 1", "step 2", "step 3"], ["step 1", "step 3"]]
    captions = [
        "No call has been made. Rank 1 will skip step 2.",
        "The first calls of both ranks meet, as they should.",
        "The second calls meet. They belong to different steps, and the sum is wrong on both ranks.",
        "Rank 0 waits for a third call, which never comes. Only now something is noticed.",
    ]
    for count, caption in enumerate(captions):
        picture = paired(calls, count, [first, second, "nobody is left: rank 0 waits"])
        yield picture, f"Calls of two ranks. {caption}", caption
