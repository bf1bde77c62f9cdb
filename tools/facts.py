"""Write what pages repeat from code and data: `make facts`.

Between `<!-- facts: NAME -->` and `<!-- end -->` in README.md, CONTRIBUTING.md or docs/ stands what the function NAME
makes, from code or data. It is given what stands there now: a table keeps the columns that somebody has written, and a
new line has "..." in them, which has to be replaced by words. Notebooks have one such place without marks, the minutes
that their first cell promises.

    python -m tools.facts            write
    python -m tools.facts --check    name the places that differ, and exit with 1 if there are any
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from common import ROOT, check, cluster_check, questions, symptoms
from common.axes import AXES
from common.config import Config, shared
from common.errors import Parser
from common.options import flag
from course.strategies import STRATEGIES

MARK = re.compile(r"(<!-- facts: ([a-z -]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
MINUTES = re.compile(r"(\*\*Time:\*\* )\d+( minutes)")
PRINTS_CODE = re.compile(r"print\(.*(getsource|read_text)\(")
TO_WRITE = "..."  # in a cell that somebody has to write

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[0-9][0-9]_*/*.ipynb"))  # in reading order
FRONT = "distributed_training.ipynb"  # the whole subject on one page; it belongs to no chapter
EVERY_NOTEBOOK = [FRONT, *NOTEBOOKS]
CHAPTERS = sorted({path.partition("/")[0] for path in NOTEBOOKS})


# --- tables -----------------------------------------------------------------------------------------------------------


def table(titles: list[str], lines: list[list[str]]) -> str:
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n\n" + "\n".join(re.sub(" +", " ", f"| {' | '.join(cells)} |") for cells in rows) + "\n\n"


def written(old: str, column: str, key: str, name: str) -> str:
    """The cell of a column that somebody wrote, in the line whose cell `key` has the name; or the sign to write it."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in old.splitlines() if line.startswith("|")]
    lines = [dict(zip(rows[0], row, strict=False)) for row in rows[2:]]
    return next((line[column] for line in lines if column in line and name in line.get(key, "")), TO_WRITE)


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- chapters and notebooks -------------------------------------------------------------------------------------------


def words(text: str) -> int:
    """Those of Markdown that are read: without code, formulas, and the targets of links."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\]\(.*?\)|<.*?>", " ", text, flags=re.DOTALL)
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def reading_minutes(notebook) -> float:
    """A minute for 150 words or for 8 lines of code, be it in a cell or printed by one."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", prose, re.DOTALL | re.MULTILINE)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = [out.get("text", "") for cell in cells if PRINTS_CODE.search(cell.source) for out in cell.outputs]
    lines = [line for text in [*blocks, *(cell.source for cell in cells), *printed] for line in text.splitlines()]
    return words(prose) / 150 + sum(line.strip() != "" for line in lines) / 8


def read(path: Path) -> Any:
    """The notebook at this path."""
    import nbformat  # two seconds of a processor, for the grammars of JSON schemas: not for those who read no page

    return nbformat.read(path, as_version=4)


@functools.cache
def minutes(path: str) -> float:
    """The minutes of a page that is read from beginning to end; a page to look things up in promises none."""
    notebook = read(ROOT / path)
    return reading_minutes(notebook) if MINUTES.search(notebook.cells[0].source) else 0.0


def to_fives(some_minutes: float) -> int:
    return 5 * round(some_minutes / 5)


def hours(some_minutes: float) -> str:
    return f"{round(some_minutes / 30) / 2:g} h"


def pages_of(chapter: str) -> list[str]:
    return [path for path in NOTEBOOKS if path.startswith(f"{chapter}/")]


def reading_of(chapter: str) -> float:
    return sum(map(minutes, pages_of(chapter)))


def work_of(chapter: str) -> int:
    """Minutes that its exercises allow."""
    return sum(map(int, check.minutes_of(chapter).values()))


def bugs_of(chapter: str) -> list[str]:
    bugs = check.classroom(chapter, "bugs")
    return [*bugs.BUGS, *getattr(bugs, "DROPOUT_BUGS", ())]


def chapters(old: str, rest: str) -> str:
    lines = []
    for chapter in CHAPTERS:
        counts = [len(pages_of(chapter)), len(check.exercises_of(chapter)), len(bugs_of(chapter))]
        subject = written(old, "subject", "folder", f"[{chapter}]")
        times = [hours(reading_of(chapter)), hours(work_of(chapter))]
        lines.append([f"[{chapter}]({chapter})", subject, *map(str, counts), *times])
    titles = ["folder", "subject", "notebooks", "exercises", "planted bugs", "reading", "time for exercises"]
    return table(titles, lines)


