"""What holds of every picture: nothing is cut off, each series has its name, stacked bars add up to what is written,
and what is drawn is what was given."""

import itertools
import math
import re
from collections import Counter
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch

from common.lab import plotting
from course.ddp import buckets, checkpoint_cost, rates
from course.ddp import pictures as ddp_pictures
from course.fsdp import sharding_pictures
from course.intro import networks, overview, rank_pictures
from course.model_parallel import by_hand_ring_attention as ring
from course.model_parallel import context_pictures, moe_pictures
from course.model_parallel import pictures as tensor_pictures
from course.pipeline import pictures as pipeline_pictures
from course.pipeline import simulator
from course.pipeline.schedules import build, parse
from planner import calculator, decision_map


class Timeline:
    ranks = [
        [(0, 1, (0, "F", 1)), (3, 4, (0, "I", 1)), (4, 5, (0, "W", 1))],
        [(1, 2, (1, "F", 1)), (2, 3, (1, "B", 1))],
    ]

    def stored(self, rank):
        return [[(0, 2), (4, 1), (5, 0)], [(1, 1), (3, 0)]][rank]


def plans():
    """Two layouts on a GPU of 80 GiB: 1 to 6, and 20 to 25 GiB; a step of 10 s."""
    sizes = {name: [1 + place, 20 + place] for place, name in enumerate(calculator.GROUPS)}
    rows = {
        f"plan {number}": SimpleNamespace(
            number=number,
            cluster=SimpleNamespace(gpu=SimpleNamespace(memory=80 * 2**30)),
            seconds=10.0,
            step=SimpleNamespace(parts={"optimizer": 2.0}),
        )
        for number in range(2)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calculator, "grouped", lambda found: {name: both[found.number] for name, both in sizes.items()})
        patch.setattr(calculator, "messages", lambda found: (3.0, 1.0))
        return calculator.draw(rows)


def memory_of_a_step():
    kinds, mib = ("parameters", "gradients", "optimizer", "buffers", "activations"), 2**20
    held = [(1, 0, 2, 1, 3), (1, 1, 2, 1, 5), (1, 1, 2, 1, 4), (1, 1, 2, 1, 0), *[(1, 1, 2, 0, 0)] * 4]
    lines = [dict(zip(kinds, (size * mib for size in sizes), strict=True)) for sizes in held]
    return sharding_pictures.draw_stages({"one": (lines, 1, 4), "two": (lines, 2, 5)})


def two_that_wait():
    lists = [parse("0F0 0SEND_F0 0RECV_B0"), parse("1F0 1SEND_B0 1RECV_F0")]
    return pipeline_pictures.meeting(lists, pipeline_pictures.moments(lists, blocking=True)[-1])


def decisions():
    cells = {
        ("small", 8): {"kind": "DDP, ZeRO-1, ZeRO-2", "layout": "Z1", "mfu": "0.456", "later": "0.050"},
        ("small", 1024): {"kind": "tensor", "layout": "T8 Z1", "mfu": "0.3", "later": "0.051"},
        ("large", 8): {"kind": "does not fit"},
        ("large", 1024): {"kind": "ZeRO-3 (FSDP)", "layout": ""},
    }
    return decision_map.draw_rows(cells, "a network", "GPUs of a kind")


