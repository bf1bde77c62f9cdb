"""What the pages say of commands is true of the programs: targets, modules, options, and what they are given.

The rest of the rules: page_rules.py.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers import launcher
from torch.distributed.run import get_args_parser

from common import ROOT, check, cluster_check, doctor, generate, runs
from common.command_line import full_parser, parse
from common.errors import UserError
from course.start import pick
from course.strategies import BY_AXES, STRATEGIES
from planner.__main__ import parser as planner_parser
from tools.facts import CHAPTERS, bugs_of

MAKEFILE = (ROOT / "Makefile").read_text()


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


def make_targets_exist(page, text):
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    for words in commands(text):
        if words[:1] == ["make"]:
            yield from (f"make {w}: no such target" for w in words[1:] if "=" not in w and w not in targets)


def modules_exist(page, text):
    for words in commands(text):
        for flag, name in zip(words, words[1:], strict=False):
            if flag == "-m" and words[0].startswith(("python", "torchrun")) and not is_module(name):
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
    kinds = [(name, kind.Options) for name, entry in STRATEGIES.items() for kind in entry.implementations.values()]
    scripts = set().union(*(options_of(full_parser(STRATEGIES, *kind)) for kind in kinds))
    plans = set().union(*(options_of(command) for command in planner_parser()[1].values()))
    own = {"common.check": help_of(check.main), "common.doctor": help_of(doctor.main), "planner": plans}
    own["common.cluster_check"] = help_of(cluster_check.main)
    own["common.generate"] = options_of(generate.parser())
    commands_of_runs = next(action.choices for action in runs.parser()._actions if action.dest == "command")
    own["common.runs"] = set().union(*map(options_of, commands_of_runs.values()))
    # This one cannot be imported without the engines' packages.
    own["with_qlora.py"] = set(re.findall(r'"(--[\w-]+)"', (ROOT / "06_fsdp" / "qlora_command.py").read_text()))
    engines = ("with_accelerate.py", "with_fabric.py", "with_deepspeed.py", "with_trainer.py")
    return dict.fromkeys(("distributed_training.py", *engines), scripts) | own


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
    others |= set(re.findall(r"--[\w-]+", (ROOT / "launch/slurm.sbatch").read_text()))  # which docs/cluster.md explains
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
        options = [str(ROOT / word) if word.startswith("configs/") else word for word in options]
        if {"--resume", "--device", "--backend"} & {*options} or any(word.isupper() for word in options):
            continue  # wants a run or hardware that is not here, or stands for many commands
        numbers = {name: int(found) for name, found in re.findall(r"--(n\w+)=(\d+)", before.replace("=gpu", "=4"))}
        size = numbers.get("nproc_per_node", 1) * numbers.get("nnodes", 2 if "--nnodes" in before else 1)
        home = Path(script).parent if Path(script).parent.name else page.parent
        with launcher(0, size):
            os.environ |= {"RANK": "0"} if "torchrun" in words else {}
            try:
                parse(STRATEGIES, default_of(home.name), options, BY_AXES, auto=pick)
            except UserError as error:
                yield f"{' '.join(words)}: {error}"


def default_of(folder: str) -> str | None:
    """The strategy that a chapter's script trains if none is named."""
    file = ROOT / folder / "distributed_training.py"
    return re.search(r'read_command\("(\S+)"\)', file.read_text())[1] if folder in CHAPTERS else None


def arguments_exist(page, text):
    """The chapters, exercises and planted bugs that a command names, and the variables that it gives to make."""
    for words in commands(text):
        given = [word for word in words if not word.startswith("-") and not word.isupper()]
        line = " ".join(words)
        if given[:1] == ["make"]:
            for name, _, value in (word.partition("=") for word in given[1:] if "=" in word):
                if not re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE):
                    yield f"{line}: the Makefile knows no {name}"
                elif name == "CHAPTER" and value not in CHAPTERS:
                    yield f"{line}: no chapter {value}"
        elif given[:2] == ["python", "common.check"] and "--submission" not in words:
            chapter, exercise = (given[2:] + [None, None])[:2]
            if chapter and chapter not in CHAPTERS:
                yield f"{line}: no chapter {chapter}"
            elif chapter and exercise and exercise not in {known.name for known in check.exercises_of(chapter)}:
                yield f"{line}: no exercise {exercise}"
        elif given[:1] == ["python"] and given[1:] and Path(given[1]).name == "bugs.py":
            chapter = next((part for part in (*Path(given[1]).parts, page.parent.name) if part in CHAPTERS), None)
            known = bugs_of(chapter) if chapter else set().union(*map(bugs_of, CHAPTERS))
            yield from (f"{line}: no bug {name}" for name in given[2:] if name not in known)
