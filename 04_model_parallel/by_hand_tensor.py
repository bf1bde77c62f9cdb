"""Tensor parallelism from collectives: every rank holds a part of every large weight, and all read the same batch.

The same interface as distributed_training.py; start it with --by-hand. The layers are cut as in Shoeybi et al.,
"Megatron-LM" (2019), section 3; what sequence parallelism puts in place of the all-reduces is from Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_

from common.errors import UserError
from common.strategy import Strategy, require_gradients

# Along which dimension a parameter is cut: 0 by outputs (or words), 1 by inputs. All others are whole on every rank.
CUT = {
    "embedding.tokens.weight": 0,
    "attention.query.weight": 0,
    "attention.key.weight": 0,
    "attention.value.weight": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
    "head.out.weight": 0,
}


class Conjugate(torch.autograd.Function):
    """Does one thing to activations on the way forward, and another to their gradient on the way back."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.conjugate = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.conjugate(grad), None, None


def same(x):
    return x.view_as(x)


def all_reduce(x):
    x = x.clone(memory_format=torch.contiguous_format)  # autograd may still need what it handed us
    dist.all_reduce(x)
    return x


def all_gather(x):
    """This rank's part of the sequence [batch, time / size, width] -> the whole, [batch, time, width]."""
    whole = x.new_empty(x.shape[1] * dist.get_world_size(), x.shape[0], x.shape[2])
    dist.all_gather_single(whole, x.transpose(0, 1).contiguous())
    return whole.transpose(0, 1).contiguous()


def reduce_scatter(x):
    """[batch, time, width] -> this rank's part of the sequence of the sum, [batch, time / size, width]."""
    part = x.new_empty(x.shape[1] // dist.get_world_size(), x.shape[0], x.shape[2])
    dist.reduce_scatter_single(part, x.transpose(0, 1).contiguous())
    return part.transpose(0, 1).contiguous()


def f(x):
    """Before a layer cut by outputs: each rank's gradient is only what its own outputs had to do with x."""
    return Conjugate.apply(x, same, all_reduce)


def g(x):
    """After a layer cut by inputs: each rank has only a part of every sum."""
    return Conjugate.apply(x, all_reduce, same)


def gather(x):
    """f where the sequence is divided between layers; g in Korthikanti et al."""
    return Conjugate.apply(x, all_gather, reduce_scatter)


def scatter(x):
    """g where the sequence is divided between layers; g with a bar in Korthikanti et al."""
    return Conjugate.apply(x, reduce_scatter, all_gather)


class RowParallel(nn.Module):
    """A linear layer cut by inputs. (One cut by outputs is an nn.Linear with fewer rows, and needs no class.)"""

    def __init__(self, linear, leave):
        super().__init__()
        self.weight, self.bias, self.leave = linear.weight, linear.bias, leave

    def forward(self, x):
        return self.leave(F.linear(x, self.weight)) + self.bias  # the bias once, not once for each rank


class VocabularyParallelEmbedding(nn.Module):
    """An embedding cut by words: a rank gives zeros for the words that it does not have."""

    def __init__(self, embedding, leave):
        super().__init__()
        self.weight, self.leave = embedding.weight, leave

    def forward(self, tokens):
        row, mine = find(tokens, len(self.weight))
        return self.leave(F.embedding(row, self.weight) * mine[..., None])


def find(tokens, rows):
    """For each token its row in this rank's part of the vocabulary, or 0, and whether it is there."""
    row = tokens - dist.get_rank() * rows
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """This rank's columns of the logits [tokens, vocabulary / size], targets [tokens] -> losses [tokens].

    The logits are never gathered: three numbers for each token cross the network (Shoeybi et al., section 3).
    """

    @staticmethod
    def forward(ctx, logits, targets):
        largest = logits.max(dim=-1).values  # of all ranks: exp() must not overflow anywhere
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        row, mine = find(targets, logits.shape[-1])
        target = logits.gather(-1, row[:, None])[:, 0] * mine
        sums = torch.stack([target, logits.exp().sum(-1)])
        dist.all_reduce(sums)
        ctx.save_for_backward(logits.exp() / sums[1][:, None], row, mine)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, grad):
        softmax, row, mine = ctx.saved_tensors
        return grad[:, None] * softmax.scatter_add(-1, row[:, None], -mine[:, None].to(softmax.dtype)), None


