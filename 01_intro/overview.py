"""Pictures of the first notebook: one step of data parallelism, how ranks are numbered, and who holds what."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from common.lab.plotting import BLACK, ORANGE, PALETTE, SKY

# --- one step of data parallelism, as a flipbook --------------------------------------------------------------


COLUMNS = ("weight", "examples", "gradient", "new weight")


def step_pictures(rows: list[list[str]], total: str, mean: str) -> list[Figure]:
    """Five moments of a step of data parallelism on two ranks, for a model of one weight.

    rows:  for each rank its weight, examples, gradient and new weight
    total: of both gradients; mean: half of it
    """
    with_total, with_mean = ([[*row[:2], gradient, row[3]] for row in rows] for gradient in (total, mean))
    return [
        *(_step_picture([row[: count + 1] for row in rows], new=(count,)) for count in range(3)),
        _step_picture([row[:3] for row in with_total], new=(2,), shared=True),
        _step_picture(with_mean, new=(2, 3), shared=True),
    ]


def _step_picture(rows: list[list[str]], new: tuple[int, ...], shared: bool = False) -> Figure:
    """rows: for each rank its boxes from the left; `new` are the columns that have just changed. Where `shared`, the
    gradients come from both ranks, and arrows show how if they have just changed."""
    fig, ax = plt.subplots(figsize=(8.6, 2.9))
    colours = [SKY, ORANGE]  # of what comes from rank 0 and from rank 1
    for column, title in enumerate(COLUMNS):
        ax.text(2.2 * column + 0.8, -0.25, title, ha="center", va="bottom")
    for rank, boxes in enumerate(rows):
        top = 1.9 * rank
        ax.text(-0.3, top + 0.5, f"rank {rank}", ha="right", va="center")
        for column, text in enumerate(boxes):
            left = 2.2 * column
            parts = {1: [colours[rank]], 2: colours if shared else [colours[rank]]}.get(column, ["#e8e8e8"])
            for index, colour in enumerate(parts):
                width = 1.6 / len(parts)
                ax.add_patch(Rectangle((left + index * width, top), width, 1, fc=colour, ec="none"))
            edge: dict[str, Any] = {"ec": BLACK, "lw": 3.5} if column in new else {"ec": "#888888", "lw": 1}
            ax.add_patch(Rectangle((left, top), 1.6, 1, fc="none", **edge))
            ax.text(left + 0.8, top + 0.5, text.replace("-", "\N{MINUS SIGN}"), ha="center", va="center", size=15)
    if shared and new == (2,):
        arrow = {"arrowstyle": "-|>", "lw": 4, "mutation_scale": 22, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (4.9, 1.85), (4.9, 1.05), arrowprops=arrow | {"color": colours[0]})
        ax.annotate("", (5.5, 1.05), (5.5, 1.85), arrowprops=arrow | {"color": colours[1]})
    ax.set(xlim=(-1.5, 8.4), ylim=(3.1, -0.8))
    ax.set_axis_off()
    return fig


# --- how ranks are numbered -----------------------------------------------------------------------------------


def ranks_on_nodes(nodes: int, per_node: int) -> Figure:
    """The processes of `nodes` nodes with `per_node` GPUs each: a box per process with its rank and its local rank, in
    the frame of its node."""
    fig, ax = plt.subplots(figsize=(9.5, 2.6))
    for node in range(nodes):
        left = node * (per_node + 0.7)
        ax.add_patch(Rectangle((left - 0.2, -0.35), per_node + 0.3, 1.7, fc="none", ec="#888888", lw=1.5))
        ax.text(left - 0.1, 1.45, f"node rank {node}", va="bottom", size=12)
        for local in range(per_node):
            ax.add_patch(Rectangle((left + local, 0), 0.9, 1, fc=PALETTE[node], ec="none"))
            colour = "white" if node == 0 else "black"
            place: dict[str, Any] = {"ha": "center", "va": "center", "color": colour}
            ax.text(left + local + 0.45, 0.68, f"rank {node * per_node + local}", size=14, weight="bold", **place)
            ax.text(left + local + 0.45, 0.28, f"local rank {local}", size=10, **place)
            ax.text(left + local + 0.45, -0.17, f"GPU {local}", size=10, ha="center", va="center")
    ax.set(xlim=(-0.3, nodes * (per_node + 0.7) - 0.4), ylim=(-0.45, 1.9))
    ax.set_axis_off()
    return fig


# --- who holds what -------------------------------------------------------------------------------------------

EVERYWHERE = -1
_rows, _columns = np.indices((4, 4))
_every = np.full((4, 4), EVERYWHERE)
# The parts of a model (layers down, width across) and of a batch (examples down, tokens across) that 4 ranks hold.
WAYS = {
    "data": (_every, _rows, "gradients"),
    "sharded data (ZeRO-3, FSDP)": (_columns, _rows, "parameters and gradients"),
    "tensor": (_columns, _every, "activations, in each layer"),
    "pipeline": (_rows, None, "activations, between layers"),
    "context (sequence)": (_every, _columns, "keys and values; gradients"),
    "expert": (np.where(_rows % 2 == 1, _columns, EVERYWHERE), _rows, "tokens, to their experts; gradients"),
}


def ways_to_divide() -> Figure:
    """Six ways to divide training over four ranks: who holds which part of the model and of the batch."""
    fig, axes = plt.subplots(2, 3, figsize=(11, 6.6))
    for ax, (way, (of_model, of_batch, sent)) in zip(axes.flat, WAYS.items(), strict=True):
        _grid(ax, 0, of_model, "model\nlayers ↓  width →", hatch="///" if "sharded" in way else None)
        if of_batch is None:
            _inputs_and_targets(ax, 5)
        else:
            _grid(ax, 5, of_batch, "batch\nexamples ↓  tokens →")
        ax.set(xlim=(-0.6, 9.6), ylim=(5.6, -1.0), aspect="equal")
        ax.set_title(way, weight="bold", size=13)
        ax.text(4.5, -0.35, f"sent: {sent}", ha="center", va="bottom", size=11)
        ax.axis("off")
    names = [f"rank {rank}" for rank in range(4)] + ["all ranks"]
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in [*PALETTE[:4], "#d9d9d9"]]
    names += ["hatched: only stored there"]
    handles += [Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="#777777", hatch="///")]
    fig.legend(handles, names, loc="outside lower center", ncols=6, fontsize=11, title="held by")
    return fig


def _grid(ax, left: float, owners: np.ndarray, below: str, hatch: str | None = None) -> None:
    for (row, column), owner in np.ndenumerate(owners):
        colour, label = ("#d9d9d9", "") if owner == EVERYWHERE else (PALETTE[owner], str(owner))
        ax.add_patch(Rectangle((left + column, row), 1, 1, facecolor=colour, edgecolor="white", hatch=hatch))
        ground = {"boxstyle": "round,pad=0.1", "fc": colour, "ec": "none"} if hatch else None
        text = ax.text(left + column + 0.5, row + 0.52, label, ha="center", va="center", size=12, bbox=ground)
        text.set(color="white" if owner == 0 else "black", weight="bold")
    ax.text(left + 2, 4.15, below, ha="center", va="top", size=11)


def _inputs_and_targets(ax, left: float) -> None:
    """The batch of a pipeline: the first rank needs the inputs, the last one the targets, and the others neither."""
    for row, column in np.ndindex(4, 4):
        x, y = left + column, row
        corners = {0: [(x, y), (x + 1, y), (x, y + 1)], 3: [(x + 1, y), (x + 1, y + 1), (x, y + 1)]}
        for rank, triangle in corners.items():
            ax.add_patch(Polygon(triangle, facecolor=PALETTE[rank], edgecolor="white"))
        ax.text(x + 0.3, y + 0.34, "0", ha="center", va="center", size=9, color="white", weight="bold")
        ax.text(x + 0.72, y + 0.7, "3", ha="center", va="center", size=9, weight="bold")
    ax.text(left + 2, 4.15, "batch: inputs on rank 0,\ntargets on rank 3", ha="center", va="top", size=11)
