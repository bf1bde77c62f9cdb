"""The exercises' checker, proved in both directions, and the grading of a class."""

import contextlib
import csv
import re
import subprocess
import sys
import time

import psutil
import pytest
from forks import Fork
from helpers import FULL
from hostile import RING_SHIFT

from common import check
from common.grading import command, sandbox
from common.grading import engine as grading
from course.data_parallel.classroom import bugs as data_parallel
from course.ddp.classroom import bugs as ddp
from course.fsdp.classroom import bugs as fsdp
from course.intro.classroom import bugs as intro
from course.model_parallel.classroom import bugs as model_parallel
from course.pipeline.classroom import bugs as pipeline

EXERCISES = [(chapter, exercise) for chapter in check.chapters() for exercise in check.exercises_of(chapter)]
INTRO = check.exercises_of("01_intro")
POINTS = sum(exercise.points for exercise in INTRO)
MODULES = (intro, data_parallel, ddp, model_parallel, pipeline, fsdp)
BUGS = {bugs.BUGS.folder.resolve().name: bugs.BUGS for bugs in MODULES}


def test_every_stub_has_a_row_and_every_row_a_stub():
    assert len(EXERCISES) >= 50, "nothing to check"
    for chapter in check.chapters():
        text = (check.ROOT / chapter / "exercises.py").read_text()
        names = [exercise.name for exercise in check.exercises_of(chapter)]
        assert re.findall(r"^def (\w+)\(", text, re.MULTILINE) == names, chapter
        assert command.names_in(chapter) == names, "what refuses a wrong name before anything is imported"


@pytest.mark.parametrize("chapter", check.chapters())
def test_stubs_as_shipped_are_not_attempted(chapter, capfd):
    assert check.notebook(chapter) is None
    lines = capfd.readouterr().out.splitlines()
    exercises = check.exercises_of(chapter)
    for exercise in exercises:
        (line,) = [line for line in lines if line.startswith(f"{exercise.name} ") and "not attempted" in line]
        assert re.findall(r"\d+", line)[-2:] == ["0", str(exercise.points)], "points, of how many"
    total = next(re.findall(r"\d+", line) for line in lines if line.startswith("total"))
    assert total == ["0", str(len(exercises)), "0", str(sum(e.points for e in exercises))], "right, and points"


def test_a_page_shows_the_exercises_that_belong_to_it(capfd):
    check.notebook("03_ddp", "learning_rate", "bf16_average")
    text = capfd.readouterr().out
    rows = [line for line in text.splitlines() if "not attempted" in line]
    assert [line.split()[0] for line in rows] == ["learning_rate", "bf16_average"] and "0 of 3" in text


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES, ids=lambda value: getattr(value, "name", value))
def test_stub_is_headed_as_the_table_says(chapter, exercise):
    text = " ".join(getattr(grading.load(check.ROOT / chapter / "exercises.py"), exercise.name).__doc__.split())
    points = f"{exercise.points} point" + "s" * (exercise.points > 1)
    assert re.search(rf"Difficulty {exercise.difficulty} Importance [●○]{{5}} up to \d+ minutes {points}$", text)
    assert exercise.hint not in text and len(exercise.hint) > 20


