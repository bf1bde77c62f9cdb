"""A class of fifty, some of them hostile: nobody else's grade changes, and nobody gets points that are not earned."""

import csv
import functools
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import FULL, refused
from hostile import ALL, HOSTILE

from common import ROOT, check
from common.grading import classes, engine, fresh, sandbox
from common.grading.classes import Grading, safe
from common.grading.engine import SIZES, Exercise, ExerciseCase

THREE = ("ring_shift", "global_mean", "ring_bytes")  # of 1, 1 and 2 points, which the submissions of hostile.py answer
FEW = ["deletes_others", "imports_the_solutions", "opens_sockets", "replaces_the_ledger"]
HERE = list(HOSTILE) if FULL else FEW
walled = pytest.mark.skipif(bool(sandbox.available()), reason=f"no sandbox: {sandbox.available()}")


@functools.cache
def first_three(unknown: bool) -> list[Exercise]:
    """Of chapter 01; with cases that no submission has seen, or with the known ones alone."""
    three = [exercise for exercise in check.exercises_of("01_intro") if exercise.name in THREE]
    solutions = ROOT / "01_intro" / "classroom" / "solutions.py"
    return fresh.with_fresh_cases(three, solutions, seed=1) if unknown else three


def grade(files: dict[str, Path], capfd, unknown: bool = True, **more) -> dict[str, dict]:
    exercises = first_three(unknown)
    Grading(exercises, check.minutes_of("01_intro"), **{"time_limit": 60.0} | more).all(files)
    output = capfd.readouterr()
    return {row["submission"]: row for row in csv.DictReader(output.out.splitlines())} | {"stderr": output.err}


def filled(text: str, folder: Path, port: int) -> str:
    for name, value in {"FOLDER": folder, "ROOT": ROOT, "PORT": port, "TMP": sandbox.TEMPORARY}.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@walled
def test_nobody_harms_another_or_gains_by_it(tmp_path, capfd):
    folder = tmp_path / "class"
    folder.mkdir()
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: heard.append(server.accept()), daemon=True).start()
        for name in HERE:
            (folder / f"{name}.py").write_text(filled(HOSTILE[name][0], folder, server.getsockname()[1]))
        for name in ("ann", "zoe"):  # the first and the last
            (folder / f"{name}.py").write_text(ALL)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        shipped = (ROOT / "01_intro" / "exercises.py").read_bytes()
        rows = grade(classes.submissions(folder), capfd)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert (ROOT / "01_intro" / "exercises.py").read_bytes() == shipped
    assert heard == [] and rows.pop("stderr") == ""
    assert list(rows) == sorted([*HERE, "ann", "zoe"])
    mistaken = []
    for name, row in rows.items():
        _, points, note = HOSTILE.get(name, ("", 4, "^$"))
        earned = int(row["points"]) in ((0, 1, 4) if points is None else (points,))
        if not earned or row["maximum"] != "4" or not re.search(note, row["note"]):
            mistaken.append(f"{name}: {row['points']}, {row['note']}")
    assert not mistaken, "\n".join(mistaken)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]


@walled
def test_an_answer_made_for_the_known_inputs_earns_nothing(tmp_path, capfd):
    """With the known inputs alone it would be right."""
    (tmp_path / "hard_codes.py").write_text(HOSTILE["hard_codes"][0])
    known, unknown = (grade(classes.submissions(tmp_path), capfd, unknown=u)["hard_codes"] for u in (False, True))
    assert (known["global_mean"], known["points"]) == ("right", "2"), known["note"]
    assert (unknown["global_mean"], unknown["points"]) == ("wrong", "1"), unknown["note"]


