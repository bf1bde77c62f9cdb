"""What runs in the sandbox: a process that starts ranks, and the ranks, which alone run lines of a submission.

The starter (`main`) reads no data of the ranks, and holds no inputs. The one who judges hands it a pipe to and a pipe
from each rank, which it passes on to that rank and closes; so each rank is asked and answers by a channel that neither
the other ranks nor the starter hold, and knows its own arguments alone. In a sandbox each rank is alone (alone.py): no
rank sees another, nor a file that another has written. Its messages go through the one who judges (network.py), and
what else it can say is what its function returned and printed, as data.

    python -m common.grading.inside DESCRIPTOR walled|open CALL_LIMIT

is started by sandbox.py, with a socket that is open; the limit is the engine's, in seconds.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import cloudpickle
import msgspec
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.grading import engine
from common.grading.alone import alone, ends_with_its_parent
from common.grading.engine import CallOutcome, CheckedRank
from common.grading.network import TYPES, Relay, as_bytes
from common.grading.values import Description
from common.lab.launch import rank_variables, ready_to_fork, setenv

MOST_FILES = 2**28  # bytes of all files that a submission writes
MOST_TASKS, MOST_MEMORY = 512, 6 * 2**30  # of one submission: threads of all its processes; bytes
OWN = Path(tempfile.gettempdir()).resolve() / "own"  # in a sandbox: the folder that a rank can write into
MOST_VALUES = 2**20  # bytes of the numbers, texts and lists of one answer
# A message between a rank and the one who judges begins with one of these: a call, its answer, or for the network.
CALL, ANSWER, REQUEST = b"C", b"A", b"N"


class Answer(msgspec.Struct, array_like=True):
    """An outcome of a call as it travels. value, encoded by itself: None, a number or a text; a list of values as
    {"list": ...}; a tensor as its type and its shape, with its bytes in `tensors`; what cannot be compared as
    {"description": ...}."""

    status: str
    value: msgspec.Raw
    changed: bool
    text: str
    printed: str
    tensors: Annotated[list[bytes], msgspec.Meta(max_length=10_000)]


def packed(outcome: CallOutcome) -> bytes:
    tensors: list[bytes] = []
    value, text, printed = as_data(outcome.value, tensors), writable(outcome.text), writable(outcome.printed)
    value = msgspec.Raw(msgspec.msgpack.encode(value))
    return msgspec.msgpack.encode(Answer(outcome.status, value, outcome.changed_input, text, printed, tensors))


def writable(text: str) -> str:
    return text.encode(errors="replace").decode()


def as_data(value, tensors: list[bytes]):
    if isinstance(value, list):
        return {"list": [as_data(item, tensors) for item in value]}
    if isinstance(value, Description):
        return {"description": writable(value)}
    if isinstance(value, torch.Tensor):
        tensors.append(as_bytes(value))
        return {"tensor": [str(value.dtype), list(value.shape)]}
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
    if len(answer.value) > MOST_VALUES:  # each byte can be a value, which takes a hundred times as much memory
        raise ValueError("too many values")
    value = of_data(msgspec.msgpack.decode(answer.value), iter(answer.tensors))
    text, printed = answer.text[:2000], answer.printed[:5000]
    return CallOutcome(answer.status, value, [], answer.changed, text, printed)


def of_data(value, tensors: Iterator[bytes]):
    if value is None or type(value) in (int, float, bool, str):
        return value
    ((kind, content),) = value.items()
    if kind == "list":
        return [of_data(item, tensors) for item in content]
    if kind == "description":
        return Description(str(content)[:2000])
    dtype, shape = content
    if kind != "tensor" or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(kind)
    data = next(tensors)  # once each, or one could be many
    if not data and 0 in shape:
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


def _write(pipe: int, data: bytes) -> None:
    left = memoryview(message(data))
    while left:
        left = left[os.write(pipe, left) :]


# --- a rank ---------------------------------------------------------------------------------------------------


def rank_of(file: Path, rank: int, size: int, requests: int, answers: int) -> None:
    """What the process of a rank does: load the submission, then answer one request after the other."""
    os.environ.update(rank_variables(rank, size, 0))
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)  # it sends nothing by itself
    network = Relay(lambda data: _write(answers, REQUEST + data), lambda: (read_message(requests) or os._exit(0))[1:])
    me = CheckedRank(file)
    with network:
        error = writable(me.load() or "").encode()
    _write(answers, ANSWER + error)
    while request := read_message(requests):
        if request[:1] == REQUEST:  # it came too late for a call that was ended
            continue
        name, arguments = cloudpickle.loads(request[1:])
        _write(answers, ANSWER + packed(me.call(name, arguments, network)))
    os._exit(0)


def start(file: Path, size: int, pipes: list[int], keep: set[int], walled: bool) -> list[int]:
    """Start the ranks and return their process ids. `pipes` are two for each; `keep` are for nobody but the starter."""
    pids = []
    with setenv():
        from torch import _dynamo  # noqa: F401  once here: in a rank it would replace functions, which are watched
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
                    ends_with_its_parent()
                if walled:
                    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = str(OWN)
                    alone(str(OWN), MOST_FILES, functools.partial(rank_of, file, rank, size, *own))
                rank_of(file, rank, size, *own)
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
    """Answer the one who judges, by a socket: ["start", file, size] with the ranks' pipes, or ["end"]."""
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
        reply: object = None
        if what == "start":
            pids = start(Path(about[0]), about[1], pipes, {number}, walled)
            for pipe in pipes:
                os.close(pipe)
        elif what == "end":
            reply, pids = end(pids, walled), []
        control.send(msgspec.json.encode(reply))


if __name__ == "__main__":
    engine.CALL_LIMIT = float(sys.argv[3])
    main(int(sys.argv[1]), sys.argv[2] == "walled")
