"""Find the place in the course that explains a symptom: `python -m common.doctor --symptom "it hangs after an epoch"`.

What is searched is what a reader can open: rows of the tables of docs/, what people have asked in public (threads.yaml
and the museum of incidents), the programs of the catalogue of mistakes, and the sections of all pages. No program of
these is imported or run. Places are compared with the words by TF-IDF over pieces of
words, so that "hangs" finds "hang", and a message finds its row although numbers in it differ.
"""

import ast
import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from common import ROOT

GUIDES = ("troubleshooting", "cluster", "your-own")  # in which people look for what has gone wrong
NOTHING = "nothing here has these words; try those of the message, or what you see first"
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


@dataclass(frozen=True)
class Asked:
    """What somebody has asked or reported in public.

    asked:   the question or symptom, in one sentence
    words:   further words for it
    called:  what threads about it are called
    page:    the page that answers it, from the root
    anchor:  the section's name in links
    heading: the section's heading
    threads: addresses at which it was asked
    """

    asked: str
    words: str
    called: tuple[str, ...]
    page: str
    anchor: str
    heading: str
    threads: tuple[str, ...]


def section_of(page: str, anchor: str) -> str:
    """What stands between an anchor and the next heading of the same rank, with its own heading. Raises KeyError."""
    text = (ROOT / page).read_text()
    if page.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = re.search(rf'<a id="{re.escape(anchor)}"></a>\s+(## .*?)(?=\n## |\Z)', text, re.DOTALL)
    if not found:
        raise KeyError(f"{page} has no section {anchor}")
    return found[1]


