"""The accuracy on the test set depends on the number of GPUs.

thread:   https://github.com/roboflow/rf-detr/issues/1507 https://github.com/pytorch/pytorch/issues/25162
          https://github.com/pytorch/vision/issues/4559
reported: 21 images on two GPUs are counted as 22
net:      the number of examples that were counted, beside the number that there are
cause:    DistributedSampler gives all ranks equally many examples, since in training a rank with one more would wait in
          vain. Where they don't divide, it repeats the first ones. In a test each repeated one counts twice.
          The fix below repeats none, so ranks may have unequally many batches, and would hang where the forward pass
          communicates, as under `fully_shard`. There, pad as before and leave the repeated ones out of the sums.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from course.fsdp.museum import Seen
from course.fsdp.toy import WIDTH, net

RANKS, REPORTED, EXPECTED = 2, (22.0, 22.0), 21.0
SIZE = 21


def part(rank, size):
    """The numbers of the examples that this rank tests."""
    # right: return list(range(SIZE))[rank::size]
    return list(DistributedSampler(range(SIZE), size, rank, shuffle=False))  # wrong


def scores(indices):
    """Is the answer right? For each example, 1 or 0; those of the first ones happen to be wrong."""
    generator = torch.Generator().manual_seed(0)
    inputs, model = torch.randn(SIZE, WIDTH, generator=generator), net()
    targets = model(inputs).argmax(dim=-1)
    targets[:5] = (targets[:5] + 1) % 3
    return (model(inputs).argmax(dim=-1) == targets)[indices].float()


def counted(indices):
    return torch.tensor([scores(indices).sum(), float(len(indices))])


def on_rank():
    both = counted(part(dist.get_rank(), dist.get_world_size()))
    dist.all_reduce(both)
    return Seen({"accuracy": both[0] / both[1], "examples": both[1]})


def alone():
    right, number = counted(list(range(SIZE)))
    return Seen({"accuracy": right / number, "examples": number})


def accuracies(sizes):
    """(ranks, examples that are counted, accuracy) for numbers of ranks."""
    for size in sizes:
        right, number = sum(counted(part(rank, size)) for rank in range(size))
        yield size, int(number), (right / number).item()


def effect(ranks, _one):
    """How many examples are counted, of 21."""
    return ranks[0].numbers["examples"].item()
