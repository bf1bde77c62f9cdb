"""Two-dimensional meshes: hybrid sharding, and tensor parallelism inside of sharded data parallelism."""

import logging
import re

import torch.distributed.tensor.parallel as tp
from torch.distributed.tensor import distribute_module, init_device_mesh

from common.errors import UserError
from course.fsdp.distributed_training import FullyShard

# It warns that a norm over two dimensions takes two all-reduces, which is meant.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shape_of(mesh: str, size: int) -> tuple[int, int]:
    """The rows and columns of a mesh for `size` ranks that is written like "2x2". Raises UserError."""
    numbers = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", mesh)
    if not numbers:
        raise UserError(f"--mesh {mesh}: expected two numbers like 2x2: rows and ranks in each row")
    rows, columns = map(int, numbers.groups())
    if rows * columns != size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        fit = ", ".join(f"{n}x{size // n}" for n in divisors)
        raise UserError(f"--mesh {mesh} is {rows * columns} ranks, and {size} are started; that could be {fit}")
    return rows, columns


def make_mesh(shape, ranks, names):
    return init_device_mesh(ranks.device.type, shape_of(shape, ranks.size), mesh_dim_names=names)


class HybridShard(FullyShard):
    """Parameters are sharded over the ranks of a row, and rows are replicas whose gradients are averaged: one row is a
    node, within which the links are fast."""

    def __init__(self, model, make_optimizer, ranks, *args, mesh="2x2", **kwargs):
        mesh = make_mesh(mesh, ranks, ("replicate", "shard"))
        super().__init__(model, make_optimizer, ranks, *args, mesh=mesh, **kwargs)


class TensorFullyShard(FullyShard):
    """The ranks of a row divide every large weight between them (chapter 04) and read the same data; over the ranks of
    a column each of these parts is sharded."""

    def __init__(self, model, make_optimizer, ranks, *args, mesh="2x2", **kwargs):
        mesh = make_mesh(mesh, ranks, ("data", "tensor"))
        split(model.to(ranks.device), mesh["tensor"])
        super().__init__(model, make_optimizer, ranks, *args, mesh=mesh["data"], **kwargs)
        self.data_rank, self.data_size = mesh["data"].get_local_rank(), mesh["data"].size()

    def step(self, micro_batches):
        with tp.loss_parallel():
            return super().step(micro_batches)


class SyncOnce(FullyShard):
    """Gradients of several micro-batches are summed where they are, and sent once. Until then they are whole: 4P bytes
    instead of 4P/N."""

    def step(self, micro_batches):
        return super().step(LastOneSyncs(micro_batches, self.model))


class LastOneSyncs:
    """Micro-batches that say, as they are taken, whether their gradients are to be sent."""

    def __init__(self, micro_batches, model):
        self.micro_batches, self.model = micro_batches, model

    def __len__(self):
        return len(self.micro_batches)

    def __iter__(self):
        for number, micro_batch in enumerate(self.micro_batches, start=1):
            self.model.set_requires_gradient_sync(number == len(self))
            yield micro_batch


def split(model, mesh):
    """Tensor parallelism as in chapter 04, over the ranks of a mesh."""
    require_divisible(model, mesh.size())
    start_alike(model)
    tied = model.head.out.weight is model.embedding.tokens.weight
    tp.parallelize_module(model, mesh, PLAN)
    if tied:
        model.head.out.weight = model.embedding.tokens.weight
    for block in model.blocks:
        block.attention.heads //= mesh.size()
    distribute_module(model, mesh)
