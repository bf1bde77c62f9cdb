"""Runs that stop and go on: bit for bit, from which checkpoint, and what is refused in one line."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Fork
from helpers import FULL, SMALL, configure, draw_masks, metrics, numbers, refused, saved, train

from common import ROOT, checkpoint, manifest
from common.errors import UserError
from common.lab.launch import launch
from common.mesh import make_mesh
from common.task import make_task
from course.ddp.loading import LOADING

SCRIPT = ROOT / "distributed_training.py"
TEXT = SMALL | {"checkpoint_every": 2, "keep": 9}
WAYS = list(LOADING) if FULL else ["shard-stream-workers"]


def with_dropout(lines: list[str], folder: Path) -> None:
    """On each rank, for each line: train five steps, and three and then two; with masks that the ranks draw."""
    draw_masks()
    for number, line in enumerate(lines):
        for end in (f"whole-{number} --steps 5", f"parts-{number} --steps 3", f"parts-{number} --steps 5 --resume"):
            line_of_run = f"{line} --run-dir {folder}/{end}"
            train([configure(line_of_run, dist.get_world_size(), dist.get_rank(), **TEXT)])
            dist.barrier()


@pytest.mark.parametrize(
    ("size", "lines"),
    [
        (
            2,
            [
                *(f"--strategy ddp --loading {name} --accumulation-steps 3" for name in WAYS),
                "--strategy fsdp --by-hand --async-checkpoint",
                *(f"--strategy {name}" for name in ("fsdp --async-checkpoint", "ddp --by-hand", "zero1") if FULL),
            ],
        ),
        (4, ["--strategy pipeline+ddp --microbatches 3"]),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(size, lines, tmp_path):
    """Losses, gradient norms, parameters, the optimizer's state and the ranks' random numbers, in every bit."""
    launch(with_dropout, size, (lines, tmp_path), timeout=180)
    for number, line in enumerate(lines):
        whole, parts = tmp_path / f"whole-{number}", tmp_path / f"parts-{number}"
        assert len(set(numbers(whole))) == 10
        assert numbers(parts) == numbers(whole), line
        one, other = (checkpoint.whole_tensors(folder / "checkpoint-000005", "") for folder in (whole, parts))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), line
    masks = [one[f"random.{rank}.0"] for rank in range(size)]
    assert not torch.equal(masks[0], masks[1])


def steps_taken(lines: list[str], folder: Path) -> list[int]:
    """On each rank, for each line: the optimizer steps that a run takes which goes on after the third for a fourth."""
    taken = []
    for number, line in enumerate(lines):
        for end in ("--steps 3", "--steps 4 --resume"):
            line_of_run = f"{line} --run-dir {folder / str(number)} {end}"
            config = configure(line_of_run, dist.get_world_size(), dist.get_rank(), **TEXT)
            calls = []
            with pytest.MonkeyPatch.context() as patch:
                step = config.strategy_class.step
                patch.setattr(
                    config.strategy_class, "step", lambda *args, step=step, c=calls: c.append(1) or step(*args)
                )
                train([config])
            dist.barrier()
        taken.append(len(calls))
    return taken


def test_only_ddp_begins_again_with_a_step_of_its_own(tmp_path):
    """The step after which it arranges its buckets anew; it is overwritten by what is loaded."""
    lines = [f"--strategy {name}" for name in ("ddp", "zero1", "ddp --by-hand", *["fsdp"] * FULL)]
    assert launch(steps_taken, 2, (lines, tmp_path), timeout=180) == [[2, 2, *[1] * (len(lines) - 2)]] * 2


def test_a_run_goes_on_with_other_strategies_on_other_numbers_of_ranks(tmp_path):
    """As one process would have trained without a stop, to rounding. The mean loss of a step on SMALL is near 5.5."""
    chain, folder = [(2, "--strategy fsdp --by-hand"), (4, "--strategy ddp")], tmp_path / "chain"
    chain += [(1, "--strategy single"), (4, "--by-hand --mesh data=2,tensor=2")]
    line = "--optimizer sgd --lr 0.3 --warmup-steps 0 --checkpoint-every 0"
    launch(train, 1, ([configure(f"{line} --strategy single", **SMALL, steps=8, run_dir=tmp_path / "whole")],))
    for number, (size, strategy) in enumerate(chain, start=1):
        more = f"--resume {strategy}" if number > 1 else f"{line} {strategy}"
        settings = {} if number > 1 else SMALL
        config = configure(more, size, **settings, steps=2 * number, run_dir=folder)
        launch(train, size, ([config],))
    records = metrics(folder)
    assert [record["step"] for record in records] == list(range(1, 9))
    assert numbers(folder) == pytest.approx(numbers(tmp_path / "whole"), rel=3e-5)
    assert records[0]["loss"] > 1.05 * records[7]["loss"], "it has learned, so a lost state would show"
    one, other = (saved(run / manifest.name_of(8)) for run in (folder, tmp_path / "whole"))
    assert one.keys() == other.keys() and any("momentum" in name for name in one)
    for name, expected in other.items():
        assert torch.allclose(one[name], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), name


# --- from which checkpoint ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one process after four steps, with a checkpoint after the second and the fourth."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    launch(train, 1, ([configure(**TEXT, steps=4, strategy="single", run_dir=folder)],))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def go_on(folder: Path, line: str = "--resume --steps 5", **more) -> list[str]:
    """What a process says that goes on with a run."""
    process = Fork(SCRIPT, *line.split(), f"--run-dir={folder}", cwd=folder.parent, **more)
    _, said = process.communicate(timeout=300)
    return said.splitlines()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(run, finished):
    flip(run / "checkpoint-000004" / "__0_0.distcp")
    said = go_on(run, "--resume 4 --steps 5")
    assert "__0_0.distcp" in said[-1] and "--resume" in said[-1], "what is wrong, and what to do"
    said = go_on(run)
    assert [line for line in said if "__0_0.distcp" in line], said
    assert [record["step"] for record in metrics(run)] == [1, 2, 3, 4, 5]
    assert numbers(run)[:8] == numbers(finished)
    assert [path.name[-1] for path in manifest.checkpoints(run)] == ["2", "4", "5"]
    assert not any(map(manifest.damage, manifest.checkpoints(run)))  # the damaged one was written again
    for folder in manifest.checkpoints(run):
        flip(folder / "manifest.json")
    said = go_on(run, "--resume --steps 9")[-1]
    assert said.startswith("error: --resume") and str(run) in said and "whole" in said, said


def test_from_a_step_and_from_a_folder(run, finished):
    other = run.parent / "other"
    said = go_on(other, f"--resume {run}/checkpoint-000002 --steps 4")
    assert said[-1] == f"done: {other}" and [record["step"] for record in metrics(other)] == [3, 4]
    assert numbers(other) == numbers(finished)[4:]
    assert [path.name[-1] for path in manifest.checkpoints(run)] == ["2", "4"]  # only read
    go_on(run, "--resume 2 --steps 3")
    assert numbers(run) == numbers(finished)[:6]
    assert [path.name[-1] for path in manifest.checkpoints(run)] == ["2", "3"]  # the fourth belonged to another future
    with refused("2, 3"):
        configure(f"--resume 4 --run-dir {run}")


def test_other_models_and_other_projects_are_refused(run):
    with refused("--layers 3", "2"):
        configure(f"--resume {run}/checkpoint-000002 --layers 3")
    facts = json.loads((run / "config.json").read_text())
    facts["config"]["width"] = 64  # the checkpoints of another run, copied here
    (run / "config.json").write_text(json.dumps(facts))
    said = go_on(run)
    assert f"{run}/checkpoint-000004" in said[-1] and "--width 32" in said[-1] and "64" in said[-1], said[-1]
    (run / "checkpoint-000004" / "manifest.json").unlink()
    with refused("checkpoint-000004", "manifest.json"):
        configure(f"--resume {run}/checkpoint-000004")
    for folder in manifest.checkpoints(run):
        shutil.rmtree(folder)
    (run / "checkpoint-000004.pt").touch()
    with refused("--resume", str(run)):
        configure(f"--resume --run-dir {run}")


def test_each_wrong_resume_says_what_to_do(run, tmp_path):
    """A checkpoint of another project, a file, a run in a checkpoint's place, a mesh of more ranks than there are."""
    other, file = tmp_path / "other", tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody else takes part
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=other, no_dist=True)
    torch.save({}, file)
    for line, words in {
        f"{other}": [f"{other}", "manifest.json"],
        f"{file}": ["--resume", f"{file}", "folder"],
        f"{run}": [f"--resume --run-dir {run}"],
        f"--run-dir {run} --mesh data=2,tensor=2 ": ["--mesh data=2,tensor=2", "4", "2"],
        f"--run-dir {run} --strategy hsdp": ["--mesh data=2", "shard"],
    }.items():
        with refused(*words):
            configure(f"--resume {line}", 2 if "tensor" in line else 1)
    said = go_on(run, "--resume --steps 5 --strategy expert --by-hand")
    assert said[-1].startswith(f"error: {run}/checkpoint-000004 ") and "model.blocks.0.mlp.experts.up" in said[-1]


