"""The network between the ranks of a submission: the process that judges.

Each rank is alone (inside.py). Whatever it sends or waits for, PyTorch's dispatcher shows to a `Relay`, which hands it
to the one who judges and gives back what comes; a `Switch` there brings together what belongs together, adds up what
is to be added up, and keeps the count. So no other way leads from rank to rank, and the messages that count are those
that were carried. As with gloo a send ends when somebody receives it. When all ranks wait, or have returned, they wait
in vain, and are told so: no clock decides that.

A request: [number, operation, group, peer, tag, reduction, type, parts (bytes), bytes that are expected]
An answer: [number, sender (of a receive), parts or what is wrong]
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork
from torch.utils._python_dispatch import TorchDispatchMode

from common.lab.ledger import SILENT, LedgerEntry, group_of, has_dtensor, ranks_of, tensors_of
from common.lab.ring_order import reduced

TYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
REDUCTIONS: dict[str, Callable] = {
    "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
OPERATIONS = ("send", "recv", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "scatter", "gather",
              "all_to_all", "barrier")  # fmt: skip
MOST_EMPTY = 16  # calls of a rank that carry nothing, and are not counted: their number would be a message
MOST_CARRIED = 2**28  # bytes of all messages of one call
ROOTED = ("broadcast", "reduce", "scatter", "gather")


class Request(msgspec.Struct, array_like=True):
    number: int
    operation: str
    group: list[int]
    peer: int | None
    tag: int
    reduction: str
    dtype: str
    parts: list[bytes]
    expected: int


# --- in a rank ------------------------------------------------------------------------------------------------


class Began(PythonCallbackWork):
    """An operation that has begun; `source` is who has sent, of a receive from anybody."""

    source = -1

    def _source_rank(self) -> int:
        return self.source


class Relay(TorchDispatchMode):
    """Inside `with`, this rank's sends, receives and collectives go through `write` (bytes to the one who judges), and
    their results come by `read` (bytes from there). Operations of PyTorch that are none of these pass."""

    def __init__(self, write: Callable[[bytes], None], read: Callable[[], bytes]):
        super().__init__()
        self.write, self.read, self.number, self.received = write, read, 0, dict[int, list]()
        self.began: list[Began] = []  # kept, for PyTorch to find what we have made and not another of its own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the Ledger's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_dtensor(types):
            return NotImplemented
        name = func.overloadpacket.__name__
        with torch.no_grad():
            if func.namespace == "c10d" and hasattr(self, name):
                return getattr(self, name)(group_of(args), *args)
            if func.namespace == "_c10d_functional" and hasattr(self, f"functional_{name}"):
                return getattr(self, f"functional_{name}")(group_of(args), *args)
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            raise RuntimeError(f"{name} is not known to the network of a class")
        return func(*args, **(kwargs or {}))

    def _ask(self, operation: str, group, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, peer=None, tag=0,
             reduction="", dtype=None, expected=0) -> dist.Work:  # fmt: skip
        """Begin an operation: what is sent goes now, what comes is written into `outputs` when somebody waits."""
        number, ranks = self.number, ranks_of(group)
        self.number += 1
        peer = peer if peer is None or peer < 0 else dist.get_global_rank(group, peer)
        kind = str(dtype or (inputs or outputs)[0].dtype) if dtype or inputs or outputs else ""
        parts = [as_bytes(tensor) for tensor in inputs]
        self.write(msgspec.msgpack.encode([number, operation, ranks, peer, tag, reduction, kind, parts, expected]))

        def finish(_timeout: timedelta) -> bool:
            if number not in self.received:
                self.write(msgspec.msgpack.encode(["wait", number]))
            while number not in self.received:  # what comes for another one, an alarm has interrupted
                about, *answer = msgspec.msgpack.decode(self.read())
                self.received[about] = answer
            work.source, result = self.received[number]
            if isinstance(result, str):
                raise RuntimeError(result)
            with torch.no_grad():
                for output, data in zip(outputs, result, strict=False):
                    output.detach().copy_(as_tensor(data, output.dtype).reshape(output.shape))
            outputs.clear()  # a second wait writes nothing
            return True

        work = Began(finish)
        self.began.append(work)
        return work

    def _boxed(self, *about, **more):
        return dist.Work.boxed(self._ask(*about, **more))

    def send(self, group, tensors, _group, to, tag):
        return self._boxed("send", group, tensors, [], peer=to, tag=tag)

    def recv_(self, group, tensors, _group, source, tag):
        return self._boxed("recv", group, [], [*tensors], peer=source, tag=tag, expected=size_of(tensors))

    def recv_any_source_(self, group, tensors, _group, tag):
        return self.recv_(group, tensors, None, -1, tag)

    def allreduce_(self, group, tensors, _group, how, *_):
        return tensors, self._boxed("all_reduce", group, tensors, [*tensors], reduction=name_of(how))

    def allreduce_coalesced_(self, group, tensors, _group, how, *_):
        return self._boxed("all_reduce", group, tensors, [*tensors], reduction=name_of(how))

    def broadcast_(self, group, tensors, _group, root, *_):
        mine = tensors if group.rank() == root else []
        expected = size_of(tensors)
        return tensors, self._boxed("broadcast", group, mine, [*tensors], peer=root, expected=expected)

    def reduce_(self, group, tensors, _group, how, root, *_):
        outputs = [*tensors] if group.rank() == root else []
        return self._boxed("reduce", group, tensors, outputs, peer=root, reduction=name_of(how))

    def allgather_(self, group, outputs, inputs, *_):
        return outputs, self._boxed("all_gather", group, inputs, [*outputs[0]])

    def _allgather_base_(self, group, output, given, *_):
        return output, self._boxed("all_gather", group, [given], [*output.reshape(-1).chunk(group.size())])

    def reduce_scatter_(self, group, outputs, inputs, _group, how, *_):
        return outputs, self._boxed("reduce_scatter", group, inputs[0], [*outputs], reduction=name_of(how))

    def _reduce_scatter_base_(self, group, output, given, _group, how, *_):
        parts = [*given.reshape(-1).chunk(group.size())]
        return output, self._boxed("reduce_scatter", group, parts, [output], reduction=name_of(how))

    def scatter_(self, group, outputs, inputs, _group, root, *_):
        mine = inputs[0] if group.rank() == root else []
        expected = size_of(outputs)
        return outputs, self._boxed("scatter", group, mine, [*outputs], peer=root, expected=expected)

    def gather_(self, group, outputs, inputs, _group, root, *_):
        return self._boxed("gather", group, inputs, [*tensors_of(outputs)], peer=root)

    def alltoall_(self, group, outputs, inputs, *_):
        return outputs, self._boxed("all_to_all", group, inputs, [*outputs])

    def alltoall_base_(self, group, output, given, _group, there, here, *_):
        parts = [given.split(here) if here else given.chunk(group.size())]
        places = output.split(there) if there else output.chunk(group.size())
        return self._boxed("all_to_all", group, [*parts[0]], [*places])

    def barrier(self, group, *_):
        return self._boxed("barrier", group, [], [])

    # Those that DTensor calls give a new tensor, which is there at once.

    def functional_all_reduce(self, group, given, how, *_):
        return self._done(given.clone(), "all_reduce", group, [given], reduction=how)

    def functional_broadcast(self, group, given, root, *_):
        mine = [given] if group.rank() == root else []
        return self._done(given.clone(), "broadcast", group, mine, peer=root, expected=size_of([given]))

    def functional_all_gather_into_tensor(self, group, given, size, *_):
        output = given.new_empty([size * given.shape[0], *given.shape[1:]])
        return self._done(output, "all_gather", group, [given], size)

    def functional_reduce_scatter_tensor(self, group, given, how, size, *_):
        output = given.new_empty([given.shape[0] // size, *given.shape[1:]])
        return self._done(output, "reduce_scatter", group, [*given.chunk(size)], reduction=how)

    def functional_all_to_all_single(self, group, given, there, here, *_):
        output = given.new_empty([sum(there), *given.shape[1:]])
        self._ask("all_to_all", group, [*given.split(here)], [*output.split(there)]).wait()
        return output

    def _done(self, output, operation, group, inputs, pieces=1, **more):
        self._ask(operation, group, inputs, [*output.chunk(pieces)] if pieces > 1 else [output], **more).wait()
        return output


def as_bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def as_tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def name_of(how) -> str:
    """The name of a torchbind ReduceOp."""
    operation = how.op()
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name.lower() for name in names if operation == getattr(dist.ReduceOp, name)), "another")


# --- with the one who judges ----------------------------------------------------------------------------------


class Switch:
    """Brings together what the ranks of one call ask for. `entries` are each rank's calls, as a ledger has them.

    Raises ValueError and others for what is no request: a submission can send anything.
    """

    def __init__(self, size: int):
        self.size = size
        self.entries: list[list[LedgerEntry]] = [[] for _ in range(size)]
        self.waiting: dict[int, int] = {}  # rank -> number of what it waits for
        self.open: dict[tuple[int, int], Request] = {}  # (rank, number) -> what is not answered
        self.answers: dict[tuple[int, int], bytes] = {}  # for those who will wait for them
        self.sends: dict[tuple, deque] = defaultdict(deque)  # (group, receiver, tag) -> (sender, request)
        self.receives: dict[tuple, deque] = defaultdict(deque)  # the same -> (receiver, request)
        self.calls: dict[tuple, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # group -> rank -> how many
        self.meetings: dict[tuple, dict[int, Request]] = defaultdict(dict)  # (group, how many) -> rank -> request
        self.returned: set[int] = set()
        self.carried = 0

    def take(self, rank: int, data: bytes) -> list[tuple[int, bytes]]:
        """A message of a rank, and what is to be sent to whom now."""
        self.carried += len(data)
        if self.carried > MOST_CARRIED:
            raise OverflowError
        request = msgspec.msgpack.decode(data)
        if request[0] == "wait":
            self.waiting[rank] = request[1]
            return self._ready([(rank, request[1])])
        one = msgspec.convert(request, Request)
        group = tuple(one.group)
        if rank not in group or len(set(group)) != len(group) or not all(0 <= r < self.size for r in group):
            raise ValueError(group)
        if one.dtype and one.dtype not in TYPES or one.reduction not in ("", "avg", "another", *REDUCTIONS):
            raise ValueError(one.dtype)  # words of a rank's own would be told to others when calls don't agree
        if one.operation not in OPERATIONS or len(self.entries[rank]) > 10_000 or one.expected < 0:
            raise ValueError(one.operation)
        self.entries[rank].append(entry(one))
        if sum(not e.payload for e in self.entries[rank]) > MOST_EMPTY:
            raise ValueError("too many calls that carry nothing")
        self.open[rank, one.number] = one
        if one.operation in ("send", "recv"):
            return self._message(rank, one, group)
        number = self.calls[group][rank]
        self.calls[group][rank] += 1
        here = self.meetings[group, number]
        here[rank] = one
        if len(here) < len(group):
            return []
        del self.meetings[group, number]
        try:
            found: dict[int, list[bytes] | str] = together(here, group)
        except ValueError as wrong:
            found = dict.fromkeys(group, str(wrong))
        return self._ready([self._answer(r, here[r].number, found[r]) for r in group])

    def _message(self, rank: int, one: Request, group: tuple[int, ...]) -> list[tuple[int, bytes]]:
        receiver = rank if one.peer is None or one.operation == "recv" else one.peer
        if one.peer is None or one.operation == "send" and (one.peer not in group or one.peer == rank):
            return self._ready([self._answer(rank, one.number, f"rank {rank} cannot send to rank {one.peer}")])
        sends, receives = self.sends[group, receiver, one.tag], self.receives[group, receiver, one.tag]
        (sends if one.operation == "send" else receives).append((rank, one))
        answered = []
        for wants in [*receives]:
            match = next((s for s in sends if wants[1].peer in (-1, s[0])), None)
            if match is None:
                continue
            receives.remove(wants)
            sends.remove(match)
            data = b"".join(match[1].parts)
            if len(data) != wants[1].expected:
                wrong = f"a message of {len(data)} bytes for a tensor of {wants[1].expected}"
                answered.append(self._answer(receiver, wants[1].number, wrong))
                answered.append(self._answer(match[0], match[1].number, wrong))
                continue
            answered.append(self._answer(receiver, wants[1].number, [data], match[0]))
            answered.append(self._answer(match[0], match[1].number, []))
        return self._ready(answered)

    def _answer(self, rank: int, number: int, content: list[bytes] | str, sender: int = -1) -> tuple[int, int]:
        self.open.pop((rank, number), None)
        self.answers[rank, number] = msgspec.msgpack.encode([number, sender, content])
        return rank, number

    def _ready(self, answered: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Of these answers the ones that somebody waits for, who then waits no longer."""
        awaited = [(rank, n) for rank, n in answered if self.waiting.get(rank) == n and (rank, n) in self.answers]
        for rank, _ in awaited:
            del self.waiting[rank]
        return [(rank, self.answers.pop((rank, n))) for rank, n in awaited]

    def in_vain(self) -> list[tuple[int, bytes]]:
        """What to say to those who wait, where all do or have returned."""
        if len(self.waiting) + len(self.returned) < self.size:
            return []
        answered = []
        for rank, number in [*self.waiting.items()]:
            one = self.open.get((rank, number))
            what = one.operation if one else "unknown"
            answered.append(self._answer(rank, number, f"Timed out waiting for {what} operation to complete"))
        return self._ready(answered)

    def ends(self, rank: int) -> None:
        """A rank's function has returned: it waits for nothing."""
        self.returned.add(rank)
        self.waiting.pop(rank, None)


