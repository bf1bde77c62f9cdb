"""Reinforcement learning on more GPUs is no better than on one, and the supervised runs of the same code are.

thread:   https://github.com/jingyaogong/minimind/pull/854 https://github.com/k2-fsa/icefall/issues/226
reported: `backward` sends nothing, each rank steps by purely local gradients, and rank 0's weights alone are saved
net:      replicas that are compared, after one step; bytes that are sent, counted per step
cause:    The loss is computed by `model.module`, past the wrapper. DDP makes itself ready for a backward pass in its
          own `forward`, for one each time. Without that its hooks are called, and send nothing.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, gradients, keep, mine, net, norm, one_process, sgd

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
STEPS = 4


def on_rank():
    model, seen = DistributedDataParallel(net()), Seen()
    optimizer, seen.apart, seen.local = sgd(model), [], []
    for step in range(STEPS):
        inputs, targets = mine(*examples(step))
        optimizer.zero_grad()
        own = torch.autograd.grad(F.cross_entropy(model.module(inputs), targets), list(model.parameters()))
        # right: logits = model(inputs)
        logits = model.module(inputs)  # wrong
        F.cross_entropy(logits, targets).backward()
        seen.local.append(all(torch.allclose(a, b) for a, b in zip(own, gradients(model), strict=True)))
        seen.numbers[f"norm {step}"] = norm(model)
        optimizer.step()
        weight = model.module[0].weight.detach()
        of_rank_0 = weight.clone()
        dist.broadcast(of_rank_0, src=0)
        seen.apart.append((weight - of_rank_0).abs().max().item())
    return keep(seen, model.module)


def alone():
    return one_process(STEPS)


def effect(ranks, _one):
    """The share of steps in which a rank's gradient is that of its own examples alone."""
    return sum(ranks[0].local) / STEPS
