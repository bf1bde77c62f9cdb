"""What `planner calibrate` makes of its clock: rates of products, of the memory and of links."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from planner import calibrate, hardware
from planner.constants import PRIOR

HERE = {"peak": 6e10, "hbm": 1e10, "link": 5e8, "kernel": 2e-5, "alpha_link": 1e-4, "cores": 2, "block": 0.05}
CPU = torch.device("cpu")


def test_rates_are_operations_and_bytes_over_seconds(monkeypatch):
    """If whatever is timed takes two seconds."""
    monkeypatch.setattr(calibrate, "SIDE", 8)
    monkeypatch.setattr(calibrate, "best_of", lambda work, times=5: 2.0)
    peak, kernel = calibrate.products(CPU, torch.float32)
    assert peak == 2 * 8**3 / 2.0, "a multiplication and an addition for each of 8 x 8 x 8"
    assert kernel == 2.0 / 100, "one of a hundred tiny products"
    assert calibrate.memory_rate(CPU) == 2 * 4 * 2**24 / 2.0, "each of 2**24 numbers is read and written"


class Clock:
    """Seconds that go on where something is computed or sent."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float):
        self.now += seconds
        return self


def test_the_fastest_of_several_runs_counts_and_not_the_first(monkeypatch):
    clock, runs = Clock(monkeypatch), iter([0.5, 3.0, 1.0, 2.0])
    assert calibrate.best_of(lambda: clock.wait(next(runs)), times=3) == 1.0, "the first one warms up"
    assert next(runs, "none") == "none", "runs that are left"


def test_a_message_costs_what_it_adds_to_the_work_before(monkeypatch):
    """A product takes a second, a message a microsecond for each number but the first of each size, which takes none:
    the usual one counts."""
    clock, sent = Clock(monkeypatch), []

    class Numbers:
        def __init__(self, *shape):
            self.number = shape[0]

        def __matmul__(self, other):
            return clock.wait(1.0)

    def all_reduce(tensor):
        clock.wait(1e-6 * tensor.number if tensor.number in sent else 0.0)
        sent.append(tensor.number)

    monkeypatch.setattr(torch, "ones", Numbers)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    found = calibrate.messages()
    assert found == pytest.approx([1e-6 * size / 4 for size in calibrate.SIZES]), "of SIZES bytes in float32"


def test_a_crowded_block_is_the_mean_of_those_that_ran(monkeypatch):
    """`block` runs two, one to warm up; each takes 0.3 seconds here."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(calibrate, "block", lambda device, times: clock.wait(0.3 * (1 + times)))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert calibrate.crowded_block() == pytest.approx(0.3), "seconds of a block"


def test_a_busy_machine_has_no_links_of_negative_speed(monkeypatch):
    """Small messages that took longer than large ones: the bandwidth is that of the largest."""
    times = [1.0, 0.9, 0.8, 0.7]
    monkeypatch.setattr("common.lab.launch.launch", lambda work, size, **_: [times, times])
    _, link = calibrate.links(2)
    assert link == pytest.approx(calibrate.SIZES[-1] / 0.7), "all-reduces of two ranks send as much as they have"
    times[:] = [(size / 1e6) ** 2 for size in calibrate.SIZES]  # a line through them has less than nothing at 0 bytes
    assert calibrate.links(2)[0] == 1e-9, "seconds of a message"


def test_a_block_that_products_explain_leaves_a_little_for_the_rest():
    gpu = hardware.here(HERE)
    assert calibrate.passes(gpu, replace(PRIOR, matmul=1.0), 1e-9) == 0.1, "a tenth at least"
    assert gpu.pcie == 1e10 and gpu.memory == 8 * 2**30, "a processor's memory is the host's"