ROWS = [["0", "1 2", "-15", "0.5"], ["0", "3 4", "-87", "0.5"]]  # weight, examples, gradient, new weight
PICTURES = {
    "collective": lambda: plotting.collective([[[11, None], [2]], [[13], [20]]], ("start", "end"), title="a sum"),
    "timeline": lambda: plotting.timeline([(0, "send", 7.0, 7.002), (1, "add", 7.001, 7.004)], title="two ranks"),
    "pipeline": lambda: plotting.pipeline({"a pipeline": Timeline()}, unit="ms"),
    "pipeline, one followed": lambda: plotting.pipeline({"a pipeline": Timeline()}, memory=False, follow=0),
    "cluster": lambda: networks.cluster(450, 63, 50, nodes=2, gpus=1),
    "missed by a line": lambda: networks.missed({1: {10: 0.5, 1000: 1.5}, 4: {10: 1.0, 1000: 2.0}}),
    "passes": lambda done=(("computes", 0, 2), ("sends, hidden", 1, 2)): ddp_pictures.draw_passes({"one": done}),
    "overlap": lambda: buckets.draw_overlap(400, 200, 1.0, 12.5),
    "plans": plans,
    "memory of a step": memory_of_a_step,
    "decisions": decisions,
    "own gradients": lambda: overview.step_pictures(ROWS, "-102", "-51")[2],
    "summed gradients": lambda: overview.step_pictures(ROWS, "-102", "-51")[3],
    "two graphs": pipeline_pictures.two_graphs,
    "two axes": pipeline_pictures.two_axes,
    "two ranks that wait": two_that_wait,
    "whole stages": lambda: pipeline_pictures.whole_stages({"one": parse("0F0 0B0"), "two": parse("0F0 2F0 2B0 0B0")}),
    "bubbles by message": lambda: pipeline_pictures.bubbles_by_message(
        [0, 1], {"low": [9, 20], "lower": [9, 19.5], "high": [30, 50]}, {"a network": 0.1}
    ),
    "ranks on nodes": lambda: overview.ranks_on_nodes(2, 4),
    "checkpoints": lambda: checkpoint_cost.draw(cost=0.5, mtbf=180.0, restart=10.0),
}


@pytest.fixture(scope="module", params=PICTURES)
def fig(request):
    figure = PICTURES[request.param]()
    figure.canvas.draw()
    yield figure
    plt.close(figure)


def test_nothing_is_cut_off(fig):
    """Texts, boxes, bars and lines lie in the figure, and what has a place in numbers within its axes' limits."""
    room = fig.bbox.expanded(1.01, 1.01)
    texts = [text for ax in fig.axes for text in [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label]]
    texts = [text for text in [*fig.texts, *texts] if text.get_text().strip() and text.get_visible()]
    outside = [text.get_text() for text in texts if not inside(text.get_window_extent(), room)]
    assert texts and not outside, "texts that are cut off at the figure's edge"
    for ax in fig.axes:
        limits = ax.bbox.padded(3)
        bars = [patch for patch in ax.patches if isinstance(patch, plt.Rectangle) and patch.get_clip_on()]
        boxes = [patch.get_window_extent() for patch in bars] + [
            ax.transData.transform_bbox(path.get_extents())
            for many in ax.collections
            for path in many.get_paths()
            if many.get_transform().contains_branch(ax.transData) and len(path.vertices)
        ]
        assert all(inside(box, limits) for box in boxes), f"{ax.get_title()}: a bar that the axes cut off"


def inside(box, room) -> bool:
    places = (box.x0, box.y0, box.x1, box.y1)
    sides = (box.x0 - room.x0, room.x1 - box.x1, box.y0 - room.y0, room.y1 - box.y1)
    return all(map(math.isfinite, places)) and min(sides) >= 0


def legends(fig):
    return [*fig.legends, *(legend for ax in fig.axes if (legend := ax.get_legend()))]


def colour(artist) -> str:
    found = artist.get_facecolor() if hasattr(artist, "get_facecolor") else artist.get_color()
    return to_hex(found if isinstance(found, str) or not hasattr(found[0], "__len__") else found[0])


def test_every_series_is_in_the_legend_once(fig):
    for legend in legends(fig):
        names = [text.get_text() for text in legend.get_texts()]
        assert all(names) and len({*names}) == len(names), "names in a legend"
        looks = [
            (colour(handle), getattr(handle, "get_hatch", str)(), getattr(handle, "get_linestyle", str)())
            for handle in legend.legend_handles
        ]
        assert len({*looks}) == len(looks), "two series that look the same"


