"""Checkpoints in pieces: what is written and refused, and that any strategy reads what any other has written."""

import copy
import errno
import os
import shutil
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import EVERY, SMALL, config_of, configure, every_strategy, refused, saved, train
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from common import manifest
from common.checkpoint import Saver, Writer, disk_errors, load
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.mesh import make_mesh
from common.pieces import LoadPieces, pieces_of, pieces_to_save
from common.state import Part, Where, whole
from common.task import make_task


def test_pieces_are_memory_of_the_part():
    """A flat shard with elements 7 to 18 of the box [2:6, 0:5] of a matrix [8, 10] is three boxes."""
    shard = torch.zeros(11)
    found = pieces_of("w", shard, Where((8, 10), (2, 0), (4, 5), 7, 18))
    assert [(p.offset, tuple(p.tensor.shape)) for p in found] == [((3, 2), (1, 3)), ((4, 0), (1, 5)), ((5, 0), (1, 3))]
    for number, piece in enumerate(found, start=1):
        piece.tensor.fill_(number)
    assert shard.tolist() == [1] * 3 + [2] * 5 + [3] * 3


def test_a_weight_that_is_named_twice_is_written_once():
    """As by a rank with both copies of a tied weight: torch.distributed.checkpoint refuses elements that overlap."""
    weight = torch.ones(2, 3)
    part = Part("w", weight, whole(weight))
    assert [piece.name for piece in pieces_to_save([part, part], {})] == ["model.w"], "what is written"


def test_a_tensor_of_another_shape_is_refused_though_it_has_as_many_elements():
    for shape in ((3, 2), (6,), (1, 2, 3)):
        saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [])
        planner = LoadPieces(pieces_of("model.w", torch.zeros(2, 3), whole(torch.zeros(2, 3))), "the checkpoint")
        planner.set_up_planner(None, Metadata({"model.w": saved}))
        with refused("the checkpoint", "model.w", "[2, 3]", str([*shape])):
            planner.create_local_plan()


# --- every strategy reads what every other wrote --------------------------------------------------------------------


def one_step_each(jobs: list[tuple]) -> list[tuple[dict, dict, float, float]]:
    """For each job (config, checkpoint to begin from or None, step, checkpoint to write or None): the state that rank 0
    has before and after the step, its loss and its gradient norm."""
    outcomes = []
    for config, begin, step, end in jobs:
        task, mesh = make_task(config), make_mesh(config.axes, "cpu")
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        if begin:
            assert load(begin, strategy)["step"] == step
        before = copy.deepcopy(equality.flatten(strategy.full_state()))
        loss, grad_norm = strategy.step(task.micro_batches(step, strategy))
        if end:
            Saver().save(end, strategy, {"step": step + 1})
        outcomes.append((before, equality.flatten(strategy.full_state()), float(loss), float(grad_norm)))
    return outcomes


def equal(one: dict, other: dict) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_every_strategy_reads_what_one_process_wrote_and_the_other_way_round(tmp_path):
    """What is taken up is equal in every bit; what is trained with it, as one process would have."""
    alone = {"GPT": config_of(tmp_path, 1, "single"), "MixtureGPT": config_of(tmp_path, 1, "expert", "by-hand")}
    first, second = {kind: tmp_path / f"{kind}-1" for kind in alone}, {kind: tmp_path / f"{kind}-2" for kind in alone}
    jobs = [
        job
        for kind, one in alone.items()
        for job in ((one, None, 0, first[kind]), (one, first[kind], 1, second[kind]), (one, second[kind], 2, None))
    ]
    (outcomes,) = launch(one_step_each, 1, (jobs,))
    expected = {kind: outcomes[3 * number : 3 * number + 3] for number, kind in enumerate(alone)}
    for begin, then, last in expected.values():
        assert equal(begin[1], then[0]) and equal(then[1], last[0]) and not equal(then[0], then[1])

    many = [config_of(tmp_path, *row) for row in sorted(every_strategy())]
    kinds = [config.strategy_class.model_class.__name__ for config in many]
    ends = [tmp_path / f"many-{number}" for number in range(len(many))]
    jobs = [(config, first[kind], 1, end) for config, kind, end in zip(many, kinds, ends, strict=True)]
    two = [row[0] for row in every_strategy()].count(2)
    wait = 300  # seconds: with much else to do, a machine takes more than a minute for so many strategies
    outcomes = [*launch(one_step_each, 2, (jobs[:two],), wait)[0], *launch(one_step_each, 4, (jobs[two:],), wait)[0]]
    back = [(alone[kind], end, 2, None) for kind, end in zip(kinds, ends, strict=True)]
    (again,) = launch(one_step_each, 1, (back,), wait)
    for config, kind, there, back in zip(many, kinds, outcomes, again, strict=True):
        who = f"{config.strategy} {config.implementation} {config.axes}"
        _, then, last = expected[kind]
        assert equal(then[0], there[0]), f"{who} reads something else than one process wrote"
        assert equal(there[1], back[0]), f"one process reads something else than {who} wrote"
        allowed = 1e-2 if config.precision != "fp32" else 3e-5
        assert there[2:] == pytest.approx(then[2:], rel=allowed) and back[2:] == pytest.approx(last[2:], rel=allowed), (
            who
        )


