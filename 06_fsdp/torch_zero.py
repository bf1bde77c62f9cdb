"""ZeRO stages 1 and 2 with PyTorch's own parts."""

from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ddp.DataParallel):
    """Stage 1: DistributedDataParallel, with ZeroRedundancyOptimizer in the optimizer's place.

    Whole parameters are dealt out to the ranks. Each keeps the optimizer state of its own, steps them, and broadcasts
    them. The state is put together on rank 0; the others return empty dictionaries.
    """

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(model, make_optimizer, ranks, precision, max_norm)
        self.make_optimizer = make_optimizer
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), make_optimizer)

    def full_state(self):
        self.optimizer.consolidate_state_dict(to=0)
        if self.ranks.rank > 0:
            return {"model": {}, "optimizer": {}, "scaler": self.scaler.state_dict()}
        sharded, self.optimizer = self.optimizer, self.make_optimizer(self.model.parameters())
        self.optimizer.load_state_dict(sharded.state_dict())
        state = super().full_state()
        self.optimizer = sharded
        return state

    def load_full_state(self, state):
        self.optimizer.zero_grad()  # set_state_dict gives a new optimizer its state only where there is no gradient
        sharded, self.optimizer = self.optimizer, self.make_optimizer(self.model.parameters())
        super().load_full_state(state)
        sharded.load_state_dict(self.optimizer.state_dict())
        self.optimizer = sharded


class ShardedGradients(FullyShard):
    """Stage 2: parameters stay gathered from the forward pass until the backward pass is over."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.set_reshard_after_forward(False)
