"""Grade a class: a row of a table and a page of feedback for each submission.

All submissions are copied before the first is graded, so that none can change another. Each is graded by a Runner of
its own (sandbox.py), two at a time.
"""

import csv
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import UserError
from common.grading import sandbox
from common.grading.engine import Exercise, Verdict, grade
from common.grading.feedback import table

AT_A_TIME = 2
MOST_BYTES = 2**20  # of one file of a submission


def submissions(path: Path) -> dict[str, Path]:
    """Name -> file. A file is one submission; in a folder each *.py is one, and each subfolder with its
    exercises.py (which may be missing: then the row says so). Raises UserError if there is none."""
    if path.is_file():
        return {path.stem: path}
    if not path.is_dir():
        raise UserError(f"--submission {path}: no such file or folder")
    found = {}
    for entry in sorted(path.iterdir()):
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir():
            found[entry.name] = entry / "exercises.py"
        elif entry.suffix == ".py":
            found[entry.name if entry.with_suffix("").is_dir() else entry.stem] = entry
        else:
            print(f"note: {entry.name} is neither a .py file nor a folder, so it is not graded", file=sys.stderr)
    if not found:
        raise UserError(f"--submission {path}: no .py file and no subfolder in it")
    return found


class Grading:
    """Grades the submissions of a chapter: `all` prints a CSV row for each, in their order, as they are ready.

    pages: folder for a page of feedback for each; None for no pages
    """

    def __init__(self, exercises: list[Exercise], minutes: dict, time_limit: float, pages: Path | None = None):
        self.exercises, self.minutes, self.time_limit, self.pages = exercises, minutes, time_limit, pages

    def all(self, files: dict[str, Path]) -> None:
        missing = sandbox.available()
        if missing:
            note = f"note: no sandbox, for {missing}: submissions run as you, with your files and network"
            print(note, file=sys.stderr)
        if self.pages:
            self.pages.mkdir(parents=True, exist_ok=True)
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["submission", *(exercise.name for exercise in self.exercises), "points", "maximum", "note"])
        homes = {file.parent.parent if file.name == "exercises.py" else file.parent for file in files.values()}
        hidden = tuple(home.resolve() for home in sorted(homes))
        with tempfile.TemporaryDirectory(prefix="class-") as staged, ThreadPoolExecutor(AT_A_TIME) as pool:
            copies = {name: copy(file, Path(staged, str(n))) for n, (name, file) in enumerate(files.items())}
            graded = pool.map(lambda copied: self.one(copied, hidden), copies.values())
            for number, (name, results) in enumerate(zip(copies, graded, strict=True), start=1):
                writer.writerow([safe(cell) for cell in self.row(name, results)])
                sys.stdout.flush()
                if sys.stderr.isatty():
                    print(f"\r\033[K{number} of {len(files)}: {name}", end="", file=sys.stderr, flush=True)
                if self.pages:
                    page = results if isinstance(results, str) else table(results, minutes=self.minutes)
                    Path(self.pages, f"{name}.md").write_text(f"# {name}\n\n```\n{page}\n```\n", errors="replace")

    def one(self, copied: Path | str, hidden: tuple[Path, ...] = ()) -> list[Verdict] | str:
        """The verdicts on one submission, or the reason why there are none."""
        if isinstance(copied, str):
            return copied
        try:
            with sandbox.Runner(copied.parent, self.time_limit, hidden) as runner:
                return grade([(exercise, exercise.name) for exercise in self.exercises], copied, run=runner)
        except sandbox.GradingEnded as reason:
            return str(reason)

    def row(self, name: str, results: list[Verdict] | str) -> list:
        possible = sum(exercise.points for exercise in self.exercises)
        if isinstance(results, str):
            return [name, *(["not graded"] * len(self.exercises)), 0, possible, results]
        notes = [
            f"{result.exercise.name}: {result.where}: expected {result.expected}, got {result.got}"
            for result in results
            if result.status == "wrong"
        ]
        if results[0].status == "not graded":
            notes = [results[0].got]
        points = sum(result.points for result in results)
        return [name, *(result.status for result in results), points, possible, " | ".join(notes)]


def copy(file: Path, to: Path) -> Path | str:
    """Copy a submission, a file or the folder of an exercises.py, and return the copied file; or why it cannot be."""
    try:
        if not file.is_file():
            return "no exercises.py in this folder" if file.name == "exercises.py" else "not a file"
        own = [file] if file.name != "exercises.py" else [p for p in file.parent.rglob("*") if p.is_file()]
        for path in own:
            if path.stat().st_size > MOST_BYTES:
                return f"{path.name} is larger than {MOST_BYTES / 2**20:g} MiB"
            target = to / path.relative_to(file.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        os.chmod(to, 0o755)
        return to / file.name
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def safe(cell) -> str:
    """A cell on one line that no spreadsheet takes for a formula, and that can be written: half a surrogate pair is
    a "?"."""
    text = " ".join(str(cell).split()).encode(errors="replace").decode()
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
