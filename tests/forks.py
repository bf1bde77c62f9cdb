"""Scripts as processes that are forked from this one, which has imported what they import: that is three seconds of
processor time, where the script itself takes a tenth of one.

What a fork cannot show, tests/test_imports.py shows with processes of their own: that a script imports all that it
needs, and each file once.
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

from helpers import LAUNCHER

from common.lab.launch import _ready_to_fork


class Fork:
    """`python PROGRAM ARGUMENTS` in the folder `cwd`, as the leader of a process group; used as subprocess.Popen is.

    rank:       (its number, how many there are, port at which they meet): what torchrun would tell it of one node
    preexec_fn: called in the process before the program
    """

    def __init__(
        self,
        program: Path,
        *arguments: str,
        cwd: Path,
        rank: tuple[int, int, int] | None = None,
        preexec_fn: Callable = lambda: None,
    ):
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.returncode: int | None = None
        with _ready_to_fork():
            self.pid = os.fork()
            if self.pid == 0:
                code = 1
                try:
                    code = self._run(Path(program).resolve(), arguments, cwd, rank, preexec_fn)
                finally:
                    os._exit(code)

    def _run(self, program: Path, arguments, cwd, rank, preexec_fn) -> int:
        """The exit code of the program."""
        os.setsid()
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), self.files, strict=True), start=1):
            os.dup2(file.fileno(), number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(cwd)
        for name in LAUNCHER:
            os.environ.pop(name, None)
        if rank is not None:
            number, size, port = rank
            os.environ |= dict(zip(LAUNCHER, map(str, (number, size, number, size, "127.0.0.1", port)), strict=True))
        sys.argv = [str(program), *map(str, arguments)]
        sys.path[0] = str(program.parent)  # as Python does for a script
        try:
            preexec_fn()
            runpy.run_path(str(program), run_name="__main__")
            return 0
        except SystemExit as leaving:
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
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise subprocess.TimeoutExpired(str(self.pid), timeout, *map(self._text, self.files))
            else:
                time.sleep(0.01)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written to stdout and to stderr, when it has ended."""
        self.wait(timeout)
        return tuple(map(self._text, self.files))

    @staticmethod
    def _text(file) -> str:
        file.seek(0)
        return file.read()
