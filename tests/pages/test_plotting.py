"""Pictures show what they were given, and carry their alternative text."""

import IPython.display
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from common.lab import plotting
from course.pipeline import schedules, simulator


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


@pytest.mark.parametrize("follow", [None, 0, 1, 2])
def test_a_micro_batch_that_is_followed_alone_has_colours_and_numbers(follow):
    """Of three, each with a forward and a backward box on either rank."""
    fig = plotting.pipeline({"": simulator.simulate(schedules.build("1f1b", 2, 3))}, follow=follow, memory=False)
    ax, shown = fig.axes[0], range(3) if follow is None else [follow]
    pale = [box for box in ax.patches if to_hex(box.get_facecolor()) == plotting.OTHERS]
    assert (len(ax.patches), len(pale)) == (2 * 3 * 2, 2 * 2 * (3 - len(shown)))
    assert sorted(text.get_text() for text in ax.texts) == sorted(f"{one}" for one in shown for _ in range(2 * 2))


def test_strips_of_stored_activations_are_compared_by_layers():
    """An activation of a rank with two stages is of half as many layers. The highest fills its strip."""
    timelines = {chunks: simulator.simulate(schedules.build("interleaved", 2, 4, chunks)) for chunks in (2, 4)}
    timelines[1] = simulator.simulate(schedules.build("1f1b", 2, 4))
    highest = []
    for shown in ((1,), (2,), (4,), (1, 2, 4)):
        fig = plotting.pipeline({f"{chunks} stages": timelines[chunks] for chunks in shown})
        drawn = [one for ax in fig.axes for one in ax.collections]
        strips = [one for one in drawn if to_hex(one.get_facecolor()[0]) == plotting.STORED]
        heights = [one.get_paths()[0].get_extents().height for one in strips]
        layers = [
            max(held for _, held in timelines[chunks].stored(rank)) / chunks for chunks in shown for rank in (0, 1)
        ]
        highest.append(max(heights))
        assert [height / max(heights) for height in heights] == pytest.approx([one / max(layers) for one in layers])
    assert highest == pytest.approx([highest[0]] * 4)
