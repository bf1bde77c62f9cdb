"""The programs that readers copy: complete without the course, and on 1, 2 and 4 ranks equal to a plain loop here."""

import ast
import contextlib
import functools
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sklearn.datasets
import torch
import torch.distributed as dist
from forks import Fork, torchrun
from helpers import FULL, LAUNCHER
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader

from common.lab.launch import free_port
from common.lab.ledger import Ledger
from course.ddp.classroom.bugs import BUGS

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {path.parent.name: path for path in sorted(ROOT.glob("0*/standalone.py"))}
OTHERS = [ROOT / "03_ddp" / "feeding.py", ROOT / "03_ddp" / "speed.py", ROOT / "04_model_parallel/standalone_layers.py"]
HELLO, ONE_PROCESS = "01_intro", "02_data_parallel"
TRAINING = [chapter for chapter in PROGRAMS if chapter != HELLO]
# For parameters (the largest are near 0.8) after 3 epochs, 45 or 54 steps, in float32. Measured: programs differ from
# the plain loop by at most 5e-7, and after 2 epochs with one of the mistakes in training by 3e-2 or more.
TOLERANCE = 5e-6


def linear(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(*pair) for pair in zip(sizes, sizes[1:])]  # noqa: B905  pairs of neighbours


def make_model(chapter: str) -> nn.Module:
    if chapter == "05_pipeline":
        *first, last = linear(64, 128, 128, 128, 10)
        return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in first), last)
    if chapter == "06_fsdp":
        pairs = [linear(64, 256, 64) for _ in range(3)]
        blocks = (nn.Sequential(nn.LayerNorm(64), up, nn.GELU(), down) for up, down in pairs)
        return nn.Sequential(*blocks, nn.Linear(64, 10))
    first, last = linear(64, 128, 10)
    return nn.Sequential(first, nn.ReLU(), last)


def plain_loop(chapter: str, epochs: int) -> tuple[dict, list[tuple]]:
    """One process, whole batches: the parameters, and for each epoch (its number, mean loss, test images right)."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    tests = chapter not in ("05_pipeline", "06_fsdp")
    count = 1500 if tests else 1797
    torch.manual_seed(0)
    model = make_model(chapter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    lines = []
    for epoch in range(epochs):
        if chapter == ONE_PROCESS:
            order = torch.Generator().manual_seed(epoch)
            batches = list(DataLoader(range(count), 96, shuffle=True, drop_last=True, generator=order))
        else:  # what DistributedSampler documents: a permutation from seed + epoch
            order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
            batches = order[: count // 96 * 96].split(96)
        losses = []
        for batch in batches:
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            if chapter == "06_fsdp":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        right = (model(images[1500:]).argmax(1) == labels[1500:]).sum().item() if tests else None
        lines.append((epoch + 1, sum(losses) / len(losses), right))
    return model.state_dict(), lines


def saved(folder: Path) -> dict:
    """The parameters of the last checkpoint that is in `folder`."""
    (found,) = folder.glob("checkpoint-*")
    if found.is_dir():
        last = max(int(file.parent.name) for file in found.glob("*/.metadata"))
        dcp_to_torch_save(found / str(last), folder / "whole.pt")
        found = folder / "whole.pt"
    return torch.load(found)["model"]


def printed(text: str) -> list[tuple]:
    found = re.findall(r"^epoch (\d+): loss ([\d.]+)(?:, (\d+) of 297 test images right)?$", text, re.MULTILINE)
    return [(int(epoch), float(loss), int(right) if right else None) for epoch, loss, right in found]


def outputs(folder: Path) -> list[str]:
    """What was printed in `folder`, by launch and then by rank."""
    return [path.read_text() for path in sorted(folder.glob("output-*"))]


def check(folder: Path, output: str, chapter: str, epochs: int) -> None:
    """Refuse a run whose saved parameters or printed numbers are not the plain loop's."""
    parameters, lines = plain_loop(chapter, epochs)
    torch.testing.assert_close(saved(folder), parameters, rtol=0, atol=TOLERANCE, msg=lambda text: f"saved: {text}")
    found = printed(output)
    assert [(epoch, right) for epoch, _, right in found] == [(epoch, right) for epoch, _, right in lines], "printed"
    # four decimals are printed
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in lines], abs=1e-4), "printed"


