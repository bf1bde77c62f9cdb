"""Pictures show what they were given, and carry their alternative text."""

import io
from fractions import Fraction

import IPython.display
import matplotlib.pyplot as plt
import PIL.Image
import pytest

from common.lab import plotting


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
    assert not plt.fignum_exists(fig.number)


def test_collective_shows_every_chunk_in_its_ranks_colours():
    fig = plotting.collective([[[10, 20], [None, 3]], [[13], [1000]]], captions=("start", "end"))
    ax = fig.axes[0]
    assert sorted(text.get_text() for text in ax.texts) == ["", "10", "1000", "13", "20", "3", "end", "start"]
    painted = [patch.get_facecolor() for patch in ax.patches if patch.get_fill() and patch.get_linewidth() == 0]
    rgba = [plt.matplotlib.colors.to_rgba(colour) for colour in plotting.PALETTE]
    # 10, 20: rank 1; nothing; 3: rank 0; 13: ranks 0 and 1; 1000: rank 3
    assert painted == [rgba[1], rgba[1], rgba[0], rgba[0], rgba[1], rgba[3]], "colours of the ranks whose data it is"


def test_collective_takes_other_labels():
    fig = plotting.collective([[["W0"], ["W1"]], [["W0", "W1"]] * 2], sources=lambda chunk: [int(chunk[1])])
    assert [text.get_text() for text in fig.axes[0].texts].count("W1") == 3


def test_timeline_is_in_milliseconds_from_the_first_start():
    fig = plotting.timeline([(0, "send", 7.0, 7.002), (1, "add", 7.001, 7.004)])
    ax = fig.axes[0]
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    spans = sorted((round(bar.x0, 6), round(bar.x1, 6), round((bar.y0 + bar.y1) / 2)) for bar in bars)
    assert spans == [(0, 2, 0), (1, 4, 1)], "from, to (ms), rank"
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["send", "add"]


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
        assert [text.get_text() for text in ax.texts].count("12") == 6
        assert [text.get_text() for text in ax.texts if text.get_text() != "12"] == ([" 1", " 2/2"] if memory else [])
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    stored = ["activations stored, with their peak"] * memory
    assert legend == ["forward", "backward", "backward for input", "idle", *stored]
    assert fig.axes[-1].get_xlabel() == "time (ms)" and fig.axes[0].get_xlim() == fig.axes[1].get_xlim()


def test_a_stored_picture_is_small_and_keeps_its_colours():
    fig = plt.figure(figsize=(2, 2))
    fig.add_artist(plt.Rectangle((0, 0), 1, 1, color=plotting.VERMILION))
    png = plotting.as_png(fig, dpi=50)
    with PIL.Image.open(io.BytesIO(png)) as picture:
        assert picture.mode == "P" and picture.size == (100, 100)
        assert picture.convert("RGB").getpixel((50, 50)) == (0xD5, 0x5E, 0x00)
