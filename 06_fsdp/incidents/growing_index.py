"""Throughput drops again and again, the more steps are planned the deeper and the more often.

thread: https://huggingface.co/spaces/HuggingFaceTB/smol-training-playbook
net:    bytes of the loader, at two numbers of planned steps; the mean speed beside the median
cause:  The loader writes down in advance which example every step of the whole run will read. What it needs is one
        epoch's order at a time. No number is wrong, so nothing that compares numbers can see it; the memory that the
        index takes grows with the number of planned steps, and a short test run stays small.
"""

import torch
import torch.distributed as dist

from course.fsdp.museum import Seen

RANKS, REPORTED, EXPECTED = 2, (9.9, 10.1), 1.0
STEPS, BATCH, SIZE, SEED = 6, 8, 512, 7  # global batch, examples


class Index:
    """Which examples each step of a training run reads: SIZE examples, shuffled anew in each epoch."""

    def __init__(self, steps):
        self.orders, self.steps = {}, steps
        # right: self.ahead = 1
        self.ahead = steps  # wrong

    def batch(self, step):
        """The examples of a step, for which the index of `ahead` steps, from this one's epoch on, is in memory."""
        first, last = step * BATCH // SIZE, min(step + self.ahead, self.steps) * BATCH - 1
        wanted = range(first if self.ahead == 1 else 0, last // SIZE + 1)
        self.orders = {epoch: self.orders[epoch] if epoch in self.orders else order(epoch) for epoch in wanted}
        places = range(step * BATCH, (step + 1) * BATCH)
        return torch.stack([self.orders[place // SIZE][place % SIZE] for place in places])

    @property
    def bytes(self):
        return sum(order.nbytes for order in self.orders.values())


def order(epoch):
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(SEED + epoch))


def on_rank():
    index, rank, size = Index(STEPS), dist.get_rank(), dist.get_world_size()
    return Seen({f"batch {step}, rank {rank}": index.batch(step).chunk(size)[rank] for step in range(STEPS)})


def alone():
    whole = torch.cat([order(epoch) for epoch in range(STEPS * BATCH // SIZE + 1)])
    batches = enumerate(whole[: STEPS * BATCH].split(BATCH))
    return Seen({f"batch {step}, rank {rank}": part for step, b in batches for rank, part in enumerate(b.chunk(RANKS))})


def memory(planned, step=0):
    """Bytes of the index of a run of so many planned steps, in one of its steps."""
    index = Index(planned)
    index.batch(step)
    return index.bytes


def effect(*_):
    """How many times as many bytes the index of a run of 10,240 steps has as that of one of 1,024."""
    return memory(10_240) / memory(1_024)