def entry(one: Request) -> LedgerEntry:
    """A request as the ledger of a rank enters it."""
    size, given = len(one.group), sum(map(len, one.parts))
    payload = {"recv": one.expected, "all_gather": given * size, "gather": given * size, "broadcast": one.expected,
               "scatter": one.expected * size}.get(one.operation, given)  # fmt: skip
    peer = one.peer if one.operation in ("send", "recv", *ROOTED) and one.peer != -1 else None
    return LedgerEntry(one.operation, payload, size, TYPES.get(one.dtype), peer, tuple(one.group))


def together(here: dict[int, Request], group: tuple[int, ...]) -> dict[int, list[bytes] | str]:
    """What a collective gives each rank. Raises ValueError where the ranks' calls are no collective."""
    first = here[group[0]]
    about = {r: (one.operation, one.peer, one.reduction) for r, one in here.items()}
    other = next((r for r in group if about[r] != about[group[0]]), None)
    if other is not None:
        raise ValueError(f"rank {group[0]} calls {in_words(first)}, rank {other} {in_words(here[other])}")
    parts = {r: here[r].parts for r in group}
    sizes = {r: [*map(len, parts[r])] for r in group}
    operation, root = first.operation, first.peer
    same = len({(tuple(sizes[r]), here[r].dtype) for r in group}) == 1
    if operation == "barrier":
        return {r: [] for r in group}
    if operation in ("broadcast", "scatter") and root in parts:
        wanted = len(group) if operation == "scatter" else len(sizes[root])
        each = [parts[root][i : i + 1] if operation == "scatter" else parts[root] for i in range(len(group))]
        if len(sizes[root]) != wanted or any(
            sum(map(len, e)) != here[r].expected for r, e in zip(group, each, strict=True)
        ):
            raise ValueError(f"{operation} of tensors of other sizes than those to write into")
        return dict(zip(group, each, strict=True))
    if operation == "all_to_all" and all(len(parts[r]) == len(group) for r in group):
        return {r: [parts[source][i] for source in group] for i, r in enumerate(group)}
    if not same:
        raise ValueError(
            f"{operation} of tensors of {' and '.join(str(sum(sizes[r])) for r in group)} bytes on the ranks"
        )
    if operation in ("all_gather", "gather"):
        everything = [part for r in group for part in parts[r]]
        return {r: everything if operation == "all_gather" or r == root else [] for r in group}
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        total = added([b"".join(parts[r]) for r in group], first)
        ends = list(itertools.accumulate(sizes[group[0]]))
        pieces = [total[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if operation == "reduce_scatter" and len(pieces) == len(group):
            return {r: [pieces[i]] for i, r in enumerate(group)}
        if operation != "reduce_scatter":
            return {r: pieces if operation == "all_reduce" or r == root else [] for r in group}
    raise ValueError(f"{operation} with a root, or a number of parts, that cannot be")


def added(parts: list[bytes], one: Request) -> bytes:
    if one.reduction not in REDUCTIONS:
        raise ValueError(f"Cannot use ReduceOp {one.reduction} here, which gloo does not know")
    try:
        return as_bytes(reduced(REDUCTIONS[one.reduction], [as_tensor(part, TYPES[one.dtype]) for part in parts]))
    except (RuntimeError, KeyError) as error:
        raise ValueError(str(error).splitlines()[0][:200]) from None


def in_words(one: Request) -> str:
    root = f" from rank {one.peer}" if one.operation in ROOTED else ""
    return f"{one.operation}{f' ({one.reduction})' if one.reduction else ''}{root}"
