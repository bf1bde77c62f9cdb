"""docs/your-own.md: the program on it trains the same in all of its ways, and the page shows that program."""

import re
import runpy
import textwrap

import pytest
import torch
from forks import Fork, torchrun
from helpers import FULL

from common import ROOT
from common.lab.launch import launch

PROGRAM, PAGE = ROOT / "docs" / "your_own.py", (ROOT / "docs" / "your-own.md").read_text()
NUMBERS = r"loss ([\d.]+) at first, ([\d.]+) at the end"


def losses(text: str) -> tuple[float, ...]:
    return tuple(map(float, re.search(NUMBERS, text).groups()))


def test_all_ways_train_as_one_process_does(tmp_path):
    process = Fork(PROGRAM, cwd=tmp_path)
    alone = losses(process.communicate(timeout=300)[0])
    assert alone[0] > 1 and alone[1] < 0.4
    ways = [("fsdp", 2), ("pipeline", 3), *[("ddp", 2), ("pipeline", 2)] * FULL]  # each on two ranks: below
    for how, ranks in ways:
        line = ("--standalone", f"--nproc_per_node={ranks}", PROGRAM, how)
        process = torchrun(*line, cwd=tmp_path)
        said, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        assert said.startswith(f"{how}: loss") and losses(said) == pytest.approx(alone, abs=2e-6), how
    shown = re.findall(rf"^(.+): {NUMBERS}$", PAGE, re.MULTILINE)
    assert [how for how, *_ in shown] == ["one process", "ddp", "fsdp", "pipeline"]
    assert all(tuple(map(float, numbers)) == pytest.approx(alone, abs=1e-3) for _, *numbers in shown)


@pytest.mark.parametrize("how", [["nosuch"], []])
def test_two_processes_need_a_way_to_train_together(how, tmp_path):
    """Else each would train a model of its own on half of the data, and say that all is well."""
    process = Fork(PROGRAM, *how, cwd=tmp_path, rank=(0, 2, 1))
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and said == "" and "ddp, fsdp or pipeline" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("how", ["ddp", "fsdp", "pipeline"])
def test_processes_without_a_gpu_of_their_own_train_on_the_cpu_where_there_is_one(how, monkeypatch):
    """Two processes and one GPU: then the program takes the CPU. fully_shard by itself would take the accelerator."""
    train = runpy.run_path(str(PROGRAM))["train"]
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    alone = launch(lambda: train("one process", torch.device("cpu"), steps=2), 1)[0]
    assert launch(lambda: train(how, torch.device("cpu"), steps=2), 2)[1] == pytest.approx(alone, abs=2e-6)


def test_the_page_shows_the_program():
    program = PROGRAM.read_text()
    flat = re.sub(r"^ +", "", program, flags=re.MULTILINE)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        assert re.sub(r"^ +", "", textwrap.dedent(block), flags=re.MULTILINE) in flat, block
    for command in re.findall(r"^(?:python|torchrun) .*$", PAGE, re.MULTILINE):
        assert f"{command}\n" in program, command
    assert "import course" not in program and "from common" not in program
