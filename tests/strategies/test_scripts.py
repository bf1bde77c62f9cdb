"""The scripts as the README starts them, from the root and from the chapters; and the diffs between them."""

import difflib
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed.run
from forks import Fork, torchrun
from helpers import FULL, metrics

from common import ROOT
from common.lab.launch import free_port
from course.strategies import STRATEGIES

# Each has a distributed_training.py.
FOLDERS = [".", "01_intro", "02_data_parallel", "03_ddp", "04_model_parallel", "05_pipeline", "06_fsdp"]
SMALL = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch-size=12", "--steps=2"]
# The strategy that a chapter's script trains where nobody names one: what the chapter is about.
DEFAULTS = dict(zip(FOLDERS, ("ddp", "single", "dp", "ddp", "tensor", "pipeline", "fsdp"), strict=True))


def ranks(nproc: int, folder: str, *arguments: str) -> list[str]:
    """What the ranks of a folder's script write, where torchrun's part is played by forks of this process."""
    port, script = free_port(), ROOT / folder / "distributed_training.py"
    processes = [
        Fork(script, *arguments, cwd=ROOT / folder, rank=(rank, nproc, port) if nproc > 1 else None)
        for rank in range(nproc)
    ]
    written = ["".join(process.communicate(timeout=300)) for process in processes]
    assert [process.returncode for process in processes] == [0] * nproc, "\n".join(written)
    return written


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics(folder)]


def test_every_script_is_started():
    assert [".", *sorted({entry.chapter for entry in STRATEGIES.values()})] == FOLDERS
    assert [".", *(path.parent.name for path in SCRIPTS)] == FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_alone_and_on_two_processes(folder, tmp_path):
    """From inside the folder: both train the strategy that the chapter is about, and to the same losses. The ranks of
    the front door (with FULL=1 of all) are programs that torchrun's own main function has started."""
    ranks(1, folder, *SMALL, f"--run-dir={tmp_path / 'alone'}")
    options = ["--distributed", *SMALL, f"--run-dir={tmp_path / 'two'}"]
    if folder == "." or FULL:
        port = free_port()  # the README's default port may be another test's
        line = ["--nproc_per_node=2", f"--master_port={port}", "distributed_training.py", *options]
        two = Fork(torch.distributed.run.main, *line, cwd=ROOT / folder)
        output = "".join(two.communicate(timeout=300))
        assert two.returncode == 0, output
    else:
        output, nothing = ranks(2, folder, *options)
        assert "2/2" not in nothing
    assert "2/2" in output  # the progress bar
    facts = json.loads((tmp_path / "two" / "config.json").read_text())
    assert facts["strategy"] == DEFAULTS[folder]
    assert len(losses(tmp_path / "alone")) == 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_two_nodes(tmp_path):
    """The third command, once for each node, both on this machine: ranks 0..3, local ranks 0, 1 on each."""
    address = ["--nproc_per_node=2", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    options = ["--distributed", *SMALL, f"--run-dir={tmp_path / 'run'}"]
    nodes = [
        torchrun(*address, f"--node_rank={node}", "distributed_training.py", *options, cwd=ROOT) for node in (0, 1)
    ]
    outputs = ["".join(node.communicate(timeout=300)) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert json.loads((tmp_path / "run" / "config.json").read_text())["world_size"] == 4
    assert len(losses(tmp_path / "run")) == 2
    assert "ddp on 4 process(es)" in outputs[0] and "ddp on" not in outputs[1]


def changed_lines(old: str, new: str) -> list[str]:
    """Lines added and removed, without the module docstrings, which say what each chapter is about."""
    texts = [re.sub(r'^""".*?"""\n', "", text, flags=re.DOTALL).splitlines() for text in (old, new)]
    diff = difflib.unified_diff(*texts, lineterm="", n=0)
    return [line for line in diff if line[0] in "+-" and not line.startswith(("---", "+++"))]


SCRIPTS = sorted(ROOT.glob("0*/distributed_training.py"))


@pytest.mark.parametrize("old, new", list(itertools.pairwise(SCRIPTS)), ids=lambda path: path.parent.name)
def test_the_diff_between_chapters_is_the_idea(old, new):
    diff = changed_lines(old.read_text(), new.read_text())
    assert 5 <= len(diff) <= 50, f"{len(diff)} changed lines, at most 50:\n" + "\n".join(diff)


def test_main_is_the_same_in_every_chapter():
    """But for who reads the examples, which DDP has an option for."""
    mains = {
        path.parent.name: re.search(r"^def main\(config\):\n(?: +.*\n)+", path.read_text(), re.MULTILINE)[0]
        for path in SCRIPTS
    }
    mains["03_ddp"] = mains["03_ddp"].replace("run.batches(config.options.load)", "run.batches()")
    common = Counter(mains.values()).most_common(1)[0][0]
    other = {chapter: "\n".join(changed_lines(common, main)) for chapter, main in mains.items() if main != common}
    assert not other, "main differs from that of the other chapters in\n" + "\n".join(map(": ".join, other.items()))


def test_a_large_diff_would_be_seen():
    assert len(changed_lines('"""a"""\nx = 1\n', '"""b"""\nx = 2\n')) == 2