@pytest.mark.parametrize("chapter", check.chapters())
def test_every_exercise_of_a_class_has_inputs_that_nobody_has_seen(chapter):
    """And the solution, by which they are judged, is right there, as it is for the inputs that everybody knows."""
    known, unknown = check.exercises_of(chapter), check.for_a_class(chapter, seed=2)
    for before, after in zip(known, unknown, strict=True):
        calls = [[case.arguments for size in SIZES for case in of.check(size)] for of in (before, after)]
        same = repr(calls[0]) == repr(calls[1])
        assert not same or not any(own for call in calls[0] for own in call), f"{before.name} needs a draw in its row"
    solutions = ROOT / chapter / "classroom" / "solutions.py"
    others = getattr(engine.load(solutions), "RIGHT", {})  # answers that are right in another way
    attempts = [(e, name) for e in unknown for name in (e.name, *(f.__name__ for f in others.get(e.name, ())))]
    verdicts = engine.grade(attempts, solutions)
    pairs = zip(attempts, verdicts, strict=True)
    refused = [(name, v.where, v.expected, v.got) for (_, name), v in pairs if v.status != "right"]
    assert refused == [], "right answers that are refused"
    assert others.keys() <= {e.name for e in known}


def test_only_numbers_with_a_point_are_multiplied():
    """Those without are places and tokens, which would lie outside."""
    numbers, (places, name) = fresh.multiplied([torch.tensor([0.5, -2.0]), (torch.tensor([3, 4]), "sum")], 1.5)
    assert numbers.tolist() == [0.75, -3.0] and (places.tolist(), name) == ([3, 4], "sum"), "places in a tensor"
    assert fresh.multiplied(((1, 2), [3.0, "x"]), 1.5) == ((1, 2), [3.0, "x"]), "tuples and lists stay what they are"


def test_a_seed_draws_the_same_cases_again_after_the_known_ones(monkeypatch):
    """And another one others: a teacher who grades a class in two parts asks both the same. What is expected of a rank
    is what the solution answers there."""

    def run_jobs(file, jobs, size):
        answer = lambda rank: SimpleNamespace(status="returned", value=rank, text="")  # noqa: E731
        return {key: [[answer(rank)] * len(calls) for rank in range(size)] for key, (_, calls) in jobs.items()}

    monkeypatch.setattr(fresh, "run_jobs", run_jobs)
    known = check.exercises_of("01_intro")
    arguments = []
    for seed in (1, 1, 2):
        new = []
        for before, after in zip(known, fresh.with_fresh_cases(known, Path("unused"), seed), strict=True):
            for size in SIZES:
                there, cases = ([*of.check(size)] for of in (before, after))
                assert [case.what for case in there] == [case.what for case in cases[: len(there)]]
                assert all(case.expected == [*range(size)] for case in cases[len(there) :])
                new += [repr(case.arguments) for case in cases[len(there) :]]
        arguments.append(new)
    once, again, other = arguments
    assert once == again and len(once) == len(other)
    assert sum(a != b for a, b in zip(once, other, strict=True)) > 0.5 * len(once)


def test_cases_are_varied_where_other_numbers_are_other_answers():
    def varied(argument, expected=0.0):
        return fresh.can_be_varied(ExerciseCase("a case", [(argument,)], [expected], None))

    assert varied(torch.tensor([0.0, -2.0])), "a number below 0 can be multiplied"
    assert not varied(torch.zeros(2)) and not varied((3, "sum")), "nothing to multiply"
    assert not varied(torch.tensor([2.0**127])), "it would overflow"
    assert varied(torch.tensor([2.0, float("inf"), float("nan")])), "some elements are finite"
    assert not varied(torch.ones(2), expected=lambda value: None), "a judge knows its own case alone"


def test_a_solution_that_fails_is_no_expectation(monkeypatch):
    good = SimpleNamespace(status="returned", value=1, text="")
    bad = SimpleNamespace(status="raised", value=None, text="ZeroDivisionError")
    asked = {"ring": [ExerciseCase("a case", [(), ()], [], None)] * 2}
    for answers, says in (
        ([[good, good], [good, bad]], "ring on 2 ranks, rank 1: ZeroDivisionError"),
        ([[], [good, good]], "ring on 2 ranks, rank 0: no answer"),
        ("rank 0 died", "ring on 2 ranks: rank 0 died"),
    ):
        monkeypatch.setattr(fresh, "run_jobs", lambda *args, answers=answers: {"ring": answers})
        with pytest.raises(fresh.NoSolution, match=says):
            list(fresh.answered(asked, Path("solutions.py"), 2))


def test_there_are_enough_of_them():
    assert len(HOSTILE) >= 30 and set(FEW) <= set(HOSTILE)


