"""Pictures of tensor parallelism: how an MLP's and a block's tensors are split, and when messages overlap."""

from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, Rectangle

from common.lab import plotting
from common.lab.sliders import Sliders

# How a tensor of the block is split: what rank 0 of 2 holds of it, as (width, height) of the whole; and its colour.
SPLITS = {
    "whole": (1.0, 1.0, "#9A9A9A", "whole on every rank"),
    "columns": (0.5, 1.0, plotting.BLUE, "split by heads or columns"),
    "rows": (1.0, 0.5, plotting.BLUE, "split by heads or columns"),
    "sequence": (1.0, 0.5, plotting.GREEN, "split along the sequence"),
    "summand": (1.0, 1.0, plotting.YELLOW, "full size, but only this rank's summand"),
}
PLACES = {
    "in": 0.0, "norm": 1.35, "f": 2.4, "input": 3.45, "first": 5.2, "middle": 6.6, "second": 8.35, "g": 9.4,
    "out": 10.45,
}  # fmt: skip
HALVES = {
    "attention": {
        "in": "x", "norm": "norm", "input": "input of\nq, k, v", "first": "q, k, v", "middle": "attention\nof heads",
        "second": "output", "out": "x + output",
    },
    "MLP": {
        "in": "x", "norm": "norm", "input": "input\nof up", "first": "up", "middle": "gelu", "second": "down",
        "out": "x + down",
    },
}  # fmt: skip
WEIGHTS = {"attention": ("$W_q$, $W_k$, $W_v$", "$W_{output}$"), "MLP": ("$W_{up}$", "$W_{down}$")}
BLOCK_MESSAGES = {  # of f and g
    ("tensor", "forward"): ("nothing", "all-reduce"),
    ("tensor", "backward"): ("all-reduce", "nothing"),
    ("sequence", "forward"): ("all-gather", "reduce-scatter"),
    ("sequence", "backward"): ("reduce-scatter", "all-gather"),
}
NAMES = {"one": "One process", "tensor": "Tensor parallelism", "sequence": "Tensor and sequence parallelism"}
WORDS = {
    ("one", "forward"): "every tensor is whole, and nothing is sent",
    ("tensor", "forward"): "each g sends an all-reduce, f sends nothing",
    ("tensor", "backward"): "each f sends an all-reduce, g sends nothing",
    ("sequence", "forward"): "f' sends an all-gather, g' a reduce-scatter",
    ("sequence", "backward"): "f' sends a reduce-scatter, g' an all-gather",
}


def split(kind: str, direction: str, place: str) -> str:
    """How the activation at a place of the block is split, or its gradient: a key of SPLITS."""
    if kind == "one":
        return "whole"
    if place in ("first", "middle"):
        return "columns"
    if place == "input":
        return "whole" if direction == "forward" else "summand"
    if place == "second":
        return "summand" if direction == "forward" else "whole"
    return "whole" if kind == "tensor" else "sequence"


def draw_block(kind: str, direction: str):
    """A transformer block, drawn from left to right, attention above and MLP below: what rank 0 of 2 holds of each
    activation (or of its gradient, backward) and of each weight, and which message f and g send.

    kind: "one", "tensor" or "sequence"; direction: "forward" or "backward"
    """
    fig, axes = plt.subplots(2, 1, figsize=(11, 6.0))
    for ax, (half, labels) in zip(axes, HALVES.items(), strict=True):
        _draw_half(ax, kind, direction, half, labels)
    used = ["whole"] if kind == "one" else ["whole", "columns", *["sequence"] * (kind == "sequence"), "summand"]
    handles = [_patch((0, 0), 1, 1, name) for name in used]
    names = ["whole"] if kind == "one" else [SPLITS[name][3] for name in used]
    what = "activations" if direction == "forward" else "gradients of activations"
    who = "" if kind == "one" else " of rank 0 of 2"
    title = f"{NAMES[kind]}, {direction}: {what} and weights{who}. Large boxes: tokens x features."
    fig.legend(handles, names, loc="outside lower center", ncols=4, fontsize=10.5, handlelength=1.2, columnspacing=1.3)
    fig.suptitle(title, fontsize=12.5)
    return fig


