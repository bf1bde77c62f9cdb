"""The same batch in more micro-batches gives another loss, and worse models.

thread: https://github.com/huggingface/transformers/pull/34191 https://github.com/huggingface/blog/pull/2414
        https://github.com/huggingface/trl/issues/2175 https://github.com/meta-pytorch/torchtune/pull/1917
net:    equality with one process, in the first step, on examples of different lengths
cause:  A mean of means is not the mean. Each micro-batch is divided by the number of its own tokens and then by the
        number of micro-batches, so a token among few counts for more than a token among many. The step's own number
        of tokens, over all micro-batches and ranks, has to be known before the first backward pass.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.collectives import all_reduce_together
from common.lab.launch import launch
from common.model import GPT
from course.fsdp.museum import Seen

RANKS, REPORTED, EXPECTED = 2, (6.999, 7.001), 1.0
STEPS, CONTEXT, VOCABULARY, NOTHING = 3, 28, 32, -100  # -100: a place that is padding, which cross_entropy leaves out
LENGTHS = [4, 28, 8, 16]  # of the examples of a batch; each is a micro-batch


def micro_loss(logits, targets, tokens):
    """What one micro-batch adds to the loss of a step, in which there are `tokens` on all ranks together."""
    flat = logits.flatten(0, 1), targets.flatten()
    # right: return F.cross_entropy(*flat, ignore_index=NOTHING, reduction="sum") / tokens
    return F.cross_entropy(*flat, ignore_index=NOTHING) / len(LENGTHS)  # wrong


def make_model():
    torch.manual_seed(3)
    return GPT(layers=1, width=16, heads=2, context=CONTEXT, vocabulary=VOCABULARY, tied=False)


def batch(step, lengths):
    tokens = torch.randint(VOCABULARY, (len(lengths), CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    padding = torch.arange(CONTEXT) >= torch.tensor(lengths)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(padding, NOTHING)


def on_rank(lengths=LENGTHS, steps=STEPS):
    """Data parallelism: each rank reads every other micro-batch, and gradients are added up."""
    model, rank, seen = make_model(), dist.get_rank(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        inputs, targets = batch(step, lengths)
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(rank, len(lengths), dist.get_world_size()):
            mine = slice(number, number + 1)
            loss = micro_loss(model(inputs[mine]), targets[mine], sum(lengths))
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        all_reduce_together([p.grad for p in model.parameters()], dist.group.WORLD)
        optimizer.step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen.numbers |= {f"loss {step}": total, f"norm {step}": norm}
        seen.norms.append(norm.item())
    seen.copies = {name: p.detach() for name, p in model.named_parameters()}
    seen.numbers |= seen.copies
    return seen


def alone(lengths=LENGTHS, steps=STEPS):
    """One process, the whole batch at once: the mean over all of its tokens."""
    model, seen = make_model(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        inputs, targets = batch(step, lengths)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=NOTHING)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": norm}
        optimizer.step()
    seen.numbers |= {name: p.detach() for name, p in model.named_parameters()}
    return seen


def wrong_by(lengths):
    """The largest difference of a parameter from one process after the last step, for examples of these lengths."""
    one = launch(lambda: alone(lengths), 1)[0].numbers
    ranks = launch(lambda: on_rank(lengths), RANKS)[0].numbers
    names = dict(make_model().named_parameters())
    return max(((ranks[name] - one[name]).abs().max() / one[name].abs().max()).item() for name in names)


def weights(lengths=LENGTHS):
    """How much one token of each example counts in the step: the derivative by its own loss."""

    def run():
        logits = torch.zeros(len(lengths), CONTEXT, VOCABULARY, requires_grad=True)
        targets = batch(0, lengths)[1]
        for number in range(len(lengths)):
            mine = slice(number, number + 1)
            micro_loss(logits[mine], targets[mine], sum(lengths)).backward()
        # at equal logits a token's own derivative is 1 - 1/VOCABULARY of its weight, and points against its target
        return logits.grad.abs().amax(dim=(1, 2)).div(1 - 1 / VOCABULARY).tolist()

    return launch(run, 1)[0]


def losses(lengths=LENGTHS, steps=40):
    """The loss of every tenth step, on the ranks and on one process."""
    ranks, one = launch(lambda: on_rank(lengths, steps), RANKS)[0].numbers, launch(lambda: alone(lengths, steps), 1)
    return [
        (step + 1, ranks[f"loss {step}"].item(), one[0].numbers[f"loss {step}"].item()) for step in range(9, steps, 10)
    ]


def effect(*_):
    """How many times as much a token of the shortest example counts as one of the longest."""
    found = weights()
    return found[LENGTHS.index(min(LENGTHS))] / found[LENGTHS.index(max(LENGTHS))]
