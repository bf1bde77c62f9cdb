"""What a picture shows, as lines of text: every text, box, bar, line and arrow with its place and colour, in the order
in which they were drawn, axes and legends. Nothing is rendered."""

from matplotlib.category import StrCategoryLocator
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator

from common.lab import plotting

COLOURS = {getattr(plotting, name): name.lower() for name in (
    "BLUE", "ORANGE", "GREEN", "VERMILION", "PURPLE", "SKY", "YELLOW", "BLACK", "IDLE", "STORED")}  # fmt: skip


def colour(of) -> str:
    found = to_hex(of).upper()
    return {"#FFFFFF": "white"}.get(found) or COLOURS.get(found, found)


def place(*numbers) -> str:
    return ", ".join(f"{round(float(number), 3) + 0.0:.4g}" for number in numbers)


def box(patch) -> str:
    held = patch.get_bbox() if isinstance(patch, Rectangle) else patch.get_path().get_extents()
    look = colour(patch.get_facecolor()) if patch.get_fill() else f"frame {patch.get_linestyle()}"
    return f"{look}{' hatched' if patch.get_hatch() else ''} x {place(*held.intervalx)} y {place(*held.intervaly)}"


def axis(ax, name: str) -> str:
    axis = getattr(ax, f"{name}axis")
    low, high = getattr(ax, f"get_{name}lim")()
    ticks = ""
    if isinstance(axis.get_major_locator(), FixedLocator | StrCategoryLocator):
        places = axis.get_majorticklocs()
        labels = zip(axis.get_major_formatter().format_ticks(places), places, strict=True)
        ticks = " ticks: " + (", ".join(f"{label!r} at {place(at)}" for label, at in labels) or "none")
    return f"{name} {axis.get_label_text()!r} {axis.get_scale()} {place(low, high)}{ticks}"


def text(item) -> str:
    if getattr(item, "arrow_patch", None) is not None:
        return f"arrow from {place(*item.xyann)} to {place(*item.xy)}"
    beside = f" beside {place(*item.xy)}" if isinstance(item, Annotation) else ""
    return f"text {item.get_text()!r} {colour(item.get_color())} at {place(*item.get_position())}{beside}"


def drawn(fig) -> list[str]:
    lines = [f"figure {place(*fig.get_size_inches())}"]
    for number, ax in enumerate(fig.axes):
        title = ax.get_title() or ax.get_title(loc="left")
        shown = [f"title {title!r}", axis(ax, "x"), axis(ax, "y")]
        shown += [text(item) for item in ax.texts]
        shown += [f"box {box(patch)}" for patch in ax.patches]
        for line in ax.lines:
            (begin, end), style = (line.get_xydata()[place] for place in (0, -1)), line.get_linestyle()
            shown.append(f"line {colour(line.get_color())} {style} {line.get_marker()} wide {line.get_linewidth():g} "
                         f"from {place(*begin)} to {place(*end)}")  # fmt: skip
        for many in ax.collections:
            for path in many.get_paths():
                held, look = path.get_extents(), [*many.get_facecolor(), *many.get_edgecolor()][0]
                hatched = " hatched" if many.get_hatch() else ""
                where = f"x {place(*held.intervalx)} y {place(*held.intervaly)}"
                corners = path.vertices if len(path.vertices) > 6 else ()  # of more than a box
                corners = list(dict.fromkeys(f"({place(*corner)})" for corner in corners))
                shown.append(" ".join([f"bar {colour(look)}{hatched} {where}", *corners]))
        lines += [f"{number}: {line}" for line in shown]
    legends = [*fig.legends, *(ax.get_legend() for ax in fig.axes if ax.get_legend())]
    for legend in legends:
        lines.append(f"legend with the title {legend.get_title().get_text()!r}")
        for label, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            look = handle.get_facecolor() if hasattr(handle, "get_facecolor") else handle.get_color()
            look = look if isinstance(look, str) or len(look) > 2 else look[0]
            hatched = " hatched" if getattr(handle, "get_hatch", str)() else ""
            lines.append(f"legend {label.get_text()!r} {colour(look)}{hatched}")
    return lines
