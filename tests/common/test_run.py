"""A run of one process, step by step: what it says, what a step's time is, what it hands back."""

import json
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import TEXT, configure, do_not_draw, metrics, refused

from common import manifest, run_dir
from common.errors import UserError
from common.keeper import Keeper
from common.mesh import make_mesh
from common.per_rank import PerRank
from common.progress import Progress
from common.ranks import process_group
from common.run import Run
from common.task import make_task

pytestmark = pytest.mark.usefixtures("no_launcher")


@contextmanager
def left_after_an_error():
    """process_group leaves the group after success only: of a process that fails, others would wait in vain."""
    try:
        yield
    except BaseException:
        dist.destroy_process_group()
        raise


@contextmanager
def alone(folder: Path, **settings):
    """A run in a process group of one; it draws no loss curve."""
    config = configure(**TEXT | {"checkpoint_every": 0} | settings, strategy="single", run_dir=folder)
    with pytest.MonkeyPatch.context() as patch, process_group("cpu"), left_after_an_error():
        patch.setattr(run_dir, "loss_curve", run_dir.loss_curve)  # so that it is restored
        do_not_draw()
        task = make_task(config)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
        yield Run(config, strategy, task)


def train(run: Run, losses=(4.0, 3.0, 2.0, 1.0), norm: float = 1.0) -> None:
    with run:
        run.strategy.step(run.task.micro_batches(0, run.strategy))  # a checkpoint has the optimizer's state
        for step in run.steps:
            run.end_step(torch.tensor(losses[step]), torch.tensor(norm))


def test_what_a_run_says(tmp_path, capsys):
    with alone(tmp_path / "run", log_every=3) as run:
        train(run)
    told = [line for line in capsys.readouterr().err.splitlines() if "|" not in line and line.strip()]
    folder = tmp_path / "run"
    words = ("single", "cpu", str(folder)), ("3/4", "loss"), ("4/4", "loss"), (str(folder),)
    for line, asked in zip(told, words, strict=True):  # --log-every 3, and the last step
        assert not [word for word in asked if word not in line], line
    about = manifest.read(folder / "checkpoint-000004").about
    kept = {name: about[name] for name in ("step", "examples", "strategy", "implementation", "mesh", "world_size")}
    assert about["settings"] == run.config.settings(), "what a run that goes on from here takes over"
    assert kept == {
        "step": 4, "examples": 48, "strategy": "single", "implementation": "pytorch", "mesh": {"data": 1},
        "world_size": 1,
    }  # fmt: skip


def test_a_run_hands_back_the_signals_that_it_took(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with alone(tmp_path / "run", steps=1) as run:
        with run:
            during = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            for _ in run.steps:
                run.end_step(torch.ones(()), torch.ones(()))
        assert during == (run.progress.ask_to_stop,) * 2 != before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before, "Ctrl-C works as before"


def test_losses_and_norms_that_are_no_numbers(tmp_path):
    with alone(tmp_path / "run") as run:
        train(run, norm=float("inf"))
    assert [record["grad_norm"] for record in metrics(tmp_path / "run")] == [None] * 4, "JSON has no infinity"
    for loss in ("nan", "inf", "-inf"):
        with alone(tmp_path / loss) as run, refused(loss, "step 3", "--lr", "0.002"):
            train(run, [4.0, 3.0, float(loss)])


def test_a_steps_time_leaves_nothing_out_but_checkpoints_reports_and_validation(tmp_path, monkeypatch):
    """Agreeing on whether to stop takes a second of every step, too: of the one after it."""
    now = [0.0]

    def passes(seconds, then=None):
        now[0] += seconds
        return then

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Progress, "stops", lambda progress: passes(1))
    monkeypatch.setattr(Keeper, "save", lambda keeper, done: passes(10))
    monkeypatch.setattr("common.record.Usage", lambda config, device: lambda seconds: {})
    monkeypatch.setattr("common.record.validate", lambda strategy, text, at_once: passes(1000, float(at_once)))
    monkeypatch.setattr(PerRank, "report", lambda watch: passes(100, ([], [])))
    often = {"log_every": 3, "validate_every": 4, "checkpoint_every": 6, "steps": 8}
    with alone(tmp_path / "run", **often, accumulation_steps=3) as run:
        run.strategy.data_size = 2
        for _ in run.steps:
            passes(0.5)
            run.end_step(torch.ones(()), torch.ones(()))
    records = metrics(tmp_path / "run")
    assert [record["step_seconds"] for record in records] == [0.5, *[1.5] * 5, 0.5, 1.5], (
        "seconds: after a checkpoint, anew"
    )
    assert [record["tokens_per_second"] for record in records[:2]] == [2 * 12 * 16, 128], "batch x context in that time"
    at_once = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert at_once == [2, 2], "examples at once: as many as in a rank's micro-batch, 12 by 2 and by 3"


class OnAGPU(torch.Tensor):
    """A number on a device that works while the host goes on. `reads` are the numbers that the host has waited for."""

    device, reads = torch.device("cuda", 0), []

    def __float__(self):
        self.reads.append(self.as_subclass(torch.Tensor).item())
        return self.reads[-1]


