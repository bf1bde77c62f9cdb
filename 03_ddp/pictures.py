"""Pictures of how ranks are fed: what they read in an epoch, how much, and when they wait. And of scaling: a step on
few and many ranks, a profile, ranks that wait for a late one. And of gradients that are too large or small for fp16."""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

from common.lab import plotting
from course.ddp.buckets import EXPOSED

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


LIFE_OF_A_PROGRAM = ["meet", "connect", "build", "train", "save", "end"]


def draw_stage(stage: str, lines: list[str]):
    """The life of a distributed program as a row of boxes, `stage` among them marked, and lines of text below it."""
    fig, ax = plt.subplots(figsize=(9.5, 2.2))
    for place, name in enumerate(LIFE_OF_A_PROGRAM):
        colour = plotting.ORANGE if name == stage else "#E5E5E5"
        ax.add_patch(Rectangle((place, 0), 0.82, 0.5, facecolor=colour, edgecolor="black"))
        ax.text(place + 0.41, 0.25, name, ha="center", va="center", size=14)
        if place:
            ax.annotate("", (place, 0.25), (place - 0.18, 0.25), arrowprops={"arrowstyle": "->"})
    for number, line in enumerate(lines):
        ax.text(0, -0.3 - 0.27 * number, line, va="top", size=12)
    ax.set(xlim=(-0.05, len(LIFE_OF_A_PROGRAM)), ylim=(-0.9, 0.6))
    ax.axis("off")
    return fig


def draw_step(forward: float, backward: float, sent: list, title: str):
    """A simulated step of one rank: its passes, and below them the network's all-reduces (`Sent` of buckets.py). All
    in seconds; what is exposed is hatched."""
    fig, ax = plt.subplots(figsize=(9.5, 2.3))
    for start, length, colour in ((0, forward, plotting.SKY), (forward, backward, plotting.BLUE)):
        ax.broken_barh([(start * 1e3, length * 1e3)], (0, 0.8), fc=colour, ec="white")
    computed = forward + backward
    for bucket in sent:
        start, end = forward + bucket.start, forward + bucket.end
        if end - start < 1e-9:  # on one rank nothing is sent
            continue
        middle = min(max(start, computed), end)
        ax.broken_barh([(start * 1e3, (middle - start) * 1e3)], (1, 0.8), fc=plotting.ORANGE, ec="white", lw=0.3)
        ax.broken_barh([(middle * 1e3, (end - middle) * 1e3)], (1, 0.8), **(EXPOSED | {"lw": 0.3}))
    end = max(computed, forward + sent[-1].end)
    ax.axvline(computed * 1e3, color="black", lw=1.2, ls=":")
    ax.set_yticks([0.4, 1.4], ["computes", "all-reduces"])
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, end * 1e3 * 1.01), ylim=(2, -0.2), xlabel="time (ms)")
    ax.set_title(title, loc="left", fontsize=13)
    styles: tuple[dict[str, Any], ...] = ({"fc": plotting.SKY}, {"fc": plotting.BLUE}, {"fc": plotting.ORANGE}, EXPOSED)
    names = ("forward pass", "backward pass", "all-reduce, hidden", "all-reduce, exposed")
    fig.legend([Rectangle((0, 0), 1, 1, **style) for style in styles], names, loc="outside lower center", ncols=4,
               fontsize=11)  # fmt: skip
    return fig


PROFILE = {
    "forward": plotting.SKY,
    "backward": plotting.BLUE,
    "waits": "#DDDDDD",
    "optimizer": plotting.GREEN,
    "all-reduce": plotting.ORANGE,
}


def draw_profile(bars: list, shown: set, title: str):
    """One step of several ranks, two rows for each: the thread that computes, and gloo's threads.

    bars:  (rank, name of PROFILE, start, end) in seconds; shown: names in full colour, the others are pale
    """
    ranks = 1 + max(rank for rank, *_ in bars)
    origin = min(start for _, _, start, _ in bars)
    fig, ax = plt.subplots(figsize=(9.5, 1.1 * ranks + 1.3))
    for rank, name, start, end in bars:
        row = 2.3 * rank + (name == "all-reduce")
        alpha = 1.0 if name in shown else 0.15
        place = [((start - origin) * 1e3, (end - start) * 1e3)]
        ax.broken_barh(place, (row, 0.85), fc=PROFILE[name], ec="white", lw=0.6, alpha=alpha)
    rows = {2.3 * rank + row + 0.42: f"rank {rank}{what}" for rank in range(ranks)
            for row, what in ((0, ", computes"), (1, ", gloo"))}  # fmt: skip
    ax.set_yticks(list(rows), list(rows.values()), fontsize=11)
    ax.tick_params(axis="y", length=0)
    ax.set(ylim=(2.3 * ranks, -0.2), xlabel="time (ms)")
    ax.set_title(title, loc="left", fontsize=13)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in PROFILE.values()]
    fig.legend(handles, PROFILE, loc="outside lower center", ncols=5, fontsize=11)
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


def draw_range(gradients: torch.Tensor, title: str):
    """How large the elements of a gradient are, on a logarithmic axis, in front of what fp16 can hold."""
    sizes = gradients[gradients != 0].abs().log10().tolist()
    tiny, normal, largest = math.log10(2**-25), math.log10(2**-14), math.log10(65504)
    fig, ax = plt.subplots(figsize=(9.5, 2.9))
    regions = {
        "becomes 0": (-12, tiny, "#F3C9B0"), "loses digits": (tiny, normal, "#F6E9B2"),
        "fp16 is precise": (normal, largest, "#D5EBDD"), "infinite": (largest, 7, "#F3C9B0"),
    }  # fmt: skip
    top = 1.25 * ax.hist(sizes, bins=[size / 4 for size in range(-48, 29)], color=plotting.BLUE)[0].max()  # type: ignore[union-attr]  # one array for one list
    for name, (left, right, colour) in regions.items():
        ax.axvspan(left, right, color=colour, zorder=0)
        ax.text((left + right) / 2, 0.93 * top, name, ha="center", va="center", size=12)
    ax.set(xlim=(-12, 7), ylim=(0, top), xlabel="size of an element of the gradient", ylabel="elements", title=title)
    ax.set_xticks(range(-12, 7, 3), [f"$10^{{{size}}}$" for size in range(-12, 7, 3)])
    return fig
