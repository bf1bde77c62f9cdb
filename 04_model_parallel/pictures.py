"""Pictures of tensor parallelism: how an MLP's and a block's tensors are split, and when messages overlap."""

import itertools
from dataclasses import dataclass
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Circle, Rectangle

from common.lab import plotting, recordings

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
    used = {"one": ["whole"], "tensor": ["whole", "columns", "summand"]}
    used["sequence"] = ["whole", "columns", "sequence", "summand"]
    handles = [_patch((0, 0), 1, 1, name) for name in used[kind]]
    names = ["whole"] if kind == "one" else [SPLITS[name][3] for name in used[kind]]
    what = "activations" if direction == "forward" else "gradients of activations"
    who = "" if kind == "one" else " of rank 0 of 2"
    title = f"{NAMES[kind]}, {direction}: {what} and weights{who}. Large boxes: tokens x features."
    fig.legend(handles, names, loc="outside lower center", ncols=4, fontsize=10.5, handlelength=1.2, columnspacing=1.3)
    fig.suptitle(title, fontsize=12.5)
    return fig


def block_frames(*views: tuple[str, str]) -> list[tuple[plt.Figure, str, str]]:
    """For each view, (kind, direction), as for `draw_block`: a picture, its alt text, and a caption."""
    words = [f"{NAMES[kind]}, {direction}: {WORDS[kind, direction]}" for kind, direction in views]
    return [
        (draw_block(*view), f"A transformer block. {caption}", caption)
        for view, caption in zip(views, words, strict=True)
    ]


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


def draw_ways():
    """Two ways to divide one model of two layers over two ranks: tokens downwards, parameters to the right, and each
    cell in the colour of the rank that computes with these parameters for these tokens."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.3))
    ways = {
        "data parallelism": "sent: gradients, once per step",
        "layers": "sent: activations, where the colour changes",
    }
    for ax, (way, sent) in zip(axes, ways.items(), strict=True):
        for layer in range(2):
            left = 4.2 * layer
            for column in range(8):
                for token in range(8):
                    rank = layer if way == "layers" else token // 4
                    place, size = (left + column / 2, token), (0.5, 1)
                    ax.add_patch(Rectangle(place, *size, fc=plotting.PALETTE[rank], ec="white", lw=0.8))
            ax.add_patch(Rectangle((left, 0), 4, 8, fill=False, ec="black", lw=1))
            ax.text(left + 2, -0.25, f"parameters of layer {layer}", ha="center", va="bottom", size=11)
            for rank in (layer,) if way == "layers" else (0, 1):
                height = 4 if way == "layers" else 2 + 4 * rank
                ground = {"fc": plotting.PALETTE[rank], "ec": "none", "pad": 2}
                ink = "white" if rank == 0 else "black"
                ax.text(left + 2, height, f"rank {rank}", ha="center", va="center", size=13, color=ink, bbox=ground)
        ax.set(xlim=(-0.1, 8.3), ylim=(8.3, -1.2), ylabel="tokens", xticks=[], yticks=[])
        ax.set_xlabel(sent, fontsize=12, color=plotting.VERMILION)
        ax.set_title(way, fontsize=13, weight="bold")
        ax.spines[:].set_visible(False)
    return fig


def draw_boundary():
    """What crosses between two ranks' autograd graphs: numbers there, their gradient back, and no graph."""
    fig, ax = plt.subplots(figsize=(10, 3.3))
    for rank, (left, inside) in enumerate(((0.0, ("images", "part", "y")), (6.4, ("x", "part", "loss")))):
        colour = plotting.PALETTE[rank]
        ax.add_patch(Rectangle((left, 0), 4.4, 3, fc=colour, alpha=0.12, ec="none"))
        ax.text(left + 2.2, 3.1, f"rank {rank}: a graph of its own", ha="center", va="bottom", size=13, color="black")
        for place, name in enumerate(inside):
            x = left + 0.6 + 1.6 * place
            box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": colour, "lw": 2}
            ax.text(x, 1.5, name, ha="center", va="center", size=13, bbox=box, zorder=3)
            arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
            if place:
                ax.annotate("", (x - 0.45, 1.75), (x - 1.1, 1.75), arrowprops=arrow)
            if place and inside[place - 1] != "images":  # which need no gradient
                ax.annotate("", (x - 1.1, 1.25), (x - 0.45, 1.25), arrowprops=arrow | {"ls": "--"})
        ax.text(left + 3.0, 1.85, "forward", ha="center", va="bottom", size=10.5)
        ax.text(left + 3.0, 1.15, "backward", ha="center", va="top", size=10.5)
    arrow = {"arrowstyle": "-|>", "color": plotting.VERMILION, "lw": 2.5, "shrinkA": 0, "shrinkB": 0}
    word = {"ha": "center", "size": 12, "color": plotting.VERMILION}
    for height, ends in ((1.9, (4.3, 6.5)), (1.1, (6.5, 4.3))):
        ax.annotate("", (ends[1], height), (ends[0], height), arrowprops=arrow)
    ax.text(5.4, 2.0, "numbers of y", va="bottom", **word)
    ax.text(5.4, 1.0, "x.grad", va="top", **word)
    ax.text(3.8, 0.55, "y.backward(gradient)", ha="right", va="center", size=12, family="monospace")
    ax.text(7.0, 0.55, "x.requires_grad_()", ha="left", va="center", size=12, family="monospace")
    ax.set(xlim=(-0.1, 10.9), ylim=(-0.1, 3.6))
    ax.axis("off")
    return fig


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
            (f"$h_{rank}$ = gelu($xA_{rank}$)", 3.7, (hidden, tokens), "columns"),
            (f"$B_{rank}$", 5.75, (width, hidden), "rows"),
            (f"$h_{rank}B_{rank}$", 7.15, (width, tokens), "summand"),
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