def cross_entropy(logits, targets):
    """Mean loss: this rank's columns of the logits [batch, time, vocabulary / size] against targets [batch, time]."""
    return VocabularyParallelCrossEntropy.apply(logits.float().flatten(0, -2), targets.flatten()).mean()


class TensorParallelByHand(Strategy):
    """Every rank computes with its part of each weight; `enter` and `leave` stand around each attention and MLP."""

    enter, leave = staticmethod(f), staticmethod(g)

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        require_divisible(model, ranks.size)
        # All ranks must skip a step in which one rank's part of the gradient overflows.
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=precision == "fp16")
        self.model = model.to(ranks.device)
        self.cut = {}
        for name, parameter in self.model.named_parameters():
            dist.broadcast(parameter.detach(), src=0)  # ranks may have been seeded differently
            self.cut[parameter] = next((dim for suffix, dim in CUT.items() if name.endswith(suffix)), None)
            parameter.data = self.own(parameter.data, self.cut[parameter])  # in place, so what is tied stays tied
        self.rewire()
        self.optimizer = make_optimizer(self.model.parameters())

    def own(self, tensor, dim):
        """This rank's part of a tensor that is cut along `dim`."""
        return tensor if dim is None else tensor.chunk(self.ranks.size, dim)[self.ranks.rank].clone()

    def rewire(self):
        """Put f and g where a cut layer begins and ends."""
        embedding, blocks, head = self.model.embedding, self.model.blocks, self.model.head
        embedding.tokens = VocabularyParallelEmbedding(embedding.tokens, self.leave)
        for block in blocks:
            block.attention.heads //= self.ranks.size
            block.attention.out = RowParallel(block.attention.out, self.leave)
            block.mlp.down = RowParallel(block.mlp.down, self.leave)
        for part in (*(part for block in blocks for part in (block.attention, block.mlp)), head.out):
            part.register_forward_pre_hook(lambda module, args: self.enter(*args))

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model)
        self.complete_gradients()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.grad_norm()
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def complete_gradients(self):
        """Every rank has all of the gradient of what is whole, and its part of the gradient of what is cut."""

    def grad_norm(self):
        """The 2-norm over the whole model: parts are summed over the ranks, what every rank holds counts once."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        parts = sum(p.grad.square().sum() for p in trained if self.cut[p] is not None)
        whole = sum(p.grad.square().sum() for p in trained if self.cut[p] is None)
        dist.all_reduce(parts)
        return (parts + whole).sqrt()

    def full_state(self):
        """Every rank gathers every part. The optimizer's tensors are cut as their parameters are."""
        state = super().full_state()
        return self.for_each_tensor(state, self.whole)

    def own_part(self, state):
        return self.for_each_tensor(state, self.own)

    def whole(self, tensor, dim):
        if dim is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.ranks.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def for_each_tensor(self, state, change):
        """A state with `change(tensor, dim)` in place of each tensor, dim being that of its parameter's cut."""
        dims = {name: self.cut[p] for name, p in self.model.named_parameters(remove_duplicate=False)}
        model = {name: change(tensor, dims[name]) for name, tensor in state["model"].items()}
        optimizer = {
            name: {key: change(value, dims[name] if value.dim() else None) for key, value in values.items()}
            for name, values in state["optimizer"]["state"].items()
        }
        return state | {"model": model, "optimizer": state["optimizer"] | {"state": optimizer}}


class SequenceParallelByHand(TensorParallelByHand):
    """The same, and between attention and MLP every rank holds its part of the sequence only."""

    enter, leave = staticmethod(gather), staticmethod(scatter)

    def rewire(self):
        positions = self.model.embedding.positions
        check(self.ranks.size, {"context": len(positions.weight)})
        super().rewire()
        positions.register_forward_hook(lambda module, args, x: self.own(x, 0))

    def complete_gradients(self):
        """Norms, biases after g and positions are whole, but have seen this rank's part of the sequence only."""
        for parameter in self.model.parameters():
            if self.cut[parameter] is None and parameter.requires_grad:
                dist.all_reduce(parameter.grad)


def require_divisible(model, size):
    """Raise UserError for a GPT that cannot be cut into `size` equal parts."""
    vocabulary, width = model.embedding.tokens.weight.shape
    check(size, {"heads": model.blocks[0].attention.heads, "width": width, "vocabulary": vocabulary})


def check(size, numbers):
    for name, number in numbers.items():
        if number % size:
            raise UserError(
                f"{name} {number} cannot be cut into {size} equal parts; start a number of ranks that divides it"
            )
