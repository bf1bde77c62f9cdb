"""--strategy auto: what the planner picks is a strategy of the course on the processes that there are, and trains."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from forks import start
from helpers import SMALL, configure, launcher, metrics, refused, train

from common.command_line import parse
from common.errors import UserError
from common.lab.launch import launch
from course import auto
from course.auto import choose, with_layout
from course.strategies import BY_AXES, STRATEGIES
from planner import constants
from planner.constants import PRIOR
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout
from planner.models import course_gpt
from planner.search import Choice

HERE = {"peak": 6e10, "kernel": 2e-5, "hbm": 1e10, "alpha_link": 1e-4, "link": 1e9, "processes": 8}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without measurements."""
    monkeypatch.chdir(tmp_path)


def measured(folder, **changes) -> None:
    """A file as calibrate writes it."""
    here = HERE | changes
    found = {"matmul": 1.0, "link": 1.0, "kernel": here["kernel"], "alpha_link": here["alpha_link"]}
    (folder / "constants.json").write_text(json.dumps({"constants": found, "here": here}))
    constants.load.cache_clear()


def picked(line: str, size: int):
    words = f"{line} --strategy auto --dry-run {'--distributed' if size > 1 else ''}"
    with launcher(0, size):
        return parse(STRATEGIES, None, words.split(), BY_AXES, auto=choose)


@pytest.mark.parametrize("size", [1, 4])
def test_without_measurements_batches_are_divided(size, capsys):
    config = picked("--layers 2 --width 32 --batch-size 24", size)
    said = capsys.readouterr().out
    assert list(config.axes.values()) == [size] and {*config.axes} <= {"data", "shard"}
    assert f"--strategy {config.strategy} --mesh " in said and len(said.splitlines()) == 1
    assert (config.layers, config.width, config.batch_size) == (2, 32, 24)


def test_a_model_that_no_process_can_hold_is_sharded(tmp_path, capsys):
    """12.7 million parameters are 203 MB with gradients and AdamW's state, and a process has 110 MiB here."""
    measured(tmp_path, memory=110 * 2**20)
    config = picked("--layers 4 --width 512 --heads 8 --batch-size 8", 4)
    divided = config.axes.get("shard", 1) * config.axes.get("tensor", 1) * config.axes.get("pipeline", 1)
    assert divided == 4 and config.strategy not in ("ddp", "zero1"), config.axes
    assert "by constants.json: " in capsys.readouterr().out
    measured(tmp_path, memory=8 * 2**30)
    assert picked("--layers 4 --width 512 --heads 8 --batch-size 8", 4).axes.get("tensor", 1) == 1


def test_constants_that_were_measured_count(tmp_path, capsys):
    """By these, each message takes ten seconds."""
    measured(tmp_path, alpha_link=10.0)
    picked("--batch-size 8", 2)
    (milliseconds,) = re.findall(r": ([\d,.e+]+) ms a step", capsys.readouterr().out)
    assert float(milliseconds.replace(",", "")) >= 10_000


def test_a_batch_that_cannot_be_divided_leaves_the_model():
    assert {*picked("--batch-size 7", 2).axes} <= {"tensor", "pipeline"}


def test_other_options_stay(tmp_path):
    (tmp_path / "run.yaml").write_text("strategy: auto\nlayers: 3\nprecision: bf16\n")
    with launcher(0, 2):
        words = ["--config", "run.yaml", "--distributed", "--dry-run", "--steps", "7", "--accumulation-steps", "2"]
        config = parse(STRATEGIES, None, words, BY_AXES, auto=choose)
    assert (config.layers, config.precision, config.steps, config.accumulation_steps) == (3, "bf16", 7, 2)


