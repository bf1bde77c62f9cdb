"""Pictures show what they were given, and carry their alternative text."""

import io
from fractions import Fraction

import IPython.display
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import FancyArrowPatch
from PIL import Image

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


def test_a_png_has_a_palette(tmp_path):
    fig, ax = plt.subplots(figsize=(4, 3))
    ax.imshow([[row * column for row in range(200)] for column in range(200)])
    png = plotting.png(fig, dpi=100)
    assert Image.open(io.BytesIO(png)).mode == "P" and Image.open(io.BytesIO(png)).size == (400, 300)
    assert not plt.fignum_exists(fig.number), "the figure is still open, and a notebook shows it once more"


def test_pictures_have_one_style_and_keep_their_colours(monkeypatch):
    okabe_ito = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000"]
    style = {"figure.facecolor": "white", "savefig.facecolor": "white", "figure.constrained_layout.use": True,
             "font.size": 13, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 2.5,
             "lines.markersize": 8, "legend.frameon": False}  # fmt: skip
    assert {name: plt.rcParams[name] for name in style} == style, "the style of every picture"
    assert plotting.PALETTE == okabe_ito == plt.rcParams["axes.prop_cycle"].by_key()["color"], "colours in their order"
    fig, ax = plt.subplots(figsize=(4, 3))
    ax.imshow([[[1.0, green / 200, 0.0] for green in range(200)]], aspect="auto")
    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    plotting.show(fig, alt="from red to yellow")
    picture = Image.open(io.BytesIO(shown[0].data))
    assert picture.size == (600, 450), "150 dots per inch, for projectors"
    seen = {colour for _, colour in picture.convert("RGB").getcolors()}
    between = [green for red, green, blue in seen if red > 240 and blue < 15]
    assert len(between) > 60 and min(between) < 15 and max(between) > 240, f"red to yellow in many steps: {between}"


def test_a_moment_with_fewer_ranks_takes_no_row_from_the_others():
    fig = plotting.collective([[["a"]], [["b"], ["c"]]], sources=lambda chunk: [0])
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == ["rank 0", "rank 1"], "rows"


def lit_numbers(fig):
    """Those that stand in a cell on yellow ground."""
    ax = fig.axes[0]
    grounds = [patch for patch in ax.patches if patch.get_facecolor() == to_rgba(plotting.YELLOW)]
    return sorted(
        text.get_text() for text in ax.texts for ground in grounds
        if text.get_text() and ground.get_bbox().contains(*text.get_position())
    )  # fmt: skip


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


def test_ranks_of_a_host_lie_on_one_band():
    held = [[rank] for rank in range(4)]
    ax = rank_pictures.moved("name", held, held, [], ranks_per_host=2).axes[0]
    bands = [patch.get_bbox() for patch in ax.patches if patch.get_width() > 4]
    assert [(band.y0, band.y1) for band in bands] == [(0, 2), (2, 4)]
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == ["host 0, rank 0", "host 0, rank 1", "host 1, rank 2", "host 1, rank 3"]


def test_ranks_on_a_circle_light_the_links_in_use_and_say_what_was_sent():
    before = [[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400], [1000, 2000, 3000, 4000]]
    held = [[1, 2, 3, 4], [11, 20, 30, 40], [100, 202, 300, 400], [1000, 2000, 3000, 4000]]
    fig = rank_pictures.circle(before, held, [(0, 1, [1]), (0, 2, [2, 3]), (2, 3, [7, 8, 9])])
    assert lit_numbers(fig) == ["11", "202"]
    assert {text.get_text() for text in fig.axes[0].texts if text.get_color() == plotting.VERMILION} == {
        "1", "2, 3", "all 3"
    }  # fmt: skip
    assert len(arrows(fig)) == 3
    start = rank_pictures.circle(None, before, [])
    assert lit_numbers(start) == [] and arrows(start) == []


