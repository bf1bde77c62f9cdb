"""configs/*.yaml: each trains, small and for a step, on as many ranks as its first lines say; those that want GPUs or
more ranks than this machine likes go through --dry-run."""

import re

import pytest
from helpers import FULL, configure, metrics, train

from common import ROOT
from common.lab.launch import launch
from course import dry_run

FILES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16}


def ranks_of(name: str) -> int:
    """As the command in the file's comment says."""
    numbers = re.findall(r"^#.*--nproc_per_node=(\d+)(?:.*--nnodes=(\d+))?", FILES[name].read_text(), re.MULTILINE)
    return int(numbers[0][0]) * int(numbers[0][1] or 1) if numbers else 1


def settings(name: str, **more):
    return configure(f"--config {FILES[name]}", ranks_of(name), **more)


@pytest.mark.parametrize("name", FILES)
def test_each_trains_or_is_computed_where_it_is_large(name, tmp_path):
    size = ranks_of(name)
    whole = settings(name, dry_run=True)
    if not FULL and size > 2 and name != "gpu-one-node":
        return  # its settings go together; of those on many ranks one is computed, with FULL=1 all
    if size > 4 or whole.device == "cuda":
        (seen,) = dry_run.forecast(settings(name, dry_run=True, **SMALL), [size - 1]).values()
        assert seen.numbers and seen.sent and list(seen.place.values()) == [n - 1 for n in whole.axes.values()]
        return
    short = {"steps": 1, "sample": min(3, whole.sample), "validate_every": min(1, whole.validate_every)}
    launch(train, size, ([settings(name, run_dir=tmp_path / "run", **SMALL | short)],), timeout=240)
    (record,) = metrics(tmp_path / "run")
    assert record["loss"] > 1 and record["grad_norm"] > 0


@pytest.mark.parametrize("name", FILES)
def test_its_comment_has_the_command_that_starts_it(name):
    command = f"distributed_training.py {'--distributed ' * (ranks_of(name) > 1)}--config configs/{name}.yaml\n"
    assert command in FILES[name].read_text()


def test_shards_of_several_nodes_stay_within_a_node():
    """Where a file is for several nodes, its shards are a node's GPUs."""
    assert FILES
    for name, path in FILES.items():
        found = re.search(r"--nproc_per_node=(\d+) --nnodes=(\d+)", path.read_text())
        if found:
            assert settings(name, dry_run=True).axes == {"data": int(found[2]), "shard": int(found[1])}
