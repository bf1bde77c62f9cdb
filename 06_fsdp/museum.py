"""The museum of incidents: reads the programs in incidents/, runs each with its mistake and without, and shows them.

A program of incidents/ stands for a mistake that somebody has reported, made small enough for a few ranks. Its
docstring is a title, and

    thread:   the addresses at which it was reported, or was told
    reported: what was published of the effect, where that is not on the page
    net:      the cheapest check that catches it
    cause:    what goes wrong

The mistake is one or more lines that end with `# wrong`. Above them stand one or more `# right: LINE`, which take their
place in the fixed program. So there are two modules of each file, `broken` and `fixed`, with the same functions:

    RANKS:     how many ranks it runs on
    on_rank(): what each rank runs; returns what it saw, a `Seen`
    alone():   the same of one process that shares nothing with the ranks
    effect(ranks, one): the number of which the reports speak, such as a ratio, from what `on_rank` has seen on each
               rank, and `alone`; or `effect(*_)`, which starts ranks of its own. The first sentence of its docstring
               is what `verdict` calls the number
    REPORTED:  the least and the greatest value of `effect()` of the broken program that have the reported shape
    EXPECTED:  what it is where nothing is wrong

and besides, the measurements that the page offers. Page, test and the nets' matrix run these, and nothing else.
"""

import ast
import functools
import inspect
import linecache
import math
import re
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from common.lab.equality import TOLERANCE
from common.lab.guard import CheckCollectives
from common.lab.launch import RankFailed, launch
from course.ddp.catalogue import RIGHT

INCIDENTS = Path(__file__).parent / "incidents"
MISTAKE = re.compile(r"^((?: *# right: .*\n)+)((?:.*# wrong$\n)+)", re.MULTILINE)
TIMEOUT = 60.0  # seconds; a program that hangs has its own WAIT


@dataclass
class Seen:
    """What one rank saw.

    numbers: what must equal those of one process, by name: losses, norms, gradients, parameters
    copies:  what must be the same on all ranks, by name: replicas
    norms:   the gradient norm of each step, as it is logged
    """

    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Incident:
    """A program of incidents/, with what its docstring says of it."""

    name: str
    title: str
    threads: tuple[str, ...]
    net: str
    cause: str
    source: str
    reported: str = ""

    @functools.cached_property
    def broken(self) -> types.ModuleType:
        return module(f"{self.name}, broken", RIGHT.sub("", self.source))

    @functools.cached_property
    def fixed(self) -> types.ModuleType:
        return module(f"{self.name}, fixed", MISTAKE.sub(lambda found: RIGHT.sub(r"\1\2\n", found[1]), self.source))

    @property
    def mistake(self) -> str:
        """The function in which the mistake is: the wrong lines after a minus, the right ones after a plus."""
        found = MISTAKE.search(self.source)
        assert found is not None
        line = self.source[: found.start()].count("\n") + 1
        inside = [
            node
            for node in ast.walk(ast.parse(self.source))
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        lines = self.source.splitlines()
        first, last = (inside[-1].lineno, inside[-1].end_lineno) if inside else (line, line + found[0].count("\n") - 1)
        shown, right = [], []
        for text in lines[first - 1 : last]:
            if re.match(r" *# right: ", text):
                right.append("+ " + re.sub(r"# right: ", "", text))
            elif text.endswith("# wrong"):
                shown.append("- " + text.removesuffix("# wrong").rstrip())
            else:
                shown, right = [*shown, *right, "  " + text], []
        return "\n".join(line.rstrip() for line in [*shown, *right])


def module(name: str, source: str) -> types.ModuleType:
    """The module that `source` makes, which tracebacks and the guard call `<name>`."""
    made, filename = types.ModuleType(name), f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), made.__dict__)
    return made


@functools.cache
def incidents() -> dict[str, Incident]:
    """All programs of incidents/, by name."""
    found = {}
    for path in sorted(INCIDENTS.glob("*.py")):
        source = path.read_text()
        title, _, entry = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
        fields = dict(re.findall(r"^(\w+): +(.*(?:\n(?!\w+: ).*)*)", entry, re.MULTILINE))
        about = {key: " ".join(value.split()) for key, value in fields.items()}
        threads = tuple(about["thread"].split())
        found[path.stem] = Incident(
            path.stem, title.rstrip("."), threads, about["net"], about["cause"], source, about.get("reported", "")
        )
    return found


def seen(program: types.ModuleType, timeout: float = TIMEOUT) -> list[Seen]:
    """Run a broken or fixed program on its ranks; what each has seen."""
    return launch(program.on_rank, program.RANKS, timeout=getattr(program, "WAIT", timeout))


def of_one_process(program: types.ModuleType) -> Seen:
    """The same of one process, which computes with one thread, as each rank does."""
    return launch(program.alone, 1)[0]


@dataclass
class Look:
    """What all ranks have seen of the broken and of the fixed program, and what one process has."""

    broken: list[Seen]
    fixed: list[Seen]
    one: Seen


