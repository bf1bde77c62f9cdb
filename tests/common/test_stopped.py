"""A run that is stopped anywhere, by whatever, and goes on is the run that never stopped: in all that its folder holds,
in what it prints from there on, and in what the commands say of it. Options, strategies and stops are drawn."""

import contextlib
import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch
from forks import Fork
from helpers import FULL, SMALL, as_options, draw_masks
from hypothesis import Phase, given, settings
from hypothesis import strategies as some

from common import ROOT, checkpoint, generate, manifest, run_dir, runs
from common.errors import INTERRUPTED, UserError
from common.lab.launch import free_port
from common.record import Record
from course.ddp.loading import LOADING
from course.strategies import STRATEGIES

SCRIPT = ROOT / "distributed_training.py"
drawn = settings(max_examples=100 if FULL else 5, phases=[Phase.generate])
ROWS = [(size, name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations
        for size in (1, 2) if size in entry.sizes(kind) and name != "mesh"]  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "fsync")  # of a folder; and files that are opened to write
MODEL = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

def data():
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    whole = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return whole, TensorDataset(inputs[:6], inputs[:6, :3].argmin(1))
"""


class Curve(list):
    """Stands for a loss curve: the file has its numbers."""

    def savefig(self, path: Path, format: str) -> None:
        Path(path).write_text(json.dumps(self))


def at_each_change(folder: Path, do) -> None:
    """Once the ranks have met, this process calls `do(number)` before it changes a file of a folder, or the folder."""
    number, fsync = 0, os.fsync

    def look(event, about):
        nonlocal number
        if event == "open":
            ours = isinstance(about[0], str | Path) and str(folder) in str(about[0]) and about[2] & WRITES
        else:  # what is removed with a folder is named by a number of that folder
            ours = event in CHANGES and (str(folder) in str(about[0]) or event in CHANGES[1:4] and about[-1] != -1)
        if ours and ".lock" not in str(about[0]) and torch.distributed.is_initialized():
            number += 1
            do(number)

    def synced(file):
        look("fsync", (os.readlink(f"/proc/self/fd/{file}"),))
        fsync(file)

    os.fsync = synced
    sys.addaudithook(look)


def prepared() -> None:
    """Called in a process that is about to train."""
    run_dir.loss_curve = lambda records: Curve((record["step"], record["loss"]) for record in records)
    draw_masks()


def disturbed(folder: Path, kind: str, when: int) -> None:
    """Called in a process that is about to train: how it will be stopped; or it counts its changes of files."""
    log = Record.log

    def stopped(record, step, *numbers):
        log(record, step, *numbers)
        if step + 1 == when:
            os.kill(os.getpid(), signal.SIGTERM if when % 2 else signal.SIGINT)

    def fails(number):
        if number == when:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    if kind == "signal":
        Record.log = stopped
    elif kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (when, when))
    elif kind == "kill":
        at_each_change(folder, lambda number: number == when and os.kill(os.getpid(), signal.SIGKILL))
    elif kind == "fail":
        at_each_change(folder, fails)
    else:
        file = os.open(folder.with_suffix(f".changes-{os.environ.get('RANK', 0)}"), os.O_WRONLY | os.O_CREAT)
        at_each_change(folder, lambda number: os.pwrite(file, str(number).encode(), 0))


def trained(folder: Path, options: dict, size: int, which: int = 0, kind: str = "", when: int = 0) -> list[tuple]:
    """Train, in processes of their own, of which `which` is disturbed: of each, exit code and what it says."""
    processes, port = [], free_port()
    for rank in range(size):
        end, begin = os.pipe()  # a file would be as full as the disk is

        def begins(rank=rank, begin=begin):
            os.dup2(begin, sys.stderr.fileno())
            prepared()
            if rank == which or not kind:
                disturbed(folder, kind, when)

        line = *as_options(options), f"--run-dir={folder}", *["--distributed"] * (size > 1)
        place = (rank, size, port) if size > 1 else None
        processes.append((Fork(SCRIPT, *line, cwd=folder.parent, rank=place, preexec_fn=begins), end))
        os.close(begin)
    found = []
    for process, end in processes:
        code = process.wait(timeout=300)
        with open(end) as told:
            text = re.sub(r"\x1b\[\w", "", told.read())  # a bar's, where it was drawn in between
            found.append((code, [line for line in text.splitlines() if line.strip() and "|" not in line]))
    return found


# --- what there is of a run ---------------------------------------------------------------------------------------

TIMES = ("step_seconds", "tokens_per_second", "examples_per_second", "peak_memory_bytes", "mfu")
PLACES = ("run_dir", "resume")  # of the settings: how it was started


def without(found: dict, *names: str) -> dict:
    return {key: value for key, value in found.items() if key not in names}


def of_command(main, *argv) -> str:
    """What it says; nothing where it refuses."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(UserError):
        main([*map(str, argv)])
    return said.getvalue()


