"""The learning rate has reached its end after half of the steps; on one GPU it ends with the run.

thread:   https://github.com/Lightricks/LTX-Video-Trainer/issues/67 https://github.com/huggingface/accelerate/issues/2142
          https://github.com/huggingface/diffusers/issues/3954
reported: of 10,000 planned steps on 4 GPUs, the rate is at its end after 2,500
net:      the rate of the last planned step, printed before the run; equality with one process
cause:    A schedule that Accelerate has prepared moves on by `num_processes` at each step of the optimizer, because
          with `split_batches=False`, its default, each step reads so many batches of the loader. This schedule was
          planned in steps of the optimizer. So multiply the plan by `num_processes`. (Or
          don't prepare the schedule; under accumulation you then leave out its other steps yourself.)
"""

import torch
import torch.distributed as dist

from course.fsdp.museum import Seen
from course.fsdp.toy import RATE, examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (0.5, 0.5), 1.0
STEPS = 8


def move_on(schedule):
    """After each step of the optimizer."""
    # right: for _ in range(1):
    for _ in range(dist.get_world_size()):  # wrong
        schedule.step()


def linear(optimizer):
    """From RATE down to a tenth of it, in STEPS steps, and level afterwards."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


def train(after, ranks):
    model, seen = net(), Seen()
    optimizer = sgd(model)
    schedule, seen.rates = linear(optimizer), []
    for step in range(STEPS):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step), ranks=ranks)
        after(schedule)
        seen.rates.append(optimizer.param_groups[0]["lr"])
    return keep(seen, model)


def on_rank():
    return train(move_on, ranks=True)


def alone():
    return train(lambda schedule: schedule.step(), ranks=False)


def effect(ranks, _one):
    """After which share of the planned steps the rate has come to its end."""
    rates = ranks[0].rates
    return (1 + next(step for step, rate in enumerate(rates) if rate < 0.1001 * RATE)) / STEPS
