"""Parallelisms that nest, by hand: any mesh of the axes pipeline, data, shard, context and tensor, in one step.

Each axis is what its chapter built, along its own group of ranks. A rank's coordinates say all there is to know:

    axis      a rank has                                   its ranks talk about
    tensor    a part of every large weight (04)            activations, in every layer, forward and backward
    context   a part of the tokens of every sequence (04)  keys and values; gradients, once a step
    shard     a part of every unit's elements (06)         parameters and gradients, once a micro-batch
    data      a slice of every batch (03)                  gradients, once a step
    pipeline  some layers (05)                             activations between stages, for every micro-batch

The gradient of an element is summed over the axes along which ranks have seen different examples or tokens (data,
shard, context), and its square counts once for every rank along the axes over which the model is cut (tensor, shard,
pipeline). That is all that the axes have to know of each other. Start it with --mesh and --by-hand:

    torchrun --nproc_per_node=8 distributed_training.py --distributed --by-hand --mesh pipeline=2,data=2,tensor=2
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_together, broadcast_module, global_norm, leave_meta
from common.errors import UserError
from common.mesh import AXES, axis
from common.recompute import recompute_blocks
from common.state import chunk, whole
from common.strategy import DTYPES, Strategy, require_gradients
from course.fsdp.by_hand_zero1 import broadcast_buffers, parts_of
from course.fsdp.by_hand_zero23 import ShardedReducer, UnitHooks, units_of
from course.model_parallel.by_hand_ring_attention import apply_context_parallel, local_tokens, require_chunks
from course.model_parallel.by_hand_tensor import cross_entropy, cut_weight, parallelize_layers
from course.model_parallel.division import require_divisible, require_tensor
from course.pipeline import options as pipeline_options
from course.pipeline import simulator, split
from course.pipeline.executor import Executor


class MeshByHand(Strategy):
    """A GPT on a mesh of up to five axes; those that the mesh does not have are of size 1."""

    preset = {"data": -1}
    from_meta = True
    tasks = ("text",)
    axes = ("pipeline", "data", "shard", "context", "tensor")

    Options = pipeline_options.PipelineOptions

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        if axes.get("shard", 1) > 1 and "pipeline" in axes:
            raise UserError(
                "--mesh: by hand, 'shard' and 'pipeline' do not go together, since a stage's units would be gathered "
                "for every micro-batch; use 'data' in the place of 'shard', or leave --by-hand out"
            )
        require_tensor(config, axes.get("tensor", 1))
        if "context" in axes:
            require_chunks(config.context, axes["context"])
        if "pipeline" in axes:
            pipeline_options.require(config, axes)

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.everyone = axis(self.mesh, *AXES).group
        self.tensor, self.context, self.shard = (axis(self.mesh, name) for name in ("tensor", "context", "shard"))
        self.pipeline, self.replicas = axis(self.mesh, "pipeline"), axis(self.mesh, "data", "context")
        self.readers = axis(self.mesh, "data", "shard", "context")  # each has its own examples or tokens
        self.scaler = self.make_scaler(self.everyone)
        model = leave_meta(model, torch.device("cpu"))
        stages = self.plan_stages(model) if self.pipeline.size > 1 else None
        # From the inside out, all before anything is moved: what is within a layer, then which layers are here.
        names = {parameter: name for name, parameter in model.named_parameters()}
        own = self.own_weights(model, *stages) if stages else names
        require_divisible(model, self.tensor.size)
        if self.shard.size == 1:  # else they come unit by unit
            broadcast_module(model, self.everyone, own=own, cut=self.cut_part)
        if self.tensor.size > 1:
            parallelize_layers(model, self.tensor)
        if self.context.size > 1:
            apply_context_parallel(model, self.context)
        self.stages = self.hooks = None
        if self.pipeline.size > 1:
            self.model = self.cut_into_stages(model, *stages)
        else:
            recompute_blocks(model, self.options.recompute)
            self.model = leave_meta(model, self.device) if self.shard.size > 1 else model.to(self.device)
        optimized = list(self.model.parameters())
        if self.shard.size > 1:
            # Each unit is taken and cut before it goes to the device. Then there is nobody left to take it from.
            start, take = axis(self.mesh).group, partial(self.take_unit, names)
            self.hooks = UnitHooks(units_of(self.model, self.shard, DTYPES[self.precision], self.device, start, take))
            broadcast_buffers(self.model, self.everyone)
            self.flats = [flat for unit in self.hooks.units for flat in unit.flats]
            self.reducer = ShardedReducer(self.model, self.flats, data_size=1)
            optimized = [flat.shard for flat in self.flats if flat.requires_grad]
        self.optimizer = make_optimizer(optimized)
        self.optimized = [parameter for parameter in optimized if parameter.requires_grad]

    def plan_stages(self, model):
        """The schedule, and the names of each stage's layers: alike in all pipelines, and found before layers are cut,
        since rank 0 alone measures them where they are to be balanced by time."""
        schedule = self.options.build(self.pipeline.size)
        count = len(simulator.placement(schedule))
        names = split.stages_of(model, count, self.options.split_spec, self.everyone, self.device, self.autocast)
        return schedule, names

    def take_unit(self, names, parameters):
        """Rank 0's values of the parameters of a unit, of each of which this rank keeps its part along "tensor"."""
        unit = nn.ParameterList(parameters)
        broadcast_module(unit, self.everyone, cut=lambda _, parameter: self.cut_part(names[parameter], parameter))

    def cut_part(self, name, parameter):
        """Keep this rank's part along "tensor"."""
        if self.tensor.size > 1:
            self.cut |= cut_weight(name, parameter, self.tensor)

    def own_weights(self, model, schedule, names):
        """The parameters of this rank's stages."""
        ranks = simulator.placement(schedule)
        own = [name for stage, rank in zip(names, ranks, strict=True) if rank == self.pipeline.rank for name in stage]
        return {parameter for name in own for parameter in model.get_submodule(name).parameters()}

    def cut_into_stages(self, model, schedule, names):
        options = self.options
        self.stages = split.own_stages(model, schedule, self.pipeline, names, self.device)
        self.executor = Executor(
            schedule,
            self.stages.modules,
            self.pipeline.group,
            options.recompute == "full",
            self.autocast,
            self.stages.dtype,
        )
        return self.stages.model

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        # The mean over the global batch has this many equal parts: micro-batches, slices of examples, and of tokens.
        equal_parts = len(micro_batches) * self.readers.size
        for inputs, targets in micro_batches:
            if self.context.size > 1:
                inputs, targets = (local_tokens(tokens, self.context) for tokens in (inputs, targets))
            loss += self.forward_backward(inputs, targets, equal_parts)
        if self.stages is None:
            if self.hooks is None:
                require_gradients(self.model)
            all_reduce_together([parameter.grad for parameter in self.optimized], self.replicas.group)
        else:
            all_reduce_together(self.stages.gradients(), self.replicas.group)
            self.stages.add_tied_gradients()
            dist.broadcast(loss, group=self.pipeline.group, group_src=self.stages.rank_of[-1])
        dist.all_reduce(loss, group=self.readers.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = global_norm(self.gradients_by_groups(), self.device)
        clip_grads_with_norm_(self.optimized, self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for flat in self.flats if self.hooks else ():
            flat.round()  # whoever needs it gathers it
        return loss, grad_norm

    def forward_backward(self, inputs, targets, equal_parts):
        """Add the gradients of one of so many equal parts of the batch; the loss, 0 where the last stage is not."""
        if self.stages is not None:
            count = self.options.microbatches
            pipeline_options.require_divisible(inputs, count)
            inputs, targets = inputs.chunk(count), targets.chunk(count)

            def loss(logits, m):
                return self.scaler.scale(self.loss(logits, targets[m]) / (count * equal_parts))

            shape = (*inputs[0].shape, self.stages.width)
            return self.executor.run(inputs, loss, shape) / self.scaler.get_scale()
        with self.autocast():
            part = self.loss(self.model(inputs), targets) / equal_parts
        self.scaler.scale(part).backward()
        if self.hooks:
            self.hooks.free()
            self.reducer.finish()
        return part.detach()

    def loss(self, logits, targets):
        """The mean over these targets; every rank along "tensor" has some columns of the logits."""
        return cross_entropy(logits, targets, self.tensor.group)

    def evaluate(self, inputs, targets):
        if self.context.size > 1:
            inputs, targets = (local_tokens(tokens, self.context) for tokens in (inputs, targets))
        if self.stages is not None:
            stages = self.executor.stages, self.pipeline
            loss = self.stages.evaluate(*stages, inputs, lambda x: self.loss(x, targets), self.autocast)
        else:
            with torch.no_grad(), self.autocast():
                loss = self.loss(self.model(inputs), targets)
            if self.hooks:
                self.hooks.free()
        dist.all_reduce(loss, group=self.context.group)  # of equally many tokens each
        return loss / self.context.size

    def gradients_by_groups(self):
        """The gradients of what this rank has, for `global_norm`: of what is cut along "tensor", and of the rest; each
        with the groups over which its elements are spread."""
        around = [self.shard.group, self.pipeline.group]
        cut, rest = [], []
        if self.hooks:
            for flat in self.flats:
                for parameter, _, place in flat.pieces() if flat.requires_grad else ():
                    (cut if parameter in self.cut else rest).append(flat.shard.grad[place])
        else:
            twice = self.stages.tied if self.stages and self.stages.last else None  # counts once, on the first stage
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter is not twice:
                    (cut if parameter in self.cut else rest).append(parameter.grad)
        return [(cut, [self.tensor.group, *around]), (rest, around)]

    def parts(self):
        if self.hooks:
            return parts_of(self.model, self.flats, self.where)
        return self.stages.parts(super().parts()) if self.stages else super().parts()

    def where(self, parameter):
        """Which elements of the whole model's tensor a parameter has before it is sharded."""
        return chunk(parameter, *self.cut[parameter]) if parameter in self.cut else whole(parameter)

    def after_loading(self):
        for flat in self.flats if self.hooks else ():
            flat.round()
