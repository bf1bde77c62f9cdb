"""Check the exercises of a chapter.

    python -m common.check                             your exercises.py, as a table; which chapter, it sees
    python -m common.check 01_intro ring_shift         one exercise of a chapter
    python -m common.check --watch                     one exercise after the other, checked whenever you save
    python -m common.check ring_shift --hint           a hint, and with --hint 2 the next
    python -m common.check --submission FILE           another file in place of exercises.py
    python -m common.check --submission FILE_OR_FOLDER --csv    grade a class: a row for each submission

In a notebook: `check.notebook(CHAPTER)`, and `check.hint(EXERCISE)`. After the first of them, `%exercise EXERCISE`
brings a function of exercises.py into a cell; run, that cell is written back and checked. Exit code: 0 if all is
right, 1 if not, 2 if the command is wrong; with --csv 0 once every submission has its row.
"""

import argparse
import importlib
import io
import os
import re
import secrets
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

from common import installed

if __name__ == "__main__":
    installed.at_start()  # first: without the packages, one line and not a traceback

from common import ROOT
from common.errors import UserError, one_line_errors
from common.grading import command
from common.grading.command import chapter_with, chapters

if __name__ == "__main__":
    with one_line_errors():
        command.read()  # above what imports torch

from common.grading import cells, classes, exports, fresh, known, sandbox
from common.grading.engine import Exercise, Verdict, grade
from common.grading.feedback import bar, explained, stages, table


def exercises_of(chapter: str) -> list[Exercise]:
    """A chapter's table. Raises UserError for a chapter that has none."""
    command.names_in(chapter)
    return classroom(chapter, "grading").EXERCISES


def classroom(chapter: str, module: str) -> types.ModuleType:
    # The one import by a computed name, since the user says which chapter: the folder 03_ddp is the package course.ddp.
    return importlib.import_module(f"course.{chapter[3:]}.classroom.{module}")


def for_a_class(chapter: str, seed: int | None = None) -> list[Exercise]:
    """A chapter's table with cases that nobody has seen, drawn with `seed`, by default anew. Without the solutions,
    which answer them, as it is, with a note on stderr."""
    exercises, solutions = exercises_of(chapter), ROOT / chapter / "classroom" / "solutions.py"
    if not solutions.exists():
        print("note: without classroom/solutions.py the known inputs alone are tried", file=sys.stderr)
        return exercises
    return fresh.with_fresh_cases(exercises, solutions, secrets.randbits(32) if seed is None else seed)


def chosen_from(chapter: str, only: str | None) -> list[Exercise]:
    """All exercises of a chapter, or the one named `only`. Raises UserError where there is none of that name."""
    if only:
        command.must_have(chapter, only)
    return [exercise for exercise in exercises_of(chapter) if only in (None, exercise.name)]


def exercises_file(chapter: str) -> Path:
    return ROOT / chapter / "exercises.py"


def minutes_of(chapter: str) -> dict[str, str]:
    """How many minutes each exercise allows, as the chapter's exercises.py says."""
    text = (ROOT / chapter / "exercises.py").read_text(errors="replace")
    found = [re.match(r"(\w+).*?up to (\d+) minutes", part, re.DOTALL) for part in re.split(r"^def ", text, flags=re.M)]
    return {match[1]: match[2] for match in found if match}


def verdicts(
    chapter: str, file: Path | None = None, only: str | None = None, progress: Callable = lambda _text: None
) -> list[Verdict]:
    """Judge the chapter's own exercises.py, or `file` in its place: all exercises, or the one named `only`."""
    attempts = [(exercise, exercise.name) for exercise in chosen_from(chapter, only)]
    found = grade(attempts, file or ROOT / chapter / "exercises.py", progress=progress)
    return [known.with_reason(verdict, ROOT / chapter / "classroom" / "solutions.py") for verdict in found]


# --- what a learner reads -------------------------------------------------------------------------------------


