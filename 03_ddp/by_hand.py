"""Data parallelism from one collective: average the gradients after the backward pass, parameter by parameter.

The same interface as distributed_training.py; start it with --by-hand.
"""

import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from common.model import cross_entropy
from common.strategy import Strategy


class DataParallelByHand(Strategy):
    """Every rank reads one slice of the global batch; an all-reduce per parameter averages the gradients."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.model = model.to(ranks.device)
        for tensor in self.model.state_dict().values():  # ranks may have been seeded differently
            dist.broadcast(tensor, src=0)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.average_gradients()
        dist.all_reduce(loss)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.data_size, grad_norm

    def average_gradients(self):
        """The mean over the ranks of the means over their equal slices is the mean over the global batch."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.data_size
