"""Activation checkpointing: blocks keep less of their forward pass, and compute it again before their backward pass."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from common.constants import RECOMPUTE
from common.errors import UserError
from common.model import blocks_of
from common.options import StrategyOptions, option

aten = torch.ops.aten
# Results of matrix products are expensive to compute, and are kept; all else is computed again. That includes the
# copies of their inputs that autocast makes in bf16, which are cheap.
KEPT = {aten.mm.default, aten.addmm.default, aten.bmm.default}


@dataclass
class RecomputeOptions(StrategyOptions):
    """The option of every strategy that calls recompute_blocks."""

    recompute: str = option("none", "what the GPT's blocks compute again for the backward pass", RECOMPUTE)

    def require(self, config) -> None:
        """Raise UserError where there are no blocks."""
        if self.recompute != "none" and config.task == "images":
            raise UserError(
                f"--recompute {self.recompute} is for the GPT's blocks, not for --task images; leave it out, or use "
                f"--task text"
            )


def recompute_blocks(model: nn.Module, kind: str) -> nn.Module:
    """Make each of a model's blocks keep its input only ("full"), or that and what matrix products gave ("selective").
    Returns the model.

    The random state of the forward pass is restored for the second one, so that dropout drops the same elements.
    """
    keep: dict[str, Any] = {
        "full": {},
        "selective": {"context_fn": partial(create_selective_checkpoint_contexts, policy)},
    }
    if kind in keep:
        for block in blocks_of(model):
            # In place of the method, so that hooks on the block, such as gathering its parameters, stay outside.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **keep[kind])
    return model


def policy(_context, operator, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
