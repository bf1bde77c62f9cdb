"""A checkpoint's files in one process: what damage is called, what is told of a disk, what is taken up again."""

import concurrent.futures
import errno
import json
import os
import socket
import warnings
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import SMALL, configure, refused
from torch.distributed.checkpoint import LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from common import checkpoint, lock, manifest
from common.checkpoint import Reader, Saver, Writer, Written, disk_errors, load
from common.lock import Lock
from common.mesh import make_mesh
from common.pieces import SavePieces, pieces_of
from common.ranks import process_group
from common.state import whole
from common.strategy import Setup
from common.task import make_task

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_a_checkpoint_names_no_folder_of_the_machine(tmp_path):
    with disk_errors(tmp_path / "a", "written"):
        dcp.save({"a": torch.ones(2)}, storage_writer=Writer(tmp_path / "a", {"step": 1}), no_dist=True)
    assert str(tmp_path).encode() not in (tmp_path / "a" / ".metadata").read_bytes()
    reader = Reader(tmp_path / "a")
    assert reader.read_metadata().storage_meta == StorageMeta()
    assert reader.read_data(LoadPlan([]), None).done(), "a rank without a share of anything waits for nothing"


def test_a_disk_that_the_nodes_do_not_share_is_told(tmp_path):
    writer = Writer(tmp_path / "checkpoint-000001", {})
    writer.path.mkdir()
    (writer.path / "__0_0.distcp").touch()
    with refused("rank 0", f"{tmp_path}/.checkpoint-000001.partial/__1_0.distcp", "rank 1", "--run-dir"):
        writer.finish(Metadata({}), [([], [Written(f"__{rank}_0.distcp", 0, "00000000")]) for rank in (0, 1)])


