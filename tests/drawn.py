"""What is in a picture, read in the units of its axes: the areas that a line across it meets, texts, arrows, curves;
and whether a reader can see and understand all of it."""

import itertools
import math
import re
from weakref import WeakKeyDictionary

import numpy
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Annotation

KNOWN: WeakKeyDictionary = WeakKeyDictionary()  # axes -> how much was drawn on them, and the areas that were found


def areas_of(ax) -> list[tuple[str, list]]:
    """(look, corners) of each filled area, as they were drawn: its colour, with the pattern that it is hatched with."""
    if (known := KNOWN.get(ax)) and known[0] == (len(ax.patches), len(ax.collections)):
        return known[1]
    patches = [patch for patch in ax.patches if patch.get_fill() and not isinstance(patch, FancyArrowPatch)]
    shapes = [
        (patch, patch.get_facecolor(), patch.get_path().transformed(patch.get_patch_transform())) for patch in patches
    ]
    many = [one for one in ax.collections if isinstance(one, PolyCollection) and len(one.get_facecolor())]
    shapes += [(one, one.get_facecolor()[0], path) for one in many for path in one.get_paths()]
    found = [(to_hex(colour) + (of.get_hatch() or ""), corners.tolist()) for of, colour, path in shapes if colour[3]
             for corners in path.to_polygons()]  # fmt: skip
    KNOWN[ax] = (len(ax.patches), len(ax.collections)), found
    return found


def cut(ax, x=None, y=None) -> list[tuple[str, float, float]]:
    """(look, from, to) of each area that the vertical line at `x`, or the horizontal one at `y`, goes through."""
    found, value, along = [], x if y is None else y, 0 if y is None else 1
    for look, corners in areas_of(ax):
        meets = [
            a[1 - along] + (b[1 - along] - a[1 - along]) * (value - a[along]) / (b[along] - a[along])
            for a, b in itertools.pairwise([*corners, corners[0]])
            if (a[along] - value) * (b[along] - value) < 0
        ]
        if meets and max(meets) - min(meets) > 1e-9:
            found.append((look, min(meets), max(meets)))
    return found


def bars(ax, x=None, y=None) -> list[tuple[float, float]]:
    """(from, to) of these areas, in order."""
    return sorted((low, high) for _, low, high in cut(ax, x, y))


def kinds(ax, x=None, y=None) -> list[list[tuple[float, float]]]:
    """(from, to) of these areas, those that look alike together, whatever the looks are."""
    found: dict[str, list] = {}
    for look, *stretch in cut(ax, x, y):
        found.setdefault(look, []).append(tuple(stretch))
    return sorted(map(sorted, found.values()))


def by_row(ax) -> dict[str, list[list[tuple[float, float]]]]:
    """Label at the axis on the left -> `kinds` of its row."""
    return {label.get_text(): kinds(ax, y=y) for y, label in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)}


def stripes(ax, x, y, reach=0.5) -> list[str]:
    """The looks, from the left, of the areas beside a point that end within `reach` of it."""
    near = [(low, look) for look, low, high in cut(ax, y=y) if x - reach - 1e-6 < low and high < x + reach + 1e-6]
    return [look for _, look in sorted(near, key=lambda one: one[0])]


def look_at(ax, x, y) -> str:
    """The look of the last area over a point, where areas meet of one of them; empty where there is none."""
    return next((look for look, low, high in reversed(cut(ax, x=x + 1e-6)) if low < y + 1e-6 < high), "")


def said(ax, pattern: str = "(.*)") -> list[tuple[str, float, float]]:
    """(what the pattern's group has found, x, y) of each text of the axes that has it, row by row from the top, and
    from the left in a row."""
    found = [(re.search(pattern, text.get_text(), re.DOTALL), text.get_position()) for text in ax.texts]
    down = 1 if ax.yaxis_inverted() else -1
    words = [(match[1], *map(float, place)) for match, place in found if match]
    return sorted(words, key=lambda word: (round(down * word[2], 3), word[1]))


def placed(ax, pattern: str) -> dict[int, tuple[float, float]]:
    """Number in a text -> where it stands."""
    return {int(number): place for number, *place in said(ax, pattern)}


def looks_of(ax, pattern: str) -> list[tuple[str, str]]:
    """(what the pattern's group has found, look of the ground) of each such text, in the order of `said`."""
    return [(text, look_at(ax, *place)) for text, *place in said(ax, pattern)]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)]