def test_axes_with_numbers_say_of_what(fig):
    """A unit in brackets, or a word without a unit such as a loss."""
    for ax in fig.axes:
        for axis in (ax.xaxis, ax.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels() if label.get_visible()]
            numbers = [label for label in labels if label.strip("0123456789.\N{MINUS SIGN}-$") == "" and label]
            shared = axis is ax.yaxis and ax is not fig.axes[0] and ax.get_shared_y_axes().joined(ax, fig.axes[0])
            if ax.axison and axis.get_visible() and len(numbers) > 1 and not shared:
                assert axis.get_label_text(), f"{ax.get_title()}: numbers {numbers[:3]} of what?"


def widths(ax, row):
    return sorted((bar.get_x(), bar.get_width()) for bar in ax.patches
                  if bar.get_y() <= row <= bar.get_y() + bar.get_height() and bar.get_width())  # fmt: skip


def without_gaps(bars):
    return all(left + width == pytest.approx(right) for (left, width), (right, _) in zip(bars, bars[1:], strict=False))


def test_the_bars_of_a_plan_add_up_to_its_memory_and_its_step():
    memory, step = plans().axes
    for row, expected in enumerate((sum(range(1, 7)), sum(range(20, 26)))):
        bars = widths(memory, row)
        assert without_gaps(bars) and sum(width for _, width in bars) == expected, "GiB, one part beside the other"
        assert f"{expected}" in [text.get_text() for text in memory.texts], "the sum is written beside its bar"
        assert max(end + width for end, width in widths(step, row - 0.18)) == 10.0, "work, exposed and optimizer's step"
        hidden, exposed = widths(step, row + 0.18)
        assert (hidden, exposed) == ((10 - 1 - 2 - 3, 3.0), (10 - 1 - 2, 1.0)), (
            "hidden lies under work, exposed after it"
        )
    plt.close("all")


def test_the_areas_of_a_steps_memory_lie_on_each_other():
    ax = memory_of_a_step().axes[0]
    tops = [max(path.get_extents().y1 for path in many.get_paths()) for many in ax.collections]
    assert tops == sorted(tops) and tops[-1] == 1 + 1 + 2 + 1 + 5, "MiB at the peak"
    assert any(text.get_text().startswith("10.0") for text in ax.texts), "which is written there"
    plt.close("all")


def test_a_bar_is_from_the_begin_to_the_end_of_what_a_rank_does():
    done = [("computes", 10.0, 14.0), ("sends, hidden", 12.0, 14.0), ("sends, exposed", 14.0, 19.0)]
    ax = PICTURES["passes"](done).axes[0]
    bars = [path.get_extents() for many in ax.collections for path in many.get_paths()]
    assert [(bar.x0, bar.x1) for bar in bars] == [(a - 10, b - 10) for _, a, b in done], "ms since the first began"
    plt.close("all")


def test_thick_arrows_of_a_ring_are_those_between_nodes():
    """Of four GPUs on two nodes: two of one ring's steps leave a node, and all of the other's."""
    widths = [sorted(patch.get_linewidth() for patch in ax.patches if isinstance(patch, FancyArrowPatch))
              for ax in networks.rings([[0, 1, 3, 2], [0, 2, 1, 3]], per_node=2).axes]  # fmt: skip
    thin, thick = widths[0][0], widths[1][0]
    assert thin < thick and widths == [[thin] * 2 + [thick] * 2, [thick] * 4]
    plt.close("all")


def test_what_a_step_has_changed_is_lit_and_nothing_else():
    held = [[1, 2], [3, 4], [5, 6], [7, 8]]

    def looks(before):
        return Counter(
            (round(patch.get_x()), round(patch.get_y()), patch.get_facecolor())
            for patch in rank_pictures.circle(before, held, []).axes[0].patches
            if isinstance(patch, plt.Rectangle)
        )

    assert looks(held) == looks(None), "nothing has changed"
    other = looks([[1, 2], [9, 4], [5, 6], [7, 8]]) - looks(None)
    assert len({place[:2] for place in other}) == 1, "one of eight numbers"
    plt.close("all")


def test_as_many_calls_are_lit_as_have_met():
    fig = rank_pictures.paired([["a", "b", "c"]] * 2, pairs=1, notes=["the sum"])
    faces = [to_hex(patch.get_facecolor()) for patch in fig.axes[0].patches]
    assert [face != "#ffffff" for face in faces] == [True, False, False] * 2
    plt.close("all")


