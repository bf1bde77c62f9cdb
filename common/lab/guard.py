"""The guard: do all ranks mean the same collective?

gloo (like NCCL) trusts its callers: ranks that disagree about shape, type, operation or order get wrong numbers
without a word, or wait for each other for ever. Inside `with CheckCollectives():` every rank first writes down
what it is about to call, in the store where the ranks met, and reads what the others wrote. Where they differ,
every rank raises CollectiveMismatch before the collective is started: nobody hangs, no wrong number is made.

Compared for each collective, by its number within its process group: operation, data type, shape, reduce
operation, root, the splits of an all-to-all; for all-reduce, all-gather, reduce-scatter and all-to-all also the
line that calls it, which is what tells two all-reduces of one shape in different order. (The other operations
are often written once for the root and once for the rest.) A send or receive is compared with its partner by
whichever rank comes second, and never waits.

What it cannot see: the same line called for another tensor of the same shape and type, as in a loop over a set
or over a dictionary that the ranks filled in different order; the values of the tensors; a receive from any
source; `monitored_barrier`, which names who is missing by itself. What it forbids though gloo allows it: one
all-reduce written on two lines, one for each kind of rank; a rank that starts an asynchronous collective and
needs to do something else before another rank can join, since the guard makes all ranks meet at its start.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common.lab.ledger import BATCH, OPERATORS, describe, group_of, has_dtensor, tensors_of

ONE_LINE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # the same line calls it on every rank
NOT_THE_CALLER = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__), __file__, "<frozen")


class CollectiveMismatch(RuntimeError):
    """The ranks of a group were about to do different things; the text says which rank, what and where."""


class CheckCollectives(TorchDispatchMode):
    """Compares each collective, send and receive of the block across its ranks before it starts.

    All ranks enter the block, after the process group is initialised. `timeout`, in seconds, is how long a rank
    waits for the others to come to the same collective (default: the process group's own). Each collective costs
    a few messages to the store: a switch for debugging.

    Raises CollectiveMismatch on every rank of the group where they differ, where a rank does not come in time,
    or where it has left the block; on the rank that comes second where a send and its receive differ.
    """

    def __init__(self, timeout: float | None = None):
        super().__init__()
        store = dist.PrefixStore("common.lab.guard", dist.distributed_c10d._get_default_store())
        block = store.add(f"blocks/{dist.get_rank()}", 1)  # a second block must not read the first one's keys
        self.store = dist.PrefixStore(str(block), store)
        self.timeout = timeout or store.timeout.total_seconds()  # type: ignore[attr-defined]  # missing in torch's stub
        self.seen: Counter[str] = Counter()  # collectives per group; messages per group, sender, receiver and tag
        world = dist.group.WORLD
        assert world is not None  # since the process group is initialised
        self.groups = {world.group_name: world}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_dtensor(types):
            return NotImplemented  # it calls collectives inside, which come by one at a time
        for number, entry in enumerate(describe(func, args)):
            group = group_of(args)
            if entry.operation in ("send", "recv"):
                if entry.peer is not None:
                    tensor, tag = _message(func, args, number)
                    self._check_message(entry.operation, entry.peer, tensor, tag, group)
            elif group.size() > 1 and entry.operation != "monitored_barrier":
                self._check_collective(_call(func, args, entry), group)
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind, error, trace):
        how = "it has left the block"
        if error is not None:
            how = f"it ended with {kind.__name__}: {str(error).partition(chr(10))[0]}"
        with contextlib.suppress(dist.DistError):  # the store may be gone, and `error` must not be lost
            for name, group in self.groups.items():
                self._post(name, self.seen[name] + 1, group.rank(), {"text": f"nothing more: {how}"})
        return super().__exit__(kind, error, trace)

    def _post(self, group: str, number: int, rank: int, call: dict) -> None:
        self.store.set(f"{group}/{number}/{rank}", json.dumps(call))

    def _check_collective(self, call: dict, group: dist.ProcessGroup) -> None:
        name, me = group.group_name, group.rank()
        self.groups[name] = group
        self.seen[name] += 1
        number = self.seen[name]
        self._post(name, number, me, call)
        keys = [f"{name}/{number}/{rank}" for rank in range(group.size())]
        pause, deadline = 1e-4, time.monotonic() + self.timeout
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(pause)  # not store.wait(), which would lock out the backend's threads meanwhile
            pause = min(2 * pause, 0.02)
        absent = {"text": f"nothing within {self.timeout:g} s"}
        calls = [json.loads(self.store.get(key)) if self.store.check([key]) else absent for key in keys]
        if not _agree(calls):
            texts = _by_text(dist.get_process_group_ranks(group), calls)
            if absent in calls:  # who comes later must not start it alone
                self._post(name, number, me, {"text": call["text"], "gave up": True})
            elif any("gave up" in other for other in calls):
                texts += " (the others had waited, and given up)"
            raise CollectiveMismatch(f"collective {number} of group {name}: {texts}")
        # All are here, so nobody reads what was written about the collective before.
        self.store.delete_key(f"{name}/{number - 1}/{me}")

    def _check_message(self, operation: str, peer: int, tensor, tag: int, group: dist.ProcessGroup) -> None:
        me = dist.get_rank()
        source, target = (me, peer) if operation == "send" else (peer, me)
        stream = f"{group.group_name}/{source} to {target}/{tag}"
        self.seen[stream] += 1
        what = _what(tensor)
        mine = json.dumps([operation, what, f"rank {me} calls {operation} {what} at {_caller()}"])
        key = f"{stream}/{self.seen[stream]}"
        theirs = self.store.compare_set(key, "", mine).decode()  # writes if there is nothing yet: I am first
        if theirs == mine:
            return
        self.store.delete_key(key)
        _, their_what, their_text = json.loads(theirs)
        if what != their_what:
            number = f"message {self.seen[stream]} from rank {source} to rank {target} of group {group.group_name}"
            raise CollectiveMismatch(f"{number}: {their_text}; {json.loads(mine)[2]}")


def _message(func, args, number: int) -> tuple:
    """The tensor and the tag of a send or receive; of a batch of them, of that number."""
    if func.overloadpacket.__name__ == BATCH:
        return args[3][number], args[2][number]
    return args[0], args[3] if func.namespace == "c10d" else args[2]


def _call(func, args, entry) -> dict:
    """One rank's call of a collective: `text` is for people, `same` has to be equal on all ranks, and what an
    all-to-all `sends` to each rank has to be what that rank `receives`."""
    name, words = func.overloadpacket.__name__, [entry.operation]
    splits: dict[str, list] = {}
    if entry.operation == "all_to_all":
        splits = dict(zip(("receives", "sends"), _splits(name, args, entry.ranks), strict=True))
        words.append(str(entry.dtype).removeprefix("torch."))
    elif entry.operation != "barrier":
        # Of a scatter or gather only the root has the whole: compare the piece that every rank has.
        index = {"scatter_": 0, "gather_": 1}.get(name, OPERATORS.get(name, (None, 0))[1])
        words.append(_what(args[index]))
    if func.namespace != "c10d" and "reduce" in name:
        words.append(args[1].upper())
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ReduceOp" in str(argument._type()):
            words.append(dist.ReduceOp.RedOpType(argument.op()).name)  # type: ignore[attr-defined]  # of this kind
    if entry.peer is not None:
        words.append(f"root {entry.peer}")
    same, caller = " ".join(words), _caller()
    details = "".join(f" {verb} {', '.join(map(str, shapes))}" for verb, shapes in reversed(splits.items()))
    one_line = f"{same} at {caller}" if entry.operation in ONE_LINE else same
    return splits | {"text": f"{same}{details} at {caller}", "same": one_line}


def _splits(name: str, args, size: int) -> list[list[list[int]]]:
    """The shapes that an all-to-all receives from each rank, and those that it sends to each rank."""
    if name == "alltoall_":
        return [[list(tensor.shape) for tensor in side] for side in args[:2]]
    sides = [(args[0], args[3]), (args[1], args[4])] if name == "alltoall_base_" else [(args[0], s) for s in args[1:3]]
    return [
        [[rows, *tensor.shape[1:]] for rows in splits or [tensor.shape[0] // size] * size] for tensor, splits in sides
    ]


def _what(argument) -> str:
    """Data type and shape of the tensors of an argument: "float32 [4]", or "2 x float32 [4]"."""
    tensors = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors_of(argument)]
    if len(tensors) > 1 and len(set(tensors)) == 1:
        return f"{len(tensors)} x {tensors[0]}"
    return ", ".join(tensors)


def _caller() -> str:
    """File and line of the innermost frame that is neither PyTorch's nor the standard library's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    if frame is None:
        return "a thread of PyTorch"
    file = frame.f_code.co_filename
    return f"{'<notebook cell>' if 'ipykernel_' in file else Path(file).name}:{frame.f_lineno}"


def _agree(calls: list[dict]) -> bool:
    if len({call.get("same") for call in calls}) > 1:
        return False
    return "sends" not in calls[0] or all(
        sender["sends"][j] == receiver["receives"][i]
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
    )


def _by_text(ranks: list[int], calls: list[dict]) -> str:
    """ "rank 0 calls ...; ranks 1-3 call ...": each different text once."""
    who: dict[str, list[int]] = {}
    for rank, call in zip(ranks, calls, strict=True):
        who.setdefault(call["text"], []).append(rank)
    return "; ".join(
        f"rank {_ranges(some)} calls {text}" if len(some) == 1 else f"ranks {_ranges(some)} call {text}"
        for text, some in who.items()
    )


def _ranges(ranks: list[int]) -> str:
    """[0, 2, 3, 4] -> "0, 2-4" """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
