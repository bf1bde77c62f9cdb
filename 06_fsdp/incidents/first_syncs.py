"""With gradient accumulation, more ranks, and fewer messages as intended, the model is worse.

thread:   https://github.com/modelscope/FunASR/pull/3472 https://github.com/karpathy/build-nanogpt/pull/30
reported: gradients of 4.0 and 7.0 on two CPU ranks, where 5.5 is right on both
net:      replicas that are compared, after one step; equality with one process, with accumulation
cause:    Inside `no_sync` gradients are only added up. The first forward and backward pass outside of it averages
          over the ranks what has been added up by then, and the *forward* decides, so it must be on the same side as
          its backward. It has to be the *last* micro-batch of a step. With the first one, what comes after it stays
          with its rank, and each rank steps by itself.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, mine, net, norm, one_process, sgd

RANKS, REPORTED, EXPECTED = 2, (3.0, 3.0), 0.0
STEPS, MICRO = 3, 2


def syncs(number):
    """Are the gradients averaged over the ranks in this micro-batch, counted from 0?"""
    # right: return (number + 1) % MICRO == 0
    return number % MICRO == 0  # wrong


def accumulate(model, losses):
    """The backward passes of a step's micro-batches, of which one sends messages. `losses` are to be called."""
    for number, loss in enumerate(losses):
        with contextlib.nullcontext() if syncs(number) else model.no_sync():
            loss().backward()


def of_the_thread():
    """Inputs of our own that give its numbers: one weight, whose gradient is its input."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    inputs = [[1.0, 2.0], [3.0, 5.0]][dist.get_rank()]
    accumulate(model, [lambda x=x: model(torch.tensor([[x]])).sum() for x in inputs])
    return model.module.weight.grad.item()


def on_rank():
    model, seen = DistributedDataParallel(net()), Seen()
    optimizer, seen.gradient = sgd(model), of_the_thread()
    for step in range(STEPS):
        inputs, targets = (part.chunk(MICRO) for part in mine(*examples(step)))
        optimizer.zero_grad()
        pairs = zip(inputs, targets, strict=True)
        accumulate(model, [lambda x=x, y=y: F.cross_entropy(model(x), y) / MICRO for x, y in pairs])
        seen.numbers[f"norm {step}"] = norm(model)
        optimizer.step()
    return keep(seen, model.module)


def alone():
    return one_process(STEPS)


def effect(ranks, _one):
    """How far the two ranks' gradients of the thread's reproduction are apart."""
    return ranks[1].gradient - ranks[0].gradient
