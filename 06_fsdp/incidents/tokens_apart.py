"""Gradient accumulation has been repaired, and two ranks still don't train as one does.

thread:   https://github.com/huggingface/transformers/issues/34242 https://github.com/huggingface/transformers/pull/34373
reported: tokens are averaged over each rank and then over the ranks, which are separate means
net:      equality with one process, in the first step, with different numbers of tokens on the ranks
cause:    Each rank divides by its own number of tokens, and DDP takes the mean of the ranks' gradients. A token of the
          rank that has few of them counts for more. The divisor has to be (tokens on all ranks) / (number of ranks).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, net, norm, sgd

RANKS, REPORTED, EXPECTED = 2, (3.666, 3.667), 1.0
STEPS = 3
TOKENS = [[4, 8], [28, 16]]  # of each micro-batch, on each rank


def divisor(tokens):
    """By what this rank divides the sum over its tokens. DDP takes the mean over the ranks afterwards."""
    total = torch.tensor(float(tokens))
    # right: dist.all_reduce(total)
    total *= dist.get_world_size()  # wrong
    return total / dist.get_world_size()


def on_rank(tokens=TOKENS):
    model, rank, seen = DistributedDataParallel(net()), dist.get_rank(), Seen()
    optimizer, before = sgd(model), sum(map(sum, tokens[:rank]))
    here = sum(tokens[rank])
    seen.weight = 1 / (divisor(here) * dist.get_world_size()).item()  # of one token in the step
    for step in range(STEPS):
        inputs, targets = (part[before : before + here].split(tokens[rank]) for part in examples(step, total(tokens)))
        optimizer.zero_grad()
        loss = torch.zeros(())
        for x, y in zip(inputs, targets, strict=True):
            part = F.cross_entropy(model(x), y, reduction="sum") / divisor(here)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        seen.numbers |= {f"loss {step}": loss / dist.get_world_size(), f"norm {step}": norm(model)}
        optimizer.step()
    return keep(seen, model.module)


def total(tokens):
    return sum(map(sum, tokens))


def alone(tokens=TOKENS):
    """One process, the mean over all tokens."""
    model, seen = net(), Seen()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = examples(step, total(tokens))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": norm(model)}
        optimizer.step()
    return keep(seen, model)


def effect(ranks, _one):
    """How many times as much a token of the rank with few tokens counts as one of the other rank."""
    return ranks[0].weight / ranks[1].weight
