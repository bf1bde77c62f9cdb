"""launch(fn, nproc): run a plain function on N ranks from a notebook or a test and get the N results back.

The ranks are processes with the environment variables that torchrun sets. On Linux they are forked, so that functions
written in a notebook cell just work; where forking is not safe (macOS, Windows, or once CUDA is initialised) they are
spawned, and the function travels by cloudpickle, which can carry functions of a notebook.

Nothing that a rank does can keep `launch` from ending: it never waits for anything that a rank has to send. Results,
errors and stacks come back in files, the clock is the caller's, and at the end what is left of the ranks is killed, and
with it what they have started.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from common.errors import UserError
from common.lab.postmortem import explain, note_meeting, output, write_error
from common.ranks import process_group

LINUX = sys.platform == "linux"
START = 60.0  # seconds that ranks may take to start: a spawned one imports PyTorch first
LEEWAY = 3.0  # seconds beyond the timeout, so that a collective that began late times out, and says so, by itself
# Seconds that the other ranks have after the first failure. They come to where they will wait for the rank that failed,
# so that the report can say where; and of errors at about the same time each is heard.
# A rank whose turn to compute has not come, on a busy machine, has up to MOST_TURNS times as long.
SETTLE = 0.5
MOST_TURNS = 6
# Seconds that a rank has to write down where it is; one that blocks the signal does so by its own clock (LEEWAY + 1).
TO_WRITE_DOWN = 2.0
# On this signal a rank writes down its stack and ends. Not SIGTERM, which programs handle or ignore.
STACK = getattr(signal, "SIGUSR2", None)
ONE_AT_A_TIME = threading.Lock()  # launches of several threads take turns: orphans are told by being new


class RankFailed(RuntimeError):
    """A rank died, raised, or waited in vain.

    rank:   the rank whose failure came first
    where:  for each rank, what it was doing when the launch ended
    output: for each rank, what it had printed
    """

    def __init__(self, message: str, rank: int, where: list[str], output: list[str]):
        super().__init__(message)
        self.rank, self.where, self.output = rank, where, output


def launch(
    fn,
    nproc: int = 2,
    args: tuple = (),
    timeout: float = 60.0,
    start_method: str | None = None,
    how: Literal["processes", "local"] = "processes",
) -> list:
    """Run `fn(*args)` on `nproc` ranks of a fresh process group and return their results in rank order.

    What the ranks print appears afterwards, in rank order, each line headed by its rank. Tensors inside `fn` live on
    the CPU (gloo); each rank computes with one thread. `timeout` is in seconds: for a collective that somebody does not
    join, and, with LEEWAY, for the whole launch, from when the ranks have started.

    With how="local" all ranks are pretended in this process, and there may be a thousand of them (`common.lab.local`
    says what they can do and what is refused). The function is run once, by all ranks in step, its tensors live and
    its collectives are done in this process, an error in it is the error, and `timeout` does not apply.

    Raises RankFailed with the failing rank, its traceback, and what every other rank was doing: if a rank raises, dies,
    exits before it has returned (with exit code 0 too), or is not finished in time. No process is left behind, except,
    where this is not Linux, one that a rank has put into a process group of its own.

    Raises UserError where this process is itself in a process group of torch.distributed: ranks that are forked from it
    would believe to be in it too.
    """
    if dist.is_initialized():
        raise UserError(
            "launch starts a process group of its own, and this process is in one already: leave that one first, by "
            "dist.destroy_process_group()"
        )
    if how == "local":
        from common.lab import local  # as private as its parts in PyTorch: loaded by those who ask for it

        return local.run(fn, nproc, args)
    if how != "processes":
        raise UserError(f"how={how!r}: ranks are 'processes', or pretended in this one, 'local'")
    if start_method is None:
        start_method = "fork" if LINUX and not torch.cuda.is_initialized() else "spawn"
    if start_method == "fork":
        with setenv():  # it sets one
            from torch import _dynamo  # noqa: F401  DDP and fully_shard import it: once here, not in each rank (1 s)
    payload = (fn, args) if start_method == "fork" else cloudpickle.dumps((fn, args))
    start = multiprocessing.get_context(start_method).Process  # type: ignore[attr-defined]  # typeshed: fork and spawn only
    temporary = tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True)
    with ONE_AT_A_TIME, temporary as folder, _no_orphans():
        port = free_port()
        variables = [rank_variables(rank, nproc, port) for rank in range(nproc)]
        ranks = [start(target=_run_rank, args=(payload, folder, timeout, mine)) for mine in variables]
        try:
            with ready_to_fork():
                for process in ranks:
                    process.start()
            ended = _wait(ranks, Path(folder), timeout)
            results = [Path(folder, f"result-{rank}") for rank in range(nproc)]
            if len(ended) < nproc or any(ended[rank][1] or not results[rank].exists() for rank in range(nproc)):
                stopped = _stop(ranks, Path(folder))
                raise RankFailed(*explain(Path(folder), nproc, ended, stopped))
        finally:
            _kill(ranks)
        for rank, text in enumerate(output(Path(folder), nproc)):
            for line in text.splitlines():
                print(f"[rank {rank}] {line}")
        return [cloudpickle.loads(result.read_bytes()) for result in results]


@contextlib.contextmanager
def setenv(**values: str):
    """Set environment variables inside the block, for ranks that are started there; restore them afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun would tell this rank of a single node, by environment variables."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


