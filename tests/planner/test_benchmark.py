"""`python -m planner benchmark`: the grid, and which term a difference is attributed to."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import launcher

from common.command_line import parse
from common.errors import UserError
from course.strategies import BY_AXES, STRATEGIES
from planner import benchmark
from planner.constants import PRIOR


@pytest.mark.parametrize(
    "seconds, work, term, differences",
    [
        (15.0, 12.0, "processes", {"work": 2.0, "processes": 3.0}),
        (16.0, 15.9, "work", {"work": 5.9, "processes": 0.1}),
        (5.0, 5.0, "work", {"work": -5.0, "processes": 0.0}),
    ],
)
def test_a_difference_is_that_of_work_and_that_of_processes(seconds, work, term, differences):
    found = benchmark.attribute({"step_seconds": 10.0, "parts": {"work": 10.0}}, seconds, work)
    assert found["term"] == term and found["ratio"] == 10 / seconds, "the term, and predicted over measured"
    assert found["difference_seconds"] == pytest.approx(differences), "seconds of both differences"
    assert sum(found["difference_seconds"].values()) == pytest.approx(seconds - 10)


def test_work_is_that_of_one_process_divided():
    runs = [{"model": "tiny", "processes": size} for size in (1, 2, 4)]
    assert benchmark.works(runs, [8.0, 9.0, 10.0], cores=8) == [8.0, 4.0, 2.0], "on eight cores all compute at once"
    assert benchmark.works(runs, [8.0, 9.0, 10.0], cores=2) == [8.0, 4.0, 4.0], "four processes take turns on two cores"


def test_predictions_are_of_kernels_as_eager_pytorch_has_them(monkeypatch):
    """And in float32, with micro-batches that fill what a process has."""
    seen, at = [], set()
    monkeypatch.setattr(benchmark, "estimate", lambda model, nodes, layout, constants: seen.append(layout) or at.add(
        (nodes.gpus, nodes.nodes, constants)))  # fmt: skip
    monkeypatch.setattr(benchmark, "described", lambda found, strategy: {})
    benchmark.grid(["tiny"], 2, "cpu", None)
    assert {(one.fused, one.precision) for one in seen} == {(False, "float32")}, "(fused, precision)"
    assert at == {(1, 1, None), (2, 1, None)}, "(processes, nodes, constants): all on this machine"
    assert {(one.pipeline, one.readers, one.micro_batch) for one in seen} == {(1, 1, 16), (1, 2, 8), (2, 1, 4)}, "sizes"
    at.clear()
    benchmark.grid(["tiny"], 7, "cpu", None, 24)
    assert {processes for processes, *_ in at} == {1, 2, 4}, "powers of two, of seven processes at most"


def test_each_run_of_the_grid_is_what_its_command_trains():
    runs = benchmark.grid(["small"], 2, "cpu", PRIOR, 8)
    assert {run["strategy"] for run in runs} == {*benchmark.LAYOUTS}
    for run in runs:
        size, words = run["processes"], [*run["options"], f"--strategy={run['strategy']}", "--dry-run"]
        with launcher(0, size):
            config = parse(STRATEGIES, None, words, BY_AXES)
        shape = (config.layers, config.width, config.heads, config.context)
        assert (config.distributed, math.prod(config.axes.values())) == (size > 1, size)
        assert (config.batch_size, config.precision, shape) == (8, "fp32", benchmark.SHAPES["small"])


def test_each_run_is_compared_with_its_own_work(monkeypatch):
    """On two cores one process's 8 seconds are 4 of two, and of four; the rest comes with several processes."""
    sizes = (1, 2, 4)
    runs = [{"model": "tiny", "strategy": "ddp", "processes": size,
             "predicted": {"step_seconds": 8.0 / size, "parts": {"work": 8.0 / size}}} for size in sizes]  # fmt: skip
    monkeypatch.setattr(benchmark, "measure", lambda run, steps: {1: 8.0, 2: 5.0, 4: 7.0}[run["processes"]])
    monkeypatch.setattr(benchmark.os, "sched_getaffinity", lambda process: {0, 1})
    found = benchmark.compare(runs, 10)
    assert [run["measured"]["work_seconds"] for run in found] == [8.0, 4.0, 4.0], "seconds of a rank's work"
    assert [run["measured"]["step_seconds"] for run in found] == [8.0, 5.0, 7.0], "seconds of a step"
    rows = [line.split() for line in benchmark.table(found).splitlines() if "ddp" in line]
    shown = [ratio in row for row, ratio in zip(rows, ("1.00", "0.80", "0.29"), strict=True)]
    assert all(shown), f"predicted over measured: {rows}"
    with pytest.raises(UserError, match="'wide'"):
        benchmark.works([*runs, {"model": "wide", "processes": 2}], [8.0, 5.0, 7.0, 6.0], 2)


def test_the_first_steps_are_not_timed(monkeypatch):
    asked = []

    def run(command, cwd, **_):
        asked.append(command)
        Path(cwd, "run").mkdir()
        times = (9.0, 9.0, 9.0, 1.0, 2.0, 4.0)
        Path(cwd, "run/metrics.jsonl").write_text("".join(f'{{"step_seconds": {time}}}\n' for time in times))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    tiny = {"model": "tiny", "processes": 2, "strategy": "ddp", "options": ["--distributed"]}
    assert benchmark.measure(tiny, steps=3) == 2.0, "the median of steps 4 to 6"
    assert {"--steps=6", "--nproc_per_node=2", "--strategy=ddp", "--device=cpu"} <= {*asked[0]}
    benchmark.measure(tiny | {"processes": 1}, steps=3)
    assert asked[1][1].endswith("distributed_training.py") and not any("nproc" in word for word in asked[1])
