"""Many ranks in this process: one program is run once, and each of its tensors has a value for every rank.

`launch(fn, 64, how="local")` comes here. It is PyTorch's LocalTensorMode (torch.distributed._local_tensor, private, and
meant for debugging): an operation is done to each rank's tensor in turn, and a collective is what it does, in this
process. So a thousand ranks need no thousand processes. Three things are added to it:

* `dist.get_rank()` is a number with a value for each rank, as a DeviceMesh's coordinates are. It can be added and
  multiplied and can say where to cut a tensor. Python can't branch on it, since all ranks take one way through the
  program: that is refused. (PyTorch's own number answers `rank == 0` with False for all of them.)
* Sums are added up in the order in which gloo's ring does, so that they are those of real ranks, bit for bit.
* Sends and receives, each of which is done for all ranks at once.

A process group stands for those of all ranks: the two of `mesh["tensor"]` on four ranks are 0, 1 and 2, 3. Results are
those of the ranks; what the program prints, it prints once.
"""

import contextlib
import operator
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local
from torch.distributed import distributed_c10d as c10d
from torch.distributed._local_tensor import _c10d as operations
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from common.errors import UserError
from common.lab.layouts import forget_layouts
from common.lab.ring_order import reduced

INSTEAD = "run it on processes, with how='processes'"


def run(fn: Callable, nproc: int, args: tuple) -> list:
    """What `fn(*args)` returns on each of `nproc` pretended ranks, in rank order.

    Raises UserError where the function does what needs ranks that go their own ways: branches on the rank, counts or
    indexes a list by it, uses DistributedDataParallel or fully_shard, or receives what nobody has sent.
    """
    forget_layouts()
    dist.init_process_group("fake", rank=0, world_size=nproc, store=FakeStore())
    try:
        with torch.random.fork_rng(devices=[]), _patched(Messages()), _Mode(nproc):
            result = fn(*args)
        flat, spec = pytree.tree_flatten(result)
        return [pytree.tree_unflatten([_on_rank(value, rank) for value in flat], spec) for rank in range(nproc)]
    except (AttributeError, TypeError) as error:  # Python wanted one number: an index, a range, a float
        if "LocalIntNode" not in str(error) and "SymInt" not in str(error):
            raise
        raise UserError(f"how='local': {_WAYS.format('has been made a plain number or an index')}") from None
    except NotImplementedError as error:
        raise UserError(f"how='local': {error}; {INSTEAD}") from None
    finally:
        dist.destroy_process_group()
        forget_layouts()


_WAYS = f"the rank {{}}, but all ranks take one way through the program; {INSTEAD}"


