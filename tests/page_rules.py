"""What the pages say is true of the code: rules for commands, options, files, names, counts and tables.

Each is a function from a page and its text to what is wrong. tests/test_docs.py applies them, and shows that each
refuses a planted mistake.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers import launcher
from nbformat import read
from notebook_rules import reading_minutes
from torch.distributed.run import get_args_parser

from common import ROOT, check
from common.command_line import full_parser, parse
from common.errors import UserError
from course.ddp.loading import LOADING
from course.pipeline.schedules import SCHEDULES
from course.strategies import BY_AXES, STRATEGIES

MAKEFILE = (ROOT / "Makefile").read_text()
CHAPTERS = sorted(folder.name for folder in ROOT.glob("[0-9][0-9]_*"))
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("0*/*.ipynb"))


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of fenced blocks, on one line each."""
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", outside)]


def code(text: str) -> list[str]:
    """The lines of code of a page: in backticks, and those of fenced blocks with their continuations."""
    lines = []
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
        lines += re.sub(r" *\\\n\s*", " ", block).splitlines()
    return lines + spans(text)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each line of code that is a command, without comments; a variable in quotes is some word."""
    for line in code(text):
        for part in re.split(r"&&|;|\|", re.sub(r'"\$\w+"', "variable", line)):
            with contextlib.suppress(ValueError):  # an apostrophe: not a command
                words = [word for word in shlex.split(part, comments=True) if not word.startswith("$")]
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                yield words


# --- commands -------------------------------------------------------------------------------------------------


def make_targets_exist(page, text):
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    for words in commands(text):
        if words[:1] == ["make"]:
            yield from (f"make {w}: no such target" for w in words[1:] if "=" not in w and w not in targets)


def modules_exist(page, text):
    for words in commands(text):
        for flag, name in zip(words, words[1:], strict=False):
            if flag == "-m" and words[0].startswith("python") and not is_module(name):
                yield f"python -m {name}: no such module"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def help_of(main: Callable) -> set[str]:
    """The options in the --help of a program."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(["--help"])
    return set(re.findall(r"--[\w-]+", said.getvalue()))


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


TORCHRUN = options_of(get_args_parser())


@functools.cache
def own_options() -> dict[str, set[str]]:
    """The options of the course's programs: of every strategy's script, and of the modules that are started."""
    kinds = [(name, kind.Options) for name, entry in STRATEGIES.items() for kind in entry().implementations.values()]
    scripts = set().union(*(options_of(full_parser(STRATEGIES, *kind)) for kind in kinds))
    return {"distributed_training.py": scripts, "common.check": help_of(check.main), "common.doctor": set()}


def options_are_the_programs_own(page, text):
    """Of torchrun, of the scripts and of `python -m common...`: in a command, each program's own."""
    for words in commands(text):
        for part, known in parts(words):
            for option in (word.split("=")[0] for word in part if word.startswith("--")):
                if option not in known:
                    yield f"{' '.join(words)}: no option {option}"


def parts(words: list[str]) -> Iterator[tuple[list[str], set[str]]]:
    """The words after each program of a command that is ours or torchrun, and the options that it has."""
    ours = [number for number, word in enumerate(words) if Path(word).name in own_options()]
    if "torchrun" in words:
        begin = words.index("torchrun") + 1
        yield words[begin : ours[0] if ours else None], TORCHRUN
    if ours and words[0].startswith(("python", "torchrun", "srun")):
        yield words[ours[0] + 1 :], own_options()[Path(words[ours[0]]).name]


def options_exist(page, text):
    """Words like --option in backticks: of the course, of torchrun, or of another program that the page starts."""
    others = {"--nbval", "--answer"}  # of pytest, and of a chapter's bugs.py
    for line in code(text):
        words = line.split()
        ours = [word for part, _ in parts(words) for word in part]
        if not line.startswith("--"):
            others |= {word.split("=")[0] for word in words if word.startswith("--") and word not in ours}
    known = others.union(TORCHRUN, *own_options().values())
    for span in spans(text):
        if span.startswith("--"):
            yield from (f"no option {option}" for option in re.findall(r"(?<!\S)--[\w-]+", span) if option not in known)