def listed_pages(old: str, paths: list[str], timed: bool) -> list[list[str]]:
    """A line for each page: chapter, link, the words that somebody wrote on it, and minutes where it has some."""
    lines = []
    for path in paths:
        heading = read(ROOT / path).cells[0].source.partition("\n")[0].removeprefix("# ")
        about = written(old, "what it is about", "page", f"]({path})")
        lines.append([path[:2], f"[{heading}]({path})", about, *([str(to_fives(minutes(path)))] if timed else [])])
    return lines


def trail(old: str, rest: str) -> str:
    """The pages that are read from beginning to end."""
    titles = ["chapter", "page", "what it is about", "minutes"]
    return table(titles, listed_pages(old, [path for path in NOTEBOOKS if minutes(path)], True))


def library(old: str, rest: str) -> str:
    """The pages to look things up in."""
    titles = ["chapter", "page", "what it is about"]
    return table(titles, listed_pages(old, [path for path in NOTEBOOKS if not minutes(path)], False))


def trail_hours(old: str, rest: str) -> str:
    return f"{sum(map(minutes, NOTEBOOKS)) / 60:.0f}"


def path_hours(old: str, rest: str) -> str:
    """The hours of reading the pages and chapters that the rest of a list's item names."""
    named = re.split(r"\n\n|\n\* ", rest)[0]
    listed = [path for path in NOTEBOOKS if f"]({path})" in named or re.search(rf"chapter {path[:2]}\b", named)]
    return f"{sum(map(minutes, listed)) / 60:.0f}"


def week_hours(old: str, rest: str) -> str:
    """The hours of a week, reading and exercises, in a course of as many weeks as the table for instructors has."""
    weeks = re.findall(r"^\| \d+ \| \[", (ROOT / "docs/instructors.md").read_text(), re.MULTILINE)
    return f"{sum(reading_of(chapter) + work_of(chapter) for chapter in CHAPTERS) / 60 / len(weeks):.0f}"


