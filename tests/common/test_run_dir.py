"""The run directory: what stands in it and when, what a resumed run forgets, and which launch a run belongs to."""

import errno
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import NoFigure, configure, metrics, refused, write_facts

from common import manifest, run_dir
from common.errors import UserError
from common.lab.launch import launch
from common.options import LATEST
from common.run_dir import RunDirectory

pytestmark = pytest.mark.usefixtures("no_launcher")


def begun(folder: Path, **settings) -> RunDirectory:
    config = configure(run_dir=folder / "new", strategy="single", **settings)
    config.run_dir = str(folder)
    return RunDirectory(config, 1)


def test_a_run_that_begins_anew_begins_with_nothing(tmp_path, monkeypatch):
    """In a folder where another was killed before its first checkpoint was whole."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / ".checkpoint-000001.partial").mkdir()
    (tmp_path / ".checkpoint-000001.partial" / "file").touch()
    config = configure(run_dir=tmp_path / "new", strategy="single")
    config.run_dir = str(tmp_path)

    def is_held(folder):
        raise UserError(f"a living run writes to {folder}")

    with monkeypatch.context() as patch, refused("living"):
        patch.setattr(run_dir, "Lock", is_held)
        RunDirectory(config, 1)
    assert manifest.unfinished(tmp_path), "what another one is writing"
    directory = begun(tmp_path)
    assert not manifest.unfinished(tmp_path), "what was left of a checkpoint"
    assert not directory.resumes and (tmp_path / "metrics.jsonl").read_text() == "", "metrics of the run before"
    assert re.match(r"process \d+ on ", (tmp_path / ".lock").read_text()), "who is writing here"
    directory.finish()
    assert (tmp_path / ".lock").read_text() == "", "nobody any more"
    assert not (tmp_path / "loss.png").exists(), "without a step there is nothing to draw"


def test_what_is_written_is_there_at_once_and_whole(tmp_path, monkeypatch):
    synced, shown = [], []
    monkeypatch.setattr("common.run_dir.os.fsync", lambda number: synced.append(os.fstat(number).st_ino))
    config = configure(run_dir=tmp_path / "new", strategy="ddp", by_hand=True)
    config.run_dir = str(tmp_path)
    directory = RunDirectory(config, 3, ["b", "a", "b"])
    facts = json.loads((tmp_path / "config.json").read_text())
    assert {name: value for name, value in facts.items() if name != "config"} == {
        "strategy": "ddp", "implementation": "by-hand", "mesh": {"data": 1}, "world_size": 3, "launch": ["a", "b"],
        "torch": torch.__version__, "python": ".".join(map(str, sys.version_info[:3])),
    }  # fmt: skip
    assert synced == [(tmp_path / "config.json").stat().st_ino], "the file was on the disk before it got its name"
    directory.board = SimpleNamespace(add_scalar=lambda *about: shown.append(about))
    directory.log({"step": 1, "loss": 1.5, "examples": 8, "grad_norm": None, "ranks": [{"host": "a"}]})
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, "loss": 1.5'), "at once"
    assert shown == [("loss", 1.5, 1), ("examples", 8, 1)], "numbers, with their step"
    directory.sync_metrics()
    assert synced[1:] == [(tmp_path / "metrics.jsonl").stat().st_ino], "metrics on the disk"

    def fails(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        directory._replace("config.json", fails)
    assert json.loads((tmp_path / "config.json").read_text()) == facts, "a file is whole or as it was"
    assert [path.name for path in tmp_path.glob(".*.partial")] == [], "what was begun"


def test_what_a_resumed_run_does_again_is_forgotten(tmp_path, monkeypatch):
    directory = begun(tmp_path, keep=2)
    for step in (1, 2, 3):
        directory.log({"step": step, "loss": 1.0, "grad_norm": 1.0, "step_seconds": 0.5})
    for step in (1, 2, 3, 4):
        (tmp_path / manifest.name_of(step)).mkdir()
    directory.metrics.write('{"step": 4, "lo')
    directory.metrics.flush()
    directory.drop_after(3)
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path)] == [1, 2, 3], "after step 3"
    directory.keep_newest()
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path)] == [2, 3], "--keep 2"
    directory.drop_after(2)
    directory.log({"step": 3, "loss": 0.5, "grad_norm": 1.0, "step_seconds": 0.5})
    assert [(record["step"], record["loss"]) for record in metrics(tmp_path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    drawn = []
    monkeypatch.setattr(run_dir, "loss_curve", lambda records: drawn.append(records) or NoFigure())
    directory.finish()
    assert len(drawn[0]) == 3 and (tmp_path / "loss.png").exists(), "the loss curve"
    assert directory.lock.file.closed, "nobody holds the folder"


def test_what_the_disk_refuses_is_told_and_checkpoints_are_removed_as_a_whole(tmp_path, monkeypatch):
    directory, removed = begun(tmp_path, keep=1), []
    for there in (False, True):
        with refused(str(tmp_path), "No space left on device", "--run-dir") as error, directory.disk_errors():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
        assert ("--resume" in str(error.value)) == there, "it goes on from checkpoints, where there are some"
        for step in (1, 2, 3):
            (tmp_path / manifest.name_of(step)).mkdir(exist_ok=True)
    monkeypatch.setattr(manifest, "remove", lambda folder: removed.append(folder.name[-1]) or folder.rmdir())
    directory.drop_after(2)
    directory.keep_newest()
    assert removed == ["3", "1"], "so that at no moment a part of one is there"


def test_a_run_goes_on_after_a_restart_where_there_is_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "restarts", lambda folder: True)
    directory = begun(tmp_path)
    assert (directory.restarted, directory.resumes, directory.checkpoints) == (False, False, []), "no checkpoint yet"
    for step in (1, 2):
        (tmp_path / manifest.name_of(step)).mkdir()
    directory.finish()
    config = configure(run_dir=tmp_path / "new", strategy="single")
    config.run_dir, config.resume = str(tmp_path), "1"
    directory = RunDirectory(config, 1)
    assert (directory.restarted, directory.resumes, directory.is_named) == (True, True, False)
    newest_first = [tmp_path / "checkpoint-000002", tmp_path / "checkpoint-000001"]
    assert directory.checkpoints == newest_first, "whatever --resume has said when the first ranks were started"
    monkeypatch.setattr(run_dir, "restarts", lambda folder: False)
    assert RunDirectory(config, 1).checkpoints == newest_first[1:], "the one that --resume names"


def test_what_cannot_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("other/checkpoint-000001", "begun"):
        Path(folder).mkdir(parents=True)
    write_facts(Path("begun"), {"steps": 3})
    mine = {"settings": {"lr": 7}}
    about = {"mine": mine}
    read = lambda folder: SimpleNamespace(about=about.get(folder.name, {}), files={})  # noqa: E731
    monkeypatch.setattr(manifest, "read", read)
    for folder in ("begun", "other"):  # and what else: test_going_on.py, test_bad_input.py
        with refused("--resume", folder):
            run_dir.saved_settings({"resume": LATEST, "run_dir": folder})
    Path("a/mine").mkdir(parents=True)
    for asked, expected in (("", "a"), ("elsewhere", "elsewhere")):
        found = run_dir.saved_settings({"resume": "a/mine", "run_dir": asked})
        assert found == {"lr": 7, "run_dir": expected}, "the checkpoint's settings, and where the run goes on"
    for name in ("late", "early"):
        Path("runs", name, "checkpoint-000001").mkdir(parents=True)
        write_facts(Path("runs", name), {"steps": 3})
    os.utime("runs/early/config.json", (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "damage_at_sight", lambda folder: "damaged" * folder.name.endswith("2"))
        Path("runs/late/checkpoint-000002").mkdir()
        assert run_dir.saved_settings({"resume": LATEST})["steps"] == 3, "from the newest that is whole"
        with refused("--resume", "damaged"):
            run_dir.saved_settings({"resume": "2"})
    found = run_dir.saved_settings({"resume": LATEST})
    assert (found["steps"], found["run_dir"]) == (3, "runs/late"), "of the runs under runs/ the newest"


def test_a_folder_that_holds_a_run_or_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    for there in (False, True):  # a checkpoint from which it can go on
        with refused("--run-dir run") as refusal:
            run_dir.require_writable(Path("run"), "")
        assert ("--resume" in str(refusal.value)) == there
        with refused("--resume", "run") as refusal:
            configure("--resume --run-dir run")
        assert "leave --resume out" not in str(refusal.value), "the one sends to the other"
        Path("run/checkpoint-000001").mkdir(exist_ok=True)
    run_dir.require_writable(Path("run"), "2")  # of this run: it goes on
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "restarts", lambda folder: folder == Path("run"))
        run_dir.require_writable(Path("run"), "")  # begun by this very launch, whose ranks torchrun has started again
    tried = []
    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "Lock", lambda folder: SimpleNamespace(release=lambda: tried.append(folder)))
        run_dir.require_writable(Path("free"), "")
    assert tried == [Path("free")], "whether a living run writes there is asked, and the lock is given back"
    for number, said in ((errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied")):

        def full(dir, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(run_dir.tempfile, "TemporaryFile", full)
        with refused("--run-dir new", said):
            run_dir.require_writable(Path("new"), "")


def test_a_launch_knows_the_runs_that_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir.time, "strftime", lambda form: {"%Y%m%d-%H%M%S-": "now-"}[form])
    names = []
    for kind in ("pytorch", "pytorch", "by-hand"):
        names.append(run_dir.new_run_dir(SimpleNamespace(strategy="ddp", implementation=kind)))
        Path(names[-1]).mkdir(parents=True)
    assert names == ["runs/now-ddp", "runs/now-ddp-2", "runs/now-ddp-by-hand"]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert run_dir.this_launch() == "", "without torchrun"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/logs/none_abc/attempt_0/1/error.json")
    assert run_dir.this_launch() == "none_abc", "the same in each attempt, and for each rank"
    for name, launches in ((names[1], ["none_abc", "none_xyz"]), (names[0], ["none_xyz"])):
        write_facts(Path(name), launch=launches)
    assert [run_dir.restarts(Path(name)) for name in names] == [False, True, False]
    assert run_dir.new_run_dir(SimpleNamespace(strategy="ddp", implementation="pytorch")) == names[1], "its own"


def opened(config, *launches) -> list[tuple]:
    """The run's folder as this rank has it in each of these launches: the first leaves a checkpoint."""
    found = []
    for names in launches:
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"/logs/{names[dist.get_rank()]}/attempt_0/0/error.json"
        directory = run_dir.open_run(config)
        found.append((directory.resumes, directory.restarted, directory.is_named, directory.checkpoints))
        directory.finish()
        (directory.path / manifest.name_of(1)).mkdir(exist_ok=True)
        dist.barrier()
    return found


def test_the_launch_of_any_node_goes_on_with_its_run_and_all_ranks_take_rank_0s_word(tmp_path):
    """When the node of rank 0 is lost, a rank of another one becomes rank 0."""
    config = configure(size=2, strategy="ddp", run_dir=tmp_path / "run")
    begun, again = (False, False, False, []), (True, True, False, [tmp_path / "run" / "checkpoint-000001"])
    assert launch(opened, 2, (config, ("one", "other"), ("other", "third"))) == [[begun, again]] * 2
