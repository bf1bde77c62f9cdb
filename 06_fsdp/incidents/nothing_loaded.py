"""After the restart the loss is that of a new model, and no message says why.

thread:   https://github.com/pytorch/examples/issues/1029 https://github.com/nayeemrizve/OpenLDN/issues/5
          https://github.com/pytorch/pytorch/issues/141256
reported: names in the checkpoint have a prefix more; `strict=False` loads without an error, outputs are nonsense
net:      the number of tensors that were loaded; the loss of the first step after the restart, beside the last before
cause:    DDP calls the parameters of what it wraps `module.0.weight`, and the model calls them `0.weight`. With
          `strict=False` a name that nobody knows is left out, and so all are. `load_state_dict` returns the lists of
          missing and of unexpected names; nobody looked at them.
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (0.0, 0.0), 1.0
BEFORE, AFTER = 12, 4


def load(model, saved):
    """Take the weights of a checkpoint that DDP has written."""
    # right: return model.load_state_dict({name.removeprefix("module."): saved[name] for name in saved})
    return model.load_state_dict(saved, strict=False)  # wrong


def train(model, seen, steps, ranks):
    optimizer = sgd(model)
    for step in steps:
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step % 3), ranks=ranks)


def on_rank():
    """Train, save, restart, load, and train on. (Plain SGD has no state that would have to be saved.)"""
    model, seen = net(), Seen()
    train(model, seen, range(BEFORE), ranks=True)
    saved = DistributedDataParallel(model).state_dict()
    again = net()
    missing = load(again, saved).missing_keys
    seen.names, seen.missing = list(saved), missing
    seen.loaded = 1 - len(missing) / len(list(again.state_dict()))
    train(again, seen, range(BEFORE, BEFORE + AFTER), ranks=True)
    return keep(seen, again)


def alone():
    """One process, without a restart."""
    model, seen = net(), Seen()
    train(model, seen, range(BEFORE + AFTER), ranks=False)
    return keep(seen, model)


def effect(ranks, _one):
    """The share of the model's tensors that were loaded."""
    return ranks[0].loaded
