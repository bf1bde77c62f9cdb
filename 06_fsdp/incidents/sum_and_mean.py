"""The same loss, the same learning rate, more ranks, and training is slower with each of them.

thread:   https://github.com/pytorch/pytorch/issues/37359 https://github.com/facebookresearch/fairseq/issues/494
          https://github.com/neuralmagic/sparseml/pull/135
reported: gradients are averaged over the ranks, so those of a loss that is a sum are too small by their number
net:      equality with one process, in the first step, with SGD
cause:    DDP divides by the number of ranks, which is right for a loss that is a mean over the rank's examples. Where
          the loss is their sum, the gradient of the whole batch is the ranks' sum, and the division has to be undone.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, mine, net, norm

RANKS, REPORTED, EXPECTED = 2, (0.4999, 0.5001), 1.0
STEPS, RATE = 3, 0.02


def loss_of(logits, targets):
    """The sum over this rank's examples, as one process has it over all of them."""
    loss = F.cross_entropy(logits, targets, reduction="sum")
    # right: return loss * dist.get_world_size()
    return loss * 1  # wrong


def optimizer_of(model, name):
    return getattr(torch.optim, name)(model.parameters(), lr=RATE)


def on_rank(optimizer="SGD", steps=STEPS):
    model, seen = DistributedDataParallel(net()), Seen()
    stepping = optimizer_of(model, optimizer)
    for step in range(steps):
        inputs, targets = mine(*examples(step % STEPS))
        stepping.zero_grad()
        loss_of(model(inputs), targets).backward()
        seen.numbers[f"norm {step}"] = norm(model)
        stepping.step()
    return keep(seen, model.module)


def alone(optimizer="SGD", steps=STEPS):
    model, seen = net(), Seen()
    stepping = optimizer_of(model, optimizer)
    for step in range(steps):
        inputs, targets = examples(step % STEPS)
        stepping.zero_grad()
        F.cross_entropy(model(inputs), targets, reduction="sum").backward()
        seen.numbers[f"norm {step}"] = norm(model)
        stepping.step()
    return keep(seen, model)


def effect(ranks, one):
    """How long the gradient of the first step is, relative to that of one process."""
    return (ranks[0].numbers["norm 0"] / one.numbers["norm 0"]).item()
