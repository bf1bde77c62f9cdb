"""Layers split over ranks: each holds some consecutive layers; activations go forward, their gradients come back.

Only one rank computes at any time, which is why it is called naive; chapter 05 changes that. What lies between two cuts
is what pipelines call a stage (Huang et al., "GPipe", NeurIPS 2019, section 2.2). Start it with --by-hand.
"""

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import broadcast_module, global_norm, leave_meta
from common.errors import UserError
from common.mesh import axis
from common.model import GPT, cross_entropy
from common.strategy import DTYPES, Strategy

TIED = ("embedding.tokens.weight", "head.out.weight")  # first and last layer: one tensor in the whole model


class Send(torch.autograd.Function):
    """Forward: sends the activations to rank `to` of `group`. Backward: waits for their gradient from there.

    Returns a zero that stands for the loss, which is elsewhere, so that backward() can be called on it.
    `_anchor` is any scalar that requires a gradient: so the backward pass comes here even if all layers
    before are frozen.
    """

    @staticmethod
    def forward(ctx, x, _anchor, group, to):
        dist.send(x.contiguous(), group=group, group_dst=to)
        ctx.shape, ctx.dtype, ctx.group, ctx.to = x.shape, x.dtype, group, to
        return torch.zeros((), device=x.device)

    @staticmethod
    def backward(ctx, one):
        gradient = one.new_empty(ctx.shape, dtype=ctx.dtype)
        dist.recv(gradient, group=ctx.group, group_src=ctx.to)
        return gradient, None, None, None


class Receive(torch.autograd.Function):
    """Forward: waits for activations of `shape` and `dtype` from rank `source` of `group`. Backward: sends their
    gradient, of the same type, there.

    What comes from another process has no history here. It is `anchor` that makes autograd record this.
    """

    @staticmethod
    def forward(ctx, anchor, shape, dtype, group, source):
        ctx.group, ctx.source = group, source
        x = anchor.new_empty(shape, dtype=dtype)
        dist.recv(x, group=group, group_src=source)
        return x

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), group=ctx.group, group_dst=ctx.source)
        return None, None, None, None, None


class SplitLayers(Strategy):
    """Every rank reads the whole batch, and holds one of as many parts of the GPT as the axis "pipeline" has ranks.

    ends: for each part, the number of its last layer plus one, where embedding, blocks and head are counted from 0;
          by default the largest part has as few parameters as can be
    """

    preset = {"pipeline": -1}
    from_meta = True
    tasks = ("text",)

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_layers(config.layers + 2, axes["pipeline"])

    def __init__(self, model, make_optimizer, setup, ends=None):
        super().__init__(setup)
        place = axis(self.mesh, "pipeline")
        self.group, self.rank, self.size = place.group, place.rank, place.size
        self.dtype = DTYPES[self.precision]  # of what crosses from one rank to the next, and of its gradient
        self.scaler = self.make_scaler(self.group)
        layers = layers_of(leave_meta(model, torch.device("cpu")))
        ends = ends or cut([count(layer) for layer in layers.values()], self.size)
        self.first, self.last = self.rank == 0, self.rank == self.size - 1
        self.width = model.embedding.tokens.embedding_dim
        tied = model.head.out.weight is model.embedding.tokens.weight and self.size > 1
        self.tied = model.embedding.tokens.weight if tied else None
        self.embedding_group = embedding_group(self.mesh) if tied else None
        here = list(layers)[(0, *ends)[self.rank] : ends[self.rank]]
        own = {parameter for name in here for parameter in layers[name].parameters()}
        broadcast_module(model, self.group, own=own)
        for name in layers:
            if name not in here:
                model.set_submodule(name, nn.Identity())  # what is left keeps its names, and can be called as before
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(self.model.parameters())
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for inputs, targets in micro_batches:
            # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
            part = self.forward(inputs, targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.add_tied_gradients()
        dist.broadcast(loss, group=self.group, group_src=self.size - 1)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.grad_norm()
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def forward(self, inputs, targets):
        """This rank's layers. The loss on the last rank; elsewhere the zero of Send."""
        x = inputs
        if not self.first:
            x = Receive.apply(self.anchor, (*inputs.shape, self.width), self.dtype, self.group, self.rank - 1)
            x = x.to(self.anchor.dtype)  # under autocast blocks add to float32: rounded where it is sent, only there
        with self.autocast():
            x = self.model(x)
            if self.last:
                return cross_entropy(x, targets)
        return Send.apply(x.to(self.dtype), self.anchor, self.group, self.rank + 1)

    def evaluate(self, inputs, targets):
        with torch.no_grad():
            loss = self.forward(inputs, targets)
        dist.broadcast(loss, group=self.group, group_src=self.size - 1)
        return loss

    def add_tied_gradients(self):
        """Embedding and output layer are one tensor of the whole model: its gradient is the sum over both places.

        With equal weights, gradients and optimizer states the first and the last rank's copies stay equal
        (Megatron Core does it so too, in _allreduce_word_embedding_grads of finalize_model_grads).
        """
        if self.tied is not None and self.tied.requires_grad and (self.first or self.last):
            dist.all_reduce(self.tied.grad, group=self.embedding_group)

    def grad_norm(self):
        """The 2-norm over the whole model, in which a tied weight counts once."""
        twice = self.tied if self.last else None
        own = [p.grad for p in self.model.parameters() if p.grad is not None and p is not twice]
        return global_norm([(own, [self.group])], self.device)

    def parts(self):
        """A tied weight, of which the first and the last rank have a copy, has both names of the whole model."""
        tied = {name: {"name": TIED[0], "aliases": TIED[1:]} for name in TIED} if self.tied is not None else {}
        return [replace(part, **tied.get(part.name, {})) for part in super().parts()]


def embedding_group(mesh) -> dist.ProcessGroup | None:
    """The group of the first and the last rank along "pipeline" of this rank's pipeline; None on the ranks between.

    Collective: all ranks of the mesh call it, since every rank must take part in the making of every group.
    """
    size = mesh["pipeline"].size()
    pipelines = mesh.mesh.movedim(mesh.mesh_dim_names.index("pipeline"), -1).reshape(-1, size)
    return dist.new_subgroups_by_enumeration(pipelines[:, [0, -1]].tolist())[0]


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
    require_layers(len(costs), parts)

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


def require_layers(layers: int, ranks: int) -> None:
    """Raise UserError for more ranks than a GPT has layers, embedding and head among them."""
    if ranks > layers:
        raise UserError(
            f"{ranks} ranks are more than {layers} layers (embedding, {layers - 2} blocks, head), and each needs one; "
            f"start at most {layers} ranks, or make --layers {ranks - 2}"
        )