def commands_can_be_parsed(page, text):
    """Whole commands, as the script would read them on one of that many ranks."""
    for words in commands(text):
        script = next((word for word in words if Path(word).name == "distributed_training.py"), None)
        if not words or words[0] not in ("python", "torchrun", "srun") or script is None or "--help" in words:
            continue
        place = words.index(script)
        before, options = " ".join(words[:place]), words[place + 1 :]
        if {"--resume", "--device", "--backend"} & {*options} or any(word.isupper() for word in options):
            continue  # wants a run or hardware that is not here, or stands for many commands
        numbers = {name: int(found) for name, found in re.findall(r"--(n\w+)=(\d+)", before.replace("=gpu", "=4"))}
        size = numbers.get("nproc_per_node", 1) * numbers.get("nnodes", 2 if "--nnodes" in before else 1)
        home = Path(script).parent if Path(script).parent.name else page.parent
        with launcher(0, size):
            os.environ |= {"RANK": "0"} if "torchrun" in words else {}
            try:
                parse(STRATEGIES, default_of(home.name), options, BY_AXES)
            except UserError as error:
                yield f"{' '.join(words)}: {error}"


def default_of(folder: str) -> str | None:
    """The strategy that a chapter's script trains if none is named."""
    file = ROOT / folder / "distributed_training.py"
    return re.search(r'start\("(\S+)"\)', file.read_text())[1] if folder in CHAPTERS else None


# --- files, names, numbers ------------------------------------------------------------------------------------

SUFFIXES = (
    ".py", ".md", ".ipynb", ".yaml", ".yml", ".txt", ".toml", ".json", ".jsonl", ".sbatch", ".sh", ".pt",
    ".csv", ".png",
)  # fmt: skip
# What a run leaves, what a reader makes, and what belongs to the machine.
NOT_HERE = {
    "config.json", "metrics.jsonl", "loss.png", "checkpoint-000250", "manifest.json", "train.sbatch", "grades.csv",
    "options.yaml",
    "jane.py", "ali.py", "jane/exercises.py", "FOLDER/jane.py", "runs/", "data/", "FILE.yaml",
    "course/name",
}  # fmt: skip


@functools.cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    return [Path(name) for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def paths_exist(page, text):
    """Names of files and folders in code: from the root, from the page's folder, or in a chapter."""
    tops, suffixes = {path.parts[0] for path in tracked()}, "|".join(suffix[1:] for suffix in SUFFIXES)
    for line in code(text):
        for word in line.split():
            path = word.rstrip(",:")
            looks = re.fullmatch(rf"[\w.*/-]+\.({suffixes})", path)
            looks = looks or (re.fullmatch(r"[\w.*/-]+", path) and "/" in path and path.split("/")[0] in tops)
            if looks and path not in NOT_HERE and not is_there(page, path):
                yield f"there is no {path}"


def is_there(page: Path, path: str) -> bool:
    return any(file.match(path) for file in tracked()) or any(
        next(folder.glob(path), None) for folder in (ROOT, page.parent)
    )


# Of other programs and libraries, or invented for an example; and what their variables begin with.
FOREIGN = {"NN_name", "HOST", "OK", "FIX", "INFO", "WARN", "EADDRINUSE", "RendezvousTimeoutError", "core.symlinks"}
VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_")


@functools.cache
def words_of_the_code() -> set[str]:
    files = [path for path in tracked() if path.suffix in (".py", ".toml") and path.name != "test_docs.py"]
    return set(re.findall(r"\w+", "\n".join((ROOT / path).read_text() for path in files) + MAKEFILE))


def names_exist(page, text):
    """Identifiers in backticks, such as `make_mesh`, `Strategy.parts()` or `Where(shape, ...)`, occur in the code."""
    for span in spans(text):
        name = re.match(r"([A-Za-z_][\w.]*)(\(.*\))?$", span)
        if not name or name[1] in FOREIGN or name[1].startswith(VARIABLES) or Path(name[1]).suffix in SUFFIXES:
            continue
        is_name = "_" in name[1] or "." in name[1] or re.search(r"[a-z][A-Z]", name[1]) or name[1].isupper()
        if is_name and any(word not in words_of_the_code() for word in filter(None, name[1].split("."))):
            yield f"no {name[1]} in the code"


ONES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
NUMBERS = {word: number for number, word in enumerate(re.findall(r"\w+", f"{ONES} eighteen nineteen"), start=1)}
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60}


def number_of(word: str) -> int | None:
    ten, _, one = word.partition("-")
    if ten in TENS:
        return TENS[ten] + NUMBERS.get(one, 0)
    return NUMBERS.get(word)


@functools.cache
def counted(chapter: str | None) -> dict[str, int]:
    """How many there are: in a chapter, or in all."""
    if chapter is None:
        return {"chapters": len(CHAPTERS), "strategies": len(STRATEGIES), "schedules": len(SCHEDULES),
                "ways to load": len(LOADING)}  # fmt: skip
    package = next(link.name for link in (ROOT / "course").iterdir() if link.resolve() == ROOT / chapter)
    bugs = importlib.import_module(f"course.{package}.classroom.bugs")
    return {
        "exercises": len(check.exercises_of(chapter)),
        "bugs": len(bugs.BUGS) + len(getattr(bugs, "DROPOUT_BUGS", ())),
        "notebooks": sum(path.startswith(f"{chapter}/") for path in NOTEBOOKS),
    }


