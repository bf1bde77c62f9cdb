"""Under FSDP the loss stays where it began, the gradients are there, and no step changes a weight.

thread:   https://github.com/pytorch/pytorch/issues/149205 https://github.com/huggingface/accelerate/issues/3256
          https://github.com/intelligent-machine-learning/dlrover/issues/584
reported: the loss does not fall; the optimizer's `step` updates nothing
net:      how far the weights have moved, after one step: not zero
cause:    `fully_shard` puts new parameters, the shards, in the place of the old ones. An optimizer that was made before
          has the old ones, which get no gradients any more, and skips them without a word.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, mine, net, sgd

RANKS, REPORTED, EXPECTED = 2, (0.0, 0.0), 1.0
STEPS = 6


def ready(model):
    """The sharded model's optimizer."""
    optimizer = sgd(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    # right: return sgd(model)
    return optimizer  # wrong


def whole(model):
    """The parameters, put together from all ranks' shards."""
    model.reshard()
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def on_rank():
    model, seen = net(), Seen()
    optimizer = ready(model)
    before = whole(model)
    seen.kinds = sorted({type(p).__name__ for group in optimizer.param_groups for p in group["params"]})
    for step in range(STEPS):
        inputs, targets = mine(*examples(step % 2))
        model.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        seen.with_gradient = sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        seen.numbers[f"loss {step}"] = loss / dist.get_world_size()
    after = whole(model)
    seen.moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    seen.numbers |= after
    return seen


def alone():
    model, seen = net(), Seen()
    optimizer = sgd(model)
    for step in range(STEPS):
        inputs, targets = examples(step % 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        seen.numbers[f"loss {step}"] = loss.detach()
        optimizer.step()
    return keep(seen, model)


def effect(ranks, _one):
    """The share of parameters that have moved at all."""
    return sum(moved > 0 for moved in ranks[0].moved.values()) / len(ranks[0].moved)