def saved_in_the_background(config, folder: Path) -> tuple[list[str], dict, dict]:
    """Save while a step is done; what there was in the folder before and after, and the states before and after."""
    task = make_task(config)
    strategy = config.strategy_class(
        task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes, "cpu"))
    )
    strategy.step(task.micro_batches(0, strategy))
    before = copy.deepcopy(equality.flatten(strategy.full_state()))
    stepped, write_data = threading.Event(), Writer.write_data
    Writer.write_data = lambda *args: stepped.wait(60) and write_data(*args)
    saver = Saver(background=True)
    saver.save(folder / manifest.name_of(1), strategy, {"step": 1})
    strategy.step(task.micro_batches(1, strategy))
    there = [path.name for path in manifest.checkpoints(folder)]
    stepped.set()
    saver.wait()
    return there, before, equality.flatten(strategy.full_state())


def test_in_the_background_a_copy_is_saved_while_training_goes_on(tmp_path):
    config = configure(size=2, **EVERY, strategy="ddp", run_dir=tmp_path / "run")
    there, before, after = launch(saved_in_the_background, 2, (config, tmp_path))[0]
    assert there == [] and manifest.damage(tmp_path / "checkpoint-000001") == ""
    kept = saved(tmp_path / "checkpoint-000001")
    key = "model.head.norm.weight"
    assert torch.equal(kept[key], before["model/head.norm.weight"])
    assert not torch.equal(kept[key], after["model/head.norm.weight"])


def test_a_checksum_is_of_all_bytes(tmp_path):
    """Also of a file that is read in several blocks."""
    content = bytearray(range(256)) * (2**20 // 256) + b"the end"
    (tmp_path / "file").write_bytes(content)
    whole = manifest.checksum(tmp_path / "file")
    assert whole == f"{zlib.crc32(content):08x}", "CRC-32 of all bytes"
    content[0] ^= 1
    (tmp_path / "file").write_bytes(content)
    assert manifest.checksum(tmp_path / "file") != whole, "the first byte is another"


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    assert manifest.still_there(tmp_path) == "", "there is no checkpoint"
    for name in ("checkpoint-1000000", "checkpoint-000005", "checkpoint-999999", "checkpoint-000004.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-000006").touch()
    names = [path.name for path in manifest.checkpoints(tmp_path)]
    assert names == ["checkpoint-000005", "checkpoint-999999", "checkpoint-1000000"], "folders, by steps"
    assert "--resume" in manifest.still_there(tmp_path)


def test_names_are_on_the_disk_before_and_after_a_checkpoint_is_moved(tmp_path, monkeypatch):
    folder, synced = tmp_path / "checkpoint-000001", []
    monkeypatch.setattr(manifest, "sync", lambda path: synced.append((path.name, folder.exists())))
    dcp.save({"a": torch.ones(2)}, storage_writer=Writer(folder, {}), no_dist=True)
    assert synced == [("manifest.json", False), (".checkpoint-000001.partial", False), (tmp_path.name, True)], (
        "(what is synced to disk, whether the checkpoint is in its place)"
    )


def test_the_first_rank_that_failed_is_named_and_rank_0_removes_what_was_begun(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-000001"
    for name, value in {"is_initialized": True, "get_world_size": 4, "get_rank": 0}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    full, broken = ((OSError(number, os.strerror(number)), None) for number in (errno.ENOSPC, errno.EIO))
    for done, left in (("read", True), ("written", False)):
        manifest.partial(folder).mkdir(exist_ok=True)
        with pytest.raises(UserError) as failed, disk_errors(folder, done):
            raise dcp.CheckpointException("", {3: broken, 1: full})
        said = str(failed.value)
        assert said.startswith(f"{folder} ") and f"{done}: rank 1: No space left on device" in said, said
        assert manifest.partial(folder).exists() is left, f"the folder of a checkpoint that cannot be {done}"


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path, monkeypatch):
    folder, there = tmp_path / "checkpoint-000001", []
    folder.mkdir()
    (tmp_path / ".checkpoint-000001.removed.partial" / "left").mkdir(parents=True)  # by somebody who was killed
    rmtree = shutil.rmtree

    def watched(path, **how):
        there.append(folder.exists())
        rmtree(path, **how)

    monkeypatch.setattr(manifest.shutil, "rmtree", watched)
    manifest.remove(folder)
    assert there[-1] is False and not list(tmp_path.iterdir()), "under its name while its files are removed"


def checkpoints_at_the_end(config) -> list[str]:
    """Of a run whose checkpoints take a while to be written."""
    write_data = Writer.write_data
    Writer.write_data = lambda *args: time.sleep(0.5) or write_data(*args)
    train([config])
    return [path.name for path in manifest.checkpoints(Path(config.run_dir))]


def test_a_run_ends_when_its_last_checkpoint_is_there(tmp_path):
    config = configure("--async-checkpoint --steps 2", strategy="single", run_dir=tmp_path / "run", **SMALL)
    assert launch(checkpoints_at_the_end, 1, (config,)) == [["checkpoint-000002"]], "checkpoints, as the run is over"