def left(folder: Path) -> dict:
    """All that a run has left, but for what a clock or the machine says."""
    facts = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = json.loads(of_command(runs.main, "summary", folder, "--json"))
    return {
        "files": sorted(path.name for path in folder.iterdir() if not path.name.startswith("checkpoint-")),
        "config.json": facts | {"config": without(facts["config"], *PLACES)},
        "metrics.jsonl": [without(line, *TIMES) | {"ranks": len(line.get("ranks", ()))} for line in lines],
        "loss.png": (folder / "loss.png").read_text(),
        "summary": [without(row, *TIMES, "run", "checkpoints") for row in rows],
        "checkpoints": rows[0]["checkpoints"],
        "writes": of_command(generate.main, folder, "--length=9"),
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.whole_tensors(folder, "")


def said_of(lines: list[str], folder: Path, after: int) -> list[str]:
    """What is printed of the steps after one, and at the end, without speeds, who is slow, and the folder's name."""
    found, other = [], r"(\w+ on \d+ process|going on|done:|starting|warning: rank \d+ on \S+ is a straggler)"
    for line in (line.replace(str(folder), "RUN") for line in lines):
        step = re.match(r"step (\d+)/", line)
        if not re.match(other, line) and (not step or int(step[1]) > after):
            found.append(re.sub(r"  [\d,]+ \w+/s$", "", line))
    return found


def kept(saved: list[int], keep: int, losses: dict[int, float]) -> list[int]:
    """The checkpoints that are there when these were written one after the other; losses of validation, by step."""
    there: list[int] = []
    for step in saved:
        there.append(step)
        best = min((loss, at) for at, loss in losses.items() if at <= step)[1] if min(losses, default=9) <= step else 0
        there = [one for one in there if one in there[-keep:] or one == best]
    return there


# --- the net --------------------------------------------------------------------------------------------------------


@some.composite
def lines(draw) -> tuple[int, dict]:
    """Ranks, and options of a run of a few steps."""
    size, name, kind = draw(some.sampled_from(ROWS))
    every, own = draw(some.integers(0, 3)), STRATEGIES[name].declared(kind).names
    found = SMALL | {
        "strategy": name, "implementation": kind, "checkpoint_every": every, "steps": draw(some.integers(2, 7)),
        "keep": draw(some.integers(1, 3)), "log_every": draw(some.integers(1, 3)), "optimizer":
        draw(some.sampled_from(["sgd", "adamw"])), "lr_schedule": draw(some.sampled_from(["constant", "cosine"])),
        "precision": draw(some.sampled_from(["fp32", "fp32", "bf16", "fp16"])), "warmup_steps": 2,
        "lr": draw(some.sampled_from([0.02, 0.5])),  # with which losses go up and down
        "accumulation_steps": draw(some.sampled_from([1, 3])),
    }  # fmt: skip
    if draw(some.integers(0, 3)):
        found |= {"validate_every": max(every, 1) * draw(some.integers(1, 2)), "keep_best": every > 0}
    if "microbatches" in own:
        found["microbatches"] = 2
    if every:
        found["async_checkpoint"] = draw(some.booleans())
    if draw(some.integers(0, 2)) == 0 and "images" in STRATEGIES[name].implementations[kind].tasks:
        found["task"] = "mine.py"
        if draw(some.booleans()):
            found["epochs"] = 1  # of 60 examples, in batches of 12
            del found["steps"]
    else:
        found |= {"sample": 9} | ({"loading": draw(some.sampled_from([*LOADING]))} if "loading" in own else {})
    return size, {key: value for key, value in found.items() if value is not False}


# A stop of each kind: how far, and of which rank.
STOPS = some.tuples(some.permutations(["signal", "kill", "fail", "full"]),
                    some.lists(some.sampled_from([n / 97 for n in range(97)]), min_size=4, max_size=4),
                    some.lists(some.integers(0, 1), min_size=4, max_size=4))  # fmt: skip


@drawn
@given(lines(), STOPS)
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path_factory, line, stops):
    (size, options), folder = line, tmp_path_factory.mktemp("stopped")
    (folder / "mine.py").write_text(MODEL)
    whole, parts, steps = folder / "whole", folder / "parts", options.get("steps", 5)
    (code, expected), *others = trained(whole, options, size)
    assert not code and not any(code for code, _ in others), (expected, others)
    changes = [int((folder / f"whole.changes-{rank}").read_text() or 0) for rank in range(size)]
    sizes = sorted(path.stat().st_size for path in whole.rglob("*") if path.is_file() and path.name != ".lock")
    losses = {line["step"]: line["validation_loss"] for line in map(json.loads, (whole / "metrics.jsonl").open())
              if "validation_loss" in line and "keep_best" in options}  # fmt: skip
    saved = {step for step in range(1, steps + 1)
             if step == steps or options["checkpoint_every"] and step % options["checkpoint_every"] == 0}  # fmt: skip
    after, more = 0, {}
    for kind, place, which in [*zip(*stops, strict=True), ("", 0.0, 0)]:
        which %= size
        when = {"signal": after + 1 + int(place * (steps - after)), "full": sizes[int(place * len(sizes))] - 1}
        outcomes = trained(parts, options | more, size, which, kind, when.get(kind, 1 + int(place * changes[which])))
        code, said = outcomes[which]
        assert not any(map(manifest.damage, manifest.checkpoints(parts))), "a part of a checkpoint is taken for one"
        who = f"{kind} at {place:.3f} of rank {which}: {outcomes}"
        assert len({not code for code, _ in outcomes}) == 1, f"all end or none, {who}"
        if code == 0:  # it was not stopped there
            break
        there = [manifest.step_of(path) for path in manifest.checkpoints(parts)]
        if kind == "signal":
            assert code == INTERRUPTED and f"go on with --resume --run-dir {parts}" in outcomes[0][1][-1], who
            assert there[-1] in {when["signal"], when["signal"] + (size > 1)}, who  # one more, for the votes
            saved.add(there[-1])
        elif kind == "kill":
            assert code == -signal.SIGKILL, who
        else:
            assert code == 2 and said[-1].startswith("error: ") and str(parts) in said[-1], who
            assert "Traceback" not in "".join(said), who
        after, more = (there[-1], {"resume": True}) if there else (0, {})
        if after == steps:  # it has come to its end, and something after that went wrong
            return
        if not there and parts.exists():
            shutil.rmtree(parts)
    assert code == 0, who
    found, unstopped = left(parts), left(whole)
    assert found.pop("checkpoints") == kept(sorted(saved), options["keep"], losses), "the checkpoints that are kept"
    del unstopped["checkpoints"]
    assert found == unstopped
    assert said_of(outcomes[0][1], parts, after) == said_of(expected, whole, after), "what it prints"
    one, other = (tensors(run / manifest.name_of(steps)) for run in (whole, parts))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    (compared,) = json.loads(of_command(runs.main, "compare", whole, parts, "--json"))
    assert (compared["steps_compared"], compared["largest_difference"], compared["settings"]) == (steps, 0, {})
    shutil.rmtree(folder)