@walled
def test_the_sandbox_shows_the_course_and_hides_the_answers(tmp_path):
    (tmp_path / "exercises.py").write_text("")
    outside = tmp_path.parent / "outside.txt"
    outside.write_text("secret")
    code = f"""
import os, pathlib
root = pathlib.Path({str(ROOT)!r})
print(sorted(path.name for path in (root / '01_intro' / 'classroom').iterdir()))
print((root / 'common' / 'check.py').exists(), os.listdir(root / '.git') if (root / '.git').is_dir() else [])
print(pathlib.Path({str(outside)!r}).exists(), os.listdir({str(sandbox.INSIDE)!r}))
for path in (root / 'x', root / '01_intro' / 'classroom' / 'x', '/x', {str(sandbox.INSIDE / "x")!r}, '/dev/x'):
    try:
        open(path, 'w')
        print('written', path)
    except OSError:
        pass
open({str(sandbox.TEMPORARY / "x")!r}, 'w')
"""
    command = [*sandbox._bwrap(tmp_path, (tmp_path.parent,)), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[]", "True []", "False ['exercises.py']"], (
        f"no answers, no history, nothing outside, no place to write to {done.stderr}"
    )
    assert not (sandbox.TEMPORARY / "x").exists()


def test_without_a_sandbox_it_is_said_and_still_graded(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox.available.cache_clear()
    try:
        (tmp_path / "ann.py").write_text(ALL + "print('ann,right', flush=True)\n")
        rows = grade(classes.submissions(tmp_path), capfd)
    finally:
        sandbox.available.cache_clear()
    assert rows["ann"]["points"] == "4"
    told = "note: no sandbox, for bubblewrap (bwrap) is not installed: submissions run as you"
    assert rows["stderr"].startswith(told)


def test_files_that_cannot_be_graded_get_their_row(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "nobody").mkdir()
    (tmp_path / "large.py").write_text("#" * (2**20 + 1))
    (tmp_path / "dangling.py").symlink_to("nowhere")
    (tmp_path / "=cmd.py").write_text("def f(:")
    (tmp_path / "both.py").write_text("def f(:")
    (tmp_path / "both").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / ".hidden.py").touch()
    pages = tmp_path / "pages"
    found = classes.submissions(tmp_path)
    names = ["=cmd", "both", "both.py", "dangling", "large", "nobody", "pipe"]
    assert list(found) == names, "the names of submissions, in their order"
    assert found["both.py"] == tmp_path / "both.py" and found["both"] == tmp_path / "both" / "exercises.py"
    assert classes.submissions(tmp_path / "both.py") == {"both": tmp_path / "both.py"}, "a file is one submission"
    (tmp_path / "both" / "notes.txt").touch()
    with refused("both"):
        classes.submissions(tmp_path / "both")
    told = "note: notes.txt is neither a .py file nor a folder, so it is not graded\n"
    assert capfd.readouterr().err == told, "what is not graded"
    monkey = {name: file for name, file in found.items() if name not in ("=cmd", "both.py")}
    rows = grade(monkey, capfd, pages=pages)
    assert rows["large"]["note"] == "large.py is larger than 1 MiB", "a file that is too large"
    assert rows["nobody"]["note"] == rows["both"]["note"] == "no exercises.py in this folder"
    assert rows["pipe"]["note"] == rows["dangling"]["note"] == "not a file"
    assert {row["points"] for name, row in rows.items() if name != "stderr"} == {"0"}
    assert (pages / "large.md").read_text() == "# large\n\n```\nlarge.py is larger than 1 MiB\n```\n"


def test_submissions_see_no_other_and_bring_their_folder(tmp_path, capfd, monkeypatch):
    """What is hidden is the folder of the class, whether a submission is a file or a folder in it."""
    (tmp_path / "jane" / "package").mkdir(parents=True)
    for name in ("jane/exercises.py", "jane/package/helper.py", "ann.py"):
        (tmp_path / name).touch()
    seen = []

    def one(grading, copied, hidden):
        seen.append((sorted(str(path.relative_to(copied.parent)) for path in copied.parent.rglob("*.py")), hidden))
        return "not graded here"

    monkeypatch.setattr(Grading, "one", one)
    for name in ("ann.py", "jane/exercises.py"):
        Grading([], {}, 60.0).all({"x": tmp_path / name})
    assert [files for files, _ in seen] == [["ann.py"], ["exercises.py", "package/helper.py"]], "files of a submission"
    assert [hidden for _, hidden in seen] == [(tmp_path.resolve(),)] * 2, "folders that look empty"


