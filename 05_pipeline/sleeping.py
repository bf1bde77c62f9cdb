"""Stages that sleep instead of computing. Sleeping needs no core, so any number of ranks do it at once on a laptop: a
real run of a schedule, with real messages and autograd, takes as long as it would on as many devices."""

import time

import torch
import torch.distributed as dist
from torch import nn

from course.pipeline import schedules, simulator
from course.pipeline.executor import Executor, timeline


class Slow(torch.autograd.Function):
    """Gives what it gets; its backward takes `seconds`."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeping(nn.Module):
    """Adds its weight to its input. Times in seconds: forward, backward for input, backward for weight."""

    def __init__(self, forward: float, backward_input: float, backward_weight: float):
        super().__init__()
        self.seconds = forward, backward_input, backward_weight
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        time.sleep(self.seconds[0])
        return Slow.apply(x, self.seconds[1]) + Slow.apply(self.weight, self.seconds[2])


def run(name: str, microbatches: int, times=(0.02, 0.02, 0.02), stages_per_rank: int | None = None):
    """Run a schedule on sleeping stages, on the ranks of this process group; this rank's events, for executor.timeline.

    times: seconds of forward, backward for input, backward for weight of *all* stages of a rank together
    """
    schedule = schedules.build(name, dist.get_world_size(), microbatches, stages_per_rank)
    stages = len(simulator.placement(schedule)) // len(schedule)
    return run_lists(schedule, [seconds / stages for seconds in times])


def run_lists(schedule: schedules.Schedule, times):
    """The same for lists of actions. times: seconds of each stage."""
    group = dist.group.WORLD
    rank_of = simulator.placement(schedule)
    stages = {stage: Sleeping(*times) for stage, rank in enumerate(rank_of) if rank == dist.get_rank(group)}
    executor = Executor(schedule, stages, group)
    microbatches = 1 + max(action.microbatch for own in schedule for action in own)
    inputs = [torch.zeros(1, requires_grad=True) for _ in range(microbatches)]  # so that stage 0 has its I, too
    dist.barrier(group)
    executor.run(inputs, lambda output, _m: output.sum(), (1,))
    return executor.events


def bubbles(events, name: str, microbatches: int, times, stages_per_rank: int | None = None) -> tuple[float, float]:
    """The measured bubble of such a run, with the events of all ranks, and what the simulator says."""
    schedule = schedules.build(name, len(events), microbatches, stages_per_rank)
    parts = len(simulator.placement(schedule)) // len(events)
    simulated = simulator.simulate(schedule, simulator.Times(*(seconds / parts for seconds in times)))
    return timeline(events).bubble, simulated.bubble
