"""Pictures of the notebooks on long contexts: the turns of a ring of four ranks, masks, heads against tokens, bytes."""

from dataclasses import dataclass

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from common.lab import plotting
from common.lab.sliders import Sliders

RANK_COLOURS = plotting.PALETTE[:4]  # of four ranks
GREY, PALE = "#DDDDDD", 0.28
ARROW = {"arrowstyle": "-|>", "mutation_scale": 20, "lw": 3, "color": plotting.BLACK, "shrinkA": 0, "shrinkB": 0}


@dataclass(frozen=True)
class Product:
    """A block of queries times a block of keys: their chunks, the rank that computes it, and in which turn."""

    query: int
    key: int
    rank: int
    turn: int
    diagonal: bool = False


def draw_turn(turn, products, owner, causal):
    """One turn of the forward pass: on the left what each rank holds and sends, on the right which products of query
    chunks and key chunks are computed now, were computed before, or are masked.

    products: all of the run
    owner:    chunk -> the rank that holds it; as many ranks as the ring has
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.4), width_ratios=(1, 1.05))
    size = max(owner.values()) + 1
    chunks = {rank: [str(chunk) for chunk in owner if owner[chunk] == rank] for rank in range(size)}
    for rank in range(size):
        source = (rank - turn) % size
        texts = [(f"queries {' and '.join(chunks[rank])}", RANK_COLOURS[rank], PALE)]
        texts.append((f"keys, values {' and '.join(chunks[source])}", RANK_COLOURS[source], 1.0))
        _station(left, rank, texts)
    if turn < size - 1:
        _arrows(left)
    left.text(0, 0, "sent on during\nthis turn" if turn < size - 1 else "nothing\nis sent", ha="center", va="center")
    for number in range(len(owner)):
        for key in range(len(owner)):
            _cell(right, number, key, GREY if causal and key > number else "white", 1.0)
    for product in products:
        if product.turn <= turn:
            now = product.turn == turn
            colour, alpha = RANK_COLOURS[owner[product.key]], 1.0 if now else PALE
            _cell(right, product.query, product.key, colour, alpha, triangle=product.diagonal)
            if now:
                dx, dy = (0.33, 0.7) if product.diagonal else (0.5, 0.5)
                label = {"ha": "center", "va": "center", "color": _ink(colour), "size": 11, "weight": "bold"}
                right.text(product.key + dx, product.query + dy, str(product.rank), **label)
    ticks = [number + 0.5 for number in range(len(owner))]
    right.set_xticks(ticks, range(len(owner)))
    right.set_yticks(ticks, [f"{number}, of rank {owner[number]}" for number in owner])
    right.set(xlim=(0, len(owner)), ylim=(len(owner), 0), xlabel="keys of chunk", aspect="equal")
    right.set_title("solid: now, with the rank; pale: before", fontsize=11)
    right.set_ylabel("queries of chunk")
    right.spines[:].set_visible(False)
    right.tick_params(length=0)
    return fig


def draw_backward(turn, held, parts):
    """One turn of the backward pass: whose keys each rank has, and the sum of their gradients that it passes on.

    held:  for each rank, whose keys and values it has in this turn
    parts: for each rank, the ranks whose parts are in the sum; none where no sum is sent
    """
    size = len(held)
    fig, ax = plt.subplots(figsize=(8.6, 4.2))
    for rank in range(size):
        texts = [(f"keys, values {held[rank]}", RANK_COLOURS[held[rank]], 1.0)]
        if not parts[rank]:
            texts.append(("its own part stays here", "white", 1.0))
        else:
            ranks = f"rank{'s' * (len(parts[rank]) > 1)} {', '.join(map(str, parts[rank]))}"
            texts.append((f"gradients {held[rank]}: from {ranks}", RANK_COLOURS[held[rank]], PALE))
        _station(ax, rank, texts, wide=1.55)
    _arrows(ax, 1.55)
    when = "gradients sent on\nafter this turn"
    if turn < size - 1:
        when = "keys, values sent on\nduring this turn" + ",\ngradients after it" * (turn > 0)
    ax.text(0, 0, when, ha="center", va="center")
    ax.set_xlim(-3.4, 3.4)
    return fig


def turn_frames() -> list[tuple[plt.Figure, str, str]]:
    """The turns of a ring of four ranks, forward, without a mask: pictures, with alt texts and captions."""
    products = [Product(rank, (rank - turn) % 4, rank, turn) for turn in range(4) for rank in range(4)]
    frames = []
    for turn in range(4):
        fig = draw_turn(turn, products, owner={chunk: chunk for chunk in range(4)}, causal=False)
        now = ", ".join(f"rank {p.rank} has keys {p.key}" for p in products if p.turn == turn)
        frames.append((fig, f"Turn {turn} of a ring of four ranks: {now}", f"Turn {turn}: {now}"))
    return frames


def backward_frames() -> list[tuple[plt.Figure, str, str]]:
    """The turns of its backward pass: whose keys each rank holds, and whose parts are in the sum that it sends on."""
    frames = []
    for turn in range(4):
        held = [(rank - turn) % 4 for rank in range(4)]
        parts = [sorted((rank - back) % 4 for back in range(turn)) for rank in range(4)]
        caption = f"sums of {turn} parts are sent on" if turn else "each rank keeps the part for its own keys"
        if turn == 3:
            caption += ", home: the next rank owns these keys, and adds the part that it kept in turn 0"
        fig = draw_backward(turn, held, parts)
        frames.append((fig, f"Turn {turn} of the backward pass on four ranks: {caption}", f"Turn {turn}: {caption}"))
    return frames


def draw_deals(orders):
    """For each title the blocks that a causal mask leaves of 8 x 8 chunks, in the colour of the rank that computes them
    where `orders[title](rank, 4)` gives a rank its two chunks; and how many it computes, a triangle being half."""
    fig, axes = plt.subplots(1, len(orders), figsize=(8.6, 4.3))
    for ax, (title, order) in zip(axes, orders.items(), strict=True):
        for rank in range(4):
            for query in order(rank, 4):
                for key in range(query + 1):
                    _cell(ax, query, key, RANK_COLOURS[rank], 1.0, triangle=key == query)
                ax.text(-0.2, query + 0.5, f"rank {rank}", ha="right", va="center", size=11, color=RANK_COLOURS[rank])
            blocks = sum(query + 0.5 for query in order(rank, 4))
            ax.text(7.5, rank + 0.5, f"{blocks:g} blocks", ha="right", va="center", color=RANK_COLOURS[rank])
        ax.set(xlim=(0, 8), ylim=(8, 0), xticks=[], yticks=[], title=title, xlabel="keys", aspect="equal")
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("queries", labelpad=48)
    return fig


def draw_masks(allowed, panels):
    """One mask, its rows coloured by the rank that computes them, for several orders of the tokens; below it, how many
    pairs of a query and a key each rank computes.

    allowed: [queries, keys] of bool
    panels:  title -> rank of each query [queries]
    """
    fig, (axes, below) = plt.subplots(2, len(panels), figsize=(9.8, 4.9), sharey="row", height_ratios=(2.6, 1))
    for ax, bars, (title, ranks) in zip(axes, below, panels.items(), strict=True):
        shown = (ranks[:, None] + 1) * allowed  # 0: masked
        ax.imshow(shown, cmap=ListedColormap([GREY, *RANK_COLOURS]), vmin=0, vmax=4, interpolation="nearest")
        ax.set(xlabel="keys", xticks=[], yticks=[])
        ax.set_title(title, fontsize=12)
        pairs = [int(allowed[ranks == rank].sum()) for rank in range(4)]
        bars.bar_label(bars.bar(range(4), pairs, color=RANK_COLOURS), fontsize=10)
        bars.set(xticks=[], yticks=[], ylim=(0, 1.25 * max(bars.get_ylim()[1], 1)))
        bars.spines["left"].set_visible(False)
    axes[0].set_ylabel("queries")
    below[0].set_ylabel("pairs")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (*RANK_COLOURS, GREY)]
    names = [*(f"rank {rank}" for rank in range(4)), "masked"]
    fig.legend(handles, names, loc="outside lower center", ncols=5, fontsize=11)
    return fig


def draw_exchange(before, after):
    """Who holds which token of which head, before and after the all-to-all: before[token][head] is a rank."""
    fig, axes = plt.subplots(1, 3, figsize=(9.2, 3.1), width_ratios=(4, 1.1, 4))
    titles = ("before: all heads of some tokens", "after: all tokens of some heads")
    for ax, ranks, title in zip((axes[0], axes[2]), (before, after), titles, strict=True):
        for token, row in enumerate(ranks):
            for head, rank in enumerate(row):
                _cell(ax, token, head, RANK_COLOURS[rank], 1.0)
                ax.text(
                    head + 0.5,
                    token + 0.5,
                    f"rank {rank}",
                    ha="center",
                    va="center",
                    color=_ink(RANK_COLOURS[rank]),
                    size=10,
                )
        heads, tokens = len(ranks[0]), len(ranks)
        ax.set_xticks([h + 0.5 for h in range(heads)], [f"head {h}" for h in range(heads)], fontsize=11)
        ax.set_yticks([t + 0.5 for t in range(tokens)], [f"token {t}" for t in range(tokens)], fontsize=11)
        ax.set(xlim=(0, heads), ylim=(tokens, 0))
        ax.set_title(title, fontsize=12)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    axes[1].set(xlim=(0, 1), ylim=(0, 1))
    axes[1].set_axis_off()
    axes[1].text(0.5, 0.56, "all-to-all", ha="center", va="bottom")
    axes[1].add_patch(FancyArrowPatch((0.05, 0.5), (0.95, 0.5), **ARROW))
    return fig


def attention_times(tokens, ranks, share, rate, bandwidth, width=4096):
    """Seconds of one causal attention layer's forward pass on a rank: name -> (computing, waiting for messages).

    tokens:    of the sequence, over all ranks
    share:     heads for keys and values / heads for queries
    rate:      operations per second of the attention kernel
    bandwidth: bytes per second that a rank sends

    Messages are in 16 bits. Latencies are left out, and that messages slow the computation down.
    """
    computing = 2 * width * tokens**2 / ranks / rate
    hop = 4 * share * width * tokens / ranks / bandwidth  # keys and values of one rank
    exchanged = 4 * (1 + share) * width * tokens / ranks * (ranks - 1) / ranks  # q, k, v and the output
    return {
        "all-gather": (computing, (ranks - 1) * hop),
        "ring": (computing, (ranks - 1) * max(0.0, hop - computing / ranks)),
        "Ulysses": (computing, exchanged / bandwidth),
    }


class ContextLab(Sliders):
    """Sliders for `attention_times`, and bars of what computes and what waits."""

    def __init__(self):
        kernels = [("FlashAttention-2 (35% of 989)", 0.35 * 989e12), ("FlashAttention-3 (740 TFLOP/s)", 740e12)]
        links = [("Ethernet, 12.5 GB/s", 12.5e9), ("InfiniBand, 50 GB/s", 50e9), ("NVLink, 450 GB/s", 450e9)]
        lengths = [(f"{2**power:,}", 2**power) for power in range(13, 21)]
        super().__init__(
            {
                "tokens": widgets.SelectionSlider(options=lengths, value=2**17, description="tokens"),
                "ranks": widgets.SelectionSlider(options=[2, 4, 8, 16, 32], value=8, description="ranks"),
                "share": widgets.SelectionSlider(
                    options=[("8 of 32", 0.25), ("32 of 32", 1.0)], value=1.0, description="heads for k, v"
                ),
                "rate": widgets.Dropdown(options=kernels, value=740e12, description="kernel"),
                "bandwidth": widgets.Dropdown(options=links, value=50e9, description="link"),
            }
        )

    def draw(self, **values):
        times = attention_times(**values)
        fig, ax = plt.subplots(figsize=(8.6, 2.6))
        hatched = {"fc": plotting.VERMILION, "ec": "white", "hatch": "//"}
        for row, (computing, waiting) in enumerate(times.values()):
            ax.barh(row, 1e3 * computing, color=plotting.BLUE)
            ax.barh(row, 1e3 * waiting, left=1e3 * computing, **hatched)
            ax.text(1e3 * (computing + waiting), row, f" waits {1e3 * waiting:.1f} ms", va="center", size=11)
        ax.set_yticks(range(3), times)
        ax.invert_yaxis()
        ax.set(xlabel="forward pass of attention in one layer (ms)")
        ax.set_xlim(0, 1.25e3 * max(map(sum, times.values())))
        handles = [Rectangle((0, 0), 1, 1, color=plotting.BLUE), Rectangle((0, 0), 1, 1, **hatched)]
        fig.legend(handles, ["computes", "waits for messages"], loc="outside upper center", ncols=2, fontsize=11)
        return fig


def _place(rank, wide):
    """Ranks in the corners of a square, clockwise from the upper left."""
    x, y = [(-1, 1), (1, 1), (1, -1), (-1, -1)][rank]
    return x * wide, y * 0.95


def _station(ax, rank, texts, wide=1.25):
    x, y = _place(rank, wide)
    half = _half(wide)
    ax.text(x, y + 0.62, f"rank {rank}", ha="center", va="center", weight="bold", color=RANK_COLOURS[rank])
    for line, (text, colour, alpha) in enumerate(texts):
        bottom = y + 0.02 - 0.42 * line
        ax.add_patch(Rectangle((x - half, bottom), 2 * half, 0.4, fc="white", ec="none"))
        ax.add_patch(Rectangle((x - half, bottom), 2 * half, 0.4, fc=colour, alpha=alpha, ec="none"))
        ax.add_patch(Rectangle((x - half, bottom), 2 * half, 0.4, fill=False, ec="#444444", lw=1))
        ink = _ink(colour) if alpha == 1.0 else "black"
        ax.text(x, bottom + 0.19, text, ha="center", va="center", size=10.5, color=ink)
    ax.set(xlim=(-2.5, 2.5), ylim=(-1.75, 1.8))
    ax.set_axis_off()


def _arrows(ax, wide=1.25):
    gap = 0.8 * (wide - _half(wide))
    sides = [((-gap, 0.97), (gap, 0.97)), ((wide, 0.42), (wide, -0.1))]  # upper and right; the others mirror them
    for start, end in [*sides, *(((-x, -y), (-u, -v)) for (x, y), (u, v) in sides[:1]), ((-wide, -0.1), (-wide, 0.42))]:
        ax.add_patch(FancyArrowPatch(start, end, **ARROW))


def _half(wide):
    return 0.78 * wide + 0.05


def _cell(ax, row, column, colour, alpha, triangle=False):
    if triangle:
        corners = [(column, row), (column, row + 1), (column + 1, row + 1)]
        ax.add_patch(Polygon(corners, fc=colour, alpha=alpha, ec="none"))
    else:
        ax.add_patch(Rectangle((column, row), 1, 1, fc=colour, alpha=alpha, ec="none"))
    ax.add_patch(Rectangle((column, row), 1, 1, fill=False, ec="#999999", lw=0.8))


def _ink(colour):
    """The colour of a text that can be read on `colour`."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
