"""Pictures show what they were given, and carry their alternative text."""

import IPython.display
import matplotlib.pyplot as plt
import pytest

from common import plotting


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
    assert metadata == {"width": 360, "alt": "a picture of nothing"}
    assert not plt.get_fignums()


def test_collective_shows_every_chunk_in_its_ranks_colours():
    fig = plotting.collective([[[10, 20], [None, 3]], [[13], [1000]]], captions=("start", "end"))
    ax = fig.axes[0]
    assert sorted(text.get_text() for text in ax.texts) == ["", "10", "1000", "13", "20", "3", "end", "start"]
    painted = [patch.get_facecolor() for patch in ax.patches if patch.get_fill() and patch.get_linewidth() == 0]
    rgba = [plt.matplotlib.colors.to_rgba(colour) for colour in plotting.PALETTE]
    # 10, 20: rank 1; nothing; 3: rank 0; 13: ranks 0 and 1; 1000: rank 3
    assert painted == [rgba[1], rgba[1], rgba[0], rgba[0], rgba[1], rgba[3]]


def test_collective_takes_other_labels():
    fig = plotting.collective([[["W0"], ["W1"]], [["W0", "W1"]] * 2], sources=lambda chunk: [int(chunk[1])])
    assert [text.get_text() for text in fig.axes[0].texts].count("W1") == 3


def test_timeline_is_in_milliseconds_from_the_first_start():
    fig = plotting.timeline([(0, "send", 7.0, 7.002), (1, "add", 7.001, 7.004)])
    ax = fig.axes[0]
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    spans = sorted((round(bar.x0, 6), round(bar.x1, 6), round((bar.y0 + bar.y1) / 2)) for bar in bars)
    assert spans == [(0, 2, 0), (1, 4, 1)]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["send", "add"]
