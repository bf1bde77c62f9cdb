"""What each picture of the course shows is what it was given, and can be read: for every function that draws, with
numbers drawn at random, what stands in the picture beside what is worked out here, or by brute force, from the same."""

import ast
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Some

import drawn as picture
import IPython.display
import matplotlib.pyplot as plt
import pytest
import torch
from drawn import arrows, bars, by_row, cut, framed, kinds, look_at, looks_of, numbers, placed, points, said, same
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path

from common import ROOT
from common.constants import GIB, MEBIBYTE
from common.lab import plotting
from course.data_parallel import pictures as dp_pictures
from course.ddp import buckets, checkpoint_cost, rates
from course.ddp import pictures as ddp_pictures
from course.fsdp import axes_pictures, sharding_pictures
from course.intro import by_hand, networks, overview, rank_pictures
from course.model_parallel import context_pictures, moe_pictures
from course.model_parallel import pictures as tensor_pictures
from course.pipeline import pictures as pipeline_pictures
from course.pipeline import schedules, simulator
from planner import calculator, decision_map
from planner import pictures as planner_pictures
from planner import plot as planner_plot

Found = Iterator[tuple[Callable, object, object]]  # the function, what it has drawn, what it was given
patched = pytest.MonkeyPatch.context


def spans(r, count, gap=3.0) -> list[tuple[float, float]]:
    """Stretches of time that follow each other."""
    ends = list(itertools.accumulate(r.uniform(0.5, gap) for _ in range(2 * count)))
    return list(zip(ends[::2], ends[1::2], strict=True))


def stacked(sizes) -> list[tuple[float, float]]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def by_kind(events, first=0.0, unit=1e3) -> list[list[tuple[float, float]]]:
    """(kind, from, to) in seconds as `kinds` has it, in milliseconds since `first`."""
    names = {kind for kind, *_ in events}
    spans = [(name, unit * (begin - first), unit * (end - first)) for name, begin, end in events]
    return sorted(sorted(tuple(span) for kind, *span in spans if kind == name) for name in names)


def stations(ax) -> dict[int, list[list[float]]]:
    """Rank -> the numbers in each line of what it holds, which stands below its name."""
    lines = said(ax, "^(queries.*|keys.*|gradients.*)")
    return {rank: [numbers(text) for text, x, y in lines if x == at and 0 < top - y < 1]
            for rank, (at, top) in placed(ax, r"^rank (\d)$").items()}  # fmt: skip


def everywhere(r) -> Found:
    draw = plotting.collective
    states = [[[r.choice([None, 1, 20, 300, 1011, 4300]) for _ in range(size)] for _ in range(4)] for size in (2, 3)]
    ax = draw(states, ("one", "other")).axes[0]
    labels = said(ax, r"^(\d+)$")
    yield draw, [text for text, *_ in labels], [str(n) for k in range(4) for state in states for n in state[k] if n]
    for text, *place in labels:
        ranks = [rank for rank, digit in enumerate(reversed(text)) if digit != "0"]
        yield draw, picture.stripes(ax, *place), [plotting.PALETTE[rank].lower() for rank in ranks]
    draw = plotting.timeline
    for names in ([0, 1, 2], ["stream 7", "host", "stream 40"]):
        events = [(name, kind, *span) for name in names for kind in "ab" for span in spans(r, 2)]
        r.shuffle(events)
        ax, first = draw(events).axes[0], min(start for _, _, start, _ in events)
        own = {name: by_kind([event[1:] for event in events if event[0] == name], first) for name in names}
        yield draw, by_row(ax), {f"rank {name}" if name in (0, 1, 2) else name: spans for name, spans in own.items()}
    draw, times = plotting.pipeline, simulator.Times(*(r.uniform(1, 2) for _ in range(3)), r.uniform(0, 1))
    runs = {name: simulator.simulate(schedules.build(name, 2, 3), times) for name in ("1f1b", "zbv")}
    for memory, follow in ((True, None), (False, 0), (False, 2)):
        shares = []
        for ax, run in zip(draw(runs, memory=memory, follow=follow, columns=2).axes, runs.values(), strict=True):
            shown = [event for own in run.ranks for event in own if follow in (None, event.action.microbatch)]
            labels = [(x, int(n)) for n, x, _ in said(ax, r"^(\d+)$")]
            yield draw, labels, [((a + b) / 2, action.microbatch) for a, b, action in shown]
            for rank, own in enumerate(run.ranks):
                boxes = [tuple(box) for look, *box in cut(ax, y=rank + 0.3) if look != to_hex(plotting.IDLE)]
                yield draw, boxes, [event[:2] for event in own]
                stages, changes = len({event.action.stage for event in own}), [*run.stored(rank), (run.makespan, 0)]
                most = f" {max(held for _, held in changes)}" + f"/{stages}" * (stages > 1)
                yield draw, most in [text for text, *_ in said(ax)], memory
                for (begin, held), (end, _) in itertools.pairwise(changes if memory else []):
                    strip = [b - a for a, b in bars(ax, x=(begin + end) / 2) if rank + 0.62 < a < b < rank + 1]
                    shares += [(sum(strip), held / stages)] * (end > begin)
        largest = max(shares, default=(1, 1))
        yield draw, [height / largest[0] for height, _ in shares], [share / largest[1] for _, share in shares]


