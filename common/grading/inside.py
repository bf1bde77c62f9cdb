"""What runs in the sandbox: a process that starts ranks, and the ranks, which alone run lines of a submission.

The starter (`main`) reads no data of the ranks, and holds no inputs. The one who judges hands it a pipe to and a pipe
from each rank, which it passes on to that rank and closes; so each rank is asked and answers by a channel that neither
the other ranks nor the starter hold, and knows its own arguments alone. What a rank can say there is what its function
returned, printed and (for the words of a verdict) sent, as data; how many bytes went from rank to rank the starter
reads from the system.

    python -m common.grading.inside DESCRIPTOR walled|open PATIENCE CALL_LIMIT

is started by sandbox.py, with a socket that is open; the last two are the engine's, in seconds.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path

import cloudpickle
import msgspec
import torch
import torch.distributed as dist

from common.grading import engine, sockets
from common.grading.engine import CallOutcome, CheckedRank
from common.grading.values import Description
from common.lab.launch import rank_variables, ready_to_fork, setenv
from common.lab.ledger import LedgerEntry
from common.ranks import process_group

MOST_FILES = 2**28  # bytes of all files that a submission writes
MOST_TASKS, MOST_MEMORY = 512, 6 * 2**30  # of one submission: threads of all its processes; bytes
# What imports torch._dynamo when it is first used, which takes two seconds of a processor.
DYNAMO = re.compile(rb"torch\.optim|DataParallel\(|fully_shard\(|distributed\.tensor|torch\.compile")
TYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Entry(msgspec.Struct, array_like=True):
    operation: str
    payload: int
    ranks: int
    dtype: str | None
    peer: int | None
    group: list[int]


class Answer(msgspec.Struct, array_like=True):
    """An outcome of a call as it travels. value: None, a number or a text; a list of values as {"list": ...}; a tensor
    as its type, shape and bytes; what cannot be compared as {"description": ...}."""

    status: str
    value: object
    entries: list[Entry]
    changed: bool
    text: str
    printed: str


def packed(outcome: CallOutcome) -> bytes:
    entries = [Entry(e.operation, e.payload, e.ranks, str(e.dtype) if e.dtype else None, e.peer, [*e.group])
               for e in outcome.entries]  # fmt: skip
    value, text, printed = as_data(outcome.value), writable(outcome.text), writable(outcome.printed)
    return msgspec.msgpack.encode(Answer(outcome.status, value, entries, outcome.changed_input, text, printed))


def writable(text: str) -> str:
    return text.encode(errors="replace").decode()


def as_data(value):
    if isinstance(value, list):
        return {"list": [as_data(item) for item in value]}
    if isinstance(value, Description):
        return {"description": writable(value)}
    if isinstance(value, torch.Tensor):
        whole = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return {"tensor": [str(value.dtype), list(value.shape), whole.view(torch.uint8).numpy().tobytes()]}
    return writable(value) if isinstance(value, str) else value


def unpacked(data: bytes) -> CallOutcome:
    """The outcome that a rank has sent. Nothing of the submission runs by reading it. Raises ValueError and others for
    what is no outcome: a submission can send anything."""
    try:
        answer = msgspec.msgpack.decode(data, type=Answer)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if answer.status not in ("returned", "raised", "waited", "not attempted"):
        raise ValueError(answer.status)
    entries = [LedgerEntry(e.operation[:40], e.payload, e.ranks, TYPES.get(e.dtype or ""), e.peer, tuple(e.group))
               for e in answer.entries]  # fmt: skip
    value, text, printed = of_data(answer.value), answer.text[:2000], answer.printed[:5000]
    return CallOutcome(answer.status, value, entries, answer.changed, text, printed)


def of_data(value):
    if value is None or type(value) in (int, float, bool, str):
        return value
    ((kind, content),) = value.items()
    if kind == "list":
        return [of_data(item) for item in content]
    if kind == "description":
        return Description(str(content)[:2000])
    dtype, shape, data = content
    if kind != "tensor" or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(kind)
    if not data:
        return torch.empty(shape, dtype=TYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=TYPES[dtype]).reshape(shape)


# --- a pipe ---------------------------------------------------------------------------------------------------


def read_message(pipe: int) -> bytes | None:
    """A message: its length in 8 bytes, and so many bytes. None where the other side has gone."""
    length = _read(pipe, 8)
    return None if length is None else _read(pipe, int.from_bytes(length, "little"))


def _read(pipe: int, number: int) -> bytes | None:
    pieces = []
    while number:
        piece = os.read(pipe, min(number, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        number -= len(piece)
    return b"".join(pieces)


def message(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _tell(pipe: int, data: bytes) -> None:
    left = memoryview(message(data))
    while left:
        left = left[os.write(pipe, left) :]


# --- a rank ---------------------------------------------------------------------------------------------------


def rank_of(file: Path, rank: int, size: int, folder: str, ask: int, tell: int) -> None:
    """What the process of a rank does: load the submission, then answer one request after the other."""
    os.environ.update(rank_variables(rank, size, 0))
    torch.set_num_threads(1)
    with process_group("cpu", "gloo", 30, store=dist.FileStore(f"{folder}/store", size)):
        me = CheckedRank(file)
        _tell(tell, writable(me.load() or "").encode())
        while request := read_message(ask):
            name, *about = cloudpickle.loads(request)
            if name == "meet":
                me.meet(*about)
                _tell(tell, b"")
            else:
                _tell(tell, packed(me.call(*about)))
        os._exit(0)


def start(file: Path, size: int, pipes: list[int], keep: set[int]) -> list[int]:
    """Start the ranks and return their process ids. `pipes` are two for each; `keep` are for nobody but the starter."""
    folder, pids = tempfile.mkdtemp(prefix="ranks-"), []
    if any(DYNAMO.search(path.read_bytes()) for path in file.parent.rglob("*.py") if path.is_file()):
        with setenv():
            from torch import _dynamo  # noqa: F401  once here, not in each rank
    for rank in range(size):
        with ready_to_fork():
            pid = os.fork()
        if pid == 0:
            try:
                own = pipes[2 * rank : 2 * rank + 2]
                for descriptor in {*pipes, *keep} - {*own}:
                    os.close(descriptor)
                nothing = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(nothing, descriptor)
                if hasattr(os, "setpgid"):
                    os.setpgid(0, 0)
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the starter
                    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: the starter counts its sockets
                rank_of(file, rank, size, folder, *own)
            finally:
                os._exit(70)
        pids.append(pid)
    return pids


def end(pids: list[int], walled: bool) -> list[int]:
    """End the ranks, and in a sandbox all that they have started; how each rank had ended before (-9: not yet)."""
    codes = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    if walled and os.getppid() == 1:  # process numbers of its own, in which there is nobody else
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    for pid in pids:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


def limit() -> None:
    """What the system holds by itself, for each process, where there is no cgroup for all of them together."""
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        wanted = {"FSIZE": MOST_FILES, "CORE": 0, "NPROC": MOST_TASKS, "AS": 4 * MOST_MEMORY}
        for name, most in wanted.items():
            with contextlib.suppress(ValueError, OSError, AttributeError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def main(number: int, walled: bool) -> None:
    """Answer the one who judges, by a socket: ["start", file, size] with the ranks' pipes, ["count"] or ["end"]."""
    control, pids = socket.socket(fileno=number), []
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: ranks cannot look into this process, nor change it
    limit()
    control.send(b"[]")
    while True:
        data, pipes, _, _ = socket.recv_fds(control, 65536, 16)
        if not data:
            return
        what, *about = msgspec.json.decode(data)
        said: object = None
        if what == "start":
            pids = start(Path(about[0]), about[1], pipes, {number})
            for pipe in pipes:
                os.close(pipe)
        elif what == "count":
            try:
                said = [[*pair, count] for pair, count in sockets.between(pids).items()]
            except OSError:
                said = None  # a system that does not tell
        elif what == "end":
            said, pids = end(pids, walled), []
        control.send(msgspec.json.encode(said))


if __name__ == "__main__":
    engine.PATIENCE, engine.CALL_LIMIT = map(float, sys.argv[3:])
    main(int(sys.argv[1]), sys.argv[2] == "walled")
