"""Pictures show what they were given, and carry their alternative text."""

import IPython.display
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

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
    assert not plt.fignum_exists(fig.number), "the figure is still open, and a notebook shows it once more"


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
