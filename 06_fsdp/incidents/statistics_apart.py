"""Right after training the ranks disagree on a test image; loaded from the checkpoint, they agree.

thread:   https://github.com/pytorch/pytorch/issues/13711 https://github.com/open-mmlab/mmdetection/pull/4582
          https://github.com/mlcommons/training/issues/289
reported: the running mean of BatchNorm is another one on each GPU after training, and the same one after loading
net:      replicas that are compared, buffers as well as parameters
cause:    Gradients are summed, and BatchNorm's running mean and variance have none. Each rank keeps those of its own
          examples, and the checkpoint has those of the rank that wrote it. They are what the test uses in place of the
          batch's own. The mean of the ranks' means is that of all examples; the mean of their variances is not quite,
          since it leaves out how far the means differ.
"""

import torch
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import WIDTH, examples, keep, learn, mean, net, sgd

RANKS, REPORTED, EXPECTED = 2, (2.0, 2.0), 1.0
STEPS = 4


def with_norm():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), *net())


def before_test(model):
    """When training is over, and the test begins."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    # right: mean(*statistics)
    len(statistics)  # wrong
    model.eval()


def picture():
    return torch.ones(1, WIDTH)


def on_rank():
    model = with_norm()
    optimizer = sgd(model)
    for step in range(STEPS):
        learn(model, optimizer, *examples(step), ranks=True)
    before_test(model)
    return tested(Seen(), model)


def tested(seen, model):
    seen.mean = model[0].running_mean.clone()
    seen.answer = model(picture()).softmax(dim=-1)[0].tolist()
    keep(seen, model)
    statistics = {"running mean": seen.mean, "running variance": model[0].running_var.clone()}
    seen.numbers |= statistics
    seen.copies |= statistics
    return seen


def alone():
    """One process that normalises each half of the batch by itself, as the ranks do, with a copy of the layer each."""
    model, copy = with_norm(), torch.nn.BatchNorm1d(WIDTH)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for norm, inputs, targets in zip((model[0], copy), *(part.chunk(2) for part in examples(step)), strict=True):
            hidden = torch.func.functional_call(norm, dict(model[0].named_parameters()), inputs)
            (F.cross_entropy(model[1:](hidden), targets) / 2).backward()
        optimizer.step()
    for mine, other in zip(model.buffers(), copy.buffers(), strict=True):
        if mine.is_floating_point():
            mine.copy_((mine + other) / 2)
    model.eval()
    return tested(Seen(), model)


def effect(ranks, _one):
    """How many different running means there are."""
    return float(len({tuple(rank.mean.tolist()) for rank in ranks}))
