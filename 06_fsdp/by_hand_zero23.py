"""ZeRO stages 2 and 3 by hand: gradients are cut as they appear, and parameters are whole only where they are used.

The same interface as distributed_training.py; start them with --strategy zero2 --by-hand, --strategy fsdp --by-hand.
What stage 3 does around each unit is from Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
Parallel" (VLDB 2023), section 3.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.strategy import require_gradients
from course.ddp import by_hand as chapter_03
from course.fsdp import by_hand_zero1 as by_hand


class ShardedGradients(by_hand.ShardedOptimizer):
    """Stage 2: gradients go to their owners bucket by bucket while the backward pass runs; a rank keeps its shard.

    Every micro-batch's are sent: a rank that waited for the last would have to keep the whole gradient meanwhile.
    """

    bucket_mb = 1.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.under_way = None  # the reduce-scatter that was launched last
        self.missing = self.expected()

    def expected(self):
        """Whose gradient has not appeared in this backward pass."""
        return {parameter for flat in self.trained for parameter in flat.parameters}

    def flatten(self, dtype):
        order = list(self.model.parameters())[::-1]  # as the backward pass goes
        buckets = chapter_03.assign(order, self.bucket_mb * chapter_03.MEBIBYTE)
        flats = [by_hand.flats_of([order[index] for index in bucket], self.ranks, dtype) for bucket in buckets]
        return [flat for bucket in flats for flat in bucket]

    def ready(self, flat, parameter):
        if flat.gradient is None:
            flat.allocate_gradient()
        torch.mul(parameter.grad, 1 / self.data_size, out=flat.gradient_of[parameter])
        parameter.grad = None
        self.missing.remove(parameter)
        if self.missing.isdisjoint(flat.parameters):
            self.reduce(flat)

    def reduce(self, flat):
        """Launch a bucket, and take in the one before: so no more than two are whole at any time."""
        part = torch.empty_like(flat.part)
        work = dist.reduce_scatter_single(part, flat.gradient, async_op=True)
        self.take_in()
        self.under_way = flat, part, work

    def take_in(self):
        if self.under_way:
            flat, part, work = self.under_way
            work.wait()
            flat.gradient = flat.gradient_of = self.under_way = None
            flat.reduced = part if flat.reduced is None else flat.reduced + part

    def after_backward(self):
        self.take_in()
        require_gradients(self.model, self.missing)
        self.missing = self.expected()

    def reduce_gradients(self):
        """All are where they belong."""


class ShardedParameters(ShardedGradients):
    """Stage 3: a unit's parameters are gathered before it computes, forward and backward, and freed after; while it
    computes, the next one's are under way.

    Units are called one after the other, each with what the one before gave.
    """

    def flatten(self, dtype):
        self.owners = []  # the unit of each module, in the order of the forward pass
        for place, (part, unit) in enumerate(units_of(self.model, self.ranks, dtype)):
            part.register_forward_pre_hook(partial(self.before_forward, place))
            part.register_forward_hook(partial(self.after_forward, place))
            self.owners.append(unit)
        self.units = list(dict.fromkeys(self.owners))
        return [flat for unit in self.units for flat in unit.flats]

    def before_forward(self, place, part, inputs):
        self.gather(place, place + 1)

    def after_forward(self, place, part, inputs, output):
        if self.owners[place] is not self.owners[-1]:  # the backward pass begins with the last one: it stays
            self.owners[place].free()
        if output.requires_grad:
            output.register_hook(partial(self.before_backward, place))

    def before_backward(self, place, gradient):
        """The gradient of this module's output is there, so the module behind it is done, frozen weights included."""
        if place + 1 < len(self.owners) and self.owners[place + 1] not in self.owners[: place + 1]:
            self.owners[place + 1].free()
        self.gather(place, place - 1)

    def gather(self, place, following):
        self.owners[place].start()
        if 0 <= following < len(self.owners):
            self.owners[following].start()  # on its way while this one computes
        self.owners[place].wait()

    def after_backward(self):
        for unit in self.units:
            unit.free()
        super().after_backward()

    def spread(self, flats):
        """Whoever needs them gathers them."""
        self.round_shards(flats)


class Unit:
    """Parameters that are gathered and freed together: one vector of trained, one of frozen ones."""

    def __init__(self, parameters, ranks, dtype):
        self.flats = by_hand.flats_of(parameters, ranks, dtype)
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


def units_of(model, ranks, dtype=torch.float32):
    """(module, unit) for each module that has parameters, in the order of the forward pass: children, or their items.

    Modules that share a weight share a unit: it has one gradient, complete when both have run, and one owner of each
    element. Raises UserError for parameters that are in no child.
    """
    parts = [
        part
        for child in model.children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])
        if any(True for _ in part.parameters())
    ]
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
    units = [Unit(list(group), ranks, dtype) for group in groups]
    return [(part, units[place]) for part, place in zip(parts, places, strict=True)]
