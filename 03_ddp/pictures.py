"""Pictures of how ranks are fed: what they read in an epoch, how much, and when they wait."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting

DOING = {
    "waits for its batch": plotting.YELLOW,
    "reads": plotting.BLUE,
    "decodes": plotting.ORANGE,
    "computes": plotting.GREEN,
}


def draw_batches(panels: dict, highest: int):
    """For each title -> steps -> ranks -> examples: a row per step, a square per example, coloured by its number."""
    fig, axes = plt.subplots(1, len(panels), figsize=(9.5, 2.7))
    for ax, (title, steps) in zip(axes, panels.items(), strict=True):
        rows = [[example for share in ranks for example in share] for ranks in steps]
        ax.imshow(rows, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
        for row, examples in enumerate(rows):
            for column, example in enumerate(examples):
                ink = "white" if example < 0.6 * highest else "black"
                ax.text(column, row, example, ha="center", va="center", color=ink, size=12)
        width = len(steps[0][0])
        for rank in range(1, len(steps[0])):
            ax.axvline(rank * width - 0.5, color="white", lw=5)
        ranks = range(len(steps[0]))
        ax.set_xticks([(rank + 0.5) * width - 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks])
        ax.set_yticks(range(len(rows)), [f"step {step}" for step in range(len(rows))])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_title(title, fontsize=13)
    return fig


def draw_work(work: dict):
    """name -> (records read, decoded, used), each a list of one number per rank: a panel per name, on one scale."""
    fig, axes = plt.subplots(1, len(work), figsize=(11, 3.3), sharey=True)
    looks = (("read", plotting.BLUE), ("decoded", plotting.ORANGE), ("used", plotting.GREEN))
    for ax, (name, columns) in zip(axes, work.items(), strict=True):
        for place, (values, (label, colour)) in enumerate(zip(columns, looks, strict=True)):
            ax.bar([rank + (place - 1) * 0.27 for rank in range(len(values))], values, 0.25, color=colour, label=label)
        ax.set_title(name.replace("-workers", "-\nworkers"), fontsize=12)
        ax.set(xlabel="rank", xticks=range(len(columns[0])))
    axes[0].set_ylabel("records")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return fig


def draw_rates(rates: dict):
    """name -> (predicted, measured) examples per second: two bars for each name, with their values."""
    fig, ax = plt.subplots(figsize=(9.5, 3.6))
    for place, (label, colour) in enumerate((("predicted", "#BBBBBB"), ("measured", plotting.BLUE))):
        at = [number + 0.4 * place - 0.2 for number in range(len(rates))]
        bars = ax.bar(at, [pair[place] for pair in rates.values()], 0.38, color=colour, label=label)
        ax.bar_label(bars, fmt="%.0f", size=11)
    ax.set_xticks(range(len(rates)), [name.replace("-workers", "-\nworkers") for name in rates], fontsize=12)
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="examples per second", ylim=(0, 1.12 * max(map(max, rates.values()))))
    ax.legend()
    return fig


def draw_steps(panels: dict):
    """title -> events (rank, one of DOING, start, end) in seconds: a panel for each title, all on one time axis. What
    comes later in DOING lies on top."""
    ranks = 1 + max(rank for events in panels.values() for rank, *_ in events)
    fig, axes = plt.subplots(len(panels), 1, figsize=(10, 1.75 * len(panels) + 0.8), sharex=True)
    for ax, (title, events) in zip(axes, panels.items(), strict=True):
        origin = min(start for _, _, start, _ in events)
        for name, colour in DOING.items():
            for rank, what, start, end in events:
                if what == name:
                    bar = [(1e3 * (start - origin), 1e3 * (end - start))]
                    ax.broken_barh(bar, (rank - 0.4, 0.8), color=colour, ec="white", lw=0.4)
        last = 1e3 * (max(end for *_, end in events) - origin)
        ax.text(last + 3, (ranks - 1) / 2, f"{last:.0f} ms", va="center", size=12)
        ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=10)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=13)
    axes[-1].set_xlabel("time (ms)")
    axes[0].set_xlim(0, 1.1 * axes[0].dataLim.xmax)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in DOING.values()]
    fig.legend(handles, DOING, loc="outside lower center", ncols=4, fontsize=12)
    return fig