def test_on_a_gpu_the_host_reads_a_step_when_the_next_one_is_queued(tmp_path):
    seen = []
    with alone(tmp_path / "run") as run:
        for step in run.steps:
            loss, norm = (torch.tensor(float(number)).as_subclass(OnAGPU) for number in (step, 10 + step))
            run.end_step(loss, norm)
            seen.append(list(OnAGPU.reads))
    assert seen == [[], [0, 10], [0, 10, 1, 11], [0, 10, 1, 11, 2, 12, 3, 13]], "the last one has none after it"
    assert [record["loss"] for record in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_pictures_are_counted_one_by_one(tmp_path):
    with alone(tmp_path / "run") as run:
        run.config.task = "images"
        assert Run(run.config, run.strategy, run.task).record.per_step == 12, (
            "examples of a step, whatever the context is"
        )


@pytest.mark.parametrize("said", ["Timed out waiting 3000ms for recv", "Application timeout caused pair closure"])
@pytest.mark.parametrize("gone", [(), ("rank 1", "rank 3 on b")])
def test_a_timeout_is_told_whatever_gloo_says(said, gone, tmp_path, monkeypatch):
    monkeypatch.setattr("common.run.silent", lambda: list(gone))
    with alone(tmp_path / "run") as run, pytest.raises(UserError) as error, run:
        raise RuntimeError(said)
    told = str(error.value)
    words = *(gone or ["--check-collectives"]), "300 s", "--timeout", "start again"
    assert not [word for word in words if word not in told], told


def test_what_a_run_refuses(tmp_path, monkeypatch):
    with alone(tmp_path / "a", max_norm=0.5) as run:
        assert run.strategy.max_norm == 0.5, "--max-norm reaches the strategy"
    with pytest.raises(UserError, match="--batch-size 12"), alone(tmp_path / "b", accumulation_steps=5):
        pytest.fail("a batch that cannot be divided")
    monkeypatch.setattr("common.strategy.can_compute", lambda device, precision: False)
    with pytest.raises(UserError, match="--precision fp32"), alone(tmp_path / "c"):
        pytest.fail("a precision that the device does not have")


def test_batches_begin_where_the_run_is_and_end_with_it(tmp_path):
    asked = []

    def load(dataset, plan, start):
        try:
            asked.append((plan.batch_size, start))
            yield []
        finally:
            asked.append("closed")

    with alone(tmp_path / "run", steps=2) as run, run:
        run.progress.done = 1
        next(run.batches(load))
        run.progress.done, kept = 2, run.batches
        assert asked == [(12, 1)], "the global batch, and the first step that is read"
    assert asked[1:] == ["closed"] and kept, "a loader's processes end with the run"


@pytest.mark.parametrize("how", ["closed", "reset"])
def test_a_lost_rank_and_how_to_go_on(how, tmp_path):
    """The folder of the run may be on another node, without a checkpoint, or with one. What reads data ends."""
    ended = []

    def load(*_):
        try:
            yield []
        finally:
            ended.append(True)

    for there, advice in ((False, "start again"), (True, "go on with --resume --run-dir")):
        folder = tmp_path / str(there)
        with alone(folder) as run, pytest.raises(UserError, match=f"Connection {how} by peer.*; then {advice}"), run:
            next(run.batches(load))
            if there:
                (folder / "checkpoint-000002").mkdir()
            raise RuntimeError(f"[pair.cc:537] Connection {how} by peer [127.0.0.1]:1234")
        assert ended == [True] * (1 + there)
        if not there:
            run.keeper.path = tmp_path / "elsewhere"
            assert run.keeper.how_to_resume().startswith(f"go on with --resume --run-dir {tmp_path}/elsewhere if there")
    with alone(tmp_path / "other") as run, pytest.raises(ValueError, match="^the program's own$"), run:
        raise ValueError("the program's own")


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, monkeypatch):
    losses, at_once = iter([3.0, 1.0, 2.0, 2.5, 1.5, 1.2]), []
    monkeypatch.setattr("common.record.validate", lambda *how: at_once.append(how[2]) or next(losses))
    often = {"steps": 4, "checkpoint_every": 1, "validate_every": 1, "keep": 1, "validate_batch_size": 5}
    with alone(tmp_path / "run", keep_best=True, **often) as run:
        train(run)
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path / "run")] == [2, 4]
    with alone(tmp_path / "run", keep_best=True, resume=True, **often | {"steps": 6}) as run:
        train(run, losses=[1.0] * 6)
    assert [manifest.step_of(path) for path in manifest.checkpoints(tmp_path / "run")] == [2, 6], "still the best"
    assert at_once == [5] * 6


def test_a_run_of_epochs_has_their_whole_batches_as_steps(tmp_path):
    config = configure(epochs=2, batch_size=500, task="images", strategy="single", run_dir=tmp_path)
    assert make_task(config).dataset.size == 1797 and config.steps == 7, "2 x 1,797 examples in batches of 500"
    with refused("--steps", "--epochs"):
        configure(**TEXT, epochs=2, strategy="single", run_dir=tmp_path)


def test_a_profile_has_shapes_memory_and_stacks_of_the_steps_that_were_asked_for(tmp_path):
    with alone(tmp_path / "run", steps=14, profile=2) as run:
        train(run, losses=[1.0] * 14)
    (file,) = (tmp_path / "run" / "profile").glob("rank0.*.pt.trace.json")
    events = json.loads(file.read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#10", "ProfilerStep#11"}
    shapes = [event for event in events if event.get("args", {}).get("Input Dims")]
    stacks = [event for event in events if event.get("cat") == "python_function"]
    memory = [event for event in events if event["name"] == "[memory]"]
    assert shapes and stacks and memory
    (tmp_path / "b").mkdir(), (tmp_path / "b" / "profile").touch()
    with refused("profile", "File exists"), alone(tmp_path / "b", steps=14, profile=2):
        pytest.fail("a profile that nobody could write")
    with refused("--profile", "10"):
        configure(**TEXT, profile=1, strategy="single", run_dir=tmp_path)
