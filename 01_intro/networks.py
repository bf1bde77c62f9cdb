"""Pictures of networks: the links of a cluster, what a line misses, and rings over nodes."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from common.lab.plotting import BLACK, BLUE, GREEN, ORANGE, SKY, VERMILION

MiB = 2**20
LINKS = {"NVLink": BLUE, "PCIe": GREEN, "network": VERMILION}


def cluster(nvlink: float, pcie: float, adapter: float, nodes: int = 2, gpus: int = 8) -> Figure:
    """Nodes with NVSwitch, GPUs and a network adapter for each GPU, and the switch between the nodes. Lines are as wide
    as their bandwidth, which is given in GB/s in one direction."""
    fig, ax = plt.subplots(figsize=(9.6, 5.0))
    wide = gpus + 1.0
    for node in range(nodes):
        left = node * wide
        _box(ax, left - 0.5, 1.5, gpus, 5.15, "#F4F4F4")
        ax.text(left - 0.4, 6.42, f"node {node}", va="center", size=13)
        for gpu in range(gpus):
            for y0, y1, kind, rate in ((4.4, 5.3, "NVLink", nvlink), (2.4, 3.6, "PCIe", pcie),
                                       (0.6, 1.7, "network", adapter)):  # fmt: skip
                ax.plot([left + gpu] * 2, [y0, y1], color=LINKS[kind], lw=rate / 50, solid_capstyle="butt", zorder=1)
            _box(ax, left + gpu - 0.41, 3.6, 0.82, 0.8, SKY, f"GPU\n{gpu}", 11)
            _box(ax, left + gpu - 0.41, 1.7, 0.82, 0.7, ORANGE, "NIC", 11)
        _box(ax, left - 0.4, 5.3, gpus - 0.2, 0.75, "#FFFFFF", "NVSwitch", 13)
    _box(ax, -0.5, -0.2, nodes * wide - 1, 0.8, "#FFFFFF", "network switches", 13)
    right = nodes * wide - 0.75
    for y, kind, rate in ((4.85, "NVLink", nvlink), (3.0, "PCIe", pcie), (1.1, "network", adapter)):
        ax.text(right, y, f"{kind}\n{rate:g} GB/s each", color=LINKS[kind], va="center", size=13)
    ax.set(xlim=(-0.6, right + 4.2), ylim=(-0.3, 6.75))
    ax.set_axis_off()
    return fig


def _box(ax, x: float, y: float, width: float, height: float, colour: str, text: str = "", size: float = 12) -> None:
    style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": colour, "ec": "#777777", "lw": 1}
    ax.add_patch(FancyBboxPatch((x, y), width, height, zorder=2 if text else 0, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size, color=BLACK, zorder=3)


def missed(ratios: dict[int, dict[int, float]]) -> Figure:
    """How many times as long as its fitted line says an all-reduce takes, by its bytes: a curve for each cluster.

    ratios: nodes -> bytes -> measured time / time of the line
    """
    fig, ax = plt.subplots(figsize=(8.6, 3.8))
    ax.axhline(1, color=BLACK, lw=1)
    ax.axvline(25 * MiB, color="#777777", lw=1.2, ls=":")
    ax.text(18 * MiB, 0.62, "DDP's buckets: 25 MiB", ha="right", va="center", size=12, color="#555555")
    for (nodes, row), colour in zip(ratios.items(), (BLUE, GREEN, ORANGE), strict=False):
        ax.plot(list(row), list(row.values()), "o-", ms=4, lw=1.5, color=colour)
        top = max(row, key=lambda n: row[n])
        name = f"{nodes} nodes" if nodes > 1 else "1 node"
        beside = {min(ratios): (0.7, 0.0, "right"), max(ratios): (1.4, 0.0, "left")}  # the other has its name above it
        along, above, side = beside.get(nodes, (1.0, 0.09, "center"))
        ax.text(along * top, row[top] + above, name, color=colour, ha=side, va="center", size=13)
    ax.set(xscale="log", xlabel="bytes", ylabel="measured / predicted", ylim=(0.5, 2.15))
    ax.set_xticks([8, 2**10, MiB, 2**30], ["8 B", "1 KiB", "1 MiB", "1 GiB"])
    ax.minorticks_off()
    ax.set_yticks([0.5, 1, 1.5, 2])
    return fig


def rings(orders: list[list[int]], per_node: int) -> Figure:
    """Rings over two nodes, a panel each: GPUs of a node in a column, and the steps that leave a node as thick arrows.

    orders: the ranks of each ring, in the order in which they send to each other
    """
    fig, axes = plt.subplots(1, len(orders), figsize=(2.5 * len(orders), 3.1))
    for number, (ax, order) in enumerate(zip(axes, orders, strict=True)):
        for node in range(2):
            ax.add_patch(Rectangle((2.2 * node - 0.62, -0.6), 1.24, per_node + 0.1, fc="#EEEEEE", ec="#777777"))
            ax.text(2.2 * node, -0.85, f"node {node}", ha="center", size=11)
        for source, target in zip(order, order[1:] + order[:1], strict=True):
            ends = [(2.2 * (rank // per_node), rank % per_node) for rank in (source, target)]
            crosses = source // per_node != target // per_node
            side = 0.35 if ends[0][0] else -0.35
            far = abs(ends[0][1] - ends[1][1]) > 1  # passes other GPUs: bend around them
            bend = 0.0 if crosses or not far else (0.45 if (ends[1][1] - ends[0][1]) * side < 0 else -0.45)
            style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 13, "shrinkA": 9, "shrinkB": 9}
            colour, width = (VERMILION, 3.5) if crosses else (BLUE, 1.6)
            path = FancyArrowPatch(*ends, connectionstyle=f"arc3,rad={bend}", color=colour, lw=width, **style)
            ax.add_patch(path)
        for rank in range(2 * per_node):
            x, y = 2.2 * (rank // per_node), rank % per_node
            ax.add_patch(Circle((x, y), 0.24, fc="white", ec="black", zorder=3))
            ax.text(x, y, str(rank), ha="center", va="center", size=11, zorder=4)
        ax.set(xlim=(-0.9, 3.1), ylim=(per_node - 0.3, -1.1))
        ax.set_title(f"ring {number}", fontsize=12)
        ax.set_axis_off()
    return fig
