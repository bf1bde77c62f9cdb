"""Predict first: questions about a page's outputs, which a reader answers before the output is shown.

    python -m common.questions FILES

Questions stand beside the pages, in questions.yaml of each chapter. No answer is typed there: it is what `find` finds
in the stored output of a cell, which `make test` compares with that of a new run. The site asks them. Files that
readers export from it are added up by this program, question by question, for a teacher.
"""

import json
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from common import ROOT, stored
from common.errors import Parser, UserError, one_line_errors


@dataclass(frozen=True)
class Question:
    """A question of a page.

    page:    its path without the ending
    number:  its place on the page, from 0
    cell:    the id of the cell whose output answers it
    ask:     the question; it says what is already known
    because: what is shown after the answer; {0}, {1} ... stand for what `find` has captured
    find:    regular expression that is found in the output
    before:  ids of cells whose outputs stand before that of `cell`, for `find`
    choices: what can be picked, and `right` is one of them; {0} ... as above. None where a number is asked for
    unit:    of that number, which is the captured group `answer`
    within:  relative distance from it that counts as right
    """

    page: str
    number: int
    cell: str
    ask: str
    because: str
    find: str
    before: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    right: str | None = None
    unit: str = ""
    within: float = 0.1
    answer: int = 0

    @property
    def name(self) -> str:
        return f"{self.page}#{self.cell}-{self.number}"

    @property
    def found(self) -> tuple[str, ...]:
        """What `find` has captured. Raises ValueError where nothing is found."""
        shown = "".join(outputs(self.page).get(cell, "") for cell in (*self.before, self.cell))
        match = re.search(self.find, shown)
        if not match:
            raise ValueError(f"{self.name}: nothing like {self.find!r} in the output of {self.cell}")
        return match.groups()

    def filled(self, text: str) -> str:
        return text.format(*self.found)

    @property
    def value(self) -> float:
        """The number that is asked for."""
        return float(self.found[self.answer].replace(",", ""))

    @property
    def interval(self) -> tuple[float, float]:
        """What counts as right, of a number."""
        margin = abs(self.value) * self.within
        return self.value - margin, self.value + margin

    def is_right(self, given: str) -> bool:
        if self.choices is not None:
            assert self.right is not None
            return given == self.filled(self.right)
        low, high = self.interval
        try:
            return low <= float(given.replace(",", "")) <= high
        except ValueError:
            return False


@cache
def outputs(page: str) -> dict[str, str]:
    """Id of each cell of a page -> the text of its stored output, where nbval compares it."""
    cells = json.loads((ROOT / f"{page}.ipynb").read_text())["cells"]
    return {cell["id"]: text_of(cell) for cell in cells if cell["cell_type"] == "code"
            and "nbval-ignore-output" not in cell["metadata"].get("tags", [])}  # fmt: skip


def text_of(cell: dict[str, Any]) -> str:
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "".join("".join(text) for text in texts)


@cache
def questions() -> dict[str, list[Question]]:
    """Page -> its questions, in the order in which they are asked."""
    found: dict[str, list[Question]] = {}
    for path in sorted(ROOT.glob("0*/questions.yaml")):
        for name, asked in yaml.safe_load(path.read_text()).items():
            page = f"{path.parent.name}/{name}"
            found[page] = [question(page, number, fields) for number, fields in enumerate(asked)]
    return found


def question(page: str, number: int, fields: dict[str, Any]) -> Question:
    fields = dict(fields)
    if "choices" in fields:
        fields["choices"] = tuple(map(str, fields["choices"]))
    return Question(page, number, before=tuple(fields.pop("with", ())), **fields)


# --- what a teacher does with the files of a class --------------------------------------------------------------------


@dataclass
class Tally:
    right: int = 0
    wrong: list[str] = field(default_factory=list)


def tally(paths: list[Path]) -> dict[str, Tally]:
    """Question -> how many answered it rightly, and what the others said. Files are judged anew, by the pages that are
    here. Raises UserError for a file that is none of the site's."""
    known = {one.name: one for own in questions().values() for one in own}
    found: dict[str, Tally] = {}
    for path in paths:
        try:
            found_here = stored.parsed(path, stored.read(path))["predictions"]
            given = {name: str(one["given"]) for name, one in found_here.items()}
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: not a file of predictions; the site's pages export them at their ends") from None
        for name, text in given.items():
            if name not in known:
                raise UserError(f"{path}: no question is called '{name}' here; is this the version that the class has?")
            own = found.setdefault(name, Tally())
            if known[name].is_right(text):
                own.right += 1
            else:
                own.wrong.append(text)
    return found


def main(argv: list[str]) -> None:
    about = "How a class has predicted, question by question; hardest first."
    parser = Parser("python -m common.questions", description=about)
    parser.add_argument("files", nargs="+", type=Path, help="what readers have exported from the site")
    with one_line_errors():
        found = tally(parser.parse_args(argv).files)
        known = {one.name: one for own in questions().values() for one in own}
        for name, own in sorted(found.items(), key=lambda pair: pair[1].right / (pair[1].right + len(pair[1].wrong))):
            print(f"{own.right:4} of {own.right + len(own.wrong):3}  {known[name].page}: {known[name].ask}")
            if own.wrong:
                print(f"{'':13}not: {', '.join(sorted(own.wrong))}")


if __name__ == "__main__":
    main(sys.argv[1:])