def test_a_folder_belongs_to_one_living_run(run):
    """And to nobody once that has been killed."""
    hold = (
        f"from pathlib import Path; from common.lock import Lock; lock = Lock(Path({str(run)!r})); input(print('held'))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold], cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        with refused(str(process.pid)):
            configure(f"--resume --steps 5 --run-dir {run}")
        process.kill()
    configure(f"--resume --steps 5 --run-dir {run}")


# --- saving ---------------------------------------------------------------------------------------------------


def different_numbers(folder: Path, size: int):
    config = configure(size=size, rank=dist.get_rank(), **TEXT, strategy="ddp", run_dir=folder / "run")
    task = make_task(config)
    strategy = config.strategy_class(
        task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes, "cpu"))
    )
    strategy.step(task.micro_batches(0, strategy))
    saver = checkpoint.Saver()
    saver.save(folder / "checkpoint-000001", strategy, {"step": 1})
    if dist.get_rank() == 1:
        strategy.optimizer.state[strategy.model.head.norm.bias]["exp_avg"][3] += 1e-6
    try:
        saver.save(folder / "checkpoint-000002", strategy, {"step": 2})
    except UserError as error:
        return str(error)


def test_copies_that_differ_are_an_error_that_names_ranks_and_tensor(tmp_path):
    for text in launch(different_numbers, 2, (tmp_path, 2)):
        assert "ranks 0 and 1" in text and "optimizer.head.norm.bias.exp_avg" in text, text
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-000001"]