def draw_f_and_g(
    values: dict[str, list[float]],
    messages: tuple[str, str],
    right: dict[str, list[float]] | None = None,
    b: tuple[float, float] = (4, 1),
):
    """The smallest MLP on two ranks, forward or backward, with a number in each box.

    values:   place ("x", "a", "h", "part", "y") -> the number there on rank 0 and on rank 1
    messages: what f and g do: "nothing" or "all-reduce"
    right:    for a backward pass, what the gradients should be; boxes with another number are marked
    b:        the row of B on rank 0 and on rank 1
    """
    fig, ax = plt.subplots(figsize=(10.5, 4.1))
    ax.set(xlim=(-1.25, 9.3), ylim=(-2.0, 2.6))
    ax.axis("off")
    places = {"x": 0.35, "f": 1.85, "h": 3.5, "part": 5.35, "g": 6.8, "y": 8.3}
    labels = {"x": "x", "h": "h" if right else "h = relu(x a)", "part": "part" if right else "part = h b", "y": "y"}
    d = "" if right is None else "gradient of "
    arrow = {"arrowstyle": "-|>", "lw": 1.6, "shrinkA": 0, "shrinkB": 0, "color": "black"}
    for rank, level in enumerate((1.0, -1.0)):
        ax.text(-1.2, level, f"rank {rank}", va="center", size=13, weight="bold")
        for left, to in itertools.pairwise(places):
            ends = [
                (places[left] + (0.3 if left in "fg" else 0.5), level),
                (places[to] - (0.3 if to in "fg" else 0.5), level),
            ]
            begin, end = ends if right is None else reversed(ends)
            ax.annotate("", end, begin, arrowprops=arrow)
        for place, label in labels.items():
            _number(ax, (places[place], level), (1.0, 0.62), values[place][rank], right and right[place][rank])
            if rank == 0:
                ax.text(places[place], 2.28, d.replace("of ", "of\n") + label, ha="center", va="center", size=11)
        weight = (places["h"], level + 0.72)
        _number(ax, weight, (0.62, 0.4), values["a"][rank], right and right["a"][rank], size=12)
        ax.text(weight[0] - 0.38, weight[1], f"{d}a", ha="right", va="center", size=10)
        between = (places["h"] + places["part"]) / 2
        ax.text(between, level + 0.08, f"b = {b[rank]:g}", ha="center", va="bottom", size=10.5)
    for name, message in zip("fg", messages, strict=True):
        sends = message != "nothing"
        colour = plotting.VERMILION if sends else "#777777"
        if sends:
            ax.plot([places[name]] * 2, [-0.7, 0.7], color=colour, lw=4, solid_capstyle="butt", zorder=1)
        box = {"fc": "white", "ec": "none", "pad": 1.5}
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "size": 11.5,
            "color": colour,
            "zorder": 5,
            "bbox": box,
        }
        ax.text(places[name], 0, message, weight="bold" if sends else "normal", **style)
        for level in (1.0, -1.0):
            ax.add_patch(Circle((places[name], level), 0.3, fc=colour if sends else "white", ec=colour, lw=2, zorder=3))
            ink = "white" if sends else "#555555"
            ax.text(places[name], level, name, ha="center", va="center", size=15, style="italic", color=ink, zorder=4)
    return fig