def _draw_half(ax, kind, direction, half, labels):
    ax.set(xlim=(-0.6, 11.05), ylim=(-0.6, 2.3))
    ax.axis("off")
    forward = direction == "forward"
    chain = [place for place in PLACES if kind != "one" or place not in "fg"]
    arrow = {"arrowstyle": "-|>", "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
    for left, right in zip(chain, chain[1:], strict=False):
        ends = [(PLACES[left] + _reach(left), 0.5), (PLACES[right] - _reach(right), 0.5)]
        begin, end = ends if forward else reversed(ends)
        ax.annotate("", end, begin, arrowprops=arrow | {"color": "black"})
    begin, end = (PLACES["in"], PLACES["out"]) if forward else (PLACES["out"], PLACES["in"])
    ax.plot([begin, begin, end], [1.0, 1.85, 1.85], color="#777777", lw=1.6)
    ax.annotate("", (end, 1.0), (end, 1.87), arrowprops=arrow | {"color": "#777777"})
    ax.text(5.2, 1.9, "residual connection", ha="center", va="bottom", size=10.5, color="#555555")
    ax.text(-0.5, 2.0, half, ha="left", va="bottom", size=13, weight="bold")
    below, above = {"ha": "center", "va": "top", "linespacing": 0.95}, {"ha": "center", "va": "bottom"}
    for place, label in labels.items():
        x = PLACES[place]
        _box(ax, (x - 0.42, 0.0), 0.84, 1.0, split(kind, direction, place))
        ax.text(x, -0.1, label, size=10.5, **below)
    steps = (("input", "first", "columns"), ("middle", "second", "rows"))
    for name, (left, right, cut) in zip(WEIGHTS[half], steps, strict=True):
        x = (PLACES[left] + PLACES[right]) / 2
        _box(ax, (x - 0.27, 0.72), 0.54, 0.54, "whole" if kind == "one" else cut)
        ax.text(x, 1.3, name + ("" if kind == "one" else f"\nby {cut}"), size=10, linespacing=0.95, **above)
    if kind == "one":
        return
    prime = "'" if kind == "sequence" else ""
    for place, message in zip("fg", BLOCK_MESSAGES[kind, direction], strict=True):
        sends, x = message != "nothing", PLACES[place]
        colour = plotting.VERMILION if sends else "#777777"
        ax.add_patch(Circle((x, 0.5), 0.3, fc=colour if sends else "white", ec=colour, lw=2, zorder=3))
        ink = "white" if sends else "#555555"
        ax.text(x, 0.49, place + prime, ha="center", va="center", size=14, style="italic", color=ink, zorder=4)
        style = {"size": 10.5, "color": colour, "weight": "bold" if sends else "normal", "zorder": 5}
        ax.text(x, 0.12, message.replace("-", "-\n"), bbox={"fc": "white", "ec": "none", "pad": 0.6}, **style, **below)


def _box(ax, corner, width, height, name) -> None:
    """The outline of a whole tensor, and the part of it that rank 0 holds."""
    ax.add_patch(Rectangle(corner, width, height, fc="white", ec="black", lw=1.0, ls=":"))
    ax.add_patch(_patch(corner, width, height, name))


def _reach(place: str) -> float:
    return 0.32 if place in "fg" else 0.44


def _patch(corner, width, height, name) -> Rectangle:
    """The part of a rectangle that rank 0 holds: the left half of the columns, the upper half of the rows."""
    across, down, colour, _ = SPLITS[name]
    x, y = corner
    hatch = "///" if name == "summand" else None
    corner = (x, y + (1 - down) * height)
    return Rectangle(corner, across * width, down * height, fc=colour, ec="black", lw=0.8, hatch=hatch)


def draw_split_mlp():
    """The two matrices of an MLP on two ranks, drawn so that the shapes of each product fit: by columns, then by rows;
    the two summands of full size, and their sum."""
    tokens, width, hidden = 0.5, 0.8, 1.6
    fig, ax = plt.subplots(figsize=(11, 4.4))
    ax.set(xlim=(-1.35, 9.75), ylim=(-2.15, 2.25), aspect="equal")
    ax.axis("off")
    large = {"ha": "center", "va": "center", "size": 16}
    for rank, y in enumerate((1.15, -1.15)):
        ax.text(-1.3, y, f"rank {rank}", va="center", size=13, weight="bold")
        tensors = (  # label, left edge, whole size, how it is split
            ("x", 0.0, (width, tokens), "whole"),
            (f"$A_{rank}$", 1.3, (hidden, width), "columns"),
            (f"$y_{rank}$ = gelu($xA_{rank}$)", 3.7, (hidden, tokens), "columns"),
            (f"$B_{rank}$", 5.75, (width, hidden), "rows"),
            (f"$y_{rank}B_{rank}$", 7.15, (width, tokens), "summand"),
        )
        for label, x, (across, down), split_by in tensors:
            corner = (x, y - down / 2)
            ax.add_patch(Rectangle(corner, across, down, fc="white", ec="black", lw=1.0, ls=":"))
            share = _patch((0, 0), 1, 1, split_by)
            left, top = corner[0], corner[1] + down
            if rank == 1:  # the right half of the columns, the lower half of the rows
                left, top = left + (1 - share.get_width()) * across, top - (1 - share.get_height()) * down
            size = (share.get_width() * across, share.get_height() * down)
            style = {"fc": share.get_facecolor(), "hatch": share.get_hatch(), "ec": "black", "lw": 0.8}
            ax.add_patch(Rectangle((left, top - size[1]), *size, **style))
            ax.text(x + across / 2, corner[1] - 0.08, label, ha="center", va="top", size=12)
        ax.text(1.05, y, "×", **large)
        ax.annotate("", (3.6, y), (3.0, y), arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": "black"})
        ax.text(3.28, y + 0.1, "gelu", ha="center", va="bottom", size=11)
        ax.text(5.52, y, "×", **large)
        ax.text(6.85, y, "=", **large)
        arrow = {"arrowstyle": "-|>", "lw": 1.6, "color": plotting.VERMILION, "shrinkA": 2, "shrinkB": 2}
        ax.annotate("", (8.75, 0.12 * (1 if rank == 0 else -1)), (8.0, y), arrowprops=arrow)
    ax.add_patch(Rectangle((8.8, -tokens / 2), width, tokens, fc=SPLITS["whole"][2], ec="black", lw=0.8))
    ax.text(9.2, -0.33, "their sum,\non both ranks", ha="center", va="top", size=12)
    ax.text(8.3, 0.0, "all-\nreduce", ha="center", va="center", size=11, weight="bold", color=plotting.VERMILION)
    for x, text in ((2.1, "by columns"), (6.15, "by rows"), (7.55, "summands")):
        ax.text(x, 2.1, text, ha="center", va="bottom", size=12)
    return fig


def draw_memory(measured: dict[int, list[tuple[int, int]]], kinds: list[str]):
    """Bars of the activations that autograd stores: number of ranks -> for each kind (bytes of parameters, bytes of
    activations)."""
    fig, ax = plt.subplots(figsize=(9.5, 3.2))
    for number, (kind, colour) in enumerate(zip(kinds, ("#9A9A9A", plotting.GREEN), strict=True)):
        places = [row + 0.38 * (number - 0.5) for row in range(len(measured))]
        values = [result[number][1] / 1e6 for result in measured.values()]
        bars = ax.barh(places, values, height=0.36, color=colour, label=kind)
        ax.bar_label(bars, [f"{value:.0f} MB" for value in values], padding=3)
    ax.set_yticks(range(len(measured)), [f"{n} rank" + "s" * (n > 1) for n in measured])
    ax.invert_yaxis()
    ax.set_xlabel("activations stored on rank 0 (MB)")
    ax.legend(loc="lower right", title="parallelism")
    return fig


@dataclass(frozen=True)
class Span:
    """What a GPU's cores ("compute") or its links ("network") do from `start` to `end`, in milliseconds."""

    lane: str
    label: str
    start: float
    end: float


def draw_spans(panels: dict[str, list[Span]]):
    """One panel for each title, all on one time axis: what the cores compute, and which messages travel meanwhile."""
    fig, axes = plt.subplots(len(panels), 1, figsize=(9.5, 1.25 * len(panels) + 0.7), sharex=True, squeeze=False)
    end = max(span.end for spans in panels.values() for span in spans)
    for ax, (title, spans) in zip(axes.flat, panels.items(), strict=True):
        for span in spans:
            row, colour = (0, plotting.BLUE) if span.lane == "compute" else (1, plotting.VERMILION)
            ax.broken_barh([(span.start, span.end - span.start)], (row, 0.8), fc=colour, ec="white", lw=1.2)
            middle = ((span.start + span.end) / 2, row + 0.42)
            ax.text(*middle, span.label, ha="center", va="center", size=10.5, color="white")
        last = max(span.end for span in spans)
        ax.plot([last, last], [-0.1, 1.9], color="black", ls=":", lw=1.2)
        ax.text(last + 0.008 * end, 0.9, f"{last:.2f} ms", va="center", size=12)
        ax.set_yticks([0.4, 1.4], ["cores", "links"])
        ax.tick_params(axis="y", length=0, labelsize=11)
        ax.set(xlim=(0, 1.1 * end), ylim=(1.9, -0.1))
        ax.set_title(title, loc="left", fontsize=12)
    axes[-1][0].set_xlabel("time (ms)")
    return fig


def draw_layer(bars: dict[str, tuple[float, float]], ylabel: str, domain: int | None = None):
    """Bars of a layer's time: label -> (milliseconds of arithmetic, milliseconds in which it waits for messages); the
    share of arithmetic above each. domain: so many bars from the left are inside one NVLink domain."""
    fig, ax = plt.subplots(figsize=(9.5, 3.8))
    labels, places = list(bars), range(len(bars))
    work, waiting = ([pair[number] for pair in bars.values()] for number in (0, 1))
    ax.bar(places, work, color=plotting.BLUE, label="arithmetic", width=0.7)
    hatched: dict[str, Any] = {"color": plotting.VERMILION, "hatch": "//", "ec": "white"}
    ax.bar(places, waiting, bottom=work, label="waits for messages", width=0.7, **hatched)
    top = max(a + b for a, b in bars.values())
    for place, (a, b) in zip(places, bars.values(), strict=True):
        ax.text(
            place, a + b + 0.015 * top, f"{a + b:.2g} ms\n{a / (a + b):.0%} busy", ha="center", va="bottom", size=11
        )
    if domain is not None and domain < len(bars):
        ax.axvline(domain - 0.5, color="black", ls=":", lw=1.5)
        ax.text(domain - 0.45, 1.19 * top, "several nodes →", ha="left", va="center", size=11)
        ax.text(domain - 0.55, 1.19 * top, "← one NVLink domain or node", ha="right", va="center", size=11)
    ax.set_xticks(places, labels)
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel=ylabel, ylim=(0, 1.26 * top), xlim=(-0.6, len(bars) - 0.4))
    fig.legend(loc="outside upper center", ncols=2)
    return fig


class LayerLab(Sliders):
    """Sliders for hardware, tokens, width and overlap, and bars of a layer's time over tensor-parallel sizes.

    topologies: names of hardware; overlaps: names of ways to overlap
    times:      function (topology, ranks, tokens, width, overlap) -> (seconds of arithmetic, seconds of waiting)
    domains:    name of hardware -> GPUs in one NVLink domain, or in one node where there is no NVLink
    """

    SIZES = (1, 2, 4, 8, 16, 32, 64)

    def __init__(self, topologies: list[str], overlaps: list[str], times, domains: dict[str, int]):
        self.times, self.domains = times, domains

        def choice(options, value, what):
            return widgets.SelectionSlider(options=options, value=value, description=what)

        super().__init__(
            {
                "topology": widgets.Dropdown(options=topologies, value=topologies[0], description="hardware"),
                "overlap": widgets.Dropdown(options=overlaps, value=overlaps[0], description="overlap"),
                "tokens": choice([512, 1024, 2048, 4096, 8192, 16384, 32768], 8192, "tokens"),
                "width": choice([2048, 4096, 8192, 12288, 16384], 8192, "width"),
            }
        )

    def draw(self, topology, overlap, tokens, width):
        bars = {}
        for ranks in self.SIZES:
            work, waiting = self.times(topology, ranks, tokens, width, overlap)
            bars[f"{ranks}"] = (work * 1e3, waiting * 1e3)
        inside = sum(ranks <= self.domains[topology] for ranks in self.SIZES)
        fig = draw_layer(bars, "one layer (ms)", inside)
        settings = f"{topology}; {tokens:,} tokens, width {width:,}; overlap: {overlap}"
        fig.axes[0].set_xlabel(f"tensor-parallel size; {settings}", fontsize=11)
        return fig
