"""Expert parallelism: the experts of each mixture live on different ranks, and the tokens travel to them.

Every rank routes the tokens of its own slice of the batch. An all-to-all takes them to the ranks of their experts
(dispatch), another brings the results back (combine). All parameters but the experts are replicated, as in chapter 03.
So it is done in GShard (Lepikhin et al. 2020, section 3). Start it with --strategy expert --by-hand.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_together, broadcast_module, global_norm, leave_meta
from common.errors import UserError
from common.mesh import Axis, axis
from common.model import cross_entropy
from common.options import StrategyOptions, option
from common.strategy import Strategy, require_gradients
from course.model_parallel.moe_model import Mixture, MixtureGPT


class ExpertParallel(Strategy):
    """Every rank reads one slice of the global batch, and holds 1/size of each mixture's experts. With an axis "data"
    in the mesh there are several such groups of ranks, which are replicas of each other."""

    preset = {"expert": -1}
    axes = ("data", "expert")
    from_meta = True
    uncounted = "Without numbers the router sends no token to any expert: what experts receive is not counted."
    tasks = ("text",)
    model_class = MixtureGPT

    @dataclass
    class Options(StrategyOptions):
        experts: int = option(8, "experts in each block's mixture", identity=True, at_least=1)
        top_k: int = option(2, "experts that each token goes to", identity=True, at_least=1)

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_experts(config.options.experts, config.options.top_k, axes["expert"])

    @classmethod
    def make_model(cls, config):
        sizes = config.layers, config.width, config.heads, config.context
        return cls.model_class(*sizes, experts=config.options.experts, top_k=config.options.top_k)

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        place, self.replicas = axis(self.mesh, "expert"), axis(self.mesh, "data")
        self.readers, self.group = axis(self.mesh, *self.data_axes), place.group
        self.scaler = self.make_scaler(self.group)
        model = leave_meta(model, torch.device("cpu"))
        self.cut = apply_expert_parallel(model, place, self.readers.group)
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
                auxiliary = self.model.auxiliary_loss() / len(micro_batches)
            self.scaler.scale(part + auxiliary).backward()
            loss += part.detach()
        require_gradients(self.model)
        dist.all_reduce(loss, group=self.readers.group)
        self.average_gradients()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.grad_norm()
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.data_size, grad_norm

    def average_gradients(self):
        """Make the gradients those of the mean over all ranks' slices."""
        experts, others = self.gradients()
        all_reduce_together(others, self.readers.group)
        # the backward pass has already brought together what the tokens of all ranks along "expert" add to an expert's
        all_reduce_together(experts, self.replicas.group)
        for gradient in (*experts, *others):
            gradient /= self.data_size

    def grad_norm(self):
        """The 2-norm over the whole model: experts are summed over the ranks, what every rank holds counts once."""
        experts, others = self.gradients()
        return global_norm([(experts, [self.group]), (others, [])], self.device)

    def gradients(self):
        """Those of this rank's experts, and those of the parameters that every rank has."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        experts = [parameter.grad for parameter in trained if parameter in self.cut]
        return experts, [parameter.grad for parameter in trained if parameter not in self.cut]


def apply_expert_parallel(model, axis: Axis, source=None) -> dict[nn.Parameter, tuple[int, Axis]]:
    """Cut every mixture's experts over the ranks of `axis`, in place; tokens are sent to them.

    Called before the model is moved to a device, so that only this rank's experts are moved. Each rank then calls the
    model with its own slice of the batch. After a backward pass an expert's gradient is the sum over all ranks' slices,
    every other gradient that of this rank's slice. `source` is a process group from whose rank 0 the weights are
    taken, one after the other, each of which is cut before the next one comes; by default the model has them already.

    Returns each parameter that is cut, with the dimension and the axis; all stay the same objects. Raises UserError
    for experts that do not divide by the ranks.
    """
    for block in model.blocks:
        block.mlp = ParallelMixture(block.mlp, axis)
    cut = {parameter: (0, axis) for block in model.blocks for parameter in block.mlp.experts.parameters()}

    def cut_expert(_name, parameter):
        if parameter in cut:
            parameter.data = parameter.data.chunk(axis.size)[axis.rank].clone()

    if source is None:
        for name, parameter in model.named_parameters():
            cut_expert(name, parameter)
    else:
        broadcast_module(model, source, cut=cut_expert)
    return cut


class ParallelMixture(nn.Module):
    """A Mixture of which this rank holds the experts from rank/size to (rank + 1)/size of all, on the ranks of an Axis.

    Collective: all ranks call it together, each with its own tokens. It leaves, of its last input, the `imbalance`,
    the number `dropped`, and the `load` [experts]: how many tokens this rank sent to each. All are tensors.

    Shapes on the GPU that depend on its numbers make the CPU wait for it. Only the lengths of what is sent, received
    and computed do so here, which are copied to the CPU together, once in each forward pass.
    """

    def __init__(self, whole: Mixture, axis: Axis):
        super().__init__()
        require_multiple(whole.number, axis.size)
        self.number, self.top_k, self.capacity, self.axis = whole.number, whole.top_k, whole.capacity, axis
        self.experts, self.router = whole.experts, whole.router

    def forward(self, x):
        group, size = self.axis.group, self.axis.size
        gates, chosen, kept = self.route(x)
        # choices in the order of the experts, so of the ranks that hold them; those that are dropped come last
        order = chosen.where(kept, self.number).flatten().argsort(stable=True)
        outgoing = self.load.view(size, -1)  # [rank, its experts]
        incoming = exchange(outgoing, [1] * size, [1] * size, group)  # [rank, own experts]
        lengths = torch.cat([outgoing.sum(dim=1), incoming.sum(dim=1), incoming.sum(dim=0)]).tolist()  # the one copy
        sent, received, of_experts = lengths[:size], lengths[size : 2 * size], lengths[2 * size :]
        order = order[: sum(sent)]
        token = order // self.top_k
        # in the type that experts compute in, to which autocast would else round what has arrived
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = AllToAll.apply(x.flatten(0, 1)[token].to(dtype), group, sent, received)  # dispatch
        # they stand by the rank they came from: put each expert's together, and its results back where they were
        expert = torch.arange(incoming.shape[1], device=x.device).repeat(size)
        expert = expert.repeat_interleave(incoming.flatten(), output_size=sum(received))
        together = expert.argsort(stable=True)
        rows = torch.cat(self.experts(rows[together].split(of_experts)))
        rows = AllToAll.apply(rows[together.argsort()], group, received, sent)  # combine
        y = torch.zeros_like(x).flatten(0, 1)  # a token that is dropped adds nothing: the residual carries it on
        return y.index_add(0, token, (gates.flatten()[order, None] * rows).to(y.dtype)).view_as(x)

    def route(self, x):
        """Activations [batch, time, width] -> gates, experts chosen and whether these have capacity for it, all
        [batch * time, top_k]."""
        probabilities = self.router(x).softmax(dim=-1)
        gates, chosen = probabilities.topk(self.top_k)
        if self.top_k > 1:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        in_order = chosen.flatten(1, 2)[..., None]  # [batch, time * top_k, 1]
        choices = (in_order == torch.arange(self.number, device=x.device)).long()  # [batch, time * top_k, experts]
        queue = choices.cumsum(dim=1).gather(-1, in_order)  # the place of each choice
        shares = choices.float().mean(dim=1)
        self.imbalance = self.number * (shares * probabilities.mean(dim=1)).sum(dim=-1).mean()
        kept = queue <= self.capacity(x.shape[1])
        self.load, self.dropped = (choices * kept).sum(dim=(0, 1)), (~kept).sum()
        return gates.flatten(0, 1), chosen.flatten(0, 1), kept.view(-1, self.top_k)


class AllToAll(torch.autograd.Function):
    """Rows [sum(sent), width] -> [sum(received), width]: the first sent[0] go to rank 0 of `group`, the next to rank
    1, ... Backward, gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, group, sent, received):
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def exchange(rows, sent, received, group):
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def require_experts(experts: int, top_k: int, ranks: int) -> None:
    """Raise UserError where there is no such mixture of experts, or it cannot be divided among the ranks."""
    if top_k > experts:
        raise UserError(f"--top-k {top_k} is more than --experts {experts}: a token goes to an expert once")
    if experts < ranks:
        raise UserError(f"--experts {experts} are fewer than {ranks} ranks; use {ranks} or a multiple")
    require_multiple(experts, ranks)


def require_multiple(experts: int, ranks: int) -> None:
    """Raise UserError for experts that do not divide by the ranks."""
    if experts % ranks:
        raise UserError(f"--experts {experts} do not divide by {ranks} ranks; use a multiple of {ranks}")