def f_and_g_frames(in_place: list, both_ways: list) -> list[tuple[plt.Figure, str, str]]:
    """What `draw_f_and_g` draws forward, and backward in three ways, each with its alt text and a caption: for the
    results of page 02's `split_mlp` on two ranks, (output, gradient by place), with a g that sums in place and one that
    sums both ways, and as it should be."""
    forward: dict[str, list[float]] = {"x": [1, 1], "a": [2, 3], "h": [2, 3], "part": [8, 3], "y": [11, 11]}
    right: dict[str, list[float]] = {"x": [11, 11], "a": [4, 1], "h": [4, 1], "part": [1, 1], "y": [1, 1]}
    drawn = draw_f_and_g(forward, ("nothing", "all-reduce"))
    frames = [(drawn, "Forward on two ranks: 8 and 3 are added to 11 on both", "forward: 8 + 3 = 11 on both ranks")]
    found = [
        {place: [gradient[place] for _, gradient in results] for place in right} for results in (in_place, both_ways)
    ]
    for values, messages, caption in (
        (found[0], ("nothing", "nothing"), "backward, nothing is summed: the gradient of x is 8 and 3"),
        (found[1], ("nothing", "all-reduce"), "backward, g sums: everything below it is doubled"),
        (right, ("all-reduce", "nothing"), "backward as it should be: f sums, g does nothing"),
    ):
        frames.append((draw_f_and_g(values, messages, right), f"Two ranks, {caption}", caption))
    return frames


def _number(ax, middle, size_of_box, value, right, size=15) -> None:
    """A box with a number; orange, with the right number below it, where there is a right one that differs."""
    (x, y), (width, height) = middle, size_of_box
    wrong = right is not None and value != right
    fill, edge, line = ("#FFE3D3", plotting.VERMILION, 2.4) if wrong else ("white", "black", 1.2)
    ax.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, zorder=2, fc=fill, ec=edge, lw=line))
    ax.text(x, y, f"{value:g}", ha="center", va="center", size=size, zorder=3)
    if wrong:
        place = {"ha": "center", "va": "top"} if height > 0.5 else {"ha": "left", "va": "center"}
        spot = (x, y - height / 2 - 0.06) if height > 0.5 else (x + width / 2 + 0.07, y)
        ax.text(*spot, f"should be {right:g}", size=10.5, color=plotting.VERMILION, weight="bold", zorder=6, **place)


@dataclass(frozen=True)
class Span:
    """What a GPU's cores ("compute") or its links ("network") do from `start` to `end`, in milliseconds."""

    lane: str
    label: str
    start: float
    end: float


