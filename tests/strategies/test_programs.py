"""What the programs that readers copy leave on disk, and how the one that measures speed measures it."""

import itertools
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import SlowDevice, launcher

from common import ROOT
from common.lab.launch import launch
from common.lab.ledger import Ledger
from course.ddp import speed
from course.intro import costs
from course.model_parallel import compare


def test_a_second_process_of_data_parallel_has_nothing_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["standalone.py", "0"])
    with launcher(1, 2), pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "02_data_parallel/standalone.py"), run_name="__main__")
    assert not end.value.code and "torchrun" in capsys.readouterr().out


def seconds_by_a_clock(seconds: list[float], gpu: bool) -> float:
    """The seconds of a step that this rank finds, by a clock that steps move: three of 7 s that warm up, then ten of as
    long as this rank's entry of `seconds` says. On a GPU the host is through in 0.1 s, and a wait for the device takes
    the rest."""
    own = seconds[torch.distributed.get_rank()]
    there, lasts = SlowDevice(), [7.0] * 3 + [own] * 10

    def step():
        took = lasts.pop(0)
        there.now += 0.1 if gpu else took
        there.work(took - 0.1 if gpu else 0.0)

    make = torch.tensor  # this process ends here
    torch.tensor = lambda *given, device=None, **more: make(*given, **more)
    time.perf_counter, torch.cuda.synchronize = lambda: there.now, there.synchronize
    device = SimpleNamespace(type="cuda") if gpu else torch.device("cpu")
    found = speed.seconds_per_step(step, device)
    assert not lasts, "ten steps after three"
    return found


@pytest.mark.parametrize("gpu", [False, True])
def test_seconds_of_a_step_are_those_of_the_slowest_rank(gpu):
    assert launch(seconds_by_a_clock, 2, ([2.0, 2.5], gpu)) == pytest.approx([2.5, 2.5], abs=1e-5)
    assert launch(seconds_by_a_clock, 2, ([2.5, 2.0], gpu)) == pytest.approx([2.5, 2.5], abs=1e-5)


@pytest.mark.parametrize("measure, calls", [
    (lambda call: costs.durations(call, repeats=3), 3),
    (lambda call: speed.seconds_per_step(call, torch.device("cpu"), warm_up=1, steps=1), 2),
])  # fmt: skip
def test_ranks_begin_what_is_measured_together(measure, calls):
    def spans() -> list[tuple]:
        found = []

        def call():
            begin = time.monotonic()  # one clock for all processes of a machine
            time.sleep(0.02 * dist.get_rank())
            found.append((begin, time.monotonic()))

        measure(call)
        return found[-calls:]

    for before, after in itertools.pairwise(zip(*launch(spans, 2), strict=True)):
        assert max(end for _, end in before) <= min(begin for begin, _ in after), "one rank is a call ahead"


def test_half_of_the_way_there_and_back_is_told_by_bytes():
    def half() -> tuple:
        with Ledger() as ledger:
            costs.there_and_back([40, 400])
        costs.durations = lambda call, tensor, repeats: [2.0 * tensor.nbytes] * repeats  # this process ends here
        return {(entry.operation, entry.payload) for entry in ledger.entries}, costs.there_and_back([40, 400])

    there = {(operation, size) for operation in ("send", "recv") for size in (40, 400)}
    for messages, seconds in launch(half, 2):
        assert messages - {("barrier", 0)} == there and seconds == [40, 400]


def test_the_worst_of_all_ranks_is_held_against_one_process():
    def off_on_rank_1(block):
        if dist.is_initialized() and dist.get_rank() == 1:
            block.norm1.weight.register_hook(lambda gradient: 3 * gradient)
        return block

    _, output, gradients = compare.off_from_one_process(off_on_rank_1, 2)
    assert (output, gradients) == (0, pytest.approx(2)), "errors relative to what one process has"


def test_a_rank_trains_on_its_part_of_the_batch():
    def shapes() -> list:
        seen = []
        hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: seen.append(args[0]))
        step = speed.make_step(*speed.make_model(torch.device("cpu")), 64, torch.device("cpu"))
        with Ledger() as ledger:
            step()
        hook.remove()
        return [
            seen[0].sum().item(),
            len(seen[0]),
            sum(entry.payload for entry in ledger.entries if entry.operation == "all_reduce"),
        ]

    examples, gradients = 64 // 4, 4 * 6 * (speed.WIDTH**2 + speed.WIDTH)
    found = launch(shapes, 4)
    assert [rank[1:] for rank in found] == [[examples, gradients]] * 4
    assert len({total for total, *_ in found}) == 4, "of its own"
