"""The first update of Adam is too small by a quarter, and those after it by less and less.

thread:   https://github.com/NVIDIA/Megatron-LM/pull/5976
reported: a first update 1.34 times too small
net:      equality with one process, of the weights after one step
cause:    Adam's state is made by a step with gradients of zero, so that a checkpoint can be loaded into it. The step is
          counted. Adam divides its two means by 1 - beta^t, since they begin at zero, and with t = 2 in place of 1 it
          divides the first by 0.19 and not by 0.1, and the root of the second by the root of 0.002 and not of 0.001.
"""

import torch

from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net

RANKS, REPORTED, EXPECTED = 2, (1.335, 1.345), 1.0
STEPS, RATE = 20, 0.01


def with_state(model):
    """AdamW, whose state is there before the first step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        # right: state["step"].zero_()
        state["step"].clone()  # wrong
    optimizer.param_groups[0]["lr"] = RATE
    return optimizer


def train(model, optimizer, ranks):
    seen, before = Seen(), [p.detach().clone() for p in model.parameters()]
    seen.moved = []
    for step in range(STEPS):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step % 3), ranks=ranks)
        after = [p.detach().clone() for p in model.parameters()]
        seen.moved.append(
            torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)]).abs().mean().item()
        )
        before = after
    seen.counts = sorted({int(state["step"]) for state in optimizer.state.values()})
    return keep(seen, model)


def on_rank():
    model = net()
    return train(model, with_state(model), ranks=True)


def alone():
    model = net()
    return train(model, torch.optim.AdamW(model.parameters(), lr=RATE), ranks=False)


def factor(step):
    """By what the update is too small, after so many real steps whose gradients are alike (Kingma and Ba 2015)."""
    right, wrong = ((1 - 0.9**t) / (1 - 0.999**t) ** 0.5 for t in (step, step + 1))
    return wrong / right


def effect(ranks, one):
    """How many times as large the first update of one process is."""
    return one.moved[0] / ranks[0].moved[0]