def incident_sections() -> dict[str, tuple[str, str]]:
    """Name of each incident of the museum -> page and anchor of its section."""
    found, anchor = {}, ""
    for path in sorted(ROOT.glob("*/*incidents*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            anchor = (re.findall(r'<a id="([^"]+)">', text) or [anchor])[-1]
            for name in re.findall(r'^show_cause\("(\w+)"\)', text, re.MULTILINE):
                found[name] = str(path.relative_to(ROOT)), anchor
    return found


@functools.cache
def asked() -> list[Asked]:
    """All that is known to have been asked in public: of threads.yaml, and the museum's incidents."""
    import yaml  # not at the top: the site's search runs this file without it

    sections, rows = incident_sections(), yaml.safe_load((ROOT / "common" / "threads.yaml").read_text())
    told: dict[str, tuple[str, tuple[str, ...]]] = {}  # title and threads of each incident
    for path in sorted(ROOT.glob("*/incidents/*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        reported = re.search(r"^thread: +(.*(?:\n +.*)*)", text, re.MULTILINE)
        told[path.stem] = text.partition("\n")[0].rstrip("."), tuple(reported[1].split()) if reported else ()
    named = {row.get("incident") for row in rows}
    found = []
    for row in [*rows, *({"asked": told[name][0], "incident": name} for name in told if name not in named)]:
        title, threads = told.get(row.get("incident"), ("", ()))
        page, anchor = sections[row["incident"]] if "incident" in row else row["answer"].split("#")
        heading = section_of(page, anchor).partition("\n")[0].lstrip("# ")
        words = f"{title} {row.get('words', '')}"
        called = tuple(row.get("called", ()))
        found.append(Asked(row["asked"], words, called, page, anchor, heading, (*threads, *row.get("threads", ()))))
    return found


def thread_name(address: str) -> str:
    """A short name, such as pytorch#37359, for the address of a thread."""
    github = re.match(r"https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)", address)
    if github:
        return f"{github[1]}#{github[2]}"
    forum = re.match(r"https://discuss\.pytorch\.org/t/[^/]+/(\d+)", address)
    return f"discuss.pytorch.org, {forum[1]}" if forum else address.rstrip("/").rpartition("/")[2].removesuffix(".md")


def questions() -> Iterator[Place]:
    for one in asked():
        threads = " ".join(f"{thread_name(address)} {address}" for address in one.threads)
        where = f"{one.page}, {plain(one.heading)}"
        yield Place(
            where,
            plain(one.asked),
            plain(f"{one.asked} {one.asked} {one.words} {' '.join(one.called)} {threads}"),
            known=1.3,
        )


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


SMALL_WORDS = """
    an and any are as at be been but by can did do does for from get gets go goes had has have how if in into
    is it its me my no not of on or our out so that the their them then there these they this to up us use was
    we were what when where which while who why will with you your
"""
SMALL = frozenset(SMALL_WORDS.split())  # they say nothing of a symptom


# What people write and what pages say. Only what is asked gets these words, so a page's own count as they are.
ALSO = {
    "bn": "BatchNorm buffers", "ckpt": "checkpoint", "cp": "context parallelism", "dp": "data parallelism",
    "ep": "expert parallelism", "lr": "learning rate", "moe": "mixture of experts", "oom": "out of memory",
    "pp": "pipeline parallelism", "sp": "sequence parallelism", "tp": "tensor parallelism",
    "acc": "accuracy", "eval": "evaluation test", "evaluation": "test", "validation": "test",
    "deadlock": "hangs", "freezes": "hangs", "frozen": "hangs", "stalls": "hangs", "stuck": "hangs", "stucks": "hangs",
    "inconsistent": "differs", "different": "differs", "mismatch": "differs", "wrong": "differs",
    "multinode": "two nodes", "gpus": "ranks", "processes": "ranks", "workers": "ranks", "world_size": "ranks number",
    "resume": "restart", "resuming": "restart", "timeout": "hangs", "throughput": "slow speed",
    "uneven": "different number of batches", "duplicated": "duplicates", "clipping": "norm", "scheduler": "rate",
}  # fmt: skip


# How many of something there were differs from report to report. Threads' numbers are longer, or come after a #.
COUNTS = re.compile(r"(?<![\w#/.-])\d{1,4}(?:[.,]\d+)*[%x]?(?![\w#])")
REPORT = 10  # words that make a report; in fewer, as in a message, numbers may be what one knows it by


def in_our_words(words: str) -> str:
    """A question with what our pages call the same things; a report without the numbers of its run."""
    also = [ALSO[word] for word in dict.fromkeys(re.findall(r"\w+", words.lower())) if word in ALSO]
    words = plain(words)
    without = COUNTS.sub(" ", words)
    return " ".join([without if len([*words_of(without)]) >= REPORT else words, *also])


def words_of(text: str) -> Iterator[str]:
    yield from (word for word in re.findall(r"\w\w+", text.lower()) if word not in SMALL)


def pieces_of(text: str) -> Iterator[str]:
    """All runs of three to five letters within a word, whose ends count as letters."""
    for word in text.lower().split():
        padded = f" {word} "
        for size in range(3, 6):
            yield from (padded[place : place + size] for place in range(max(1, len(padded) - size + 1)))
            if len(padded) <= size:
                break


class Likeness:
    """Texts as vectors of what `cut` makes of them, weighed by TF-IDF: ln((1 + n) / (1 + how many have it)) + 1 times
    1 + ln(how often it is there), in length 1 (scikit-learn's TfidfVectorizer with sublinear_tf). It is written out
    here because it runs in a browser too, on the site."""

    def __init__(self, cut: Callable[[str], Iterable[str]], texts: list[str]):
        self.cut = cut
        counts = [Counter(cut(text)) for text in texts]
        seen = Counter(term for count in counts for term in count)
        self.rare = {term: math.log((1 + len(texts)) / (1 + number)) + 1 for term, number in seen.items()}
        self.places: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for place, count in enumerate(counts):
            for term, weight in self.weighed(count).items():
                self.places[term].append((place, weight))

    def weighed(self, count: Counter[str]) -> dict[str, float]:
        found = {term: (1 + math.log(often)) * self.rare[term] for term, often in count.items() if term in self.rare}
        length = math.sqrt(sum(weight * weight for weight in found.values())) or 1.0
        return {term: weight / length for term, weight in found.items()}

    def of(self, words: str) -> Counter[int]:
        """Place of a text -> its likeness to the words, from 0 to 1, where they have anything in common."""
        found: Counter[int] = Counter()
        for term, weight in self.weighed(Counter(self.cut(words))).items():
            for place, other in self.places[term]:
                found[place] += weight * other  # type: ignore[assignment]  # a Counter of floats
        return found


@functools.cache
def all_places() -> list[Place]:
    return [*guides(), *questions(), *mistakes(), *pages()]


class Finder:
    """Places, by their likeness in words and in pieces of words."""

    def __init__(self, places: list[Place]):
        self.places = places
        self.tables = [Likeness(cut, [place.text for place in places]) for cut in (pieces_of, words_of)]

    def find(self, words: str, most: int = 3) -> list[Place]:
        """The places, best first, that have most in common with a symptom in somebody's words, or with a message."""
        found: Counter[int] = Counter()
        for table in self.tables:
            found.update(table.of(in_our_words(words)))
        score = {place: like / len(self.tables) * self.places[place].known for place, like in found.items()}
        best: dict[str, Place] = {}  # of a question and the section that answers it, the better one
        for place in sorted(score, key=lambda place: -score[place]):
            if score[place] > LEAST:
                best.setdefault(self.places[place].where, self.places[place])
        return [*best.values()][:most]


@functools.cache
def finder() -> Finder:
    return Finder(all_places())


def find(words: str, most: int = 3) -> list[Place]:
    return finder().find(words, most)


def answer(words: str) -> str:
    """The places as lines for a terminal; a line that says so where nothing is found."""
    found = find(words)
    if not found:
        return NOTHING
    return "\n".join(f"{number}. {place.what}\n   {place.where}" for number, place in enumerate(found, start=1))
