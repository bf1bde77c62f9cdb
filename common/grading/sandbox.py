"""Run a submission where it can do no harm: in a sandbox of its own, without what it is compared with.

The process that judges has the inputs and the expected values, and never runs a line of the submission. It starts a
process under bubblewrap (bwrap), which starts the ranks (inside.py), each walled off from the others (alone.py); it
asks each rank by a pipe of that rank's own, one call after the other, carries their messages (network.py), and reads
what comes back as data. In the sandbox there are the system's programs, Python and the course's code, read-only, and
the submission; no grader, no solutions, no history, no home, no other submission, no network. What a rank writes lies
in memory, of limited size, and is gone afterwards.

Without bubblewrap a submission is a process of its own in an empty folder, and no more than that.
"""

import contextlib
import functools
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import cloudpickle
import msgspec
import psutil

from common import ROOT
from common.grading import engine
from common.grading.alone import NOT_ALONE
from common.grading.engine import CallOutcome, DoesNotLoad
from common.grading.inside import ANSWER, CALL, MOST_FILES, MOST_MEMORY, MOST_TASKS, OWN, REQUEST, message, unpacked
from common.grading.network import Switch

MARK = "COURSE_SUBMISSION"  # environment variable that a submission's processes are known by
TEMPORARY = Path(tempfile.gettempdir()).resolve()  # in the sandbox it is empty, but for the submission
INSIDE = TEMPORARY / "submission"
MOST_PROCESSES = 64
BUSY_FACTOR = 6  # times the limit by the clock, on a busy machine
MOST_ANSWER = 2**25  # bytes of one answer of one rank
CGROUPS = Path("/sys/fs/cgroup")
STARTING, LEEWAY = 240.0, 5.0  # seconds: for Python and PyTorch to start, on a busy machine; beyond a rank's own limit
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix", "/etc/ld.so.cache",
          "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")  # fmt: skip


class GradingEnded(Exception):
    """A submission's process ended, or was ended; the text says why."""


class RanksEnded(Exception):
    """The ranks of one start cannot go on; the text says why. There may be others."""


@functools.cache
def available() -> str | None:
    """Why there is no sandbox on this machine; None where there is one."""
    if not shutil.which("bwrap"):
        return "bubblewrap (bwrap) is not installed"
    command = [*_bwrap(), sys.executable, "-S", str(ROOT / "common/grading/alone.py"), str(OWN)]
    tried = subprocess.run(command, capture_output=True, text=True)
    if tried.returncode == NOT_ALONE:
        return "no namespaces within bubblewrap's, so ranks would see each other"
    return None if tried.returncode == 0 else f"bubblewrap does not work here ({' '.join(tried.stderr.split())[:120]})"


def _bwrap(folder: Path | None = None, hidden: tuple[Path, ...] = ()) -> list[str]:
    """The command that runs another in a sandbox, in which nothing is but what is named here. `folder` is the
    submission's; `hidden` are files and folders that are not shown even where they lie in one that is."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]  # root could not make namespaces for the ranks
    places = [Path(path) for path in SYSTEM]
    places += [Path(sys.base_prefix), Path(sys.prefix), *_python_paths()]
    for path in dict.fromkeys(path for path in places if path.exists()):
        if path.is_symlink() and path.parent == Path("/"):  # as /bin -> usr/bin
            command += ["--symlink", os.readlink(path), str(path)]
        elif path == Path("/usr") or Path("/usr") not in path.parents:
            command += ["--ro-bind", str(path), str(path)]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(MOST_FILES), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev", "--size", str(MOST_FILES), "--tmpfs", str(TEMPORARY)]
    within = [path for path in places if path == TEMPORARY or TEMPORARY in path.parents]
    for path in [*within, *course()]:  # after the folder for temporary files, in which the course may lie
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    shown = [Path(command[at + 2]) for at, word in enumerate(command) if word == "--ro-bind"]
    for path in hidden:
        if any(place == path or place in path.parents for place in shown):
            empty = ["--tmpfs", str(path), "--remount-ro", str(path)]  # or ranks would tell each other things in it
            command += empty if path.is_dir() else ["--ro-bind", os.devnull, str(path)]
    if folder:
        command += ["--ro-bind", str(folder), str(INSIDE)]
    return [*command, "--dir", str(OWN), "--remount-ro", "/", "--chdir", str(TEMPORARY)]


def course() -> list[Path]:
    """What of the course is seen: its packages, and the chapters' own code and tables."""
    chapters = [path for chapter in sorted(ROOT.glob("[0-9][0-9]_*")) for path in sorted(chapter.iterdir())]
    code = [path for path in chapters if path.suffix in (".py", ".csv") and path.name != "exercises.py"]
    return [*(ROOT / name for name in ("common", "course", "planner", "distributed_training.py")), *code]


