"""One style for every picture of the course, and the drawings that more than one chapter needs.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart too
(https://jfly.uni-koeln.de/color/). The background is white whatever the page's theme is.
"""

import io

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
PALETTE = [BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, BLACK]

plt.rcParams.update(
    {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "figure.constrained_layout.use": True,
        "font.size": 13,
        "axes.prop_cycle": plt.cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 2.5,
        "lines.markersize": 8,
        "legend.frameon": False,
    }
)


def show(fig: Figure, alt: str) -> None:
    """Show `fig` under a notebook cell as a PNG whose alternative text is `alt`, and close it."""
    from IPython.display import Image as Shown  # scripts draw too, and need no IPython
    from IPython.display import display

    picture = png(fig, dpi=150)  # more pixels than it is shown at: sharp on a projector
    display(Shown(picture, width=round(90 * fig.get_figwidth()), alt=alt))


def png(fig: Figure, dpi: int) -> bytes:
    """`fig` as a PNG of at most 256 colours, a quarter of the size of one with all of them; closes it."""
    full, small = io.BytesIO(), io.BytesIO()
    fig.savefig(full, format="png", dpi=dpi)
    plt.close(fig)
    picture = Image.open(full).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    return small.getvalue()


def digits(number: int) -> list[int]:
    """The ranks whose data is in `number`, if rank r put a digit in the place of 10**r: 1010 -> [1, 3]."""
    return [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]


def collective(states, captions=("before", "after"), sources=digits, title: str | None = None) -> Figure:
    """Draw what each rank held at two or more moments, left to right with an arrow between.

    states:   for each moment, for each rank, the list of chunks it holds; None is an empty place
    captions: one per moment
    sources:  function from a chunk to the ranks whose data is in it; the chunk is painted in their colours

    Each chunk is labelled with str(chunk), so hand in what a run returned.
    """
    places = [max(len(chunks) for chunks in state) for state in states]
    ranks = max(len(state) for state in states)
    gap = 1.1  # room for the arrow, in chunk widths
    width = sum(places) + gap * (len(states) - 1)
    inch = min(0.8, 8.6 / width)  # of one chunk; the figure never grows wider than a page
    fig, ax = plt.subplots(figsize=(width * inch + 1.1, ranks * 0.55 + (1.0 if title else 0.6)))
    left = 0.0
    for state, caption, count in zip(states, captions, places, strict=True):
        ax.text(left + count / 2, -0.25, caption, ha="center", va="bottom")
        for rank, chunks in enumerate(state):
            for place, chunk in enumerate(chunks):
                _chunk(ax, left + place, rank, chunk, [] if chunk is None else sources(chunk), inch)
        left += count + gap
        if left < width:
            arrow = {"arrowstyle": "-|>", "lw": 2.5, "color": BLACK, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (left - 0.25, ranks / 2), (left - gap + 0.25, ranks / 2), arrowprops=arrow)
    ax.set(xlim=(-0.05, width + 0.05), ylim=(ranks + 0.1, -0.75), xticks=[])
    ax.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if title:
        ax.set_title(title)
    return fig


def _chunk(ax, x: float, y: float, chunk, sources: list[int], inch: float) -> None:
    """One chunk: a stripe for each rank whose data is in it, and its label on a white ground."""
    for stripe, rank in enumerate(sources):
        width = 0.9 / len(sources)
        colour = PALETTE[rank % len(PALETTE)]
        ax.add_patch(Rectangle((x + 0.05 + stripe * width, y + 0.1), width, 0.8, color=colour, lw=0))
    line = "-" if sources else ":"
    ax.add_patch(Rectangle((x + 0.05, y + 0.1), 0.9, 0.8, fill=False, ls=line, lw=1.2, ec="#444444"))
    if chunk is not None:
        ground = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
        size = min(13, 72 * 0.68 * inch / max(2.5, 0.62 * len(str(chunk))))
        ax.text(x + 0.5, y + 0.52, str(chunk), ha="center", va="center", size=size, bbox=ground)


