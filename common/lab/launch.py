"""launch(fn, nproc): run a plain function on N ranks from a notebook or a test and get the N results back.

Underneath is PyTorch's elastic agent, the engine of torchrun. On Linux the ranks are forked, so that functions
written in a notebook cell just work; where forking is not safe (macOS, Windows, or once CUDA is initialised)
they are spawned, and the function travels by cloudpickle, which can carry functions of a notebook.
"""

import contextlib
import faulthandler
import gc
import json
import linecache
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from common.ranks import process_group

RETURNED, HAD_RETURNED = "returned\n", "had returned already"


class RankFailed(RuntimeError):
    """A rank died, raised, or waited in vain.

    rank:   the rank whose failure came first
    where:  for each rank, what it was doing when the launch ended
    output: for each rank, what it had printed
    """

    def __init__(self, message: str, rank: int, where: list[str], output: list[str]):
        super().__init__(message)
        self.rank, self.where, self.output = rank, where, output


def launch(fn, nproc: int = 2, args: tuple = (), timeout: float = 60.0, start_method: str | None = None) -> list:
    """Run `fn(*args)` on `nproc` ranks of a fresh process group and return their results in rank order.

    What the ranks print appears afterwards, in rank order, each line headed by its rank. Tensors inside `fn`
    live on the CPU (gloo); each rank computes with one thread. `timeout` is in seconds: for a collective that
    somebody does not join, and for the whole launch.

    Raises RankFailed with the failing rank, its traceback, and what every other rank was doing.
    """
    if start_method is None:
        start_method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "spawn"
    if start_method == "fork":
        from torch import _dynamo  # noqa: F401  DDP and fully_shard import it: once here, not in each rank (1 s)
    payload = (fn, args) if start_method == "fork" else cloudpickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="launch-") as folder, _careful_agent():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            start_method=start_method,
            max_restarts=0,
            run_id="launch",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/agent",
            # In a file, not by TCP: for each connection that one looks up the other's name, which without a network,
            # or with a busy one, takes 5 seconds now and then.
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            monitor_interval=0.02,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            results = elastic_launch(config, _run_rank)(payload, folder, timeout)
        except SignalException as interrupted:
            raise KeyboardInterrupt from interrupted
        except ChildFailedError as failed:
            raise _explain(failed, Path(folder), nproc) from None
        for rank, text in enumerate(_output(Path(folder), nproc)):
            for line in text.splitlines():
                print(f"[rank {rank}] {line}")
        return [cloudpickle.loads(results[rank]) for rank in range(nproc)]


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


@contextlib.contextmanager
def _careful_agent():
    """The agent logs, and keeps signal handlers and environment variables of its own: a notebook wants neither.

    And a forked rank must not collect its parent's garbage: a TCP store among it would, on its destruction, wait for
    ever for a thread that exists in the parent alone.
    """
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in names}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    variables = dict(os.environ)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    sys.stdout.flush()  # a forked rank inherits what is still in the buffers
    sys.stderr.flush()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        os.environ.clear()
        os.environ.update(variables)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        with contextlib.suppress(ValueError):  # only the main thread has signal handlers
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)


def _run_rank(payload, folder: str, timeout: float) -> bytes:
    rank = os.environ["RANK"]
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Down to the file descriptor, for what C++ writes; and a new Python object for it, since the one of a
        # notebook (or of pytest) leads elsewhere, in a notebook to a thread that a forked rank does not have.
        log = os.open(Path(folder, f"{name}-{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, descriptor)
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))
    stack = open(Path(folder, f"stack-{rank}"), "w", buffering=1)  # must outlive this function
    # Where is this rank when the agent ends it, or when time is up? faulthandler can tell even inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGTERM, file=stack, all_threads=False, chain=True)
    faulthandler.dump_traceback_later(timeout + 5, file=stack, exit=True)
    dist.set_debug_level_from_env()  # a forked rank has read TORCH_DISTRIBUTED_DEBUG long ago, as its parent
    try:
        fn, args = payload if isinstance(payload, tuple) else cloudpickle.loads(payload)
        size = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(1)  # for a single rank too, so that its numbers are those of each of several
        with process_group("cpu", "gloo", timeout, store=dist.FileStore(f"{folder}/store", size)):
            result = cloudpickle.dumps(fn(*args))
            stack.write(RETURNED)
    except BaseException as error:
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGTERM)  # from here on the report says more than the stack
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report = {"time": time.time(), "error": _short(error), **_frames(error.__traceback__)}
        Path(folder, f"error-{rank}").write_text(json.dumps(report))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        # Let the others come to where they will wait for this rank, so that the report can say where. And where
        # somebody else has died, let the agent see that one first.
        time.sleep(1.0 if "by peer" in report["error"] else 0.5)
        os._exit(1)  # no tear-down while others may be in a collective
    faulthandler.cancel_dump_traceback_later()
    return result


