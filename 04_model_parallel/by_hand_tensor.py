"""Tensor parallelism from collectives: every rank holds a part of every large weight, and all read the same batch.

The same interface as distributed_training.py; start it with --by-hand. The layers are cut as in Shoeybi et al.,
"Megatron-LM" (2019), section 3; what sequence parallelism puts in place of the all-reduces is from Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_together, broadcast_module, global_norm, leave_meta
from common.mesh import Axis, axis
from common.strategy import require_gradients
from course.model_parallel.division import DividedModel, require_divisible

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
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.conjugate = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.conjugate(grad, ctx.group), None, None, None


def same(x, _group):
    return x.view_as(x)


def all_reduce(x, group):
    x = x.clone(memory_format=torch.contiguous_format)  # autograd may still need what it handed us
    dist.all_reduce(x, group=group)
    return x


def all_gather(x, group):
    """This rank's part of the sequence [batch, time / size, width] -> the whole, [batch, time, width]."""
    whole = x.new_empty(x.shape[1] * dist.get_world_size(group), x.shape[0], x.shape[2])
    dist.all_gather_single(whole, x.transpose(0, 1).contiguous(), group=group)
    return whole.transpose(0, 1).contiguous()


def reduce_scatter(x, group):
    """[batch, time, width] -> this rank's part of the sequence of the sum, [batch, time / size, width].

    The collectives divide the first dimension, so each of these two functions copies twice; with activations that are
    kept as [time, batch, width], as in Megatron-LM, neither copies.
    """
    part = x.new_empty(x.shape[1] // dist.get_world_size(group), x.shape[0], x.shape[2])
    dist.reduce_scatter_single(part, x.transpose(0, 1).contiguous(), group=group)
    return part.transpose(0, 1).contiguous()


def f(x, group):
    """Before a layer cut by outputs: each rank's gradient is only what its own outputs had to do with x.

    Megatron-LM's code calls it copy_to_tensor_model_parallel_region.
    """
    return Conjugate.apply(x, group, same, all_reduce)


def g(x, group):
    """After a layer cut by inputs: each rank has only a part of every sum.

    Megatron-LM's code calls it reduce_from_tensor_model_parallel_region.
    """
    return Conjugate.apply(x, group, all_reduce, same)


def all_gather_sequence(x, group):
    """f where the sequence is divided between layers; g in Korthikanti et al."""
    return Conjugate.apply(x, group, all_gather, reduce_scatter)


def reduce_scatter_sequence(x, group):
    """g where the sequence is divided between layers; g with a bar in Korthikanti et al."""
    return Conjugate.apply(x, group, reduce_scatter, all_gather)


class RowParallel(nn.Module):
    """A linear layer cut by inputs. (One cut by outputs is an nn.Linear with fewer rows, and needs no class.)"""

    def __init__(self, linear, leave):
        super().__init__()
        self.weight, self.bias, self.leave = linear.weight, linear.bias, leave

    def forward(self, x):
        return self.leave(F.linear(x, self.weight)) + self.bias  # the bias once, not once for each rank


class VocabularyParallelEmbedding(nn.Module):
    """An embedding cut by words: a rank gives zeros for the words that it does not have."""

    def __init__(self, embedding, rank, leave):
        super().__init__()
        self.weight, self.rank, self.leave = embedding.weight, rank, leave

    def forward(self, tokens):
        row, mine = find(tokens, len(self.weight), self.rank)
        return self.leave(F.embedding(row, self.weight) * mine[..., None])


def find(tokens, rows, rank):
    """For each token its row in a rank's part of the vocabulary, of `rows` words, or 0, and whether it is there."""
    row = tokens - rank * rows
    mine = (row >= 0) & (row < rows)
    return row.where(mine, 0), mine


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """This rank's columns of the logits [tokens, vocabulary / size], targets [tokens] -> losses [tokens].

    The logits are never gathered: three numbers for each token cross the network (Shoeybi et al., section 3).
    """

    @staticmethod
    def forward(ctx, logits, targets, group):
        largest = logits.max(dim=-1).values.float()  # of all ranks: exp() must not overflow anywhere
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[:, None]  # float32, also of logits in 16 bits
        row, mine = find(targets, logits.shape[-1], dist.get_rank(group))
        target = logits.gather(-1, row[:, None])[:, 0] * mine
        softmax = logits.exp_()  # in place: the logits are the largest tensors of many models
        sums = torch.stack([target, softmax.sum(-1)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(softmax.div_(sums[1][:, None]), row, mine)
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx, grad):
        softmax, row, mine = ctx.saved_tensors
        softmax.scatter_add_(-1, row[:, None], -mine[:, None].to(softmax.dtype))  # in place: nobody needs it again
        return softmax.mul_(grad[:, None]), None, None


def cross_entropy(logits, targets, group):
    """Mean loss: this rank's columns of the logits [batch, time, vocabulary / size] against targets [batch, time].
    The same scalar on all ranks of the group."""
    return VocabularyParallelCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), group).mean()


