"""Pictures show what they were given, and carry their alternative text."""

from fractions import Fraction

import IPython.display
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import FancyArrowPatch

from common.lab import plotting
from course.intro import networks, rank_pictures


@pytest.fixture(autouse=True)
def no_figure_left():
    yield
    plt.close("all")


def test_show_embeds_alt_text_and_closes(monkeypatch):
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    fig, _ = plt.subplots(figsize=(4, 3))
    plotting.show(fig, alt="a picture of nothing")
    data, metadata = shown[0]._repr_png_()
    assert metadata.get("alt") == "a picture of nothing", "alternative text"
    assert metadata["width"] == 360
    assert not plt.fignum_exists(fig.number), "the figure is still open, and a notebook shows it once more"


def lit_numbers(fig):
    """Those that stand in a cell on yellow ground."""
    ax = fig.axes[0]
    grounds = [patch for patch in ax.patches if patch.get_facecolor() == to_rgba(plotting.YELLOW)]
    return sorted(
        text.get_text()
        for text in ax.texts
        for ground in grounds
        if text.get_text() and ground.get_bbox().contains(*text.get_position())
    )


def arrows(fig):
    """(colour, from, to) of each link, its ends rounded to whole cells."""
    patches = [patch for patch in fig.axes[0].patches if isinstance(patch, FancyArrowPatch)]
    return [(to_hex(patch.get_edgecolor()).upper(), *patch._posA_posB) for patch in patches]


def test_an_operation_lights_what_it_changed_and_has_an_arrow_for_each_message():
    before, after = [[1, 2], [10, 20], [None, None]], [[11, 2], [10, 21], [5, None]]
    fig = rank_pictures.moved("name", before, after, [(1, 0), (0, 2)], scrap=[2])
    assert lit_numbers(fig) == ["11", "21"], "5 is scrap, and 2 and 10 are as they were"
    (orange, begin, end), (blue, *_) = arrows(fig)
    assert (orange, blue) == (plotting.ORANGE, plotting.BLUE), "the sender's colour"
    assert begin[0] < end[0] and (begin[1], end[1]) == (1.5, 0.5), "from rank 1 at the left to rank 0 at the right"


def test_the_sliders_of_an_all_reduce_show_the_times_of_the_algorithms():
    algorithms = {"ring": lambda n, cluster: cluster + n / 1e9, "tree": lambda n, cluster: 2 * cluster + n / 1e9}
    asked = []
    lab = networks.AllReduceLab(algorithms, lambda nodes, *more: asked.append(more) or nodes * 1e-3)
    fig = lab.draw(size=networks.MiB, nodes=4, alpha_in=3, alpha_out=6, link_out=50)
    assert asked[-1] == (3, 6, 50), "latency inside a node, latency and bandwidth between nodes"
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert texts == ["ring: 5.05 ms", "tree: 9.05 ms", "1 MiB:"], "the fastest below, and 1 MiB takes 1.05 ms"
    ring, at_ring, tree, at_tree = [mark.get_xydata() for mark in fig.axes[0].lines[:4]]
    for curve, point, ms in ((ring, at_ring, 5.05), (tree, at_tree, 9.05)):
        assert point.tolist() == [[networks.MiB, pytest.approx(ms, abs=0.01)]], "the point of this size"
        assert any(point[0] == pytest.approx(place) for place in curve), "it lies on its curve"
    assert fig.axes[0].get_title().startswith("all-reduce on 4 nodes of 8 GPUs, 50 GB/s")
    assert lab.draw(networks.MiB, 1, 3, 6, 50).axes[0].get_title().startswith("all-reduce on 1 node of")


def test_timeline_is_in_milliseconds_from_the_first_start():
    fig = plotting.timeline([(1, "add", 7.001, 7.004), (0, "send", 7.0, 7.002)])  # in no order
    ax = fig.axes[0]
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    spans = sorted((round(bar.x0, 6), round(bar.x1, 6), round((bar.y0 + bar.y1) / 2)) for bar in bars)
    assert spans == [(0, 2, 0), (1, 4, 1)], "from, to (ms since the earliest start), rank"
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["add", "send"]
    assert ax.yaxis_inverted(), "rank 0 at the top"
    fig = plotting.timeline([(0, "send", 0.0, 1.0)], colours={"send": plotting.GREEN})
    assert to_hex(fig.axes[0].collections[0].get_facecolor()[0]).upper() == plotting.GREEN, "the colour that was given"


class Timeline:
    """Two ranks with two stages each, one micro-batch; rank 1 is idle first, and a message takes no time."""

    ranks = [
        [(0, 1, (0, "F", 12)), (1, 1, (0, "SEND_F", 12)), (6, 8, (0, "B", 12))],
        [(1, Fraction(3, 2), (1, "F", 12)), (2, 3, (2, "F", 12)), (4, 5, (2, "I", 12)), (5, 6, (1, "B", 12))],
    ]

    def stored(self, rank):
        return [[(0, 1), (8, 0)], [(1, 1), (2, 2), (6, 1)]][rank]


@pytest.mark.parametrize("memory", [True, False])
def test_pipeline_draws_every_action_and_what_is_stored(memory):
    fig = plotting.pipeline({"one": Timeline(), "two": Timeline()}, unit="ms", memory=memory)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["one", "two"]
    for ax in fig.axes:
        boxes = [(box.get_x(), box.get_width(), int(box.get_y())) for box in ax.patches]
        assert boxes == [(0, 1, 0), (6, 2, 0), (1, 0.5, 1), (2, 1, 1), (4, 1, 1), (5, 1, 1)]
        colours = [box.get_facecolor()[:3] for box in ax.patches]
        rgb = {kind: plt.matplotlib.colors.to_rgb(colour) for kind, (_, colour) in plotting.ACTIONS.items()}
        assert colours[:3] == [rgb["F"], rgb["B"], rgb["F"]]
        assert min(colours[3]) > min(rgb["F"]) and colours[3] != colours[2]  # the rank's second stage is paler
        ink = [text.get_color() for text in ax.texts if text.get_text() == "12"]
        assert ink == ["white", "white", "white", "black", "black", "white"], "numbers that can be read on their boxes"
        assert ax.yaxis_inverted(), "rank 0 at the top"
        assert [text.get_text() for text in ax.texts if text.get_text() != "12"] == ([" 1", " 2/2"] if memory else [])
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    stored = ["activations stored, with their peak"] * memory
    assert legend == ["forward", "backward", "backward for input", "idle", *stored]
    assert fig.axes[-1].get_xlabel() == "time (ms)" and fig.axes[0].get_xlim() == fig.axes[1].get_xlim()
