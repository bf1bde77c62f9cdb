"""With sequences divided over ranks, the loss is a little off, and the more ranks the more.

thread:   https://github.com/huggingface/transformers/pull/36607
          https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449
reported: of labels 1 to 8 on two ranks, the shifted ones are 2 3 4 -100 and 6 7 8 -100: label 5 is lost
net:      the number of labels on all ranks, before the first step; equality with one process
cause:    The label of a position is the token after it. Shifted after the cut, the last position of each part has
          nobody after it and gets none, although the next rank has its token. Shift first, then cut.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course.fsdp.museum import Seen
from course.fsdp.toy import gradients, keep, sgd

RANKS, REPORTED, EXPECTED = 2, (2.0, 2.0), 1.0
STEPS, BATCH, LENGTH, VOCABULARY, NOTHING = 3, 2, 8, 16, -100


def shifted(tokens):
    """For each position of tokens [batch, time], the token after it; NOTHING for the last."""
    return F.pad(tokens[:, 1:], (0, 1), value=NOTHING)


def part(tokens, rank, size):
    """What one rank has of the tokens [batch, time], and their labels."""
    inputs = tokens.chunk(size, dim=1)[rank]
    # right: return inputs, shifted(tokens).chunk(size, dim=1)[rank]
    return inputs, shifted(inputs)  # wrong


def make_model():
    """Each token is guessed from the one before it alone, so that ranks need not exchange any."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY))


def batch(step):
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def train(rank=0, size=1, cut=None):
    model, seen = make_model(), Seen()
    optimizer, seen.labels = sgd(model), 0
    for step in range(STEPS):
        inputs, labels = cut(batch(step), rank, size) if cut else (batch(step), shifted(batch(step)))
        optimizer.zero_grad()
        count = (labels != NOTHING).sum().float()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="sum")
        loss.backward()
        loss = loss.detach()
        if size > 1:
            for tensor in (loss, count, *gradients(model)):
                dist.all_reduce(tensor)
        for gradient in gradients(model):
            gradient /= count
        seen.numbers |= {f"loss {step}": loss / count}
        seen.labels = int(count)
        optimizer.step()
    return keep(seen, model)


def on_rank():
    return train(dist.get_rank(), dist.get_world_size(), part)


def alone():
    return train()


def labels(size):
    """The labels of tokens 1 to 8, on each of so many ranks."""
    return [part(torch.arange(1, 9)[None], rank, size)[1][0].tolist() for rank in range(size)]


def effect(_ranks, _one):
    """How many positions of tokens 1 to 8 have no label, on two ranks."""
    return float(sum(one.count(NOTHING) for one in labels(2)))
