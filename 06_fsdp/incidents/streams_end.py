"""Training stands still near the end of an epoch: a stream has come to its end on one rank.

thread:   https://github.com/huggingface/datasets/issues/6437 https://github.com/huggingface/datasets/issues/6719
reported: streams that are split by files give ranks different numbers of examples, and the run hangs
net:      --check-collectives, at the first call that differs; the number of batches, compared before the run
cause:    A rank whose stream has ended leaves the loop, and the others wait for its gradients. Whether there is another
          step has to be one decision of all ranks: here the epoch ends for all with the first stream that does.
"""

import torch
import torch.distributed as dist

from common.lab.launch import launch
from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (3.0, 3.0), 0.0
BATCHES, WAIT = [5, 2], 2.0  # in the files of each rank; seconds that a rank waits for the others


def another(mine):
    """Is there another step, when this rank has (1) or has not (0) another batch?"""
    found = torch.tensor(float(mine))
    # right: dist.all_reduce(found, op=dist.ReduceOp.MIN)
    found = found.clone()  # wrong
    return bool(found)


def on_rank():
    model, step, seen = net(), 0, Seen()
    optimizer = sgd(model)
    while another(step < BATCHES[dist.get_rank()]):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step), ranks=True)
        step += 1
    return keep(seen, model)


def alone():
    """One process, for as many steps as all streams have."""
    model, seen = net(), Seen()
    optimizer = sgd(model)
    for step in range(min(BATCHES)):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step), ranks=False)
    return keep(seen, model)


def steps():
    """For each rank, how many steps it would take by its own answers."""

    def count():
        step = 0
        while another(step < BATCHES[dist.get_rank()]):
            step += 1
        return step

    return launch(count, RANKS)


def effect(*_):
    """How many steps one rank would take more than the other."""
    found = steps()
    return float(max(found) - min(found))
