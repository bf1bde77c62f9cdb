"""Check the exercises of a chapter.

    python -m common.check 01_intro                    your exercises.py, as a table
    python -m common.check 01_intro ring_shift         one exercise of it
    python -m common.check --submission FILE           another file in its place
    python -m common.check --submission FILE_OR_FOLDER --csv    grade a class: a row for each submission

In a notebook: `check.notebook(CHAPTER)`. Exit code: 0 if all is right, 1 if not, 2 if the command is wrong; with
--csv 0 once every submission has its row.
"""

import argparse
import contextlib
import csv
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import common.installed  # noqa: F401  first: without the packages, one line and not a traceback

# isort: split
import psutil

from common import ROOT
from common.errors import UserError, one_line_errors
from common.grading.engine import Exercise, Verdict, grade

MARK = "COURSE_SUBMISSION"  # environment variable that a submission's processes are known by


def chapters() -> list[str]:
    """The chapters that have exercises."""
    return sorted(table.parent.parent.name for table in ROOT.glob("[0-9][0-9]_*/classroom/grading.py"))


def exercises_of(chapter: str) -> list[Exercise]:
    """A chapter's table. Raises UserError for a chapter that has none."""
    if chapter not in chapters():
        raise UserError(f"no chapter {chapter!r} with exercises; there is {', '.join(chapters())}")
    # The one import by a computed name: which chapter it is, the user says. Its name is that of the link in course/.
    package = next(link.name for link in (ROOT / "course").iterdir() if link.resolve() == ROOT / chapter)
    return importlib.import_module(f"course.{package}.classroom.grading").EXERCISES


def verdicts(chapter: str, file: Path | None = None, only: str | None = None) -> list[Verdict]:
    """Judge the chapter's own exercises.py, or `file` in its place: all exercises, or the one named `only`."""
    exercises = exercises_of(chapter)
    chosen = [exercise for exercise in exercises if only in (None, exercise.name)]
    if not chosen:
        names = ", ".join(exercise.name for exercise in exercises)
        raise UserError(f"no exercise {only!r} in {chapter}; there is {names}")
    return grade([(exercise, exercise.name) for exercise in chosen], file or ROOT / chapter / "exercises.py")


def table(results: list[Verdict], drawings: bool = True) -> str:
    """The verdicts as text: a line for each exercise, and below them what is wrong and a hint; with `drawings` also
    what the answer does, drawn in text where the exercise has a drawing."""
    width = max(len(result.exercise.name) for result in results)
    lines = [f"{'exercise':{width}}  difficulty  {'status':13}  points"]
    for result in results:
        points = f"{result.points:>2} of {result.exercise.points}"
        lines.append(f"{result.exercise.name:{width}}  {result.exercise.difficulty:10}  {result.status:13}  {points}")
    total, possible = sum(result.points for result in results), sum(result.exercise.points for result in results)
    lines.append(f"{'total':{width}}  {'':10}  {'':13}  {total:>2} of {possible}")
    if results[0].status == "not graded":
        return "\n".join([*lines, "", f"the file could not be used: {results[0].got}"])
    for result in results:
        if result.status == "wrong":
            lines += ["", f"{result.exercise.name}: {result.where}"]
            lines += [
                f"  expected  {result.expected}",
                f"  got       {result.got}",
                f"  hint      {result.exercise.hint}",
            ]
            if drawings and result.drawing:
                lines += ["", *(f"  {line}" for line in result.drawing.text.splitlines())]
    following = next((result.exercise for result in results if result.status == "not attempted"), None)
    if following:
        lines += ["", f"next: {following.name} {following.difficulty}"]
    return "\n".join(lines)


def notebook(chapter: str) -> None:
    """Check the chapter's exercises.py as it is on disk now, print the table, and show what there is to see."""
    results = verdicts(chapter)
    print(table(results, drawings=False))
    for result in results:
        if result.drawing:
            from common.lab.plotting import show  # imports matplotlib, which a terminal can do without

            show(result.drawing.figure(), result.drawing.alt)


# --- a class --------------------------------------------------------------------------------------------------


