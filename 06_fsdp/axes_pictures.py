"""Meshes: which GPUs are in a group, what of a matrix is on which rank, and a step over three axes, phase by phase."""

import itertools

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from common.lab.plotting import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION

AXIS_COLOURS = {"tensor": BLUE, "context": VERMILION, "pipeline": ORANGE, "data": GREEN, "shard": GREEN}


def groups_of_first(mesh: dict[str, int]) -> dict[str, list[int]]:
    """For each axis of a mesh (axis -> size, innermost first) the GPUs that are in one group with GPU 0."""
    found, stride = {}, 1
    for axis, size in mesh.items():
        found[axis] = [stride * number for number in range(size)]
        stride *= size
    return found


RANK_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def owners(shape: tuple[int, int], held: list[list[list[float]]]) -> list[list[list[int]]]:
    """List the ranks that hold each element of a matrix of 0, 1, 2, ...; held: the part of it that each rank has."""
    found: list[list[list[int]]] = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    for rank, rows in enumerate(held):
        for value in (int(value) for row in rows for value in row):
            found[value // shape[1]][value % shape[1]].append(rank)
    return found


def matrices(panels: dict[str, list[list[list[int]]]]) -> Figure:
    """For each title a matrix whose elements have the colours of the ranks that hold them, from `owners`; their numbers
    stand in the middle of what they have."""
    shapes = [(len(grid), len(grid[0])) for grid in panels.values()]
    fig, axes = plt.subplots(1, len(panels), figsize=(10.5, 4.1), width_ratios=[columns for _, columns in shapes])
    for ax, (title, grid), (rows, columns) in zip(axes, panels.items(), shapes, strict=True):
        places: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        for row, column in itertools.product(range(rows), range(columns)):
            here = grid[row][column]
            for stripe, rank in enumerate(here):
                left, width = column + stripe / len(here), 1 / len(here)
                ax.add_patch(Rectangle((left, row), width, 1, color=RANK_COLOURS[rank], lw=0))
            ax.add_patch(Rectangle((column, row), 1, 1, fill=False, ec="white", lw=1))
            places.setdefault(tuple(here), []).append((column + 0.5, row + 0.5))
        for ranks, spots in places.items():
            x, y = (sum(values) / len(spots) for values in zip(*spots, strict=True))
            ground = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
            label = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            ax.text(x, y, label, ha="center", va="center", size=9, bbox=ground)
        ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")
        ax.set_title(title, fontsize=11)
        ax.spines[:].set_visible(False)
    return fig


def nodes(groups: dict[str, list[int]], kept: list[int], node: int = 8) -> Figure:
    """All GPUs, a column for each node, in the colour of the first row that each keeps; the members of some groups with
    a frame in the colour of their axis.

    kept: the number of each GPU's first row, in rank order
    """
    fig, ax = plt.subplots(figsize=(10, 2.9))
    image = ax.imshow([kept[place::node] for place in range(node)], "Greys", aspect="auto", vmax=1.6 * max(kept))
    for axis, members in groups.items():
        for gpu in members:
            corner = (gpu // node - 0.42, gpu % node - 0.4)
            ax.add_patch(Rectangle(corner, 0.84, 0.8, fill=False, ec=AXIS_COLOURS[axis], lw=3))
    columns = len(kept) // node
    ax.set(ylabel="GPU in its node", xlabel="node", xticks=range(0, columns, 4), yticks=[0, node - 1])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    fig.colorbar(image, label="first row kept", pad=0.02).ax.set_ylim(0, max(kept))
    handles = [Rectangle((0, 0), 1, 1, fill=False, ec=AXIS_COLOURS[axis], lw=3) for axis in groups]
    fig.legend(handles, [f"group along {axis}" for axis in groups], loc="outside upper center", ncols=len(groups))
    return fig


PLACES = {(p, d, t): (5.4 * p + 2.0 * t, 2.0 * (1 - d)) for p in (0, 1) for d in (0, 1) for t in (0, 1)}


def eight_ranks(axis: str | None, arrows: list[tuple[tuple, tuple]], busy: list[tuple], label: str) -> Figure:
    """The ranks of the mesh pipeline=2, data=2, tensor=2, by coordinates (pipeline, data, tensor).

    axis:   whose colour the arrows have
    arrows: (from, to); between two ranks in both directions if both are there
    busy:   the ranks that compute
    label:  a line in the picture, what is sent or computed
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
    ax.text(3.7, -1.15, label, ha="center", fontsize=13, color=colour)
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
         "The four ranks of the first stage compute (coloured). The two in a row, a tensor pair, have the same half of "
         "the batch, and each its half of every weight; the other row has the other half of the batch."),
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
         "Before this matrix is only data, no norm or embedding, so this backward pass sends nothing along tensor."),
        ("data", pairs("data", [*first, *second]), [], "data: all-reduce of gradients, once a step",
         "After the last micro-batch, the two replicas add up their gradients: each rank with the one that has the "
         "same part of the same weights."),
    ]  # fmt: skip
    return [(eight_ranks(axis, arrows, busy, label), caption) for axis, arrows, busy, label, caption in shots]
