"""The state of a strategy in pieces: which elements of which tensor of the whole model a rank has.

A strategy says it once, as a list of `Part`s. From them follow the full state on rank 0's CPU (gathered piece by
piece, so that no device ever holds more than its own part), loading it into any other layout, and the proof that
every rank trained what one process would have.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from common.mesh import Axis

Cut: TypeAlias = "Mapping[torch.Tensor, tuple[int, Axis]]"  # parameter -> dimension and axis along which it is cut
OptimizerState = dict[nn.Parameter, dict[str, Any]]  # parameter -> what the optimizer keeps of it, by its own keys


@dataclass(frozen=True)
class Where:
    """Elements of a tensor of `shape`: of the box of `size` at `offset`, flattened, those from `start` to `stop`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    stop: int

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.size, strict=True))

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """These elements of a full tensor: 1-D, a copy or a view."""
        return full[self.box].reshape(-1)[self.start : self.stop]

    def put(self, full: torch.Tensor, values: torch.Tensor) -> None:
        """Write these elements of a full tensor."""
        box = full[self.box].reshape(-1).clone()
        box[self.start : self.stop] = values.reshape(-1)
        full[self.box] = box.view(self.size)


def whole(tensor: torch.Tensor) -> Where:
    """All elements of a tensor."""
    shape = tuple(tensor.shape)
    return Where(shape, (0,) * len(shape), shape, 0, tensor.numel())


def chunk(tensor: torch.Tensor, dim: int, axis: "Axis") -> Where:
    """Where `tensor` is one of `axis.size` equal chunks along `dim`: chunk number `axis.rank`."""
    size = tuple(tensor.shape)
    shape = tuple(length * axis.size if d == dim else length for d, length in enumerate(size))
    offset = tuple(length * axis.rank if d == dim else 0 for d, length in enumerate(size))
    return Where(shape, offset, size, 0, tensor.numel())


def interval(where: Where, start: int, stop: int) -> Where:
    """The elements of `where` from number `start` to `stop`, counted from 0."""
    return Where(where.shape, where.offset, where.size, where.start + start, where.start + stop)


@dataclass(frozen=True)
class Part:
    """A rank's elements of one parameter or buffer.

    name:    in the whole model; a tied weight has its first name
    tensor:  the elements, detached, in memory of what is trained: loading writes there
    where:   which elements of the whole tensor they are
    owner:   the parameter by which the optimizer knows them; None for a buffer or what is frozen
    span:    their place in the owner's optimizer tensors where the owner is a flat vector; None: they are all of it
    aliases: other names of the same tensor in the whole model
    """

    name: str
    tensor: torch.Tensor
    where: Where
    owner: nn.Parameter | None = None
    span: slice | None = None
    aliases: tuple[str, ...] = ()


def parts_of(model: nn.Module, cut: Cut) -> list[Part]:
    """The parts of a model whose parameters are whole, DTensors, or cut."""
    names: dict[torch.Tensor, list[str]] = {}
    kept = model.state_dict(keep_vars=True)  # without buffers that are not to be stored
    for name, tensor in kept.items():
        names.setdefault(tensor, []).append(name)
    found = []
    for tensor, (name, *aliases) in names.items():
        owner = tensor if isinstance(tensor, nn.Parameter) and tensor.requires_grad else None
        local = local_of(tensor.detach())
        if local is not None:
            found.append(Part(name, local, where_of(tensor, cut), owner, None, tuple(aliases)))
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_dtensor(tensor: object) -> "TypeGuard[DTensor]":
    # Asked without importing DTensor, which takes most of a second: where nobody has imported it, nothing is one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def where_of(tensor: torch.Tensor, cut: Cut) -> Where:
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Where(tuple(tensor.shape), tuple(offset), tuple(size), 0, math.prod(size))
    return chunk(tensor, *cut[tensor]) if tensor in cut else whole(tensor)


def optimizer_tensors(part: Part, state: OptimizerState) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for each element of a part, and its scalars: by the optimizer's own keys."""
    found = {}
    for key, value in state.get(part.owner, {}).items() if part.owner is not None else ():
        value = local_of(torch.as_tensor(value))
        found[key] = value if value.dim() == 0 or part.span is None else value[part.span]
    return found