def test_what_went_wrong_in_the_background_is_told_by_the_next_save(tmp_path, monkeypatch):
    too_early = "a checkpoint is begun while the one before it is being written"
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: pytest.fail(too_early))
    saver, before = Saver(), concurrent.futures.Future()
    before.set_exception(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    saver.under_way = tmp_path / "checkpoint-000001", before
    with refused("checkpoint-000001", "No space left on device"):
        saver.save(tmp_path / "checkpoint-000002", None, {})
    assert saver.under_way is None


def test_hyperparameters_and_random_numbers_are_taken_up(tmp_path, monkeypatch):
    """Random numbers by as many ranks, and of the devices that there were."""
    config = configure(**SMALL, strategy="single")
    folder, called = tmp_path / "checkpoint-000001", []

    def make():
        task = make_task(config)
        made = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
        (group,) = made.full_state()["optimizer"]["param_groups"]
        assert group["params"] == [name for name, _ in made.model.named_parameters()], "while there is no state yet"
        made.step(task.micro_batches(0, made))
        return made

    with process_group("cpu"):
        strategy = make()
        strategy.optimizer.param_groups[0]["betas"] = (0.5, 0.75)
        torch.manual_seed(7)
        Saver().save(folder, strategy, {"step": 1})
        expected, other = torch.rand(3), make()
        other.after_loading = lambda: called.append(other.optimizer.param_groups[0]["betas"])
        assert load(folder, other)["step"] == 1
        assert called == [(0.5, 0.75)], "after_loading is called once, when all is there; betas are a tuple again"
        assert torch.equal(torch.rand(3), expected), "random numbers go on where they were"
        (group,) = other.full_state()["optimizer"]["param_groups"]
        assert group["params"] == [name for name, _ in other.model.named_parameters()], "the parameters by name"
        monkeypatch.setattr(checkpoint, "random_state", lambda device: [torch.get_rng_state(), torch.zeros(16).byte()])
        load(folder, other)  # on a device whose random numbers nobody has saved
        assert torch.equal(torch.rand(3), expected), "the random numbers that there were"
        whole = manifest.read(folder)
        sealed = manifest.seal(whole.about | {"world_size": 2}, whole.files, whole.tensors)
        (folder / "manifest.json").write_text(sealed)
        torch.manual_seed(9)
        load(folder, other)
        assert not torch.equal(torch.rand(3), expected), "of two ranks, no random numbers are this one's"
        for key, value in {"lr": True, "amsgrad": 1, "betas": [0.5]}.items():
            about = whole.about | {"optimizer": whole.about["optimizer"] | {key: value}}
            (folder / "manifest.json").write_text(manifest.seal(about, whole.files, whole.tensors))
            with refused("manifest.json", key):
                load(folder, other)


def test_the_loss_scale_is_taken_up():
    """A run in fp16 goes on with the scale that it had found, and not with the first one; others have none."""
    config = configure(**SMALL, strategy="single")
    task = make_task(config)

    def make(precision):
        setup = Setup(make_mesh({"data": 1}, "cpu"), config.options, precision)
        return config.strategy_class(task.make_model(), task.make_optimizer, setup)

    with process_group("cpu"):
        one, other, plain = make("fp16"), make("fp16"), make("fp32")
        one.scaler.scale(torch.ones(()))
        one.scaler.update(512.0)
        other.load_global_state(json.loads(json.dumps(one.global_state())))
        assert other.scaler.state_dict()["scale"] == 512.0, "the scale that the run had found"
        other.load_global_state(plain.global_state())
        assert other.scaler.state_dict()["scale"] == 512.0, "a run without scaling has nothing to take up"


def test_whole_tensors_are_read_as_they_were_written(tmp_path):
    """Of every type, by one process, which is told nothing of a process group that it has not."""
    tensors = {str(kind): torch.arange(6).view(2, 3).to(kind) for kind in (torch.int64, torch.bfloat16, torch.float32)}
    pieces = [p for name, tensor in tensors.items() for p in pieces_of(f"model.{name}", tensor, whole(tensor))]
    pieces += pieces_of("random.0", torch.ones(2), whole(torch.ones(2)))
    how = {"storage_writer": Writer(tmp_path / "a", {"step": 1}), "planner": SavePieces(pieces, 1), "no_dist": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({piece.key: piece.tensor for piece in pieces}, **how)
        warnings.simplefilter("error")
        found = checkpoint.whole_tensors(tmp_path / "a")
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), "the numbers of each"
    made = manifest.read(tmp_path / "a")
    for kind in ("float99", "load"):  # torch has no such name, or not of a type
        odd = {name: msgspec.structs.replace(tensor, dtype=kind) for name, tensor in made.tensors.items()}
        (tmp_path / "a" / "manifest.json").write_text(manifest.seal(made.about, made.files, odd))
        with refused("manifest.json", kind):
            Reader(tmp_path / "a").read_metadata()


def test_messages_of_a_checkpoint_in_the_background_have_their_own_group(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: f"a group of {backend}")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint.dcp, "async_save", lambda tensors, **how: asked.update(how))
    strategy = SimpleNamespace(
        device=torch.device("cpu"), parts=list, optimizer_state=dict, global_state=lambda: {"optimizer": {"lr": 0.5}}
    )
    Saver(background=True).save(tmp_path / "checkpoint-000001", strategy, {"step": 1})
    assert asked["process_group"] == "a group of gloo", "they would meet those of training"
    about = {"step": 1, "world_size": 1, "optimizer": {"lr": 0.5}}
    assert asked["storage_writer"].about == about, "what the manifest says"


def test_the_lock_names_who_writes(tmp_path, monkeypatch):
    (tmp_path / ".lock").write_text("process 1234567890 on another machine, which has been killed")
    held = Lock(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}", "one name"
    held.release()
    assert (tmp_path / ".lock").read_text() == "" and held.file.closed, "released"

    def refuse(number):
        def lockf(*about):
            raise OSError(number, os.strerror(number))

        return lockf

    (tmp_path / ".lock").write_text("process 7 on a node")
    for number in (errno.EACCES, errno.EAGAIN):
        monkeypatch.setattr(lock.fcntl, "lockf", refuse(number))
        with refused(str(tmp_path), "process 7 on a node"):
            Lock(tmp_path)
    monkeypatch.setattr(lock.fcntl, "lockf", refuse(errno.ENOLCK))
    Lock(tmp_path).release()  # a file system without locks keeps nobody out
