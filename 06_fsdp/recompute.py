"""Recomputation: blocks keep less of their forward pass, and do it again, in part or whole, before their backward."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KINDS = ("none", "selective", "full")
aten = torch.ops.aten
# Results of matrix products are dear to compute, and kept; all else is done again. Autocast makes bf16 of their inputs
# once more, which is cheap.
DEAR = {aten.mm.default, aten.addmm.default, aten.bmm.default}


def recompute(model: nn.Module, kind: str) -> None:
    """Make each of a GPT's blocks keep its input only ("full"), or that and what matrix products gave ("selective")."""
    how = {"full": {}, "selective": {"context_fn": partial(create_selective_checkpoint_contexts, policy)}}.get(kind)
    if how is not None:
        for block in model.blocks:
            # In place of the method, so that hooks on the block, such as gathering its parameters, stay outside.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **how)


def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in DEAR else CheckpointPolicy.PREFER_RECOMPUTE