def _python_paths() -> list[Path]:
    """Folders that packages are imported from, beside those of this Python."""
    return [Path(path) for path in sys.path if "site-packages" in path and Path(path).is_dir()]


# --- limits of a whole submission -----------------------------------------------------------------------------


class Group:
    """A control group (cgroup) for all processes of a submission, with its most memory and tasks, where this machine
    lets us make one: version 2, or memory and pids of version 1. `files` are empty where it doesn't."""

    def __init__(self):
        self.folders: list[Path] = []
        name = f"submission-{uuid.uuid4().hex[:12]}"
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                for kind in controllers.split(","):
                    limits = {"": ("memory.max", "pids.max"), "memory": ("memory.limit_in_bytes",),
                              "pids": ("pids.max",)}.get(kind, ())  # fmt: skip
                    if limits:
                        self._make(CGROUPS / kind, path.strip("/"), name, limits)

    def _make(self, mount: Path, path: str, name: str, limits: tuple[str, ...]) -> None:
        for parent in (mount / path, mount):
            with contextlib.suppress(OSError):
                if not all((parent / limit).exists() for limit in limits) and not (parent / "cgroup.procs").exists():
                    continue
                folder = parent / name
                folder.mkdir()
                try:
                    for limit in limits:
                        (folder / limit).write_text(str(MOST_MEMORY if limit.startswith("memory") else MOST_TASKS))
                except OSError:
                    folder.rmdir()
                    continue
                self.folders.append(folder)
                return

    @property
    def complete(self) -> bool:
        return any((f / "pids.max").exists() for f in self.folders) and any(
            (f / name).exists() for f in self.folders for name in ("memory.max", "memory.limit_in_bytes")
        )

    def command(self, command: list[str]) -> list[str]:
        """The command, as a process of this group."""
        joins = "".join(f"echo $$ > '{folder}/cgroup.procs' && " for folder in self.folders)
        return ["sh", "-c", f'{joins}exec "$@"', "sh", *command] if self.folders else command

    def close(self) -> None:
        deadline = time.monotonic() + 5
        while self.folders and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.folders[-1].rmdir()
                self.folders.pop()
                continue
            time.sleep(0.02)  # its last processes are going


@functools.cache
def limits() -> str:
    """How memory and processes of a submission are limited on this machine, in words."""
    group = Group()
    try:
        held = (
            "a cgroup"
            if group.complete
            else "RLIMIT_NPROC and RLIMIT_AS, and a look at all processes ten times a second"
        )
    finally:
        group.close()
    return held


# --- the judge's side -----------------------------------------------------------------------------------------


class Allowance:
    """The time of a submission: seconds by the clock, without those in which a process waited for a core, since the
    machine may have other work. So that it cannot keep its own processes waiting for ever, the processor time of
    all of them has the same limit, and the clock has one of BUSY_FACTOR times as much."""

    def __init__(self, limit: float, now: float):
        self.limit, self.begun, self.before, self.late = limit, now, now, 0.0
        self.waited: dict[int, float] = {}

    def is_used(self, now: float, waited: dict[int, float], worked: Iterable[float]) -> bool:
        """waited: seconds that each process has waited for a core so far; worked: those that each has computed"""
        more = sum(seconds - self.waited.get(pid, 0.0) for pid, seconds in waited.items())
        self.late += min(now - self.before, more)
        self.before, self.waited = now, waited
        passed = now - self.begun
        return passed - self.late > self.limit or passed > BUSY_FACTOR * self.limit or sum(worked) > self.limit


