"""The loop and the run directory: the course's promise, resuming, interruptions, full disks, dying ranks."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import ranks_of, start, wait_for_step
from helpers import FULL, TEXT, configure, impatient, metrics, numbers, train

from common import errors, manifest
from common.errors import UserError
from common.lab.launch import RankFailed, launch
from common.record import Record
from common.run import INTERRUPTED
from course.ddp.loading import WORKERS

IMAGES = {"task": "images", "batch_size": 12, "checkpoint_every": 0, "steps": 2, "optimizer": "sgd", "lr": 0.02}


def test_pictures_train_alike_on_one_process_and_on_several(tmp_path):
    """Loss and gradient norm of every step. (With text, from chapter to chapter: test_scripts.py, test_going_on.py.)"""
    ways = [(1, {"strategy": "single"}), (2, {"strategy": "ddp", "accumulation_steps": 3})]
    if FULL:
        ways += [(1, {"strategy": "single", "accumulation_steps": 3}), (4, {"strategy": "ddp", "by_hand": True})]
    for number, (nproc, way) in enumerate(ways):
        launch(train, nproc, ([configure(size=nproc, **IMAGES, **way, run_dir=tmp_path / str(number))],), timeout=120)
    expected, *others = (numbers(tmp_path / str(number)) for number in range(len(ways)))
    assert len(expected) == len(set(expected)) == 4 and expected[0] > 1.5
    for way, found in zip(ways[1:], others, strict=True):
        assert found == pytest.approx(expected, rel=2e-5), way


def test_the_run_directory(tmp_path):
    config = configure(size=2, **TEXT, strategy="ddp", run_dir=tmp_path / "run")
    launch(train, 2, ([config], True))
    folder = tmp_path / "run"
    names = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    assert names == ["checkpoint-000002", "checkpoint-000004", "config.json", "loss.png", "metrics.jsonl"]
    names = sorted(path.name for path in (folder / "checkpoint-000004").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert json.loads((folder / "config.json").read_text())["config"] == config.settings()
    records = metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    speeds = [12 * 16 / record["step_seconds"] for record in records]
    told = [record["tokens_per_second"] for record in records]
    assert told == pytest.approx(speeds), "tokens of all ranks per second"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def family(process: subprocess.Popen) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def ctrl_c(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does


def preempted(process: subprocess.Popen) -> None:
    ranks_of(process)[0].parent().terminate()  # torchrun, which sends it on to the process group of each rank


@pytest.mark.parametrize("nproc, stop", [(0, ctrl_c), (2, ctrl_c), (2, preempted)])
def test_who_is_asked_to_stop_leaves_a_usable_checkpoint(nproc, stop, tmp_path):
    """With processes that load data, which go on until their rank ends them."""
    more = ["--distributed", "--loading=shard-stream-workers"] if nproc else []
    process = start("--steps=100000", "--run-dir=run", *more, nproc=nproc, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 3)
    everyone = family(process)
    assert len(everyone) == 1 + nproc + nproc * WORKERS
    stop(process)
    _, errors = process.communicate(timeout=300)
    assert errors.count("go on with --resume --run-dir run") == 1, errors
    assert process.returncode == (1 if nproc else INTERRUPTED), errors  # torchrun has an exit code of its own
    assert "Traceback" not in errors.split("go on with --resume")[0], errors
    assert "SIGKILL" not in errors, errors
    assert psutil.wait_procs(everyone, timeout=100)[1] == []
    done = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / f"checkpoint-{done:06d}").exists() and (tmp_path / "run" / "loss.png").exists()
    again = start("--resume", "--strategy=single", f"--steps={done + 1}", "--run-dir=run", cwd=tmp_path)
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, done + 2))


def test_a_rank_that_is_killed_ends_them_all(tmp_path, monkeypatch):
    """Processes that load data, too, and in silence; what rank 0 has to say stands last, however late it says it."""
    into_report = errors.into_report
    monkeypatch.setattr(errors, "into_report", lambda *line: time.sleep(3) or into_report(*line))
    line = ["--steps=100000", "--run-dir=run", "--distributed", "--loading=shard-stream-workers"]
    process = start(*line, nproc=2, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 3)
    everyone = family(process)
    assert len(everyone) == 1 + 2 + 2 * WORKERS
    ranks_of(process)[1].kill()
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "rank      : 1" in said and "SIGKILL" in said
    (line,) = (line for line in said.splitlines() if "error: another rank has died" in line)
    assert re.search(r"\(Connection (closed|reset) by peer\).* go on with --resume --run-dir run$", line)
    assert line.startswith("  traceback : error: ") and set(said[said.index(line) :].split("\n")[1]) == {"="}
    assert "RuntimeError" not in said and "DataLoader worker" not in said  # one line, and no traceback
    assert psutil.wait_procs(everyone, timeout=100)[1] == []
    newest = manifest.checkpoints(tmp_path / "run")[-1]
    assert manifest.step_of(newest) >= 2 and manifest.damage(newest) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_torchrun_that_is_killed_leaves_no_rank_behind(tmp_path):
    process = start("--steps=100000", "--run-dir=run", "--distributed", nproc=2, cwd=tmp_path)
    wait_for_step(tmp_path / "run", 3)
    ranks = ranks_of(process)
    os.kill(process.pid, signal.SIGKILL)
    left = psutil.wait_procs(ranks, timeout=100)[1]
    for rank in left:
        rank.kill()
    assert left == []
    done = metrics(tmp_path / "run")[-1]["step"]
    assert manifest.damage(tmp_path / "run" / f"checkpoint-{done:06d}") == ""


def stops_answering(config) -> None:
    """Train; rank 1 is stopped after the third step, and only then rank 0 loses its patience."""
    log, process = Record.log, torch.tensor(os.getpid())
    dist.broadcast(process, src=1)

    def logged(record, step, *numbers):
        log(record, step, *numbers)
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if step == 2:
            while psutil.Process(int(process)).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            impatient(1.0)

    Record.log = logged
    train([config])


def test_a_rank_that_does_not_answer_is_named(tmp_path):
    config = configure(size=2, **TEXT, strategy="ddp", run_dir=tmp_path / "run", timeout=123)
    with pytest.raises(RankFailed, match="rank 0 of 2: LostPeer: rank 1 ") as failure:
        launch(stops_answering, 2, (config,), timeout=100)
    said = str(failure.value)
    assert not [word for word in ("123 s", "--timeout", f"--resume --run-dir {tmp_path}/run") if word not in said], said
    assert "Timed out waiting" not in said


@pytest.mark.parametrize(
    "name, place",
    [("fsync", ".distcp"), ("fsync", "manifest.json"), ("fsync", ".partial"), ("replace", ""), ("rename", "")],
)
def test_a_checkpoint_that_the_disk_did_not_take_is_none(name, place, tmp_path, monkeypatch):
    """A disk may fail after all was written: as a piece, the manifest or the folder is synced, or gets its name."""
    config = configure(run_dir=tmp_path / "run", **TEXT | {"steps": 2, "strategy": "single", "checkpoint_every": 1})
    before = getattr(os, name)

    def fail(*about, **more):
        path = os.readlink(f"/proc/self/fd/{about[0]}") if name == "fsync" else str(about[0])
        if "checkpoint-" in path and path.endswith(place):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return before(*about, **more)

    monkeypatch.setattr(os, name, fail)
    outcome = launch(train_until_refused, 1, (config,))[0]
    if outcome is None:
        assert name != "fsync", "a failing disk was not noticed"
        return  # not what this code calls
    assert "Input/output error" in outcome and "\n" not in outcome
    assert manifest.checkpoints(tmp_path / "run") == [], "a checkpoint that may not be on the disk"


def train_until_refused(config) -> str | None:
    try:
        train([config])
    except UserError as error:
        return str(error)
    return None


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """What there is of checkpoints, those that are being written included."""
    found = [path for path in folder.glob("*checkpoint-*/*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_full_disk_loses_nothing(tmp_path):
    """The first checkpoints fit, then there is no room: as on a full disk, writing fails, here at a size limit."""
    config = configure(**TEXT, strategy="single", run_dir=tmp_path / "run")
    launch(train, 1, ([config],))
    before = checkpoint_files(tmp_path / "run")
    process = start(
        "--resume",
        "--steps=8",
        "--run-dir=run",
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: run/checkpoint-000006 ") and "--resume" in line, errors
    assert "Traceback" not in errors
    assert checkpoint_files(tmp_path / "run") == before
    process = start("--resume", "--steps=6", "--run-dir=run", cwd=tmp_path)
    assert process.wait(timeout=300) == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
