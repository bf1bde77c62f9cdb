"""Parallelisms that nest, with PyTorch's own parts: any mesh of the axes pipeline, data, shard and tensor, in one step.

From the inside out: DTensor cuts the weights along "tensor" (chapter 04), stages take their layers along "pipeline"
(chapter 05), and fully_shard shards what is left along "shard" and replicates it along "data". Start it with --mesh:

    torchrun --nproc_per_node=8 distributed_training.py --distributed --mesh pipeline=2,data=2,tensor=2
"""

import contextlib
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from common.collectives import broadcast_module, global_norm
from common.mesh import AXES, axis, in_order, make_mesh
from common.model import cross_entropy
from common.recompute import recompute_blocks
from common.reshard import reshard
from common.state import local_of
from common.strategy import Strategy, mean_loss, require_gradients
from course.fsdp import fsdp_setup
from course.model_parallel.division import require_tensor
from course.pipeline import options as pipeline_options
from course.pipeline import simulator, split
from course.pipeline.pipeline_hybrids import ReducedOnce, require_for_fsdp, shard_stage
from course.pipeline.torch_schedules import InContext, make_schedule


class PlainEnds(nn.Module):
    """A stage whose layers hand on DTensors, and which itself takes and gives plain tensors, as messages are.

    mesh: of tensor parallelism, along which every rank has all of the activations between two layers
    """

    def __init__(self, layers, mesh, first, last):
        super().__init__()
        self.layers, self.mesh, self.first, self.last = layers, mesh, first, last

    def forward(self, x):
        y = self.layers(x if self.first else DTensor.from_local(x, self.mesh, [Replicate()]))
        # A copy, since fully_shard does not see the backward pass of a view that somebody changes in place.
        return y if self.last else y.redistribute(placements=[Replicate()]).to_local().clone()


