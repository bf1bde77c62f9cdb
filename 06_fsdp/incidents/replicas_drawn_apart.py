"""With hybrid sharding each replica is another model, and a restart makes it another run.

thread:   https://github.com/allenai/OLMo-core/pull/319 https://github.com/allenai/OLMo-core/pull/307
reported: replicas have completely different parameters; a restart, with the first one's, helped the bad run
net:      replicas that are compared, before the first step
cause:    Every rank draws its shard from a seed of its own, which is right for the ranks that share one copy. Ranks
          that have the same shard of two copies have to draw the same numbers. Unlike DDP, `fully_shard` sends no
          weights when it begins, and compares none.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import CLASSES, RATE, WIDTH, examples, mean, mine

RANKS, REPORTED, EXPECTED = 4, (2.0, 2.0), 1.0  # two replicas of two shards
STEPS, RESTART, SHARDS, SEED = 12, 8, 2, 7


def seed_of(rank):
    """From which seed a rank draws its shard."""
    # right: return SEED + rank % SHARDS
    return SEED + rank  # wrong


def draw(seed):
    """A shard: some of the columns of the one weight, [CLASSES, WIDTH / SHARDS]."""
    return torch.randn(CLASSES, WIDTH // SHARDS, generator=torch.Generator().manual_seed(seed))


def loss_and_gradient(weight, inputs, targets):
    weight = weight.clone().requires_grad_()
    loss = F.cross_entropy(inputs @ weight.T, targets)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def on_rank(restart=RESTART):
    rank, seen = dist.get_rank(), Seen()
    shard, seen.models = draw(seed_of(rank)), []
    seen.apart = []
    for step in range(STEPS):
        shards = [torch.empty_like(shard) for _ in range(RANKS)]
        dist.all_gather(shards, shard)
        if step == restart:  # the checkpoint has the shards of the first replica
            shards = shards[:SHARDS] * (RANKS // SHARDS)
            shard = shards[rank].clone()
        seen.models.append(len({tuple(other.flatten().tolist()) for other in shards[rank % SHARDS :: SHARDS]}))
        seen.apart.append((shards[0] - shards[SHARDS]).norm().item())
        first = rank // SHARDS * SHARDS
        loss, gradient = loss_and_gradient(torch.cat(shards[first : first + SHARDS], dim=1), *mine(*examples(step % 2)))
        mean(loss, gradient)
        seen.numbers[f"loss {step}"] = loss
        shard -= RATE * gradient.chunk(SHARDS, dim=1)[rank % SHARDS]
    seen.numbers[f"shard {rank % SHARDS}"] = shard
    return seen


def alone():
    """One process, with the whole weight, put together from the draws of one replica."""
    weight, seen = torch.cat([draw(SEED + number) for number in range(SHARDS)], dim=1), Seen()
    for step in range(STEPS):
        loss, gradient = loss_and_gradient(weight, *examples(step % 2))
        seen.numbers[f"loss {step}"] = loss
        weight = weight - RATE * gradient
    return Seen(seen.numbers | {f"shard {number}": part for number, part in enumerate(weight.chunk(SHARDS, dim=1))})


def effect(ranks, _one):
    """How many different models there are, just before the restart."""
    return float(ranks[0].models[RESTART - 1])
