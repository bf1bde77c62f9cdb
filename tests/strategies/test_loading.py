"""The ways of loading: each feeds the ranks what common/data.py defines, whoever does the work; and workers end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import hold_after, ranks_of, torchrun, wait_for_step
from helpers import FULL, TEXT, as_options, configure, metrics, numbers, saved, train
from torch.utils._python_dispatch import TorchDispatchMode

from common import ROOT
from common.data import Plan
from common.errors import UserError
from common.lab.equality import NotEqual
from common.lab.launch import launch
from common.lab.ledger import Ledger
from course.ddp import loading
from course.ddp.classroom import check_loading as proof
from course.fsdp.compare import pretend

LOADING = loading.LOADING


@pytest.mark.parametrize("nproc", [1, 2, 4] if FULL else [4])
def test_every_way_gives_the_same_micro_batches(nproc):
    proof.check_loading(list(LOADING.values()), nproc)


class Scattered(TorchDispatchMode):
    """Notes the devices of what is scattered."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "scatter_":
            self.devices += [tensor.device.type for tensor in (*args[0], *sum(args[1], []))]
        return func(*args, **(kwargs or {}))


def test_dispatched_slices_go_from_device_to_device():
    """A group of NCCL alone, as the programs to copy make it, has no way for tensors on the CPU."""
    plan = Plan(seed=0, batch_size=8, examples=8, data_size=2, accumulate=2, device="meta")
    with pretend(2), Scattered() as scattered:
        (parts,) = loading.dispatch(proof.Numbered(), plan)
    assert set(scattered.devices) == {"meta"} and len(scattered.devices) >= 6, "both slices and where one arrives"
    assert {part.device.type for pair in parts for part in pair} == {"meta"}


def fails_on_rank_1(dataset, plan, start=0):
    assert plan.data_rank == 0
    return loading.shard(dataset, plan, start)


def test_a_way_that_fails_on_a_rank_is_refused():
    """(Other batches, and more or fewer of them: the chapter's planted bugs, in test_equality.py.)"""
    with pytest.raises(NotEqual) as refusal:
        proof.check_loading([fails_on_rank_1], 2)
    assert refusal.value.what == "error", refusal.value


class Counted(proof.Numbered):
    """Counts what is read and decoded, in workers too, whose memory is another."""

    def __init__(self):
        self.work = torch.zeros(2, dtype=torch.int64).share_memory_()  # records read, records decoded

    def batch(self, indices):
        self.work += len(indices)
        return super().batch(indices)

    def record(self, index):
        self.work[0] += 1
        return super().record(index)

    def decode(self, record):
        self.work[1] += 1
        return super().decode(record)


def count_work():
    """For each way: records read, records decoded, calls and bytes of the batches sent, RNG left alone."""
    plan = Plan(1, 24, 4 * 24, dist.get_rank(), dist.get_world_size())
    found = {}
    for name, way in LOADING.items():
        dataset, before = Counted(), torch.get_rng_state()
        with Ledger() as ledger:
            list(way(dataset, plan))
        scattered = [entry.payload for entry in ledger.entries if entry.operation == "scatter"]
        others = {entry.operation for entry in ledger.entries} - {"scatter"}
        found[name] = (dataset.work.tolist(), scattered, others, torch.equal(before, torch.get_rng_state()))
    return found


def test_who_reads_decodes_and_sends(monkeypatch):
    """Four steps of 24 examples on two ranks: 96 examples, 48 for each rank."""
    monkeypatch.setattr(loading, "WORKERS", 1)  # two would count at once, and lose counts
    sent = [24 * 8] * 2 * 4  # inputs and targets of each step, 8 bytes an example
    for rank, found in enumerate(launch(count_work)):
        assert found == {
            "dispatch": ([96, 96] if rank == 0 else [0, 0], sent, {"broadcast"}, True),
            "shard": ([48, 48], [], set(), True),
            "stream": ([96, 96], [], set(), True),
            "shard-stream": ([96, 48], [], set(), True),
            "shard-stream-workers": ([96, 48], [], set(), True),
        }


