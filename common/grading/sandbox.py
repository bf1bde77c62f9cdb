"""Run a submission where it can do no harm: in a sandbox of its own, without what it is compared with.

Two processes share the work. The one that judges has the expected values and never runs a line of the submission.
The other one (`serve`) is given the arguments of the calls, starts the ranks, and sends back what they returned and
sent, as plain data. Under bubblewrap (bwrap) it sees the system and the course read-only, without the chapters'
classroom/ folders, the git history, the home folder and the other submissions; it has no network but its own loopback;
what it writes lies in memory, of limited size, and is gone afterwards. Without bubblewrap it is a process of its own in
an empty folder, and no more than that.
"""

import contextlib
import ctypes
import functools
import io
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import astuple
from pathlib import Path

import cloudpickle
import psutil
import torch

from common import ROOT
from common.grading.engine import CallOutcome, DoesNotLoad, run_jobs
from common.grading.values import Description
from common.lab.ledger import LedgerEntry

MARK = "COURSE_SUBMISSION"  # environment variable that a submission's processes are known by
TEMPORARY = Path(tempfile.gettempdir()).resolve()  # in the sandbox it is empty, but for the submission
INSIDE = TEMPORARY / "submission"
MOST_PROCESSES, MOST_MEMORY = 64, 6 * 2**30  # of one submission: processes and threads' owners, bytes
MOST_ANSWER, MOST_FILES = 2**28, 2**28  # bytes of one answer, and of all files that a submission writes


class GradingEnded(Exception):
    """A submission's process ended, or was ended; the text says why."""


