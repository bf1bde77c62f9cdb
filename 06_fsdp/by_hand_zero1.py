"""ZeRO stage 1 from reduce-scatter and all-gather: optimizer state, alike on all ranks before, is cut into shards.

The same interface as distributed_training.py; start it with --strategy zero1 --by-hand. The stages are those of
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5; 2
and 3 are in by_hand_fsdp.py. What SGD or AdamW does to an element does not depend on the others, so they may step flat
shards that begin and end in the middle of a weight.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.model import cross_entropy
from common.strategy import DTYPES, require_gradients


def start_alike(model):
    """Rank 0's parameters and buffers on every rank: they may have been seeded differently."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


class Flat:
    """Parameters as one vector, padded with zeros until it cuts into equal shards, one for each rank.

    vector: of the type that the forward pass computes in; the parameters become views of it
    part:   this rank's shard of the vector, which the others gather
    shard:  the same in float32: what is optimized. One memory with `part` where the types are the same
    """

    def __init__(self, parameters, ranks, dtype):
        self.parameters, self.ranks, self.trained = parameters, ranks, parameters[0].requires_grad
        self.length = sum(p.numel() for p in parameters)
        vector = parameters[0].detach().new_zeros(self.length + -self.length % ranks.size)
        for parameter, view in zip(parameters, self.views(vector), strict=True):
            view.copy_(parameter.detach())
        self.vector = vector.to(dtype)
        self.views_of_vector = self.views(self.vector)
        self.show(self.views_of_vector)
        self.part, own = self.own(self.vector), self.own(vector)
        self.shard = nn.Parameter(own if self.vector is vector else own.clone(), requires_grad=self.trained)
        self.gradient = self.reduced = None  # of the whole vector on this rank; this shard's of all ranks

    def views(self, vector):
        """A vector's elements in the shapes of the parameters."""
        pieces = vector[: self.length].split([p.numel() for p in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def show(self, views):
        """Let the parameters be these tensors."""
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def own(self, vector):
        """This rank's shard of a vector, as a view."""
        return vector.chunk(self.ranks.size)[self.ranks.rank]

    def gather(self):
        """Fill the vector with all ranks' shards; the work to wait for."""
        return dist.all_gather_single(self.vector, self.part, async_op=True)

    def whole(self, shard):
        """All ranks' shards, of any tensor that is cut like this vector."""
        vector = shard.new_empty(len(self.vector))
        dist.all_gather_single(vector, shard.detach())
        return vector

    def allocate_gradient(self):
        """A vector of zeros, padding included, for the gradient of all parameters."""
        self.gradient = torch.zeros_like(self.vector)
        self.gradient_of = dict(zip(self.parameters, self.views(self.gradient), strict=True))


def flats_of(parameters, ranks, dtype):
    """One Flat of the parameters that are trained, and one of those that are frozen."""
    kinds = [[p for p in parameters if p.requires_grad is trained] for trained in (True, False)]
    return [Flat(kind, ranks, dtype) for kind in kinds if kind]


class ShardedOptimizer(StateInShards):
    """Stage 1: a rank keeps the optimizer state of its shard, and steps that; parameters and gradients are whole."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        # All ranks must skip a step in which one rank's shard of the gradient overflows.
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=precision == "fp16")
        self.model, self.make_optimizer = model.to(ranks.device), make_optimizer
        start_alike(model)
        self.flats = self.flatten(DTYPES[precision])
        self.trained = [flat for flat in self.flats if flat.trained]
        for flat in self.trained:
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.ready, flat))
        self.optimizer = make_optimizer([flat.shard for flat in self.trained])

    def flatten(self, dtype):
        flats = flats_of(list(self.model.parameters()), self.ranks, dtype)
        flats[0].allocate_gradient()
        return flats

    def step(self, micro_batches):
        self.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            self.after_backward()
            loss += part.detach()
        total = dist.all_reduce(loss, async_op=True)
        self.finish_gradients()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()  # what is kept of a gradient is `reduced`
        self.spread(self.trained)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        total.wait()
        return loss / self.data_size, grad_norm

    def zero_grad(self):
        self.model.zero_grad()
        for flat in self.trained:
            flat.reduced = None

    def ready(self, flat, parameter):
        """Autograd calls this in each backward pass, when it has added to the parameter's gradient."""
        if parameter.grad is not flat.gradient_of[parameter]:  # the first micro-batch; others are added to this view
            parameter.grad = flat.gradient_of[parameter].copy_(parameter.grad)

    def after_backward(self):
        """What a micro-batch leaves to be done."""

    def reduce_gradients(self):
        """Of the ranks' mean gradient, this rank's shard. In place: the buffer's other parts are left over."""
        require_gradients(self.model)
        for flat in self.trained:
            flat.gradient /= self.data_size
            flat.reduced = flat.own(flat.gradient)
            dist.reduce_scatter_single(flat.reduced, flat.gradient)

    def finish_gradients(self):
        self.reduce_gradients()
        for flat in self.trained:
            flat.shard.grad = flat.reduced.to(flat.shard.dtype)

    def clip(self):
        """Clip by the norm of the whole model, whose square is the sum of the shards'."""
        shards = [flat.shard for flat in self.trained]
        square = get_total_norm([shard.grad for shard in shards]) ** 2
        dist.all_reduce(square)
        clip_grads_with_norm_(shards, self.max_norm, square.sqrt())
        return square.sqrt()

    def round_shards(self, flats):
        """In mixed precision, what is gathered follows what is optimized."""
        for flat in flats:
            if flat.part.dtype != flat.shard.dtype:
                flat.part.copy_(flat.shard.detach())

    def spread(self, flats):
        """Every rank gets every shard as its owner has stepped it."""
        self.round_shards(flats)
        for work in [flat.gather() for flat in flats]:
            work.wait()
