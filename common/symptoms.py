"""Find the place in the course that explains a symptom: `python -m common.doctor --symptom "it hangs after an epoch"`.

What is searched is what a reader can open: rows of the tables of docs/, what people have asked in public (threads.yaml
and the museum of incidents), the programs of the catalogue of mistakes, and the sections of all pages. No program of
these is imported or run. Places are compared with the words by TF-IDF over words
without their endings, so that "hangs" finds "hang". The site's search does the same (docs/site/symptoms.js), with the
words, endings and weights of this file.
"""

import ast
import functools
import json
import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from common import ROOT

GUIDES = ("troubleshooting", "cluster", "your-own")  # in which people look for what has gone wrong
NOTHING = "nothing here has these words; try those of the message, or what you see first"
NEAREST = "nothing fits well; the nearest:"
TERSE = 2  # terms of a question of which one is enough
SHORT = 16.0  # a place's weights are at least so long: of a place of few words, one in common is not yet an answer
LINE = 200  # letters of the line that says what it is
ALONE = 4  # words of a row that say something without the section in which it stands


@dataclass(frozen=True)
class Place:
    """Where a symptom is explained.

    page:    the file, from the root
    section: the heading in it, or the name of a program that it shows
    what:    the symptom there, or the section's heading, with its page's title in front
    text:    what stands there
    why:     the cause, or what to do, in a line
    further: other files, as they stand behind page and section
    known:   how much more a row that is made of a symptom counts than a section that has many words
    """

    page: str
    section: str
    what: str
    text: str
    why: str
    further: str = ""
    known: float = 1.0

    @property
    def where(self) -> str:
        return f"{self.page}, {self.section}{self.further}"


