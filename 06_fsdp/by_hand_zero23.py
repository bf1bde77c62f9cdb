"""ZeRO stages 2 and 3 by hand: gradients are cut as they appear, and parameters are whole only where they are used.

The same interface as distributed_training.py; start them with --strategy zero2 --by-hand, --strategy fsdp --by-hand,
--strategy hsdp --by-hand. What stage 3 does around each unit is from Zhao et al., "PyTorch FSDP: Experiences on Scaling
Fully Sharded Data Parallel" (VLDB 2023), section 3.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_together, global_norm, leave_meta
from common.constants import MEBIBYTE
from common.errors import UserError
from common.mesh import axis
from common.model import children_or_items, cross_entropy
from common.recompute import RecomputeOptions, recompute_blocks
from common.strategy import DTYPES, Strategy, require_gradients
from course.ddp.by_hand import assign
from course.fsdp.by_hand_zero1 import broadcast_buffers, flats_of, gather_updated, parts_of


class ShardedReducer:
    """Averages gradients over the ranks of an axis, each flat parameter's as soon as its last one is there, and leaves
    each rank the gradient of its shard, in shard.grad.

    Every micro-batch's are sent: a rank that waited for the last would have to keep the whole gradient meanwhile.

    data_size: what the sum of all ranks' gradients is divided by
    """

    def __init__(self, model, flats, data_size):
        self.model, self.scale = model, 1 / data_size
        self.flats = [flat for flat in flats if flat.requires_grad]
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.ready, flat))
        self.under_way = None  # the reduce-scatter that was launched last
        self.missing = self.expected()

    def expected(self):
        """Whose gradient has not appeared in this backward pass."""
        return {parameter for flat in self.flats for parameter in flat.parameters}

    def ready(self, flat, parameter):
        """Autograd calls this in the backward pass, when the parameter's gradient is there."""
        if flat.gradient is None:
            flat.allocate_gradient()
        torch.mul(parameter.grad, self.scale, out=flat.gradient_of[parameter])
        parameter.grad = None
        self.missing.remove(parameter)
        if self.missing.isdisjoint(flat.parameters):
            self.reduce(flat)

    def reduce(self, flat):
        """Launch one, and finish the one before: so no more than two gradients are whole at any time."""
        part = torch.empty_like(flat.shard)
        work = dist.reduce_scatter_single(part, flat.gradient, group=flat.axis.group, async_op=True)
        self.finish_reduce()
        self.under_way = flat, part, work

    def finish_reduce(self):
        if self.under_way:
            flat, part, work = self.under_way
            work.wait()
            flat.gradient = flat.gradient_of = self.under_way = None
            flat.shard.grad = part if flat.shard.grad is None else flat.shard.grad + part

    def finish(self):
        """After the backward pass of a micro-batch. Raises UserError for a parameter without a gradient."""
        self.finish_reduce()
        require_gradients(self.model, self.missing)
        self.missing = self.expected()


