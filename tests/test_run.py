"""A run of one process, step by step: what it says, what a step's time is, what it hands back; and its directory."""

import json
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import TEXT, configure, do_not_draw, metrics

from common import manifest, run_dir
from common.errors import UserError
from common.mesh import make_mesh
from common.per_rank import PerRank
from common.ranks import process_group
from common.run import Run
from common.run_dir import RunDirectory
from common.task import make_task

pytestmark = pytest.mark.usefixtures("no_launcher")


@contextmanager
def alone(folder: Path, **settings):
    """A run in a process group of one; it draws no loss curve."""
    config = configure(**TEXT | {"checkpoint_every": 0} | settings, strategy="single", run_dir=folder)
    with pytest.MonkeyPatch.context() as patch, process_group("cpu"):
        patch.setattr(run_dir, "loss_curve", run_dir.loss_curve)  # so that it is restored
        do_not_draw()
        task = make_task(config)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, make_mesh(config.axes), config.options)
        yield Run(config, strategy, task)


def train(run: Run, losses=(4.0, 3.0, 2.0, 1.0), norm: float = 1.0) -> None:
    with run:
        run.strategy.step(run.task.micro_batches(0, run.strategy))  # a checkpoint has the optimizer's state
        for step in run.steps():
            run.log(step, torch.tensor(losses[step]), torch.tensor(norm))


def test_what_a_run_says(tmp_path, capsys):
    with alone(tmp_path / "run", log_every=3) as run:
        train(run)
    told = [line.partition("  loss")[0] for line in capsys.readouterr().err.splitlines() if "step/s" not in line]
    folder = tmp_path / "run"
    assert [line for line in told if line.strip()] == [
        f"single on 1 process(es), cpu: {folder}", "step 3/4", "step 4/4", f"done: {folder}"
    ], "lines of --log-every 3 and of the last step"  # fmt: skip
    about, _ = manifest.read(folder / "checkpoint-000004")
    kept = {name: about[name] for name in ("step", "examples", "strategy", "implementation", "mesh", "world_size")}
    assert kept == {
        "step": 4, "examples": 48, "strategy": "single", "implementation": "pytorch", "mesh": {"data": 1},
        "world_size": 1,
    }  # fmt: skip
    with alone(folder, resume=True, steps=5, log_every=1) as run:
        train(run, [0.5] * 5)
    said = capsys.readouterr().err
    assert "going on after step 4\n" in said and "step 5/5  loss 0.5000  " in said and "restarted" not in said


def test_a_run_hands_back_the_signals_that_it_took(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with alone(tmp_path / "run", steps=1) as run:
        with run:
            during = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            for step in run.steps():
                run.log(step, torch.ones(()), torch.ones(()))
        assert during == (run._ask_to_stop,) * 2 != before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before, "Ctrl-C works as before"


def test_losses_and_norms_that_are_no_numbers(tmp_path):
    with alone(tmp_path / "run") as run:
        train(run, norm=float("inf"))
    assert [record["grad_norm"] for record in metrics(tmp_path / "run")] == [None] * 4, "JSON has no infinity"
    with alone(tmp_path / "nan") as run:
        with pytest.raises(UserError, match="^the loss is nan at step 3; try a smaller --lr than 0.002$"):
            train(run, [4.0, 3.0, float("nan")])


def test_reports_and_validation_are_no_part_of_a_steps_time(tmp_path, monkeypatch):
    now = [0.0]

    def passes(seconds, then):
        now[0] += seconds
        return then

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("common.run.Usage", lambda config, device: lambda seconds: {})
    monkeypatch.setattr("common.run.validate", lambda *args: passes(1000, 1.0))
    monkeypatch.setattr(PerRank, "report", lambda watch: passes(100, ([], [])))
    with alone(tmp_path / "run", log_every=1, validate_every=2) as run, run:
        for step in run.steps():
            passes(0.5, None)
            run.log(step, torch.ones(()), torch.ones(()))
    records = metrics(tmp_path / "run")
    assert [record["step_seconds"] for record in records] == [0.5] * 4, "seconds"
    assert [record["tokens_per_second"] for record in records] == [2 * 12 * 16] * 4, "batch x context in half a second"


def test_pictures_are_counted_one_by_one(tmp_path):
    with alone(tmp_path / "run") as run:
        run.config.task = "images"
        assert Run(run.config, run.strategy, run.task).per_step == 12, "examples of a step, whatever the context is"


def test_a_sample_is_as_long_as_asked_for(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("common.run.sample", lambda model, *about: str(asked.append(about)))
    with alone(tmp_path / "run", sample=30) as run:
        train(run)
    assert asked == [(16, 30)] * 2, "context and bytes, before and after training"


def test_who_did_not_answer_is_told(monkeypatch):
    run = SimpleNamespace(config=SimpleNamespace(timeout=3.0))
    for gone, told in {
        (): "ranks waited for each other, within 3 s (--timeout): their collectives differ; --check-collectives shows",
        ("rank 1", "rank 3 on b"): "rank 1 and rank 3 on b did not answer within 3 s (--timeout): see what happened",
    }.items():
        monkeypatch.setattr("common.run.silent", lambda gone=gone: list(gone))
        assert Run._who_is_silent(run).startswith(told)


@pytest.mark.parametrize("said", ["Timed out waiting 3000ms for recv", "Application timeout caused pair closure"])
def test_a_timeout_is_told_whatever_gloo_says(said, tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.silent", lambda: ["rank 1"])
    with alone(tmp_path / "run") as run, pytest.raises(UserError, match="rank 1 did not answer"), run:
        raise RuntimeError(said)


# --- the directory ----------------------------------------------------------------------------------------------


def begun(folder: Path, **settings) -> RunDirectory:
    config = configure(run_dir=folder / "new", strategy="single", **settings)
    config.run_dir = str(folder)
    return RunDirectory(config, 1)


def test_a_run_that_begins_anew_begins_with_nothing(tmp_path):
    """In a folder where another was killed before its first checkpoint was whole."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / ".checkpoint-000001.partial").mkdir()
    (tmp_path / ".checkpoint-000001.partial" / "file").touch()
    directory = begun(tmp_path)
    assert not manifest.unfinished(tmp_path), "what was left of a checkpoint"
    assert not directory.goes_on and (tmp_path / "metrics.jsonl").read_text() == "", "metrics of the run before"
    assert re.match(r"process \d+ on ", (tmp_path / ".lock").read_text()), "who is writing here"
    directory.finish()
    assert (tmp_path / ".lock").read_text() == "", "nobody any more"
    assert not (tmp_path / "loss.png").exists(), "without a step there is nothing to draw"


def test_the_loss_curve():
    (ax,) = run_dir.loss_curve([{"step": step, "loss": 1 / step} for step in (2, 4, 5)]).axes
    (line,) = ax.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2, 4, 5], [0.5, 0.25, 0.2])
    assert ax.get_ylim()[0] == 0 and ax.get_xlabel() == "optimizer step"


def test_a_launch_knows_the_runs_that_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir.time, "strftime", lambda form: "now-")
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
        Path(name, "config.json").write_text(json.dumps({"launch": launches}))
    assert [run_dir.restarts(Path(name)) for name in names] == [False, True, False]
    assert run_dir.new_run_dir(SimpleNamespace(strategy="ddp", implementation="pytorch")) == names[1], "its own"