def hint(name: str, stage: int = 1, chapter: str | None = None) -> None:
    """Print the hint of an exercise up to a stage. Raises UserError for a name or a stage that is not there."""
    (exercise,) = chosen_from(chapter or chapter_with(name), name)
    there = stages(exercise)
    if not 1 <= stage <= len(there):
        raise UserError(f"--hint {stage}: the hint of {name} has {len(there)} stage(s)")
    for number, text in enumerate(there[:stage], start=1):
        print(f"hint {number} of {len(there)}: {text}")
    if stage < len(there):
        print(f"more: python -m common.check {name} --hint {stage + 1}")


def notebook(chapter: str, *names: str) -> None:
    """Check the chapter's exercises.py as it is on disk now, print the table, and show what there is to see: of all
    exercises, or of those named."""
    show([result for result in verdicts(chapter) if not names or result.exercise.name in names], chapter)


def show(results: list[Verdict], chapter: str) -> None:
    """In a notebook: the table, how to go on in a cell, and what there is to see."""
    print(table(results, drawings=False, minutes=minutes_of(chapter)))
    left = [result.exercise.name for result in results if result.status != "right"]
    file = exercises_file(chapter)
    left += [one.name for one in exercises_of(chapter) if cells.is_stub(file, one.name)]
    if left and with_magic():
        print(f"in a cell: %exercise {left[0]}")
    for result in results:
        if result.drawing:
            from common.lab import plotting  # imports matplotlib, which a terminal can do without

            plotting.show(result.drawing.figure(), result.drawing.alt)


def with_magic() -> bool:
    """In IPython, make `exercise` a magic there; whether this is IPython."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(exercise, "line_cell", "exercise")
    return shell is not None


def exercise(name: str, cell: str | None = None) -> None:
    """`%exercise NAME`: the function as it is in exercises.py, in a new cell that begins with `%%exercise NAME`. That
    cell, run, is written into exercises.py and checked."""
    from IPython import get_ipython

    try:
        name = name.strip()
        chapter = chapter_with(name)
        file = exercises_file(chapter)
        if cell is None:
            get_ipython().set_next_input(f"%%exercise {name}\n{cells.function_in(file, name)}")
            return
        cells.put_into(file, name, cell)
    except UserError as error:  # one line in a notebook, too
        print(f"error: {error}")
        return
    show(verdicts(chapter, file, name), chapter)


# --- watching -------------------------------------------------------------------------------------------------


def watch(chapter: str, file: Path, only: str | None = None, wait: Callable | None = None) -> None:
    """Check one exercise after the other, and the one that is not right again whenever `file` is saved. Those that are
    begun come first, in whatever order they were, so that none need be done before another.

    wait(file, before): returns when the file is no longer as it was at `before`, its time of change; raises
    KeyboardInterrupt to end
    """
    wait = wait or until_saved
    exercises, right = chosen_from(chapter, only), set()
    while True:
        before = file.stat().st_mtime_ns
        left = [exercise for exercise in exercises if exercise.name not in right]
        for stub, exercise in sorted(((cells.is_stub(file, one.name), one) for one in left), key=lambda pair: pair[0]):
            if stub:
                result = Verdict(exercise, "not attempted")
                break
            (result,) = verdicts(chapter, file, exercise.name, progress=show_progress)
            show_progress("")
            if result.status != "right":
                break
            right.add(exercise.name)
            print(f"{bar(len(right), len(exercises))}  {exercise.name} is right", flush=True)
        else:
            results = [v for exercise in exercises for v in verdicts(chapter, file, exercise.name)]
            right = {result.exercise.name for result in results if result.status == "right"}
            if len(right) == len(exercises):  # an edit may have broken what was right before
                print(f"all right: {sum(exercise.points for exercise in exercises)} points")
                return
            continue
        lines = explained(result) if result.status == "wrong" else [f"{exercise.name}: {result.got or result.status}"]
        if result.status == "not attempted" and (asked := cells.asked_for(file, exercise.name)):
            lines += [f"  asked     {asked[1]}", f"  edit      {shown_path(file)}:{asked[0]}"]
            lines.append(f"  hint      python -m common.check {exercise.name} --hint")
        allowed = minutes_of(chapter).get(exercise.name, "?")
        head = f"{bar(len(right), len(exercises))}  now {exercise.name} {exercise.difficulty}, up to {allowed} minutes"
        print("\n".join(["", head, *lines, f"(waiting until you save {file.name}; Ctrl-C ends)"]), flush=True)
        wait(file, before)


def shown_path(file: Path) -> str:
    """As one opens it from here."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def until_saved(file: Path, before: int) -> None:
    while not file.exists() or file.stat().st_mtime_ns == before:
        time.sleep(0.2)