def counts_are_right(page, text):
    """Numbers in words before "exercises", "strategies" and the like; in a line that names a chapter, of that."""
    nouns = r"exercises|(?:planted )?bugs|notebooks|chapters|strategies|schedules|ways to load"
    for line in re.split(r"\n(?=\||\n|\* )", text):
        named = sorted({chapter for chapter in CHAPTERS if chapter in line})
        for word, noun in re.findall(rf"\b([A-Za-z]+(?:-[a-z]+)?)\s+({nouns})\b(?!')", line):
            number, noun = number_of(word.lower()), noun.removeprefix("planted ")
            true = counted(None).get(noun, counted(named[0]).get(noun) if len(named) == 1 else None)
            if number and true and number != true and "all " + word not in line.lower():
                yield f"{word} {noun}: there are {true}"


def strategies_are_those_of_the_table(page, text):
    """The table in docs/strategies.md: every strategy, its axes, and which implementations it has."""
    if page.name != "strategies.md":
        return
    titles = ["`--strategy`", "what is divided over the processes", "axes", "PyTorch's", "`--by-hand`"]
    lines = [re.sub(r" +", " ", line) for line in text.splitlines()]
    header = "| " + " | ".join(titles) + " |"
    if header not in lines:
        yield f"has no table headed {titles}"
        return
    listed = []
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[lines.index(header) + 2 :]):
        strategies, _, axes, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        names = spans(strategies)
        listed += names
        for name in set(names) & STRATEGIES.keys():
            kinds = STRATEGIES[name]().implementations
            for cell, kind in zip(columns, ("pytorch", "by-hand"), strict=True):
                if (cell != "" and name in (spans(cell) or names)) != (kind in kinds):
                    yield f"{name}: {kind} is said to be {cell!r}"
            if set(spans(axes)) != axes_of(name):
                yield f"{name}: its axes are {sorted(axes_of(name))}"
    yield from (f"{name} is missing" for name in STRATEGIES if name not in listed)
    yield from (f"{name} is no strategy" for name in listed if name not in STRATEGIES)


def axes_of(name: str) -> set[str]:
    """Those along which a strategy divides something where no --mesh is given; of "mesh", those that it may have."""
    kinds = STRATEGIES[name]().implementations.values()
    found = {(cls, axis) for cls in kinds for axis in (cls.axes if name == "mesh" else cls.preset)}
    return {axis for cls, axis in found if axis != "data" or "data" in cls.data_axes}


def lists_what_there_is(page, text):
    """Every notebook has its link in the README; every module and test file its place in docs/architecture.md."""
    if page.name == "README.md":
        wanted = [f"]({path})" for path in NOTEBOOKS]
    elif page.name == "architecture.md":
        modules = [path for path in tracked() if path.suffix == ".py" and path.name != "__init__.py"]
        chapter = [path for path in modules if path.parent.name in CHAPTERS]
        wanted = [f"`{path}`" for path in modules if path.parts[0] == "common" or path.match("tests/test_*.py")]
        wanted += sorted({f"`{path.name}`" for path in chapter})
    else:
        return
    yield from (f"does not mention {name}" for name in wanted if name not in text)


def has_each_heading_once(page, text):
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    yield from sorted({f"has {name!r} twice" for name in headings if headings.count(name) > 1})


def hours_are_right(page, text):
    """The README's chapters: hours of reading, and of the time that their exercises allow, to half an hour."""
    if page.name != "README.md":
        return
    for chapter in CHAPTERS:
        reading = sum(reading_minutes(read(ROOT / path, 4)) for path in NOTEBOOKS if path.startswith(f"{chapter}/"))
        exercises = (ROOT / chapter / "exercises.py").read_text()
        allowed = sum(map(int, re.findall(r"up to (\d+) minutes", exercises)))
        hours = " | ".join(f"{round(minutes / 30) / 2:g} h" for minutes in (reading, allowed))
        row = next((line for line in text.splitlines() if line.startswith(f"| [{chapter}](")), "")
        if not row.endswith(f"| {hours} |"):
            yield f"{chapter}: reading and exercises take {hours}"


IN_NOTEBOOKS = [make_targets_exist, modules_exist, options_are_the_programs_own, options_exist, commands_can_be_parsed]
RULES = [
    *IN_NOTEBOOKS,
    paths_exist,
    names_exist,
    counts_are_right,
    strategies_are_those_of_the_table,
    lists_what_there_is,
    has_each_heading_once,
    hours_are_right,
]