def free_port() -> int:
    """A port of this machine that nobody uses. Below those that the system gives to connections (32768 and above on
    Linux, 49152 elsewhere): it might give one of these away before the ranks listen there."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_000)))
            return probe.getsockname()[1]


@contextlib.contextmanager
def ready_to_fork():
    """A forked rank inherits what is still in the buffers. And it must not collect its parent's garbage: a TCP store
    among it would, on its destruction, wait for ever for a thread that exists in the parent alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _wait(ranks: list, folder: Path, timeout: float) -> dict[int, tuple[float, int]]:
    """Wait until every rank has ended or raised, until SETTLE after the first failure, or until time is up. SETTLE
    begins when all ranks have met, in case that the failure was quicker than that, and it goes on while a rank computes
    or would like to; but neither for longer than MOST_TURNS times SETTLE.

    Returns for each rank that has ended when, in seconds since the epoch, and with which exit code.
    """
    ended, failed_at, settling, started, deadline = {}, None, None, False, time.monotonic() + START
    while True:
        for rank, process in enumerate(ranks):
            if rank not in ended and not process.is_alive():
                ended[rank] = (time.time(), process.exitcode)
        raised = {rank for rank in range(len(ranks)) if Path(folder, f"error-{rank}").exists()}
        died = {r for r, (_, exitcode) in ended.items() if exitcode or not Path(folder, f"result-{r}").exists()}
        now = time.monotonic()
        if (raised or died) and failed_at is None:
            failed_at = now
        if failed_at is not None and settling is None:
            met = {rank for rank in range(len(ranks)) if Path(folder, f"met-{rank}").exists()}
            settling = (
                now if len(met | raised | ended.keys()) == len(ranks) or now > failed_at + MOST_TURNS * SETTLE else None
            )
        if not started and all(Path(folder, f"stack-{rank}").exists() for rank in range(len(ranks))):
            started, deadline = True, now + timeout + LEEWAY
        if len(raised | ended.keys()) == len(ranks) or now > deadline:
            return ended
        if settling is not None and now > settling + SETTLE:
            at_work = [process for rank, process in enumerate(ranks) if rank not in raised | ended.keys()]
            if now > settling + MOST_TURNS * SETTLE or not any(_computes(process) for process in at_work):
                return ended
        time.sleep(0.01)  # no waiting on pipes, which ranks may close, or leave open in a process of their own


def _computes(process) -> bool:
    """Does the main thread of a rank compute, or wait for nothing but its turn to do so?"""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).status() == psutil.STATUS_RUNNING
    return False