def one_step_of_each(folder: Path) -> None:
    for step, name in enumerate(reversed([*LOADING][1:]), start=1):
        settings = TEXT | {"steps": step, "loading": name, "run_dir": folder} | ({"resume": True} if step > 1 else {})
        train([configure("", 2, dist.get_rank(), **settings, strategy="ddp")])
        dist.barrier()


def test_training_is_bitwise_the_same_and_goes_on_from_anywhere(tmp_path):
    """Each way through one run (in make test two, beside "shard"); and one run of which each way does a step."""
    ways = list(LOADING) if FULL else ["dispatch", "shard", "shard-stream-workers"]
    runs = [configure(size=2, **TEXT, strategy="ddp", loading=name, run_dir=tmp_path / name) for name in ways]
    launch(train, 2, (runs,))
    launch(one_step_of_each, 2, (tmp_path / "parts",))
    expected = numbers(tmp_path / "shard")
    assert len(expected) == 8 and len(set(expected)) == 8
    for name in [*ways, "parts"]:
        assert numbers(tmp_path / name) == expected, name
    for name in ways:
        one, other = (saved(tmp_path / n / "checkpoint-000004") for n in ("shard", name))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name


def two_steps_then_close():
    me = psutil.Process()
    batches = LOADING["shard-stream-workers"](proof.Numbered(), proof.plans()[0])
    next(batches)
    workers = me.children()
    batches.close()
    return len(workers), len(me.children())


def fail_with_workers(config):
    try:
        train([config])
    except UserError as error:
        return str(error), len(psutil.Process().children())


def test_workers_end_when_nobody_wants_more_and_when_the_loop_fails(tmp_path):
    assert launch(two_steps_then_close) == [(loading.WORKERS, 0)] * 2
    settings = TEXT | {"strategy": "ddp", "optimizer": "sgd", "lr": 1e38, "run_dir": tmp_path / "run"}
    config = configure(size=2, **settings, loading="shard-stream-workers")
    for error, left in launch(fail_with_workers, args=(config,)):
        assert "the loss is nan at step" in error and left == 0


@pytest.mark.weekly  # workers that import PyTorch, one after the other
def test_workers_can_be_spawned():
    """As on macOS and Windows: the dataset travels by pickle, and a worker imports the chapter's file anew."""
    code = """
from common.data import Plan, Text, shard
from course.ddp import loading
loading.START_METHOD, loading.WORKERS = "spawn", 1
both = [list(load(Text(16), Plan(0, 8, 16))) for load in (shard, loading.shard_stream_workers)]
print(all(a.equal(b) for ours, theirs in zip(*both) for a, b in zip(ours[0], theirs[0])), len(both[1]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "03_ddp", capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("True 2\n", 0), done.stderr


def test_torchrun_restarts_a_run_after_a_rank_was_killed(tmp_path, monkeypatch):
    """It goes on from the newest checkpoint, to the losses of a run that nobody disturbed."""
    steps, killed = 100 if FULL else 12, hold_after(monkeypatch, 6, tmp_path / "killed")
    settings = TEXT | {"steps": steps, "checkpoint_every": 5, "loading": "shard-stream-workers"}
    process = torchrun(
        *("--standalone", "--nproc_per_node=2", "--max-restarts=1", ROOT / "distributed_training.py"),
        *("--distributed", "--run-dir=run", *as_options(settings)),
        cwd=tmp_path,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # pytorch#135712: see docs/cluster.md
    )
    wait_for_step(tmp_path / "run", 6)
    ranks_of(process)[1].kill()
    killed.touch()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "restarted by torchrun: going on after step" in errors, errors
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, steps + 1))
    launch(train, 2, ([configure(size=2, **settings, strategy="ddp", run_dir=tmp_path / "whole")],))
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_ranks_that_share_no_data_are_told_so(tmp_path, capfd):
    alone, settings = ["single", "dp"], TEXT | {"steps": 1}
    configs = [configure(size=2, **settings, strategy=name, run_dir=tmp_path / name) for name in [*alone, "ddp"]]
    launch(train, 2, (configs,))
    told = re.findall("strategy '(.*)' divides nothing between processes: all 2 ranks train", capfd.readouterr().out)
    assert told == alone