def plain(text: str) -> str:
    """Markdown without links' targets, tags, and marks of code and emphasis. Names_of_code stay whole."""
    text = re.sub(r"<[^>]+>", " ", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return re.sub(r"\s+", " ", re.sub(r"[`*$]+|(?<![\w])_+(?=\w)|(?<=\w)_+(?!\w)", "", text)).strip()


def line_of(text: str) -> str:
    """The beginning of a text, up to the end of a sentence or of a word; no table, and nobody's threads."""
    text = plain(re.sub(r"^\W*(Asked in public.*|\|.*)$", "", text, flags=re.MULTILINE))
    if len(text) <= LINE:
        return text
    end = max(text.rfind(mark, 0, LINE) for mark in (". ", "? "))
    return text[: end + 1] if end > LINE // 3 else text[:LINE].rpartition(" ")[0] + " ..."


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


def placed(title: str, heading: str) -> str:
    """A heading that says where it stands: behind the title of its page, or of its section."""
    return heading if heading == title else f"{title} › {heading}"


def guides() -> Iterator[Place]:
    for name in GUIDES:
        path = ROOT / "docs" / f"{name}.md"
        parts = [*sections(path.read_text())] if path.exists() else []
        for heading, body in parts:
            found = [cells for cells in rows(body) if len(cells) > 1 and "](#" not in cells[1]]  # not contents
            for cells in found:
                linked = re.findall(r"\(\.\./([^)#]+\.ipynb)", " ".join(cells[1:]))
                why = line_of("; ".join(filter(None, cells[1:])))
                row = plain(cells[0])
                what = placed(heading, row) if len(row.split()) < ALONE else row
                further = "".join(f", {link}" for link in linked)
                yield Place(f"docs/{name}.md", heading, what, plain(" ".join([cells[0], *cells])), why, further, 1.3)
            if not found:
                what = placed(parts[0][0], heading)
                yield Place(f"docs/{name}.md", heading, what, plain(f"{heading} {body}"), line_of(body))


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
    cause:   of the museum's incidents
    """

    asked: str
    words: str
    called: tuple[str, ...]
    page: str
    anchor: str
    heading: str
    threads: tuple[str, ...]
    cause: str = ""


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


def field(docstring: str, name: str) -> str:
    """What a program's docstring says after `name:`, on this line and on those below that are indented."""
    found = re.search(rf"^{name}: +(.*(?:\n +.*)*)", docstring, re.MULTILINE)
    return found[1] if found else ""


@functools.cache
def asked() -> list[Asked]:
    """All that is known to have been asked in public: of threads.yaml, and the museum's incidents."""
    sections, rows = incident_sections(), yaml.safe_load((ROOT / "common" / "threads.yaml").read_text())
    incidents: dict[str, tuple[str, tuple[str, ...], str]] = {}  # title, threads and cause of each incident
    for path in sorted(ROOT.glob("*/incidents/*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        title, threads = text.partition("\n")[0].rstrip("."), tuple(field(text, "thread").split())
        incidents[path.stem] = title, threads, field(text, "cause")
    named = {row.get("incident") for row in rows}
    found = []
    for row in [*rows, *({"asked": incidents[name][0], "incident": name} for name in incidents if name not in named)]:
        title, threads, cause = incidents.get(row.get("incident"), ("", (), ""))
        page, anchor = sections[row["incident"]] if "incident" in row else row["answer"].split("#")
        heading = section_of(page, anchor).partition("\n")[0].lstrip("# ")
        words = f"{title} {row.get('words', '')}"
        called = tuple(row.get("called", ()))
        threads = (*threads, *row.get("threads", ()))
        found.append(Asked(row["asked"], words, called, page, anchor, heading, threads, cause))
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
        yield Place(
            one.page,
            plain(one.heading),
            plain(one.asked),
            plain(f"{one.asked} {one.asked} {one.words} {' '.join(one.called)} {threads}"),
            line_of(one.cause or section_of(one.page, one.anchor).partition("\n")[2]),
            known=1.3,
        )


def mistakes() -> Iterator[Place]:
    catalogue = next(ROOT.glob("*/*_when_it_hangs.ipynb")).relative_to(ROOT)
    for path in sorted(ROOT.glob("*/mistakes/*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        title = plain(docstring.partition("\n")[0])
        further = f"; {path.relative_to(ROOT)}"
        yield Place(str(catalogue), path.stem, title, plain(docstring), line_of(field(docstring, "fix")), further, 1.3)


def pages() -> Iterator[Place]:
    for path in sorted(ROOT.glob("[0-9][0-9]_*/*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        parts = [*sections(text)]
        for heading, body in parts:
            if not re.search("References|Summary|Exercises", heading):
                what, page = placed(parts[0][0], heading), str(path.relative_to(ROOT))
                yield Place(page, heading, what, plain(f"{heading} {body}"), line_of(body))


SMALL_WORDS = """
    already an and any are as at be been but by can did do does for from get gets go goes had has have how if in into
    is it its me my no not of on or our out so that the their them then there these they this to up us use was
    we were what when where which while who why will with you your
"""
SMALL = frozenset([*SMALL_WORDS.split(), *string.ascii_lowercase])  # they say nothing of a symptom

# The first that fits is cut off, where three letters stay. A stemmer that knows more is another one in each language.
ENDINGS = ["ations", "ation", "ated", "ating", "ates", "ate", "ions", "ion", "ings", "ing", "ied", "ies", "ed", "es",
           "s", "e", "y"]  # fmt: skip
DOUBLED = "bdgmnprt"  # stopping: stop


# What people write and what pages say. Only what is asked gets these words, so a page's own count as they are.
ALSO = {
    "bn": "BatchNorm buffers", "ckpt": "checkpoint", "cp": "context parallelism", "dp": "data parallelism",
    "ep": "expert parallelism", "lr": "learning rate", "moe": "mixture of experts", "oom": "out of memory",
    "amp": "fp16 scaler", "card": "GPU", "cards": "GPUs ranks", "grad": "gradient", "grads": "gradients",
    "pp": "pipeline parallelism", "sp": "sequence parallelism", "tp": "tensor parallelism",
    "acc": "accuracy", "eval": "evaluation test", "evaluation": "test", "validation": "test",
    **dict.fromkeys(("deadlock", "forever", "freeze", "freezes", "frozen", "sits", "stalls", "stops", "stuck", "stucks",
                     "wait", "waiting", "waits"), "hangs"),
    "fp16": "float16 16 bits", "float16": "fp16", "dataloader": "data loading", "val": "evaluation", "port": "address",
    "inconsistent": "differs", "different": "differs", "mismatch": "differs", "wrong": "differs",
    "smaller": "small", "larger": "large", "bigger": "large", "allreduce": "all reduce", "multinode": "two nodes",
    "gpus": "ranks", "processes": "ranks", "workers": "ranks", "world_size": "ranks number",
    "resume": "restart", "resuming": "restart", "timeout": "hangs", "throughput": "slow speed",
    **dict.fromkeys(("half", "third", "quarter", "fourth", "eighth"), "times small factor"),
    **dict.fromkeys(("2x", "4x", "8x", "16x", "32x", "64x", "twofold", "fourfold"), "times"),
    "uneven": "different number of batches", "duplicated": "duplicates", "clipping": "norm", "scheduler": "rate",
}  # fmt: skip


def stem(word: str) -> str:
    """A word without its ending: stops, stopped and stopping are the same."""
    end = next((end for end in ENDINGS if word.endswith(end) and len(word) >= len(end) + 3), "")
    word = word.removesuffix(end)
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] and word[-1] in DOUBLED else word


def terms_of(text: str) -> Iterator[str]:
    """The words of a text, and of its names_of_code, without their endings."""
    yield from (stem(word) for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in SMALL)


@functools.cache
def also() -> dict[str, list[str]]:
    """What people write -> the terms of what pages say."""
    return {word: [*terms_of(text)] for word, text in ALSO.items()}


def asked_terms(words: str) -> list[str]:
    """The terms of a question, each once, with those of what our pages call the same things."""
    names = re.findall(r"[a-z0-9_]+", words.lower())
    return [*dict.fromkeys([*terms_of(words), *(term for name in names for term in also().get(name, ()))])]


@functools.cache
def all_places() -> list[Place]:
    return [*guides(), *questions(), *mistakes(), *pages()]


@functools.cache
def weights() -> dict[str, list[tuple[int, int]]]:
    """Term -> (number of a place, weight of the term there), for all places that have it.

    A term weighs 1 + ln(how often it is there), times its rarity ln((1 + places) / (1 + places that have it)) + 1, as
    scikit-learn's TfidfVectorizer has it. A place's weights have length 1 (less where it is SHORT), times its `known`.
    Rarity counts once more, for the question. In thousandths, so that sums are the same everywhere.
    """
    counts = [Counter(terms_of(place.text)) for place in all_places()]
    seen = Counter(term for count in counts for term in count)
    rare = {term: math.log((1 + len(counts)) / (1 + number)) + 1 for term, number in seen.items()}
    found = defaultdict(list)
    for number, (place, count) in enumerate(zip(all_places(), counts, strict=True)):
        own = {term: (1 + math.log(often)) * rare[term] for term, often in count.items()}
        length = max(SHORT, math.sqrt(sum(weight * weight for weight in own.values())))
        for term, weight in own.items():
            found[term].append((number, round(1000 * weight / length * rare[term] * place.known)))
    return dict(found)


def scores(words: str) -> dict[int, tuple[int, int]]:
    """Number of each place that has anything in common with the words -> its score, and how many terms they share."""
    found: dict[int, tuple[int, int]] = {}
    for term in asked_terms(words):
        for place, weight in weights().get(term, ()):
            score, shared = found.get(place, (0, 0))
            found[place] = score + weight, shared + 1
    return found


def fits(words: str) -> bool:
    """Whether the best place shares more than one term of several with the words. If not, it is a guess."""
    found = scores(words)
    return not found or max(found.values())[1] > 1 or len(asked_terms(words)) <= TERSE


def find(words: str, most: int = 3) -> list[Place]:
    """The places, best first, that have most in common with a symptom in somebody's words, or with a message."""
    found, best = scores(words), dict[str, Place]()
    for number in sorted(found, key=lambda number: (-found[number][0], number)):
        place = all_places()[number]
        # of a question and the section that answers it, the better one; but each row of a table
        best.setdefault(place.where + place.what * place.where.startswith("docs/"), place)
    return [*best.values()][:most]


def answer(words: str) -> str:
    """The places as lines for a terminal; a line that says so where nothing is found, or nothing that fits."""
    found = find(words)
    if not found:
        return NOTHING
    lines = [f"{number}. {place.what}\n   {place.why}\n   {place.where}" for number, place in enumerate(found, start=1)]
    return "\n".join([*([] if fits(words) else [NEAREST]), *lines])