def test_the_ring_is_around_the_lowest_loss():
    middles = numpy.linspace(1.0, 2.0, len(rates.FACTORS))[:, None] + [0.0] * 3
    for ax in rates.draw({(name, batch): middles for name in rates.BASE for batch in rates.BATCHES}).axes:
        rings = [line.get_ydata()[0] for line in ax.lines if len(line.get_ydata()) == 1]
        assert rings == [1.0] * len(rates.BATCHES)
    plt.close("all")


def test_each_rank_has_a_colour_of_its_own_until_gradients_are_shared():
    *first, shared, _ = overview.step_pictures(ROWS, "-102", "-51")
    for fig in (*first[1:], shared):
        filled = [patch for patch in fig.axes[0].patches if patch.get_facecolor()[3] and patch.get_x() > 2]
        one, other = ([to_hex(patch.get_facecolor()) for patch in filled if patch.get_y() == top] for top in (0, 1.9))
        assert one[0] != other[0], "examples"
        assert fig is not shared or one[1:] == other[1:] == [one[0], other[0]], "a sum of both"
    plt.close("all")


LABS = [
    buckets.BucketLab,
    calculator.Calculator,
]


@pytest.mark.parametrize("make", LABS)
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


# --- what is drawn is what was given, and what is written beside it -------------------------------------------------


def filled(ax, kind=plt.Rectangle) -> list:
    return [patch for patch in ax.patches if isinstance(patch, kind) and patch.get_fill()]


def areas(ax) -> Counter:
    """How much of the axes, in their own units, is drawn in each colour."""
    found: Counter = Counter()
    for patch in filled(ax, plt.Polygon | plt.Rectangle):
        (corners,) = patch.get_path().transformed(patch.get_patch_transform()).to_polygons()
        ring = itertools.pairwise([*corners, corners[0]])
        found[to_hex(patch.get_facecolor())] += abs(sum(x * v - u * y for (x, y), (u, v) in ring)) / 2
    return found


def at(ax, x, y) -> str:
    """The colour of the last box there."""
    there = [patch for patch in filled(ax) if patch.get_x() < x < patch.get_x() + patch.get_width()]
    return to_hex([p for p in there if p.get_y() < y < p.get_y() + p.get_height()][-1].get_facecolor())


def texts(ax, pattern: str) -> list[tuple]:
    """(found, text) for each text of the axes in which the pattern is."""
    return [(found, text) for text in ax.texts if (found := re.search(pattern, text.get_text()))]


def test_a_rank_has_as_many_blocks_as_are_drawn_in_its_colour():
    fig = context_pictures.draw_deals({order.__name__: order for order in (ring.contiguous, ring.zigzag)})
    for ax in fig.axes:
        said = {to_hex(text.get_color()): float(found[1]) for found, text in texts(ax, r"([\d.]+) blocks")}
        assert said == pytest.approx(areas(ax)) and sum(said.values()) == 8 * 8 / 2, "half of all pairs"
    plt.close("all")


def test_each_token_of_each_head_lies_where_it_is_said():
    tables = [[0, 1, 2], [1, 2, 3]], [[3, 3, 1], [0, 2, 0]]  # [token][head]
    before, _, after = context_pictures.draw_exchange(*tables).axes
    for ax, table in zip((before, after), tables, strict=True):
        said = {text.get_position(): int(found[1]) for found, text in texts(ax, r"rank (\d)")}
        assert said == {(h + 0.5, t + 0.5): rank for t, row in enumerate(table) for h, rank in enumerate(row)}
        assert all(at(ax, *place) == context_pictures.RANK_COLOURS[rank].lower() for place, rank in said.items())
    plt.close("all")


