"""Context parallelism by all-to-all: attention over all tokens with a part of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509, section 3). Before attention, ranks that hold all heads of a
part of the tokens exchange them for all tokens of a part of the heads; after it, they exchange them back. Start it with
--strategy ulysses --by-hand.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.errors import UserError
from course.model_parallel import by_hand_ring_attention as context


class AllToAll(torch.autograd.Function):
    """Cut dimension `cut` into a part for each rank, and join the parts received along dimension `join`."""

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = cut, join
        parts = torch.stack(x.chunk(dist.get_world_size(), cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        cut, join = ctx.dims
        return AllToAll.apply(grad, join, cut), None, None


def ulysses_attention(q, k, v, causal=True):
    """q, k, v [batch, heads, time / ranks, d] of this rank's tokens -> the same shape, as if over all tokens.

    Rank r holds the r-th part of the sequence, and the number of ranks divides the number of heads.
    """
    q, k, v = (AllToAll.apply(x, 1, 2) for x in (q, k, v))  # [batch, heads / ranks, time, d]
    return AllToAll.apply(F.scaled_dot_product_attention(q, k, v, is_causal=causal), 2, 1)


class Ulysses(context.ContextParallel):
    """Context parallelism whose attention is exchanged for heads. Every rank's heads see all tokens, so all ranks
    compute equally much in whatever order they hold them: the plain one serves."""

    attention, order = staticmethod(ulysses_attention), staticmethod(context.contiguous)

    @staticmethod
    def check(context_length, heads, size):
        """Raise UserError for sequences or heads that do not divide."""
        context.ContextParallel.check(context_length, heads, size)
        if heads % size:
            raise UserError(
                f"--heads {heads} does not divide by {size} ranks, and Ulysses gives each rank whole heads; "
                f"use ring attention, or start a number of ranks that divides {heads}"
            )
