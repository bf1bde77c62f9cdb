"""Find the place in the course that explains a symptom: `python -m common.doctor --symptom "it hangs after an epoch"`.

What is searched is what a reader can open: rows of the tables of docs/, the programs of the catalogue of mistakes, and
the sections of all pages. Nothing is imported or run. Places are compared with the words by TF-IDF over pieces of
words, so that "hangs" finds "hang", and a message finds its row although numbers in it differ.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import ROOT

GUIDES = ("troubleshooting", "incidents", "cluster", "your-own")  # in which people look for what has gone wrong
LEAST = 0.08  # likeness below which a place has hardly more than small words in common with the question


@dataclass(frozen=True)
class Place:
    """Where a symptom is explained.

    where: file and section
    what:  the symptom there, or the section's heading
    text:  what stands there
    known: how much more a row that is made of a symptom counts than a section that has many words
    """

    where: str
    what: str
    text: str
    known: float = 1.0


def plain(text: str) -> str:
    """Markdown without links' targets, tags, and marks of code and emphasis."""
    text = re.sub(r"<[^>]+>", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return re.sub(r"\s+", " ", re.sub(r"[`*_$]+", " ", text)).strip()


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(heading, what stands below it) of a Markdown text."""
    for part in re.split(r"^#+ ", text, flags=re.MULTILINE):
        heading, _, body = part.partition("\n")
        if body.strip():
            yield plain(heading), body


def rows(body: str) -> Iterator[list[str]]:
    """The rows of a section's tables, without their heads."""
    lines = [line.strip() for line in body.splitlines()]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not re.match(r"\|[ -]+\|", line) and not re.match(r"\|[ -]+\|", after):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def guides() -> Iterator[Place]:
    for name in GUIDES:
        path = ROOT / "docs" / f"{name}.md"
        for heading, body in sections(path.read_text()) if path.exists() else ():
            found = [cells for cells in rows(body) if len(cells) > 1 and "](#" not in cells[1]]  # not contents
            for cells in found:
                linked = re.findall(r"\(\.\./([^)#]+\.ipynb)", " ".join(cells[1:]))
                where = ", ".join([f"docs/{name}.md, {heading}", *linked])
                yield Place(where, plain(cells[0]), plain(" ".join([cells[0], *cells])), known=1.3)
            if not found:
                yield Place(f"docs/{name}.md, {heading}", heading, plain(f"{heading} {body}"))


def mistakes() -> Iterator[Place]:
    catalogue = next(ROOT.glob("*/*_when_it_hangs.ipynb")).relative_to(ROOT)
    for path in sorted(ROOT.glob("*/mistakes/*.py")):
        told = ast.get_docstring(ast.parse(path.read_text())) or ""
        title = plain(told.partition("\n")[0])
        where = f"{catalogue}, {path.stem}; {path.relative_to(ROOT)}"
        yield Place(where, title, plain(told), known=1.3)


def pages() -> Iterator[Place]:
    for path in sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for heading, body in sections(text):
            if not re.search("References|Summary|Exercises", heading):
                yield Place(f"{path.relative_to(ROOT)}, {heading}", heading, plain(f"{heading} {body}"))


@functools.cache
def index() -> tuple[list[Place], list[tuple[Any, Any]]]:
    """All places; and twice, by pieces of words and by words, what turns a text into numbers, and the places so."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # a second that only who asks should wait

    places = [*guides(), *mistakes(), *pages()]
    by_pieces = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
    by_words = TfidfVectorizer(stop_words="english", sublinear_tf=True)
    return places, [(by, by.fit_transform([place.text for place in places])) for by in (by_pieces, by_words)]


def find(words: str, most: int = 3) -> list[Place]:
    """The places, best first, that have most in common with a symptom in somebody's words, or with a message."""
    places, tables = index()
    likeness = sum((table @ by.transform([words]).T).toarray()[:, 0] for by, table in tables) / len(tables)
    score = [like * place.known for like, place in zip(likeness, places, strict=True)]
    best = sorted(range(len(places)), key=lambda place: -score[place])[:most]
    return [places[place] for place in best if score[place] > LEAST]


def answer(words: str) -> str:
    """The places as lines for a terminal; a line that says so where nothing is found."""
    found = find(words)
    if not found:
        return "nothing here has these words; try those of the message, or what you see first"
    return "\n".join(f"{number}. {place.what}\n   {place.where}" for number, place in enumerate(found, start=1))
