"""What the pages say is true of the code: commands, options, files, names, counts, tables.

Every rule is a function from a page and its text to what is wrong. Each is shown to refuse a planted mistake.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import LAUNCHER, launcher
from torch.distributed.run import get_args_parser

from common import ROOT, check
from common.command_line import full_parser, parse
from common.errors import UserError
from common.mesh import AXES
from course.ddp.loading import LOADING
from course.pipeline.schedules import SCHEDULES
from course.strategies import BY_AXES, STRATEGIES

MAKEFILE = (ROOT / "Makefile").read_text()
CHAPTERS = sorted(folder.name for folder in ROOT.glob("[0-9][0-9]_*"))
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("0*/*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


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

SUFFIXES = (".py", ".md", ".ipynb", ".yaml", ".yml", ".txt", ".toml", ".json", ".jsonl", ".sbatch", ".sh", ".pt", ".csv", ".png")
# What a run leaves, what a reader makes, and what belongs to the machine.
NOT_HERE = {
    "config.json", "metrics.jsonl", "loss.png", "checkpoint-000250.pt", "train.sbatch", "grades.csv", "options.yaml",
    "jane.py", "ali.py", "jane/exercises.py", "runs/", "data/", "FILE.yaml",
}  # fmt: skip


@functools.cache
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    return [Path(name) for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def paths_exist(page, text):
    """Names of files and folders in backticks: from the root, from the page's folder, or in every chapter."""
    tops, suffixes = {path.parts[0] for path in tracked()}, "|".join(suffix[1:] for suffix in SUFFIXES)
    for span in spans(text):
        for word in span.split():
            path = word.rstrip(",:")
            looks = re.fullmatch(rf"[\w.*/-]+\.({suffixes})", path)
            looks = looks or (re.fullmatch(r"[\w.*/-]+", path) and "/" in path and path.split("/")[0] in tops)
            if looks and path not in NOT_HERE and not is_there(page, path):
                yield f"there is no {path}"


def is_there(page: Path, path: str) -> bool:
    if "/" in path.rstrip("/"):
        return any(next(folder.glob(path), None) for folder in (ROOT, page.parent))
    return any(file.match(path) for file in tracked()) or (ROOT / path).is_dir()


# Of other programs and libraries, or invented for an example; and what their variables begin with.
FOREIGN = {"NN_name", "HOST", "OK", "FIX", "INFO", "WARN", "EADDRINUSE", "RendezvousTimeoutError", "core.symlinks"}
VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_")


@functools.cache
def words_of_the_code() -> set[str]:
    files = [path for path in tracked() if path.suffix in (".py", ".toml") and path.name != Path(__file__).name]
    return set(re.findall(r"\w+", "\n".join((ROOT / path).read_text() for path in files) + MAKEFILE))


def names_exist(page, text):
    """Identifiers in backticks, such as `make_mesh`, `Strategy.parts()` or `Where(shape, ...)`, occur in the code."""
    for span in spans(text):
        name = re.match(r"([A-Za-z_][\w.]*)(\(.*\))?$", span)
        if not name or name[1] in FOREIGN or name[1].startswith(VARIABLES) or Path(name[1]).suffix in SUFFIXES:
            continue
        if "_" in name[1] or "." in name[1] or re.search(r"[a-z][A-Z]", name[1]) or name[1].isupper():
            if any(word not in words_of_the_code() for word in filter(None, name[1].split("."))):
                yield f"no {name[1]} in the code"


NUMBERS = dict(
    zip(
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen twenty".split(),
        range(1, 21),
        strict=True,
    )
)
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
                "ways to load": len(LOADING), "axes": len(AXES)}  # fmt: skip
    package = next(link.name for link in (ROOT / "course").iterdir() if link.resolve() == ROOT / chapter)
    bugs = importlib.import_module(f"course.{package}.classroom.bugs")
    return {
        "exercises": len(check.exercises_of(chapter)),
        "bugs": len(bugs.BUGS) + len(getattr(bugs, "DROPOUT_BUGS", ())),
        "notebooks": sum(path.startswith(f"{chapter}/") for path in NOTEBOOKS),
    }


def counts_are_right(page, text):
    """Numbers in words before "exercises", "strategies" and the like; in a line that names a chapter, of that."""
    nouns = r"exercises|(?:planted )?bugs|notebooks|chapters|strategies|schedules|ways to load|axes"
    for line in re.split(r"\n(?=\||\n|\* )", text):
        named = sorted({chapter for chapter in CHAPTERS if chapter in line})
        for word, noun in re.findall(rf"\b([A-Za-z]+(?:-[a-z]+)?)\s+({nouns})\b", line):
            number, noun = number_of(word.lower()), noun.removeprefix("planted ")
            true = counted(None).get(noun, counted(named[0]).get(noun) if len(named) == 1 else None)
            if number and true and number != true and "all " + word not in line.lower():
                yield f"{word} {noun}: there are {true}"