class Zero2ByHand(Strategy):
    """Stage 2: gradients go to their owners bucket by bucket while the backward pass runs; a rank keeps its shard."""

    preset = {"shard": -1}
    from_meta = True
    Options = RecomputeOptions
    bucket_mb = 1.0

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.axis = axis(self.mesh, "shard")
        self.scaler = self.make_scaler(self.axis.group)
        self.model = leave_meta(model, self.device)
        recompute_blocks(self.model, self.options.recompute)
        order, self.flats = list(self.model.parameters())[::-1], []  # as the backward pass goes
        for bucket in assign(order, self.bucket_mb * MEBIBYTE):
            parameters, start = [order[index] for index in bucket], self.axis.group
            self.flats += flats_of(parameters, self.axis, DTYPES[self.precision], self.device, start)
        broadcast_buffers(self.model, self.axis.group)
        self.trained = [flat for flat in self.flats if flat.requires_grad]
        self.reducer = ShardedReducer(self.model, self.flats, self.data_size)
        self.optimizer = make_optimizer([flat.shard for flat in self.trained])

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            self.reducer.finish()
            loss += part.detach()
        total = dist.all_reduce(loss, group=self.axis.group, async_op=True)
        self.scaler.unscale_(self.optimizer)
        shards = [flat.shard for flat in self.trained]
        grad_norm = global_norm([([shard.grad for shard in shards], [self.axis.group])], self.device)
        clip_grads_with_norm_(shards, self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        gather_updated(self.trained)
        broadcast_buffers(self.model, self.axis.group)
        total.wait()
        return loss / self.data_size, grad_norm

    def parts(self):
        return parts_of(self.model, self.flats)

    def after_loading(self):
        gather_updated(self.flats)


class Unit:
    """Parameters that are gathered and freed together: one vector of trained, one of frozen ones."""

    def __init__(self, parameters, *args):
        self.flats = flats_of(parameters, *args)
        for flat in self.flats:  # all that stays when the vector is freed
            flat.part = flat.part.clone()
            if flat.part.dtype == flat.shard.dtype:
                flat.shard.data = flat.part
        self.gathered, self.works = True, []
        self.free()

    def start(self):
        if not self.gathered:
            for flat in self.flats:
                flat.vector.untyped_storage().resize_(flat.vector.nbytes)
                self.works.append(flat.gather())
            self.gathered = True

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []

    def free(self):
        """Give the memory back. The parameters, and what autograd has saved of them, are views that are filled again
        when the vector is."""
        self.wait()
        for flat in self.flats:
            flat.vector.untyped_storage().resize_(0)
        self.gathered = False


def units_of(model, axis, dtype=torch.float32, device="cpu", start=None, take=None):
    """(module, unit) for each module that has parameters, in the order of the forward pass: children, or their items.

    Modules that share a weight share a unit: it has one gradient, complete when both have run, and one owner of each
    element. The parameters may be parts already, cut by tensor parallelism. Raises UserError for parameters that are in
    no child. `axis` and what follows is FlatParameter's; by default the axis' first rank has the values to start with.
    `take` is called with the parameters of each unit before the unit is made.
    """
    parts = children_or_items(model)
    groups, places = [], []
    for part in parts:
        own = dict.fromkeys(part.parameters())
        shared = next((number for number, group in enumerate(groups) if group.keys() & own.keys()), len(groups))
        if shared == len(groups):
            groups.append({})
        groups[shared] |= own
        places.append(shared)
    if sum(map(len, groups)) != len(list(model.parameters())):
        raise UserError("every parameter must be in one child of the model, or in children that share a unit")
    units = []
    for group in groups:
        if take:
            take(list(group))
        units.append(Unit(list(group), axis, dtype, device, start or axis.group))
    return [(part, units[place]) for part, place in zip(parts, places, strict=True)]


class UnitHooks:
    """Gathers each unit's parameters before its module computes, forward and backward, and frees them after; while it
    computes, the next one's are under way.

    pairs: what units_of gives. Modules are called one after the other, each with what the one before gave.
    """

    def __init__(self, pairs):
        self.owners = [unit for _, unit in pairs]  # the unit of each module, in the order of the forward pass
        self.units = list(dict.fromkeys(self.owners))
        for place, (part, _) in enumerate(pairs):
            part.register_forward_pre_hook(partial(self.before_forward, place))
            part.register_forward_hook(partial(self.after_forward, place))

    def before_forward(self, place, _part, _inputs):
        self.gather(place, place + 1)

    def after_forward(self, place, _part, _inputs, output):
        if self.owners[place] is not self.owners[-1]:  # the backward pass begins with the last one: it stays
            self.owners[place].free()
        if output.requires_grad:
            output.register_hook(partial(self.before_backward, place))

    def before_backward(self, place, _gradient):
        """The gradient of this module's output is there, so the module behind it is done, frozen weights included."""
        if place + 1 < len(self.owners) and self.owners[place + 1] not in self.owners[: place + 1]:
            self.owners[place + 1].free()
        self.gather(place, place - 1)

    def gather(self, place, following):
        self.owners[place].start()
        if 0 <= following < len(self.owners):
            self.owners[following].start()  # on its way while this one computes
        self.owners[place].wait()

    def free(self):
        for unit in self.units:
            unit.free()


class FSDPByHand(Strategy):
    """Stage 3: a unit's parameters are whole only while it computes. On a mesh with an axis "data" beside "shard" its
    ranks are replicas, which average the gradients of their shards."""

    preset = {"shard": -1}
    from_meta = True
    axes = ("data", "shard")
    Options = RecomputeOptions

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.axis, self.replicas = axis(self.mesh, "shard"), axis(self.mesh, "data")
        self.readers = axis(self.mesh, "data", "shard")
        self.scaler = self.make_scaler(self.axis.group)
        self.model = leave_meta(model, self.device)
        recompute_blocks(self.model, self.options.recompute)
        start = self.readers.group
        self.hooks = UnitHooks(units_of(self.model, self.axis, DTYPES[self.precision], self.device, start))
        broadcast_buffers(self.model, start)
        self.flats = [flat for unit in self.hooks.units for flat in unit.flats]
        self.trained = [flat for flat in self.flats if flat.requires_grad]
        self.reducer = ShardedReducer(self.model, self.flats, self.data_size)
        self.optimizer = make_optimizer([flat.shard for flat in self.trained])

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            self.hooks.free()
            self.reducer.finish()
            loss += part.detach()
        total = dist.all_reduce(loss, group=self.readers.group, async_op=True)
        shards = [flat.shard for flat in self.trained]
        if self.replicas.size > 1:
            all_reduce_together([shard.grad for shard in shards], self.replicas.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = global_norm([([shard.grad for shard in shards], [self.axis.group])], self.device)
        clip_grads_with_norm_(shards, self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for flat in self.trained:
            flat.round()  # whoever needs it gathers it
        broadcast_buffers(self.model, self.readers.group)
        total.wait()
        return loss / self.data_size, grad_norm

    def evaluate(self, inputs, targets):
        loss = super().evaluate(inputs, targets)
        self.hooks.free()  # no backward pass will
        return loss

    def parts(self):
        return parts_of(self.model, self.flats)

    def after_loading(self):
        for flat in self.flats:
            flat.round()


class HSDPByHand(FSDPByHand):
    """Stage 3 within each of two or more groups of ranks, which are replicas of each other."""

    preset = {"data": 2, "shard": -1}
