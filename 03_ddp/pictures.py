"""Pictures of ranks that wait for a late one."""

import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from common.lab import plotting


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