def strategies_are_those_of_the_table(page, text):
    """The README's table: every strategy, its axes, and which implementations it has."""
    if page.name != "README.md":
        return
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    titles = ["`--strategy`", "what is divided over the processes", "axes", "PyTorch's", "`--by-hand`"]
    if titles not in rows:
        yield f"has no table headed {titles}"
        return
    listed = []
    for strategies, _, axes, *columns in rows[rows.index(titles) + 2 :]:
        if not strategies.startswith("`"):
            break
        names = spans(strategies)
        listed += names
        for name in set(names) & STRATEGIES.keys():
            kinds = STRATEGIES[name]().implementations
            for cell, kind in zip(columns, ("pytorch", "by-hand"), strict=True):
                if (cell != "" and name in (spans(cell) or names)) != (kind in kinds):
                    yield f"{name}: {kind} is said to be {cell!r}"
            has = {axis for cls in kinds.values() for axis in cls.axes or cls.preset}
            if set(spans(axes)) != has:
                yield f"{name}: its axes are {sorted(has)}"
        if len(listed) == len(STRATEGIES):
            break
    yield from (f"{name} is missing" for name in STRATEGIES if name not in listed)
    yield from (f"{name} is no strategy" for name in listed if name not in STRATEGIES)


def lists_what_there_is(page, text):
    """Every notebook has its link in the README; every module and test file its place in docs/architecture.md."""
    if page.name == "README.md":
        wanted = [f"]({path})" for path in NOTEBOOKS]
    elif page.name == "architecture.md":
        modules = [path for path in tracked() if path.suffix == ".py" and path.name != "__init__.py"]
        chapter = [path for path in modules if path.parent.name in CHAPTERS]
        wanted = [f"`{path.relative_to('common')}`" for path in modules if path.parts[0] == "common"]
        wanted += [f"`{path}`" for path in modules if path.parts[0] == "tests" and path.name.startswith("test_")]
        wanted += sorted({f"`{path.name}`" for path in chapter})
    else:
        return
    yield from (f"does not mention {name}" for name in wanted if name not in text)


def has_each_heading_once(page, text):
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    yield from sorted({f"has {name!r} twice" for name in headings if headings.count(name) > 1})