class MeshParallel(Strategy):
    """A GPT on a mesh of up to four axes; those that the mesh does not have are of size 1."""

    preset = {"data": -1}
    from_meta = True
    tasks = ("text",)
    axes = ("pipeline", "data", "shard", "tensor")
    Options = pipeline_options.PipelineOptions

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_tensor(config, axes.get("tensor", 1))
        if "pipeline" in axes:
            pipeline_options.require(config, axes)
            pipeline_options.require_in_torch(config.options, axes["pipeline"])
            require_for_fsdp(config.options.schedule)

    def __init__(self, model, make_optimizer, setup):
        # fully_shard takes two axes, over which it replicates and shards: either may be of size 1.
        sizes = dict(zip(setup.mesh.mesh_dim_names, setup.mesh.shape, strict=True))
        missing = {name: 1 for name in ("data", "shard") if name not in sizes}
        order = tuple(dict.fromkeys((*sizes, *AXES))) if not missing else AXES
        if missing:
            setup = replace(setup, mesh=make_mesh(in_order(sizes | missing, order), setup.mesh.device_type))
        super().__init__(setup)
        self.everyone, self.readers = axis(self.mesh, *AXES).group, axis(self.mesh, "data", "shard")
        self.tensor, self.shard, self.pipeline = (axis(self.mesh, name) for name in ("tensor", "shard", "pipeline"))
        self.scaler = self.make_scaler(self.everyone)
        stages = self.plan_stages(model) if self.pipeline.size > 1 else None
        how = {"mesh": self.mesh["data", "shard"], **fsdp_setup.policies(self.precision, offload=False)}
        self.stages = None
        if self.pipeline.size > 1:
            self.model = self.cut_into_stages(model, how, *stages)
        else:
            recompute_blocks(model, self.options.recompute)
            self.model = model
            for unit, reshard in fsdp_setup.units_of(model).items():
                broadcast_module(unit, self.everyone, torch.device("cpu"))  # rank 0's weights
                if self.tensor.size > 1:
                    fsdp_setup.cut_unit(model, unit, self.mesh["tensor"])
                fully_shard(unit, reshard_after_forward=reshard, **how)
        self.optimizer = make_optimizer(self.model.parameters())

    def plan_stages(self, model):
        """The schedule, and the names of each stage's layers, as in by_hand_mesh.py."""
        schedule = self.options.build(self.pipeline.size)
        count = len(simulator.placement(schedule))
        names = split.stages_of(model, count, self.options.split_spec, self.everyone, self.device, self.autocast)
        return schedule, names

    def cut_into_stages(self, model, how, schedule, names):
        options = self.options
        self.stages = split.own_stages(model, schedule, self.pipeline, names, everyone=self.everyone)
        if self.tensor.size > 1:
            fsdp_setup.cut_unit(model, model, self.mesh["tensor"])
        count, group = len(self.stages.rank_of), self.pipeline.group
        self.own = []
        for number, layers in self.stages.modules.items():
            inner = layers
            if self.tensor.size > 1:
                inner = PlainEnds(layers, self.mesh["tensor"], number == 0, number == count - 1)
            stage = InContext(inner, self.autocast, options.recompute == "full")
            shard_stage(stage, layers, **how)
            self.own.append(ReducedOnce(stage, number, count, self.device, group=group))
        self.schedule = make_schedule(options, self.own, self.scaled_loss)
        return self.stages.model

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            with tp.loss_parallel() if self.tensor.size > 1 else contextlib.nullcontext():
                loss += self.forward_backward(inputs, targets, len(micro_batches), number == len(micro_batches))
        if self.stages:
            self.stages.add_tied_gradients()
            dist.broadcast(loss, group=self.pipeline.group, group_src=self.stages.rank_of[-1])
        else:
            require_gradients(self.model)
        dist.all_reduce(loss, group=self.readers.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = global_norm(self.gradients_by_groups(), self.device)
        scale = (self.max_norm / (grad_norm + 1e-6)).clamp(max=1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                local_of(parameter.grad).mul_(scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.readers.size, grad_norm

    def forward_backward(self, inputs, targets, equal_parts, last):
        """Add the gradients of one of so many equal parts of this rank's slice; the loss, 0 where the last stage is
        not. Of several passes through the pipeline the last one reduces the gradients."""
        if self.stages is None:
            with self.autocast():
                part = cross_entropy(self.model(inputs), targets) / equal_parts
            self.scaler.scale(part).backward()
            part = part.detach()
            return part.full_tensor() if isinstance(part, DTensor) else part
        pipeline_options.require_divisible(inputs, self.options.microbatches)
        self.divisor, losses = self.options.microbatches * equal_parts, []
        for stage in self.own:
            stage.last_pass = last
        given = [inputs] if self.stages.first else []  # other stages get theirs from the rank before
        self.schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        total = sum(loss.detach() for loss in losses) / self.scaler.get_scale()
        return total.full_tensor() if isinstance(total, DTensor) else total

    def evaluate(self, inputs, targets):
        if self.stages is None:
            loss = super().evaluate(inputs, targets)
            reshard(self.model)
            return loss
        modules = {stage.stage_index: stage.submod for stage in self.own}
        loss = self.stages.evaluate(modules, self.pipeline, inputs, lambda logits: mean_loss(logits, targets))
        for stage in modules.values():
            reshard(stage)
        return loss

    def scaled_loss(self, logits, targets):
        return self.scaler.scale(cross_entropy(logits.float(), targets) / self.divisor)

    def gradients_by_groups(self):
        """The gradients of what this rank has, for `global_norm`: of what is cut along "tensor", and of the rest; each
        with the groups over which its elements are spread."""
        around, cut, rest = [self.shard.group, self.pipeline.group], [], []
        twice = self.stages.tied if self.stages and self.stages.last else None  # counts once, on the first stage
        for parameter in self.model.parameters():
            if parameter.grad is not None and parameter is not twice:
                names, places = parameter.device_mesh.mesh_dim_names, parameter.placements
                along = dict(zip(names, places, strict=True))
                is_cut = "tensor" in along and not along["tensor"].is_replicate()
                (cut if is_cut else rest).append(local_of(parameter.grad))
        return [(cut, [self.tensor.group, *around]), (rest, around)]

    def parts(self):
        return self.stages.parts(super().parts()) if self.stages else super().parts()