def intro(r) -> Found:
    draw, speeds = networks.cluster, [r.randint(1, 900) for _ in range(3)]
    ax = draw(*speeds, nodes=2, gpus=3).axes[0]
    wide = Counter((line.get_color(), line.get_linewidth()) for line in ax.lines)
    yield draw, [*wide.values()], [6, 6, 6]
    yield draw, [w / max(w for _, w in wide) for _, w in wide], [speed / max(speeds) for speed in speeds]
    yield draw, [float(n) for n, *_ in said(ax, r"(\d+) GB/s")], speeds
    draw, ratios = networks.missed, {nodes: {8**k: r.uniform(0.6, 2) for k in range(2, 9)} for nodes in (1, 2, 4)}
    drawn = [points(line) for line in draw(ratios).axes[0].lines if len(line.get_xdata()) > 2]
    yield draw, drawn, [[*row.items()] for row in ratios.values()]
    draw, orders = networks.rings, [r.sample(range(8), 8) for _ in range(3)]
    for ax, order in zip(draw(orders, 4).axes, orders, strict=True):
        steps = arrows(ax, placed(ax, r"^(\d)$"))
        yield draw, steps, [*zip(order, order[1:] + order[:1], strict=True)]
        widths = [patch.get_linewidth() for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
        yield draw, [width > min(widths) for width in widths], [(a < 4) != (b < 4) for a, b in steps]
    draw, rows = overview.step_pictures, [[str(r.randint(2, 99)) for _ in range(4)] for _ in range(2)]
    for count, fig in enumerate(draw(rows, "777", "333")):
        ax, third = fig.axes[0], {3: ["777"] * 2, 4: ["333"] * 2}.get(count, [row[2] for row in rows])
        held = [[*row[:2], third[rank], row[3]][: (1, 2, 3, 3, 4)[count]] for rank, row in enumerate(rows)]
        columns = len(held[0])
        yield draw, [text for text, *_ in said(ax, r"^(\d+)$")], sum(held, [])
        new = [column in ((columns - 1,) if count < 3 else (2, 3)) for column in range(columns)]
        yield draw, framed(ax, r"^(\d+)$"), 2 * new
        colours = [picture.stripes(ax, x, y, 0.8) for _, x, y in said(ax, r"^(\d+)$")]
        own = [colours[1], colours[columns + 1]] if count else []
        for rank, one in enumerate(own if count > 1 else []):
            gradient = one if count == 2 else sum(own, [])  # that of one rank, or of both
            yield draw, (colours[columns * rank + 2], own[0] == own[1]), (gradient, False)
    draw, nodes, each = overview.ranks_on_nodes, r.randint(2, 3), r.randint(2, 5)
    ax = draw(nodes, each).axes[0]
    ranks, edges = placed(ax, r"^rank (\d+)"), [x for _, x, _ in said(ax, r"node rank (\d+)")]
    yield draw, [*ranks], [*range(nodes * each)]
    yield draw, [sum(edge < x for edge in edges) - 1 for x, _ in ranks.values()], [rank // each for rank in ranks]
    for what in ("local rank", "GPU"):
        yield draw, [int(n) for n, *_ in said(ax, rf"{what} (\d+)")], [rank % each for rank in ranks]
    draw, states = rank_pictures.moved, [[[r.choice([None, 1, 43]) for _ in "ab"] for _ in range(4)] for _ in "ab"]
    ax = draw("moved", *states, pairs := r.sample(rank_pictures.ALL, 5), [2]).axes[0]
    cells = [(k, at, side, states[side][k][at]) for k in range(4) for side in (0, 1) for at in (0, 1)]
    cells = [(k, at, side, n) for k, at, side, n in cells if n]
    yield draw, [text for text, *_ in said(ax, r"^(\d+)$")], [str(n) for *_, n in cells]
    yield draw, framed(ax, r"^(\d+)$"), [side == 1 and k != 2 and n != states[0][k][at] for k, at, side, n in cells]
    (_, left, _), (_, right, _) = said(ax, "(before|after)")
    sides = {(side, rank): (x, rank + 0.5) for side, x in enumerate((left, right)) for rank in range(4)}
    yield draw, arrows(ax, sides), [((0, a), (1, b)) for a, b in pairs]
    draw, (before, held) = rank_pictures.circle, [[[r.randint(10, 13) for _ in "abc"] for _ in range(4)] for _ in "ab"]
    sent = [(a, b, [r.randint(20, 99) for _ in range(r.randint(1, 3))]) for a, b in r.sample(rank_pictures.ALL, 4)]
    ax = draw(before, held, sent).axes[0]
    ranks = placed(ax, r"^([0-3])$")  # in the order of reading
    yield draw, arrows(ax, ranks), [(a, b) for a, b, _ in sent]
    labels = [", ".join(map(str, some)) if len(some) < 3 else f"all {len(some)}" for *_, some in sent]
    within = 1.01 * math.hypot(*ranks[0])  # the circle
    found = [text for text, *place in said(ax, r"^([2-9]\d.*|all \d)$") if math.hypot(*place) < within]
    yield draw, sorted(found), sorted(labels)
    yield draw, [int(n) for n, *_ in said(ax, "^(1[0-3])$")], [n for rank in ranks for n in held[rank]]
    new = [a != b for rank in ranks for a, b in zip(before[rank], held[rank], strict=True)]
    yield draw, framed(ax, "^(1[0-3])$"), new
    for step in range(8):
        draw, told = rank_pictures.ring_and_tree, (step + 1, min(2**step, 8))
        ax = draw(step).axes[0]
        yield draw, [int(have) for have, *_ in said(ax, r"(\d) of 8")], [*told]
        for side, have in zip((-1, 1), told, strict=True):
            lit = {int(n) for n, x, y in said(ax, r"^(\d)$") if side * x > 0 and look_at(ax, x, y) != "#ffffff"}
            yield draw, lit, set(range(have))
    draw, before, along = rank_pictures.grid, [float(r.randint(1, 99)) for _ in range(4)], {}
    along = {name: [float(r.randint(100, 999)) for _ in range(4)] for name in ("rows", "columns")}
    for ax, sums, groups in zip(draw(("rows", "columns"), before, along).axes, along.values(),
                                        ([[0, 2], [1, 3]], [[0, 1], [2, 3]]), strict=True):  # fmt: skip
        yield draw, [numbers(text) for text, *_ in said(ax)], [[n, before[n], sums[n]] for n in range(4)]
        bands, ranks = [box.get_bbox() for box in ax.patches], placed(ax, r"rank (\d)")
        yield draw, sorted([n for n, place in ranks.items() if band.contains(*place)] for band in bands), groups
    draw, calls = rank_pictures.paired, [r.sample(["one", "two"], 2) * 2, ["one", "one", "two"]]
    for pairs in range(5):
        ax = draw(calls, pairs, notes := ["1st", "2nd", "3rd", "4th"]).axes[0]
        both = [(calls[rank][at], at < pairs) for at in range(4) for rank in (0, 1) if at < len(calls[rank])]
        yield draw, [(text, look != "#ffffff") for text, look in looks_of(ax, "^(one|two)$")], both
        alike = [calls[0][n] == calls[1][n] for n in range(min(pairs, 3))]
        yield draw, [line.get_linestyle() == "-" for line in ax.lines], alike
        yield draw, [text for text, *_ in said(ax, "([1-4].*)") if text in notes], notes[:pairs]


def data_parallel(r) -> Found:
    draw, moves = dp_pictures.draw_move, list(dp_pictures.MOVES)
    home, out = [False] * 3, [True] * 3
    to_home = {"gather": out, "add up": out, "scatter": home, "replicate": home, "backward begins": home}
    for at, move in enumerate(moves):
        ax = draw(move).axes[0]
        slices = [numbers(text) for text, ground in looks_of(ax, r"^inputs (\[\d+, \d+\])") if ground]  # not those sent
        yield draw, slices, [[2, 3], [4, 5], [6, 7]] * (0 < at < len(moves) - 1)
        results = [n / 10 for text, *_ in said(ax, r"outputs (\[\d+, \d+\])") for n in numbers(text)]
        yield draw, {*results} <= set(range(8)), True
        yield draw, len(said(ax, r"replica ([123])")), 3 * (1 < at < len(moves) - 1)
        ways = arrows(ax, {"home": (3.7, 1.5), "other": (5.7, 1.5)})
        yield draw, [end == "home" for _, end in ways], to_home.get(move, [])
    draw, begin, end = dp_pictures.draw_recorded, 4.0, 14.0
    rows = [{"kind": r.choice("ab"), "start_us": 1e3 * a, "duration_us": 1e3 * (b - a), "launch_us": r.uniform(0, 16e3)}
            for a, b in spans(r, 8)]  # fmt: skip
    ax = draw(rows, 1e3 * begin, 1e3 * end).axes[0]
    starts = next(many.get_segments() for many in ax.collections if hasattr(many, "get_segments"))
    launched = [row["launch_us"] / 1e3 - begin for row in rows if begin <= row["launch_us"] / 1e3 < end]
    yield draw, [float(one[0][0]) for one in starts], launched
    ends = [(row["start_us"] / 1e3, (row["start_us"] + row["duration_us"]) / 1e3) for row in rows]
    inside = [(max(a, begin) - begin, min(b, end) - begin) for a, b in ends if b > begin and a < end]
    yield draw, bars(ax, y=ax.get_yticks()[1]), inside


def ddp(r) -> Found:
    draw, whats = ddp_pictures.draw_passes, ("computes", "sends, hidden", "sends, exposed")
    runs = {name: [(what, *span) for what in whats for span in spans(r, 2)] for name in ("one", "other")}
    ax, first = draw(runs).axes[0], min(begin for run in runs.values() for _, begin, _ in run)
    told = {(name, what): [one for one in run if one[0].startswith(what)]
            for name, run in runs.items() for what in ("computes", "sends")}  # fmt: skip
    yield draw, by_row(ax), {": ".join(row): by_kind(own, first, 1) for row, own in told.items()}
    draw = ddp_pictures.draw_race
    steps = {ranks: (r.uniform(1, 2), r.uniform(3, 6), [buckets.Sent(1, r.random() * a, a, b) for a, b in spans(r, 4)])
             for ranks in (8, 64)}  # fmt: skip
    ax = draw(steps).axes[0]
    notes = [numbers(text) for text, *_ in said(ax, r"(.*exposed)")]
    for place, note, (forward, backward, sent) in zip(ax.get_yticks(), notes, steps.values(), strict=True):
        ends, stop = [(forward + one.start, forward + one.end) for one in sent], forward + backward
        parts = [[(a, min(b, stop)) for a, b in ends if a < stop], [(max(a, stop), b) for a, b in ends if b > stop]]
        parts = [[(1e3 * a, 1e3 * b) for a, b in part] for part in parts if part]
        yield draw, bars(ax, y=place - 0.3), [(0, 1e3 * forward), (1e3 * forward, 1e3 * stop)]
        yield draw, kinds(ax, y=place + 0.3), parts
        yield draw, note, [round(1e3 * sum(b - a for a, b in ends)), round(1e3 * max(0.0, ends[-1][1] - stop))]
    draw, dealt = ddp_pictures.draw_shares, {t: [[r.randrange(9) for _ in range(n)] for n in (2, 5, 3)] for t in "abc"}
    dealt["d"] = [[0, 3], [1, 4], [2, 5]]
    for ax, shares in zip(draw(dealt, 9).axes, dealt.values(), strict=True):
        cards = {(int(x), int(y)): (int(n), look_at(ax, x, y)) for n, x, y in said(ax, r"^(\d+)$")}
        turns = sorted((turn, rank, card) for rank, share in enumerate(shares) for turn, card in enumerate(share))
        yield draw, [(*at, cards[at][0]) for at in sorted(cards)], turns
        again = [card in [other for *_, other in turns[:n]] for n, (*_, card) in enumerate(turns)]
        looks = {(seen, cards[at][1]) for seen, at in zip(again, sorted(cards), strict=True)}
        yield draw, len(looks), len({*again})
        left = sorted({*range(9)} - {card for *_, card in turns})
        yield draw, numbers(ax.get_xlabel()), [sum(again)] if any(again) else left
    draw = ddp_pictures.draw_late
    panels = {title: [[(a, r.uniform(a, b), b) for a, b in spans(r, 3)] for _ in "abc"] for title in "ab"}
    for ax, ranks in zip(draw(panels).axes, panels.values(), strict=True):
        first = min(own[0][0] for own in ranks)
        events = [[(n, one[n], one[n + 1]) for one in own for n in (0, 1)] for own in ranks]  # works, waits
        yield draw, by_row(ax), {f"rank {rank}": by_kind(own, first) for rank, own in enumerate(events)}
    draw = buckets.draw_overlap
    for mib, ms, alpha, rate in ((25, 50, 0.2, 12.5), (400, 200, 1.0, 25.0), (16, 1000, 0.01, 400.0)):

        def sent(cap, ms=ms, alpha=alpha, rate=rate) -> list[tuple[float, float]]:
            """(start, end) of each all-reduce in ms; the last layers' gradients are the first."""
            filled, done, found = 0, 0, [(0.0, 0.0)]
            for number, size in enumerate(order := buckets.GRADIENTS[::-1], start=1):
                filled, done = filled + size, done + size
                if filled >= cap * MEBIBYTE or number == len(order):
                    start = max(found[-1][1], ms * done / sum(order))
                    found.append((start, start + alpha + 2 * (1 - 1 / buckets.RANKS) * filled / rate / 1e6))
                    filled = 0
            return found[1:]

        left, right = draw(mib, ms, alpha, rate).axes
        parts = [[(a, min(b, ms)) for a, b in sent(mib) if a < ms], [(max(a, ms), b) for a, b in sent(mib) if b > ms]]
        yield draw, kinds(left, y=1.5), [part for part in parts if part]
        tails = [(cap, max(0.0, sent(cap)[-1][1] - ms)) for cap in buckets.SIZES]
        yield draw, [points(line) for line in right.lines], [tails, [one for one in tails if one[0] == mib]]
        yield draw, [round(dict(tails)[mib])] == numbers(said(left, "exposed: (.*)")[0][0]), True
    draw, lab = checkpoint_cost.draw, checkpoint_cost.Intervals(1024, 5e4, 60, 300)
    for fig, (cost, mtbf, restart) in ((draw(0.5, 180.0, 10.0), (0.5, 180.0, 10.0)),
                                       (lab.draw(2048, 4e4, 90, 600), (1.5, 60 * 4e4 / 2048, 10.0))):  # fmt: skip
        lost, writing, again, ((best, least),) = map(points, (ax := fig.axes[0]).lines)
        for (every, share), (_, one), (_, other) in zip(lost, writing, again, strict=True):  # Daly 2006
            time = mtbf * math.exp(restart / mtbf) * (math.exp((every + cost) / mtbf) - 1) / every
            yield draw, (share, one, other), (100 * (1 - 1 / time), 100 * cost / every / time, share - one)
        yield draw, least - min(share for _, share in lost) < 0.1, True
        yield draw, numbers(said(ax, "best: (.*)")[0][0]), [round(best, 1), round(least, 1)]
        near = [every for every, share in lost if share < least + 2]
        yield draw, bars(ax, y=0.5)[0], (min(near), max(near))
    draw, each = rates.draw, [*rates.FACTORS.values()]
    losses = {(name, b): torch.rand(len(each), 4).sort().values + 0.1 for name in rates.BASE for b in rates.BATCHES}
    for ax, (name, (_, rate)) in zip(draw(losses).axes, rates.BASE.items(), strict=True):
        own = [losses[name, batch].tolist() for batch in rates.BATCHES]
        curves = [[(f * rate, (one[1] + one[2]) / 2) for f, one in zip(each, table, strict=True)] for table in own]
        best = [min(curve, key=lambda point: point[1]) for curve in curves]
        shown = [points(line) for line in ax.lines if len(line.get_xdata()) in (1, len(each))]
        yield draw, [shown[::2], shown[1::2]], [curves, [[one] for one in best]]
        lowest = sorted((f"{y:.2f}" for _, y in best), reverse=True)
        yield draw, [number for number, *_ in said(ax, r"^(\d\.\d\d)$")], lowest
        for at in (1, 4):
            bands = [[round(n, 4) for n in one] for one in bars(ax, x=each[at] * rate * (1 + 1e-9))]
            yield draw, bands, sorted([round(table[at][n], 4) for n in (0, -1)] for table in own)


def tensors(r) -> Found:
    draw, names, b = tensor_pictures.draw_f_and_g, ("a", "x", "h", "part", "y"), (31, 32)  # a stands above
    values, right = ({place: [float(r.randint(0, 3)) for _ in "ab"] for place in names} for _ in "ab")
    for should in (None, right):
        ax = draw(values, ("nothing", "all-reduce"), should, b).axes[0]
        pairs = [(at, n) for n in (0, 1) for at in names]
        yield draw, [float(n) for n, *_ in said(ax, r"^(\d)$")], [values[at][n] for at, n in pairs]
        wrong = [right[at][n] for at, n in pairs if should and values[at][n] != right[at][n]]
        yield draw, [float(n) for n, *_ in said(ax, r"should be (\d)")], wrong
        yield draw, [int(n) for n, *_ in said(ax, r"b = (\d+)")], [*b]
        yield draw, len(ax.lines), 1  # of f and g one sends
        (_, *x), (_, *f) = said(ax, r"^(\d)$")[1], said(ax, "^(f)$")[0]
        yield draw, ("x", "f") in arrows(ax, {"x": x, "f": f}), should is None
    draw = tensor_pictures.draw_spans
    for _ in range(4):
        one, message, chunks = r.uniform(1, 3), r.uniform(0.5, 6), r.randint(2, 5)
        there, begins = [number * message / (chunks - 1) for number in range(chunks)], [-one]
        for at in there:
            begins.append(max(begins[-1] + one / chunks, at))
        late, both = one + message, [(0, one), (one, 2 * one)]
        wanted = [  # cores, links
            ([(0, one), (late, late + one)], [(one, late)]), (both, [(one, late)]), ([(message, late)], [(0, message)]),
            ([(begin, begin + one / chunks) for begin in begins[1:]], [*itertools.pairwise(there)]),
        ]  # fmt: skip
        for ax, rows in zip(draw(tensor_pictures.overlaps(one, message, chunks)).axes, wanted, strict=True):
            end = max(b for row in rows for _, b in row)
            yield draw, [bars(ax, y=0.4), bars(ax, y=1.4), points(ax.lines[-1])[0][0]], [*rows, end]
            yield draw, [text for text, *_ in said(ax, r"(.*) ms")], [f"{end:.2f}"]
    draw, layer = tensor_pictures.draw_layer, {name: (r.uniform(1, 5), r.uniform(0.5, 5)) for name in "abc"}
    ax = draw(layer, "ms").axes[0]
    yield draw, [bars(ax, x=place) for place in range(3)], [stacked(both) for both in layer.values()]
    words = [(at, [float(f"{a + b:.2g}"), round(100 * a / (a + b))]) for at, (a, b) in enumerate(layer.values())]
    yield draw, sorted((x, numbers(text)) for text, x, _ in said(ax, "(.*busy)")), words
    for ax, by_tokens in zip(tensor_pictures.draw_ways().axes, (True, False), strict=True):
        ranks = {int(n): look for n, look in looks_of(ax, r"rank (\d)")}
        cells = [*itertools.product((0.3, 3.7, 4.5, 7.9), (0.5, 3.5, 4.5, 7.5))]
        owners = [ranks[y > 4 if by_tokens else x > 4.1] for x, y in cells]
        yield tensor_pictures.draw_ways, ([look_at(ax, *cell) for cell in cells], len({*owners})), (owners, 2)
    draw = tensor_pictures.draw_block
    for kind, direction in tensor_pictures.WORDS:
        for ax, labels in zip(draw(kind, direction).axes, tensor_pictures.HALVES.values(), strict=True):
            for place, label in labels.items():
                across, down, *_ = tensor_pictures.SPLITS[tensor_pictures.split(kind, direction, place)]
                ((_, x, _),) = said(ax, f"^({re.escape(label)})$")
                boxes = [Path(corners).get_extents() for _, corners in picture.areas_of(ax)]
                whole, part = (box for box in boxes if box.x0 < x - 0.1 < box.x1)
                yield draw, (part.width / whole.width, part.height / whole.height), (across, down)
            sent = [text.replace("\n", "") for text, *_ in said(ax, "^(nothing|all-.*|reduce-.*)$")]
            yield draw, sent, [*tensor_pictures.BLOCK_MESSAGES.get((kind, direction), ())]


def contexts(r) -> Found:
    draw, colours = context_pictures.draw_turn, [look.lower() for look in context_pictures.RANK_COLOURS]
    owner = dict(enumerate(r.sample([0, 0, 1, 1, 2, 2, 3, 3], 8)))
    for turn in range(4):
        pairs = [(q, k) for q in range(8) for k in range(q + 1)]
        products = [context_pictures.Product(q, k, r.randrange(4), r.randrange(4), q == k) for q, k in pairs]
        left, right = draw(turn, products, owner, causal=True).axes
        own = {rank: [c for c in owner if owner[c] == rank] for rank in range(4)}
        yield draw, stations(left), {rank: [own[rank], own[(rank - turn) % 4]] for rank in own}
        now = {(int(y), int(x)): int(n) for n, x, y in said(right, r"^(\d)$")}
        yield draw, now, {(p.query, p.key): p.rank for p in products if p.turn == turn}
        seen = [look_at(right, p.key + 0.3, p.query + 0.7) == colours[owner[p.key]] for p in products]
        yield draw, seen, [p.turn <= turn for p in products]
        grey = {look_at(right, k + 0.5, q + 0.5) for q in range(8) for k in range(q + 1, 8)}
        yield draw, (grey, len(left.patches) > 24), ({context_pictures.GREY.lower()}, turn < 3)  # arrows
    draw, dealt = context_pictures.draw_deals, r.sample(range(8), 8)
    ax = draw({title: lambda rank, _: dealt[2 * rank : 2 * rank + 2] for title in "ab"}).axes[1]
    ranks = {int(y): int(n) for n, _, y in said(ax, r"rank (\d)")}
    yield draw, ranks, {query: dealt.index(query) // 2 for query in range(8)}
    for query, key in itertools.product(range(8), range(8)):
        cell = [look_at(ax, key + x, query + y) == colours[ranks[query]] for x, y in ((0.2, 0.7), (0.7, 0.2))]
        yield draw, cell, [key <= query, key < query]
    blocks = [sum(query + 0.5 for query in dealt[2 * rank : 2 * rank + 2]) for rank in range(4)]
    yield draw, [float(n) for n, *_ in said(ax, r"([\d.]+) blocks")], blocks
    draw, panels = context_pictures.draw_masks, {t: torch.tensor([r.randrange(4) for _ in range(12)]) for t in "ab"}
    allowed = torch.tensor([[r.random() < 0.6 for _ in range(12)] for _ in range(12)])
    axes = draw(allowed, panels).axes
    for above, below, ranks in zip(axes[:2], axes[2:], panels.values(), strict=True):
        table = [[(1 + rank) * one for one in row] for rank, row in zip(ranks.tolist(), allowed.tolist(), strict=True)]
        pairs = [sum(row.count(1 + rank) for row in table) for rank in range(4)]
        yield draw, above.images[0].get_array().tolist(), table
        yield draw, [sum(b - a for a, b in bars(below, x=rank)) for rank in range(4)], pairs
        yield draw, [int(n) for n, *_ in said(below, r"^(\d+)$")], pairs
    draw, tables = context_pictures.draw_exchange, [[[r.randrange(4) for _ in range(3)] for _ in "ab"] for _ in "ab"]
    for ax, table in zip(draw(*tables).axes[::2], tables, strict=True):
        yield draw, looks_of(ax, r"rank (\d)"), [(str(rank), colours[rank]) for row in table for rank in row]
    draw = context_pictures.ContextLab.draw
    for ranks, share in itertools.product((2, 8, 32), (0.25, 1.0)):
        own, rate, speed, width = 2 ** r.randint(9, 15), r.uniform(1e14, 1e15), r.uniform(1e10, 4e11), 4096
        values = {"tokens": own * ranks, "ranks": ranks, "share": share, "rate": rate, "bandwidth": speed}
        ax, sent = draw(Some(), **values).axes[0], 2 * 2 * width * share * own / speed  # keys and values, 2 bytes each
        work = 2 * 2 * (own * own * ranks / 2) * width / rate  # two products of half of all pairs
        waits = [(ranks - 1) * sent, (ranks - 1) * max(0, sent - work / ranks)]
        waits += [2 * (2 + 2 * share) * width * own * (1 - 1 / ranks) / speed]
        rows = [stacked([1e3 * work, 1e3 * wait][: 1 + (wait > 1e-9)]) for wait in waits]
        yield draw, [bars(ax, y=row) for row in range(3)], rows
        yield draw, [n for n, *_ in said(ax, r"waits (.*) ms")], [f"{1e3 * wait:.1f}" for wait in waits]


def experts(r) -> Found:
    draw, chosen = moe_pictures.draw_capacity, [r.randint(0, 9) for _ in range(6)]
    ax = draw(chosen, 4, 1.5).axes[0]
    yield draw, [bars(ax, x=at) for at in range(6)], [stacked([n for n in (min(n, 4), n - 4) if n > 0]) for n in chosen]
    dropped = sorted((round(x), int(n)) for n, x, _ in said(ax, r"(\d+) dropped"))
    yield draw, (dropped, points(ax.lines[0])[0][1]), ([(at, n - 4) for at, n in enumerate(chosen) if n > 4], 4)
    draw, expert = moe_pictures.draw_tokens, {name: r.randrange(6) for name in "abcdefgh"}
    sides = [[[(name, expert[name]) for name in order[at : at + 3]] for at in (0, 3, 6)]
             for order in (r.sample("abcdefgh", 8), r.sample("abcdefgh", 8))]  # fmt: skip
    ax = draw(*sides, ("one", "other")).axes[0]
    found = sorted((x, y, text[0], int(text[-1])) for text, x, y in said(ax, r"^(\w, expert \d)"))
    yield draw, [token[2:] for token in found], [token for side in sides for rank in side for token in rank]
    looks = {(number // 2, look_at(ax, x, y)) for x, y, _, number in found}
    yield draw, len(looks), len({look for _, look in looks}) * (len({rank for rank, _ in looks}) == len(looks))
    ends = {(x, name): ((2.05, 4.55)[x > 2], y) for x, y, name, _ in found}
    yield draw, sorted(one + other for (_, one), (_, other) in arrows(ax, ends)), [2 * name for name in "abcdefgh"]
    ranks = sorted((x > 1, int(n), y) for n, x, y in said(ax, r"^rank (\d)"))
    middles = [sum(y for x, y, name, _ in found if (x > 2) == side and (name, expert[name]) in sides[side][rank])
               / len(sides[side][rank]) for side, rank, _ in ranks]  # fmt: skip
    yield draw, all(abs(y - middle) < 0.2 for (*_, y), middle in zip(ranks, middles, strict=True)), True
    draw, counts = moe_pictures.draw_loads, torch.tensor([[r.randint(1, 9) for _ in range(4)] for _ in range(5)])
    percent = [[100 * n / sum(row) for n in row] for row in counts.tolist()]
    for ax in draw(dict.fromkeys("ab", moe_pictures.shares(counts))).axes[:2]:
        yield draw, ax.images[0].get_array().tolist(), [*map(list, zip(*percent, strict=True))]
    draw, what = moe_pictures.draw_recorded_exchange, [("compute", ""), ("comm", "x"), ("comm", ""), ("comm", "y")]
    some = [(rank, *one) for rank in range(8) for one in zip(spans(r, 4, 1.2), r.sample(what, 4), strict=True)]
    rows = [{"rank": rank, "stream": 7, "kind": kind, "label": label, "start_us": 1e3 * a, "duration_us": 500 * (b - a)}
            for rank, (a, b), (kind, label) in some]  # fmt: skip
    ax, begin = draw(rows).axes[0], min(row["start_us"] for row in rows)
    first = [min(row["start_us"] for row in rows if row["rank"] == rank and row["label"]) for rank in range(8)]
    order = sorted(range(8), key=first.__getitem__)
    yield draw, [int(label.get_text()[-1]) for label in ax.get_yticklabels()], order
    for y, rank in zip(ax.get_yticks(), order, strict=True):
        own = sorted((row["start_us"], row["start_us"] + row["duration_us"]) for row in rows if row["rank"] == rank)
        yield draw, bars(ax, y=y), [((a - begin) / 1e3, (b - begin) / 1e3) for a, b in own if a < 1e4]


def pipelines(r) -> Found:
    draw, times = pipeline_pictures.steps, simulator.Times(*(r.uniform(1, 2) for _ in range(3)), r.choice([0, 0.7]))
    figures: list = []
    for name in ("zbv", "1f1b"):
        run = simulator.simulate(schedules.build(name, 2, 3), times)
        figures.clear()
        with patched() as patch:
            patch.setattr(pipeline_pictures, "png", lambda fig, dpi: figures.append(fig) or b"")
            frames = draw(run)
        moments = sorted({event.start for own in run.ranks for event in own})
        yield draw, [frame.time for frame in frames], [f"{now:g}" for now in moments]
        for now, fig in zip(moments, figures, strict=True):
            yield draw, points((ax := fig.axes[0]).lines[-1])[0][0], now
            begun, held = [[event for event in own if event.start <= now] for own in run.ranks], []
            for y, events in zip(ax.get_yticks(), begun, strict=True):
                boxes = [(look, a, b) for look, a, b in cut(ax, y=y) if look != to_hex(plotting.IDLE)]
                yield draw, boxes, [(to_hex(plotting.ACTIONS[e.action.kind][1]), e.start, e.end) for e in events]
                over = {e.action[::2] for e in events if e.action.kind in "BW" and e.end <= now}
                held.append({e.action.microbatch for e in events if e.action.kind == "F" and e.action[::2] not in over})
            labels = [int(n) for n, *_ in said(ax, r"^(\d+)$")], framed(ax, r"^(\d+)$")
            wanted = [(event.action.microbatch, event.end > now) for events in begun for event in events]
            yield draw, [*zip(*labels, strict=True)], wanted
            yield draw, [{*numbers(text)} for text, *_ in said(ax, "stores (.*)")], held
    draw, seconds = pipeline_pictures.stage_times, [r.uniform(1, 3) for _ in range(9)]  # embedding, blocks, output
    cuts = {title: [*sorted(r.sample(range(1, 9), 2)), 9] for title in "ab"}
    for ax, ends in zip(draw(cuts, seconds).axes, cuts.values(), strict=True):
        for stage, layers in enumerate(map(range, [0, *ends], ends)):
            blocks = [layer for layer in layers if 0 < layer < 8]
            sums = [1e3 * sum(seconds[layer] for layer in some) for some in (layers, blocks)]
            yield draw, [b for _, _, b in cut(ax, x=stage)], sums if blocks else sums[:1]
            yield draw, [int(n) for n, x, _ in said(ax, r"(\d+) block") if x == stage], [len(blocks)]
    draw, sizes = pipeline_pictures.times_by_size, [1, 2, 4]
    took = {ranks: [r.uniform(1, 3) for _ in sizes] for ranks in (2, 4, 8)}
    curves = [[*zip(sizes, own, strict=True)] for own in took.values()]
    ax = draw(sizes, took).axes[0]
    best = [[min(curve, key=lambda point: point[1])] for curve in curves]
    yield draw, [points(line) for line in ax.lines], [one for pair in zip(curves, best, strict=True) for one in pair]
    yield draw, {n: y for n, (_, y) in placed(ax, r"(\d) ranks").items()}, {n: own[-1] for n, own in took.items()}
    draw = pipeline_pictures.bubbles_by_message
    bubbles = {name: [r.uniform(1, 40) for _ in "abc"] for name in ("gpipe", "A", "B")}
    ax = draw([0, 1, 2], bubbles, {"here": 0.3, "there": 1.5}).axes[0]
    yield draw, [points(line) for line in ax.lines[:3]], [[*enumerate(own)] for own in bubbles.values()]
    yield draw, [points(line)[0][0] for line in ax.lines[3:]], [0.3, 1.5]
    names = [name for name, _, y in sorted(said(ax, "^(gpipe|A|B)$"), key=lambda one: one[2])]
    yield draw, names, sorted(bubbles, key=lambda name: bubbles[name][-1])
    draw = pipeline_pictures.placements
    for ranks in (2, 4):
        for ax, built in zip(draw(ranks).axes, (("interleaved", ranks, ranks, 2), ("zbv", ranks, ranks)), strict=True):
            stages = placed(ax, r"stage (\d+)")
            yield draw, [round(y) for _, (_, y) in sorted(stages.items())], simulator.placement(schedules.build(*built))
            yield draw, arrows(ax, stages), [*itertools.pairwise(range(2 * ranks))]
    draw = pipeline_pictures.whole_stages
    orders = {text: schedules.parse(text) for text in ("0F0 0F1 0B0 0B1", "0F0 2F0 4F0 4B0 2B0 0B0")}
    for ax, order in zip(draw(orders).axes, orders.values(), strict=True):
        boxes = [*zip(order, stacked(1 + (action.kind == "B") for action in order), strict=True)]
        looks, gathers, rows = set(), 0, [int(label.get_text().split()[1]) for label in ax.get_yticklabels()]
        for stage, y in zip(rows, ax.get_yticks(), strict=True):
            own, areas = [(action.kind, box) for action, box in boxes if action.stage == stage], cut(ax, y=y)
            looks |= {(kind, area[0]) for kind, box in own for area in areas if same(area[1:], box)}
            whole = [area[1:] for area in areas if not any(same(area[1:], box) for _, box in own)]
            whole.remove((0, boxes[-1][1][1]))  # the ground
            gathers += len(whole)
            yield draw, all(any(a <= box[0] and box[1] <= b for a, b in whole) for _, box in own), True
        yield draw, (len(looks), rows), (2, sorted({action.stage for action in order}))
        yield draw, numbers(ax.get_title().partition(":")[2]), [gathers, len(rows), gathers / len(rows)]
    draw, full = pipeline_pictures.meeting, simulator.with_messages(schedules.build("1f1b", 2, 2))
    for moment in [one for blocking in (True, False) for one in pipeline_pictures.moments(full, blocking)]:
        ax, told = draw(full, moment).axes[0], []
        for own, done in zip(full, moment.done, strict=True):  # and in words, which have no ground
            told += [(action, at <= done, at == done) for at, action in enumerate(own)] + [("words", False, False)]
        filled = [look not in ("#ffffff", "") for _, look in looks_of(ax, "(.+)")]
        yield draw, [*zip(filled, framed(ax, "(.+)"), strict=True)], [marks for _, *marks in told]
        place = {box[0]: spot for box, (_, *spot) in zip(told, said(ax, "(.+)"), strict=True) if box[0] != "words"}
        for one, other in arrows(ax, place):
            yield draw, (one.kind, other), (f"SEND_{one.kind[-1]}", simulator.counterpart(one))


def sharding(r) -> Found:
    draw, fill = sharding_pictures.draw_streams, lambda: [r.uniform(1, 3) for _ in range(4)]
    panels = {title: sharding_pictures.simulate(fill(), fill(), fill(), r.randint(0, 2)) for title in "ab"}
    for ax, own in zip(draw(panels).axes, panels.values(), strict=True):
        end = max(span.end for span in own)
        labels = []
        for y, names in zip(ax.get_yticks(), (("forward", "backward"), ("gather", "reduce")), strict=True):
            wanted = by_kind([(s.kind, s.start, s.end) for s in own if s.kind in names])
            yield draw, [kind for kind in kinds(ax, y=y) if not same(kind, [(0, 1e3 * end)])], wanted
            labels += sorted((500 * (s.start + s.end), s.unit + 1) for s in own if s.kind in names)
        yield draw, [(x, int(n)) for n, x, _ in said(ax, r"^(\d)$")], labels
        idle = end - sum(span.end - span.start for span in own if span.kind in ("forward", "backward"))
        yield draw, numbers(ax.get_title(loc="left")), [round(1e3 * end, 1), round(1e3 * idle, 1)]
        yield draw, points(ax.lines[-1])[0][0], 1e3 * max(span.end for span in own if span.kind == "forward")
    draw, states = sharding_pictures.all_ranks, {title: torch.rand(4, 6) for title in "ab"}
    for ax, held in zip(draw(states, "numbers").axes, states.values(), strict=False):
        every = torch.stack([*states.values()])
        ends = [every.min().item(), every.max().item()]
        yield draw, (ax.images[0].get_array().tolist(), [*ax.images[0].get_clim()]), (held.tolist(), ends)
    draw, names = sharding_pictures.draw_stages, [*sharding_pictures.COLOURS_OF_KINDS]
    lines = [{kind: r.randint(1, 9) << 20 for kind in names} for _ in range(9)]
    panels = {"one": (lines, 3, 6), "two": (lines[:6], 2, 4)}
    for ax, (own, *begins) in zip(draw(panels).axes, panels.values(), strict=True):
        edges = itertools.pairwise([*(points(line)[0][0] for line in ax.lines), ax.get_xlim()[1]])
        passes = zip(edges, itertools.pairwise([0, *begins, len(own)]), strict=True)
        moments = [a + (b - a) * n / (to - of) for (a, b), (of, to) in passes for n in range(to - of)]
        for (now, then), line in zip(itertools.pairwise(moments), own, strict=False):
            yield draw, bars(ax, x=(now + then) / 2), stacked(line[kind] >> 20 for kind in names)
        sums = [sum(line.values()) / 2**20 for line in own]
        yield draw, [text for text, *_ in said(ax, r"^([\d.]+)$")], [f"{max(sums):.1f}", f"{sums[-1]:.1f}"]
    draw, what = sharding_pictures.step_by_step, ["gather", "forward", "free", "backward", "reduce", "reduced", "step"]
    events, shown = [(r.choice(what), r.randrange(3)) for _ in range(60)], 0
    frames = draw(events, ["A", "B", "C"], 4)
    for number, (kind, _) in enumerate(events):
        if kind not in ("forward", "backward", "step"):
            continue
        ax, words = frames[shown][0].axes[0], frames[shown][1]
        shown += 1
        for unit, name in enumerate("ABC"):
            past = [event for event, of in events[: number + 1] if of == unit]
            since = {  # event -> what it begins (or, with a minus, ends): gathering, whole, with gradients, reducing
                "gather": [1], "forward": [-1, 2], "backward": [-1, 2, 3], "free": [-2], "reduce": [4],
                "reduced": [-3, -4],
            }  # fmt: skip
            changes = [change for event in past for change in since.get(event, [])]
            flying, whole, full, sent = ([c > 0 for c in changes if abs(c) == n][-1:] == [True] for n in (1, 2, 3, 4))
            ((_, x, _),) = said(ax, f"^({name})$")
            for y, on, shard in zip(ax.get_yticks(), (whole, full), (True, "reduced" in past), strict=False):
                wide = sorted(b - a for a, b in bars(ax, y=y) if abs(a + b - 2 * x) < 1)
                yield draw, wide, [0.25] * shard + [1.0] * (1 + on)
            texts = [text for text, at, _ in said(ax, "^(gathering|reducing)$") if abs(at - x) < 0.5]
            yield draw, texts, ["gathering"] * flying + ["reducing"] * sent
            yield draw, (f"{name} is gathered" in words, f"gradients of {name} are" in words), (flying, sent)
    yield draw, shown, len(frames)
    draw, lines = sharding_pictures.draw_snapshot, ("message of a gather", "whole parameters", "whole gradients")
    events = [(line, unit, 100 * a, 100 * b) for line in lines for unit, (a, b) in enumerate(spans(r, 8), 1)]
    ax, (grey,) = draw(events).axes[0], [event[2:] for event in events if event[:2] == (lines[1], 7)]
    yield draw, by_row(ax), {line: [[event[2:] for event in events if event[0] == line]] for line in lines}
    yield draw, [(x, int(n)) for n, x, _ in said(ax, r"^(\d)$")], [((a + b) / 2, unit) for _, unit, a, b in events]
    yield draw, grey in bars(ax, y=0.5), True  # while unit 7 computes
    draw, names = sharding_pictures.draw_out_of_memory, [*sharding_pictures.BANDS]
    lines = [{name: r.randint(1, 9) * GIB for name in names} | {"asked for": 0} for _ in range(4)]
    ax = draw([*lines, lines[-1] | {"asked for": 3 * GIB}], 50.0, 0.5).axes[0]
    for at, line in [*enumerate(lines), (20, lines[-1])]:
        extra = [0.5, 3] if at > 3 else []
        yield draw, bars(ax, x=at + 0.5), stacked([*(line[name] / GIB for name in names), *extra])
    yield draw, points(ax.lines[0])[0][1], 50.0
    draw = sharding_pictures.draw_waiting
    took = {name: [r.uniform(5, 9) for _ in range(8)] for name in sharding_pictures.NCCL_NAMES}
    rows = [{"collective": name, "scope": "rank" if n < 8 else "all ranks", "rank": n, "total_ms": 1e3 * s}
            for name, own in took.items() for n, s in enumerate([*own, 2.0])]  # fmt: skip
    for ax, own in zip(draw(rows).axes, took.values(), strict=True):
        yield draw, [bars(ax, y=rank) for rank in range(8)], [[(0, 2), (2, s)] for s in own]
        yield draw, [n for n, *_ in said(ax, r"([\d.]+) s")], [f"{s:.1f}" for s in own]


def meshes(r) -> Found:
    draw, rows = axes_pictures.matrices, [r.sample(range(4), 2) for _ in range(3)]  # of a matrix on each of four ranks
    held = [[[4.0 * i + j for j in range(4)] for i in range(3) if rank in rows[i]] for rank in range(4)]
    grid, ranks = axes_pictures.owners((3, 4), held), [[sorted(own)] * 4 for own in rows]
    ax = draw({"one": grid, "other": grid}).axes[1]
    looks = [look.lower() for look in axes_pictures.RANK_COLOURS]
    drawn = [[[*map(looks.index, picture.stripes(ax, j + 0.5, i + 0.5))] for j in range(4)] for i in range(3)]
    yield draw, (grid, drawn), (ranks, ranks)
    draw, kept = axes_pictures.nodes, [float(r.randint(1, 99)) for _ in range(32)]
    order = torch.arange(32).reshape(4, 2, 4)
    groups = axes_pictures.groups_of_first({"tensor": 4, "context": 2, "data": 4})  # innermost first
    ax, members = draw(groups, kept).axes[0], [order[0, 0].tolist(), order[0, :, 0].tolist(), order[:, 0, 0].tolist()]
    yield draw, ax.images[0].get_array().tolist(), [[kept[8 * node + gpu] for node in range(4)] for gpu in range(8)]
    frames = [(box.get_edgecolor(), *map(round, box.get_center())) for box in ax.patches]
    frames = [(look, 8 * node + gpu) for look, node, gpu in frames]
    looks = list(dict.fromkeys(look for look, _ in frames))
    yield draw, [[gpu for other, gpu in frames if other == look] for look in looks], members
    draw, ranks = axes_pictures.eight_ranks, {place: n for n, place in enumerate(itertools.product((0, 1), repeat=3))}
    for number, axis in enumerate(("pipeline", "data", "tensor")):
        busy, some = r.sample([*ranks], 3), r.sample([*ranks], 4)
        other = [tuple(1 - c if at == number else c for at, c in enumerate(rank)) for rank in some]
        ax = draw(axis, axes_pictures.pairs(axis, some), busy, "words").axes[0]
        places = placed(ax, r"^rank (\d)")
        yield draw, arrows(ax, places), [(ranks[a], ranks[b]) for a, b in zip(some, other, strict=True)]
        lit = [int(n) for n, look in looks_of(ax, r"^rank (\d)") if look != "#ffffff"]
        yield draw, sorted(lit), sorted(ranks[one] for one in busy)
        for n, (x, _) in placed(ax, r"^stage (\d)").items():
            yield draw, [rank for rank, (at, _) in places.items() if abs(at - x) < 1.2], [4 * n + k for k in range(4)]


def planner(r) -> Found:
    def plan():
        parts = {part: r.uniform(4, 9) * GIB for names in calculator.GROUPS.values() for part in names}
        step = {name: r.uniform(1, 5) for name in planner_pictures.TIMES}
        gpu = Some(memory=80 * GIB, name="a GPU")
        return Some(memory=Some(parts=parts), step=Some(parts=step), seconds=sum(step.values()), fits="yes",
                    cluster=Some(gpu=gpu, gpus=8), model=Some(name="a model"), layout=Some(describe=str))  # fmt: skip

    draw, rows = calculator.draw, {name: plan() for name in "ab"}
    with patched() as patch:
        patch.setattr(calculator, "messages", lambda found: (found.seconds / 5, found.seconds / 9))
        left, right = draw(rows).axes
    yield draw, points(left.lines[0])[0][0], 80
    for row, found in enumerate(rows.values()):
        sizes = [sum(found.memory.parts[part] for part in names) / GIB for names in calculator.GROUPS.values()]
        yield draw, bars(left, y=row), stacked(sizes)
        written = {int(n) for n, _, y in said(left, r"^(\d+)$") if y == row}
        yield draw, {round(sum(sizes)), round(max(sizes))} <= written <= {round(n) for n in [*sizes, sum(sizes)]}, True
        total, last = found.seconds, found.step.parts["optimizer"]
        work = total - total / 9 - last
        yield draw, bars(right, y=row - 0.18), [(0, work), (total - last, total)]
        yield draw, bars(right, y=row + 0.18), [(work - total / 5, work), (work, total - last)]
        yield draw, [n for n, _, y in said(right, r"([\d.]+) s") if y == row], [f"{total:.2f}"]
    draw = planner_pictures.draw_times
    ax = draw(rows).axes[0]
    yield draw, [bars(ax, y=row) for row in (0, 1)], [stacked(found.step.parts.values()) for found in rows.values()]
    yield draw, [n for n, *_ in said(ax, r"([\d.]+) s")], [f"{found.seconds:.1f}" for found in rows.values()]
    draw, figures = planner_plot.picture, []
    with patched() as patch:
        patch.setattr(plt.Figure, "savefig", lambda fig, path, dpi: figures.append(fig))
        draw([*rows.values()], "nowhere")
    for row, found in enumerate(rows.values()):
        about = (found.memory.parts, GIB, ".0f"), (found.step.parts, 1, ".2f")
        for ax, (parts, unit, form) in zip(figures[0].axes, about, strict=True):
            yield draw, bars(ax, y=row), stacked(size / unit for size in parts.values())
            ends = [n for n, _, y in said(ax, r"^ ([\d.]+)$") if y == row]
            yield draw, ends, [format(sum(parts.values()) / unit, form)]
    yield draw, points(figures[0].axes[0].lines[0])[0][0], 80
    draw, turns = planner_pictures.draw_exposed, {"one": 5000.0, "two": 20000.0}
    curves = {(name, n): {2048 * 4**k: r.random() for k in range(4)} for name in turns for n in (1, 8)}
    for ax, (name, turn) in zip(draw(curves, turns).axes, turns.items(), strict=True):
        yield draw, [points(line) for line in ax.lines[:2]], [[*curves[name, n].items()] for n in (1, 8)]
        yield draw, [points(ax.lines[2])[0][0], *numbers(ax.texts[0].get_text())], [turn, turn]
    draw, coin = planner_pictures.draw_scores, lambda: r.random() < 0.5
    lines = [Some(run=Some(source=r.choice("ab")), time_error=r.uniform(-0.5, 0.5), inside=coin(), memory_inside=coin(),
                  memory_error=r.choice([None, r.uniform(-0.5, 0.5)]), in_scope=coin()) for _ in range(40)]  # fmt: skip
    with patched() as patch:
        patch.setattr(planner_pictures, "project", str)
        axes, projects = draw(lines).axes, list(dict.fromkeys(line.run.source for line in lines))
    for ax, error, inside in zip(axes, ("time_error", "memory_error"), ("inside", "memory_inside"), strict=True):
        known = {round(1 + getattr(one, error), 9): one for one in lines if getattr(one, error) is not None}
        dots = [(round(float(x), 9), round(float(y)), tuple(look)) for many in ax.collections
                for (x, y), look in zip(many.get_offsets(), many.get_facecolors(), strict=True)]  # fmt: skip
        rows = sorted((x, projects.index(one.run.source)) for x, one in known.items())
        yield draw, sorted(dot[:2] for dot in dots), rows
        looks = {(known[x].in_scope and 1 + getattr(known[x], inside), look) for x, _, look in dots}
        yield draw, (len(looks), len({look for _, look in looks})), (3, 3)
    draw, error, some = decision_map.draw_rows, decision_map.load().error, [*decision_map.LAYOUT_KINDS][:-1]
    cells = {(model, gpus): {"kind": r.choice(some), "layout": f"T{r.randint(2, 99)}", "mfu": f"{r.random():.3f}",
             "later": repr(error * r.choice([0.5, 1, 1.01, 3]))} for model in "AB" for gpus in (8, 64)}  # fmt: skip
    ax = draw(cells, "a network", "GPUs").axes[0]
    for (model, gpus), row in cells.items():
        x, y = (8, 64).index(gpus) + 0.5, "AB".index(model) + 0.5
        (text,) = [text for text, *place in said(ax) if place == [x, y]]
        words = [row["layout"] in text, f"{float(row['mfu']):.0%}" in text, "≈" in text]
        yield draw, words, [True, True, float(row["later"]) <= error]
        yield draw, look_at(ax, x - 0.4, y - 0.4), to_hex(decision_map.LAYOUT_KINDS[row["kind"]])


def series(r) -> Found:
    """Functions that make several pictures: what changes from one to the next."""
    make, (before, after) = rank_pictures.run, [[[r.choice([0, 1, 43]) for _ in "ab"] for _ in range(4)] for _ in "ab"]
    with patched() as patch:
        patch.setattr(rank_pictures, "launch", lambda fn, nproc: [*zip(before, after, strict=True)])
        fig, _ = make("a move", None, pairs := r.sample(rank_pictures.ALL, 3), [1])
    other = rank_pictures.moved("a move", before, after, pairs, [1])
    one, two = ([(picture.areas_of(ax), said(ax)) for ax in each.axes] for each in (fig, other))
    yield make, one, two
    for fig, _, caption in (make := rank_pictures.rings_and_trees)():
        yield make, numbers(caption)[1:], [int(have) for have, *_ in said(fig.axes[0], r"(\d) of 8")]
    for count, (fig, _, _) in enumerate((make := rank_pictures.a_step_skipped)("first sum", "second sum")):
        sums = [text for text, *_ in said(fig.axes[0], "^(.* sum)")]
        yield make, (sums, len(fig.axes[0].lines)), (["first sum", "second sum"][:count], min(count, 2))
    make, total = rank_pictures.steps_of, [1111 * n for n in (1, 2, 3, 4)]
    for number, (fig, _, _) in enumerate(frames := [*make(by_hand.ring)]):
        ways = [(rank, (rank + 1) % 4) for rank in range(4)] if number else []
        yield make, arrows(ax := fig.axes[0], placed(ax, r"^([0-3])$")), ways
        yield make, sum(framed(ax)), len(ways)  # each rank changes one of its chunks
        held = [int(n) for n, look in looks_of(ax, r"^(\d+)$") if look not in ("", "#ffffff")]
        yield make, len(held) == 16 and (sorted(held) == sorted(4 * total)) == (number == len(frames) - 1), True


def turns(r) -> Found:
    keys, sums = [0, 1, 2, 3], {key: set() for key in range(4)}
    both = zip((make := context_pictures.turn_frames)(), context_pictures.backward_frames(), strict=True)
    for turn, ((fig, _, caption), (behind, _, _)) in enumerate(both):
        now = {(int(y), int(x)): int(n) for n, x, y in said(fig.axes[1], r"^(\d)$")}
        yield make, now, {(rank, key): rank for rank, key in enumerate(keys)}
        yield make, numbers(caption), [turn, *(n for pair in enumerate(keys) for n in pair)]
        for rank, key in enumerate(keys):
            sums[key] |= {rank} if turn else set()
        told = [[[key], [key, *sorted(sums[key])]][: 1 + (turn > 0)] for key in keys]
        yield context_pictures.draw_backward, stations(behind.axes[0]), dict(enumerate(told))
        keys = keys[-1:] + keys[:-1]  # each rank hands its keys on to the next
    make, places = tensor_pictures.f_and_g_frames, ("a", "x", "h", "part", "y")  # as one reads them
    found = [[(None, {place: float(r.randint(0, 9)) for place in places}) for _ in "ab"] for _ in "ab"]
    a, x = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    part = (h := (x * a).relu()) * torch.tensor([4.0, 1.0])
    right = [[*n.expand(2).tolist()] for n in torch.autograd.grad(part.sum(), (a, x, h, part))] + [[1, 1]]
    rows = [[n.expand(2).tolist() for n in (a, x, h, part, part.sum())]]
    rows += [[[rank[place] for _, rank in results] for place in places] for results in found] + [right]
    for (fig, _, _), row in zip(make(*found), rows, strict=True):
        boxes = [float(n) for n, *_ in said(fig.axes[0], r"^(\d+)$")]
        yield make, boxes, [numbers[rank] for rank in (0, 1) for numbers in row]
    bits = {"tensor": 1, "data": 2, "pipeline": 4}
    for fig, _ in (make := axes_pictures.step_frames)():
        (label, *_) = max(said(fig.axes[0], "^((?!rank|stage|replica).*)"), key=lambda one: len(one[0]))
        ways = arrows(fig.axes[0], placed(fig.axes[0], r"^rank (\d)"))
        axis = label.partition(":")[0] if label.partition(":")[0] in bits else "tensor"
        yield make, {one ^ other for one, other in ways} <= {bits[axis]}, True
        if axis == "pipeline":
            yield make, {one < other for one, other in ways}, {"activations" in label and "gradients" not in label}


def watched(_) -> Found:
    make, Unit = sharding_pictures.watch, type("Unit", (), {"work": None})

    class Zero3:
        """Of the calls that are watched as much as they leave behind."""

        def __init__(self):
            self.flats, self.under_way, self.optimizer = [Unit() for _ in range(3)], None, Some(step=lambda: None)

        def start(self, place):
            if 0 <= place < 3:
                self.flats[place].work = "under way"

        def prepare(self, place, following):
            self.flats[place].work = None

        def free(self, flat):
            flat.work = None

        def reduce(self, flat):
            self.under_way = (flat, "its message")

        def finish_reduce(self):
            self.under_way = None

    events = make(trained := Zero3())
    for place in (0, 0, 3, 1):  # the second asks for what is there, the third for none
        trained.start(place)
    trained.prepare(0, 1), trained.prepare(1, 0), trained.free(trained.flats[1]), trained.finish_reduce()
    trained.reduce(trained.flats[2]), trained.finish_reduce(), trained.finish_reduce(), trained.optimizer.step()
    told = "gather 0 gather 1 forward 0 backward 1 free 1 reduce 2 reduced 2 step 0"
    yield make, " ".join(f"{what} {unit}" for what, unit in events), told


ROOMS = (everywhere, series, turns, watched, intro, data_parallel, ddp, tensors, contexts, experts, pipelines, sharding,
         meshes, planner)  # fmt: skip
ALWAYS_THE_SAME = (
    overview.ways_to_divide, rank_pictures.waiting, tensor_pictures.draw_boundary, tensor_pictures.draw_split_mlp,
    pipeline_pictures.two_halves, pipeline_pictures.two_graphs, pipeline_pictures.two_axes,
    ddp_pictures.draw_recorded_steps,
)  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_drawn_is_what_was_given(room):
    plt.close("all")  # what other tests have left
    first: dict[Callable, plt.Figure] = {}
    for number, (function, drawn, given) in enumerate(room(random.Random(room.__name__))):
        assert same(drawn, given), f"{function.__qualname__}, pair {number}: {drawn} is drawn of {given}"
        if plt.get_fignums():
            first.setdefault(function, plt.gcf())
    unreadable = {function.__qualname__: why for function, fig in first.items() if (why := picture.readable(fig))}
    plt.close("all")
    assert not unreadable


@pytest.mark.parametrize("draw", ALWAYS_THE_SAME)
def test_what_is_always_the_same_can_be_read(draw):
    assert picture.readable(draw()) == ""
    plt.close("all")


def test_every_function_that_draws_is_looked_at():
    """Those of the chapters, the planner and common/lab that make a figure."""
    named = {name for room in ROOMS for name in room.__code__.co_names} | {draw.__name__ for draw in ALWAYS_THE_SAME}
    for path in [file for place in ("[0-9]*/*.py", "planner/*.py", "common/lab/*.py") for file in ROOT.glob(place)]:
        for function in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]:
            calls = [call.func for call in ast.walk(function) if isinstance(call, ast.Call)]
            draws = any(isinstance(call, ast.Attribute) and call.attr in ("subplots", "figure") for call in calls)
            if draws and not function.name.startswith("_"):
                assert function.name in named, f"{path.name}: nobody looks at what {function.name} draws"


@pytest.mark.parametrize("make", [buckets.BucketLab, calculator.Calculator])
def test_the_ends_of_every_slider_have_a_picture(make):
    """Each control at its first and its last value, the others where they begin; it begins with one of them."""
    lab = make()
    values = {name: control.value for name, control in lab.controls.items()}
    for name, control in lab.controls.items():
        assert control.description
        offered = getattr(control, "options", None) or (False, True)
        offered = list(offered.values()) if isinstance(offered, dict) else offered
        offered = [option[1] if isinstance(option, tuple) else option for option in offered]
        assert control.value in offered and len({*offered}) == len(offered), name
        for value in (offered[0], offered[-1]):
            figure = lab.draw(**{**values, name: value})
            assert figure is None or figure.axes
            plt.close("all")


def test_the_formulas_of_a_backward_pass_in_two_halves_are_autograds():
    """What stands along the arrows and in the boxes of y = relu(x @ w1) @ w2, computed."""
    x, w1, w2 = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (4, 5), (5, 2)))
    a = x @ w1
    h = a.relu()
    y = h @ w2
    known = {"x": x, "w1": w1, "a": a, "h": h, "w2": w2, "y": y}
    known |= {"relu": torch.relu, "grad_y": torch.randn(3, 2).double()}
    for name in ("x", "w1", "a", "h", "w2"):
        (known[f"grad_{name}"],) = torch.autograd.grad(y, known[name], known["grad_y"], retain_graph=True)
    ax = pipeline_pictures.two_halves().axes[0]
    weights = [text.split(" = ") for text, *_ in said(ax, r"^(grad_w\d = .*)")]
    along = sorted((x, text) for text, x, _ in said(ax, r"^(@ w\d\.T|\* .*)"))
    back = [
        (f"grad_{to}", f"grad_{of} {words}") for (of, to), (_, words) in zip(("ax", "ha", "yh"), along, strict=True)
    ]
    assert len(weights) == 2
    for name, formula in weights + back:
        torch.testing.assert_close(eval(formula, known), known[name], msg=f"{name} = {formula}")
    plt.close("all")


def test_show_embeds_alt_text_and_closes(monkeypatch):
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    fig, _ = plt.subplots(figsize=(4, 3))
    plotting.show(fig, alt="a picture of nothing")
    data, metadata = shown[0]._repr_png_()
    assert (metadata["alt"], metadata["width"]) == ("a picture of nothing", 360), "alternative text, and pixels"
    assert not plt.fignum_exists(fig.number), "the figure is still open, and a notebook shows it once more"