def _short(error: BaseException) -> str:
    text = re.sub(r"\[[^\]]*\.cc:\d+\] ", "", str(error))  # where in gloo's C++ the message was written
    text = re.sub(r" This is typically caused by .*", "", text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _frames(tb) -> dict:
    """The lines of a traceback that are the caller's own, and the collective that was under way."""
    own, operation = [], ""
    for frame in traceback.extract_tb(tb):
        if frame.filename.endswith("distributed_c10d.py"):
            operation = operation or frame.name
        elif _is_own(frame.filename):
            # A notebook's cells are files in a temporary folder, under a name that says nothing.
            name = "<notebook cell>" if "ipykernel_" in frame.filename else Path(frame.filename).name
            own += [f"  {name}, line {frame.lineno}, in {frame.name}", f"    {frame.line}"]
    place = f"line {own[-2].split('line ')[1].replace(', in', ' of')}" if own else ""
    return {"frames": own, "operation": operation, "place": place}


def _is_own(filename: str) -> bool:
    library = "/torch/" in filename or "/lib/python" in filename or filename.startswith("<frozen")
    return not library and filename != __file__


def _doing(stack: str) -> str:
    """What a rank was doing, from the stack that faulthandler wrote (innermost frame first)."""
    if not stack:
        return ""
    if stack.startswith(RETURNED):
        return HAD_RETURNED
    operation, leaving = "", False
    for file, line, name in re.findall(r'File "(.*)", line (\d+) in (\S+)', stack):
        if file.endswith("distributed_c10d.py"):
            operation = name
        elif file.endswith("c10d_logger.py"):  # around each collective; it takes its time when one has failed
            leaving = True
        elif name == "_run_rank":
            break
        elif _is_own(file):
            if leaving and not operation:
                called = re.findall(r"(\w+)\(", linecache.getline(file, int(line)))
                operation = next((name for name in called if hasattr(dist, name)), "a collective")
            return (
                f"was waiting in {operation}, line {line} of {name}" if operation else f"was at line {line} of {name}"
            )
    return "was starting or ending"


def _output(folder: Path, nproc: int) -> list[str]:
    """What each rank printed on stdout, then on stderr."""
    return ["".join(_read(folder / f"{name}-{rank}") for name in ("stdout", "stderr")) for rank in range(nproc)]


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _explain(failed: ChildFailedError, folder: Path, nproc: int) -> RankFailed:
    """Find the failure that the others follow from: an error of one's own, else a silent death, else the first."""
    errors, where = {}, []
    for rank in range(nproc):
        error, stack = folder / f"error-{rank}", folder / f"stack-{rank}"
        if error.exists():
            errors[rank] = json.loads(error.read_text())
            report = errors[rank]
            did = f"was waiting in {report['operation']}" if report["operation"] else "raised " + report["error"]
            where.append(f"{did}, {report['place']}")
            continue
        doing = _doing(_read(stack))
        failure = failed.failures.get(rank)
        if doing and not (failure and doing == HAD_RETURNED):
            where.append(doing)
        else:  # it ended without a word, perhaps while Python was shutting down
            how = f"died with {_ending(failure.exitcode)}" if failure and failure.exitcode else "died"
            where.append(f"{how}, after it had returned" if doing else how)
    own = {rank: error for rank, error in errors.items() if "by peer" not in error["error"]}
    dead = [rank for rank, state in enumerate(where) if state.startswith("died")]
    lines = []
    if own or (errors and not dead):
        # Ranks that make the same mistake make it at about the same time: then it is the lowest one's to tell.
        begin = min(errors[rank]["time"] for rank in own or errors)
        first = min(rank for rank in own or errors if errors[rank]["time"] < begin + 0.25)
        report = errors[first]
        what = report["error"] + (f" (in {report['operation']})" if report["operation"] else "")
        lines = report["frames"]
    elif dead:
        first = next((rank for rank in dead if rank in failed.failures), dead[0])
        what = where[first]
    else:  # the watchdog's exit: every rank is where its stack says
        first, _ = failed.get_first_failure()
        what = f"not finished in time: {where[first]}"
    others = [f"  rank {rank} {state}" for rank, state in enumerate(where) if rank != first]
    message = "\n".join([f"rank {first} of {nproc}: {what}", *lines, *(["meanwhile"] if others else []), *others])
    return RankFailed(message, first, where, _output(folder, nproc))


def _ending(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
