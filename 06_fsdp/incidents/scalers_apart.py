"""With float16 and loss scaling, replicas drift apart some time after an overflow on one rank.

thread:   https://github.com/pytorch/pytorch/issues/136009
reported: scaling factors differ between processes, and then unscaled gradients do
net:      replicas that are compared; the loss scale, logged by every rank
cause:    The scale is halved where an overflow is seen, and it was looked for in the rank's own gradients, before they
          were summed. In that step rank 0 skips and sends zeros, and rank 1 steps by half the gradient, which alone
          parts the replicas.
          From then on the ranks send gradients of different scales, and each divides the sum by its own.
          All ranks have to decide alike: on the summed gradients, or on a flag that is reduced.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, gradients, keep, mean, mine, net, sgd

RANKS, REPORTED, EXPECTED = 2, (2.0, 2.0), 1.0
STEPS, OVERFLOW = 4, 1  # the step in which rank 0 has an overflow


def overflowed(model):
    """Is there an infinite gradient? Then all skip the step and halve the scale."""
    found = torch.stack([~gradient.isfinite().all() for gradient in gradients(model)]).any().float()
    # right: dist.all_reduce(found)
    found = found.clone()  # wrong
    return bool(found)


def on_rank():
    model, scale, seen = net(), 1024.0, Seen()
    optimizer, seen.scales = sgd(model), []
    for step in range(STEPS):
        inputs, targets = mine(*examples(step))
        optimizer.zero_grad()
        (F.cross_entropy(model(inputs), targets) * scale).backward()
        if step == OVERFLOW and dist.get_rank() == 0:
            model[0].weight.grad[0, 0] = float("inf")
        skip = overflowed(model)
        if skip:
            scale /= 2
            for gradient in gradients(model):
                gradient.zero_()
        mean(*gradients(model))
        if not skip:
            for gradient in gradients(model):
                gradient /= scale
            optimizer.step()
        seen.scales.append(scale)
        seen.numbers[f"bias {step}"] = model[2].bias.detach().clone()
    return keep(seen, model)


def alone():
    """One process, which leaves out the step with the overflow."""
    model, seen = net(), Seen()
    optimizer = sgd(model)
    for step in range(STEPS):
        if step != OVERFLOW:
            inputs, targets = examples(step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        seen.numbers[f"bias {step}"] = model[2].bias.detach().clone()
    return keep(seen, model)


def effect(ranks, _one):
    """How many times as large the one rank's scale is as the other's, in the end."""
    return ranks[1].scales[-1] / ranks[0].scales[-1]
