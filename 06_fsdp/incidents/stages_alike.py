"""Layers on two stages of a pipeline begin with the same weights, which they do not on one process.

thread:   https://github.com/pytorch/pytorch/issues/139304 https://github.com/pytorch/torchtitan/issues/514
reported: each stage starts from the same seed, so its weights may be those of the other stages
net:      weights of the same shape on two stages, compared before the first step; equality with one process
cause:    A stage makes only its own layers, and makes them from the seed of the run, with which one process would have
          made the first layers. So layer n of every stage is one and the same. The seed has to depend on which layer
          it is, and on nothing else: then any division gives the same model.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import CLASSES, RATE, examples

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
STEPS, LAYERS, SIZE, SEED = 3, 4, 6, 7  # every layer is SIZE x SIZE, and the first CLASSES outputs are the logits


def seed_of(layer, first):
    """From which seed a layer is drawn, on the stage whose layers begin with number `first`."""
    # right: return SEED + layer
    return SEED + layer - first  # wrong


def make(layer, first=0, seed=seed_of):
    torch.manual_seed(seed(layer, first))
    return torch.nn.Linear(SIZE, SIZE)


def stage():
    """The layers of this rank."""
    each = LAYERS // dist.get_world_size()
    first = each * dist.get_rank()
    return first, torch.nn.ModuleList([make(layer, first) for layer in range(first, first + each)])


def through(layers, x):
    for layer in layers:
        x = layer(x).tanh()
    return x


def on_rank():
    """Two stages, one micro-batch."""
    (first, layers), seen, rank = stage(), Seen(), dist.get_rank()
    optimizer = torch.optim.SGD(layers.parameters(), lr=RATE)
    seen.start = [layer.weight.detach().clone() for layer in layers]
    for step in range(STEPS):
        inputs, targets = examples(step)
        optimizer.zero_grad()
        if rank == 0:
            out = through(layers, inputs)
            dist.send(out.detach(), dst=1)
            back = torch.empty_like(out)
            dist.recv(back, src=1)
            out.backward(back)
        else:
            x = torch.empty_like(inputs)
            dist.recv(x, src=0)
            x.requires_grad_()
            loss = F.cross_entropy(through(layers, x)[:, :CLASSES], targets)
            loss.backward()
            dist.send(x.grad, dst=0)
            seen.numbers[f"loss {step}"] = loss.detach()
        optimizer.step()
    seen.numbers |= {f"layer {first + n}": layer.weight.detach() for n, layer in enumerate(layers)}
    return seen


def alone():
    layers = torch.nn.ModuleList([make(layer, seed=lambda layer, _: SEED + layer) for layer in range(LAYERS)])
    optimizer, seen = torch.optim.SGD(layers.parameters(), lr=RATE), Seen()
    for step in range(STEPS):
        inputs, targets = examples(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(through(layers, inputs)[:, :CLASSES], targets)
        loss.backward()
        seen.numbers[f"loss {step}"] = loss.detach()
        optimizer.step()
    seen.numbers |= {f"layer {number}": layer.weight.detach() for number, layer in enumerate(layers)}
    return seen


def effect(ranks, _one):
    """The share of the second stage's layers that begin as a layer of the first."""
    first, second = (rank.start for rank in ranks)
    return sum(any(torch.equal(a, b) for a in first) for b in second) / len(second)
