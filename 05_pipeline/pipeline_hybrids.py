"""Pipelines side by side: each replica of the model is a pipeline, and reads its own slice of every batch.

Ranks form a grid (common/mesh.py). Activations travel along "pipeline"; along the other axis, "data" or "shard", are
the ranks with the same stages, and there gradients are reduced, once in a step, after the last micro-batch. By hand,
by_hand.py does it in its own step.

    torchrun --nproc_per_node=4 distributed_training.py --distributed --strategy pipeline+ddp --mesh data=2,pipeline=2
"""

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common.collectives import global_norm
from common.errors import UserError
from common.mesh import axis
from common.reshard import reshard
from common.state import local_of
from course.pipeline.distributed_training import PipelineParallel

IN_A_V = "zbv", "dualpipev"  # schedules that put the first and the last stage on one rank


class ReducedOnce(pp.PipelineStage):
    """A stage that goes through several passes in a step, whose gradients are reduced in the last one only.

    PyTorch's schedules keep DDP and fully_shard from reducing until the last micro-batch of a pass; they cannot know
    that there will be another.
    """

    last_pass = True

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and self.last_pass)

    def perform_reduce_grad(self, grad_scale_factor):
        if self.last_pass:
            super().perform_reduce_grad(grad_scale_factor)


class PipelineDDP(PipelineParallel):
    """Stages in DistributedDataParallel, which averages gradients over the replicas in a stage's last backward."""

    preset = {"data": 2, "pipeline": -1}
    stage_class = ReducedOnce

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_for_ddp(config.options.schedule, axes.get("pipeline", 1), config.options.microbatches)

    def wrap_stages(self, modules):
        require_for_ddp(self.options.schedule, self.pipeline.size, self.microbatches)
        self.replicas = axis(self.mesh, "data")
        return {
            n: DistributedDataParallel(stage, process_group=self.replicas.group, gradient_as_bucket_view=True)
            if trained(stage)
            else stage
            for n, stage in modules.items()
        }

    def step(self, micro_batches):
        self.optimizer.zero_grad(set_to_none=False)  # micro-batches add up in DDP's buckets, in place
        loss = torch.zeros((), device=self.device)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            for stage in self.own:
                stage.last_pass = number == len(micro_batches)
            loss += self.run(inputs, targets, len(micro_batches))
        self.stages.add_tied_gradients()
        dist.all_reduce(loss, group=self.replicas.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.from_last_stage(loss) / self.replicas.size, grad_norm

    def before_loading(self, first_batch):
        self.step(first_batch())  # after its first step DDP arranges its buckets anew, and then adds in another order


class PipelineFSDP(PipelineParallel):
    """Stages whose parameters, gradients and optimizer state are sharded over the replicas by fully_shard."""

    preset = {"shard": 2, "pipeline": -1}
    stage_class = ReducedOnce

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_for_fsdp(config.options.schedule)

    def wrap_stages(self, modules):
        require_for_fsdp(self.options.schedule)
        self.replicas = axis(self.mesh, "shard")
        for stage in modules.values():
            shard_stage(stage, stage.layers, mesh=self.mesh["shard"])
        return modules

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            for stage in self.own:
                stage.last_pass = number == len(micro_batches)
            loss += self.run(inputs, targets, len(micro_batches))
        self.stages.add_tied_gradients()
        dist.all_reduce(loss, group=self.replicas.group)
        self.scaler.unscale_(self.optimizer)
        # Every rank has another shard of its stages: squares are summed along both axes.
        shards = [local_of(gradient) for gradient in self.stages.gradients_for_norm()]
        grad_norm = global_norm([(shards, [self.replicas.group, self.pipeline.group])], self.device)
        scale = (self.max_norm / (grad_norm + 1e-6)).clamp(max=1)
        for gradient in self.stages.gradients():
            local_of(gradient).mul_(scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.from_last_stage(loss) / self.replicas.size, grad_norm

    def evaluate(self, inputs, targets):
        loss = super().evaluate(inputs, targets)
        for stage in self.modules.values():
            reshard(stage)
        return loss


def shard_stage(stage, layers, **how) -> None:
    """fully_shard each of a stage's layers, then the stage, which takes what is left: layers that share a weight.

    Parameters are gathered layer by layer, each while the one before computes, and once in a step, since they stay
    until its last backward pass; freed after each forward pass they would be gathered for each micro-batch. With four
    stages or more on a rank, PyTorch's schedules keep three of them whole and gather the others again.
    """
    owned = [set(layer.parameters()) for layer in layers]
    for layer, own in zip(layers, owned, strict=True):
        if own and all(own.isdisjoint(other) for other in owned if other is not own):
            fully_shard(layer, reshard_after_forward=False, **how)
    fully_shard(stage, reshard_after_forward=False, **how)


def trained(module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def require_for_ddp(name: str, ranks: int, microbatches: int) -> None:
    """Raise UserError for schedules with which stages in DDP do not train right, on so many ranks of a pipeline."""
    # In torch 2.13 the reducer of DistributedDataParallel fails an assertion in the second step where all forwards come
    # before the first backward, and it never sees weight gradients that are computed apart from those of inputs. (Under
    # interleaved 1F1B it trains right if each stage has a forward left after its first backward; that isn't offered.)
    if name != "1f1b":
        sharded = "" if name in IN_A_V else " or --strategy pipeline+fsdp,"
        raise UserError(
            f"--schedule {name}: this strategy takes PyTorch's DistributedDataParallel with schedule 1f1b alone; take "
            f"that,{sharded} or add --by-hand"
        )
    if 1 < microbatches <= ranks:
        raise UserError(
            f"--microbatches {microbatches}: PyTorch's DistributedDataParallel works in a pipeline of {ranks} ranks "
            f"with more micro-batches than that; make it {2 * ranks}, or add --by-hand"
        )


def require_for_fsdp(name: str) -> None:
    """Raise UserError for schedules with which sharded stages do not train right."""
    if name in IN_A_V:
        raise UserError(
            f"--schedule {name} puts the first and the last stage on one rank, and fully_shard would make two weights "
            f"of the one that they share; take another schedule, or --strategy pipeline+ddp --by-hand"
        )
