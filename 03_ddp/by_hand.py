"""Data parallelism from all-reduce: a reducer averages the gradients in buckets while the backward pass still runs.

The same interface as distributed_training.py; start it with --by-hand. The design is that of PyTorch's own
reducer (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3).
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from common.collectives import broadcast_module, broadcast_together
from common.constants import MEBIBYTE
from common.errors import UserError
from common.model import cross_entropy
from common.recompute import recompute_blocks
from common.strategy import require_gradients
from course.ddp.options import ReplicatedModel


class DDPByHand(ReplicatedModel):
    """Every rank reads one slice of the global batch; a Reducer averages the gradients."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.model = model.to(self.device)
        recompute_blocks(self.model, self.options.recompute)
        self.reducer = Reducer(self.model, self.group)  # starts from rank 0's weights
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.reducer.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            # gradients add up locally; only the last backward pass sends the sum
            with nullcontext() if number == len(micro_batches) else self.reducer.no_sync():
                with self.autocast():
                    # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                    part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        self.reducer.finish()
        # Not before finish(), which may still send buckets: all ranks must call collectives in the same order.
        total = dist.all_reduce(loss, group=self.group, async_op=True)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        total.wait()
        return loss / self.data_size, grad_norm


class Reducer:
    """Averages a model's gradients over the ranks of a group, each bucket as soon as its last gradient is there.

    A bucket is a flat tensor, and the gradients of its parameters are views of it: autograd adds to them in place, and
    what the all-reduce writes is the gradient. Nothing is copied, if `zero_grad` of this class begins each step.

    group:       the process group whose ranks hold copies of the model
    order:       the trainable parameters in the order in which their gradients are expected: by default the last
                 parameter first, as the backward pass goes. They are of one type.
    bucket_mb:   a bucket is full when it holds this many MiB; by default as many as PyTorch's
    find_unused: whether some ranks, or all, may leave parameters out of a step's last backward pass, or of the step

    Raises UserError where the ranks' models differ. Collective.
    """

    def __init__(self, model, group, order=None, bucket_mb=25.0, find_unused=False):
        self.model, self.group, self.find_unused = model, group, find_unused
        self.size = dist.get_world_size(group)
        same_on_all_ranks(model, group)
        broadcast_module(model, group)  # ranks may have been seeded differently
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
        self.reached = set()  # whose gradient some backward pass has added to since they were zero
        self.begin()

    def zero_grad(self):
        """Every gradient becomes zeros in its place in a bucket, where the backward passes of a step add to it."""
        for flat in self.flat:
            flat.zero_()
        for index, parameter in enumerate(self.parameters):
            parameter.grad = self.views[index]
        self.reached.clear()

    def begin(self):
        self.missing = [set(bucket) for bucket in self.buckets]  # what the last backward pass has not reached yet
        self.works = []  # all-reduces under way, one for each bucket sent

    def ready(self, index, parameter):
        """Autograd calls this in the backward pass, when it has added to the parameter's gradient."""
        self.reached.add(index)
        if not self.synchronise:
            return
        self.put(index, parameter)
        self.send_complete()

    def put(self, index, parameter):
        """The parameter's gradient is complete on this rank: see to it that it is in its bucket."""
        if parameter.grad is not self.views[index]:  # somebody else has set it, as to None before the backward pass
            self.views[index].copy_(parameter.grad)
            parameter.grad = self.views[index]
        self.missing[self.bucket_of[index]].remove(index)

    def send_complete(self):
        """Start the all-reduce of complete buckets, in the buckets' order and no other: alike on all ranks."""
        while len(self.works) < len(self.buckets) and not self.missing[len(self.works)]:
            self.works.append(self.average_bucket(self.flat[len(self.works)]))

    def average_bucket(self, bucket):
        """Start to replace a bucket by its mean over the ranks; returns what there is to wait for."""
        bucket *= 1 / self.size  # before the sum, as DistributedDataParallel does it: so that both round alike
        return dist.all_reduce(bucket, group=self.group, async_op=True)

    def finish(self):
        """After the last backward pass of a step: the gradients are the ranks' mean, the buffers rank 0's.

        Raises UserError for a parameter that this pass did not reach, unless `find_unused`. Collective.
        """
        late = set().union(*self.missing)
        if late and not self.find_unused:
            require_gradients(self.model, without={self.parameters[index] for index in late})
        # Some micro-batch of this step has reached it, and no other zero_grad() than ours has made it None since.
        used = [index in self.reached and p.grad is not None for index, p in enumerate(self.parameters)]
        for index in late:
            if not used[index]:
                self.parameters[index].grad = self.views[index].zero_()
            self.put(index, self.parameters[index])
        self.send_complete()
        for work in self.works:
            work.wait()
        if self.find_unused:
            for index, somewhere in enumerate(self.used_on_any_rank(used)):
                if not somewhere:  # no rank has a gradient: None, then nothing is updated
                    self.parameters[index].grad = None
        broadcast_together([*self.model.buffers()], self.group)
        self.begin()

    def used_on_any_rank(self, used):
        """For each parameter, whether some rank has used it. Collective."""
        device = self.flat[0].device
        anywhere = torch.tensor(used, dtype=torch.uint8, pin_memory=device.type == "cuda")
        anywhere = anywhere.to(device, non_blocking=True)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
        # A rank that has used everything needn't read the answer, which would make it wait for the GPU.
        return used if all(used) else anywhere.tolist()

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


def same_on_all_ranks(model, group):
    """Raise UserError, on every rank of the group, where their models are not made of the same tensors in one order:
    parameters, trained or frozen, and buffers of the same shapes and types. Collective."""
    own = {name: description_of(parameter) for name, parameter in model.named_parameters()}
    own |= {name: description_of(buffer, ", a buffer") for name, buffer in model.named_buffers()}
    ranks = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    advice = "build the same model on every rank"
    for rank, other in enumerate(ranks):
        for name in ranks[0] | other:
            on_rank_0, there = ranks[0].get(name, "missing"), other.get(name, "missing")
            if on_rank_0 != there:
                raise UserError(
                    f"the ranks' models differ: {name} is {on_rank_0} on rank 0 and {there} on rank {rank}; {advice}"
                )
        for first, second in zip(ranks[0], other, strict=True):
            if first != second:  # the order of the parameters is that of the buckets
                raise UserError(
                    f"the ranks' models differ: where rank 0 has {first}, rank {rank} has {second}; {advice}"
                )


def description_of(tensor, kind=""):
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"of shape {list(tensor.shape)}, {tensor.dtype}{kind}{frozen}"
