"""Pictures of "Choosing": where a step's time goes, what a network exposes, bytes on links, and the scoreboard."""

import matplotlib.pyplot as plt

from common.lab import plotting
from planner.estimate import Estimate
from planner.fit import project
from planner.scoreboard import Line

TIMES = {"work": "#999999", "messages in layers": plotting.VERMILION, "bubble": "#DDDDDD",
         "messages of state": plotting.BLACK, "optimizer": plotting.SKY}  # fmt: skip


def draw_times(rows: dict[str, Estimate]):
    """A step of each layout, by what its time goes into."""
    fig, ax = plt.subplots(figsize=(9.5, 1.4 + 0.5 * len(rows)))
    for row, found in enumerate(rows.values()):
        end = 0.0
        for name, seconds in found.step.parts.items():
            ax.barh(row, seconds, 0.7, end, color=TIMES[name], ec="white", lw=0.5)
            end += seconds
        ax.text(end, row, f" {end:.1f} s, fits: {found.fits}", va="center")
    longest = max(one.seconds for one in rows.values())
    ax.set(yticks=range(len(rows)), xlabel="one step (seconds)", xlim=(0, 1.25 * longest))
    ax.set_yticklabels(rows, fontsize=11)
    ax.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in TIMES.values()]
    fig.legend(handles, TIMES, loc="outside upper center", ncols=5, fontsize=11)
    return fig


def draw_exposed(curves: dict[tuple[str, int], dict[int, float]], turns: dict[str, float]):
    """Share of a step that waits for messages, against the tokens of a GPU in a micro-batch: a panel per strategy.

    curves: (strategy, micro-batches of a step) -> {tokens: share}; turns: strategy -> tokens that hide its messages
    """
    fig, axes = plt.subplots(1, len(turns), figsize=(9.5, 3.3), sharey=True)
    for ax, (name, turn) in zip(axes, turns.items(), strict=True):
        own = {count: points for (strategy, count), points in curves.items() if strategy == name}
        for colour, (count, points) in zip(plotting.PALETTE, own.items(), strict=False):
            label = f"{count} micro-batch{'es' * (count > 1)} in a step"
            ax.plot(points.keys(), points.values(), "o-", color=colour, ms=5, label=label)
        ax.axvline(turn, color="black", ls="--", lw=1)
        ax.text(turn * 1.1, 0.99, f"the rule:\n{turn:,.0f}", va="top", size=10)
        ticks = [2048 * 4**k for k in range(4)]
        ax.set(xscale="log", ylim=(0, 1), title=name, xlabel="tokens of a GPU in a micro-batch")
        ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=11)
        ax.xaxis.set_minor_locator(plt.NullLocator())
    axes[0].set_ylabel("share of the step\nthat waits")
    axes[-1].legend(loc="lower left", fontsize=10)
    return fig


def draw_scores(lines: list[Line]):
    """Predicted over measured for each published run, a row for each project; orange: not in the stated interval;
    grey: out of the planner's scope, where the interval is wider."""
    fig, axes = plt.subplots(1, 2, figsize=(9.5, 4.4), width_ratios=[7, 4], sharex=True, sharey=True)
    projects = list(dict.fromkeys(project(line.run.source) for line in lines))
    for ax, what, inside in zip(axes, ("time_error", "memory_error"), ("inside", "memory_inside"), strict=True):
        for row, name in enumerate(projects):
            own = [line for line in lines if project(line.run.source) == name and getattr(line, what) is not None]
            errors = [1 + getattr(line, what) for line in own]
            places = [row + 0.6 * (k + 0.5) / len(errors) - 0.3 for k in range(len(errors))]
            colours = ["#AAAAAA" if not line.in_scope else plotting.BLUE if getattr(line, inside) else plotting.ORANGE
                       for line in own]  # fmt: skip
            ax.scatter(errors, places, c=colours, s=14)
        ax.axvline(1, color="black", lw=1)
        ax.set(title="time of a step" if what == "time_error" else "memory", xlim=(0.3, 1.7))
        ax.set_xlabel("predicted / measured")
    axes[0].set_yticks(range(len(projects)), projects, fontsize=10)
    axes[0].invert_yaxis()
    return fig
