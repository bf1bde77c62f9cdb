"""What checkpoints and failures cost: the formulas by numbers worked out by hand."""

import pytest

from common.checkpoint_interval import daly, lost, time_per_work, young


def test_the_best_interval():
    """Of 2 minutes for a checkpoint and 100 between failures: sqrt(2 x 2 x 100), and Daly's two further terms."""
    assert young(2, 100) == 20
    assert daly(2, 100) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly(200, 100) == 100, "checkpoints that take longer than two failures are apart"
    for cost, mtbf in ((2, 100), (30, 1e4), (300, 5000), (5, 1e6)):
        best = daly(cost, mtbf)
        around = [lost(best * factor / 100, cost, mtbf, mtbf / 50) for factor in range(20, 400)]
        assert lost(best, cost, mtbf, mtbf / 50) == pytest.approx(min(around), abs=1e-4)


def test_time_per_work():
    assert time_per_work(10, 2, 1e9) == pytest.approx(1.2), "without failures, writing alone"
    assert lost(10, 2, 1e9) == pytest.approx(1 - 1 / 1.2)
    assert time_per_work(10, 2, 100, 5) == pytest.approx(1.3403, abs=1e-4), "10 x 0.127497 x 1.051271"
    assert lost(1e6, 2, 100) == 1, "nothing is ever kept"