def arrows(ax, places: dict) -> list[tuple]:
    """(from, to) of each arrow, by the name of the place that is nearest."""
    ends = [patch._posA_posB for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    notes = [text for text in ax.texts if isinstance(text, Annotation) and text.arrow_patch and not text.get_text()]
    return [tuple(nearest(end, places) for end in both) for both in [*ends, *((note.xyann, note.xy) for note in notes)]]


def framed(ax, pattern: str = "(.*)") -> list[bool]:
    """Whether each such text, in the order of `said`, stands in a box with a thick edge."""
    thick = [box.get_bbox() for box in ax.patches if isinstance(box, Rectangle) and box.get_linewidth() > 2]
    return [any(box.contains(*place) for box in thick) for _, *place in said(ax, pattern)]


def nearest(place, places: dict):
    return min(places, key=lambda name: math.dist(place, places[name]))


def points(line) -> list[tuple[float, float]]:
    return [*zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True)]


def same(one, other) -> bool:
    """Equal, where numbers may differ by rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if not all(isinstance(number, int | float | numpy.number) for number in (one, other)):
        return one == other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)


# --- can be read ------------------------------------------------------------------------------------------------------


def readable(fig) -> str:
    """What a reader can't see or understand of a figure: something is cut off, a series has no name of its own, numbers
    are of nobody knows what. Empty where there is nothing."""
    fig.draw_without_rendering()
    return cut_off(fig) or alike(fig) or without_a_unit(fig)


def inside(box, room) -> bool:
    sides = (box.x0 - room.x0, room.x1 - box.x1, box.y0 - room.y0, room.y1 - box.y1)
    return all(map(math.isfinite, sides)) and min(sides) >= 0


def cut_off(fig) -> str:
    """Texts lie in the figure, and boxes, bars and areas that have a place in numbers within the axes' limits."""
    texts = [text for ax in fig.axes for text in [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]]
    texts = [text for text in [*fig.texts, *texts] if text.get_text().strip() and text.get_visible()]
    outside = [one.get_text() for one in texts if not inside(one.get_window_extent(), fig.bbox.expanded(1.01, 1.01))]
    for ax in fig.axes:
        boxes = [one.get_window_extent() for one in ax.patches if isinstance(one, Rectangle) and one.get_clip_on()]
        many = [one for one in ax.collections if isinstance(one, PolyCollection)]
        boxes += [ax.transData.transform_bbox(path.get_extents()) for one in many for path in one.get_paths()
                  if one.get_transform().contains_branch(ax.transData) and len(path.vertices)]  # fmt: skip
        outside += [f"a bar of {ax.get_title()!r}" for box in boxes if not inside(box, ax.bbox.padded(3))]
    return f"cut off at an edge: {outside}" * bool(outside) or "nothing is written" * (not texts)


def alike(fig) -> str:
    """Every series is in a legend once, and looks like no other."""
    for legend in [*fig.legends, *(legend for ax in fig.axes if (legend := ax.get_legend()))]:
        names = [text.get_text() for text in legend.get_texts()]
        looks = []
        for handle in legend.legend_handles:
            empty = hasattr(handle, "get_fill") and not handle.get_fill()
            get = "get_edgecolor" if empty else "get_facecolor" if hasattr(handle, "get_facecolor") else "get_color"
            found = getattr(handle, get)()
            found = found if isinstance(found, str) or not hasattr(found[0], "__len__") else found[0]
            looks.append((to_hex(found), getattr(handle, "get_hatch", str)(), getattr(handle, "get_linestyle", str)()))
        if not all(names) or len({*names}) < len(names) or len({*looks}) < len(looks):
            return f"series that are not told apart: {list(zip(names, looks, strict=True))}"
    return ""


def without_a_unit(fig) -> str:
    """Axes with numbers say of what: a unit in brackets, also beside the axis, or a word without one such as a loss."""
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
            counts = [label for label in labels if label.strip("0123456789.\N{MINUS SIGN}-$") == "" and label]
            shared = axis is ax.yaxis and ax is not fig.axes[0] and ax.get_shared_y_axes().joined(ax, fig.axes[0])
            words = axis.get_label_text() or any("(" in text.get_text() for text in ax.texts)
            words = words or axis is ax.xaxis and fig.axes[-1].get_xlabel()  # of the panel at the bottom
            if ax.axison and axis.get_visible() and len(counts) > 1 and not shared and not words:
                return f"{ax.get_title()}: numbers {counts[:3]} of what?"
    return ""