def counted(program: Path, file: str, arguments: list[str]) -> None:
    """Run a program, and write what it sends into a file."""
    sys.argv = [str(program), *arguments]
    with Ledger() as ledger:
        runpy.run_path(str(program), run_name="__main__")
    Path(file).write_text(json.dumps([(entry.operation, entry.payload) for entry in ledger.entries]))


def run(jobs: list[list]) -> None:
    """Run [number of ranks, program, its folder, its arguments ...] of each job; all must end with exit code 0. Ranks
    are forks; with FULL=1 those of four are programs of their own, since a fork has no end of an interpreter. What
    copies of programs send on two ranks, each of these writes into a file."""
    for number, (nproc, program, folder, *arguments) in enumerate(jobs):
        folder.mkdir(parents=True, exist_ok=True)
        place, ranks = (nproc, free_port()), []
        for rank in range(nproc):
            if FULL and nproc == 4:
                meeting = map(str, (rank, nproc, rank, nproc, "127.0.0.1", place[1]))
                ranks.append(own_process([program, *arguments], folder, dict(zip(LAUNCHER, meeting, strict=True))))
                continue
            note = nproc == 2 and program.name == "my_program.py"
            started = functools.partial(counted, program, f"sent-{number:02}-{rank}") if note else program
            ranks.append(Fork(started, *arguments, cwd=folder, rank=(rank, *place)))
        end = time.monotonic() + 300
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            assert time.monotonic() < end, f"{program} in {folder} comes to no end"
            time.sleep(0.01)
        codes = [rank.returncode for rank in ranks]
        for rank, process in enumerate(ranks):
            if process.returncode is None:  # of another that has failed
                os.killpg(process.pid, signal.SIGKILL)
            (folder / f"output-{number:02}-{rank}").write_text("".join(process.communicate(timeout=60)))
        failed = [outputs(folder)[rank - nproc] for rank, code in enumerate(codes) if code]
        assert not failed, f"{program} in {folder}: exit codes {codes}\n{failed[0]}"


def own_process(arguments: list, folder: Path, more: dict | None = None) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=environment() | (more or {}), **pipes)


def start(arguments: list, folder: Path, fork: bool) -> str:
    """What `python ARGUMENTS` writes to stdout, as a fork of this process, or as one of its own; it must succeed."""
    process = Fork(*arguments, cwd=folder, env=environment()) if fork else own_process(arguments, folder)
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, output + errors
    return output


def environment() -> dict:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}


def test_one_for_each_chapter():
    assert list(PROGRAMS) == [path.name for path in sorted(ROOT.glob("0[0-9]_*"))] and len(PROGRAMS) == 6


