"""The options of this chapter's strategies."""

from dataclasses import dataclass

from common.options import option
from common.recompute import RecomputeOptions


@dataclass
class Offload(RecomputeOptions):
    """The options of the strategies with fully_shard."""

    offload: bool = option(False, "keep shards and optimizer in host memory")


@dataclass
class Budget(Offload):
    """The options of the strategies whose memory PyTorch's tracker predicts (batch_size.py)."""

    find_batch_size: bool = option(False, "tell the largest --batch-size within --memory-budget, and train nothing")
    memory_budget: float = option(0.0, "GiB that each rank may use, with --find-batch-size")

    @property
    def trains(self):
        return not self.find_batch_size
