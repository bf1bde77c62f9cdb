"""Scripts as processes that are forked from this one, which has imported what they import: that is three seconds of
processor time, where the script itself takes a tenth of one. And torchrun, with its ranks, in the same way.

What a fork cannot show, test_imports.py and test_scripts.py show with processes of their own: that a script
imports all that it needs, and each file once, and that torchrun starts it. And a fork ends at once, whereas a thread of
gloo can abort Python at its end: tools/soak.py has processes of their own for that.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch._dynamo  # as every optimizer does when it is made: here once, and not in each fork
import torch.distributed.run
from helpers import FULL, LAUNCHER, TEXT, as_options, wait_until
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from common import ROOT
from common.lab.launch import ready_to_fork
from common.record import Record

HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # by torchrun


class Fork:
    """`python PROGRAM ARGUMENTS` in the folder `cwd`, as the leader of a process group; used as subprocess.Popen is.

    rank:       (its number, how many there are, port at which they meet): what torchrun would tell it of one node
    preexec_fn: called in the process before the program
    env:        its whole environment, by default this process's without what a launcher sets
    files:      what it writes to stdout and stderr goes there; None: to where this process writes
    """

    def __init__(
        self,
        program: Path | Callable,
        *arguments: str,
        cwd: Path,
        rank: tuple[int, int, int] | None = None,
        preexec_fn: Callable = lambda: None,
        env: dict[str, str] | None = None,
        files: bool = True,
    ):
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)] if files else []
        self.returncode: int | None = None
        with ready_to_fork():
            self.pid = os.fork()
            if self.pid == 0:
                code = 1
                try:
                    code = self._run(program, [*map(str, arguments)], cwd, rank, preexec_fn, env)
                finally:
                    os._exit(code)

    def _run(self, program: Path | Callable, arguments, cwd, rank, preexec_fn, env) -> int:
        """The exit code of the program."""
        os.setsid()
        # The thread pool does not survive the fork, and the program's own threads would race to replace it.
        torch.set_num_threads(1)
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), self.files, strict=False), start=1):
            os.dup2(file.fileno(), number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        else:
            for name in LAUNCHER:
                os.environ.pop(name, None)
        if rank is not None:
            number, size, port = rank
            os.environ |= dict(zip(LAUNCHER, map(str, (number, size, number, size, "127.0.0.1", port)), strict=True))
        try:
            preexec_fn()
            if callable(program):
                program(arguments)
                return 0
            program = Path(program).resolve()
            sys.argv = [str(program), *arguments]
            sys.path[0] = str(program.parent)  # as Python does for a script
            runpy.run_path(str(program), run_name="__main__")
            return 0
        except SystemExit as leaving:
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)  # as Python does
            return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired, after it has killed the process."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise subprocess.TimeoutExpired(str(self.pid), timeout, *map(self._text, self.files))
            time.sleep(0.01)
        return self.returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written to stdout and to stderr, when it has ended."""
        self.wait(timeout)
        return tuple(map(self._text, self.files))

    @staticmethod
    def _text(file) -> str:
        file.seek(0)
        return file.read()


def torchrun(*arguments: str, cwd: Path, **options) -> Fork | subprocess.Popen:
    """`torchrun ARGUMENTS`, and its ranks, as forks; with FULL=1 as processes of their own."""
    if not FULL:
        return Fork(_torchrun, *arguments, cwd=cwd, **options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, text=True, start_new_session=True, **pipes, **options)


def _torchrun(arguments: list[str]) -> None:
    """torchrun's own main function, which starts ranks as it would start processes: `python -u SCRIPT ARGUMENTS`."""

    def fork(handler: SubprocessHandler, command: tuple[str, ...], env: dict[str, str]) -> Fork:
        assert command[:2] == (sys.executable, "-u") and not handler._stdout and not handler._stderr
        return Fork(*command[2:], cwd=Path.cwd(), env=env, files=False)

    SubprocessHandler._popen = fork
    torch.distributed.run.main(arguments)


def forget_the_course() -> None:
    """In a fork, as `preexec_fn`: to be as a process that has imported PyTorch and what else is installed, and nothing
    of this repository."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "course", "planner")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "course"]


def ranks_of(process: Fork | subprocess.Popen) -> list[psutil.Process]:
    """The ranks below a torchrun, in order: it starts one after the other."""
    return sorted(psutil.Process(process.pid).children(), key=lambda rank: (rank.create_time(), rank.pid))


def start(*arguments: str, nproc: int = 0, cwd: Path, **options) -> subprocess.Popen | Fork:
    """Start the front door with the settings TEXT, under torchrun for nproc > 0."""
    script = ROOT / "distributed_training.py"
    arguments = [*as_options(TEXT), *arguments]
    if not nproc:
        return Fork(script, *arguments, cwd=cwd, **options)
    return torchrun("--standalone", f"--nproc_per_node={nproc}", script, *arguments, cwd=cwd)


def hold_after(patch, step: int, file: Path) -> Path:
    """Let runs that are forked from here on wait after a step until there is this file; returns it. (With FULL=1 ranks
    of torchrun are no forks, and go on.)"""
    log = Record.log

    def logged(record, number, *numbers):
        log(record, number, *numbers)
        while number + 1 == step and not file.exists():
            time.sleep(0.01)

    patch.setattr(Record, "log", logged)
    return file


def wait_for_step(folder: Path, step: int) -> None:
    file = folder / "metrics.jsonl"
    wait_until(lambda: file.exists() and len(file.read_text().splitlines()) >= step, f"step {step}")
