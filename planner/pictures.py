"""Pictures of "Choosing": where a step's time goes, what a network exposes, bytes on links, and the scoreboard."""

import matplotlib.pyplot as plt

from common.lab import plotting
from planner.estimate import Estimate
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


def draw_exposed(curves: dict[str, list[tuple[int, float]]], turns: dict[str, float]):
    """Share of a step that waits for messages, against the tokens of a GPU.

    curves: name of a network -> (tokens, share) pairs; turns: name -> tokens from which on messages can be hidden
    """
    fig, ax = plt.subplots(figsize=(8.6, 3.4))
    for colour, (name, points) in zip(plotting.PALETTE, curves.items(), strict=False):
        tokens, shares = zip(*points, strict=True)
        ax.plot(tokens, shares, "o-", color=colour)
        ax.axvline(turns[name], color=colour, ls="--", lw=1.5)
        ax.text(1.07 * turns[name], 1.24, f"{name}:\n{turns[name]:,.0f} tokens", color=colour, va="top", size=11)
    ax.set(xscale="log", xlim=(400, 1e6), ylim=(0, 1.25), yticks=[0, 0.25, 0.5, 0.75, 1])
    ax.set(xlabel="tokens of a GPU in a step", ylabel="share of the step\nthat waits")
    ax.set_xticks([512 * 4**k for k in range(6)], [f"{512 * 4**k:,}" for k in range(6)])
    ax.xaxis.set_minor_locator(plt.NullLocator())
    return fig


def draw_scores(lines: list[Line]):
    """Predicted over measured, for each published run: a row for each source."""
    fig, axes = plt.subplots(1, 2, figsize=(9.5, 5.4), width_ratios=[7, 4], sharex=True, sharey=True)
    sources = list(dict.fromkeys(line.run.source for line in lines))
    for ax, what in zip(axes, ("time_error", "memory_error"), strict=True):
        for row, source in enumerate(sources):
            errors = [getattr(line, what) for line in lines if line.run.source == source]
            errors = [error for error in errors if error is not None]
            places = [row + 0.6 * (k + 0.5) / len(errors) - 0.3 for k in range(len(errors))]
            ax.plot([1 + error for error in errors], places, "o", color=plotting.BLUE, ms=4)
        ax.axvline(1, color="black", lw=1)
        ax.axvspan(0.9, 1.1, color="#EEEEEE", zorder=0)
        ax.set(title="time of a step (grey: within 10%)" if what == "time_error" else "memory", xlim=(0.3, 1.7))
        ax.set_xlabel("predicted / measured")
    axes[0].set_yticks(range(len(sources)), sources, fontsize=9)
    axes[0].invert_yaxis()
    return fig