IN_NOTEBOOKS = [make_targets_exist, modules_exist, options_are_the_programs_own, options_exist, commands_can_be_parsed]
RULES = [
    *IN_NOTEBOOKS,
    paths_exist,
    names_exist,
    counts_are_right,
    strategies_are_those_of_the_table,
    lists_what_there_is,
    has_each_heading_once,
]


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    """Parsing a command claims its run directory."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page(page, rule):
    wrong = list(rule(page, page.read_text()))
    assert not wrong, "\n".join([str(page), *wrong])


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_what_a_notebook_says_of_commands(path):
    cells = json.loads((ROOT / path).read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    wrong = [problem for rule in IN_NOTEBOOKS for problem in rule(ROOT / path, text)]
    assert not wrong, "\n".join([path, *wrong])


# --- planted mistakes -----------------------------------------------------------------------------------------

README, PAGE = ROOT / "README.md", ROOT / "docs" / "page.md"
MISTAKES = {
    "target": (make_targets_exist, PAGE, "Run `make diagnose`."),
    "target in a block": (make_targets_exist, PAGE, "```\nmake test\nmake diagnose VENV=.venv\n```"),
    "module": (modules_exist, PAGE, "```\npython -m common.health\n```"),
    "module in a sentence": (modules_exist, PAGE, "First, `python -m\ncommon.health` says so."),
    "option of the scripts": (
        options_are_the_programs_own,
        PAGE,
        "```\ntorchrun --nproc_per_node=2 distributed_training.py --distributed --resume \\\n    --global-batch 8\n```",
    ),
    "option of the checker": (options_are_the_programs_own, PAGE, "`python -m common.check 01_intro --table`"),
    "option of torchrun": (options_are_the_programs_own, PAGE, "`torchrun --ranks=2 distributed_training.py --resume`"),
    "option in a table": (options_exist, PAGE, "| `--global-batch N` | examples |"),
    "option in a notebook": (options_exist, ROOT / "03_ddp" / "x.ipynb", "Choose with `--load`."),
    "a schedule for ddp": (
        commands_can_be_parsed,
        PAGE,
        "`torchrun --nproc_per_node=2 distributed_training.py --distributed --schedule gpipe`",
    ),
    "forgotten": (commands_can_be_parsed, PAGE, "`torchrun --nproc_per_node=2 distributed_training.py`"),
    "ranks of a mesh": (
        commands_can_be_parsed,
        PAGE,
        "`torchrun --nproc_per_node=2 distributed_training.py --distributed --mesh data=2,tensor=2`",
    ),
    "another chapter's": (
        commands_can_be_parsed,
        ROOT / "06_fsdp" / "x.ipynb",
        "`python distributed_training.py --loading dispatch`",
    ),
    "file": (paths_exist, ROOT / "CONTRIBUTING.md", "Add it to `tests/test_training.py`."),
    "file of no chapter": (paths_exist, PAGE, "See `proof.py`."),
    "folder": (paths_exist, PAGE, "It stands in `common/train/`."),
    "name": (names_exist, PAGE, "Raise `StrategyError`."),
    "name of a module": (names_exist, PAGE, "It calls `equality.prove_class(...)`."),
    "count": (counts_are_right, PAGE, "| [02_data_parallel](02_data_parallel) | threads | sixteen exercises |"),
    "count of bugs": (counts_are_right, PAGE, "* 02_data_parallel has forty-two\nplanted bugs"),
    "count of strategies": (counts_are_right, PAGE, "There are seventeen strategies."),
}  # fmt: skip


def table(change: Callable[[str], str] = str) -> str:
    """A README with a table of strategies that is right but for a change."""
    lines = ["| `--strategy` | what is divided over the processes | axes | PyTorch's | `--by-hand` |", "|---|---|---|"]
    for name, entry in STRATEGIES.items():
        kinds = entry().implementations
        axes = {axis for cls in kinds.values() for axis in cls.axes or cls.preset}
        cells = [f"`{name}`", "", " ".join(f"`{axis}`" for axis in axes)]
        cells += ["yes" if kind in kinds else "" for kind in ("pytorch", "by-hand")]
        lines.append("| " + " | ".join(cells) + " |")
    links = " ".join(f"[x]({path})" for path in NOTEBOOKS)
    return change("\n".join(lines) + "\n\n" + links)


TABLES = {
    "no hsdp": lambda text: re.sub(r"\| `hsdp`.*\n", "", text),
    "ulysses of PyTorch": lambda text: re.sub(r"(\| `ulysses` .*) \|  \| yes", r"\1 | yes | yes", text),
    "hsdp by hand": lambda text: re.sub(r"(\| `hsdp` .*) \| yes \| yes", r"\1 | yes | ", text),
    "axes of tensor": lambda text: text.replace("| `tensor` |  | `tensor` ", "| `tensor` |  | `data` "),
    "one too many": lambda text: text.replace("| `dp` |", "| `dp`, `dpp` |"),
}
MISTAKES |= {name: (strategies_are_those_of_the_table, README, table(change)) for name, change in TABLES.items()}
MISTAKES |= {
    "no table": (strategies_are_those_of_the_table, README, table(lambda text: text.replace("axes", "axis"))),
    "no link": (lists_what_there_is, README, table(lambda text: text.replace("01_zero.ipynb", ""))),
    "twice": (has_each_heading_once, PAGE, "### Mesh\n\nA grid.\n\n### Mesh\n\nA net."),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rule_bites(mistake):
    rule, page, text = MISTAKES[mistake]
    found = {other.__name__: problems for other in RULES if (problems := list(other(page, text)))}
    assert found.keys() == {rule.__name__}, found


def test_a_module_that_no_page_describes_is_seen():
    page = ROOT / "docs" / "architecture.md"
    text = page.read_text()
    for name in ("`lab/launch.py`", "`tests/test_mesh.py`", "`by_hand_mesh.py`"):
        assert list(lists_what_there_is(page, text.replace(name, "it"))) == [f"does not mention {name}"]


def test_every_rule_is_shown_to_bite():
    assert {rule for rule, _, _ in MISTAKES.values()} == set(RULES)


GOOD = """
`make test PYTHON=python3.12`, `python -m common.doctor`, `python -m common.check 01_intro --csv`, `--csv`, `--answer`

```
torchrun --nproc_per_node=2 --standalone distributed_training.py --distributed \\
    --mesh data=2 --run-dir "$run"  # comment
srun --kill-on-bad-exit=1 torchrun --nproc_per_node=gpu distributed_training.py --distributed
```

`--kill-on-bad-exit` ends them. `tests/helpers.py`, `helpers.py`, `0*/*.ipynb`, `Strategy.parts()`, `make_mesh`, `EADDRINUSE`
There are six chapters and eighteen strategies, two of three bugs.
"""


def test_a_good_page_passes():
    assert {rule.__name__: list(rule(PAGE, GOOD)) for rule in RULES if list(rule(PAGE, GOOD))} == {}
    assert list(strategies_are_those_of_the_table(README, table())) == []
    assert list(lists_what_there_is(README, table())) == []