def test_each_submission_is_run_within_its_limits_and_its_end_is_its_note(tmp_path, monkeypatch):
    asked, reason = [], None

    class Runner:
        def __init__(self, *about):
            asked.append(about)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self, file, jobs, size):
            asked.append((file, list(jobs.values()), size))
            raise reason

    exercise = Exercise("sum", 3, "easy", lambda size: [ExerciseCase("a", [()] * size, [1] * size, None)], "A hint.")
    monkeypatch.setattr(sandbox, "Runner", Runner)
    for reason in (sandbox.GradingEnded("it ended"), engine.DoesNotLoad("it does not load")):
        asked.clear()
        found = Grading([exercise], {}, 7.0).one(tmp_path / "ann.py", (tmp_path / "class",))
        told = found if isinstance(found, str) else found[0].got
        assert told == str(reason), "why there are no points"
        assert asked[0] == (tmp_path, 7.0, (tmp_path / "class",)), "folder, seconds, hidden folders"
        assert asked[1] == (tmp_path / "ann.py", [("sum", [[(), ()]])], 2), "the submission runs in the sandbox"


def test_of_a_submissions_folder_no_file_is_too_large(tmp_path):
    for folder in ("jane", "home"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jane" / "exercises.py").touch()
    (tmp_path / "jane" / "data.bin").write_bytes(b"x" * 2**20)
    before = os.umask(0o077)
    copied = classes.copy(tmp_path / "jane" / "exercises.py", tmp_path / "home" / "0")
    os.umask(before)
    assert copied == tmp_path / "home" / "0" / "exercises.py" and (copied.parent / "data.bin").stat().st_size == 2**20
    assert copied.parent.stat().st_mode & 0o777 == 0o755, "every user may look into the copy"
    (tmp_path / "jane" / "data.bin").write_bytes(b"x" * (2**20 + 1))
    said = classes.copy(tmp_path / "jane" / "exercises.py", tmp_path / "home" / "1")
    assert said == "data.bin is larger than 1 MiB", "why a folder is not copied"


def test_a_file_that_cannot_be_copied_is_its_own_note(tmp_path, monkeypatch):
    def denied(source, target):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "ann.py").touch()
    monkeypatch.setattr(classes.shutil, "copyfile", denied)
    assert classes.copy(tmp_path / "ann.py", tmp_path / "0") == "cannot be read: Permission denied"


def test_no_cell_is_a_formula():
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "  =1", "\t=1", "\r\n=HYPERLINK()"):
        assert safe(text).startswith("'")
    assert safe("a = 1\nb") == "a = 1 b" and safe(12) == "12"
    assert safe("naïve \ud800 €") == "naïve ? €", "what cannot be written would end the grading of the whole class"


@walled
def test_limits(tmp_path, monkeypatch):
    """Processes, memory and time, each with a limit that an honest submission would break."""
    (tmp_path / "ann.py").write_text(ALL)
    exercise = check.exercises_of("01_intro")[0]
    for name, limit, reason in (("MOST_PROCESSES", 1, "processes; 1 are allowed"), ("MOST_MEMORY", 1, "of memory")):
        with monkeypatch.context() as context:
            context.setattr(sandbox, name, limit)
            assert reason in Grading([exercise], {}, 60.0).one(tmp_path / "ann.py")
    assert Grading([exercise], {}, 0.2).one(tmp_path / "ann.py") == "not finished after 0.2 s"


class Evil:
    def __reduce__(self):
        return print, ("this has run",)


def test_an_answer_that_is_none_is_refused(capsys):
    for answer in (b"", b"nonsense", b"\x80\x04N.", pickle.dumps(("answer", Evil()))):
        with pytest.raises(sandbox.GradingEnded, match="what came back is no answer"):
            sandbox._unpacked(answer, {0: None})
    assert capsys.readouterr().out == "", "reading an answer has run what was in it"


def test_a_submission_that_is_nowhere():
    with refused("--submission nowhere"):
        classes.submissions(Path("nowhere"))
