"""The catalogue of mistakes: reads the programs in mistakes/, runs them on ranks, and shows what they say.

A program of mistakes/ has at most 25 lines. Its docstring is its entry in the catalogue: a title, and

    says:  what appears, after the rank that prints it: "rank 1: Timed out"; "..." stands for any text, and " | " is
           between messages
    see:   what the reader sees
    find:  how to find it
    fix:   what to do
    then:  what the fixed program prints

One of its lines, or some that follow each other, end with `# wrong`, or are that comment alone. Above them stand one or
more `# right: LINE`, which take their place in the fixed program. For the reader, the programs are started by
torchrun; here, ranks are processes that are forked, since starting Python with PyTorch takes a hundred times as long as
most of them run.
"""

import ast
import ctypes
import functools
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.lab.launch import LINUX, START, free_port, rank_variables, ready_to_fork

PROGRAMS = Path(__file__).parent / "mistakes"
MENDED_TIMEOUT = 60  # seconds, in place of the programs' own few: nothing waits that long but on a busy machine
BY_TCP = "os.environ|new_group"  # programs in which the meeting is the lesson
RIGHT = re.compile(r"^( *)# right: (.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Mistake:
    """A program of mistakes/, with what its docstring says of it.

    messages: for each message the rank that prints it, or None for some rank, and a pattern for it
    then:     the same of the fixed program
    """

    name: str
    title: str
    messages: tuple[tuple[int | None, str], ...]
    then: tuple[tuple[int | None, str], ...]
    see: str
    find: str
    fix: str
    source: str

    @property
    def program(self) -> str:
        """What stands below the docstring, without the right lines."""
        return RIGHT.sub("", self.source.split('"""', 2)[2]).strip()

    @property
    def right(self) -> str:
        """The lines that take the place of the wrong ones."""
        return "\n".join(line for _, line in RIGHT.findall(self.source))

    @property
    def fixed(self) -> str:
        """The program with its wrong lines fixed, and time to wait."""
        wrong = re.compile(r"^((?: *# right: .*\n)+)(?:.*# wrong$\n)+", re.MULTILINE)
        text = wrong.sub(lambda found: RIGHT.sub(r"\1\2\n", found[1]), self.source)
        return re.sub(r"timedelta\(seconds=\d+\)", f"timedelta(seconds={MENDED_TIMEOUT})", text)


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    code:   its exit code, negative for a signal; None where it was still at work after START seconds, and was killed
    output: what it wrote
    """

    code: int | None
    output: str


@functools.cache
def mistakes() -> dict[str, Mistake]:
    """All programs of mistakes/, by name."""
    found = {}
    for path in sorted(PROGRAMS.glob("*.py")):
        source = path.read_text()
        title, _, entry = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
        fields = dict(re.findall(r"^(\w+): +(.*(?:\n(?!\w+: ).*)*)", entry, re.MULTILINE))
        fields = {key: " ".join(value.split()) for key, value in fields.items()}
        messages, then = (tuple(message(part) for part in fields.pop(key).split(" | ")) for key in ("says", "then"))
        found[path.stem] = Mistake(path.stem, title.rstrip("."), messages, then, source=source, **fields)
    return found


def message(text: str) -> tuple[int | None, str]:
    """ "rank 1: TEXT" or "some rank: TEXT" as (rank or None, TEXT)."""
    who, _, what = text.partition(": ")
    return None if who == "some rank" else int(who.removeprefix("rank ")), what


def run(sources: dict[str, str], at_once: int = 6, nproc: int = 2, **environment: str) -> dict[str, list[Ended]]:
    """Run programs, each on `nproc` ranks, some at a time; how each rank ended, by the program's name."""
    from torch import _dynamo  # noqa: F401  DDP and fully_shard import it: once here, not in each rank

    context: Any = multiprocessing.get_context("fork" if LINUX and not torch.cuda.is_initialized() else "spawn")
    waiting, under_way, ended = list(sources), dict[str, tuple](), dict[str, list[Ended]]()
    with tempfile.TemporaryDirectory(prefix="mistakes-") as name:
        while waiting or under_way:
            if waiting and len(under_way) < at_once:
                program = waiting.pop(0)
                folder = Path(name, program)
                folder.mkdir()
                Path(folder, f"{program}.py").write_text(sources[program])
                port = free_port()
                variables = [rank_variables(rank, nproc, port) | environment for rank in range(nproc)]
                ranks = [context.Process(target=_rank, args=(folder / f"{program}.py", mine)) for mine in variables]
                with ready_to_fork():
                    for process in ranks:
                        process.start()
                under_way[program] = folder, ranks, time.monotonic() + START
            for program, (folder, ranks, end) in list(under_way.items()):
                late = time.monotonic() > end
                if late or not any(process.is_alive() for process in ranks):
                    ended[program] = [_end(process, folder / str(rank)) for rank, process in enumerate(ranks)]
                    del under_way[program]
            time.sleep(0.02)
    return {program: ended[program] for program in sources}


def _end(process, log: Path) -> Ended:
    late = process.is_alive()
    if late:
        process.kill()
    process.join(5)
    return Ended(None if late else process.exitcode, log.read_text(errors="replace") if log.exists() else "")


def _rank(program: Path, variables: dict[str, str]) -> None:
    """What the process of a rank does: `python PROGRAM`, as torchrun would start it."""
    os.environ.update(variables)
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    log = os.open(program.parent / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(log, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()  # a forked rank has read it long ago, as its parent
    if not re.search(BY_TCP, program.read_text()):
        # Where the meeting is not the lesson, ranks meet in a file: a TCP store may look up names for 5 s.
        meet = dist.init_process_group
        store = dist.FileStore(str(program.parent / "store"), size)
        dist.init_process_group = functools.partial(meet, store=store, rank=rank, world_size=size)
    code = 0
    try:
        runpy.run_path(str(program), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def missing(messages: tuple[tuple[int | None, str], ...], ended: list[Ended]) -> list[str]:
    """Those of the messages that the ranks have not printed."""
    found = []
    for rank, text in messages:
        pattern = ".*?".join(map(re.escape, text.split("...")))
        of = ended if rank is None else [ended[rank]]
        if not any(re.search(pattern, one.output, re.DOTALL) for one in of):
            found.append(text)
    return found


def run_wrong(names: list[str], at_once: int = 10) -> dict[str, list[Ended]]:
    """Run these programs of the catalogue as they are; how each rank ended.

    They wait for three seconds only, and on a busy machine a rank may begin so late. Hence those that did not say what
    they should are run again, alone, up to three times.
    """
    ended = run({name: mistakes()[name].source for name in names}, at_once)
    for _ in range(3):
        again = [name for name in names if missing(mistakes()[name].messages, ended[name])]
        ended |= run({name: mistakes()[name].source for name in again}, at_once=1)
    return ended


def outcome(name: str, ended: list[Ended]) -> str:
    """What a reader meets first: "silent" where all ranks end well, "timeout" where a message of the catalogue says
    that somebody waited, else "error"."""
    if all(one.code == 0 for one in ended):
        return "silent"
    waited = any("imed out" in text or "timeout" in text for _, text in mistakes()[name].messages)
    return "timeout" if waited else "error"


def show(*names: str) -> None:
    """Entries of the catalogue, under a notebook cell."""
    from IPython.display import Markdown, display  # scripts need no IPython

    for found in (mistakes()[name] for name in names):
        who = [f"rank {rank}: {text}" if rank is not None else f"some rank: {text}" for rank, text in found.messages]
        right = "leave out the wrong line." if found.right == "pass" else f"\n\n```python\n{found.right}\n```"
        display(
            Markdown(
                f"**{found.title}** (`mistakes/{found.name}.py`)\n\n```python\n{found.program}\n```\n\n"
                f"*What you see.* {found.see}\n\n```\n" + "\n".join(who) + "\n```\n\n"
                f"*How to find it.* {found.find}\n\n*The fix.* {found.fix} In this program: {right}"
            )
        )