def timeline(events, title: str | None = None, colours: dict[str, str] | None = None) -> Figure:
    """Draw what each rank did when: one row per rank, one bar per event.

    events:  tuples (rank, name, start, end), times in seconds on one clock; the first start becomes 0 ms. In place of
             a rank's number a text may stand, as "stream 7": such rows stand in the order in which they come
    colours: name -> colour; by default the palette in the order in which names come
    """
    origin = min(start for _, _, start, _ in events)
    names = list(dict.fromkeys(name for _, name, _, _ in events))
    colours = colours or {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    ranks = list(dict.fromkeys(rank for rank, _, _, _ in events))
    named = any(isinstance(rank, str) for rank in ranks)
    places = {rank: row if named else rank for row, rank in enumerate(ranks)}
    fig, ax = plt.subplots(figsize=(9.5, 0.5 * len(ranks) + 1.5))
    for name in names:
        for rank in ranks:
            spans = [event[2:] for event in events if event[:2] == (rank, name)]
            bars = [((start - origin) * 1e3, (end - start) * 1e3) for start, end in spans]
            ax.broken_barh(bars, (places[rank] - 0.38, 0.76), color=colours[name], ec="white", lw=0.6)
    ax.set_yticks(list(places.values()), [rank if isinstance(rank, str) else f"rank {rank}" for rank in places])
    ax.set(ylim=(max(places.values()) + 0.6, min(places.values()) - 0.6), xlabel="time (ms)")
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    fig.legend(handles, names, loc="outside upper center", ncols=min(len(names), 5), title=title)
    return fig


ACTIONS = {
    "F": ("forward", BLUE),
    "B": ("backward", VERMILION),
    "I": ("backward for input", ORANGE),
    "W": ("backward for weight", GREEN),
}


IDLE, STORED = "#E4E4E4", "#777777"
OTHERS = "#b9c6d3"  # micro-batches that are not followed


def pipeline(
    timelines: dict,
    unit: str = "units",
    memory: bool = True,
    columns: int = 1,
    width: float = 9.5,
    follow: int | None = None,
) -> Figure:
    """Draw what the ranks of a pipeline do when, simulated or measured: one panel per timeline, all on one time axis.

    timelines: title -> timeline. Its `ranks` holds each rank's events (start, end, (stage, kind, micro-batch)), from
               time 0 on; kinds other than those of ACTIONS, such as messages, are left out. Its `stored(rank)` gives
               (time, activations held from then on) at every change.
    unit:      what times are in, for the label
    memory:    draw a strip below each rank with the activations that it stores, and their peak at its right
    columns:   panels side by side
    width:     of the figure in inches
    follow:    a micro-batch whose way is to be seen: all others are pale, and without numbers

    A box has its micro-batch's number where there is room. Of several stages on a rank the later ones are paler, and
    what one of them stores is a part only: 11/2 are eleven activations of half a rank's layers.
    """
    lines = -(-len(timelines) // columns)
    ranks = max(len(timeline.ranks) for timeline in timelines.values())
    row = (0.5 if memory else 0.36) * (1 if columns == 1 else 0.8)  # inches for one rank
    size = (width, lines * (row * ranks + 0.45) + 1.1)
    fig, axes = plt.subplots(lines, columns, figsize=size, sharex=True, squeeze=False)
    panels = [_Panel(ax, timeline) for ax, timeline in zip(axes.flat, timelines.values(), strict=False)]
    end, peak = max(panel.end for panel in panels), max(panel.peak for panel in panels)
    for panel, title in zip(panels, timelines, strict=True):
        for rank in range(len(panel.events)):
            panel.boxes(rank, 0.62 if memory else 0.84, 0.88 * width / columns / end, 12 - columns, follow)
            if memory:
                panel.strip(rank, peak)
        panel.ax.set_title(title, fontsize=13 if columns == 1 else 11, loc="left")
        panel.ax.set_yticks([rank + 0.35 for rank in range(len(panel.events))], range(len(panel.events)))
        panel.ax.set(xlim=(0, end * 1.005), ylim=(len(panel.events) + 0.05, -0.05), ylabel="rank")
        panel.ax.tick_params(length=0, labelsize=11)
        panel.ax.spines["left"].set_visible(False)
    for ax in axes.flat[len(timelines) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel(f"time ({unit})")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    kinds = {kind for panel in panels for events in panel.events for _, _, (_, kind, _) in events}
    legend = {name: colour for kind, (name, colour) in ACTIONS.items() if kind in kinds}
    if follow is not None:
        legend = {f"{name} of {follow}": colour for name, colour in legend.items()} | {"other micro-batches": OTHERS}
    legend["idle"] = IDLE
    if memory:
        legend["activations stored, with their peak"] = STORED
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in legend.values()]
    columns = len(legend) if len(legend) < 6 or width >= 11 else 3
    fig.legend(handles, legend, loc="outside upper center", ncols=columns, fontsize=11, handlelength=1.2)
    return fig


class _Panel:
    """One timeline of `pipeline` on its axes. Times may be fractions, which Matplotlib does not take."""

    def __init__(self, ax, timeline):
        self.ax = ax
        self.events = [
            [(float(start), float(end), action) for start, end, action in events if action[1] in ACTIONS]
            for events in timeline.ranks
        ]
        self.end = max((end for events in self.events for _, end, _ in events), default=1.0)
        self.stages = [sorted({stage for _, _, (stage, _, _) in events}) for events in self.events]
        self.stored = [timeline.stored(rank) for rank in range(len(self.events))]
        shares = [
            held / len(stages) for stages, changes in zip(self.stages, self.stored, strict=True) for _, held in changes
        ]
        self.peak = max(shares, default=1)

    def boxes(self, rank: int, height: float, inch: float, largest: float, follow: int | None) -> None:
        """The rank's actions. inch: of one unit of time; largest: size of the numbers in them; follow: as above."""
        self.ax.broken_barh([(0, self.end)], (rank, height), color=IDLE, lw=0)
        for start, end, (stage, kind, microbatch) in self.events[rank]:
            pale = 0.6 * self.stages[rank].index(stage) / len(self.stages[rank])
            colour = [value + (1 - value) * pale for value in to_rgb(ACTIONS[kind][1])]
            if follow not in (None, microbatch):
                self.ax.add_patch(Rectangle((start, rank), end - start, height, fc=OTHERS, ec="white", lw=0.5))
                continue
            self.ax.add_patch(Rectangle((start, rank), end - start, height, fc=colour, ec="white", lw=0.5))
            size = min(largest, 72 * inch * (end - start) / (0.75 * max(1.4, len(str(microbatch)))))
            if size >= 5:
                ink = "white" if kind in "FB" and pale < 0.3 else "black"
                middle = ((start + end) / 2, rank + height / 2 + 0.02)
                self.ax.text(*middle, str(microbatch), ha="center", va="center", size=size, color=ink)

    def strip(self, rank: int, peak: float) -> None:
        """What the rank stores, below its boxes; `peak` fills the height."""
        stages = max(1, len(self.stages[rank]))
        times, held = zip((0, 0), *self.stored[rank], (self.end, 0), strict=True)
        tops = [rank + 0.92 - 0.27 * count / stages / peak for count in held]
        self.ax.fill_between([float(time) for time in times], rank + 0.92, tops, step="post", color=STORED, lw=0)
        label = f" {max(held)}" + (f"/{stages}" if stages > 1 else "")
        self.ax.text(self.end, rank + 0.79, label, va="center", size=11, color="#333333", clip_on=False)
