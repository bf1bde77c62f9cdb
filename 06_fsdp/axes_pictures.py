"""Pictures of meshes: where the members of a group are among all GPUs, and a step over three axes, phase by phase."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from common.lab.plotting import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION

AXIS_COLOURS = {"tensor": BLUE, "context": VERMILION, "pipeline": ORANGE, "data": GREEN, "expert": PURPLE}


def spread(runs: dict[str, dict[str, list[int]]], node: int = 8) -> Figure:
    """For each run and axis, which GPUs are in one group with GPU 0.

    runs: name -> axis -> numbers of the GPUs, 0 first
    node: GPUs of a node; what lies inside one is shaded
    """
    rows = sum(len(axes) for axes in runs.values())
    fig, every = plt.subplots(
        len(runs), 1, figsize=(10, 0.55 * rows + 0.75 * len(runs)), sharex=True, squeeze=False,
        height_ratios=[len(axes) for axes in runs.values()],
    )  # fmt: skip
    for ax, (name, axes) in zip(every[:, 0], runs.items(), strict=True):
        ax.axvspan(0.7, node + 0.5, color="#e8e8e8", lw=0)
        for row, (axis, members) in enumerate(axes.items()):
            ax.plot([1 + member for member in members], [row] * len(members), "o", ms=6, color=AXIS_COLOURS[axis])
        ax.set_title(name, loc="left", fontsize=13)
        ax.set_yticks(range(len(axes)), [f"{axis} {len(members)}" for axis, members in axes.items()])
        ax.set_ylim(len(axes) - 0.5, -0.5)
        ax.set_xscale("log", base=2)
        ax.tick_params(axis="y", length=0)
    last = every[-1, 0]
    ticks = [1, 8, 64, 512, 4096, 16384]
    last.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    last.set_xlim(0.85, 20_000)
    last.set_xlabel("number of the GPU, counted from 1 (grey: the node of the first one)")
    return fig


PLACES = {(p, d, t): (5.4 * p + 2.0 * t, 2.0 * (1 - d)) for p in (0, 1) for d in (0, 1) for t in (0, 1)}


def eight_ranks(axis: str | None, arrows: list[tuple[tuple, tuple]], busy: list[tuple], says: str) -> Figure:
    """The ranks of the mesh pipeline=2, data=2, tensor=2, by coordinates (pipeline, data, tensor).

    axis:   whose colour the arrows have
    arrows: (from, to); between two ranks in both directions if both are there
    busy:   the ranks that compute
    says:   a line in the picture, what is sent or computed
    """
    fig, ax = plt.subplots(figsize=(8.6, 3.9))
    for p in (0, 1):
        ax.add_patch(Rectangle((5.4 * p - 0.75, -0.8), 3.5, 3.75, fc="#f4f4f4", ec="#bbbbbb"))
        ax.text(5.4 * p + 1, 3.12, f"stage {p}", ha="center", fontsize=13)
    for (p, d, t), (x, y) in PLACES.items():
        colour = "#ffe9b8" if (p, d, t) in busy else "white"
        ax.add_patch(plt.Circle((x, y), 0.46, fc=colour, ec=BLACK, lw=1.5, zorder=3))
        ax.text(x, y, f"rank {4 * p + 2 * d + t}", ha="center", va="center", fontsize=11, zorder=4)
    for p in (0, 1):
        for d in (0, 1):
            ax.text(5.4 * p + 1, 2.0 * (1 - d) - 0.66, f"replica {d}", ha="center", fontsize=10, color="#666666")
    colour = AXIS_COLOURS[axis] if axis else BLACK
    for start, end in arrows:
        (x, y), (u, v) = PLACES[start], PLACES[end]
        bend = 0.18 if abs(x - u) < 3 else 0.25 if x > u else -0.25  # above the names of the replicas, either way
        ax.add_patch(FancyArrowPatch(
            (x, y), (u, v), connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=18, lw=3,
            color=colour, shrinkA=24, shrinkB=24, zorder=2,
        ))  # fmt: skip
    ax.text(3.7, -1.15, says, ha="center", fontsize=13, color=colour)
    ax.set_xlim(-0.95, 8.35)
    ax.set_ylim(-1.4, 3.45)
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


def pairs(axis: str, which: list[tuple]) -> list[tuple[tuple, tuple]]:
    """From each of these ranks to its neighbour along an axis."""
    number = ("pipeline", "data", "tensor").index(axis)
    return [(rank, tuple(1 - c if i == number else c for i, c in enumerate(rank))) for rank in which]


def step_frames() -> list[tuple[Figure, str]]:
    """A step of the program with three axes: (picture, what it shows)."""
    first, second = ([rank for rank in PLACES if rank[0] == p] for p in (0, 1))
    shots = [
        (None, [], first, "forward: the first stage computes",
         "Each replica reads its half of the batch. The two ranks of a replica's first stage multiply the same "
         "activations with their own half of each weight."),
        ("tensor", pairs("tensor", first), [], "tensor: all-reduce of partial sums",
         "The partial products are added up inside each pair. Now both ranks of a pair have the stage's output."),
        ("pipeline", pairs("pipeline", first), [], "pipeline: send activations",
         "Every rank of the first stage sends the output to the rank of the second stage that has its other two "
         "coordinates."),
        ("tensor", pairs("tensor", second), second, "forward in the second stage, and its all-reduce",
         "The second stage does the same with its own layer, and knows the loss."),
        ("tensor", pairs("tensor", second), second, "backward in the second stage, and its all-reduce",
         "In the backward pass, the gradients of the stage's input are added up inside each pair."),
        ("pipeline", pairs("pipeline", second), [], "pipeline: send gradients of activations",
         "They go back to the first stage, again along the pipeline axis."),
        (None, [], first, "backward: the first stage computes",
         "The first stage's input is data and needs no gradient, so this backward pass sends nothing along tensor."),
        ("data", pairs("data", [*first, *second]), [], "data: all-reduce of gradients, once a step",
         "After the last micro-batch, the two replicas add up their gradients: each rank with the one that has the "
         "same part of the same weights."),
    ]  # fmt: skip
    return [(eight_ranks(axis, arrows, busy, says), caption) for axis, arrows, busy, says, caption in shots]