def show_progress(text: str) -> None:
    """A line of progress on a terminal, which the next one takes the place of."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# --- which chapter --------------------------------------------------------------------------------------------


def chapter_here() -> str:
    """The chapter of the current folder; elsewhere the one whose exercises.py was saved last of those that are begun,
    and the first one where none is."""
    here = Path.cwd().resolve()
    inside = [chapter for chapter in chapters() if (ROOT / chapter) in (here, *here.parents)]
    if inside:
        return inside[0]
    begun = [chapter for chapter in chapters() if cells.is_begun(exercises_file(chapter))]
    if not begun:
        return chapters()[0]
    latest = max(begun, key=lambda chapter: exercises_file(chapter).stat().st_mtime)
    print(f"{latest}: its exercises.py was saved last (name another chapter to check that)", file=sys.stderr)
    return latest


def chapter_of(texts: list[str]) -> str:
    """The chapter whose exercises these texts define most of; the first one if they define none."""
    defined = set(re.findall(r"^def (\w+)", "\n".join(texts), re.MULTILINE))
    return max(chapters(), key=lambda chapter: len(defined & {exercise.name for exercise in exercises_of(chapter)}))


# --- command line ---------------------------------------------------------------------------------------------


def grade_class(chapter: str, found: list[classes.Submission], options: argparse.Namespace) -> None:
    """Raises UserError where there is no sandbox, and nobody has said that it may be left out."""
    missing = sandbox.available()
    if missing and not options.unprotected:
        raise UserError(
            f"no sandbox to grade in, for {missing}: install it (apt install bubblewrap), or add --unprotected, and "
            f"submissions run as you, with your files and network"
        )
    for option, folder in (("--pages", options.pages), ("--export", options.export)):
        if folder:
            classes.make_folder(option, folder)
    exercises, solutions = for_a_class(chapter), ROOT / chapter / "classroom" / "solutions.py"
    text = solutions.read_text().strip() if solutions.exists() else ""
    hidden = tuple(filter(None, [options.export]))
    grade = classes.Grading(exercises, minutes_of(chapter), options.time_limit, options.pages, hidden, text)
    rows = grade.all(found)
    if options.export:
        exports.write_all(options.export, chapter, exercises, rows)


def main(arguments: list[str] | None = None) -> int:
    options = command.read(arguments)
    chapter, only = options.chapter, options.exercise
    found = classes.submissions(options.submission) if options.submission else []
    if chapter is None:
        chapter = chapter_of([classes.beginning(one) for one in found]) if found else chapter_here()
    if options.csv:
        grade_class(chapter, found, options)
        return 0
    if options.hint is not None:
        hint(only, options.hint, chapter)
        return 0
    file = options.submission.resolve() if options.submission else ROOT / chapter / "exercises.py"
    try:
        if options.watch:
            watch(chapter, file, only)
            return 0
        results = verdicts(chapter, file, only, progress=show_progress)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 1
    show_progress("")
    print(table(results, minutes=minutes_of(chapter)))
    return 0 if all(result.status == "right" for result in results) else 1


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no dots
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with one_line_errors():
        sys.exit(main())
