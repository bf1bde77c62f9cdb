"""Figures and axes that remember what was drawn, and write it as SVG."""

import math
from html import escape

DOTS, FONT = 72.0, 11.0  # of SVG in an inch; height of letters
HATCH = "url(#hatch)"


def named(colour) -> str:
    """A colour as SVG has it: a name, or three numbers from 0 to 1."""
    return colour if isinstance(colour, str) else "#" + "".join(f"{round(255 * value):02x}" for value in colour)


class Bars:
    """Rectangles in data coordinates: (left, width, bottom, height)."""

    def __init__(self, boxes, color=None, fc=None, ec=None, lw=0.5, hatch=None, alpha=1.0):
        self.boxes, self.fill, self.edge = boxes, named(color or fc or "#0072B2"), ec or "none"
        self.width, self.hatch, self.alpha = lw, hatch, alpha

    def limits(self):
        xs = [edge for left, width, _, _ in self.boxes for edge in (left, left + width)]
        ys = [edge for _, _, bottom, height in self.boxes for edge in (bottom, bottom + height)]
        return xs, ys

    def svg(self, at):
        found = []
        for left, width, bottom, height in self.boxes:
            (x0, y0), (x1, y1) = at(left, bottom), at(left + width, bottom + height)
            place = (
                f'x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" height="{abs(y1 - y0):.1f}"'
            )
            found.append(f'<rect {place} fill="{self.fill}" stroke="{self.edge}" stroke-width="{self.width}" '
                         f'opacity="{self.alpha}"/>')  # fmt: skip
            if self.hatch:
                found.append(f'<rect {place} fill="{HATCH}"/>')
        return "".join(found)


class Line:
    """Points that are joined, marked, or filled down to others."""

    def __init__(self, xs, ys, color, width=2.5, dashes="", marker=0.0, joined=True, filled=False, alpha=1.0):
        self.xs, self.ys = [float(x) for x in xs], [float(y) for y in ys]
        self.color, self.width, self.dashes, self.marker = color, width, dashes, marker
        self.joined, self.filled, self.alpha = joined, filled, alpha

    def limits(self):
        return self.xs, self.ys

    def svg(self, at):
        points = [at(x, y) for x, y in zip(self.xs, self.ys, strict=True)]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if self.filled:
            return f'<polygon points="{text}" fill="{self.color}"/>'
        found = ""
        if self.joined:
            found = (f'<polyline points="{text}" fill="none" stroke="{self.color}" stroke-width="{self.width}" '
                     f'stroke-dasharray="{self.dashes}" opacity="{self.alpha}"/>')  # fmt: skip
        if self.marker:
            found += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{self.marker / 2}" fill="{self.color}"/>'
                             for x, y in points)  # fmt: skip
        return found


class Text:
    """Words at a place: of the data, or of the axes from 0 to 1; `offset` moves them, in points."""

    def __init__(self, x, y, words, ha="left", va="baseline", size=FONT, color="#000000", weight="normal", axes=False,
                 offset=(0, 0), arrow=None):  # fmt: skip
        self.x, self.y, self.words, self.ha, self.va = x, y, str(words), ha, va
        self.size, self.color, self.weight = size, color, weight
        self.axes, self.offset, self.arrow = axes, offset, arrow

    def limits(self):
        return [], []

    def svg(self, at):
        x, y = at(self.x, self.y, axes=self.axes)
        return written(self.words, x + self.offset[0], y - self.offset[1], self.size, self.ha, self.va, self.color,
                       self.weight, arrow=self.arrow and at(*self.arrow))  # fmt: skip


def written(words, x, y, size=FONT, ha="left", va="baseline", color="#000000", weight="normal", turn=0, arrow=None):
    lines = words.split("\n")
    down = {"top": 0.8, "center": 0.35 - 0.6 * (len(lines) - 1), "bottom": -0.25 - 1.2 * (len(lines) - 1)}
    y += size * down.get(va, 0.0)
    anchor = {"left": "start", "center": "middle", "right": "end"}[ha]
    spans = "".join(f'<tspan x="{x:.1f}" dy="{1.2 * size * bool(row):.1f}">{escape(line)}</tspan>'
                    for row, line in enumerate(lines))  # fmt: skip
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    found = (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
             f'font-weight="{weight}" xml:space="preserve"{turned}>{spans}</text>')  # fmt: skip
    if arrow:
        begin = y + 1.2 * size * (len(lines) - 1) + 4
        found += f'<path d="M{x:.1f},{begin:.1f} L{arrow[0]:.1f},{arrow[1] - 5:.1f}" stroke="{color}" fill="none"/>'
    return found


