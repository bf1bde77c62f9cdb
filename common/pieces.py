"""The tensors of a checkpoint, as torch.distributed.checkpoint (DCP) plans to write and to read them.

DCP knows boxes: rows 2 to 4 of a matrix, say, at an offset in the whole tensor. A part of a strategy's state
(common/state.py) is an interval of a box's flattened elements, which is up to 2n - 1 boxes of n dimensions: the end of
one row, whole rows, the beginning of another. These are its pieces. Whoever loads asks for pieces of its own, and DCP
reads of each file what lies in them. So a checkpoint can be loaded on any number of ranks, by any strategy.
"""

import contextlib
import dataclasses
import gc
import math
import zlib
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from common.errors import UserError
from common.state import OptimizerState, Part, Where, optimizer_tensors, whole

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of one of the checkpoint's tensors, and this rank's memory for it.

    name:   of the tensor in the checkpoint, such as "model.head.out.weight"
    shape:  of the whole tensor
    offset: of the box in the whole tensor
    tensor: the elements, in the shape of the box; loading writes there
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)

    @property
    def key(self) -> str:
        return key_of(MetadataIndex(self.name, self.offset))


def key_of(index: MetadataIndex) -> str:
    """A rank has one piece of a tensor at an offset."""
    return f"{index.fqn} {tuple(index.offset or ())}"


