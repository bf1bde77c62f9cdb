"""What `planner calibrate` makes of its clock: rates of products, of the memory and of links."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from planner import calibrate, hardware
from planner.constants import PRIOR
from planner.layer_time import of_layer
from planner.layout import Layout
from planner.models import course_gpt

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


def test_a_gpu_gets_larger_products_and_is_waited_for(monkeypatch):
    """16 times as large a side, and 16 times as much memory."""
    shapes, done, gpu = [], [], SimpleNamespace(type="cuda")
    monkeypatch.setattr(calibrate, "SIDE", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    calibrate.best_of(lambda: done.append("computed"), times=2)
    assert done == ["computed", "waited"] * 3, "the clock is read when the GPU is done"
    monkeypatch.setattr(calibrate, "best_of", lambda work, times=5: 2.0)
    monkeypatch.setattr(torch, "ones", lambda *shape, **_: shapes.append(shape) or torch.zeros(3))
    assert calibrate.products(gpu, torch.bfloat16)[0] == 2 * 128**3 / 2.0, "FLOP/s"
    calibrate.memory_rate(gpu)
    assert shapes == [(128, 128), (8, 8), (2**28,)], "shapes of what is computed with"


def test_what_each_rank_measures(monkeypatch):
    asked = []
    monkeypatch.setattr(calibrate, "products", lambda device, dtype: asked.append((device.type, dtype)) or (6e10, 1e-5))
    monkeypatch.setattr(calibrate, "memory_rate", lambda device: asked.append(device.type) or 1e10)
    monkeypatch.setattr(calibrate, "block", lambda device: asked.append(device.type) or 0.05)
    monkeypatch.setattr(dist, "barrier", lambda: asked.append("barrier"))
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda device=device: device == "cuda")
        asked.clear()
        assert calibrate.one_rank() == {"peak": 6e10, "kernel": 1e-5, "hbm": 1e10, "block": 0.05}, device
        assert asked == ["barrier", (device, dtype), "barrier", device, "barrier", device], "all ranks at the same time"


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


def test_a_block_is_timed_forward_and_backward(monkeypatch):
    ran = []
    monkeypatch.setattr(calibrate, "best_of", lambda work, times: ran.append(times) or work())
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: ran.append(self.shape))
    calibrate.block(CPU, 7)
    assert ran == [7, ()], "(how many times, the sum whose backward pass is computed)"


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
    assert [sent.count(size // 4) for size in calibrate.SIZES] == [15] * 4, "messages of each size"


def test_a_crowded_block_is_the_mean_of_those_that_ran(monkeypatch):
    """`block` runs two, one to warm up; each takes 0.3 seconds here."""
    now = [0.0]

    def block(device, times):
        now[0] += 0.3 * (1 + times)

    monkeypatch.setattr(calibrate, "block", block)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(dist, "barrier", lambda: None)
    assert calibrate.crowded_block() == pytest.approx(0.3), "seconds of a block"


def test_no_more_processes_than_cores_are_timed_at_once(monkeypatch):
    """Then they take turns; and what takes turns is timed with all of them."""
    asked = []

    def launch(work, size, **_):
        asked.append((work.__name__, size))
        return [0.05] * size if work is calibrate.crowded_block else [{"block": 0.05}] * size

    monkeypatch.setattr("common.lab.launch.launch", launch)
    monkeypatch.setattr(calibrate.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(calibrate, "links", lambda ranks: asked.append(("links", ranks)) or (1e-4, 1e9))
    for ranks, expected in (
        (1, [("one_rank", 1)]),
        (2, [("one_rank", 2), ("links", 2)]),
        (4, [("one_rank", 2), ("links", 4), ("crowded_block", 4)]),
    ):
        asked.clear()
        found = calibrate.measure(ranks)
        assert asked == expected, f"{ranks} ranks on two cores"
        link = (found["alpha_link"], found["link"], found["cores"])
        assert link == ((1e-5, 1e9, 2) if ranks == 1 else (1e-4, 1e9, 2)), "one rank's are usual ones"
    assert found["crowding"] == 1.0, "a machine is not faster for being crowded"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked.clear()
    found = calibrate.measure(4)
    assert asked == [("one_rank", 1), ("links", 4)], "each rank has a GPU of its own: one is timed"
    assert found == {"block": 0.05, "alpha_link": 1e-4, "link": 1e9, "cores": 0}, "what was found on GPUs"


def test_a_busy_machine_has_no_links_of_negative_speed(monkeypatch):
    """Small messages that took longer than large ones: the bandwidth is that of the largest."""
    times = [1.0, 0.9, 0.8, 0.7]
    monkeypatch.setattr("common.lab.launch.launch", lambda work, size, **_: [times, times])
    _, link = calibrate.links(2)
    assert link == pytest.approx(calibrate.SIZES[-1] / 0.7), "all-reduces of two ranks send as much as they have"
    times[:] = [(size / 1e6) ** 2 for size in calibrate.SIZES]  # a line through them has less than nothing at 0 bytes
    assert calibrate.links(2)[0] == 1e-9, "seconds of a message"


def test_what_it_found_is_written_and_told(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "measure", lambda ranks: HERE)
    said = calibrate.calibrate(tmp_path / "here.json", 2).splitlines()
    assert said == [
        "products     60.0 GFLOP/s, 20 us before each begins",
        "memory       10.0 GB/s",
        "messages     100 us each, 0.50 GB/s, with 2 ranks",
        f"written to {tmp_path / 'here.json'}: use --gpu here --constants {tmp_path / 'here.json'}",
    ]
    found = calibrate.json.loads((tmp_path / "here.json").read_text())
    told = {"matmul": 1.0, "link": 1.0, "memory_rate": 1.0, "kernel": 2e-5, "alpha_link": 1e-4, "kept": 0.0}
    assert {name: found["constants"].get(name) for name in told} == told and found["here"] == HERE, "what is written"
    monkeypatch.setattr(calibrate, "measure", lambda ranks: HERE | {"cores": 0})
    calibrate.calibrate(tmp_path / "gpu.json", 2)
    found = calibrate.json.loads((tmp_path / "gpu.json").read_text())["constants"]
    assert not {"kept", "passes"} & {*found}, "of a GPU those that were fitted"


def test_with_what_it_found_a_block_takes_the_time_that_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "measure", lambda ranks: HERE)
    calibrate.calibrate(tmp_path / "here.json", 2)
    constants = replace(PRIOR, **calibrate.json.loads((tmp_path / "here.json").read_text())["constants"])
    layout = Layout((("data", 1),), 8, 8, 128, fused=False, precision="float32", sequence_parallel=False)
    block = of_layer(course_gpt(1, 128, 4, 128), hardware.here(HERE), layout, False, constants)
    assert block.forward + block.backward == pytest.approx(HERE["block"], rel=1e-9), "seconds, forward and backward"


def test_a_block_that_products_explain_leaves_a_little_for_the_rest():
    gpu = hardware.here(HERE)
    assert calibrate.passes(gpu, replace(PRIOR, matmul=1.0), 1e-9) == 0.1, "a tenth at least"
    assert gpu.pcie == 1e10 and gpu.memory == 8 * 2**30, "a processor's memory is the host's"
