"""configs/*.yaml: each trains, small and for a step, on as many ranks as its first lines say; those that want GPUs or
more ranks than this machine likes go through --dry-run."""

import re

import pytest
from helpers import configure, metrics, train

from common import ROOT, manifest
from common.lab.launch import launch
from common.strategy import DTYPES
from course import dry_run
from course.ddp.loading import LOADING
from course.strategies import BY_AXES, STRATEGIES

FILES = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16}
# Here the ends of the pipeline, ranks 0 and 3, make a process group that the others know nothing of. PyTorch names the
# next group of this kind by how many a rank has, so these come last.
LAST = {"mesh-layers", "mesh-pipeline"}
DRY = {"gpu-one-node", "gpu-two-nodes", "mesh-three-axes"}


def ranks_of(name: str) -> int:
    """As the command in the file's comment says."""
    numbers = re.findall(r"^#.*--nproc_per_node=(\d+)(?:.*--nnodes=(\d+))?", FILES[name].read_text(), re.MULTILINE)
    return int(numbers[0][0]) * int(numbers[0][1] or 1) if numbers else 1


def settings(name: str, **more):
    return configure(f"--config {FILES[name]}", ranks_of(name), **SMALL | more)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_trains(size, tmp_path):
    names = [name for name in FILES if name not in DRY and ranks_of(name) == size]
    names.sort(key=lambda name: name in LAST)
    assert len(names) > 1
    configs = []
    for name in names:
        asked = settings(name, run_dir=tmp_path / name)
        short = {"steps": 1, "sample": min(3, asked.sample), "validate_every": min(1, asked.validate_every)}
        every = {"checkpoint_every": 1} if name == "checkpoints" else {}
        configs.append(settings(name, run_dir=tmp_path / name, **short, **every))
    launch(train, size, (configs,), timeout=240)
    for name in names:
        (record,) = metrics(tmp_path / name)
        assert record["loss"] > 1 and (record["grad_norm"] is None or record["grad_norm"] > 0), name
    if size == 2:
        folder = tmp_path / "checkpoints"
        launch(train, 2, ([configure(f"--resume --steps 2 --run-dir {folder}", 2)],))
        assert [record["step"] for record in metrics(folder)] == [1, 2] and len(manifest.checkpoints(folder)) == 2


@pytest.mark.parametrize("name", sorted(DRY))
def test_those_for_larger_machines_are_foreseen(name):
    size = ranks_of(name)
    whole = configure(f"--config {FILES[name]} --dry-run", size)
    assert whole.width == 2048 or not name.startswith("gpu")
    config = settings(name, dry_run=True)
    (seen,) = dry_run.foresee(config, [size - 1]).values()
    assert seen.numbers and seen.sent and list(seen.place.values()) == [n - 1 for n in config.axes.values()]


def test_there_is_one_for_each_choice():
    """Every way of loading, precision, strategy and mesh of a name; and each says how it is started."""
    configs = [settings(name, dry_run=True) for name in FILES]
    assert {config.options.loading for config in configs if hasattr(config.options, "loading")} == set(LOADING)
    assert {config.precision for config in configs} == set(DTYPES)
    assert {config.strategy for config in configs} == set(STRATEGIES) - {"dp"}, "dp wants several GPUs in one process"
    assert {BY_AXES.get(frozenset(config.axes)) for config in configs} >= set(BY_AXES.values())
    assert {ranks_of(name) for name in FILES} == {1, 2, 4, 8, 16}
    assert any(config.device == "cuda" for config in configs) and any(c.accumulation_steps > 1 for c in configs)
    for name, path in FILES.items():
        assert f"distributed_training.py {'--distributed ' * (ranks_of(name) > 1)}--config configs/{name}.yaml\n" in (
            path.read_text()
        )


def test_shards_of_several_nodes_stay_within_a_node():
    """Replicated over the nodes and sharded within, as its comment says."""
    nproc, nodes = re.search(r"--nproc_per_node=(\d+) --nnodes=(\d+)", FILES["gpu-two-nodes"].read_text()).groups()
    assert settings("gpu-two-nodes", dry_run=True).axes == {"data": int(nodes), "shard": int(nproc)}
