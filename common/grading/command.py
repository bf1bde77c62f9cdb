"""The command line of `python -m common.check`, read before anything that imports torch, which takes seconds."""

import argparse
from pathlib import Path

from common import ROOT
from common.errors import Parser, UserError


def chapters() -> list[str]:
    """The chapters that have exercises."""
    return sorted(table.parent.parent.name for table in ROOT.glob("[0-9][0-9]_*/classroom/grading.py"))


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
        if folder and folder.exists() and not folder.is_dir():
            raise UserError(f"{option} {folder}: there is a file of this name; name a folder")
    if not 1 <= options.time_limit <= 86_400:
        raise UserError(f"--time-limit {options.time_limit:g}: give seconds, from 1 to 86400")
    if options.submission and not options.submission.exists():
        raise UserError(f"--submission {options.submission}: no such file or folder")
    return options
