"""ZeRO stage 1 from reduce-scatter and all-gather: optimizer state, alike on all ranks before, is cut into shards.

The same interface as distributed_training.py; start it with --strategy zero1 --by-hand. The stages are those of
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5; 2
and 3 are in by_hand_zero23.py. What SGD or AdamW does to an element does not depend on the others, so they may step
flat shards that begin and end in the middle of a weight.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import broadcast_together, global_norm, leave_meta
from common.mesh import axis
from common.model import cross_entropy
from common.recompute import RecomputeOptions, recompute_blocks
from common.state import Part, interval, whole
from common.strategy import DTYPES, Strategy, require_gradients


class FlatParameter:
    """Parameters as one vector, padded with zeros until it cuts into equal shards, one for each rank of an axis.

    vector:   of the type that the forward pass computes in; the parameters become views of it
    part:     this rank's shard of the vector, which the others gather
    shard:    the same in float32: what is optimized. One memory with `part` where the types are the same
    gradient: of the whole vector on this rank, in float32: what ranks and micro-batches add up to is not rounded to
              16 bits on the way. None where no memory is allocated for it. The shard's of all ranks is shard.grad

    The parameters may be on the CPU, or on the meta device on all ranks but the first of the group `start`: all ranks
    of it begin with that rank's values.
    """

    def __init__(self, parameters, axis, dtype, device, start):
        self.parameters, self.axis, self.requires_grad = parameters, axis, parameters[0].requires_grad
        self.length = sum(p.numel() for p in parameters)
        vector = torch.zeros(self.length + -self.length % axis.size, device=device)
        for parameter, view in zip(parameters, self.views(vector), strict=True):
            view.copy_(parameter.detach())
        broadcast_together([vector], start)  # ranks may have been seeded differently
        self.vector = vector.to(dtype)
        self.point_parameters_at(self.vector)
        self.part, own = self.own(self.vector), self.own(vector)
        self.shard = nn.Parameter(own if self.vector is vector else own.clone(), requires_grad=self.requires_grad)
        self.gradient = self.gradient_of = None

    def views(self, vector):
        """A vector's elements in the shapes of the parameters."""
        pieces = vector[: self.length].split([p.numel() for p in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def point_parameters_at(self, vector):
        """Let the parameters be views of this vector.

        Through `data`, past autograd: the model keeps its Parameter objects, and what fills the vector later does not
        count as a change of what autograd has saved.
        """
        for parameter, view in zip(self.parameters, self.views(vector), strict=True):
            parameter.data = view

    def own(self, vector):
        """This rank's shard of a vector, as a view."""
        return vector.chunk(self.axis.size)[self.axis.rank]

    def gather(self):
        """Fill the vector with all ranks' shards; the work to wait for."""
        return dist.all_gather_single(self.vector, self.part, group=self.axis.group, async_op=True)

    def round(self):
        """In mixed precision, what is gathered follows what is optimized."""
        if self.part.dtype != self.shard.dtype:
            self.part.copy_(self.shard.detach())

    def allocate_gradient(self):
        """A vector of zeros, padding included, for the gradient of all parameters."""
        self.gradient = torch.zeros(len(self.vector), device=self.vector.device)
        self.gradient_of = dict(zip(self.parameters, self.views(self.gradient), strict=True))

    def pieces(self):
        """(parameter, which of its elements, their place in the shard) for each parameter that has elements in this
        rank's shard: two slices, of the parameter's elements one after another and of the shard."""
        begin, start = self.axis.rank * len(self.shard), 0
        for parameter in self.parameters:
            first, end = max(begin, start), min(begin + len(self.shard), start + parameter.numel())
            if first < end:
                yield parameter, slice(first - start, end - start), slice(first - begin, end - begin)
            start += parameter.numel()


def flats_of(parameters, *args):
    """One FlatParameter(..., *args) of the parameters that are trained, and one of those that are frozen."""
    kinds = [[p for p in parameters if p.requires_grad is trained] for trained in (True, False)]
    return [FlatParameter(kind, *args) for kind in kinds if kind]


def broadcast_buffers(model, group):
    """The buffers of the group's rank 0 on every rank."""
    broadcast_together(list(model.buffers()), group)


def gather_updated(flats):
    """Every rank gets every shard as its owner has stepped it."""
    for flat in flats:
        flat.round()
    for work in [flat.gather() for flat in flats]:
        work.wait()


def parts_of(model, flats, box=whole):
    """This rank's parts (common/state.py) of a model whose parameters are in `flats`.

    box: gives for a parameter the Where of the tensor that the flat one was made of, which may itself be a part of
         the model's
    """
    names, parts = {}, []
    for name, tensor in model.state_dict(keep_vars=True).items():  # without buffers that are not to be stored
        names.setdefault(tensor, []).append(name)
    for flat in flats:
        for parameter, elements, place in flat.pieces():
            name, *aliases = names.pop(parameter)
            where = interval(box(parameter), elements.start, elements.stop)
            owner = flat.shard if flat.requires_grad else None
            parts.append(Part(name, flat.shard.detach()[place], where, owner, place, tuple(aliases)))
    buffers = [(tensor, own) for tensor, own in names.items() if not isinstance(tensor, nn.Parameter)]
    return parts + [Part(own[0], tensor, whole(tensor), aliases=tuple(own[1:])) for tensor, own in buffers]


class Zero1ByHand(Strategy):
    """Stage 1: a rank keeps the optimizer state of its shard, and steps that; parameters and gradients are whole."""

    preset = {"shard": -1}
    from_meta = True
    Options = RecomputeOptions

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.axis = axis(self.mesh, "shard")
        self.scaler = self.make_scaler(self.axis.group)
        self.model = leave_meta(model, self.device)
        recompute_blocks(self.model, self.options.recompute)
        parameters, start = list(self.model.parameters()), self.axis.group
        self.flats = flats_of(parameters, self.axis, DTYPES[self.precision], self.device, start)
        broadcast_buffers(self.model, start)
        self.trained = [flat for flat in self.flats if flat.requires_grad]  # one vector, or none
        for flat in self.trained:
            flat.allocate_gradient()
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.add_gradient, flat))
        self.optimizer = make_optimizer([flat.shard for flat in self.trained])

    def add_gradient(self, flat, parameter):
        """Autograd calls this when a micro-batch's gradient of the parameter is there."""
        if parameter in self.missing:  # the first micro-batch; others are added to it
            flat.gradient_of[parameter].copy_(parameter.grad)
            self.missing.remove(parameter)
        else:
            flat.gradient_of[parameter].add_(parameter.grad)
        parameter.grad = None

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        self.missing = {parameter for flat in self.trained for parameter in flat.parameters}
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model, self.missing)
        total = dist.all_reduce(loss, group=self.axis.group, async_op=True)
        for flat in self.trained:
            flat.gradient /= self.data_size
            flat.shard.grad = flat.own(flat.gradient)  # in place: the buffer's other parts are left over
            dist.reduce_scatter_single(flat.shard.grad, flat.gradient, group=self.axis.group)
        self.scaler.unscale_(self.optimizer)
        shards = [flat.shard for flat in self.trained]
        # Of the whole model: the sum of the shards' squares.
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
