"""A resumed run differs from one that was not interrupted, although the checkpoint has the random state.

thread:   https://github.com/NVIDIA/Megatron-LM/pull/6858 https://github.com/radixark/miles/pull/3187
          https://github.com/huggingface/transformers/pull/11582
reported: on 252 of 256 ranks the restored random state is not the one that the rank had
net:      equality of a resumed run with one that was not interrupted, with dropout
cause:    Each rank draws its own dropout masks, so each has a random state of its own. The checkpoint holds that of one
          rank, and all take it up: from the restart on the ranks draw the same masks as each other. Only the rank that
          saved goes on as before.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, gradients, keep, mean, mine, net, sgd

RANKS, REPORTED, EXPECTED = 4, (0.75, 0.75), 0.0
STEPS, RESTART, SEED = 4, 2, 7


def restored(states, rank):
    """Of the random states of all ranks, the one with which this rank goes on."""
    # right: return states[rank]
    return states[0]  # wrong


def loss_of(model, inputs, targets, generator):
    """With dropout of a half of the hidden units, whose masks come from `generator`."""
    hidden = model[:2](inputs)
    mask = torch.rand(hidden.shape, generator=generator) < 0.5
    return F.cross_entropy(model[2](hidden * mask * 2), targets), mask


def on_rank():
    """Two steps, a restart, and two more. All weights are kept: only the random state is taken from the checkpoint."""
    rank, model, seen = dist.get_rank(), net(), Seen()
    optimizer, generator = sgd(model), torch.Generator().manual_seed(SEED + rank)
    for step in range(STEPS):
        if step == RESTART:
            states = [torch.empty_like(generator.get_state()) for _ in range(dist.get_world_size())]
            dist.all_gather(states, generator.get_state())
            generator = torch.Generator()
            generator.set_state(restored(states, rank))
            seen.kept = torch.equal(generator.get_state(), states[rank])
        optimizer.zero_grad()
        loss, seen.mask = loss_of(model, *mine(*examples(step)), generator)
        loss.backward()
        loss = loss.detach()
        mean(loss, *gradients(model))
        seen.numbers[f"loss {step}"] = loss
        optimizer.step()
    return keep(seen, model)


def alone():
    """One process that has all ranks' generators, and is not interrupted."""
    model, seen = net(), Seen()
    optimizer, generators = sgd(model), [torch.Generator().manual_seed(SEED + rank) for rank in range(RANKS)]
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = zip(*(part.chunk(RANKS) for part in examples(step)), generators, strict=True)
        loss = torch.stack([loss_of(model, *part)[0] for part in parts]).mean()
        loss.backward()
        seen.numbers[f"loss {step}"] = loss.detach()
        optimizer.step()
    return keep(seen, model)


def effect(ranks, _one):
    """The share of ranks that go on with another random state than they had."""
    return sum(not rank.kept for rank in ranks) / len(ranks)