class Spine:
    def set_visible(self, shown):
        self.shown = shown


class Spines(dict):
    def __missing__(self, name):
        self[name] = Spine()
        return self[name]


class Axis:
    """One direction of axes: its limits, its ticks and what stands beside it."""

    def __init__(self):
        self.scale, self.limits, self.label = "linear", None, ""
        self.ticks, self.names, self.format, self.size, self.whole = None, None, "{x:g}", FONT, False

    def set_major_formatter(self, text):
        self.format = text

    def set_major_locator(self, locator):
        self.whole = locator.integer

    def settle(self, values):
        """Limits and ticks, once all that is drawn is known. Returns them."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if self.limits is None:
            if self.scale == "log":
                room = (math.log10(high) - math.log10(low)) * 0.05
                self.limits = low * 10**-room, high * 10**room
            else:
                room = (high - low or 1.0) * 0.05
                self.limits = low - room, high + room
        ticks = self.ticks if self.ticks is not None else self.usual(*sorted(self.limits))
        names = self.names or [self.format.format(x=tick) for tick in ticks]
        return [(tick, str(name)) for tick, name in zip(ticks, names, strict=True)]

    def usual(self, low, high):
        if self.scale == "log":
            decades = [10.0**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
            return decades if len(decades) > 1 else [low * (high / low) ** share for share in (0.1, 0.5, 0.9)]
        step = 10 ** math.floor(math.log10((high - low) / 4 or 1))
        step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
        if self.whole:
            step = max(1, step)
        return [round(step * number, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]

    def share(self, value):
        """Where a value is between the limits, from 0 to 1."""
        low, high = self.limits
        if self.scale == "log":
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low)


class Axes:
    transAxes = "axes"

    def __init__(self, figure):
        self.figure, self.drawn, self.title, self.handles = figure, [], None, None
        self.xaxis, self.yaxis, self.spines, self.shown = Axis(), Axis(), Spines(), True

    # --- what is drawn ---

    def plot(self, xs, ys, kind="-", *, color="#000000", lw=2.5, ls=None, linestyle=None, linewidth=None, markersize=8,
             ms=None, alpha=1.0):  # fmt: skip
        dashes = {"--": "6 4", ":": "2 3"}.get(ls or linestyle or "-", "")
        self.drawn.append(Line(xs, ys, color, linewidth or lw, dashes, (ms or markersize) if "o" in kind else 0,
                               "-" in kind, alpha=alpha))  # fmt: skip

    def fill_between(self, xs, base, tops, *, step, color, lw):
        assert step == "post"
        points = [(xs[0], base)]
        for place, (x, top) in enumerate(zip(xs, tops, strict=True)):
            points += [(x, tops[place - 1] if place else base), (x, top)]
        points.append((xs[-1], base))
        self.drawn.append(Line(*zip(*points, strict=True), color, filled=True))

    def barh(self, y, width, height=0.8, left=0.0, **style):
        self.drawn.append(Bars([(left, width, y - height / 2, height)], **style))

    def broken_barh(self, spans, rows, **style):
        self.drawn.append(Bars([(start, length, *rows) for start, length in spans], **style))

    def add_patch(self, patch):
        self.drawn.append(patch)

    def axvline(self, x, *, color, lw, ls):
        self.drawn.append(Upright(x, color, lw, {":": "2 3", "--": "6 4"}.get(ls, "")))

    def axvspan(self, low, high, *, color, alpha, lw):
        self.drawn.append(Band(low, high, color, alpha))

    def text(self, x, y, words, *, ha="left", va="baseline", size=FONT, color="#000000", weight="normal",
             transform=None, bbox=None, zorder=0, clip_on=True):  # fmt: skip
        self.beside = self.beside or not clip_on
        self.drawn.append(Text(x, y, words, ha, va, size, color, weight, axes=transform is not None))

    def annotate(self, words, xy, *, xytext, ha="left", color="#000000", textcoords=None, arrowprops=None):
        if textcoords == "offset points":
            self.drawn.append(Text(*xy, words, ha, color=color, offset=xytext))
        else:
            self.drawn.append(Text(*xytext, words, ha, "bottom", color=color, arrow=xy if arrowprops else None))

    # --- what stands around it ---

    def set(self, **fields):
        for name, value in fields.items():
            if name in ("xscale", "yscale"):
                getattr(self, f"{name[0]}axis").scale = value
            else:
                getattr(self, f"set_{name}")(value)

    def set_xlim(self, low, high=None):
        self.xaxis.limits = (low, high) if high is not None else tuple(low)

    def set_ylim(self, low, high=None):
        self.yaxis.limits = (low, high) if high is not None else tuple(low)

    def set_xticks(self, ticks, labels=None, minor=False):
        self.xaxis.ticks, self.xaxis.names = list(ticks), labels and list(labels)

    def set_yticks(self, ticks, labels=None):
        self.yaxis.ticks, self.yaxis.names = list(ticks), labels and list(labels)

    def set_yticklabels(self, labels, fontsize=FONT):
        self.yaxis.names = list(labels)

    def set_xlabel(self, words):
        self.xaxis.label = words

    def set_ylabel(self, words):
        self.yaxis.label = words

    def set_title(self, words, fontsize=12, loc="center"):
        self.title = (words, fontsize, loc)

    def set_visible(self, shown):
        self.shown = shown

    def tick_params(self, axis="both", length=4, labelsize=FONT):
        for one in [self.yaxis] if axis == "y" else [self.xaxis, self.yaxis]:
            one.size = labelsize

    def minorticks_off(self):
        pass  # there are none

    def invert_yaxis(self):
        self.turned = True

    turned = False
    beside = False  # words stand right of the axes

    def legend(self, handles, names, **_place):
        self.handles = list(zip(handles, map(str, names), strict=True))

    # --- as SVG ---

    def svg(self, left, top, width, height):
        """The axes in a rectangle of the figure, labels included."""
        xs, ys = [], []
        for one in self.drawn:
            more_xs, more_ys = one.limits()
            xs += more_xs
            ys += more_ys
        x_ticks, y_ticks = self.xaxis.settle(xs), self.yaxis.settle(ys)
        if self.turned:
            self.yaxis.limits = max(self.yaxis.limits), min(self.yaxis.limits)  # also when it is drawn again
        longest = max((len(line) for _, name in y_ticks for line in name.split("\n")), default=0)
        lines = self.yaxis.label.count("\n") + 1
        left_of = 0.58 * self.yaxis.size * longest + 8 + (lines * 14 if self.yaxis.label else 0)
        above = 22 if self.title else 6
        if self.handles:
            above += height_of(self.handles, width)
        below = 20 + (16 if self.xaxis.label else 0)
        x0, x1, y0, y1 = left + left_of, left + width - (30 if self.beside else 8), top + height - below, top + above

        def at(x, y, axes=False):
            across, up = (
                (x, y) if axes else (self.xaxis.share(float(x)), 0 if y is None else self.yaxis.share(float(y)))
            )
            return x0 + across * (x1 - x0), y0 + up * (y1 - y0)

        # named by what it is: two pictures of a page may have the same one, and a picture may be drawn twice
        clip = f"clip-{x0:.1f}-{y0:.1f}-{x1:.1f}-{y1:.1f}"
        self.figure.clips.append(f'<clipPath id="{clip}"><rect x="{x0:.1f}" y="{y1:.1f}" width="{x1 - x0:.1f}" '
                                 f'height="{y0 - y1:.1f}"/></clipPath>')  # fmt: skip
        found = [f'<g clip-path="url(#{clip})">', *(one.svg(at) for one in self.drawn if not isinstance(one, Text)),
                 "</g>"]  # fmt: skip
        found += [f'<path d="M{x0:.1f},{y1:.1f} V{y0:.1f} H{x1:.1f}" fill="none" stroke="black" stroke-width="0.8"/>']
        found += [one.svg(at) for one in self.drawn if isinstance(one, Text)]
        for tick, name in x_ticks:
            if 0 <= self.xaxis.share(tick) <= 1:
                found.append(written(name, at(tick, self.yaxis.limits[0])[0], y0 + 4, self.xaxis.size, "center", "top"))
        for tick, name in y_ticks:
            if 0 <= self.yaxis.share(tick) <= 1:
                y = at(self.xaxis.limits[0], tick)[1]
                found.append(written(name, x0 - 4, y, self.yaxis.size, "right", "center"))
        found.append(written(self.xaxis.label, (x0 + x1) / 2, y0 + 20, 12, "center", "top"))
        if self.yaxis.label:
            found.append(written(self.yaxis.label, left + 10, (y0 + y1) / 2, 12, "center", turn=-90))
        if self.title:
            words, size, loc = self.title
            place = {"left": x0, "center": (x0 + x1) / 2}[loc]
            found.append(written(words, place, y1 - 7, size, loc))
        if self.handles:
            found.append(key(self.handles, left, top, width))
        return "".join(found)


class Upright:
    """A line from the lower edge to the upper one."""

    def __init__(self, x, color, width, dashes):
        self.x, self.color, self.width, self.dashes = x, color, width, dashes

    def limits(self):
        return [], []

    def svg(self, at):
        x = at(self.x, None)[0]
        return (f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="4000" stroke="{self.color}" stroke-width="{self.width}" '
                f'stroke-dasharray="{self.dashes}"/>')  # fmt: skip


class Band:
    """What lies between two places, from the lower edge to the upper one."""

    def __init__(self, low, high, color, alpha):
        self.low, self.high, self.color, self.alpha = low, high, color, alpha

    def limits(self):
        return [self.low, self.high], []

    def svg(self, at):
        left, right = at(self.low, None)[0], at(self.high, None)[0]
        return (f'<rect x="{left:.1f}" y="0" width="{right - left:.1f}" height="4000" fill="{self.color}" '
                f'opacity="{self.alpha}"/>')  # fmt: skip


def rows_of(handles, width):
    """What a legend shows, in as many rows as it takes: (left, row, patch, name)."""
    found, x, row = [], 4.0, 0
    for patch, name in handles:
        needs = 30 + 0.56 * FONT * len(name)
        if x > 4 and x + needs > width:
            x, row = 4.0, row + 1
        found.append((x, row, patch, name))
        x += needs
    return found


def height_of(handles, width):
    return 17 * (1 + rows_of(handles, width)[-1][1]) if handles else 0


def key(handles, left, top, width):
    found = []
    for x, row, patch, name in rows_of(handles, width):
        x, y = left + x, top + 17 * row
        patch.boxes = [(x, 14, y, 11)]
        found.append(patch.svg(lambda across, up: (across, up)))
        found.append(written(name, x + 19, y + 10))
    return "".join(found)


class Figure:
    def __init__(self, rows, columns, size, ratios=None, one_y=False):
        self.width, self.height = (DOTS * inches for inches in size)
        self.rows, self.columns, self.ratios = rows, columns, ratios or [1] * columns
        self.grid = [[Axes(self) for _ in range(columns)] for _ in range(rows)]
        self.one_y = one_y  # the first axes of a row have the vertical axis of all
        self.handles, self.clips = None, []

    def legend(self, handles, names, *, loc, ncols=1, fontsize=FONT, handlelength=2):
        self.handles = list(zip(handles, map(str, names), strict=True))

    def svg(self, alt: str = "") -> str:
        top, self.clips = 6 + height_of(self.handles, self.width), []
        body = key(self.handles, 0, 4, self.width) if self.handles else ""
        height = (self.height - top) / self.rows
        for row, axes in enumerate(self.grid):
            left = 0.0
            for ax, ratio in zip(axes, self.ratios, strict=True):
                width = self.width * ratio / sum(self.ratios)
                if self.one_y and ax is not axes[0]:
                    ax.yaxis.limits, ax.yaxis.ticks, ax.yaxis.names = axes[0].yaxis.limits, [], []
                if ax.shown:
                    body += ax.svg(left, top + row * height, width, height)
                left += width
        pattern = (
            '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<path d="M0,0 V6" stroke="#777" stroke-width="1.5"/></pattern>'
        )
        return (f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" '
                f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" font-family="sans-serif">'
                f'<defs>{pattern}{"".join(self.clips)}</defs><rect width="100%" height="100%" fill="white"/>'
                f"{body}</svg>")  # fmt: skip
