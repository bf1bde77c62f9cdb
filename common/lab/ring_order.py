"""Sums of many ranks' tensors in one process, added up in the order in which gloo adds them, so that they are those of
real ranks, bit for bit."""

import functools
from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import nn

SEGMENT = 1 << 20  # the most bytes of a segment of gloo's ring (maxSegmentSize in gloo/allreduce.h)


def reduced(do: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ranks' tensors of one shape, put together by `do` (torch.add, torch.minimum) in the order of gloo's ring.

    The ring cuts a tensor into as many chunks as there are ranks. Chunk c starts at rank c - 1 and goes on to c - 2,
    c - 3, ..., each of which adds its own to what has come; rank c is the last (gloo/allreduce.cc, function ring;
    ProcessGroupGloo's reduce-scatter is an all-reduce of which each rank keeps its part).
    """
    size, total, each = len(tensors), tensors[0].nbytes, tensors[0].element_size()
    segments = ceil(max(ceil(total / SEGMENT), 2 * size) / size) * size
    chunk = segments // size * ceil(ceil(total / segments) / each)  # elements
    ranks = torch.stack([nn.functional.pad(t.reshape(-1), (0, size * chunk - t.numel())) for t in tensors])
    ranks, chunks = ranks.view(size, size, chunk), torch.arange(size)  # rank, chunk, element
    result = functools.reduce(do, (ranks[(chunks - step) % size, chunks] for step in range(1, size + 1)))
    return result.view(-1)[: tensors[0].numel()].view(tensors[0].shape)
