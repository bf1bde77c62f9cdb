"""Going on with a run: which run, which checkpoint, which settings; and a checkpoint is whole or not there."""

import contextlib
import json
import os
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import SMALL, begun, configure, metrics, refused, train

from common import manifest
from common.checkpoint import Writer
from common.config import shared
from common.keeper import Keeper
from common.lab.launch import RankFailed, launch, ready_to_fork
from common.ranks import process_group
from common.record import Record
from common.run import INTERRUPTED, Run
from course.strategies import load

# What a run's numbers come from, each with a value that is not the default: a resumed run keeps it.
IDENTITY = {
    "layers": 3, "width": 64, "heads": 2, "optimizer": "sgd", "lr": 0.01, "seed": 5, "task": "images", "context": 64,
    "dataset": "cifar10", "batch_size": 64, "lr_schedule": "cosine", "warmup_steps": 7, "weight_decay": 0.2,
    "beta1": 0.8, "beta2": 0.99, "max_norm": 0.5, "text": "poems",
}  # fmt: skip
EXPERTS = {"experts": 16, "top_k": 3}
# What it takes over unless something else is asked for, and what belongs to the machine.
MAY_CHANGE = {
    "steps": 300, "epochs": 2, "precision": "bf16", "accumulation_steps": 2, "log_every": 3, "checkpoint_every": 7,
    "keep": 3, "keep_best": True, "async_checkpoint": True, "validate_every": 14, "validate_batch_size": 8, "sample": 9,
    "profile": 3, "tensorboard": True, "tf32": True, "compile": "eager", "fused": True, "check_collectives": True,
    "debug_server": 8000, "data_dir": "pictures",
}  # fmt: skip
MACHINE = {"distributed": True, "backend": "gloo", "device": "cpu", "timeout": 7.0, "download": True}
ELSEWHERE = {"strategy", "implementation", "by_hand", "mesh", "mesh_order", "run_dir", "resume", "dry_run"}
WITH = {  # what else it takes, to be allowed
    "keep_best": {"validate_every": 14, "checkpoint_every": 7}, "validate_batch_size": {"validate_every": 14},
    **dict.fromkeys(("data_dir", "download", "dataset"), {"task": "images", "dataset": "cifar10"}),
    **dict.fromkeys(EXPERTS, {"strategy": "expert", "by_hand": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_with_poems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("poems").mkdir()


def test_every_option_is_listed_here():
    assert {item.name for item in shared() if item.metadata["identity"]} == set(IDENTITY), "identity"
    assert {item.name for item in shared()} == {*IDENTITY, *MAY_CHANGE, *MACHINE, *ELSEWHERE}
    own = {item.name for item in fields(load("expert", True).Options) if item.metadata["identity"]}
    assert own == set(EXPERTS)


@pytest.mark.parametrize("name", [*IDENTITY, *EXPERTS, *MAY_CHANGE, *MACHINE])
def test_what_a_resumed_run_makes_of_each_option(name, monkeypatch):
    """Of a run with another value than the default, gone on with as it is, and with the default asked for in a file."""
    monkeypatch.setattr("common.config.missing", lambda names: None)
    others, value = {"strategy": "single"} | WITH.get(name, {}), (IDENTITY | EXPERTS | MAY_CHANGE | MACHINE)[name]
    folder = begun(Path("begun"), **{key: given for key, given in others.items() if key != name})
    kept = json.loads((folder / "config.json").read_text())
    default, kept["config"][name] = kept["config"][name], value
    (folder / "config.json").write_text(json.dumps(kept))
    Path("other.yaml").write_text(f"{name}: {json.dumps(default)}\n")

    def found(*line):
        config = configure(" ".join(line), run_dir=folder, resume=True)
        return getattr(config if hasattr(config, name) else config.options, name)

    assert found() == (default if name in MACHINE else value), "gone on with as it is"
    if name in MAY_CHANGE:
        assert found("--config other.yaml") == default, "as asked for"
    elif name not in MACHINE:
        words = "--resume", f"--{name.replace('_', '-')} ", str(value), str(default)
        with refused(*words):
            found("--config other.yaml")
        kept["config"][name] = default  # in the run's file; its checkpoint, perhaps of another run, says otherwise
        (folder / "config.json").write_text(json.dumps(kept))
        about = {"step": 1, "settings": kept["config"] | {name: value}}
        (folder / "checkpoint-000001" / "manifest.json").write_text(manifest.seal(about, {}))
        with process_group("cpu"), refused(*words):
            Keeper(configure(run_dir=folder, resume=True), None, None)


def test_options_of_another_strategy_are_not_taken_over():
    folder = begun(Path("begun"), strategy="ddp", recompute="full", loading="dispatch")
    assert configure(run_dir=folder, resume=True).options.recompute == "full"
    other = configure(run_dir=folder, resume=True, strategy="fsdp")
    assert other.options.recompute == "none", "ddp's --recompute is not fsdp's"


def test_the_mesh_is_taken_over_where_it_fits():
    """By the same strategy on as many ranks."""
    folder = begun(Path("begun"), strategy="hsdp", mesh="data=1,shard=1", mesh_order="shard,data")
    again = configure(run_dir=folder, resume=True)
    assert list(again.axes.items()) == [("shard", 1), ("data", 1)], "sizes and order"
    assert configure(size=2, run_dir=folder, resume=True).axes == {"data": 2, "shard": 1}, "on other ranks its own"
    assert configure(run_dir=folder, resume=True, strategy="fsdp").axes == {"shard": 1}, "another strategy's own"


def test_a_length_in_steps_takes_the_place_of_one_in_epochs():
    folder = begun(Path("begun"), lr_schedule="constant", epochs=2)
    again = configure(run_dir=folder, resume=True, steps=7)
    assert (again.steps, again.epochs) == (7, 0)
    assert configure(run_dir=folder, resume=True, epochs=3).epochs == 3


def test_a_learning_rate_that_falls_until_the_end_keeps_the_end():
    for length in ({"steps": 9}, {"epochs": 2}):
        folder = begun(Path(*length), lr_schedule="cosine", **length)
        (name, value), same = *length.items(), configure(run_dir=folder, resume=True, **length)
        assert getattr(same, name) == value
        for other in ({"steps": 8}, {"steps": 10}, {"epochs": 1}, {"epochs": 3}):
            with refused("--steps", str(same.steps)):
                configure(run_dir=folder, resume=True, **other)


TINY = SMALL | {"layers": 1, "width": 16, "batch_size": 4, "checkpoint_every": 1, "strategy": "single"}


def steps_begun(config) -> list[int]:
    """Train; after how many steps each run began."""
    begins, enter = [], Run.__enter__

    def noted(run):
        begins.append(run.progress.done)
        return enter(run)

    Run.__enter__ = noted
    train([config])
    return begins


def killed_while_it_writes(config, after: int) -> int:
    """Train, in a process of its own, until the tensors of the checkpoint of step `after` are written; then SIGKILL.
    Returns the exit code, negative for a signal."""
    write_data = Writer.write_data

    def half(writer, plan, planner):
        written = write_data(writer, plan, planner)
        if writer.about["step"] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with ready_to_fork():
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                torch.set_num_threads(1)  # the pool of threads does not survive the fork
                Writer.write_data = half
                train([config])
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_kill_while_it_is_written_leaves_the_checkpoint_before(tmp_path):
    """The folder that is being written is neither the newest checkpoint nor taken for one."""
    folder = tmp_path / "run"
    assert killed_while_it_writes(configure(run_dir=folder, steps=3, **TINY), after=3) == -signal.SIGKILL
    there = [path.name for path in manifest.checkpoints(folder)]
    assert there == ["checkpoint-000001", "checkpoint-000002"], "whole ones only"
    assert launch(steps_begun, 1, (configure(run_dir=folder, steps=4, resume=True),)) == [[2]]
    assert [record["step"] for record in metrics(folder)] == [1, 2, 3, 4]


def signalled(config, number: int, rank: int) -> tuple[int, list[int]]:
    """Train; one rank gets a signal in its second step. Returns the exit code and the steps done on this rank."""
    done, log = [], Record.log

    def logged(record, step, *numbers):
        log(record, step, *numbers)
        done.append(step + 1)
        if step == 1 and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), number)

    Record.log = logged
    try:
        train([config])
    except SystemExit as leaving:
        return leaving.code, done
    finally:
        Record.log = log
    return 0, done


@pytest.mark.parametrize("number, rank", [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(number, rank, tmp_path):
    config = configure(size=2, run_dir=tmp_path / "run", steps=20, **TINY | {"strategy": "ddp"})
    try:
        ranks = launch(signalled, 2, (config, number, rank), timeout=100)
    except RankFailed as failed:
        pytest.fail(f"{number.name} to rank {rank} does not stop the other one: {failed}")
    assert ranks == [(INTERRUPTED, [1, 2, 3])] * 2, "the step in which it came, and the one after, for the votes"
    assert manifest.read(tmp_path / "run" / "checkpoint-000003").about["step"] == 3