def _on_rank(value: Any, rank: int) -> Any:
    """What a rank has of something that the function returns."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.SymInt):
        return _numbers(value, dist.get_world_size())[rank]
    return value._local_tensors[rank] if isinstance(value, local.LocalTensor) else value


def _numbers(number: "int | torch.SymInt", size: int) -> list[int]:
    """The value of a number on each rank."""
    if isinstance(number, int):
        return [number] * size
    return [local._map_to_rank_local_val(number, rank) for rank in range(size)]


class _Mode(local.LocalTensorMode):
    """LocalTensorMode, which puts each rank's random state in place for operations that draw numbers, and not for all:
    that takes ten times as long as a small operation."""

    draws = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before, _Mode.draws = _Mode.draws, torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            _Mode.draws = before


@contextlib.contextmanager
def _patched(messages: "Messages") -> Iterator[None]:
    """Inside the block, PyTorch is as pretended ranks need it."""
    get, put, each = local._get_rng_state, local._set_rng_state, local._for_each_rank_run_func

    def each_rank(*what, **_):
        """Views of pretended tensors need not share a pretended storage: telling them so takes longer than the view."""
        mode = local.enabled_local_tensor_mode()
        if mode is None or _Mode.draws:
            return each(*what, alias=False)
        states, mode._per_rank_rng_states = mode._per_rank_rng_states, {}
        try:
            return each(*what, alias=False)
        finally:
            mode._per_rank_rng_states = states

    nothing: Any = (torch.empty(0, dtype=torch.uint8), {})
    compare = {name: _same_for_all(getattr(local.LocalIntNode, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
    refused = {DistributedDataParallel: "DistributedDataParallel", FSDPParamGroup: "fully_shard"}
    with contextlib.ExitStack() as stack:
        for name, method in compare.items():
            stack.enter_context(mock.patch.object(local.LocalIntNode, name, method))
        for owner, what in refused.items():
            stack.enter_context(mock.patch.object(owner, "__init__", _refuse(what)))
        for name in ("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"):
            stack.enter_context(mock.patch.object(dist, name, getattr(messages, name)))
        patches: tuple[tuple[Any, str, Any], ...] = (
            (dist, "get_rank", rank_of_all),
            (local._LocalDeviceMesh, "get_coordinate", _coordinates),
            (dist.ProcessGroup, "rank", _own_or_all(dist.ProcessGroup.rank)),
            (operations, "_local_reduce", _reduce),
            (operations, "_local_broadcast_", _root_in_group(operations._local_broadcast_, 2)),
            (operations, "_local_scatter_", _root_in_group(operations._local_scatter_, 3)),
            (local, "_for_each_rank_run_func", each_rank),
            (local, "_get_rng_state", lambda: get() if _Mode.draws else nothing),
            (local, "_set_rng_state", lambda *state: put(*state) if _Mode.draws else None),
            (local, "_is_in_fake_tensor_mode", lambda: not _Mode.draws),  # then it copies no state for each rank
        )
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def rank_of_all(group: dist.ProcessGroup | None = None) -> torch.SymInt:
    """dist.get_rank(group) of all ranks at once."""
    ranks, offsets, _ = operations._prepare_collective_groups(group or c10d._get_default_group())
    places = {offset + rank: place for offset in offsets for place, rank in enumerate(ranks)}
    return torch.SymInt(local.LocalIntNode(dict(sorted(places.items()))))


def _coordinates(mesh: DeviceMesh) -> list[torch.SymInt]:
    """DeviceMesh.get_coordinate of all ranks at once. PyTorch's does an operation to all ranks' tensors for each of the
    ranks, which takes 7 s for 256. And it knows a mesh by its id alone, which another has once that is gone."""
    mode: Any = local.enabled_local_tensor_mode()
    if id(mesh) not in mode._coordinate_cache:
        with no_dispatch():
            ranks = mesh._rank_map
            ranks = ranks._local_tensors[0] if isinstance(ranks, local.LocalTensor) else ranks
            grids = mesh._layout.remap_to_tensor(ranks)  # this mesh, and its like of the ranks that are not in it
            places = dict(zip(grids.flatten().tolist(), product(*map(range, grids.shape)), strict=True))
        along = [{rank: places[rank][1 + dim] for rank in sorted(places)} for dim in range(mesh.ndim)]
        mode._coordinate_cache[id(mesh)] = mesh, [torch.SymInt(local.LocalIntNode(numbers)) for numbers in along]
    return mode._coordinate_cache[id(mesh)][1]


def _root_in_group(collective: Callable, place: int) -> Callable:
    """PyTorch tells a collective the root's place in the group, which LocalTensorMode takes for its global number."""

    def from_root(*arguments):
        ranks, _, first = operations._prepare_collective_groups(arguments[place - 1])
        root = first + ranks[arguments[place]]
        return collective(*arguments[:place], root, *arguments[place + 1 :])

    return from_root


def _own_or_all(own: Callable) -> Callable:
    """ProcessGroup.rank: PyTorch itself makes groups as the one process that there is."""

    def rank(group):
        asks = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        return own(group) if asks == "torch" else rank_of_all(group)

    return rank


def _same_for_all(compare: Callable) -> Callable:
    """A comparison of numbers that has one answer, or is refused."""
    plain = getattr(operator, compare.__name__)

    def answer(self, other):
        found = {plain(value, local._int_on_rank(other, rank)) for rank, value in self._local_ints.items()}
        if len(found) > 1:
            raise UserError(f"how='local': {_WAYS.format('decides what Python does next')}")
        return torch._C._get_constant_bool_symnode(found.pop())

    return answer


