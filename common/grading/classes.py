"""Grade a class: a row of a table and a page of feedback for each submission.

All submissions are copied before the first is graded, so that none can change another. Each is graded by a Runner of
its own (sandbox.py), two at a time. Whatever lies in a class's folder gets a row, and what can't be graded a reason.
"""

import contextlib
import csv
import os
import re
import stat
import sys
import tempfile
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UserError
from common.grading import sandbox
from common.grading.engine import Exercise, Verdict, grade
from common.grading.feedback import table

AT_A_TIME = 2
MOST_BYTES, MOST_FILES, MOST_IN_ALL = 2**20, 200, 2**24  # of one file of a submission; of one submission
DEEPEST_FOLDER = 16
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
LEFT_BEHIND = ("__pycache__", "__MACOSX", "Thumbs.db", "desktop.ini")  # by systems, not by people


@dataclass
class Submission:
    """file: what is graded; folder: all that comes with it, None for a file alone; problem: why it can't be graded;
    names: of files with several, how many of them lie in the class's folder, by device and number of the file."""

    name: str
    file: Path
    folder: Path | None = None
    problem: str = ""
    names: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)


@dataclass
class Graded:
    """results: the verdicts, or why there are none; remark: what else its row says."""

    name: str
    results: list[Verdict] | str
    remark: str = ""
    text: str = field(default="", repr=False)  # the file's

    @property
    def points(self) -> int:
        return 0 if isinstance(self.results, str) else sum(result.points for result in self.results)

    @property
    def note(self) -> str:
        """What is wrong, in one line."""
        if isinstance(self.results, str):
            notes = [self.results]
        elif self.results and self.results[0].status == "not graded":
            notes = [self.results[0].got]
        else:
            notes = [f"{r.exercise.name}: {r.text}" for r in self.results if r.status == "wrong"]
        return " | ".join([*notes, *filter(None, [self.remark])])


def submissions(path: Path) -> list[Submission]:
    """A file is one submission; in a folder each *.py is one, and each subfolder with its exercises.py; whatever else
    lies there is one with a problem. Raises UserError if there is none."""
    if path.is_file():
        return [Submission(shown(path.stem), path)]
    if not path.is_dir():
        raise UserError(f"--submission {shown(str(path))}: no such file or folder")
    found: list[Submission] = []
    for entry in sorted(path.iterdir(), key=lambda entry: os.fsencode(entry.name)):
        if entry.name in LEFT_BEHIND or entry.name.startswith("._") or entry.name == ".DS_Store":
            continue
        twin = entry.with_suffix("") != entry and os.path.lexists(entry.with_suffix(""))
        one = Submission(entry.name if twin or entry.suffix.lower() != ".py" else entry.stem, entry)
        kind = os.lstat(entry).st_mode
        if stat.S_ISDIR(kind):
            one.file, one.folder = entry / "exercises.py", entry
        elif stat.S_ISLNK(kind):
            one.problem = "a link: hand in a file"
        elif not stat.S_ISREG(kind):
            one.problem = "not a file"
        elif entry.suffix.lower() in ARCHIVES:
            one.problem = "an archive: unpack it into a folder of this name"
        elif entry.suffix.lower() != ".py":
            one.problem = "neither a .py file nor a folder"
        found.append(one)
    if not any(not one.problem for one in found):
        raise UserError(f"--submission {shown(str(path))}: no .py file and no subfolder in it")
    inside, names = names_inside(path), dict[str, int]()
    for one in found:  # different names can look the same
        one.name, one.names = shown(one.name), inside
        same = unicodedata.normalize("NFKC", one.name)
        names[same] = names.get(same, 0) + 1
        one.name += f" ({names[same]})" * (names[same] > 1)
    return found


def names_inside(folder: Path) -> Counter[tuple[int, int]]:
    """How many names each file that has several has in this folder, by its device and its number there."""
    found = Counter[tuple[int, int]]()
    for parent, folders, files in os.walk(folder):
        if len(Path(parent).relative_to(folder).parts) > DEEPEST_FOLDER + 1:
            folders.clear()  # such a submission is not graded
        for name in files:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(parent, name))
                found.update([(about.st_dev, about.st_ino)] * (about.st_nlink > 1))
    return found


def shown(text: str) -> str:
    """A text on one line, in which nothing acts on a terminal: control characters and what is no text as \\x1b."""
    shown = []
    for letter in text:
        byte = ord(letter) - 0xDC00  # of a file's name that is no UTF-8
        escaped = f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else letter.encode("unicode_escape").decode()
        shown.append(letter if letter.isprintable() else escaped)
    return "".join(shown)


