"""Pictures of the notebooks on experts: capacity, tokens that travel, loads, and a recorded exchange."""

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch, Rectangle

from common.lab import plotting, recordings


def draw_capacity(choices, capacity, factor):
    """How many tokens chose each expert, of which those beyond the capacity are dropped. choices: [experts]"""
    fig, ax = plt.subplots(figsize=(7.6, 3.2))
    experts, taken = range(len(choices)), [min(count, capacity) for count in choices]
    ax.bar(experts, taken, color=plotting.BLUE)
    for expert, count in enumerate(choices):
        if count > capacity:
            ax.bar(expert, count - capacity, bottom=capacity, fc="white", ec=plotting.VERMILION, hatch="//")
            label = f"{count - capacity} dropped"
            ax.text(expert, count + 0.15, label, ha="center", color=plotting.VERMILION, size=11)
    ax.axhline(capacity, color=plotting.BLACK, ls="--", lw=1.5)
    ax.text(len(choices) - 0.45, capacity, f" capacity {capacity}", va="bottom", size=11)
    ax.set(xlabel="expert", ylabel="tokens that chose it", xlim=(-0.6, len(choices) + 0.9))
    ax.set_ylim(0, max(choices) + 1.5)
    ax.set_xticks(experts)
    ax.set_title(f"capacity factor {factor}", fontsize=12)
    return fig


def draw_tokens(before, after, titles):
    """Tokens before and after a step, with an arrow for each.

    before, after: for each rank, the list of (name of the token, its expert) in the order in which they lie there
    titles:        one for each side

    A token has the colour of the rank of its expert: of experts 0 and 1 that is rank 0, and so on.
    """
    size = len(before)
    tallest = max(sum(map(len, side)) for side in (before, after)) + size
    fig, ax = plt.subplots(figsize=(7.4, 0.27 * tallest + 0.6))
    ends = []
    for x, side, title in zip((0, 4.6), (before, after), titles, strict=True):
        place, y = {}, 0.0
        ax.text(x + 1.0, -0.35, title, ha="center", va="bottom")
        for rank, tokens in enumerate(side):
            middle, where = y + max(len(tokens), 1) / 2, -0.15 if x == 0 else 2.15
            ax.text(x + where, middle, f"rank {rank}", ha="right" if x == 0 else "left", va="center", weight="bold")
            for name, expert in tokens:
                colour, label = plotting.PALETTE[expert // 2], f"{name}, expert {expert}"
                ink = "white" if colour == plotting.BLUE else "black"
                ax.add_patch(Rectangle((x, y), 2.0, 0.9, color=colour, lw=0))
                ax.text(x + 1.0, y + 0.46, label, ha="center", va="center", color=ink, size=10.5)
                place[name] = y + 0.45
                y += 1
            y += 0.8 if tokens else 1.8
        ends.append(place)
    for name, y in ends[0].items():
        look = {"arrowstyle": "-|>", "mutation_scale": 10, "lw": 1.2, "color": "#555555", "shrinkA": 0, "shrinkB": 0}
        ax.add_patch(FancyArrowPatch((2.05, y), (4.55, ends[1][name]), **look))
    ax.set(xlim=(-1.1, 7.7), ylim=(tallest + 0.2, -1.3))
    ax.set_axis_off()
    return fig


def draw_loads(runs):
    """Heat maps of the experts' shares over the steps, on one scale. runs: title -> shares [steps, experts]"""
    fig, axes = plt.subplots(1, len(runs), figsize=(9.8, 2.8), sharey=True)
    for ax, (title, shares) in zip(axes, runs.items(), strict=True):
        image = ax.imshow(100 * shares.T, aspect="auto", cmap="cividis_r", vmin=0, vmax=50, interpolation="nearest")
        ax.set_title(title, fontsize=12)
        ax.set_xlabel("step")
    axes[0].set_ylabel("expert")
    fig.colorbar(image, ax=axes, label="share of the choices (%)")
    return fig


def shares(counts):
    """Counts [..., experts] as shares of their sum."""
    counts = torch.as_tensor(counts, dtype=torch.float32)
    return counts / counts.sum(-1, keepdim=True)


def draw_recorded_exchange(rows):
    """The first 10 ms of the recording of DLRM on eight V100s, a line for each rank: what it computes and sends. Ranks
    stand in the order in which they begin the first all-to-all."""

    def what(row):
        return "compute" if row["kind"] == "compute" else "all-to-all" if row["label"] else "all-reduce"

    early = [row for row in rows if row["start_us"] < 10_000]
    step = recordings.events(early, kind=what, lane=lambda row: f"rank {row['rank']}")
    colours = {"compute": plotting.BLUE, "all-to-all": plotting.ORANGE, "all-reduce": plotting.VERMILION}
    begins = {lane: start for lane, name, start, _ in reversed(step) if name == "all-to-all"}  # of the first
    fig = plotting.timeline(sorted(step, key=lambda event: begins[event[0]]), colours=colours)
    fig.axes[0].set_xlim(0, 10)
    look = {"arrowprops": {"arrowstyle": "->"}, "ha": "right", "va": "center"}
    fig.axes[0].annotate("rank 7 comes here", (9.687, 7), (8.8, 7), **look)
    return fig