class Runner:
    """Runs jobs of one submission as `common.grading.engine.run_jobs` does, in processes that are not this one's.

    folder: has the submission and nothing else. To be used as a context manager, which leaves no process behind.
    Calls raise DoesNotLoad, and GradingEnded when the submission has used up its time, memory or processes.
    """

    def __init__(self, folder: Path, time_limit: float, hidden: tuple[Path, ...] = ()):
        self.folder, self.time_limit, self.hidden = folder, time_limit, hidden
        self.walled = available() is None
        self.allowance, self.mark, self.looked = Allowance(time_limit, time.monotonic()), uuid.uuid4().hex, 0.0
        self.pipes: list[tuple[int, int]] = []
        self.switch = Switch(0)

    def __enter__(self) -> "Runner":
        self.empty = tempfile.TemporaryDirectory(prefix="submission-", ignore_cleanup_errors=True)
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "HOME": str(TEMPORARY), "TMPDIR": str(TEMPORARY), MARK: self.mark}
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command, cwd = [sys.executable, "-m", "common.grading.inside", str(theirs.fileno())], self.empty.name
        command += ["walled" if self.walled else "open", str(engine.CALL_LIMIT)]
        self.group = Group()
        if self.walled:
            settings = [word for name, value in environment.items() for word in ("--setenv", name, value)]
            command, cwd = [*_bwrap(self.folder, self.hidden), *settings, *command], "/"
        else:
            environment = os.environ | environment | {"TMPDIR": self.empty.name, "HOME": self.empty.name}
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.group.command(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors,
            env=environment, cwd=cwd, start_new_session=True, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        return self

    def __exit__(self, *_) -> None:
        self._drop()
        self._kill()
        self.control.close()
        self.errors.close()
        self.group.close()
        self.empty.cleanup()

    def __call__(self, file: Path, jobs: dict, size: int) -> dict:
        inside, ready = (INSIDE if self.walled else self.folder) / file.name, False
        found: dict[object, list | str] = {}
        for key, (name, cases) in jobs.items():
            try:
                if not ready:
                    self._start(inside, size)
                    ready = True
                found[key] = self._job(name, cases, size)
            except RanksEnded as why:
                found[key], ready = f"{why}", False
                self._stop()
        self._stop()
        return found

    def _start(self, file: Path, size: int) -> None:
        if not hasattr(self, "ready"):
            self.ready = self._reply(STARTING)  # the first message: it has started
        both = [(os.pipe(), os.pipe()) for _ in range(size)]
        theirs = [end for requests, answers in both for end in (requests[0], answers[1])]
        self.pipes = [(requests[1], answers[0]) for requests, answers in both]
        for requests, answers in self.pipes:
            os.set_blocking(requests, False)
            os.set_blocking(answers, False)
        try:
            socket.send_fds(self.control, [msgspec.json.encode(["start", str(file), size])], theirs)
        except OSError:
            raise GradingEnded(self._ended()) from None
        finally:
            for end in theirs:
                os.close(end)
        self._reply(STARTING)
        try:
            errors = [answer.decode(errors="replace")[:2000] for answer in self._ask(None, 30 + engine.CALL_LIMIT)]
        except RanksEnded as why:
            self._stop()
            raise DoesNotLoad(f"loading the file ends the process: {why}") from None
        if any(errors):
            self._stop()
            raise DoesNotLoad(next(filter(None, errors)))

    def _job(self, name: str, cases: list, size: int) -> list[list[CallOutcome]]:
        outcomes: list[list[CallOutcome]] = [[] for _ in range(size)]
        for arguments in cases:
            requests = [cloudpickle.dumps((name, arguments[rank])) for rank in range(size)]
            answers = self._ask(requests, engine.WALL * engine.CALL_LIMIT + LEEWAY)
            for rank, answer in enumerate(answers):
                try:
                    outcomes[rank].append(unpacked(answer))
                except Exception as error:  # a submission can send anything
                    why = f"what came back is no answer ({type(error).__name__})"
                    outcomes[rank].append(CallOutcome("raised", text=why))
                if outcomes[rank][-1].status != "not attempted":
                    outcomes[rank][-1].entries = self.switch.entries[rank]
            if any(own[-1].status != "returned" for own in outcomes):
                break
        return outcomes

    def _stop(self) -> list[int]:
        """End the ranks of this start, and hear how each had ended by itself (-9: it had not)."""
        if not self.pipes:
            return []
        self._drop()
        return self._command(["end"])

    def _drop(self) -> None:
        for pipe in [end for both in self.pipes for end in both]:
            os.close(pipe)
        self.pipes = []

    def _command(self, what: list):
        try:
            self.control.send(msgspec.json.encode(what))
        except OSError:
            raise GradingEnded(self._ended()) from None
        return self._reply(STARTING)  # what a submission holds up counts as its time

    def _reply(self, seconds: float):
        """What the starter says."""
        end = time.monotonic() + seconds
        self.control.settimeout(0.1)
        while True:
            try:
                data = self.control.recv(65536)
            except TimeoutError:
                self._look()
                if time.monotonic() > end:
                    raise GradingEnded("the sandbox does not answer") from None
                continue
            except OSError:
                data = b""
            if not data:
                raise GradingEnded(self._ended())
            return msgspec.json.decode(data)

    def _ask(self, requests: list[bytes] | None, seconds: float) -> list[bytes]:
        """Send each rank its request, carry their messages, and return their answers. Raises RanksEnded where one ends,
        does not answer in so many seconds (without those in which they waited for a core), or says what cannot be."""
        size, end, late = len(self.pipes), time.monotonic() + seconds, self.allowance.late
        self.switch = Switch(size)
        to_send = [bytearray(message(CALL + requests[rank]) if requests else b"") for rank in range(size)]
        parts, answers = [bytearray() for _ in range(size)], dict[int, bytes]()
        with selectors.DefaultSelector() as selector:
            for rank, (_, pipe) in enumerate(self.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(answers) < size:
                for rank, (pipe, _) in enumerate(self.pipes):
                    if to_send[rank] and pipe not in selector.get_map():
                        selector.register(pipe, selectors.EVENT_WRITE, rank)
                for key, events in selector.select(0.1):
                    rank = key.data
                    if events & selectors.EVENT_WRITE:
                        with contextlib.suppress(BrokenPipeError, BlockingIOError):
                            del to_send[rank][: os.write(key.fd, to_send[rank][: 1 << 16])]
                        if not to_send[rank]:
                            selector.unregister(key.fd)
                        continue
                    piece = os.read(key.fd, min(_missing(parts[rank]), 1 << 20))
                    if not piece:
                        raise RanksEnded(self._how_it_ended(rank))
                    parts[rank] += piece
                    if _missing(parts[rank]):
                        continue
                    received, parts[rank] = bytes(parts[rank][8:]), bytearray()
                    if received[:1] == ANSWER:
                        answers[rank] = received[1:]
                        self.switch.ends(rank)
                        selector.unregister(key.fd)
                    else:
                        for to, what in self._carried(rank, received):
                            to_send[to] += message(REQUEST + what)
                for to, what in self.switch.in_vain():
                    to_send[to] += message(REQUEST + what)
                self._look()
                if time.monotonic() - (self.allowance.late - late) > end:
                    silent = next(rank for rank in range(size) if rank not in answers)
                    raise RanksEnded(f"no answer of rank {silent} after {seconds:g} s")
        return [answers[rank] for rank in range(size)]

    def _carried(self, rank: int, received: bytes) -> list[tuple[int, bytes]]:
        try:
            if received[:1] != REQUEST:
                raise ValueError
            return self.switch.take(rank, received[1:])
        except Exception as error:  # a submission can send anything
            raise RanksEnded(f"rank {rank} sent what cannot be ({type(error).__name__}: {error})"[:200]) from None

    def _how_it_ended(self, rank: int) -> str:
        time.sleep(0.3)  # others may be ending, too
        codes = self._stop()
        own = next((r for r in (rank, *range(len(codes))) if codes[r] not in (-9, 70)), rank)
        code, who = codes[own], f"the process of rank {own}"
        if code == 0:
            return f"{who} ended without returning (did it call exit?)"
        if code > 0:
            return f"{who} died with exit code {code}"
        name = signal.Signals(-code).name
        more = ": gloo aborts a process that is sent more bytes than its buffer holds; are shape and type right?"
        return f"{who} was ended by {name}{more if name == 'SIGABRT' else ''}"

    def _look(self) -> None:
        """Raise GradingEnded if the time is over, or there are too many processes, or they use too much memory."""
        now = time.monotonic()
        if now < self.looked + 0.1:
            return
        self.looked, family = now, list[psutil.Process]()
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        waited = {pid: engine.waited_for_a_core(pid) for pid in (os.getpid(), *(one.pid for one in family))}
        if self.allowance.is_used(now, waited, map(worked, family)):
            raise GradingEnded(f"not finished after {self.time_limit:g} s")
        if len(family) > MOST_PROCESSES:
            raise GradingEnded(f"ended at {len(family)} processes; {MOST_PROCESSES} are allowed")
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = sum(memory_of(process.pid) for process in family if not (self.walled and self._is_wall(process)))
            if memory > MOST_MEMORY:
                raise GradingEnded(f"ended at {memory / 2**30:.1f} GiB of memory; {MOST_MEMORY / 2**30:g} are allowed")

    def _is_wall(self, process: psutil.Process) -> bool:
        """Whether a process only walls off a rank: bwrap (twice) starts the starter, that one two of these for each."""
        return 3 <= [parent.pid for parent in process.parents()].index(self.process.pid) + 1 <= 4

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.errors.seek(0)
        lines = self.errors.read(100_000).decode(errors="replace").strip().splitlines()
        return f"grading ended with exit code {self.process.returncode}" + (f": {lines[-1][:200]}" if lines else "")

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


def _missing(part: bytearray) -> int:
    """How many bytes of a message are still to come; at first those of its length. Raises RanksEnded."""
    if len(part) < 8:
        return 8 - len(part)
    length = int.from_bytes(part[:8], "little")
    if length > MOST_ANSWER:
        raise RanksEnded(f"the answer was longer than {MOST_ANSWER >> 20} MiB")
    return 8 + length - len(part)


def worked(process: psutil.Process) -> float:
    """Processor seconds of a process and of those that it has started and that have ended."""
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:4])
    return 0.0


def memory_of(pid: int) -> int:
    """Bytes that a process holds by itself or shares with others, without its files; 0 where it is gone."""
    found = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                found += int(line.split()[1]) * 1024
    return found


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # already gone, or somebody else's
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found
