"""After a restart all ranks read the same examples, and more ranks bring nothing.

thread:   https://github.com/huggingface/datasets/issues/8568
reported: after `skip`, every rank reads the whole dataset, so each example is read as often as there are ranks
net:      the examples that two ranks read, compared: none is common
cause:    Splitting is remembered and done when reading begins, by asking each layer of the stream for its part. The
          layer that skips gives itself for an answer, with everything beneath it, so nobody splits.
"""

import torch
import torch.distributed as dist

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (2.0, 2.0), 1.0
SHARDS, SIZE = 4, 4  # files, and the examples of each


class Files:
    """The examples of some files, one file after the other."""

    def __init__(self, numbers=range(SHARDS)):
        self.numbers = numbers

    def part(self, rank, size):
        """What one rank reads: files given out in turn, as `datasets` gives them."""
        return Files(self.numbers[rank::size])

    def __iter__(self):
        return (file * SIZE + place for file in self.numbers for place in range(SIZE))


class Skip:
    """A stream without its first examples, as one begins again after a restart."""

    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def part(self, rank, size):
        # right: return Skip(self.stream.part(rank, size), self.count)
        return self  # wrong

    def __iter__(self):
        return (example for number, example in enumerate(self.stream) if number >= self.count)


def read(rank, size, skip):
    """The examples that a rank reads, when each rank has read `skip` before the restart."""
    stream = Skip(Files(), skip) if skip else Files()
    return list(stream.part(rank, size))


def on_rank(skip=1):
    """One example is read by each rank, then all restart, and read the rest."""
    rank, size, model, seen = dist.get_rank(), dist.get_world_size(), net(), Seen()
    optimizer, (inputs, targets) = sgd(model), examples(0, SHARDS * SIZE)
    seen.read = read(rank, size, skip)
    order = [read(other, size, skip) for other in range(size)]
    for step, whole in enumerate(map(list, zip(*order, strict=True))):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=True)
    return keep(seen, model)


def alone(skip=1):
    """One process, which reads from one of the even and one of the odd files, and begins where it stopped."""
    streams = torch.arange(SHARDS * SIZE).view(SHARDS // RANKS, RANKS, SIZE).transpose(0, 1).reshape(RANKS, -1)
    model, seen = net(), Seen()
    optimizer, (inputs, targets) = sgd(model), examples(0, SHARDS * SIZE)
    for step, whole in enumerate(streams[:, skip:].T):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=False)
    return keep(seen, model)


def effect(ranks, _one):
    """How often an example is read, that is read at all, after the restart."""
    read = [example for rank in ranks for example in rank.read]
    return len(read) / len(set(read))
