"""What holds of every picture: nothing is cut off, each series has its name, numbers say of what they are."""

import math

import IPython.display
import matplotlib.pyplot as plt
import pytest
import torch
from drawn import said
from matplotlib.colors import to_hex

from common.lab import plotting
from course.ddp import buckets, checkpoint_cost
from course.ddp import pictures as ddp_pictures
from course.fsdp import sharding_pictures
from course.intro import networks, overview
from course.pipeline import pictures as pipeline_pictures
from course.pipeline import simulator
from course.pipeline.schedules import build, parse
from planner import calculator, decision_map


def plans():
    return calculator.draw({f"plan {stage}": calculator.ask("llama-7b", 8, stage) for stage in (0, 3)})


def memory_of_a_step():
    kinds, mib = ("parameters", "gradients", "optimizer", "buffers", "activations"), 2**20
    held = [(1, 0, 2, 1, 3), (1, 1, 2, 1, 5), (1, 1, 2, 1, 4), (1, 1, 2, 1, 0), *[(1, 1, 2, 0, 0)] * 4]
    lines = [dict(zip(kinds, (size * mib for size in sizes), strict=True)) for sizes in held]
    return sharding_pictures.draw_stages({"one": (lines, 1, 4), "two": (lines, 2, 5)})


def two_that_wait():
    lists = [parse("0F0 0SEND_F0 0RECV_B0"), parse("1F0 1SEND_B0 1RECV_F0")]
    return pipeline_pictures.meeting(lists, pipeline_pictures.moments(lists, blocking=True)[-1])


TIMELINES = {"a pipeline": simulator.simulate(build("zbv", 2, 3))}
ROWS = [["0", "1 2", "-15", "0.5"], ["0", "3 4", "-87", "0.5"]]  # weight, examples, gradient, new weight
PICTURES = {
    "collective": lambda: plotting.collective([[[11, None], [2]], [[13], [20]]], ("start", "end"), title="a sum"),
    "timeline": lambda: plotting.timeline([(0, "send", 7.0, 7.002), (1, "add", 7.001, 7.004)], title="two ranks"),
    "pipeline": lambda: plotting.pipeline(TIMELINES, unit="ms"),
    "pipeline, one followed": lambda: plotting.pipeline(TIMELINES, memory=False, follow=0),
    "cluster": lambda: networks.cluster(450, 63, 50, nodes=2, gpus=1),
    "missed by a line": lambda: networks.missed({1: {10: 0.5, 1000: 1.5}, 4: {10: 1.0, 1000: 2.0}}),
    "passes": lambda done=(("computes", 0, 2), ("sends, hidden", 1, 2)): ddp_pictures.draw_passes({"one": done}),
    "overlap": lambda: buckets.draw_overlap(400, 200, 1.0, 12.5),
    "plans": plans,
    "memory of a step": memory_of_a_step,
    "decisions": lambda: decision_map.draw(next(iter(decision_map.NETWORKS))),
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