@pytest.mark.parametrize(
    "line, says",
    [
        ("--mesh data=2", "--mesh auto"),
        ("--mesh=data=2", "--mesh auto"),
        ("--mesh-order data", "--mesh-order auto"),
        ("--by-hand", "--by-hand auto"),
        ("--implementation pytorch", "--implementation auto"),
        ("--task images", "--task images --strategy ddp"),
        ("--batch-size 7 --layers 1 --heads 3 --width 33", "--batch-size 7"),
    ],
)
def test_what_it_cannot_pick_gets_one_line(line, says):
    with refused(*says.split()):
        picked(line, 2)


@pytest.mark.parametrize(
    "said, gib, name, memory",
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb", 79.1),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb", 79.2),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb", 39.4),
        ("Tesla V100-SXM2-16GB", 15.7, "v100-32gb", 15.7),  # of the same speed, and half of the memory
        ("NVIDIA H200", 139.8, "h200", 139.8),
        ("NVIDIA L4", 22.0, "l4", 22.0),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090", 23.5),
        ("NVIDIA L40S", 44.0, "l40s", 44.0),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie", 79.1),
        ("NVIDIA GH200 480GB", 94.0, "gh200-96gb", 94.0),
        ("NVIDIA Zyzzyva 200 480GB", 94.5, None, 0),
    ],
)
def test_gpus_are_known_by_their_names(monkeypatch, said, gib, name, memory):
    here = SimpleNamespace(total_memory=gib * 2**30)  # of GPU 0, which every process has; others it may not see
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: said)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: {0: here}[number])
    if name is None:
        with pytest.raises(UserError, match=said):
            auto.machine(SimpleNamespace(device="auto"), 16, 8)
        return
    found, measured = auto.machine(SimpleNamespace(device="auto"), 16, 8)
    assert (found.gpu.name, found.gpus, found.nodes, measured) == (name, 16, 2, False)
    assert found.gpu.memory / 2**30 == pytest.approx(memory), "GiB that a process can have"
    assert auto.machine(SimpleNamespace(device="cpu"), 16, 8)[0].gpu.name == "cpu", "--device cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert auto.machine(SimpleNamespace(device="auto"), 16, 8)[0].gpu.name == "cpu", "where they would compute"


def test_the_line_has_the_numbers_of_the_layout():
    layout = SimpleNamespace(micro_batch=3, recompute="full")
    found = SimpleNamespace(seconds=0.25, memory=SimpleNamespace(expected=700 * 2**20), layout=layout)
    said = auto.summary(configure("--dry-run --mesh data=5", 5), SimpleNamespace(estimate=found, loser="it"), 4, "here")
    assert all(words in said for words in ("--mesh data=5", "of 3,", "full", "place 4", "250 ms", "700 MiB")), said


def test_it_trains_like_what_it_picked(tmp_path):
    process = start("--distributed", "--strategy=auto", "--steps=2", "--run-dir=auto", nproc=2, cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert sum(line.startswith("auto: ") for line in out.splitlines()) == 1
    kept = json.loads((tmp_path / "auto/config.json").read_text())
    same = configure(f"--strategy {kept['strategy']} --steps 2 --run-dir {tmp_path / 'same'}", 2, **SMALL)
    launch(train, 2, ([same],))
    found, expected = ([one["loss"] for one in metrics(tmp_path / name)] for name in ("auto", "same"))
    assert len(found) == 2 and found == pytest.approx(expected, rel=1e-5)


def test_what_the_command_line_says_wins():
    gpt, cpus = course_gpt(2, 32, 4, 16), cluster("cpu", 2, 2)
    layout = make_layout(gpt, cpus, {"data": 2}, batch_size=16, sequence=16, micro_batch=2, precision="float32")
    words = ["--distributed", "--dry-run", "--accumulation-steps", "2", "--batch-size", "8"]
    line = with_layout(words, Choice(estimate(gpt, cpus, layout, PRIOR), ""))
    with launcher(0, 2):
        config = parse(STRATEGIES, None, line, BY_AXES)
    assert (config.strategy, config.accumulation_steps, config.batch_size) == ("ddp", 2, 8)