def imports(text: str) -> set[str]:
    """The first part of the name of every module that is imported."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            names.add(ast.unparse(node))
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("chapter", PROGRAMS)
def test_short_and_without_the_course(chapter):
    text = PROGRAMS[chapter].read_text()
    assert imports(text) <= {"os", "socket", "sys", "pathlib", "torch", "sklearn"}
    docstring = ast.parse(text).body[0]
    code = [line for line in text.splitlines()[docstring.end_lineno :] if line.strip() and line.strip()[0] != "#"]
    assert 20 <= len(code) <= 68
    assert "\n    python standalone.py\n" in docstring.value.value
    assert chapter == ONE_PROCESS or "\n    torchrun --standalone --nproc_per_node=" in docstring.value.value


@pytest.mark.parametrize(
    "line", ["import common.ranks", "from course.ddp import a", "from . import by_hand", "importlib.import_module(a)"]
)
def test_an_import_of_the_course_would_be_seen(line):
    assert not imports(f"import torch\n\n\ndef f():\n    {line}\n") <= {"torch"}


# The one with the most imports; with FULL=1 all.
ALONE = list(PROGRAMS) if FULL else ["06_fsdp"]


def half(state, file):
    with open(file, "wb") if isinstance(file, str) else contextlib.nullcontext(file) as stream:
        stream.write(b"half of it")
    raise OSError("the power is gone")


@pytest.mark.parametrize("chapter", PROGRAMS)
def test_plain_python(chapter, tmp_path, monkeypatch):
    """Started from elsewhere; as a program of its own, so with no imports but its own, where it is in ALONE. A crash
    while it saves a second epoch leaves the first: the next start goes on there, and ends as if nothing had been."""
    output = start([PROGRAMS[chapter], *([] if chapter == HELLO else ["1"])], tmp_path, fork=chapter not in ALONE)
    if chapter == HELLO:
        assert re.search(r"^rank 0 of 1: .*, cpu, gloo\nrank 0: 1 \+ ... \+ 1 is 1, expected 1\n$", output)
    else:
        check(tmp_path, output, chapter, epochs=1)
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the power is gone"):
            patch.setattr(torch, "save", half)
            start([PROGRAMS[chapter], "3"], tmp_path, fork=True)
        output += start([PROGRAMS[chapter], "3"], tmp_path, fork=True)
        check(tmp_path, output, chapter, epochs=3)
        again = start([PROGRAMS[chapter], "3"], tmp_path, fork=True)
        found = next(tmp_path.glob("checkpoint-*")).name
        assert found in again and "loss" not in again, "another start has nothing to do, and says why"


def test_ranks(tmp_path):
    """An epoch on two ranks, the next on four from the checkpoint of the two (where state lies in parts; with FULL=1
    elsewhere too), the last on one. Together they are equal to epochs of one process that is never interrupted."""
    jobs = []
    sizes = {name: [2, 4, 1] if FULL or name in ("05_pipeline", "06_fsdp") else [2, 1] for name in PROGRAMS}
    for chapter, program in PROGRAMS.items():
        copy = tmp_path / "copies" / chapter / "my_program.py"
        copy.parent.mkdir(parents=True)
        shutil.copy(program, copy)
        jobs += [[nproc, copy, tmp_path / chapter, epochs] for epochs, nproc in enumerate(sizes[chapter], start=1)]
    feeding, speed, _ = OTHERS
    jobs += [[8, feeding, tmp_path / "feeding"], [2, speed, tmp_path / "speed", 64]]
    run(jobs)
    check_feeding(*outputs(tmp_path / "feeding"))
    check_speed(*outputs(tmp_path / "speed"))
    for chapter in PROGRAMS:
        by_rank = outputs(tmp_path / chapter)
        rest = iter(by_rank)
        launches = [[*itertools.islice(rest, size)] for size in sizes[chapter]]
        assert len(by_rank) == sum(sizes[chapter])
        if chapter == HELLO:
            for launch in launches:
                for rank, text in enumerate(launch):
                    total = len(launch) * (len(launch) + 1) // 2
                    assert text.startswith(f"rank {rank} of {len(launch)}: ")
                    assert text.endswith(f"rank {rank}: 1 + ... + {len(launch)} is {total}, expected {total}\n")
        else:
            check(tmp_path / chapter, "".join(by_rank), chapter, epochs=len(launches))
            for launch in launches:  # one epoch each, from one rank
                speaker = -1 if chapter == "05_pipeline" else 0
                assert len(printed(launch[speaker])) == len(printed("".join(launch))) == 1
    check_what_is_sent(tmp_path)


def check_what_is_sent(folder: Path) -> None:
    """Of an epoch on two ranks. DDP sends all gradients in each step; tensor parallelism sums the logits of a batch; a
    pipeline sends activations of an eighth of a batch, and gradients back; fully_shard gathers a block at a time."""

    def sent(chapter: str, *kinds: str) -> list[int]:
        (file,) = (folder / chapter).glob("sent-*-0")
        return [size for kind, size in json.loads(file.read_text()) if kind in kinds]

    first, last, steps = 64 * 128 + 128, 128 * 10 + 10, 1797 // 96
    assert sum(sent("03_ddp", "all_reduce")) == 4 * (15 * (first + last) + 2), "of 1,500 images, and two metrics"
    assert sent("04_model_parallel", "all_reduce").count(4 * 96 * 10) == 15
    assert not sent("04_model_parallel", "reduce_scatter"), "the layers are not cut so that one all-reduce does"
    messages, largest = sent("05_pipeline", "send", "recv"), 4 * 96 // 8 * 128
    assert messages.count(largest) == 2 * 8 * steps and max(messages) == largest
    gathered = sent("06_fsdp", "all_gather")
    block = 2 * 64 + (64 * 256 + 256) + (256 * 64 + 64)
    assert max(gathered) == 4 * block and gathered.count(4 * block) >= 3 * 2 * steps, "each block, forward and backward"
    assert sum(sent("06_fsdp", "reduce_scatter")) == 4 * steps * (3 * block + 64 * 10 + 10)


def check_feeding(text: str, *silent: str) -> None:
    """26 examples in a permutation from seed + epoch; eight ranks take turns, and each reads three batches of one."""
    lines = []
    for epoch in range(2):
        order = torch.randperm(26, generator=torch.Generator().manual_seed(epoch)).tolist()
        shares = [order[rank:24:8] for rank in range(8)]
        for step in range(3):
            read = " ".join(f"rank {rank} {own[step : step + 1]}" for rank, own in enumerate(shares))
            lines.append(f"epoch {epoch}, step {step}: {read}")
    assert text.splitlines() == lines, "feeding.py: which examples each rank reads in two epochs, on rank 0"
    assert not any(silent), "feeding.py: one rank prints what all have read"


def check_speed(text: str, silent: str) -> None:
    found = re.fullmatch(r"ranks 2, batch 64: ~([\d.]+) ms for a step, ~(\d+) examples/s\n", text)
    assert found and silent == "", f"speed.py: one line, of rank 0: {text!r}, {silent!r}"
    ms, rate = float(found[1]), int(found[2])
    assert 64e3 / (ms + 0.06) - 1 < rate < 64e3 / (ms - 0.06) + 1, f"speed.py: 64 examples in {ms} ms are not {rate}/s"


@pytest.mark.parametrize("chapter", [name for name in PROGRAMS if name != ONE_PROCESS] if FULL else [HELLO])
def test_torchrun(chapter, tmp_path):
    command = ["--standalone", "--nproc_per_node=2", PROGRAMS[chapter], *([] if chapter == HELLO else ["1"])]
    process = torchrun(*command, cwd=tmp_path, env=environment())
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    if chapter == HELLO:
        assert sorted(re.findall(r"rank (\d): 1 \+ ... \+ 2 is 3, expected 3", output)) == ["0", "1"]
    else:
        check(tmp_path, output, chapter, epochs=1)


@pytest.mark.parametrize("chapter", TRAINING)
def test_a_number_of_epochs_that_is_none_is_one_line(chapter, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["standalone.py", "many"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS[chapter]), run_name="__main__")
    assert "epochs" in ended.value.code and "\n" not in ended.value.code


# Those that a chapter plants in its program.
MISTAKES = {name: bug for name, bug in BUGS.items() if bug.file == "standalone.py"}


def test_mistakes_are_refused(tmp_path):
    """An epoch on two ranks, and in a second start another."""
    assert len(MISTAKES) >= 3
    jobs = []
    for mistake, bug in MISTAKES.items():
        program = tmp_path / mistake / "my_program.py"
        program.parent.mkdir()
        text = PROGRAMS["03_ddp"].read_text()
        assert text.count(bug.right) == 1, bug.right
        program.write_text(text.replace(bug.right, bug.wrong))
        jobs += [[2, program, program.parent, epochs] for epochs in (1, 2)]
    run(jobs)
    for mistake, bug in MISTAKES.items():
        with pytest.raises(AssertionError) as refused:
            check(tmp_path / mistake, "".join(outputs(tmp_path / mistake)), "03_ddp", 2)
        assert str(refused.value).startswith(bug.refused_by), mistake


def test_layers_split_over_ranks(tmp_path):
    """The second program of chapter 04, which cannot go on from a checkpoint: right, and with a gradient forgotten."""
    program = ROOT / "04_model_parallel" / "standalone_layers.py"
    text, right = program.read_text(), "y.backward(gradient)"
    assert imports(text) <= {"os", "sys", "torch", "sklearn"} and text.count(right) == 1
    wrong = tmp_path / "wrong" / "my_program.py"
    wrong.parent.mkdir()
    wrong.write_text(text.replace(right, "y.sum().backward()"))
    run([[2, program, tmp_path / "2"], [4, program, tmp_path / "4"], [2, wrong, wrong.parent]])
    parameters, lines = plain_loop("05_pipeline", epochs=4)  # the same model and data
    for folder, equal in (("2", True), ("4", True), ("wrong", False)):
        parts = [torch.load(path) for path in (tmp_path / folder).glob("layers-*.pt")]
        found = {name: parameter for part in parts for name, parameter in part.items()}
        assert found.keys() == parameters.keys()
        off = max((found[name] - parameter).abs().max() for name, parameter in parameters.items())
        assert (off < TOLERANCE) == equal, (folder, off)
        losses = [loss for _, loss, _ in printed("".join(outputs(tmp_path / folder)))]
        assert (losses == pytest.approx([loss for _, loss, _ in lines], abs=1e-4)) == equal


def test_a_checkpoint_that_only_rank_0_sees_is_an_error(tmp_path):
    """Nodes that share no disk: the other ranks must not begin at epoch 0 while rank 0 goes on at its checkpoint."""
    text = PROGRAMS["03_ddp"].read_text()
    shared, own = '"checkpoint-ddp.pt"', "f\"checkpoint-{os.environ['RANK']}.pt\""
    assert text.count(shared) == 1
    program = tmp_path / "my_program.py"
    program.write_text(text.replace(shared, own))
    run([[2, program, tmp_path, 1]])
    with pytest.raises(AssertionError, match="FileNotFoundError.*checkpoint-1.pt"):
        run([[2, program, tmp_path, 2]])


class Stop(Exception):
    pass


GROUPS = [path for chapter, path in PROGRAMS.items() if chapter != ONE_PROCESS] + OTHERS + [ROOT / "docs/your_own.py"]


@pytest.mark.parametrize("gpus", [0, 1, 2, 8] if FULL else [0, 2])
@pytest.mark.parametrize("program", GROUPS, ids=lambda path: path.stem)
def test_a_gpu_for_each_process_or_none_for_all(program, gpus, monkeypatch, capsys):
    """Each process of a node with so many GPUs, up to where the ranks meet: what it asks for, and what it says."""
    asked = []

    def init_process_group(backend, device_id=None, **place):
        asked.append((backend, device_id))
        raise Stop

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *where: module)  # there is no such GPU
    monkeypatch.setattr(sys, "argv", [str(program), *{"speed": ["8"], "your_own": ["ddp"]}.get(program.stem, [])])
    for processes in (1, 2, 8):
        for local_rank in {0, processes - 1}:  # of the second of two nodes
            places = (processes + local_rank, 2 * processes, local_rank, processes)
            for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), places, strict=True):
                monkeypatch.setenv(name, str(value))
            with pytest.raises(Stop) as stop:
                runpy.run_path(str(program), run_name="__main__")
            own = torch.device(f"cuda:{local_rank}")
            enough = gpus >= processes
            assert asked == ([own, ("nccl", own)] if enough else [("gloo", None)]), (processes, local_rank)
            asked.clear()
            frames = [frame for frame in stop.traceback if Path(frame.path) == program]
            values = [value for frame in frames for value in frame.locals.values()]
            chosen = {value for value in values if isinstance(value, torch.device)}
            assert chosen == {own if enough else torch.device("cpu")}, "where it would compute"
            said = capsys.readouterr().out
            assert said.count("\n") == (0 < gpus < processes and local_rank == 0), said


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_data_parallel_says_what_it_needs_two_gpus_for(gpus, monkeypatch, capsys):
    """Up to where it reads its data."""

    def stop():
        raise Stop

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sklearn.datasets, "load_digits", stop)
    monkeypatch.setattr(sys, "argv", ["standalone.py"])
    with pytest.raises(Stop) as stopped:
        runpy.run_path(str(PROGRAMS[ONE_PROCESS]), run_name="__main__")
    frames = [frame for frame in stopped.traceback if Path(frame.path) == PROGRAMS[ONE_PROCESS]]
    chosen = {value for frame in frames for value in frame.locals.values() if isinstance(value, torch.device)}
    assert chosen == {torch.device("cuda:0" if gpus else "cpu")}, "where it would compute"
    assert capsys.readouterr().out.count("\n") == (gpus < 2)