def boxes(size: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements from `start` to `stop` of a flattened box of `size`, in their order, as boxes inside of it."""
    if start >= stop:
        return
    if (start, stop) == (0, math.prod(size)):
        yield (0,) * len(size), size
        return
    row = math.prod(size[1:])
    first, last = -(-start // row), stop // row  # of the rows that are whole
    if first > last:  # a part of one row
        yield from inside(last, boxes(size[1:], start - last * row, stop - last * row))
        return
    if start < first * row:  # the end of the row before
        yield from inside(first - 1, boxes(size[1:], start - (first - 1) * row, row))
    if first < last:
        yield (first, *(0 for _ in size[1:])), (last - first, *size[1:])
    yield from inside(last, boxes(size[1:], 0, stop - last * row))


def inside(row: int, found: Iterator[Box]) -> Iterator[Box]:
    for offset, size in found:
        yield (row, *offset), (1, *size)


def pieces_of(name: str, tensor: torch.Tensor, where: Where) -> list[Piece]:
    """`tensor` has the elements `where` of the checkpoint's tensor `name`."""
    if tensor.shape == where.size:
        return [Piece(name, where.shape, where.offset, tensor)] if tensor.numel() else []
    elements, found, begin = tensor.view(-1), [], 0
    for offset, size in boxes(where.size, where.start, where.stop):
        end = begin + math.prod(size)
        place = tuple(a + b for a, b in zip(where.offset, offset, strict=True))
        found.append(Piece(name, where.shape, place, elements[begin:end].view(size)))
        begin = end
    return found


def pieces_to_save(parts: list[Part], optimizer_state: OptimizerState) -> list[Piece]:
    """This rank's pieces of model and optimizer: "model.NAME", and "optimizer.NAME.KEY" for what the optimizer keeps
    of each element under KEY, or once for the whole tensor (then it is a scalar)."""
    found: dict[
        str, Piece
    ] = {}  # parts that name the same elements, such as two copies of a tied weight, are written once
    for part in parts:
        pieces = pieces_of(f"model.{part.name}", part.tensor.detach(), part.where)
        for key, value in optimizer_tensors(part, optimizer_state).items():
            where = part.where if value.dim() else whole(value)
            pieces += pieces_of(f"optimizer.{part.name}.{key}", value.detach(), where)
        found |= {piece.key: piece for piece in pieces}
    return list(found.values())


def pieces_to_load(parts: list[Part], optimizer_state: OptimizerState, metadata: Metadata) -> list[Piece]:
    """The same, with memory for all that the checkpoint has of the optimizer."""
    kept: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if name.startswith("optimizer.") and isinstance(saved, TensorStorageMetadata):
            of, _, key = name.removeprefix("optimizer.").rpartition(".")
            kept.setdefault(of, {})[key] = saved
    for part in parts:
        if part.owner is None:
            continue
        for key, described in kept.get(part.name, {}).items():
            dtype = described.properties.dtype
            if len(described.size) == 0:
                optimizer_state[part.owner][key] = torch.zeros((), dtype=dtype)
            elif key not in optimizer_state[part.owner]:
                optimizer_state[part.owner][key] = torch.zeros_like(part.owner.detach(), dtype=dtype)
    # Several parts of a flat vector have one scalar, and a tied weight may be here twice: each is read.
    found = []
    for part in parts:
        found += pieces_of(f"model.{part.name}", part.tensor.detach(), part.where)
        for key, value in optimizer_tensors(part, optimizer_state).items():
            where = part.where if value.dim() else whole(value)
            found += pieces_of(f"optimizer.{part.name}.{key}", value.detach(), where)
    return found


def digest(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def without_collector():
    """The plans of thousands of ranks are millions of small objects, none of them garbage. Python's collector would go
    through all that there are again and again, so that planning took longer than in proportion to the ranks."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class SavePieces(DefaultSavePlanner):
    """Plans to write pieces: those that several ranks have once, by the rank that has least to write.

    Raises UserError on rank 0, which DCP brings to all ranks, where two ranks have different numbers for the same
    piece.
    """

    def __init__(self, pieces: list[Piece], size: int):
        """`size` is the number of ranks that save."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.size = pieces, size

    def create_local_plan(self) -> SavePlan:
        items, digests = [], {}
        for piece in self.pieces:
            index, tensor = MetadataIndex(piece.name, piece.offset), self.state_dict[piece.key]
            data = TensorWriteData(piece.chunk, TensorProperties.create_from_tensor(tensor), torch.Size(piece.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            if self.size > 1:
                digests[piece.key] = tuple(tensor.shape), digest(tensor)
        self.plan = SavePlan(items, planner_data=digests)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with without_collector():
            return self._global_plan(all_plans)

    def _global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: dict[str, tuple[int, tuple]] = {}
        for rank, plan in enumerate(all_plans):
            for key, (shape, number) in plan.planner_data.items():
                first, expected = seen.setdefault(key, (rank, (shape, number)))
                if shape == expected[0] and number != expected[1]:
                    raise UserError(
                        f"ranks {first} and {rank} have different numbers for {key.split()[0]} (shape {shape}, at "
                        f"{key.partition(' ')[2]}), of which they should have equal copies; no checkpoint was written"
                    )
        return super().create_global_plan([dataclasses.replace(plan, planner_data=None) for plan in all_plans])

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[key_of(index)]


class LoadPieces(DefaultLoadPlanner):
    """Plans to read pieces. Raises UserError for those that the checkpoint does not have."""

    def __init__(self, pieces: list[Piece], origin: str):
        """`origin` is what errors call the checkpoint."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces, self.origin = pieces, origin

    def set_up_planner(self, _state_dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None  # DCP has read it: planners of loading get it
        self.saved, self.is_coordinator = metadata.state_dict_metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items = []
        for number, piece in enumerate(self.pieces):
            saved = self.saved.get(piece.name)
            if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != piece.shape:
                has = f"one of shape {list(saved.size)}" if isinstance(saved, TensorStorageMetadata) else "none"
                raise UserError(
                    f"{self.origin} is not of this model: {piece.name} of shape {list(piece.shape)} is wanted, and it "
                    f"has {has}"
                )
            for item in create_read_items_for_chunk_list(piece.name, saved, [piece.chunk]):
                index = MetadataIndex(piece.name, piece.offset, number)  # several pieces may be equal
                items.append(dataclasses.replace(item, dest_index=index))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None  # create_local_plan has numbered them
        return self.pieces[index.index].tensor