@pytest.mark.parametrize("step, ring, tree", [(0, [], []), (1, [1], [1]), (2, [2], [3, 2]), (3, [3], [7, 5, 6, 4])])
def test_a_broadcast_lights_the_links_of_its_step(step, ring, tree):
    fig = rank_pictures.ring_and_tree(step)
    places = {text.get_position(): text.get_text() for text in fig.axes[0].texts}
    reached = [[], []]
    for colour, _, end in arrows(fig):
        if colour == plotting.VERMILION:
            (rank,) = [text for (x, y), text in places.items() if abs(x - end[0]) < 0.1 and abs(y - end[1]) < 0.1]
            reached[end[0] > 0].append(int(rank))
    assert [sorted(ranks) for ranks in reached] == [ring, sorted(tree)]


def test_calls_of_two_ranks_meet_by_their_number():
    notes = ["1 + 10", "2 + 30", "waits"]
    fig = rank_pictures.paired([["a", "b", "c"], ["a", "c"]], 3, notes)
    colours = {text.get_text(): text.get_color() for text in fig.axes[0].texts if text.get_text() in notes}
    assert colours == {"1 + 10": plotting.GREEN, "2 + 30": plotting.VERMILION, "waits": plotting.VERMILION}
    assert not rank_pictures.paired([["a"], ["a"]], 0, notes).axes[0].lines, "no call has been made"


def test_links_of_a_cluster_are_as_wide_as_their_bandwidth():
    lines = networks.cluster(450, 63, 50, nodes=2, gpus=4).axes[0].lines
    widths = [line.get_linewidth() for line in lines]
    assert sorted(set(widths)) == [1.0, 1.26, 9.0] and all(widths.count(width) == 8 for width in set(widths))
    drawn = {line.get_linewidth(): line.get_color() for line in lines}
    assert drawn == {9.0: plotting.BLUE, 1.26: plotting.GREEN, 1.0: plotting.VERMILION}, "colours of the kinds of link"
    words = [text.get_text() for text in lines[0].axes.texts]
    assert words[-3:] == ["NVLink\n450 GB/s each", "PCIe\n63 GB/s each", "network\n50 GB/s each"]


def test_error_bars_reach_from_the_lower_quartile_to_the_upper():
    row, line = (2e-6, 3e-6, 7e-6), (1e-6, 1e-9)
    ax = networks.line([8, 64], {"a": [row, row], "b": [row, row]}, {"a": line, "b": line}, "title").axes[0]
    ends = [[round(y, 6) for _, y in segment] for bars in ax.collections for segment in bars.get_segments()]
    assert ends == [[2, 7]] * 4, "µs, around a median of 3"
    fitted = next(mark for mark in ax.lines if len(mark.get_xdata()) > 2)
    assert list(fitted.get_ydata()[[0, -1]]) == pytest.approx([1.008, 1.064]), "1 µs, and 1 ns for each byte"
    assert [text.get_position()[1] for text in ax.texts] == pytest.approx([1.064] * 2), "names at the ends of the lines"


def test_the_sliders_of_an_all_reduce_show_the_times_of_the_algorithms():
    algorithms = {"ring": lambda n, cluster: cluster + n / 1e9, "tree": lambda n, cluster: 2 * cluster + n / 1e9}
    asked = []
    lab = networks.AllReduceLab(algorithms, lambda nodes, *more: asked.append(more) or nodes * 1e-3)
    fig = lab.draw(size=networks.MiB, nodes=4, alpha_in=3, alpha_out=6, link_out=50)
    assert asked == [(3, 6, 50)] * 2, "latency inside a node, latency and bandwidth between nodes; first as it begins"
    texts = [text.get_text() for text in fig.axes[0].texts]
    assert texts == ["ring: 5.05 ms", "tree: 9.05 ms", "1 MiB:"], "the fastest below, and 1 MiB takes 1.05 ms"
    ring, at_ring, tree, at_tree = [mark.get_xydata() for mark in fig.axes[0].lines[:4]]
    for curve, point, ms in ((ring, at_ring, 5.05), (tree, at_tree, 9.05)):
        assert point.tolist() == [[networks.MiB, pytest.approx(ms, abs=0.01)]], "the point of this size"
        assert any(point[0] == pytest.approx(place) for place in curve), "it lies on its curve"
    assert fig.axes[0].get_title().startswith("all-reduce on 4 nodes of 8 GPUs, 50 GB/s")
    assert lab.draw(networks.MiB, 1, 3, 6, 50).axes[0].get_title().startswith("all-reduce on 1 node of")