def gather(parts: list[Part], optimizer_state: OptimizerState) -> dict[str, dict]:
    """Put the ranks' parts together on rank 0's CPU: {"model": {name: tensor}, "state": {name: {key: tensor}}}; on the
    other ranks both are empty. Elements that several ranks have come from the lowest of them. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [{"": part.tensor.detach()} | optimizer_tensors(part, optimizer_state) for part in parts]
    mine = [
        (part.name, part.where, part.aliases, [(key, t.dtype, t.dim() == 0) for key, t in there.items()])
        for part, there in zip(parts, tensors, strict=True)
    ]
    everybody: list = [None] * size
    dist.all_gather_object(everybody, mine)  # descriptions only
    full: dict[str, dict] = {"model": {}, "state": {}}
    taken = set()
    for source in range(size):
        for number, (name, where, aliases, keys) in enumerate(everybody[source]):
            if (name, where) in taken:
                continue
            taken.add((name, where))
            for key, dtype, scalar in keys:
                if rank == source:
                    values = tensors[number][key].reshape(-1).cpu().contiguous()
                    if source > 0:
                        dist.send(values, dst=0)
                elif rank == 0:
                    values = torch.empty(1 if scalar else where.stop - where.start, dtype=dtype)
                    dist.recv(values, src=source)
                if rank == 0:
                    target = full["state"].setdefault(name, {}) if key else full["model"]
                    if scalar and key:
                        target[key] = values[0].clone()
                        continue
                    there = target.setdefault(key or name, torch.zeros(where.shape, dtype=dtype))
                    where.put(there, values)
            if rank == 0:
                full["model"] |= {alias: full["model"][name] for alias in aliases}
    return full


def scatter(full: dict | None, parts: list[Part], optimizer_state: OptimizerState) -> None:
    """The reverse: rank 0 sends every rank its parts of a full state (None elsewhere). Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted: list[Any] = [None] * size  # on rank 0: (name, where) of each rank's parts
    dist.gather_object([(part.name, part.where) for part in parts], wanted if rank == 0 else None)
    box: list[Any] = [None]
    if rank == 0:
        assert full is not None
        kept = {
            name: {key: (v.dtype, v if v.dim() == 0 else None) for key, v in values.items()}
            for name, values in full["state"].items()
        }
        box = [(kept, {name: tensor.dtype for name, tensor in full["model"].items()})]
    dist.broadcast_object_list(box, src=0)
    kept, dtypes = box[0]

    def keys_of(name):
        return [("", dtypes[name])] + [(key, t) for key, (t, value) in kept.get(name, {}).items() if value is None]

    def source_of(name, key):
        assert full is not None  # since this is rank 0
        return full["state"][name][key] if key else full["model"][name]

    if rank == 0:
        for other in range(1, size):
            for name, where in wanted[other]:
                for key, _ in keys_of(name):
                    dist.send(where.take(source_of(name, key)).contiguous(), dst=other)
    for part in parts:
        for key, dtype in keys_of(part.name):
            if rank == 0:
                values = part.where.take(source_of(part.name, key))
            else:
                values = torch.empty(part.where.stop - part.where.start, dtype=dtype)
                dist.recv(values, src=0)
            if not key:
                part.tensor.copy_(values.view_as(part.tensor))
            elif part.owner is not None:
                write_optimizer(part.owner.detach(), part.span, optimizer_state[part.owner], key, values)
        if part.owner is not None:
            scalars = {key: value.clone() for key, (_, value) in kept.get(part.name, {}).items() if value is not None}
            optimizer_state[part.owner].update(scalars)


def write_optimizer(owner: torch.Tensor, span: slice | None, state: dict, key: str, values: torch.Tensor) -> None:
    if span is not None:
        if key not in state:
            state[key] = torch.zeros_like(owner, dtype=values.dtype)
        state[key][span] = values.to(owner.device)
        return
    local = values.view(local_of(owner).shape).to(local_of(owner).device).clone()
    if is_dtensor(owner):
        from torch.distributed.tensor import DTensor

        local = DTensor.from_local(local, owner.device_mesh, owner.placements, shape=owner.shape, stride=owner.stride())
    state[key] = local