def page_of(name: str, taken: set[str]) -> str:
    """A file's name for a submission, without a path, and one that no other has on any system."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip(".")[:100] or "_"
    found, number = plain, 2
    while found.lower() in taken:
        found, number = f"{plain}-{number}", number + 1
    taken.add(found.lower())
    return found


class Grading:
    """Grades the submissions of a chapter: `all` prints a CSV row for each, in their order, as they are ready.

    pages: folder for a page of feedback for each; None for no pages
    hidden: folders that no submission may see, beside the class's own and that of the pages
    """

    def __init__(self, exercises: list[Exercise], minutes: dict, time_limit: float, pages: Path | None = None,
                 hidden: tuple[Path, ...] = (), solutions: str = ""):  # fmt: skip
        self.exercises, self.minutes, self.time_limit, self.pages = exercises, minutes, time_limit, pages
        self.hidden, self.solutions = hidden, solutions

    def all(self, found: list[Submission]) -> list[Graded]:
        missing = sandbox.available()
        if missing:
            note = f"note: no sandbox, for {missing}: submissions run as you, with your files and network"
            print(note, file=sys.stderr)
        if self.pages:
            make_folder("--pages", self.pages)
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["submission", *(exercise.name for exercise in self.exercises), "points", "maximum", "note"])
        homes = {(one.folder or one.file).parent for one in found} | set(filter(None, [self.pages, *self.hidden]))
        hidden, taken = tuple(home.resolve() for home in sorted(homes)), set[str]()
        rows: list[Graded] = []
        with tempfile.TemporaryDirectory(prefix="class-") as staged, ThreadPoolExecutor(AT_A_TIME) as pool:
            copies = [copy(one, Path(staged, str(number))) for number, one in enumerate(found)]
            graded = pool.map(lambda copied: self.one(copied, hidden), copies)
            for number, (one, copied, results) in enumerate(zip(found, copies, graded, strict=True), start=1):
                text = "" if isinstance(copied, str) else copied.read_text(errors="replace").strip()
                rows.append(Graded(one.name, results, text=text))
                rows[-1].remark = self.remark(rows[-1], rows[:-1])
                writer.writerow([safe(cell) for cell in self.row(rows[-1])])
                sys.stdout.flush()
                if sys.stderr.isatty():
                    print(f"\r\033[K{number} of {len(found)}: {one.name}", end="", file=sys.stderr, flush=True)
                if self.pages:
                    page = Path(self.pages, f"{page_of(one.name, taken)}.md")
                    page.write_text(f"# {one.name}\n\n{indented(self.page(rows[-1]))}\n", "utf-8", "replace")
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return rows

    def remark(self, graded: Graded, before: list[Graded]) -> str:
        """What whoever grades should know of a file that earns points."""
        twins = [other.name for other in before if other.text == graded.text]
        if not graded.points or not (twins or graded.text == self.solutions):
            return ""
        return f"equal to the file of {twins[0]}" if twins else "equal to the solutions"

    def one(self, copied: Path | str, hidden: tuple[Path, ...] = ()) -> list[Verdict] | str:
        """The verdicts on one submission, or the reason why there are none."""
        if isinstance(copied, str):
            return copied
        try:
            with sandbox.Runner(copied.parent, self.time_limit, hidden) as runner:
                return grade([(exercise, exercise.name) for exercise in self.exercises], copied, run=runner)
        except sandbox.GradingEnded as reason:
            return str(reason)
        except Exception as error:  # one submission must not end the grading of the others
            return f"cannot be graded ({type(error).__name__}: {error})"

    def page(self, graded: Graded) -> str:
        results = graded.results
        return results if isinstance(results, str) else table(results, minutes=self.minutes)

    def row(self, graded: Graded) -> list:
        possible, results = sum(exercise.points for exercise in self.exercises), graded.results
        none = ["not graded"] * len(self.exercises)
        statuses = none if isinstance(results, str) else [result.status for result in results]
        return [graded.name, *statuses, graded.points, possible, graded.note]


def make_folder(option: str, folder: Path) -> None:
    """Raises UserError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {shown(str(folder))}: {error.strerror}") from None


def copy(one: Submission, to: Path) -> Path | str:
    """Copy a submission, a file or a folder, and return the copied file; or why it cannot be."""
    if one.problem:
        return one.problem
    try:
        to.mkdir(mode=0o755)
        to.chmod(0o755)
        if one.folder is None:
            _copy_file(one.file, to / "submission.py", MOST_BYTES, one.names)
            return to / "submission.py"
        if not os.path.lexists(one.file):
            return "no exercises.py in this folder"
        total, number = 0, 0
        for parent, folders, files in os.walk(one.folder):
            folders[:] = [name for name in folders if name not in LEFT_BEHIND and not name.startswith(".")]
            number += len(folders)
            if len(Path(parent).relative_to(one.folder).parts) > DEEPEST_FOLDER:
                return f"folders in folders, more than {DEEPEST_FOLDER} deep"
            for name in [*folders, *files]:
                path = Path(parent, name)
                if path.is_symlink():
                    return f"{shown(name)} is a link: hand in files"
            for name in files:
                target = to / Path(parent).relative_to(one.folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                total += _copy_file(Path(parent, name), target, MOST_BYTES, one.names)
                number += 1
                if total > MOST_IN_ALL:
                    return f"more than {MOST_IN_ALL >> 20} MiB"
            if number > MOST_FILES:
                return f"more than {MOST_FILES} files and folders"
        return to / "exercises.py"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)


def _copy_file(source: Path, target: Path, most: int, names: Counter[tuple[int, int]]) -> int:
    """Copy a regular file of at most so many bytes that has no name outside of the class, where it would be one of
    yours. Raises ValueError for anything else; waits for nobody."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{shown(source.name)} is not a file")
        if about.st_nlink > max(1, names[about.st_dev, about.st_ino]):
            raise ValueError(f"{shown(source.name)} is a hard link to a file outside of the class: hand in a copy")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{shown(source.name)} is larger than {most / 2**20:g} MiB")
    target.write_bytes(data)
    return len(data)


def beginning(one: Submission) -> str:
    """The text of a submission as far as it is graded; empty where it can't be."""
    with contextlib.suppress(OSError, ValueError), tempfile.TemporaryDirectory() as folder:
        copied = copy(one, Path(folder, "0"))
        return "" if isinstance(copied, str) else copied.read_text(errors="replace")
    return ""


def indented(text: str) -> str:
    """As a block of code in Markdown, which nothing in the text can end."""
    lines = [shown(line) for line in text.split("\n")]
    return "\n".join("    " + line for line in lines)


def safe(cell) -> str:
    """A cell on one line that no spreadsheet takes for a formula, and that can be written and shown."""
    text = shown(" ".join(str(cell).split()))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
