"""Pipelines side by side: each replica of the model is a pipeline, and reads its own slice of every batch.

Ranks form a grid [replica, place in its pipeline]. Activations travel along a row; in a column are the ranks with the
same stages, and there gradients are reduced, once in a step, after the last micro-batch.

    torchrun --nproc_per_node=4 distributed_training.py --distributed --strategy pipeline+ddp --replicas 2
"""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from course.pipeline import by_hand, options
from course.pipeline import distributed_training as torchs


def column(ranks, replicas):
    """The process group of the ranks that have the same stages as this one."""
    grid = torch.arange(ranks.size).view(replicas, -1)
    return dist.new_subgroups_by_enumeration(grid.T.tolist())[0]


class PipelinesByHand(by_hand.Pipeline):
    """Several pipelines whose gradients are summed at the end of a step."""

    def __init__(self, *args, replicas=2, **more):
        super().__init__(*args, replicas=replicas, **more)
        self.column = column(self.ranks, replicas)

    def step(self, micro_batches):
        loss, grad_norm = super().step(micro_batches)
        dist.all_reduce(loss, group=self.column)
        return loss, grad_norm

    def run(self, inputs, targets, batches):
        return super().run(inputs, targets, batches * self.data_size)  # equal parts of the global batch

    def add_tied_gradients(self):
        self.sum_gradients()
        super().add_tied_gradients()

    def sum_gradients(self):
        """Over the replicas, all of this rank's at once."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=self.column)
        torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))


class Pipelines(torchs.PipelineParallel):
    """Several pipelines, whose gradients are averaged by what `spread` makes of the stages."""

    def __init__(self, *args, replicas=2, **more):
        super().__init__(*args, replicas=replicas, **more)

    def step(self, micro_batches):
        loss, grad_norm = super().step(micro_batches)
        dist.all_reduce(loss, group=self.column)
        return loss / self.data_size, grad_norm


class PipelinesDDP(Pipelines):
    """Stages in DistributedDataParallel, which PyTorch's schedules keep from reducing until a stage's last backward."""

    def spread(self, modules):
        self.column = column(self.ranks, self.data_size)
        return {n: DistributedDataParallel(layers, process_group=self.column) for n, layers in modules.items()}

    def make_executor(self, name, modules):
        options.require_in_hybrid("pipeline+ddp", name, self.ranks.size // self.data_size, self.microbatches)
        return super().make_executor(name, modules)


class PipelinesFSDP(Pipelines):
    """Stages whose parameters, gradients and optimizer state are sharded over the replicas by fully_shard."""

    def spread(self, modules):
        self.column = column(self.ranks, self.data_size)
        mesh = DeviceMesh.from_group(self.column, self.ranks.device.type)
        for layers in modules.values():
            fully_shard(layers, mesh=mesh)
        if self.tied is not None:  # a parameter of fully_shard's own now
            self.tied = self.model.embedding.tokens.weight if self.first else self.model.head.out.weight
        return modules

    def make_executor(self, name, modules):
        options.require_in_hybrid("pipeline+fsdp", name, self.ranks.size // self.data_size, self.microbatches)
        return super().make_executor(name, modules)

    def add_tied_gradients(self):
        if self.tied is not None and self.tied.requires_grad:
            dist.all_reduce(self.tied.grad.to_local(), group=self.ends_group)  # the other end has the same shard

    def clip(self):
        """Clip by the norm of the whole model. Every rank has other shards of it, but for a tied weight."""
        shards = {p: p.grad.to_local() for p in self.model.parameters() if p.grad is not None}
        square = get_total_norm([shard for p, shard in shards.items() if not (self.last and p is self.tied)]) ** 2
        dist.all_reduce(square)
        torch._foreach_mul_(list(shards.values()), (self.max_norm / (square.sqrt() + 1e-6)).clamp(max=1))
        return square.sqrt()