def _refuse(what: str) -> Callable:
    def refuse(*_, **__):
        raise UserError(
            f"how='local' does not do {what}, whose ranks each have hooks and streams of their own; {INSTEAD}"
        )

    return refuse


def _reduce(operation, tensors: list[torch.Tensor]) -> torch.Tensor:
    known: dict[Any, Callable] = {
        **dict.fromkeys((dist.ReduceOp.SUM, dist.ReduceOp.AVG, "sum", "avg"), operator.add),
        **dict.fromkeys((dist.ReduceOp.PRODUCT, "product"), operator.mul),
        **dict.fromkeys((dist.ReduceOp.MIN, "min"), torch.minimum),
        **dict.fromkeys((dist.ReduceOp.MAX, "max"), torch.maximum),
    }
    do = next((function for name, function in known.items() if operation == name), None)
    if do is None:
        raise UserError(f"how='local' knows sum, average, product, minimum and maximum, not {operation}; {INSTEAD}")
    with no_dispatch():
        result = reduced(do, tensors)
        return result / len(tensors) if operation == dist.ReduceOp.AVG or operation == "avg" else result


class Message(NamedTuple):
    """A send or a receive of all ranks: dist.P2POp."""

    op: Callable
    tensor: torch.Tensor
    peer: "int | torch.SymInt | None" = None
    group: dist.ProcessGroup | None = None
    tag: int = 0
    group_peer: "int | torch.SymInt | None" = None


class Work:
    """What a send or receive of all ranks returns: `wait` does what is left to do."""

    def __init__(self, finish: Callable = lambda: None):
        self.finish = finish

    def wait(self, timeout=None) -> bool:  # noqa: ARG002  the signature of dist.Work
        finish, self.finish = self.finish, lambda: None
        finish()
        return True


class Messages:
    """Sends and receives of all ranks, with the signatures of torch.distributed. All ranks are at one place in the
    program, so what a receive waits for has been sent, or never will be."""

    P2POp = Message

    def __init__(self):
        self.under_way: dict[tuple, deque] = defaultdict(deque)  # (from, to, tag) -> tensors

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None) -> Work:
        for rank, (peer, value) in enumerate(self._by_rank(tensor, dst, group, group_dst)):
            with no_dispatch():
                self.under_way[rank, peer, tag].append(value.clone())
        return Work()

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None) -> Work:
        pairs = self._by_rank(tensor, src, group, group_src)

        def finish():
            for rank, (peer, value) in enumerate(pairs):
                if not self.under_way[peer, rank, tag]:
                    raise UserError(
                        f"how='local': rank {rank} receives from rank {peer} what that has not sent by then; with "
                        f"pretended ranks the sends come first, by dist.isend or dist.batch_isend_irecv"
                    )
                with no_dispatch():
                    value.copy_(self.under_way[peer, rank, tag].popleft())

        return Work(finish)

    def send(self, *arguments, **named) -> None:
        self.isend(*arguments, **named)

    def recv(self, tensor, src=None, group=None, tag=0, group_src=None) -> "int | torch.SymInt":
        self.irecv(tensor, src, group, tag, group_src).wait()
        return src if group_src is None else group_src

    def batch_isend_irecv(self, messages: list[Message]) -> list[Work]:
        kinds = [message.op.__name__ for message in messages]
        return [
            getattr(self, kind)(m.tensor, m.peer, m.group, m.tag, m.group_peer)
            for kind, m in sorted(zip(kinds, messages, strict=True), key=lambda pair: pair[0] != "isend")
        ]

    def _by_rank(self, tensor, peer, group, group_peer) -> list[tuple[int, torch.Tensor]]:
        """For each rank the other rank, by its global number, and the tensor."""
        size = dist.get_world_size()
        if group_peer is None:
            peers = _numbers(peer, size)
        else:
            ranks, offsets, _ = operations._prepare_collective_groups(group or c10d._get_default_group())
            first = {offset + rank: offset for offset in offsets for rank in ranks}
            peers = [first[rank] + ranks[place] for rank, place in enumerate(_numbers(group_peer, size))]
        return [(peers[rank], tensor._local_tensors[rank]) for rank in range(size)]
