"""The gradient norm differs from rank to rank, and each is smaller than that of one GPU.

thread:   https://github.com/pytorch/torchtitan/issues/766 https://github.com/pytorch/pytorch/issues/170862
          https://github.com/pytorch/pytorch/pull/126457
reported: 482 on a rank of two where the whole norm is 1,053; another number on each rank
net:      the logged norm, compared over the ranks; equality with one process, with clipping at work
cause:    The norm is that of the rank's own shard. The squares of the shards' norms have to be summed over the ranks
          before the root is taken. Clipped by its own norm, each shard shrinks by another factor, so what is applied
          is no multiple of the gradient any more.
"""

import torch
import torch.distributed as dist

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, gradients, keep, mean, mine, net

RANKS, REPORTED, EXPECTED = 2, (0.1, 0.99), 1.0
STEPS, RATE, LARGEST = 3, 0.5, 0.1


def clip(shard, largest):
    """Scale the shard [numbers / ranks] so that the norm of the whole gradient is at most `largest`."""
    square = shard.square().sum()
    # right: dist.all_reduce(square)
    square = square.clone()  # wrong
    norm = square.sqrt()
    shard *= (largest / (norm + 1e-6)).clamp(max=1)
    return norm


def on_rank(largest=LARGEST):
    """ZeRO-2: a rank keeps its shard of the mean gradient, clips it, and all gather the step."""
    model, seen = net(), Seen()
    for step in range(STEPS):
        flat, loss = gradient(model, *mine(*examples(step)))
        mean(flat, loss)
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
        shard = mine(flat)[0]
        norm = clip(shard, largest)
        dist.all_gather_single(flat, shard.clone())
        apply(model, flat)
        seen.numbers |= {f"loss {step}": loss, f"norm {step}": norm}
        seen.norms.append(norm.item())
    return keep(seen, model)


def alone(largest=LARGEST):
    model, seen = net(), Seen()
    for step in range(STEPS):
        flat, loss = gradient(model, *examples(step))
        norm = flat.norm()
        apply(model, flat * (largest / (norm + 1e-6)).clamp(max=1))
        seen.numbers |= {f"loss {step}": loss, f"norm {step}": norm}
        seen.norms.append(norm.item())
    return keep(seen, model)


def gradient(model, inputs, targets):
    """All gradients in one vector, and the loss."""
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return torch.cat([part.flatten() for part in gradients(model)]), loss.detach()


@torch.no_grad()
def apply(model, flat):
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), flat[: sum(sizes)].split(sizes), strict=True):
        parameter -= RATE * part.view_as(parameter)


def effect(ranks, one):
    """The norm that rank 0 logs, relative to the norm of one process. Raises AssertionError where the ranks log neither
    the norms of their own parts, whose squares add up to the whole, nor all of them the whole."""
    shares = [rank.norms[0] / one.norms[0] for rank in ranks]
    parts, whole = abs(sum(share**2 for share in shares) ** 0.5 - 1), max(abs(share - 1) for share in shares)
    assert min(parts, whole) < 1e-3, shares
    return shares[0]
