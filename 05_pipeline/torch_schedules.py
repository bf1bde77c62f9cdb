"""PyTorch's schedule classes by our names, what their stages are made of, and their lists of actions as text."""

from typing import Any
from unittest import mock

import torch.distributed.pipelining as pp
from torch import nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.checkpoint import checkpoint

from course.pipeline.schedules import KINDS

TORCH_SCHEDULES: dict[str, type[Any]] = {
    "gpipe": pp.ScheduleGPipe,
    "1f1b": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "looped-bfs": pp.ScheduleLoopedBFS,
    "zb-h1": pp.ScheduleInterleavedZeroBubble,  # ZB-H1 is what this class does with one stage per rank
    "interleaved-zb": pp.ScheduleInterleavedZeroBubble,
    "zbv": pp.ScheduleZBVZeroBubble,
    "dualpipev": pp.ScheduleDualPipeV,
}


def make_schedule(options, stages, loss):
    """PyTorch's schedule, by the name in the options, over this rank's pp.PipelineStages."""
    kind = TORCH_SCHEDULES[options.schedule]
    stages = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    # The loss is divided already, so no gradients are to be.
    return kind(stages, options.microbatches, loss_fn=loss, scale_grads=False)


class InContext(nn.Module):
    """Layers that compute in a context, such as autocast, and forget what they can compute again."""

    def __init__(self, layers, context, recompute):
        super().__init__()
        self.layers, self.context, self.recompute = layers, context, recompute

    def forward(self, x):
        with self.context():
            return checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)


def actions(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[list[str]]:
    """For each rank what it computes in which order, by PyTorch's class for the schedule of this name.

    Left out are pauses, which are only for PyTorch's picture, and the reduction of gradients over replicas. An
    overlapped pair is its two actions.
    """
    if name == "zb-h1":  # get_schedule_ops wants two stages or more for this class, which itself takes one
        stage = mock.create_autospec(pp.PipelineStage, instance=True)
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks, None
        order = TORCH_SCHEDULES[name]([stage], microbatches).pipeline_order
        lists = [order[rank] for rank in range(ranks)]
    else:
        lists = get_schedule_ops(TORCH_SCHEDULES[name], ranks, microbatches, stages_per_rank)
    flat = [[part for a in own if a for part in a.sub_actions or [a]] for own in lists]
    return [[str(a) for a in own if a.computation_type.value in KINDS] for own in flat]