def test_collective_shows_every_chunk_in_its_ranks_colours():
    fig = plotting.collective([[[10, 20], [None, 3]], [[13], [1000]]], captions=("start", "end"), title="a sum")
    ax = fig.axes[0]
    assert ax.get_title() == "a sum", "the title"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"], "whose chunks a row has"
    frames = [patch.get_linestyle() for patch in ax.patches if not patch.get_fill()]
    assert frames == ["-", "-", ":", "-", "-", "-"], "dotted: the empty place alone"
    assert sorted(text.get_text() for text in ax.texts) == ["", "10", "1000", "13", "20", "3", "end", "start"]
    painted = [patch.get_facecolor() for patch in ax.patches if patch.get_fill() and patch.get_linewidth() == 0]
    rgba = [plt.matplotlib.colors.to_rgba(colour) for colour in plotting.PALETTE]
    # 10, 20: rank 1; nothing; 3: rank 0; 13: ranks 0 and 1; 1000: rank 3
    assert painted == [rgba[1], rgba[1], rgba[0], rgba[0], rgba[1], rgba[3]], "colours of the ranks whose data it is"
    moments = {text.get_text(): text.get_position() for text in ax.texts if text.get_text() in ("start", "end")}
    assert moments == {"start": (1.0, -0.25), "end": (3.6, -0.25)}, "a caption over the middle of its chunks"
    assert ax.yaxis_inverted(), "rank 0 at the top"


def test_collective_takes_other_labels():
    fig = plotting.collective([[["W0"], ["W1"]], [["W0", "W1"]] * 2], sources=lambda chunk: [int(chunk[1])])
    assert [text.get_text() for text in fig.axes[0].texts].count("W1") == 3


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


class Shorter(Timeline):
    """Ends after one unit."""

    ranks = [[], [(0, 1, (0, "F", 12))]]

    def stored(self, rank):
        return [[], [(0, 1), (1, 0)]][rank]


@pytest.mark.parametrize("columns", [1, 2])
def test_panels_have_one_time_axis_and_places_without_one_are_empty(columns):
    fig = plotting.pipeline({"one": Timeline(), "two": Timeline(), "short": Shorter()}, columns=columns)
    assert [ax.get_title(loc="left") for ax in fig.axes if ax.get_visible()] == ["one", "two", "short"]
    assert {ax.get_xlim() for ax in fig.axes[:3]} == {(0, 8 * 1.005)}, "the longest one's time on all axes"
    narrow = plotting.pipeline({"one": Timeline(), "two": Timeline()}, columns=columns, width=2)
    number = next(text for text in narrow.axes[0].texts if text.get_text() == "12")
    assert number.get_size() == pytest.approx(10.56 / columns), "points, for two digits in a box of 0.22 or 0.11 inches"


class Fuller(Timeline):
    """Stores twice as much."""

    def stored(self, rank):
        return [(when, 2 * held) for when, held in super().stored(rank)]


def test_what_is_stored_has_one_scale_in_all_panels():
    fig = plotting.pipeline({"one": Timeline(), "two": Fuller()})
    heights = [
        {round(path.get_extents().height, 3) for strip in ax.collections for path in strip.get_paths()
         if to_hex(strip.get_facecolor()[0]) == plotting.STORED}
        for ax in fig.axes
    ]  # fmt: skip
    assert heights == [{0.135}, {0.27}], "half as much stored is half as high, also in another panel"
