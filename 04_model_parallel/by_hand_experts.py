"""Expert parallelism: the experts of each mixture live on different ranks, and the tokens travel to them.

Every rank routes the tokens of its own slice of the batch. An all-to-all takes them to the ranks of their experts
(dispatch), another brings the results back (combine). All parameters but the experts are replicated, as in chapter 03.
So it is done in GShard (Lepikhin et al. 2020, section 3). Start it with --strategy expert --by-hand.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.errors import UserError
from common.model import cross_entropy
from common.strategy import Strategy, require_gradients
from course.model_parallel.moe_model import Mixture, MixtureGPT


class ExpertParallel(Strategy):
    """Every rank reads one slice of the global batch, and holds 1/size of each mixture's experts."""

    model_class = MixtureGPT

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.model = model.to(ranks.device)
        for tensor in self.model.parameters():  # ranks may have been seeded differently
            dist.broadcast(tensor.detach(), src=0)
        for block in self.model.blocks:
            block.mlp = ParallelMixture(block.mlp, ranks.rank, ranks.size)
        self.sharded = {name: p for name, p in self.model.named_parameters() if ".experts." in name}
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
        dist.all_reduce(loss)
        grad_norm = self.average_gradients() / self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.data_size, grad_norm

    def average_gradients(self) -> torch.Tensor:
        """Make the gradients those of the mean over all ranks' slices; the 2-norm over the whole model."""
        experts = [p.grad for p in self.sharded.values() if p.grad is not None]
        own = {id(p) for p in self.sharded.values()}
        others = [p.grad for p in self.model.parameters() if p.grad is not None and id(p) not in own]
        flat = torch.cat([grad.flatten() for grad in others]) / self.data_size
        dist.all_reduce(flat)
        for grad, mean in zip(others, flat.split([grad.numel() for grad in others]), strict=True):
            grad.copy_(mean.view_as(grad))
        for grad in experts:  # the backward pass brought together what all ranks' tokens add to it
            grad /= self.data_size
        squares = get_total_norm(experts) ** 2
        dist.all_reduce(squares)
        norm = (get_total_norm(others) ** 2 + squares).sqrt()
        others[0] += 0 * norm  # NaN where one rank's expert overflowed: so all ranks' scalers skip the step
        return norm

    def full_state(self):
        return self.each_expert_tensor(super().full_state(), gathered)

    def own_part(self, state):
        return self.each_expert_tensor(state, lambda tensor: tensor.chunk(self.data_size)[self.data_rank])

    def each_expert_tensor(self, state, change):
        """`change` applied to the experts' parameters and what the optimizer keeps for each of their elements."""
        for name in self.sharded:
            state["model"][name] = change(state["model"][name])
            kept = state["optimizer"]["state"].get(name, {})
            kept.update({key: change(value) for key, value in kept.items() if torch.is_tensor(value) and value.dim()})
        return state


class ParallelMixture(nn.Module):
    """A Mixture of which this rank holds the experts from rank/size to (rank + 1)/size of all.

    Collective: all ranks call it together, each with its own tokens. It leaves, of its last input, the `imbalance`,
    the number `dropped`, and the `load` [experts]: how many tokens this rank sent to each.
    """

    def __init__(self, whole: Mixture, rank: int, size: int):
        super().__init__()
        if whole.number % size:
            raise UserError(f"{whole.number} experts do not divide by {size} ranks; make it a multiple of {size}")
        self.number, self.top_k, self.places, self.size = whole.number, whole.top_k, whole.places, size
        self.router, self.experts = whole.router, whole.experts
        for name, parameter in self.experts.named_parameters():
            own = parameter.detach().chunk(size)[rank].clone()
            setattr(self.experts, name, nn.Parameter(own, parameter.requires_grad))

    def forward(self, x):
        gates, chosen, kept = self.route(x)
        # a row for each choice that found a place, in the order of the experts, so of the ranks that hold them
        order = chosen[kept].argsort(stable=True)
        token = kept.nonzero()[:, 0][order]
        self.load = torch.bincount(chosen[kept], minlength=self.number)
        self.dropped = int((~kept).sum())
        outgoing = self.load.view(self.size, -1)  # [rank, its experts]
        incoming = exchange(outgoing, [1] * self.size, [1] * self.size)  # [rank, own experts]
        sent, received = outgoing.sum(dim=1).tolist(), incoming.sum(dim=1).tolist()
        rows = AllToAll.apply(x.flatten(0, 1)[token], sent, received)  # dispatch
        # they stand by the rank they came from: put each expert's together, and its results back where they were
        expert = torch.arange(incoming.shape[1], device=x.device).repeat(self.size)
        together = expert.repeat_interleave(incoming.flatten()).argsort(stable=True)
        rows = torch.cat(self.experts(rows[together].split(incoming.sum(dim=0).tolist())))
        rows = AllToAll.apply(rows[together.argsort()], received, sent)  # combine
        y = torch.zeros_like(x).flatten(0, 1)  # a token that is dropped adds nothing: the residual carries it on
        return y.index_add(0, token, (gates[kept][order, None] * rows).to(y.dtype)).view_as(x)

    def route(self, x):
        """Activations [batch, time, width] -> gates, experts chosen and whether they have a place, all
        [batch * time, top_k]."""
        probabilities = self.router(x).softmax(dim=-1)
        gates, chosen = probabilities.topk(self.top_k)
        if self.top_k > 1:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        choices = nn.functional.one_hot(chosen, self.number).flatten(1, 2)  # [batch, time * top_k, experts]
        queue = choices.cumsum(dim=1).gather(-1, chosen.flatten(1, 2)[..., None])  # the place of each choice
        shares = choices.float().mean(dim=1)
        self.imbalance = self.number * (shares * probabilities.mean(dim=1)).sum(dim=-1).mean()
        kept = (queue <= self.places(x.shape[1])).view(-1, self.top_k)
        return gates.flatten(0, 1), chosen.flatten(0, 1), kept


class AllToAll(torch.autograd.Function):
    """Rows [sum(sent), width] -> [sum(received), width]: the first sent[0] go to rank 0, the next to rank 1, ...
    Backward, gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.received, ctx.sent), None, None


def exchange(rows, sent, received):
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result


def gathered(own):
    """The ranks' parts of a tensor, put together along the first dimension. Collective."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts)
