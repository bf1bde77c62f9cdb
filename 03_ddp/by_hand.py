"""Data parallelism from all-reduce: a reducer averages the gradients in buckets while the backward pass still runs.

The same interface as distributed_training.py; start it with --by-hand. The design is that of PyTorch's own
reducer (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3).
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from common.errors import UserError
from common.model import cross_entropy
from common.strategy import Strategy, require_gradients

MEBIBYTE = 2**20


class DataParallelByHand(Strategy):
    """Every rank reads one slice of the global batch; a Reducer averages the gradients."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.model = model.to(ranks.device)
        self.reducer = Reducer(self.model)  # starts from rank 0's weights
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            # gradients add up locally; only the last backward pass sends the sum
            with nullcontext() if number == len(micro_batches) else self.reducer.no_sync():
                with self.autocast():
                    # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                    part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        total = dist.all_reduce(loss, async_op=True)  # beside the last buckets
        self.reducer.finish()
        total.wait()
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.data_size, grad_norm


class Reducer:
    """Averages a model's gradients over the ranks, each bucket as soon as its last gradient is there.

    order:       the trainable parameters in the order in which their gradients are expected: by default the last
                 parameter first, as the backward pass goes. They are of one type.
    bucket_mb:   a bucket is full when it holds this many MiB; by default as many as PyTorch's
    find_unused: whether some ranks, or all, may leave parameters out of a step
    """

    def __init__(self, model, order=None, bucket_mb=25.0, find_unused=False):
        self.model, self.size, self.find_unused = model, dist.get_world_size(), find_unused
        same_on_all_ranks(model)
        for tensor in [*model.parameters(), *model.buffers()]:  # ranks may have been seeded differently
            dist.broadcast(tensor.detach(), src=0)
        self.parameters = order or [p for p in model.parameters() if p.requires_grad][::-1]
        self.buckets = assign(self.parameters, bucket_mb * MEBIBYTE)
        self.flat, self.views, self.bucket_of = [], {}, {}
        for number, bucket in enumerate(self.buckets):
            members = [self.parameters[index] for index in bucket]
            self.flat.append(members[0].new_zeros(sum(p.numel() for p in members)))
            pieces = self.flat[-1].split([p.numel() for p in members])
            for index, parameter, piece in zip(bucket, members, pieces, strict=True):
                self.views[index], self.bucket_of[index] = piece.view_as(parameter), number
                parameter.register_post_accumulate_grad_hook(partial(self.ready, index))
        self.synchronise = True
        self.begin()

    def begin(self):
        self.missing = [set(bucket) for bucket in self.buckets]  # whose gradient is not in its bucket yet
        self.works = []  # all-reduces under way, one for each bucket launched

    def ready(self, index, parameter):
        """Autograd calls this in the backward pass, when it has added to the parameter's gradient."""
        if not self.synchronise:
            return
        # Divided before the sum, as DistributedDataParallel does: so that both round alike.
        torch.mul(parameter.grad, 1 / self.size, out=self.views[index])
        parameter.grad = self.views[index]  # what the all-reduce writes is the gradient: nothing to copy back
        self.missing[self.bucket_of[index]].remove(index)
        self.launch()

    def launch(self):
        """Start the all-reduce of complete buckets, in the buckets' order and no other: alike on all ranks."""
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.works.append(dist.all_reduce(self.flat[len(self.works)], async_op=True))

    def finish(self):
        """After the last backward pass of a step: the gradients are the ranks' mean, the buffers rank 0's.

        Raises UserError for a parameter without a gradient, unless `find_unused`. Collective.
        """
        if not self.find_unused:
            require_gradients(self.model)
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.uint8)
        for index in set().union(*self.missing):  # not part of the last backward pass
            if used[index]:
                self.ready(index, self.parameters[index])
            else:
                self.views[index].zero_()
                self.missing[self.bucket_of[index]].remove(index)
        self.launch()
        for work in self.works:
            work.wait()
        if self.find_unused:
            used = used.to(self.flat[0].device)
            dist.all_reduce(used, op=dist.ReduceOp.MAX)
            for index, parameter in enumerate(self.parameters):  # None where no rank has one: then nothing is updated
                parameter.grad = self.views[index] if used[index] else None
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        self.begin()

    @contextmanager
    def no_sync(self):
        """Backward passes inside only add to the local gradients."""
        self.synchronise = False
        try:
            yield
        finally:
            self.synchronise = True


def assign(parameters, cap):
    """Cut parameters, in order, into buckets of indices; a bucket is full once it holds `cap` bytes."""
    buckets, filled = [], 0
    for index, parameter in enumerate(parameters):
        if not buckets or filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += parameter.numel() * parameter.element_size()
    return buckets


def same_on_all_ranks(model):
    """Raise UserError, on every rank, where the ranks' models are not made of tensors of the same shapes."""
    shapes = [None] * dist.get_world_size()
    own = {name: f"of shape {list(tensor.shape)}, {tensor.dtype}" for name, tensor in model.state_dict().items()}
    dist.all_gather_object(shapes, own)
    for rank, other in enumerate(shapes):
        for name in shapes[0] | other:
            on_rank_0, there = shapes[0].get(name, "missing"), other.get(name, "missing")
            if on_rank_0 != there:
                raise UserError(
                    f"the ranks' models differ: {name} is {on_rank_0} on rank 0 and {there} on rank {rank}; "
                    f"build the same model on every rank"
                )
