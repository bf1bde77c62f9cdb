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
from common.strategy import Strategy, require_gradients


def start_alike(model):
    """Rank 0's parameters and buffers on every rank: they may have been seeded differently."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


class Flat:
    """Parameters of one type as one vector, padded with zeros until it cuts into equal shards, one for each rank.

    The parameters become views of `vector`. `shard` is this rank's part of it, the parameter that is optimized.
    """

    def __init__(self, parameters, ranks):
        self.parameters, self.ranks = parameters, ranks
        self.length = sum(p.numel() for p in parameters)
        self.vector = parameters[0].detach().new_zeros(self.length + -self.length % ranks.size)
        for parameter, view in zip(parameters, self.views(self.vector), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.shard = nn.Parameter(self.own(self.vector))
        self.gradient = None

    def views(self, vector):
        """A vector's elements in the shapes of the parameters."""
        pieces = vector[: self.length].split([p.numel() for p in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def own(self, vector):
        """This rank's shard of a vector, as a view."""
        return vector.chunk(self.ranks.size)[self.ranks.rank]

    def gather(self, vector=None, shard=None, async_op=False):
        """Fill a vector, by default the parameters', with all ranks' shards."""
        vector = self.vector if vector is None else vector
        shard = self.shard.detach() if shard is None else shard
        return dist.all_gather_single(vector, shard, async_op=async_op)

    def allocate_gradient(self):
        """A vector of zeros, padding included, for the gradient of all parameters."""
        self.gradient = torch.zeros_like(self.vector)
        self.gradient_of = dict(zip(self.parameters, self.views(self.gradient), strict=True))


class ShardedOptimizer(Strategy):
    """Stage 1: a rank keeps the optimizer state of its shard, and steps that; parameters and gradients are whole."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        # All ranks must skip a step in which one rank's shard of the gradient overflows.
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=precision == "fp16")
        self.model, self.make_optimizer = model.to(ranks.device), make_optimizer
        start_alike(model)
        self.trained = [p for p in model.parameters() if p.requires_grad]  # a frozen one has nothing to be cut
        self.flats = self.flatten()
        for flat in self.flats:
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.ready, flat))
        self.optimizer = make_optimizer([flat.shard for flat in self.flats])

    def flatten(self):
        flat = Flat(self.trained, self.ranks)
        flat.allocate_gradient()
        return [flat]

    def step(self, micro_batches):
        self.model.zero_grad()
        self.optimizer.zero_grad()
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
        self.finish_parameters()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        total.wait()
        return loss / self.data_size, grad_norm

    def ready(self, flat, parameter):
        """Autograd calls this in each backward pass, when it has added to the parameter's gradient."""
        if parameter.grad is not flat.gradient_of[parameter]:  # the first micro-batch; others are added to this view
            parameter.grad = flat.gradient_of[parameter].copy_(parameter.grad)

    def after_backward(self):
        """What a micro-batch leaves to be done."""

    def finish_gradients(self):
        """Of the ranks' mean gradient, this rank's shard. In place: the buffer's other parts are left over."""
        require_gradients(self.model)
        for flat in self.flats:
            flat.gradient /= self.data_size
            dist.reduce_scatter_single(flat.own(flat.gradient), flat.gradient)
            flat.shard.grad = flat.own(flat.gradient)

    def clip(self):
        """Clip by the norm of the whole model, whose square is the sum of the shards'."""
        shards = [flat.shard for flat in self.flats]
        square = get_total_norm([shard.grad for shard in shards]) ** 2
        dist.all_reduce(square)
        clip_grads_with_norm_(shards, self.max_norm, square.sqrt())
        return square.sqrt()

    def finish_parameters(self):
        """Every rank gets every shard as its owner has stepped it."""
        for flat in self.flats:
            flat.gather()

    def full_state(self):
        """As an optimizer of the whole model would have it, which is made for the purpose."""
        whole = self.make_optimizer(self.model.parameters())
        for flat in self.flats:
            for key, value in self.optimizer.state[flat.shard].items():
                if value.dim():
                    vector = torch.empty_like(flat.vector)
                    flat.gather(vector, value)
                pieces = flat.views(vector) if value.dim() else [value.clone() for _ in flat.parameters]
                for parameter, piece in zip(flat.parameters, pieces, strict=True):
                    whole.state[parameter][key] = piece
        whole.param_groups[0].update(self.hyperparameters(self.optimizer))
        sharded, self.optimizer = self.optimizer, whole
        state = super().full_state()
        self.optimizer = sharded
        return state

    def load_full_state(self, state):
        self.model.zero_grad()  # set_state_dict gives a new optimizer its state only where there is no gradient
        sharded, self.optimizer = self.optimizer, self.make_optimizer(self.model.parameters())
        super().load_full_state(state)  # into the flat vectors, and so into the shards that are views of them
        whole, self.optimizer = self.optimizer, sharded
        sharded.param_groups[0].update(self.hyperparameters(whole))
        for flat in self.flats:
            for key, value in whole.state[flat.parameters[0]].items():
                vector = torch.zeros_like(flat.vector)
                for parameter, view in zip(flat.parameters, flat.views(vector), strict=True):
                    view.copy_(whole.state[parameter][key])
                sharded.state[flat.shard][key] = flat.own(vector).clone() if value.dim() else value

    @staticmethod
    def hyperparameters(optimizer):
        return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
