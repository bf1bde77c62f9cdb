"""Every restart reads the head of the data again, and the tail is never seen.

thread:   https://github.com/kyutai-labs/pocket-tts/pull/287 https://github.com/huggingface/accelerate/issues/2823
          https://github.com/huggingface/datasets/issues/5454
reported: each relaunch replays the same permutation from position zero, while the model goes on at its step
net:      equality of a resumed run with one that was not interrupted
cause:    The order is a function of the seed, and the place in it was kept by the loader alone. A new loader begins at
          zero, whatever the step. A place that follows from the step needs no state, and cannot be forgotten, as long
          as batch size, world size and dataset stay the same.
"""

import torch

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
SIZE, BATCH, STEPS, RESTARTS, SEED = 48, 8, 6, (2, 4), 7


class Loader:
    """The batches of one epoch, from the step with which a run begins or goes on."""

    def __init__(self, step):
        self.order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(SEED)).split(BATCH)
        # right: self.next = step
        self.next = 0  # wrong

    def batch(self):
        self.next += 1
        return self.order[self.next - 1]


def on_rank():
    model, seen, loader = net(), Seen(), Loader(0)
    optimizer, (inputs, targets) = sgd(model), examples(0, SIZE)
    seen.read, seen.again = [], []
    for step in range(STEPS):
        if step in RESTARTS:
            loader = Loader(step)
        whole = loader.batch()
        if step >= RESTARTS[0]:
            seen.again += [int(example) in seen.read for example in whole]
        seen.read += whole.tolist()
        seen.numbers[f"loss {step}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=True)
    return keep(seen, model)


def alone():
    """One process, without a restart."""
    model, seen = net(), Seen()
    optimizer, (inputs, targets) = sgd(model), examples(0, SIZE)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(SEED))
    for step, whole in enumerate(order.split(BATCH)):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, inputs[whole], targets[whole], ranks=False)
    return keep(seen, model)


def effect(ranks, _one):
    """The share of what is read after the first restart that had been read before."""
    again = ranks[0].again
    return sum(again) / len(again)
