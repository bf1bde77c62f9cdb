"""The loss on text that is not trained on, over all ranks: `--validate-every`."""

import torch
import torch.distributed as dist

from common import mesh as meshes
from common.data import Own, Text
from common.strategy import Strategy

EXAMPLES = 256  # at most so many, evenly spread over the text


def validate(strategy: Strategy, text: Text | Own, at_once: int) -> float:
    """The mean loss of a strategy's model over examples of a text, the same on all ranks, however many there are.

    Each group of ranks that read the same examples takes `at_once` of them at a time. They need not divide evenly:
    every example counts once, and a rank for which none is left computes one that does not count, since the others may
    need it to gather weights. Nothing that training goes on from changes. Collective.
    """
    number = min(EXAMPLES, text.size)
    chosen = torch.arange(number) * text.size // number
    readers = meshes.axis(strategy.mesh, *strategy.data_axes).group
    total = torch.zeros(2, dtype=torch.float64, device=strategy.device)  # sum of losses, number of examples
    strategy.model.eval()
    for begin in range(0, number, at_once * strategy.data_size):
        first = begin + at_once * strategy.data_rank
        mine = chosen[first : first + at_once]
        inputs, targets = (tensor.to(strategy.device) for tensor in text.batch(mine if len(mine) else chosen[:1]))
        loss = strategy.evaluate(inputs, targets).double()
        total += torch.stack([loss * len(mine), torch.full_like(loss, len(mine))])
    strategy.model.train()
    dist.all_reduce(total, group=readers)
    return float(total[0] / total[1])
