"""Layers split over ranks: each holds some consecutive layers; activations go forward, their gradients come back.

Only one rank computes at any time, which is why it is called naive; chapter 05 mends that. What lies between two cuts
is what pipelines call a stage (Huang et al., "GPipe", NeurIPS 2019, section 2.2). Start it with --by-hand.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.errors import UserError
from common.model import GPT, cross_entropy
from common.strategy import Strategy

TIED = ("embedding.tokens.weight", "head.out.weight")  # first and last layer: one tensor in the whole model


class Send(torch.autograd.Function):
    """Forward: sends the activations to rank `to`. Backward: waits for their gradient from there.

    Returns a zero that stands for the loss, which is elsewhere, so that backward() can be called on it.
    `anchor` is any scalar that requires a gradient: so the backward pass comes here even if all layers
    before are frozen.
    """

    @staticmethod
    def forward(ctx, x, anchor, to):
        dist.send(x.contiguous(), to)
        ctx.shape, ctx.to = x.shape, to
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, one):
        gradient = one.new_empty(ctx.shape)
        dist.recv(gradient, ctx.to)
        return gradient, None, None


class Receive(torch.autograd.Function):
    """Forward: waits for activations of `shape` from rank `source`. Backward: sends their gradient there.

    What comes from another process has no history here. It is `anchor` that makes autograd record this.
    """

    @staticmethod
    def forward(ctx, anchor, shape, source):
        ctx.source = source
        x = anchor.new_empty(shape)
        dist.recv(x, source)
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), ctx.source)
        return None, None, None


class SplitLayers(Strategy):
    """Every rank reads the whole batch, and holds one of as many parts of the GPT as there are ranks.

    ends: for each part, the number of its last layer plus one, where embedding, blocks and head are counted from 0;
          by default the largest part has as few parameters as can be
    """

    group = None  # of the ranks that have parts of one model: all

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0, ends=None):
        super().__init__(ranks, precision, max_norm)
        # GradScaler skips a step whose gradients overflow; this one does so on all ranks if it does on any.
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=precision == "fp16")
        layers = layers_of(model)
        ends = ends or cut([count(layer) for layer in layers.values()], ranks.size)
        self.first, self.last = ranks.rank == 0, ranks.rank == ranks.size - 1
        self.width = model.embedding.tokens.embedding_dim
        tied = model.head.out.weight is model.embedding.tokens.weight and ranks.size > 1
        for tensor in [*model.parameters(), *model.buffers()]:  # ranks may have been seeded differently
            dist.broadcast(tensor.detach(), src=0)
        self.tied = model.embedding.tokens.weight if tied else None
        self.ends_group = dist.new_group([0, ranks.size - 1]) if tied else None
        for number, name in enumerate(layers):
            if not (0, *ends)[ranks.rank] <= number < ends[ranks.rank]:
                model.set_submodule(name, nn.Identity())  # what is left keeps its names, and can be called as before
        self.model = model.to(ranks.device)
        self.optimizer = make_optimizer(self.model.parameters())
        self.anchor = torch.zeros((), device=ranks.device, requires_grad=True)

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.ranks.device)
        for inputs, targets in micro_batches:
            # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
            part = self.forward(inputs, targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.add_tied_gradients()
        dist.broadcast(loss, src=self.ranks.size - 1)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def forward(self, inputs, targets):
        """This rank's layers. The loss on the last rank; elsewhere the zero of Send."""
        x = inputs
        if not self.first:
            x = Receive.apply(self.anchor, (*inputs.shape, self.width), self.ranks.rank - 1)
        with self.autocast():
            x = self.model(x)
            if self.last:
                return cross_entropy(x, targets)
        return Send.apply(x, self.anchor, self.ranks.rank + 1)

    def add_tied_gradients(self):
        """Embedding and output layer are one tensor of the whole model: its gradient is the sum over both places.

        With equal weights, gradients and optimizer states the first and the last rank's copies stay equal
        (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, do it so too).
        """
        if self.tied is not None and self.tied.requires_grad and (self.first or self.last):
            dist.all_reduce(self.tied.grad, group=self.ends_group)

    def clip(self):
        """Clip by the norm of the whole model, in which a tied weight counts once."""
        twice = self.tied if self.last else None
        own = [p.grad for p in self.model.parameters() if p.grad is not None and p is not twice]
        square = get_total_norm(own).to(self.ranks.device) ** 2
        dist.all_reduce(square)
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, square.sqrt())
        return square.sqrt()

    def full_state(self):
        """On rank 0; the others have nothing to add to it, and return empty dictionaries."""
        state = super().full_state()
        if self.tied is not None and self.last:
            state["optimizer"] = renamed(state["optimizer"], TIED[1], TIED[0])
        parts = [None] * dist.get_world_size(self.group) if self.first else None
        dist.gather_object(state, parts, group=self.group, group_dst=0)
        if not self.first:
            return state | {"model": {}, "optimizer": {}}
        for part in parts[1:]:
            state["model"] |= part["model"]
            state["optimizer"]["state"] |= part["optimizer"]["state"]
            groups = zip(state["optimizer"]["param_groups"], part["optimizer"]["param_groups"], strict=True)
            for group, more in groups:
                group["params"] = list(dict.fromkeys(group["params"] + more["params"]))
        return state

    def own_part(self, state):
        optimizer = state["optimizer"]
        if self.tied is not None and self.last:
            optimizer = renamed(optimizer, TIED[0], TIED[1])
        return state | {
            "model": {name: state["model"][name] for name in self.model.state_dict()},
            "optimizer": optimizer,
        }


def renamed(optimizer: dict, old: str, new: str) -> dict:
    """A state of an optimizer in which one parameter has another name: in the whole model's it has its first."""
    states = {new if name == old else name: state for name, state in optimizer["state"].items()}
    groups = [
        group | {"params": [new if name == old else name for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {"state": states, "param_groups": groups}


def layers_of(model) -> dict[str, nn.Module]:
    """The layers between which a model can be cut, by name, in the order of the forward pass."""
    if not isinstance(model, GPT):
        raise UserError(f"layers of a {type(model).__name__} are not cut, only those of a GPT; use --task text")
    blocks = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}
    return {"embedding": model.embedding, **blocks, "head": model.head}


def count(layer: nn.Module) -> int:
    """Its parameters."""
    return sum(parameter.numel() for parameter in layer.parameters())


def cut(costs: list[float], parts: int) -> tuple[int, ...]:
    """Where to cut layers with these costs into consecutive parts, none empty, so that the largest sum of
    costs is as small as can be: for each part, the number of its last layer plus one.

    Raises UserError for more parts than layers.
    """
    if parts > len(costs):
        raise UserError(
            f"{parts} ranks are more than {len(costs)} layers (embedding, {len(costs) - 2} blocks, head), "
            f"and each needs one; start at most {len(costs)} ranks, or make --layers {parts - 2}"
        )

    @functools.cache
    def best(begin: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sum(costs[begin:]), (len(costs),)
        ways = []
        for end in range(begin + 1, len(costs) - parts + 2):
            largest, ends = best(end, parts - 1)
            ways.append((max(sum(costs[begin:end]), largest), (end, *ends)))
        return min(ways)

    return best(0, parts)[1]
