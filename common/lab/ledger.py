"""The ledger: which messages did this rank cause, how many, and how many bytes?

Inside `with Ledger() as ledger:` every call into torch.distributed is entered, from Python and from C++ alike
(DistributedDataParallel's reducer included), because all of them pass PyTorch's dispatcher as `c10d` operators.

A collective is one entry. What it costs on the wire depends on the algorithm of the backend; the ledger charges what
the bandwidth-optimal (ring) algorithm sends, the convention of nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A send or receive is one entry too, and exact: so
an algorithm built from sends and receives is counted, not assumed. An all-to-all is charged as if all its parts were
equal; where they are not, a rank's own part, which stays where it is, is larger or smaller than that.

What a backend really sends, `common.lab.wire` counts. gloo sends what the formula says for all-reduce, all-gather,
broadcast, scatter, gather and all-to-all, and more for two (4 ranks, 40 MB, all ranks together):

    reduce-scatter  240 MB, the formula says 120: it is an all-reduce of which each rank keeps its part
    reduce          182 MB, the formula says 120: the ring passes on nearly all of the segments n times instead of n - 1
                    times, for 152 MB, and then each rank sends the root its part of the sum, 30 MB
"""

import sys
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from common.lab.wire_bytes import wire_bytes

# c10d operator -> (name in torch.distributed, index of the argument that holds the full payload). gloo knows them all.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "scatter_": ("scatter", 1),
    "gather_": ("gather", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("monitored_barrier", None),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}


# The same for functional collectives, which DTensor calls: name -> (name in torch.distributed, does its input
# hold only one rank's part of the full payload?)
FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_reduce_coalesced_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_out": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
    "isend": ("send", False),
    "irecv": ("recv", False),
}
BATCH = "batch_p2p_ops"  # functional: several of the last two in one call

# Operators of the two namespaces that send nothing.
SILENT = ("check_for_nan", "wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True)
class LedgerEntry:
    """One call: `payload` in bytes as in `wire_bytes`; `peer` is the other rank of a send or recv, the root of a
    rooted collective, else None; `ranks` is the number of ranks in the group, `group` their global numbers."""

    operation: str
    payload: int
    ranks: int
    dtype: torch.dtype | None = None
    peer: int | None = None
    group: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def sent(self) -> float:
        """Bytes this rank sends: exact for send, by the ring formula for a collective."""
        return wire_bytes(self.operation, self.payload, self.ranks)

    @property
    def received(self) -> float:
        """Bytes this rank receives; a collective's ranks receive as much as they send."""
        if self.operation in ("send", "recv"):
            return float(self.payload) if self.operation == "recv" else 0.0
        return self.sent


class Ledger(TorchDispatchMode):
    """Enters each collective, send and receive of this rank while the block runs, in order."""

    def __init__(self):
        super().__init__()
        self.entries: list[LedgerEntry] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks whether to keep torch.compile out of the method below. For that it would import torch._dynamo
        with the first operation, which takes two seconds; and it compiles nothing within such a block anyway."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_dtensor(types):
            return NotImplemented  # it calls collectives inside, which come by one at a time
        self.entries += describe(func, args)
        return func(*args, **(kwargs or {}))

    @property
    def calls(self) -> dict[str, int]:
        """How often each operation was called."""
        return dict(Counter(entry.operation for entry in self.entries))

    @property
    def sent(self) -> float:
        """Bytes sent by this rank."""
        return sum((entry.sent for entry in self.entries), 0.0)

    @property
    def received(self) -> float:
        """Bytes received by this rank."""
        return sum((entry.received for entry in self.entries), 0.0)

    @property
    def messages(self) -> list[tuple[int, int]]:
        """(peer, bytes) of each send, in order: the message pattern."""
        return [
            (entry.peer, entry.payload)
            for entry in self.entries
            if entry.operation == "send" and entry.peer is not None
        ]


def has_dtensor(types) -> bool:
    """Is DTensor among these types? Asked without importing it, which takes most of a second."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None) in types


def describe(func, args) -> list[LedgerEntry]:
    """Read one operator call as entries: one, but for a batch of messages; none for operators that send nothing."""
    name = func.overloadpacket.__name__
    if func.namespace == "_c10d_functional" and name == BATCH:
        kinds, peers, tensors = args[0], args[1], args[3]
        return [
            _functional_entry({"isend": "send", "irecv": "recv"}[kind], [tensor], group_of(args), peer)
            for kind, peer, tensor in zip(kinds, peers, tensors, strict=True)
        ]
    if func.namespace == "_c10d_functional" and name in FUNCTIONAL:
        operation, is_part = FUNCTIONAL[name]
        group = group_of(args)
        tensors = tensors_of(args[0]) * (group.size() if is_part else 1)
        return [_functional_entry(operation, tensors, group, args[1])]
    if func.namespace != "c10d" or name not in OPERATORS:
        return []
    operation, index = OPERATORS[name]
    group = group_of(args)
    tensors = tensors_of(args[index]) if index is not None else []
    if not tensors and operation in ("scatter", "gather"):
        # Only the root of a scatter or gather holds the full payload: the others have 1/size of it.
        tensors = tensors_of(args[1 if index == 0 else 0]) * group.size()
    peer = None
    if operation in ("send", "recv", "broadcast", "reduce", "scatter", "gather"):
        peer = next((a for a in args if type(a) is int), None)
        peer = dist.get_global_rank(group, peer) if peer is not None and name != "recv_any_source_" else None
    dtype = tensors[0].dtype if tensors else None
    return [LedgerEntry(operation, bytes_of(tensors), group.size(), dtype, peer, ranks_of(group))]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _functional_entry(operation: str, tensors: list[torch.Tensor], group: dist.ProcessGroup, peer) -> LedgerEntry:
    peer = dist.get_global_rank(group, peer) if operation in ("send", "recv", "broadcast") else None
    return LedgerEntry(operation, bytes_of(tensors), group.size(), tensors[0].dtype, peer, ranks_of(group))


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def group_of(args) -> dist.ProcessGroup:
    """The process group among an operator's arguments: an object for c10d, a name for functional collectives."""
    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            return dist.distributed_c10d._resolve_process_group(GroupName(argument))
    raise ValueError("no process group among these arguments")


def tensors_of(argument) -> list[torch.Tensor]:
    """The tensors of an operator's argument: a tensor, a list, or a list of lists."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [tensor for item in argument for tensor in tensors_of(item)]