@functools.cache
def available() -> str | None:
    """Why there is no sandbox on this machine; None where there is one."""
    if not shutil.which("bwrap"):
        return "bubblewrap (bwrap) is not installed"
    tried = subprocess.run([*_bwrap(), "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"bubblewrap does not work here ({' '.join(tried.stderr.split())[:120]})"


def _bwrap(folder: Path | None = None, hidden: tuple[Path, ...] = ()) -> list[str]:
    """The command that runs another in a sandbox. `folder` is the submission's; `hidden` folders look empty."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--size", str(MOST_FILES)]
    command += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--size", str(MOST_FILES), "--tmpfs", str(TEMPORARY)]
    needed = list(dict.fromkeys((Path(sys.base_prefix), Path(sys.prefix), ROOT, *_python_paths())))
    secrets = [*ROOT.glob("0*/classroom"), ROOT / ".git"]
    outer = [path for path in (Path.home(), *hidden) if not any(other in path.parents for other in needed)]
    outer = [path for path in outer if path.is_dir() and path != Path("/")]
    inner = [path for path in (*hidden, *secrets) if path not in outer]
    for path in outer:
        command += ["--tmpfs", str(path)]
    for path in needed:  # they may lie in a folder that has just been hidden
        command += ["--ro-bind", str(path), str(path)]
    for path in outer:
        command += ["--remount-ro", str(path)]
    for path in inner:
        if path.is_dir():
            command += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.exists():
            command += ["--ro-bind", "/dev/null", str(path)]
    if folder:
        command += ["--ro-bind", str(folder), str(INSIDE)]
    return [*command, "--chdir", str(TEMPORARY)]


def _python_paths() -> list[Path]:
    """Folders that packages are imported from, beside those of this Python."""
    return [Path(path) for path in sys.path if "site-packages" in path and Path(path).is_dir()]


class Runner:
    """Runs jobs of one submission as `common.grading.engine.run_jobs` does, in a process of its own.

    folder: has the submission and nothing else. To be used as a context manager, which leaves no process behind.
    Calls raise DoesNotLoad, and GradingEnded when the process has ended or has used up its time, memory or processes.
    """

    def __init__(self, folder: Path, time_limit: float, hidden: tuple[Path, ...] = ()):
        self.folder, self.time_limit, self.hidden = folder, time_limit, hidden
        self.walled = available() is None
        self.deadline, self.mark = time.monotonic() + time_limit, uuid.uuid4().hex

    def __enter__(self) -> "Runner":
        self.empty = tempfile.TemporaryDirectory(prefix="submission-", ignore_cleanup_errors=True)
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "HOME": str(TEMPORARY), "TMPDIR": str(TEMPORARY), MARK: self.mark}
        command, cwd = [sys.executable, "-c", "from common.grading.sandbox import serve; serve()"], self.empty.name
        if self.walled:
            settings = [word for name, value in environment.items() for word in ("--setenv", name, value)]
            command, cwd = [*_bwrap(self.folder, self.hidden), *settings, *command], "/"
        else:
            environment = os.environ | environment | {"TMPDIR": self.empty.name, "HOME": self.empty.name}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env=environment, cwd=cwd, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout  # they are pipes
        self.requests, self.answers = self.process.stdin, self.process.stdout
        return self

    def __exit__(self, *_) -> None:
        self._kill()
        with contextlib.suppress(BrokenPipeError):  # of a request that nobody has read
            self.requests.close()
        self.answers.close()
        self.errors.close()
        self.empty.cleanup()

    def __call__(self, file: Path, jobs: dict, size: int) -> dict:
        inside = (INSIDE if self.walled else self.folder) / file.name
        request = cloudpickle.dumps((inside, jobs, size))
        try:
            self.requests.write(struct.pack("<Q", len(request)) + request)
            self.requests.flush()
        except BrokenPipeError:
            raise GradingEnded(self._ended()) from None
        (length,) = struct.unpack("<Q", self._read(8))
        if length > MOST_ANSWER:
            raise GradingEnded("the answer was too long")
        return _unpacked(self._read(length), jobs)

    def _read(self, number: int) -> bytes:
        """So many bytes of the answer, as long as the submission keeps within its limits."""
        pieces, missing, looked = [], number, 0.0
        while missing:
            if select.select([self.answers], [], [], 0.1)[0]:
                piece = os.read(self.answers.fileno(), min(missing, 1 << 20))
                if not piece:
                    raise GradingEnded(self._ended())
                pieces.append(piece)
                missing -= len(piece)
            if time.monotonic() > self.deadline:
                raise GradingEnded(f"not finished after {self.time_limit:g} s")
            if time.monotonic() > looked + 0.1:
                self._look()
                looked = time.monotonic()
        return b"".join(pieces)

    def _look(self) -> None:
        """Raise GradingEnded if there are too many processes, or they use too much memory."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            if len(family) > MOST_PROCESSES:
                raise GradingEnded(f"ended at {len(family)} processes; {MOST_PROCESSES} are allowed")
            memory = 0
            for process in family:
                with contextlib.suppress(psutil.Error):
                    used = process.memory_info()
                    memory += used.rss - used.shared
            if memory > MOST_MEMORY:
                raise GradingEnded(f"ended at {memory / 2**30:.1f} GiB of memory; {MOST_MEMORY / 2**30:g} are allowed")

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.errors.seek(0)
        said = self.errors.read(100_000).decode(errors="replace").strip().splitlines()
        return f"grading ended with exit code {self.process.returncode}" + (f": {said[-1][:200]}" if said else "")

    def _kill(self) -> None:
        """End the process group at one blow (with the sandbox, all that is in it), then whoever left the group but
        still bears the mark; return when all are gone."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        while not self.walled and (others := _marked(self.mark)) and time.monotonic() < deadline:
            for other in others:
                with contextlib.suppress(psutil.Error):
                    other.kill()
            time.sleep(0.02)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # already gone, or somebody else's
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


# --- what travels back ----------------------------------------------------------------------------------------


def _packed(ranks) -> object:
    """Outcomes, or the text of a failure, as lists of plain data."""
    if isinstance(ranks, str):
        return ranks
    return [
        [
            [o.status, _value(o.value), [list(astuple(e)) for e in o.entries], o.changed_input, o.text, o.printed]
            for o in rank
        ]
        for rank in ranks
    ]


def _value(value):
    if isinstance(value, list):
        return ["list", [_value(item) for item in value]]
    return ["description", str(value)] if isinstance(value, Description) else ["is", value]


def _unpacked(data: bytes, jobs: dict) -> dict:
    """The outcomes of each job. Only plain data is read, so nothing of the submission is run by reading it. Raises
    DoesNotLoad as run_jobs does, and GradingEnded for what is no answer."""
    try:
        kind, content = torch.load(io.BytesIO(data), weights_only=True)
        if kind == "does not load":
            raise DoesNotLoad(str(content))
        return {key: _outcomes(content[key]) for key in jobs}
    except DoesNotLoad:
        raise
    except Exception as error:  # a submission can send anything
        raise GradingEnded(f"what came back is no answer ({type(error).__name__})") from None


def _outcomes(ranks):
    if isinstance(ranks, str):
        return ranks
    return [[_outcome(*fields) for fields in rank] for rank in ranks]


def _outcome(status, value, entries, changed, text, printed) -> CallOutcome:
    entries = [LedgerEntry(*entry) for entry in entries]
    return CallOutcome(str(status), _plain(value), entries, bool(changed), str(text), str(printed))


def _plain(value):
    kind, content = value
    if kind == "list":
        return [_plain(item) for item in content]
    if kind == "description":
        return Description(content)
    if content is not None and type(content) not in (int, float, bool, str, torch.Tensor):
        raise TypeError
    return content


# --- inside ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """What the process inside does: run jobs as long as there are requests."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # a submission reads no requests, and prints nowhere
        os.dup2(nothing, descriptor)
    os.register_at_fork(after_in_child=lambda: os.close(answers.fileno()))  # ranks do not answer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: nor by way of /proc
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILES, MOST_FILES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while header := requests.read(8):
        file, jobs, size = cloudpickle.loads(requests.read(struct.unpack("<Q", header)[0]))
        try:
            outcomes = {key: _packed(ranks) for key, ranks in run_jobs(file, jobs, size).items()}
            answer: tuple[str, object] = ("answer", outcomes)
        except DoesNotLoad as reason:
            answer = ("does not load", str(reason))
        data = io.BytesIO()
        torch.save(answer, data)
        answers.write(struct.pack("<Q", data.getbuffer().nbytes) + data.getvalue())
        answers.flush()
