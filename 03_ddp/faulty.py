"""A reducer that trains wrongly. The exercise `repaired_reducer` says what has been seen; the mistake is to be
found."""

import math

import torch
import torch.distributed as dist


class FaultyReducer:
    """Averages gradients in one flat tensor that it keeps from step to step; `shapes` are those of the parameters."""

    def __init__(self, shapes):
        self.shapes, self.lengths = shapes, [math.prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(self.lengths))

    def average(self, gradients):
        """The averages of a step's gradients; None stands for one that this rank has not."""
        places = self.flat.split(self.lengths)
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is not None:
                place.copy_(gradient.flatten())
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()
        return [place.view(shape).clone() for place, shape in zip(places, self.shapes, strict=True)]
