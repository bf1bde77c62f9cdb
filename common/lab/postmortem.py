"""The post-mortem of a launch: which rank failed first, how, and what was everybody doing?

Each rank leaves files in the launch's folder, where nothing that happens to its process afterwards can spoil them:

met-R:               the process of a rank that has met the others (`note_meeting`)
error-R:             a rank that raises writes its error there, with the time (`write_error`) and with the ranks that it
                     finds dead: however late their end is noticed elsewhere, it came before this error
stack-R:             faulthandler writes there what a rank is doing when `launch` ends it, even inside a collective
returned-R:          the function has returned
result-R:            its result; written last, when the process group is torn down
stdout-R, stderr-R:  what it printed

From these files and from how the processes ended, `explain` finds the failure that the others follow from.
"""

import json
import linecache
import os
import re
import signal
import time
import traceback
from pathlib import Path

import psutil
import torch.distributed as dist

HAD_RETURNED = "had returned already"
# Ranks that make the same mistake make it at about the same time: then it is the lowest one's to tell, so that the
# text is the same in every run. Seconds.
AT_ONCE = 0.2
OURS = (__file__, str(Path(__file__).with_name("launch.py")))


def note_meeting(folder: Path, rank: str) -> None:
    """This process is a rank's, and has met the others."""
    _write_whole(folder, f"met-{rank}", str(os.getpid()))


def write_error(error: BaseException, folder: Path, rank: str) -> None:
    """What a rank raised, and when and where, and which ranks were dead by then."""
    report = {"time": time.time(), "dead": _dead(folder), "error": _short(error), **_frames(error.__traceback__)}
    _write_whole(folder, f"error-{rank}", json.dumps(report))


def _write_whole(folder: Path, name: str, text: str) -> None:
    """Write a file so that nobody reads half of it."""
    unfinished = folder / f"unfinished-{name}"
    unfinished.write_text(text)
    os.replace(unfinished, folder / name)


def _dead(folder: Path) -> list[int]:
    """The ranks that have met the others and whose processes have ended since."""
    processes = {int(file.name.removeprefix("met-")): int(file.read_text()) for file in folder.glob("met-*")}
    return sorted(rank for rank, process in processes.items() if not _lives(process))


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def output(folder: Path, nproc: int) -> list[str]:
    """What each rank printed on stdout, then on stderr."""
    return ["".join(_read(folder / f"{name}-{rank}") for name in ("stdout", "stderr")) for rank in range(nproc)]


def explain(
    folder: Path, nproc: int, ended: dict[int, tuple[float, int]], stopped: set[int]
) -> tuple[str, int, list[str], list[str]]:
    """Find the failure that the others follow from: the first error of a rank's own or unexpected end of a process,
    else the first lost connection, else, where time is up, a rank that was not waiting for others.

    ended:   when, in seconds since the epoch, and with which exit code the ranks' processes ended by themselves
    stopped: the ranks whose processes were stopped (SIGSTOP) when `launch` ended them

    Returns the arguments of RankFailed: its text, that rank, and for each rank what it was doing and what it printed.
    """
    errors = {rank: json.loads(_read(folder / f"error-{rank}") or "null") for rank in range(nproc)}
    errors = {rank: error for rank, error in errors.items() if error}
    seen = [(rank, error["time"]) for error in errors.values() for rank in error["dead"]]
    died = {
        rank: min([when, *(earlier for dead, earlier in seen if dead == rank)])
        for rank, (when, exitcode) in ended.items()
        if rank not in errors and (exitcode or not (folder / f"result-{rank}").exists())
    }
    # Whoever had returned and waited, in vain, for the others to do so is no cause of anything.
    in_vain = {r for r, e in errors.items() if "timeout" in e["error"].lower() and (folder / f"returned-{r}").exists()}
    errors = {rank: error for rank, error in errors.items() if rank not in in_vain}
    lost = {rank: error["time"] for rank, error in errors.items() if "by peer" in error["error"]}
    own = {rank: error["time"] for rank, error in errors.items() if rank not in lost}
    where = [
        _raised(errors[rank])
        if rank in errors
        else _died(folder, rank, ended[rank][1])
        if rank in died
        else _was(folder, rank, rank in ended, rank in stopped)
        for rank in range(nproc)
    ]
    times, lines = own | died or lost, []
    if times:
        begin = min(times.values())
        at_once = [rank for rank in times if times[rank] < begin + AT_ONCE]
        first = min(at_once, key=lambda rank: (rank not in died, rank))  # a death is noticed late, its echo at once
        what = where[first]
        if first in errors:
            report = errors[first]
            what = report["error"] + (f" (in {report['operation']})" if report["operation"] else "")
            lines = report["frames"]
        for rank in own:
            if own[rank] >= begin + AT_ONCE and where[rank].startswith("raised"):
                where[rank] = f"later {where[rank]}"
    else:  # time is up
        first = min(range(nproc), key=lambda rank: (where[rank] == HAD_RETURNED, "waiting" in where[rank], rank))
        what = f"not finished in time: {where[first]}"
        if where[first] == HAD_RETURNED:
            what += ", and its process did not end"
    others = [f"  rank {rank} {state}" for rank, state in enumerate(where) if rank != first]
    message = "\n".join([f"rank {first} of {nproc}: {what}", *lines, *(["meanwhile"] if others else []), *others])
    return message, first, where, output(folder, nproc)


def _raised(report: dict) -> str:
    did = f"was waiting in {report['operation']}" if report["operation"] else "raised " + report["error"]
    return ", ".join(filter(None, (did, report["place"])))


def _died(folder: Path, rank: int, exitcode: int) -> str:
    """How a process ended without a word."""
    how = f"died with {signal.Signals(-exitcode).name if exitcode < 0 else f'exit code {exitcode}'}"
    if (folder / f"returned-{rank}").exists():
        return f"{how}, after it had returned"  # perhaps while Python was shutting down
    return how if exitcode else f"{how} before it returned"


def _was(folder: Path, rank: int, ended: bool, stopped: bool) -> str:
    """What a rank was doing that ended well or was ended by `launch`."""
    if ended or (folder / f"returned-{rank}").exists():
        return HAD_RETURNED
    doing = _doing(_read(folder / f"stack-{rank}"))
    return f"was stopped by a signal, and {doing}" if stopped else doing


def _doing(stack: str) -> str:
    """What a rank was doing, from the stack that faulthandler wrote (innermost frame first)."""
    if not stack:
        return "was at work, and did not say where"  # it blocks signals, or had closed its files
    stack = stack.rpartition("Thread 0x")[2]  # where all threads are there, the main thread is the last
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
    return not library and filename not in OURS


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
