"""Muon on a divided weight: the gradients agree to six digits, and the updates do not.

thread:   https://github.com/deepspeedai/DeepSpeed/issues/8437
reported: for a random 256 x 256 gradient on two ranks, rank 0's part of the update is off by 0.5273 of its length
net:      equality with one process, of the weights after one step
cause:    Muon makes the whole gradient matrix orthogonal. A block of rows of an orthogonal matrix is not what one gets
          by making the block of rows orthogonal: within the block, rows are made orthogonal to each other, and not to
          those of the other rank. The whole matrix has to be gathered before, or the ranks have to compute together.
"""

import torch
import torch.distributed as dist

from course.fsdp.museum import Seen
from course.fsdp.toy import mine

RANKS, REPORTED, EXPECTED = 2, (0.51, 0.55), 0.0
STEPS, SIZE, RATE, BATCH = 3, 32, 0.05, 64


def orthogonal(gradient):
    """Five steps of the Newton-Schulz iteration towards the nearest orthogonal matrix (Jordan et al. 2024, Muon)."""
    x = gradient / (gradient.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x


def update_of(rows):
    """The update of this rank's rows [rows / ranks, columns], from their gradient."""
    # right: return mine(orthogonal(gathered(rows)))[0]
    return orthogonal(rows)  # wrong


def gathered(rows):
    whole = rows.new_empty(len(rows) * dist.get_world_size(), rows.shape[1])
    dist.all_gather_single(whole, rows.contiguous())
    return whole


def make_weight():
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3)) / SIZE**0.5


def gradient_of(rows, step, targets_of):
    """Of the mean square between rows @ inputs and the targets' same rows."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(SIZE, BATCH, generator=generator), torch.randn(SIZE, BATCH, generator=generator)
    return 2 * (rows @ inputs - targets_of(targets)) @ inputs.T / (SIZE * BATCH)


def on_rank():
    """A weight whose rows are divided over the ranks."""
    rows, seen = mine(make_weight())[0].clone(), Seen()
    for step in range(STEPS):
        gradient = gradient_of(rows, step, lambda targets: mine(targets)[0])
        if step == 0:
            seen.gradient, seen.update = gradient, update_of(gradient)
        rows -= RATE * update_of(gradient)
        seen.numbers[f"rows of rank {dist.get_rank()} after step {step}"] = rows.clone()
    seen.kernel = update_of(mine(random())[0])
    return seen


def random():
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0))


def alone():
    weight, seen = make_weight(), Seen()
    for step in range(STEPS):
        gradient = gradient_of(weight, step, lambda targets: targets)
        if step == 0:
            seen.gradient, seen.update = gradient, orthogonal(gradient)
        weight -= RATE * orthogonal(gradient)
        for rank, rows in enumerate(weight.chunk(RANKS)):
            seen.numbers[f"rows of rank {rank} after step {step}"] = rows.clone()
    seen.kernel = orthogonal(random())
    return seen


def apart(ranks, one, what):
    """How far the ranks' parts, put together, are from one process's, relative to the latter's length."""
    whole = torch.cat([getattr(rank, what) for rank in ranks])
    expected = getattr(one, what)
    return ((whole - expected).norm() / expected.norm()).item()


def effect(ranks, one):
    """The relative difference of the update that a random 256 x 256 gradient gives, of both parts together."""
    return apart(ranks, one, "kernel")
