"""What checkpoints and failures cost: the formulas by numbers worked out by hand."""

import pytest

from course.ddp import checkpoint_cost
from course.ddp.checkpoint_cost import daly, lost, time_per_work, young


def test_the_best_interval():
    """Of 2 minutes for a checkpoint and 100 between failures: sqrt(2 x 2 x 100), and Daly's two further terms."""
    assert young(2, 100) == 20
    assert daly(2, 100) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly(200, 100) == 100, "checkpoints that take longer than two failures are apart"
    least = min(lost(interval, 2, 100) for interval in range(1, 100))
    assert lost(daly(2, 100), 2, 100) == pytest.approx(least, abs=1e-4)


def test_time_per_work():
    assert time_per_work(10, 2, 1e9) == pytest.approx(1.2), "without failures, writing alone"
    assert lost(10, 2, 1e9) == pytest.approx(1 - 1 / 1.2)
    assert time_per_work(10, 2, 100, 5) == pytest.approx(1.3403, abs=1e-4), "10 x 0.127497 x 1.051271"


def test_sliders_have_hours_and_seconds_and_the_picture_minutes(monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint_cost, "draw", lambda *args: asked.append(args))
    checkpoint_cost.Intervals.draw(None, gpus=16, hours_per_failure=8, seconds=30, restart=600)
    assert asked == [(0.5, 30.0, 10.0)], "minutes: of a checkpoint, between failures, of a restart"
    monkeypatch.setattr(checkpoint_cost.Intervals, "draw", lambda self, **values: asked.append(values))
    sliders = checkpoint_cost.Intervals(gpus=1024, hours_per_failure=50000, seconds=20, restart=300)
    begin = {"gpus": 1024, "hours_per_failure": 50000, "seconds": 20, "restart": 300}
    assert asked[1] == pytest.approx(begin), "where each slider begins"
    names = [control.description for control in sliders.controls.values()]
    assert names == ["GPUs", "GPU-h/failure", "s/checkpoint", "s/restart"], "what each slider is, with its unit"
    ranges = [(round(10**one.min, 6), round(10**one.max, 6), one.step, one.readout_format)
              for one in sliders.controls.values()]  # fmt: skip
    assert ranges == [
        (8, 131072, 0.05, ",.0f"), (1000, 1e6, 0.05, ",.0f"), (0.1, 1000, 0.05, ",.0f"), (1, 3600, 0.05, ",.0f"),
    ], "least and largest of each slider, its step in powers of ten, and how it is read out"  # fmt: skip


def test_the_picture_says_which_interval_is_best():
    fig = checkpoint_cost.draw(0.5, 180.0, 10.0)
    said = [text.get_text() for text in fig.axes[0].texts]
    best = daly(0.5, 180.0)
    assert f"best: every {best:.1f} min,\n{100 * lost(best, 0.5, 180.0, 10.0):.1f}% lost" in said
    whole, writing, again = (line.get_ydata() for line in fig.axes[0].lines[:3])
    intervals = fig.axes[0].lines[1].get_xdata()
    for interval, share in zip(intervals, writing, strict=True):
        expected = 100 * 0.5 / interval / time_per_work(interval, 0.5, 180.0, 10.0)
        assert share == pytest.approx(expected), "of each stretch and its checkpoint, half a minute writes"
    assert fig.axes[0].get_xlabel().startswith("minutes of training")
    assert [a + b for a, b in zip(writing, again, strict=True)] == pytest.approx([*whole]), "the two shares add up"