@pytest.mark.parametrize("chapter", check.chapters())
def test_planted_bugs_are_shown_in_any_folder(chapter, tmp_path):
    file = check.ROOT / chapter / "classroom" / "bugs.py"

    def command(*arguments):
        process = Fork(file, *arguments, cwd=tmp_path)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return output

    if FULL:  # a program of its own, which takes seconds to import what a fork has
        listed = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True)
        assert listed.returncode == 0, listed.stderr
        names = listed.stdout.split()
    else:
        names = command().split()
    bug = BUGS[chapter][names[0]]
    assert set(BUGS[chapter]) <= set(names) and len(names) >= 8
    code, answer = command(names[0]), command(names[0], "--answer")
    assert bug.wrong in code and bug.why not in code
    assert bug.right in answer and bug.wrong in answer and bug.why in answer


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def test_table_tells_what_is_wrong_and_what_is_next(tmp_path, capfd):
    write(
        tmp_path,
        half=RING_SHIFT + "def global_mean(values):\n    print('mean', len(values))\n    return values.mean()\n",
    )
    assert check.main(["--submission", str(tmp_path / "half.py")]) == 1, "the exit code where something is wrong"
    output = capfd.readouterr().out
    assert "ring_shift " in output, "a file is taken for one of the chapter whose exercises it defines"
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
    for name, words in (("ring_shift", ["10", "right", "1", "1"]), ("global_mean", ["10", "wrong", "0", "1"]),
                        ("total", ["1", str(len(INTRO)), "1", str(POINTS)])):  # fmt: skip
        found = [word for word in rows[name] if word.isdigit() or word in ("right", "wrong") and name != "total"]
        assert found == words, f"{name}: minutes, verdict, points; or how many are right, and their points"
    told = output[output.index("global_mean: ") :]  # (1 + 10 + 20 + 30) / 4: what is shown is enough to compute it
    for fact in ("global_mean([1])", "global_mean([10, 20, 30])", "15.25", "mean 1", "mean 3",
                 "python -m common.check global_mean --hint"):  # fmt: skip
        assert fact in told, told
    assert INTRO[2].name in output.splitlines()[-1], "what is next"
    for name, code in (("ring_shift", 0), (INTRO[2].name, 1)):
        assert check.main(["01_intro", name, "--submission", str(tmp_path / "half.py")]) == code, "all that is asked"


def test_schedule_over_its_budget_is_drawn(tmp_path, capfd, monkeypatch):
    write(
        tmp_path,
        exercises="def one_forward_one_backward(ranks, microbatches):\n"
        "    return [' '.join(f'{r}{k}{m}' for k in 'FB' for m in range(microbatches)) for r in range(ranks)]\n"
        "def mend(schedule):\n    return 7\n",
    )
    verdicts = check.verdicts("05_pipeline", tmp_path / "exercises.py")
    lines = check.table(verdicts).splitlines()
    forward, backward = (" ".join(f"{kind}{m}" for m in range(8)) for kind in "FB")
    (row,) = [line for line in lines if line.strip().startswith("rank 3") and f"{forward} {backward}" in line]
    assert any("[7, 5, 3, 1]" in line for line in lines), "what is allowed on each rank"
    assert any(line.endswith(" int 7") for line in lines)
    shown = []
    monkeypatch.setattr(check, "verdicts", lambda chapter: verdicts)
    monkeypatch.setattr(
        "common.lab.plotting.show", lambda fig, alt: shown.append((fig.axes[0].get_title(loc="left"), alt))
    )
    check.notebook("05_pipeline")
    assert row not in capfd.readouterr().out  # a notebook shows the picture
    ((title, alt),) = shown
    assert "28" in title and "8" in title and title in alt, "makespan and what is stored, in the alt text too"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import sys\nsys.exit('bye')\n", "SystemExit bye 2 sys.exit('bye')"),
        ("import os\nos._exit(3)\n", "rank 3"),
        ("import os\nassert os.environ['RANK'] == '0'\n", "AssertionError 2"),
        ("import nowhere\n", "ModuleNotFoundError nowhere 1"),
        ("\0", "null bytes"),
    ],
)
def test_file_that_does_not_load(tmp_path, text, reason):
    """The error, with the line that it came from; or the rank that died, and its exit code."""
    write(tmp_path, bad=text)
    verdicts = check.verdicts("01_intro", tmp_path / "bad.py")
    assert {verdict.status for verdict in verdicts} == {"not graded"}
    for told in (verdicts[0].got, check.table(verdicts)):
        assert not [word for word in reason.split() if word not in told], told