def submissions(path: Path) -> dict[str, Path]:
    """Name -> file. A file is one submission; in a folder each *.py is one, and each subfolder with its
    exercises.py (which may be missing: then the row says so). Raises UserError if there is none."""
    if path.is_file():
        return {path.name: path}
    if not path.is_dir():
        raise UserError(f"--submission {path}: no such file or folder")
    found = {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            found[entry.name] = entry / "exercises.py"
        elif entry.suffix == ".py":
            found[entry.name] = entry
        else:
            print(f"note: {entry.name} is neither a .py file nor a folder, so it is not graded", file=sys.stderr)
    if not found:
        raise UserError(f"--submission {path}: no .py file and no subfolder in it")
    return found


def chapter_of(files: list[Path]) -> str:
    """The chapter whose exercises these files define most of; the first one if they define none."""
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    defined = set(re.findall(r"^def (\w+)", text, re.MULTILINE))
    return max(chapters(), key=lambda chapter: len(defined & {exercise.name for exercise in exercises_of(chapter)}))


def grade_class(chapter: str, files: dict[str, Path], time_limit: float) -> None:
    """Print a CSV row for each submission, as soon as it is graded."""
    exercises = exercises_of(chapter)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["submission", *(exercise.name for exercise in exercises), "points", "note"])
    for name, file in files.items():
        report = grade_apart(chapter, file, time_limit) if file.is_file() else "no exercises.py in this folder"
        if isinstance(report, str):
            row = [*(["not graded"] * len(exercises)), 0, report]
        else:
            row = [*report["statuses"], report["points"], report["note"]]
        writer.writerow([name, *row])
        sys.stdout.flush()


def grade_apart(chapter: str, file: Path, time_limit: float) -> dict | str:
    """Grade one submission in a process of its own, and leave none of its processes behind.

    Returns the report of `_grade_into`, or the reason why there is none. The report travels in a file of its
    own: whatever the submission prints goes nowhere.
    """
    with tempfile.TemporaryDirectory(prefix="submission-", ignore_cleanup_errors=True) as folder:
        report, errors = Path(folder, "report.json"), Path(folder, "errors")
        mark = uuid.uuid4().hex
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": folder, MARK: mark}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # no __pycache__ beside somebody's submission
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", "import sys; from common.check import _grade_into; _grade_into(*sys.argv[1:])"]
                + [chapter, str(file.resolve()), str(report)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                cwd=folder,  # what a submission writes beside itself disappears with the folder
                start_new_session=True,
            )
        try:
            process.wait(time_limit)
        except subprocess.TimeoutExpired:
            return f"not finished after {time_limit:g} s"
        finally:
            _kill(process, mark)
        if report.exists():
            return json.loads(report.read_text())
        said = errors.read_text(errors="replace").strip().splitlines()
        return f"grading ended with exit code {process.returncode}" + (f": {said[-1]}" if said else "")


def _kill(process: subprocess.Popen, mark: str) -> None:
    """End the process group at one blow, then whoever left it but still bears the mark; return when all are gone."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while (others := _marked(mark)) and time.monotonic() < deadline:
        for other in others:
            with contextlib.suppress(psutil.Error):
                other.kill()
        time.sleep(0.02)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # already gone, or somebody else's
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _grade_into(chapter: str, file: str, report: str) -> None:
    """What the process of one submission does: write the statuses, the points and a note."""
    results = verdicts(chapter, Path(file))
    notes = [
        f"{result.exercise.name}: {result.where}: expected {result.expected}, got {result.got}"
        for result in results
        if result.status == "wrong"
    ]
    if results[0].status == "not graded":
        notes = [results[0].got]
    content = {
        "statuses": [result.status for result in results],
        "points": sum(result.points for result in results),
        "note": " ".join(" | ".join(notes).split()),  # on one line
    }
    Path(report).write_text(json.dumps(content))


# --- command line ---------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see python -m common.check --help")


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser("python -m common.check", description="Check the exercises of a chapter, or grade a class.")
    parser.add_argument("chapter", nargs="?", help=f"one of: {', '.join(chapters())}")
    parser.add_argument("exercise", nargs="?", help="check this one only")
    parser.add_argument(
        "--submission", type=Path, metavar="FILE_OR_FOLDER",
        help="an exercises.py, or a folder of many; the chapter can then be left out",
    )  # fmt: skip
    parser.add_argument("--csv", action="store_true", help="a row for each submission, each in a process of its own")
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="SECONDS",
        help="for each submission, with --csv (default 120)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.csv and options.submission is None:
        raise UserError("--csv grades submissions: add --submission FILE_OR_FOLDER")
    if options.csv and options.exercise:
        raise UserError("--csv grades whole submissions: leave out the exercise")
    if options.chapter is None and options.submission is None:
        raise UserError(f"name a chapter: python -m common.check CHAPTER, one of {', '.join(chapters())}")
    files = submissions(options.submission) if options.submission else {}
    chapter = Path(options.chapter).name if options.chapter else chapter_of(list(files.values()))
    if options.csv:
        grade_class(chapter, files, options.time_limit)
        return 0
    if options.submission and options.submission.is_dir():
        raise UserError("a folder of submissions is graded with --csv")
    results = verdicts(chapter, options.submission and options.submission.resolve(), options.exercise)
    print(table(results))
    return 0 if all(result.status == "right" for result in results) else 1


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that has no dots
    with one_line_errors():
        sys.exit(main())