def test_what_is_beyond_the_capacity_is_dropped():
    ax = moe_pictures.draw_capacity([5, 2, 4, 7], 4, 1.0).axes[0]
    bars = [(round(bar.get_x() + bar.get_width() / 2), bar.get_y(), bar.get_height()) for bar in ax.patches]
    assert sorted(bars) == [(0, 0, 4), (0, 4, 1), (1, 0, 2), (2, 0, 4), (3, 0, 4), (3, 4, 3)], "expert, from, tokens"
    assert {text.get_position()[0]: int(found[1]) for found, text in texts(ax, r"(\d+) dropped")} == {0: 1, 3: 3}
    plt.close("all")


def test_a_layer_is_busy_for_the_share_in_which_it_computes():
    ax = tensor_pictures.draw_layer({"one": (3.0, 1.0), "other": (1.0, 4.0)}, "ms").axes[0]
    bars = [(bar.get_y(), bar.get_height()) for bar in ax.patches if bar.get_height()]
    assert bars == [(0, 3), (0, 1), (3, 1), (1, 4)], "waiting stands on computing"
    assert [found.groups() for found, _ in texts(ax, r"(\d) ms\n(\d+)% busy")] == [("4", "75"), ("5", "20")]
    plt.close("all")


def test_a_pipelines_boxes_are_its_events(monkeypatch):
    """Seen at the last moment, when all have begun; each with the number of its micro-batch."""
    figures, timeline = [], simulator.simulate(build("zbv", 2, 3))
    monkeypatch.setattr(pipeline_pictures, "png", lambda fig, dpi: figures.append(fig) or b"")
    pipeline_pictures.steps(timeline)
    ax = figures[-1].axes[0]
    for rank, own in enumerate(timeline.ranks):
        for event in own:
            middle = float(event.start + event.end) / 2
            (number,) = [text for _, text in texts(ax, r"^\d+$") if text.get_position()[0] == middle
                         and rank < text.get_position()[1] < rank + 1]  # fmt: skip
            assert int(number.get_text()) == event.action.microbatch, f"rank {rank}, {event.action}"
            assert at(ax, middle, rank + 0.1) == to_hex(plotting.ACTIONS[event.action.kind][1])
    plt.close("all")


def test_the_formulas_of_a_backward_pass_in_two_halves_are_autograds():
    """What stands along the arrows and in the boxes of y = relu(x @ w1) @ w2, computed."""
    x, w1, w2 = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (4, 5), (5, 2)))
    a = x @ w1
    h = a.relu()
    y = h @ w2
    known = {
        "x": x,
        "w1": w1,
        "a": a,
        "h": h,
        "w2": w2,
        "y": y,
        "relu": torch.relu,
        "grad_y": torch.randn(3, 2).double(),
    }
    for name in ("x", "w1", "a", "h", "w2"):
        (known[f"grad_{name}"],) = torch.autograd.grad(y, known[name], known["grad_y"], retain_graph=True)
    ax = pipeline_pictures.two_halves().axes[0]
    weights = [found.groups() for found, _ in texts(ax, r"^(grad_w\d) = (.*)")]
    along = sorted((text.get_position()[0], found[0]) for found, text in texts(ax, r"^(@ w\d\.T|\* .*)"))
    back = [
        (f"grad_{to}", f"grad_{of} {words}") for (of, to), (_, words) in zip(("ax", "ha", "yh"), along, strict=True)
    ]
    assert len(weights) == 2
    for name, formula in weights + back:
        torch.testing.assert_close(eval(formula, known), known[name], msg=f"{name} = {formula}")
    plt.close("all")


def test_bands_of_memory_lie_on_each_other_up_to_what_was_asked_for():
    gib, sizes = 2**30, (1, 2, 4, 8)
    lines = [dict.fromkeys([*sharding_pictures.BANDS, "asked for"], 0)]
    lines.append({kind: size * gib for kind, size in zip(lines[0], (*sizes, 3), strict=True)})
    ax = sharding_pictures.draw_out_of_memory(lines, 20.0, 0.5).axes[0]
    tops = [max(path.get_extents().y1 for path in many.get_paths()) for many in ax.collections]
    assert tops == pytest.approx([1, 3, 7, 15, 15.5, 18.5]), "GiB: each kind, what nobody uses, what was asked for"
    plt.close("all")