def weeks(old: str, rest: str) -> str:
    """The pages of a week are somebody's choice; how long they take to read is computed."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in old.splitlines() if line.startswith("|")]
    lines = []
    for week, pages, _, task in rows[2:]:
        listed = [path for path in NOTEBOOKS if f"(../{path})" in pages]
        lines.append([week, pages, f"{to_fives(sum(map(minutes, listed)))} min", task])
    return table(rows[0], lines)


def exercises(old: str, rest: str) -> str:
    lines = []
    for chapter in CHAPTERS:
        text = (ROOT / chapter / "exercises.py").read_text()
        for one in check.exercises_of(chapter):
            (importance,) = re.findall(rf"^def {one.name}\((?:.|\n)*?Importance ([●○]+)", text, re.MULTILINE)[:1]
            allowed = check.minutes_of(chapter)[one.name]
            lines.append([chapter[:2], code(one.name), one.difficulty, importance, allowed, str(one.points)])
    return table(["chapter", "exercise", "difficulty", "importance", "minutes", "points"], lines)


# --- strategies and options -------------------------------------------------------------------------------------------


def default_axes(name: str) -> list[str]:
    """Those along which a strategy divides something where no --mesh is given; of "mesh", those that it may have."""
    kinds = STRATEGIES[name].implementations.values()
    there = {(cls, axis) for cls in kinds for axis in (cls.axes if name == "mesh" else cls.preset)}
    found = {axis for cls, axis in there if axis != "data" or "data" in cls.data_axes}
    return [axis for axis in AXES if axis in found]


def how_many(name: str, kind: str) -> str:
    """Whether a strategy has an implementation, and which of them is for one process only."""
    entry = STRATEGIES[name]
    if kind not in entry.implementations:
        return ""
    alone = {other for other in entry.implementations if tuple(entry.sizes(other)) == (1,)}
    return "on one process" if kind in alone and len(alone) < len(entry.implementations) else "yes"


def strategies(old: str, rest: str) -> str:
    lines = []
    for name in STRATEGIES:
        divided = written(old, "what is divided over the processes", "`--strategy`", f"`{name}`")
        lines.append(
            [code(name), divided, code(*default_axes(name)), how_many(name, "pytorch"), how_many(name, "by-hand")]
        )
    return table(["`--strategy`", "what is divided over the processes", "axes", "PyTorch's", "`--by-hand`"], lines)


def engines(old: str, rest: str) -> str:
    """Implementations by libraries, and the script of each; a script that serves several strategies has one line."""
    found: dict[tuple, list[str]] = {}
    for name, entry in STRATEGIES.items():
        for engine, (package, place) in ((engine, (one.package, one.place)) for engine, one in entry.engines.items()):
            _, chapter, module = place.partition(":")[0].split(".")
            script = f"{entry.chapter}/{module}.py"
            found.setdefault((script, engine, package), []).append(name)
    lines = []
    for (script, engine, package), names in found.items():
        shows = written(old, "what it shows", "script", f"[{script}]")
        lines.append([code(*names), code(engine), package, f"[{script}](../{script})", shows])
    return table(["strategies", "`--implementation`", "package", "script", "what it shows"], lines)


def line_of(item, *more: str) -> list[str]:
    """An option as a line of a table; where a default is computed, its help says how."""
    text, _, computed = item.metadata["help"].partition(" (default: ")
    default, _, rest = computed.partition(")")
    if not default and item.default is not False and item.default != "":
        default = code(f"{item.default:g}" if isinstance(item.default, float) else str(item.default))
    choices = f"; {code(*map(str, item.metadata['choices']))}" if item.metadata["choices"] else ""
    return [code(flag(item.name)), *more, default, text + rest + choices]


def options(old: str, rest: str) -> str:
    lines = []
    for item in shared():
        if item.name in Config.GROUPS:
            lines.append([f"*{Config.GROUPS[item.name]}*", "", ""])
        lines.append(line_of(item))
    return table(["option", "default", "what it sets"], lines)


def own_options(old: str, rest: str) -> str:
    found: dict[tuple[str, str], tuple[Any, list[str]]] = {}
    for name, entry in STRATEGIES.items():
        for kind in entry.implementations.values():
            for item in fields(kind.Options):
                found.setdefault((item.name, item.metadata["help"]), (item, []))[1].append(name)
    lines = [line_of(item, code(*dict.fromkeys(names))) for item, names in found.values()]
    return table(["option", "of", "default", "what it sets"], lines)


def torch_pin(old: str, rest: str) -> str:
    (pin,) = re.findall(r"^torch==.*", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    return code(pin)


def pythons(old: str, rest: str) -> str:
    """The oldest and the newest, with which CI runs everything."""
    ((oldest, newest),) = re.findall(r'python: \["(.*)", "(.*)"\]', (ROOT / ".github/workflows/test.yml").read_text())
    return f"{oldest} to {newest}"


def seconds_of_a_collective(old: str, rest: str) -> str:
    return f"{Config.timeout:g}"


def slow_rank(old: str, rest: str) -> str:
    return f"{cluster_check.STRAGGLER:g}"


def slow_link(old: str, rest: str) -> str:
    return f"{cluster_check.SLOW:g}"


def configs(old: str, rest: str) -> str:
    """Each file's first line says what it is for, and the second starts it."""
    lines = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        first = path.read_text().partition("\n")[0].removeprefix("#").strip()
        lines.append([f"[{path.name}](../configs/{path.name})", first])
    return table(["file", "what it is for"], lines)


# --- make -------------------------------------------------------------------------------------------------------------

QUIET = ("@test", "@echo", "@touch", "@install", "@$(PYTHON)", "test -x")  # what makes a recipe safe, and no step of it


