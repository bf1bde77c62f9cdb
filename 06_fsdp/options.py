"""The options of this chapter's strategies."""

from dataclasses import dataclass

from common.options import option
from common.recompute import RecomputeOptions


@dataclass
class Offload(RecomputeOptions):
    """Of those with fully_shard."""

    offload: bool = option(False, "keep shards and optimizer in host memory")


@dataclass
class Budget(Offload):
    """Of those whose memory PyTorch's tracker foretells (batch_size.py)."""

    find_batch_size: bool = option(False, "tell the largest --batch-size within --memory-budget, and train nothing")
    memory_budget: float = option(0.0, "GiB that each rank may use, with --find-batch-size")
