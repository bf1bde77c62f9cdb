"""Pictures of how ranks are fed, and of ranks that wait for a late one."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting

DOING = {
    "waits for its batch": plotting.YELLOW,
    "loads": plotting.BLUE,
    "computes": plotting.GREEN,
}


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


def draw_late(panels: dict):
    """title -> for each rank (start, end of its work, end of the all-reduce) of each step, in seconds: a panel for
    each title, on one time axis."""
    fig, axes = plt.subplots(len(panels), 1, figsize=(9.5, 2.1 * len(panels) + 0.7), sharex=True)
    for ax, (title, ranks) in zip(axes, panels.items(), strict=True):
        origin = min(steps[0][0] for steps in ranks)
        for rank, steps in enumerate(ranks):
            for start, middle, end in steps:
                for left, right, colour in ((start, middle, plotting.SKY), (middle, end, plotting.ORANGE)):
                    place = [((left - origin) * 1e3, (right - left) * 1e3)]
                    ax.broken_barh(place, (rank - 0.4, 0.8), fc=colour, ec="white", lw=0.6)
        ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=11)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=13)
    axes[-1].set_xlabel("time (ms)")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (plotting.SKY, plotting.ORANGE)]
    fig.legend(handles, ["works (sleeps)", "in the all-reduce"], loc="outside lower center", ncols=2, fontsize=12)
    return fig
