"""The command line of `python -m common.check`, read before anything that imports torch, which takes seconds."""

import argparse
import ast
import os
from pathlib import Path

from common import ROOT
from common.did_you_mean import did_you_mean
from common.errors import Parser, UserError


def chapters() -> list[str]:
    """The chapters that have exercises."""
    return sorted(table.parent.parent.name for table in ROOT.glob("[0-9][0-9]_*/classroom/grading.py"))


def names_in(chapter: str) -> list[str]:
    """The names in a chapter's table of exercises, as its text has them: importing it takes seconds. Raises UserError
    for a chapter that has none."""
    if chapter not in chapters():
        hint = did_you_mean(chapter, chapters())
        text = f"no chapter '{chapter}' with exercises; {hint}{' ' if hint else ''}"
        raise UserError(f"{text}there is {', '.join(chapters())}")
    assigned = ast.parse((ROOT / chapter / "classroom" / "grading.py").read_text()).body
    (table,) = (node.value for node in assigned if isinstance(node, ast.Assign) and "EXERCISES" in ast.dump(node))
    rows = [row for row in getattr(table, "elts", []) if isinstance(row, ast.Call)]
    given = [next((word.value for word in row.keywords if word.arg == "name"), *row.args[:1]) for row in rows]
    return [name.id if isinstance(name, ast.Name) else ast.literal_eval(name) for name in given]


def must_have(chapter: str, exercise: str) -> None:
    """Raises UserError for a chapter that has no exercise of this name."""
    known = names_in(chapter)
    if exercise not in known:
        hint = did_you_mean(exercise, known)
        text = f"no exercise '{exercise}' in {chapter}; {hint}{' ' if hint else ''}"
        raise UserError(f"{text}there is {', '.join(known)}")


def chapter_named(word: str) -> str:
    """The chapter that is meant: by its folder, its number, or its exercises.py, as the Tab key completes it."""
    path = Path(word)
    name = path.resolve().parent.name if path.name == "exercises.py" else path.name
    return next((chapter for chapter in chapters() if name.isdigit() and chapter.startswith(f"{name:0>2}_")), name)


def chapter_with(exercise: str) -> str:
    """The chapter that has an exercise of this name. Raises UserError where none has."""
    names = {name: chapter for chapter in chapters() for name in names_in(chapter)}
    if exercise not in names:
        hint = did_you_mean(exercise, [*chapters(), *names])
        text = f"no chapter and no exercise '{exercise}'; {hint}{' ' if hint else ''}"
        raise UserError(f"{text}chapters: {', '.join(chapters())}")
    return names[exercise]


def resolved(word: str, exercise: str | None) -> tuple[str, str | None]:
    """The chapter and the exercise of a command line's one or two words. Raises UserError for what is not there."""
    chapter = chapter_named(word)
    if chapter not in chapters() and exercise is None and not chapter[:1].isdigit():
        return chapter_with(chapter), chapter
    names_in(chapter)  # refuses a chapter that is none
    if exercise:
        must_have(chapter, exercise)
    return chapter, exercise


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of a command line. Raises UserError for those that do not go together, without importing torch."""
    parser = Parser("python -m common.check", description="Check the exercises of a chapter, or grade a class.")
    parser.add_argument("chapter", nargs="?", help=f"one of: {', '.join(chapters())} (default: that of this folder)")
    parser.add_argument("exercise", nargs="?", help="check this one only; its chapter can then be left out")
    parser.add_argument("--watch", action="store_true", help="one exercise after the other, whenever you save")
    parser.add_argument("--hint", type=int, nargs="?", const=1, metavar="STAGE", help="a hint on an exercise")
    parser.add_argument(
        "--submission", type=Path, metavar="FILE_OR_FOLDER",
        help="an exercises.py, or a folder of many; the chapter can then be left out",
    )  # fmt: skip
    parser.add_argument("--csv", action="store_true", help="a row for each submission, each in a process of its own")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="with --csv: a page of feedback for each")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="with --csv: files for Canvas, Moodle and others",
    )
    parser.add_argument(
        "--time-limit", type=float, default=120.0, metavar="SECONDS",
        help="for each submission, with --csv (default 120)",
    )  # fmt: skip
    parser.add_argument(
        "--unprotected", action="store_true", help="with --csv: grade without a sandbox, with your files and network"
    )
    options = parser.parse_args(arguments)
    if options.csv and options.submission is None:
        raise UserError("--csv grades submissions: add --submission FILE_OR_FOLDER")
    if options.csv and (options.exercise or options.watch):
        raise UserError("--csv grades whole submissions: leave out the exercise, and --watch")
    if options.pages and not options.csv:
        raise UserError("--pages belongs to --csv: add it, with --submission FOLDER")
    if options.export and not options.csv:
        raise UserError("--export belongs to --csv: add it, with --submission FOLDER")
    for option, folder in (("--pages", options.pages), ("--export", options.export)):
        if folder and os.path.exists(folder) and not os.path.isdir(folder):  # a name that cannot be is none, too
            raise UserError(f"{option} {folder}: there is a file of this name; name a folder")
    if not 1 <= options.time_limit <= 86_400:
        raise UserError(f"--time-limit {options.time_limit:g}: give seconds, from 1 to 86400")
    if options.submission and not os.path.exists(options.submission):
        raise UserError(f"--submission {options.submission}: no such file or folder")
    if options.submission and options.submission.is_dir() and not options.csv:
        raise UserError("a folder of submissions is graded with --csv")
    if options.chapter:
        options.chapter, options.exercise = resolved(options.chapter, options.exercise)
    if options.hint is not None and not options.csv and options.exercise is None:
        raise UserError("--hint: name an exercise, as in python -m common.check ring_shift --hint")
    return options