def together(names: Iterable[str]) -> dict[str, Look]:
    """Run incidents that run on equally many ranks and come to an end, broken and fixed, all in one launch."""
    shown = {name: incidents()[name] for name in names}
    programs = [program for one in shown.values() for program in (one.broken, one.fixed)]
    (size,) = {program.RANKS for program in programs}

    def on_rank():
        seen = {name: (one.broken.on_rank(), one.fixed.on_rank()) for name, one in shown.items()}
        return seen, {name: one.fixed.alone() for name, one in shown.items()} if dist.get_rank() == 0 else {}

    ranks = launch(on_rank, size, timeout=TIMEOUT * len(shown))
    return {
        name: Look([seen[name][0] for seen, _ in ranks], [seen[name][1] for seen, _ in ranks], ranks[0][1][name])
        for name in shown
    }


def look(name: str) -> Look:
    """Run one incident, broken and fixed, in one launch."""
    return together([name])[name]


def difference(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of an element, relative to the largest element expected."""
    if mine.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((mine.double() - expected.double()).abs().max() / scale)


def differences(program: types.ModuleType) -> dict[str, float]:
    """For each number that must equal one process, the largest difference over the ranks that have it."""
    expected = of_one_process(program)
    try:
        ranks = seen(program)
    except RankFailed:  # they never come to numbers
        return dict.fromkeys(expected.numbers, float("inf"))
    return compared(ranks, expected)


def ending(program: types.ModuleType) -> str:
    """How a run ends: in which collectives ranks wait in vain, or that none does. Not who of them is heard first, which
    two ranks whose time is over at once don't decide alike each time."""
    try:
        seen(program)
    except RankFailed as error:
        waited = [name for name in ("all_reduce", "barrier", "broadcast") if name in str(error)]
        return f"ranks waited in vain, in {' and in '.join(waited)}"
    return "all ranks came to the end"


def mismatch(program: types.ModuleType) -> str:
    """What `CheckCollectives`, which compares every collective across ranks before it starts, says of a program."""

    def guarded():
        with CheckCollectives():
            return program.on_rank()

    try:
        launch(guarded, program.RANKS, timeout=program.WAIT)
    except RankFailed as error:
        return str(error).splitlines()[0]
    return "all ranks called the same collectives"


def compared(ranks: list[Seen], expected: Seen) -> dict[str, float]:
    """For each number of one process, the largest difference over the ranks that have it."""
    return {
        name: max(difference(rank.numbers[name], value) for rank in ranks if name in rank.numbers)
        for name, value in expected.numbers.items()
    }


def worst(program: types.ModuleType) -> str:
    """The largest difference from one process, of all numbers that must be equal."""
    return in_words(differences(program))


def in_words(by_name: dict[str, float]) -> str:
    """Which number differs most, or that all are equal, or that there are none, where ranks wait for ever."""
    if all(math.isinf(value) for value in by_name.values()):
        return "never ends"
    name = max(by_name, key=lambda name: by_name[name])
    equal = by_name[name] <= TOLERANCE
    return f"equal to one process, all {len(by_name)} numbers" if equal else f"{name} is off by {by_name[name]:.3g}"


def show_beside(looked: Look, name: str, steps: Iterable[int], rank: int = 0, right: str = "one") -> None:
    """Print a number of some steps: of the broken program, and of one process or, with "fixed", of the fixed one."""
    for step in steps:
        other = looked.one if right == "one" else looked.fixed[rank]
        key, words = f"{name} {step}", "one process" if right == "one" else right
        print(f"step {step:2}: {looked.broken[rank].numbers[key]:.4f} broken, {other.numbers[key]:.4f} {words}")


def verdict(name: str, looked: Look | None = None) -> None:
    """Print the effect by its name, broken and fixed, whether each equals one process, and what was published.

    Raises AssertionError where the broken program's effect has not the reported shape, or the fixed one's has.
    """
    incident = incidents()[name]
    numbers, words = [], []
    for what, program in (("broken", incident.broken), ("fixed", incident.fixed)):
        ranks = getattr(looked, what) if looked else []
        one = looked.one if looked else Seen()
        by_name = compared(ranks, one) if looked else differences(program)
        effect, (least, most) = program.effect(ranks, one), program.REPORTED
        assert (least <= effect <= most) == (what == "broken"), (what, effect)
        numbers.append(f"{effect:.4g} {what}")
        words.append(f"{what + ':':9} {in_words(by_name)}")
    called, _, _ = (inspect.getdoc(incident.broken.effect) or "").replace("\n", " ").partition(". ")
    print(f"{called.rstrip('.')}: {', '.join(numbers)}", *words, f"reported: {incident.reported}", sep="\n")


def show_cause(name: str) -> None:
    """Under a notebook cell, folded: what is wrong, in words and in the program, with the lines that fix it."""
    from IPython.display import Markdown, display  # tests need no IPython

    found = incidents()[name]
    where = f"`incidents/{name}.py`, with the fix:\n\n```diff\n{found.mistake}\n```"
    display(Markdown(f"<details>\n<summary>The cause</summary>\n\n{found.cause}\n\n{where}\n\n</details>"))
