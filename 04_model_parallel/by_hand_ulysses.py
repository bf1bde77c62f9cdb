"""Context parallelism by all-to-all: attention over all tokens with a part of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3). Before attention, ranks that hold all heads of a
part of the tokens exchange them for all tokens of a part of the heads; after it, they exchange them back. Start it with
--strategy ulysses --by-hand.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.errors import UserError
from course.model_parallel.by_hand_ring_attention import ContextParallel, apply_context_parallel, contiguous


class AllToAllHeads(torch.autograd.Function):
    """Cut dimension `cut` into a part for each rank of `group`, and join the parts received along dimension `join`."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.group, ctx.dims = group, (cut, join)
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        cut, join = ctx.dims
        return AllToAllHeads.apply(grad, ctx.group, join, cut), None, None, None


def ulysses_attention(q, k, v, group, causal=True, order=contiguous):
    """q, k, v [batch, heads, time / ranks, d] of this rank's tokens -> the same shape, as if over all tokens.

    The number of ranks of `group` divides the number of heads. Raises ValueError for a causal mask over tokens that do
    not lie in the order of the sequence.
    """
    if causal and order is not contiguous:
        raise ValueError("Ulysses masks tokens in the order in which the ranks hold them: use the contiguous one")
    q, k, v = (AllToAllHeads.apply(x, group, 1, 2) for x in (q, k, v))  # [batch, heads / ranks, time, d]
    return AllToAllHeads.apply(F.scaled_dot_product_attention(q, k, v, is_causal=causal), group, 2, 1)


def apply_ulysses(model, axis) -> None:
    """apply_context_parallel with Ulysses' attention, for `model(local_tokens(tokens, axis, contiguous))`.

    Raises UserError for a context or heads that cannot be cut.
    """
    require_whole_heads(model.blocks[0].attention.heads, axis.size)
    apply_context_parallel(model, axis, ulysses_attention, contiguous)


class Ulysses(ContextParallel):
    """Context parallelism whose attention is exchanged for heads. Every rank's heads see all tokens, so all ranks
    compute equally much in whatever order they hold them: the plain one serves."""

    attention, order = staticmethod(ulysses_attention), staticmethod(contiguous)

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_whole_heads(config.heads, axes["context"])

    def __init__(self, model, make_optimizer, setup):
        require_whole_heads(model.blocks[0].attention.heads, setup.mesh["context"].size())
        super().__init__(model, make_optimizer, setup)


def require_whole_heads(heads, size):
    """Raise UserError for heads that do not divide by the ranks."""
    if heads % size:
        raise UserError(
            f"--heads {heads} does not divide by {size} ranks, and Ulysses gives each rank whole heads; "
            f"use ring attention, or start a number of ranks that divides {heads}"
        )
