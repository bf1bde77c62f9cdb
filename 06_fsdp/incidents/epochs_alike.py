"""It is shuffled, and yet every epoch reads the examples in the same order.

thread:   https://github.com/pytorch/pytorch/issues/31771 https://github.com/pytorch/pytorch/issues/31232
reported: each epoch has the same batches in the same order
net:      the first batch of two epochs, compared before the run
cause:    DistributedSampler shuffles by its seed and the number of the epoch, so that all ranks have one order without
          a message. Who does not tell it the epoch is always in epoch 0.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, mine, net, sgd

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
EPOCHS, SIZE, BATCH, SEED = 3, 32, 8, 7


def begin(sampler, epoch):
    """Before each epoch."""
    # right: sampler.set_epoch(epoch)
    pass  # wrong


def on_rank():
    sampler = DistributedSampler(range(SIZE), seed=SEED)
    model, seen = net(), Seen()
    optimizer, (inputs, targets) = sgd(model), examples(0, SIZE)
    seen.orders = []
    for epoch in range(EPOCHS):
        begin(sampler, epoch)
        order = torch.tensor(list(sampler))
        seen.orders.append(order.tolist())
        for number, indices in enumerate(order.split(BATCH // dist.get_world_size())):
            whole = torch.cat(gathered(indices))
            seen.numbers[f"loss {epoch}.{number}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=True)
            assert torch.equal(mine(whole)[0], indices)
    return keep(seen, model)


def gathered(indices):
    found = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    dist.all_gather(found, indices)
    return found


def alone():
    """One process, in an order that it draws by itself for each epoch."""
    model, seen = net(), Seen()
    optimizer, (inputs, targets) = sgd(model), examples(0, SIZE)
    for epoch in range(EPOCHS):
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(SEED + epoch))
        for number, whole in enumerate(order.split(BATCH)):
            seen.numbers[f"loss {epoch}.{number}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=False)
    return keep(seen, model)


def effect(ranks, _one):
    """The share of later epochs whose order is that of the first."""
    orders = ranks[0].orders
    return sum(order == orders[0] for order in orders[1:]) / (EPOCHS - 1)