def _stop(ranks: list, folder: Path) -> set[int]:
    """Have each rank that is still at work write down where it is; those whose processes are stopped are returned."""
    asked, stopped = [], set()
    for rank, process in enumerate(ranks):
        if STACK is None or not process.is_alive() or Path(folder, f"error-{rank}").exists():
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                stopped.add(rank)
            _signal_main_thread(process.pid, STACK)
            os.kill(process.pid, signal.SIGCONT)  # a stopped process handles no signals
            asked.append(process)
    deadline = time.monotonic() + TO_WRITE_DOWN
    while any(process.is_alive() for process in asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    return stopped


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to a process, on Linux to the thread that runs Python: one of gloo's could not say where it is."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except AttributeError:  # another system, or an old C library
        os.kill(pid, number)


def _kill(ranks: list) -> None:
    """End the ranks' processes, and all that belong to their process groups."""
    for process in ranks:
        if process.pid is None:
            continue
        if process.is_alive():
            process.kill()
        if hasattr(os, "killpg"):  # not on Windows
            with contextlib.suppress(OSError):  # most often there is nobody left
                os.killpg(process.pid, signal.SIGKILL)
        process.join(5)  # not for ever: a process inside a system call that hangs cannot be killed


@contextlib.contextmanager
def _no_orphans():
    """Kill what the ranks of this block have started and left behind. Linux only.

    Inside the block orphans become children of this process instead of init's. Those of other origin are told by their
    process group: who leaves its own has become one of a group of its own; what this process starts stays in its own.
    """
    if not LINUX:
        yield
        return
    me, libc, before = psutil.Process(), ctypes.CDLL(None), ctypes.c_int()
    known = {child.pid for child in me.children()}
    libc.prctl(37, ctypes.byref(before))  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            orphans = [child.pid for child in me.children() if child.pid not in known]
            orphans = [pid for pid in orphans if _group_of(pid) != os.getpgrp()]
            if not orphans:
                break
            for pid in orphans:  # their own children are orphans then: next time round
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)
        libc.prctl(36, before.value)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return os.getpgrp()  # gone: none of our business


def _run_rank(payload, folder: str, timeout: float, variables: dict[str, str]) -> None:
    """What the process of a rank does."""
    os.environ.update(variables)
    # The library of torch.profiler writes "USDT: ... profiler_start", with time and process, at every level but this
    # one. It reads the variable when a process profiles for the first time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    rank, pid = os.environ["RANK"], os.getpid()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)  # so that what this rank starts can be ended with it
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        with contextlib.suppress(OSError):  # if memory runs out, the system is to kill this process, not the notebook
            Path("/proc/self/oom_score_adj").write_text("500")
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Down to the file descriptor, for what C++ writes; and a new Python object for it, since the one of a
        # notebook (or of pytest) leads elsewhere, in a notebook to a thread that a forked rank does not have.
        log = os.open(Path(folder, f"{name}-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, descriptor)
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack = open(Path(folder, f"stack-{rank}"), "w")  # must outlive this function
    if STACK is not None:
        faulthandler.register(STACK, file=stack, all_threads=False, chain=True)
    # For a rank that outlives its parent, or that has blocked the signal.
    faulthandler.dump_traceback_later(timeout + LEEWAY + 1, file=stack, exit=True)
    dist.set_debug_level_from_env()  # a forked rank has read TORCH_DISTRIBUTED_DEBUG long ago, as its parent
    try:
        fn, args = payload if isinstance(payload, tuple) else cloudpickle.loads(payload)
        size = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(1)  # for a single rank too, so that its numbers are those of each of several
        with process_group("cpu", "gloo", timeout, store=dist.FileStore(f"{folder}/store", size)):
            note_meeting(Path(folder), rank)
            result = cloudpickle.dumps(fn(*args))
            if os.getpid() != pid:
                os._exit(0)  # the function has forked, and this is not the rank
            Path(folder, f"returned-{rank}").touch()
    except BaseException as error:
        if os.getpid() != pid:
            os._exit(1)
        with contextlib.suppress(OSError, ValueError):  # the function may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        write_error(error, Path(folder), rank)
        time.sleep(10 * SETTLE)  # until `launch` ends it: no tear-down while others may be in a collective
        os._exit(1)
    Path(folder, f"result-{rank}").write_bytes(result)
    faulthandler.cancel_dump_traceback_later()