def test_function_that_ends_its_process_or_never_ends_spoils_no_other(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(grading, "CALL_LIMIT", 3.0)  # seconds
    write(
        tmp_path,
        bad=RING_SHIFT
        + "import os, sys, time, torch, torch.distributed as dist\n"
        + "def global_mean(values):\n    if dist.get_rank():\n        return dist.recv(torch.empty(1), 0)\n"
        + "    dist.send(torch.ones(999), 1)\n    dist.barrier()\n"
        + "def ring_bytes(*a):\n    while True:\n        time.sleep(0.01)\n"
        + "def all_reduce_seconds(*a):\n    sys.exit(0)\n"
        + "def inner_axis(*a):\n    dist.get_rank() and os._exit(0)\n"  # as if all were well
        + "def all_to_all(parts, lengths):\n    return [lambda: 1]\n"
        + "def tree_broadcast(tensor, root):\n    raise NotImplementedError('in part')\n"
        + "def repaired_training(*a):\n    if dist.get_rank():\n        raise NotImplementedError\n",
    )
    got = {verdict.exercise.name: verdict for verdict in check.verdicts("01_intro", tmp_path / "bad.py")}
    assert got["ring_shift"].status == "right"
    wrong = {"global_mean", "ring_bytes", "all_reduce_seconds", "inner_axis", "all_to_all", "tree_broadcast",
             "repaired_training"}  # fmt: skip
    assert {got[name].status for name in wrong} == {"wrong"}
    assert {verdict.status for name, verdict in got.items() if name not in (*wrong, "ring_shift")} == {"not attempted"}
    assert "rank 1" in got["global_mean"].got and "SIGABRT" in got["global_mean"].got
    assert "terminate called" not in "".join(capfd.readouterr()), "what C++ writes then is not for a learner"
    for name, words in {"ring_bytes": "3 s time.sleep(0.01)", "all_reduce_seconds": "SystemExit 0 sys.exit(0)",
                        "inner_axis": "rank 1", "all_to_all": "lambda",
                        "tree_broadcast": "NotImplementedError in part line",
                        "repaired_training": "NotImplementedError line"}.items():  # fmt: skip
        assert not [word for word in words.split() if word not in got[name].got], f"{name}: {got[name].got}"
    assert got["repaired_training"].where.endswith("rank 1")


def all_gone(pids) -> bool:
    """Killed processes take a moment to disappear; a zombie waits for its parent only."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in left):
                return True
        time.sleep(0.05)
    return False


def test_class_gets_a_row_each(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "class"
    (folder / "jane").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("not Python")
    pids = tmp_path / "pids"
    # Junk on stdout that looks like a row, a file left behind, and a process that leaves the process group.
    write(
        folder / "jane",
        helper="x = 1\n",
        exercises=f"""
import pathlib, subprocess, sys
from helper import x
print("jane,right,right", flush=True)
print("junk", file=sys.stderr)
pathlib.Path("left_behind").write_text("x")
stowaway = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open({str(pids)!r}, "a") as file:
    print(stowaway.pid, file=file)
{RING_SHIFT}
def global_mean(values):
    return "a comma, and a\\nline"
""",
    )
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(check.ROOT / "01_intro")
    monkeypatch.setattr(sandbox, "available", lambda: "a test")  # what the sandbox keeps off, test_class.py shows
    out = tmp_path / "out"
    assert check.main(["--submission", str(folder), "--csv", "--unprotected", "--export", str(out)]) == 0
    output = capfd.readouterr()
    assert "no sandbox" in output.err  # apart from the table
    rows = {row["submission"]: row for row in csv.DictReader(output.out.splitlines())}
    assert list(rows) == ["empty", "jane", "notes.txt"] and (out / "canvas.csv").exists()
    names = [exercise.name for exercise in check.exercises_of("01_intro")]
    jane = rows["jane"]
    assert list(jane) == ["submission", *names, "points", "maximum", "note"]
    assert (jane.pop("ring_shift"), jane.pop("global_mean")) == ("right", "wrong")
    assert {jane[name] for name in names if name in jane} == {"not attempted"}
    assert (jane["points"], jane["maximum"]) == ("1", str(POINTS))
    assert (
        jane["note"].startswith("global_mean: ") and "rank 0" in jane["note"] and "a comma, and a line" in jane["note"]
    )
    empty = rows["empty"]
    assert {empty[exercise] for exercise in names} == {"not graded"}
    assert empty["points"] == "0" and "exercises.py" in empty["note"]
    assert sorted(folder.rglob("*")) == before
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) >= 2 and all_gone(started)