def overlaps(product: float, message: float, chunks: int) -> dict[str, list[Span]]:
    """Four timelines of a column-split layer with sequence parallelism, for `draw_spans`: its backward pass, the
    reduce-scatter exposed or beside the weight's gradient; its forward pass with the all-gather exposed and in chunks
    round a ring. The gathered input is kept for the weight's gradient.

    product: milliseconds of one product; message: of a reduce-scatter, and of an all-gather
    """
    part, hop = product / chunks, message / (chunks - 1)
    begin = [0.0]  # of the product with each chunk: when the one before it is done and its own tokens are there
    for number in range(1, chunks):
        begin.append(max(begin[-1] + part, number * hop))
    return {
        "backward, nothing overlapped": [
            Span("compute", "gradient of x", 0, product),
            Span("network", "reduce-scatter", product, product + message),
            Span("compute", "of the weight", product + message, 2 * product + message),
        ],
        "backward, the weight's gradient meanwhile": [
            Span("compute", "gradient of x", 0, product),
            Span("network", "reduce-scatter", product, product + message),
            Span("compute", "of the weight", product, 2 * product),
        ],
        "forward, nothing overlapped": [
            Span("network", "all-gather", 0, message),
            Span("compute", "product", message, message + product),
        ],
        f"forward, in {chunks} chunks": [
            *(Span("compute", str(number), start, start + part) for number, start in enumerate(begin)),
            *(Span("network", str(number), (number - 1) * hop, number * hop) for number in range(1, chunks)),
        ],
    }


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


def draw_layer(bars: dict[str, tuple[float, float]], ylabel: str):
    """Bars of a layer's time: label -> (milliseconds of computation, milliseconds in which it waits for other ranks);
    the share of computation above each."""
    fig, ax = plt.subplots(figsize=(9.5, 3.8))
    labels, places = list(bars), range(len(bars))
    work, waiting = ([pair[number] for pair in bars.values()] for number in (0, 1))
    ax.bar(places, work, color=plotting.BLUE, label="computes", width=0.7)
    hatched: dict[str, Any] = {"color": plotting.VERMILION, "hatch": "//", "ec": "white"}
    ax.bar(places, waiting, bottom=work, label="waits for other ranks", width=0.7, **hatched)
    top = max(a + b for a, b in bars.values())
    for place, (a, b) in zip(places, bars.values(), strict=True):
        ax.text(
            place, a + b + 0.015 * top, f"{a + b:.2g} ms\n{a / (a + b):.0%} busy", ha="center", va="bottom", size=11
        )
    ax.set_xticks(places, labels)
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel=ylabel, ylim=(0, 1.26 * top), xlim=(-0.6, len(bars) - 0.4))
    fig.legend(loc="outside upper center", ncols=2)
    return fig


def _kind_in_prefill(row: dict) -> str:
    kinds = {"all_reduce": "all-reduce", "expert matmul": "MLP", "matmul": "other products", "attention": "attention"}
    return kinds.get(row["kind"], "everything else")


def print_all_reduces(rows: list[dict]) -> None:
    """How much of the time all-reduces take in the recording of a prompt on eight GPUs, and how much is hidden."""
    run = recordings.events(rows, kind=_kind_in_prefill)
    busy, span = recordings.length(recordings.spans(run)), max(end for *_, end in run)
    count, seconds = recordings.totals(run)["all-reduce"]
    print(
        f"{count} all-reduces: {1e3 * seconds:.2f} of {1e3 * busy:.2f} ms in which the GPU works, {seconds / busy:.0%}"
    )
    print(f"hidden behind other kernels: {recordings.hidden(run, 'all-reduce'):.0%}")
    one = [row for row in rows if row["kind"] == "all_reduce"]
    typical, numbers = median(row["duration_us"] for row in one), one[1]["elements"]
    print(f"the first takes {one[0]['duration_us']:.0f} µs, the median {typical:.1f} µs; of {numbers:,} numbers")
    print(f"the recording lasts {1e3 * span:.1f} ms; the GPU works for {busy / span:.0%} of it")


def draw_prefill_layer(rows: list[dict]):
    """One layer of that recording: from the end of an all-reduce to that of the next but one."""
    one = [row for row in rows if row["kind"] == "all_reduce"]
    begin, end = (one[number]["start_us"] + one[number]["duration_us"] for number in (20, 22))
    layer = recordings.events(rows, between=(begin, end), kind=_kind_in_prefill)
    shown = ["all-reduce", "MLP", "other products", "attention", "everything else"]
    hues = [plotting.VERMILION, plotting.BLUE, plotting.GREEN, plotting.ORANGE, "#777777"]
    events = sorted(layer, key=lambda event: shown.index(event[1]))
    return plotting.timeline(events, colours=dict(zip(shown, hues, strict=True)))