def apply_tensor_parallel(model, axis: Axis, sequence=False, source=None) -> dict[nn.Parameter, tuple[int, Axis]]:
    """Cut the weights of a GPT over the ranks of `axis`, in place, and put f and g where a cut layer begins and ends.

    Called before the model is moved to a device, so that only this rank's part is moved. The model then gives this
    rank's columns of the logits, for `cross_entropy`. Every parameter stays the same object, so what is tied stays
    tied. With `sequence`, each rank has its part of the sequence only between attention and MLP (sequence parallelism).
    `source` is a process group from whose rank 0 the weights are taken, one after the other, each of which is cut
    before the next one comes; by default the model has them already.

    Returns each parameter that is cut, with the dimension and the axis. The gradients of some others may have to be
    summed: see `partial_gradients`. Raises UserError for a GPT that cannot be cut into equal parts.
    """
    require_divisible(model, axis.size, sequence)
    cut: dict[nn.Parameter, tuple[int, Axis]] = {}
    if source is None:
        for name, parameter in model.named_parameters():
            cut |= cut_weight(name, parameter, axis)
    else:
        broadcast_module(model, source, cut=lambda name, parameter: cut.update(cut_weight(name, parameter, axis)))
    parallelize_layers(model, axis, sequence)
    return cut


def parallelize_layers(model, axis, sequence=False):
    """Put f and g, or what sequence parallelism has in their place, into a GPT whose weights have been cut."""
    enter, leave = (all_gather_sequence, reduce_scatter_sequence) if sequence else (f, g)
    enter, leave = (functools.partial(function, group=axis.group) for function in (enter, leave))
    embedding, blocks, head = model.embedding, model.blocks, model.head
    embedding.tokens = VocabularyParallelEmbedding(embedding.tokens, axis.rank, leave)
    for block in blocks:
        block.attention.heads //= axis.size
        block.attention.out = RowParallel(block.attention.out, leave)
        block.mlp.down = RowParallel(block.mlp.down, leave)
    for part in (*(part for block in blocks for part in (block.attention, block.mlp)), head.out):
        part.register_forward_pre_hook(lambda _module, args: enter(*args))
    if sequence:
        embedding.positions.register_forward_hook(lambda _module, _args, x: own(x, 0, axis))


def cut_weight(name, parameter, axis):
    """Leave this rank's part of a parameter, in place, if it is one that is cut: {parameter: (dimension, axis)}."""
    dim = next((dim for suffix, dim in CUT.items() if name.endswith(suffix)), None)
    if dim is None:
        return {}
    parameter.data = own(parameter.data, dim, axis)
    return {parameter: (dim, axis)}


def own(tensor, dim, axis):
    """This rank's part of a tensor that is cut along `dim`."""
    return tensor.chunk(axis.size, dim)[axis.rank].clone()


def partial_gradients(model, cut, sequence=False) -> list[nn.Parameter]:
    """The trainable parameters of which each rank, after a backward pass, has only a part of the gradient.

    What is cut has all of its gradient, and with f and g so has the rest. Between reduce-scatter and all-gather, norms,
    biases and positions have seen this rank's part of the sequence only: their gradients must be summed over the axis.
    """
    return [p for p in model.parameters() if p.requires_grad and p not in cut] if sequence else []


class TensorParallelByHand(DividedModel):
    """Every rank computes with its part of each weight, and sums what crosses from one part to the others."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.axis = axis(self.mesh, "tensor")
        self.group = self.axis.group
        self.scaler = self.make_scaler(self.group)
        model = leave_meta(model, torch.device("cpu"))
        self.cut = apply_tensor_parallel(model, self.axis, self.sequence, self.group)
        self.model = model.to(self.device)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets, self.group) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model)
        partial = partial_gradients(self.model, self.cut, self.sequence)
        all_reduce_together([parameter.grad for parameter in partial], self.group)
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.grad_norm()
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def evaluate(self, inputs, targets):
        with torch.no_grad(), self.autocast():
            return cross_entropy(self.model(inputs), targets, self.group)

    def grad_norm(self):
        """The 2-norm over the whole model: parts are summed over the ranks, what every rank holds counts once."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parts = [parameter.grad for parameter in trained if parameter in self.cut]
        whole = [parameter.grad for parameter in trained if parameter not in self.cut]
        return global_norm([(parts, [self.group]), (whole, [])], self.device)


class SequenceParallelByHand(TensorParallelByHand):
    """The same, and between attention and MLP every rank holds its part of the sequence only."""

    sequence = True
