"""The decision map of "Choosing": for each model and number of GPUs the layout that the planner finds fastest.

Every cell is a whole search, so the cells are stored in decision_map.csv; the page searches some of them again.

    python -m planner.decision_map        search all cells anew, which takes minutes
"""

import csv
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.constants import GIB
from common.errors import Parser
from common.lab import plotting
from planner import hardware, models, search
from planner.constants import Constants, load
from planner.estimate import estimate
from planner.hardware import Cluster
from planner.layout import Layout
from planner.models import Model

STORED = Path(__file__).parent / "decision_map.csv"
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-7b", "llama-13b", "llama-33b", "llama-2-70b", "gpt3-175b",
          "llama-3-405b")  # fmt: skip
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
NETWORKS = {"InfiniBand, 8 x 400 Gb/s per node": ("infiniband-400", 8)}
BATCH, SEQUENCE = 1024, 4096  # 4 million tokens a step
# Which kind of layout, with its colour.
LAYOUT_KINDS = {
    "DDP, ZeRO-1, ZeRO-2": plotting.SKY,
    "ZeRO-3 (FSDP)": plotting.BLUE,
    "tensor": plotting.GREEN,
    "pipeline": plotting.ORANGE,
    "pipeline and tensor": plotting.VERMILION,
    "offload": plotting.PURPLE,
    "does not fit": "#DDDDDD",
}
DARK = ("ZeRO-3 (FSDP)", "tensor", "pipeline and tensor")


def kind_of(layout: Layout) -> str:
    """Context parallelism counts as tensor parallelism: both divide the work on a sequence."""
    if layout.offload:
        return "offload"
    inside = layout.tensor > 1 or layout.context > 1
    if layout.pipeline > 1:
        return "pipeline and tensor" if inside else "pipeline"
    return "tensor" if inside else "ZeRO-3 (FSDP)" if layout.zero_stage == 3 else "DDP, ZeRO-1, ZeRO-2"


def short(layout: Layout) -> str:
    """P4 T2 Z1: 4 ranks along pipeline, 2 along tensor, ZeRO-1 along the rest; H32: 32 copies of what is sharded."""
    sizes = {"P": layout.pipeline, "H": layout.size("data") if layout.zero_stage else 1, "C": layout.context,
             "T": layout.tensor}  # fmt: skip
    axes = [f"{letter}{size}" for letter, size in sizes.items() if size > 1]
    stage = [f"Z{layout.zero_stage}"] if layout.zero_stage else ["DDP"] if layout.size("data") > 1 else []
    return " ".join(axes + stage)


def searched(shape: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str,
             constants: Constants) -> dict[str, str]:  # fmt: skip
    """What a cell says: the fastest layout that leaves the default reserve of memory, and how much longer the best
    layout of the next kind takes. Offload is looked at only where nothing else fits."""
    found: list[search.Candidate] = []
    for offload in (False, True):
        found = found or [one for one in search.candidates(
            shape, cluster, batch_size, sequence, precision, constants, offload
        ) if one.recommended(cluster.gpu.memory)]  # fmt: skip
    if not found:
        return {"kind": "does not fit"}
    kinds: dict[str, list[Layout]] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        kinds.setdefault(kind_of(one.layout), []).append(one.layout)
    # A search takes the stages of a pipeline as equal. The fastest few of each kind are estimated exactly.
    best = [min((estimate(shape, cluster, layout, constants) for layout in alike[:4]), key=lambda one: one.seconds)
            for alike in kinds.values()]  # fmt: skip
    winner, *others = sorted(best, key=lambda one: one.seconds)
    layout = winner.layout
    row = {"kind": kind_of(layout), "layout": short(layout), "micro_batch": str(layout.micro_batch),
           "recompute": layout.recompute, "seconds": f"{winner.seconds:.4g}", "mfu": f"{winner.mfu:.3f}",
           "gib": f"{winner.memory.expected / GIB:.1f}"}  # fmt: skip
    if others:
        row |= {"next": kind_of(others[0].layout), "later": f"{others[0].seconds / winner.seconds - 1:.3f}"}
    return row


def cell(model: str, gpus: int, network: str) -> dict[str, str]:
    """The search for one cell of the stored map: a row of its table."""
    cluster = hardware.cluster("h100-80gb", gpus, 8, *NETWORKS[network])
    row = searched(models.find(model), cluster, BATCH, SEQUENCE, "bf16-mixed", load())
    return {"network": network, "model": model, "gpus": str(gpus)} | row


def stored() -> dict[tuple[str, str, int], dict[str, str]]:
    """(network, model, GPUs) -> the row of the stored table."""
    with open(STORED, newline="") as file:
        return {(row["network"], row["model"], int(row["gpus"])): row for row in csv.DictReader(file)}


def draw(network: str):
    """The stored map of a network."""
    rows = {(model, gpus): row for (name, model, gpus), row in stored().items() if name == network}
    return draw_rows(rows, network, "GPUs (H100, 80 GB)")


def draw_rows(rows: dict[tuple[str, int], dict[str, str]], title: str, xlabel: str):
    """Models from below, numbers of GPUs from left to right; (model, GPUs) -> what `searched` has found. With ≈ the
    best layout of another kind takes longer by no more than the planner is off. A row without "mfu" shows none."""
    error = load().error
    names, numbers = (list(dict.fromkeys(key[place] for key in rows)) for place in (0, 1))
    fig, ax = plt.subplots(figsize=(9.2, 1.7 + 0.44 * len(names)))
    for (model, gpus), row in rows.items():
        x, y = numbers.index(gpus), names.index(model)
        ax.add_patch(Rectangle((x, y), 1, 1, fc=LAYOUT_KINDS[row["kind"]], ec="white", lw=2))
        close = "≈ " if row.get("later") and float(row["later"]) <= error else ""
        layout = row.get("layout") or ("" if row["kind"] == "does not fit" else "whole")
        text = f"{layout}\n{close}" + (f"{float(row['mfu']):.0%}" if row.get("mfu") else "")
        text = text.strip()
        ink = "white" if row["kind"] in DARK else "black"
        ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=9.5 if len(layout) < 13 else 7, color=ink)
    ax.set(xlim=(0, len(numbers)), ylim=(0, len(names)), xlabel=xlabel, title=title)
    ax.set_xticks([x + 0.5 for x in range(len(numbers))], [f"{gpus:,}" for gpus in numbers])
    ax.set_yticks([y + 0.5 for y in range(len(names))], list(map(str, names)))
    ax.tick_params(length=0)
    squares = [Rectangle((0, 0), 1, 1, color=colour) for colour in LAYOUT_KINDS.values()]
    handles = (*squares, plt.Line2D([], [], color="black", marker="$≈$", ls="", ms=10))
    labels = [*LAYOUT_KINDS, f"another kind within {error:.0%}, the planner's error"]
    fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    return fig


def main() -> None:
    Parser(prog="python -m planner.decision_map", description=__doc__.partition("\n")[0]).asked()
    rows = [cell(model, gpus, network) for network in NETWORKS for model in MODELS for gpus in GPUS]
    names = dict.fromkeys(name for row in rows for name in row)
    with open(STORED, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