def recipes() -> dict[str, tuple[list[str], list[str]]]:
    """A target of the Makefile -> the targets before it, and its commands."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Makefile").read_text())
    found = re.findall(r"^([\w-]+|\$\(\w+\)):([^=\n]*)\n((?:\t.*\n)*)", text, re.MULTILINE)
    return {name: (before.split(), recipe.replace("\t", "").splitlines()) for name, before, recipe in found}


def commands_of(target: str) -> list[str]:
    """What `make target` runs, as one would type it in the virtual environment."""
    before, recipe = recipes().get(target, ([], []))
    set_first = "".join(f"{name}={value} " for name, value in re.findall(
        rf"^{target}: export (\w+) := (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))  # fmt: skip
    lines = [set_first + line for name in before if name != "$(INSTALLED)" for line in commands_of(name)]
    for line in recipe:
        if not line.startswith(QUIET):
            line = re.sub(r" \|\| \[.*| +#.*| > /dev/null", "", line.removeprefix("@"))
            line = (
                line.replace("$(NOTEBOOKS)", f"{FRONT} 0*/*.ipynb")
                .replace("$(BIN)/", "")
                .replace("python -m pip", "pip")
            )
            lines.append(" ".join(re.sub(r"\$\(\w+\)", "", line).split()))
    return lines


def commands(old: str, rest: str) -> str:
    (phony,) = re.findall(r"^\.PHONY: ((?:.|\n)*?[^\\])$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [
        [code(f"make {name}"), "<br>".join(map(code, commands_of(name)))] for name in phony.replace("\\", "").split()
    ]
    return table(["target", "what it runs"], [line for line in lines if line[1]])


# --- writing ----------------------------------------------------------------------------------------------------------


def asked_in_public(old: str, rest: str) -> str:
    """What people have asked, the section that answers it, and the threads."""
    lines = []
    for one in symptoms.asked():
        target = one.page.removeprefix("docs/") if one.page.startswith("docs/") else f"../{one.page}"
        threads = ", ".join(f"[{symptoms.thread_name(address)}]({address})" for address in one.threads)
        lines.append([one.asked, f"[{one.heading.replace('|', ' ')}]({target}#{one.anchor})", threads])
    return table(["symptom or question", "where the course answers", "threads"], lines)


def predictions(old: str, rest: str) -> str:
    """What the site asks on each page, with the answers folded, for who reads the pages elsewhere."""
    found = []
    for page, own in questions.questions().items():
        first = json.loads((ROOT / f"{page}.ipynb").read_text())["cells"][0]["source"]
        title = "".join(first).splitlines()[0].removeprefix("# ")
        found.append(f"## [{title}](../{page}.ipynb)")
        for number, one in enumerate(own, 1):
            choices = "; or ".join(map(one.filled, one.choices or ()))
            right = one.filled(one.right) if one.right else f"{one.found[one.answer]} {one.unit}".strip()
            found += [f"**{number}.** {one.ask}" + f" *{choices}*" * bool(choices),
                      "<details><summary>Answer</summary>", f"**{right}**: {one.filled(one.because)}",
                      "</details>"]  # fmt: skip
    return "\n\n" + "\n\n".join(found) + "\n\n"


FACTS: dict[str, Callable[[str, str], str]] = {
    made.__name__.replace("_", " "): made
    for made in (
        chapters, trail, library, trail_hours, path_hours, week_hours, weeks, exercises, strategies, engines, options,
        own_options, configs, commands, torch_pin, pythons, seconds_of_a_collective, slow_rank, slow_link,
        asked_in_public, predictions,
    )
}  # fmt: skip


def places(page: Path) -> Iterator[tuple[re.Match, str]]:
    """The marked places of a page, and what belongs there. Raises KeyError for a name that is not in FACTS."""
    text = page.read_text()
    for place in MARK.finditer(text):
        if place[2] not in FACTS:
            raise KeyError(f"{page.relative_to(ROOT)} asks for facts: {place[2]}; there are {', '.join(FACTS)}")
        yield place, FACTS[place[2]](place[3], text[place.end() :])


def differing() -> Iterator[tuple[Path, str, str]]:
    """Pages that are not what they should be: page, the text it should have, and which place it is."""
    for page in PAGES:
        text = page.read_text()
        for place, made in reversed([*places(page)]):  # from the end, so that places before stay where they are
            if made != place[3]:
                text = text[: place.start(3)] + made + text[place.end(3) :]
                yield page, text, f"facts: {place[2]}"
    for name in EVERY_NOTEBOOK:
        text = (ROOT / name).read_text()
        made = MINUTES.sub(rf"\g<1>{to_fives(minutes(name))}\2", text, count=1)
        if made != text:
            yield ROOT / name, made, "the minutes that its first cell promises"


def left_to_write() -> Iterator[str]:
    """Lines of tables with a cell that somebody has to write."""
    for page in PAGES:
        for place in MARK.finditer(page.read_text()):
            for line in place[3].splitlines():
                if f"| {TO_WRITE} |" in line:
                    yield f"{page.relative_to(ROOT)}, facts: {place[2]}: write words in place of {TO_WRITE} in {line}"


def main(argv: list[str]) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something differs")
    checking, found = parser.asked(argv).check, [*differing()]
    for page, text, which in found:
        print(f"{page.relative_to(ROOT)}, {which}: {'run `make facts`' if checking else 'written anew'}")
        if not checking:
            page.write_text(text)
    for line in left_to_write():
        print(line)
    sys.exit(1 if found and checking else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
