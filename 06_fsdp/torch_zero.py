"""ZeRO stages 1 and 2 with PyTorch's own parts."""

from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.collectives import broadcast_module
from common.mesh import axis
from common.model import cross_entropy
from common.recompute import RecomputeOptions, recompute_blocks
from common.strategy import Strategy
from course.ddp.options import LastBackward
from course.fsdp.distributed_training import FSDP


class Zero1(Strategy):
    """Stage 1: DistributedDataParallel, with ZeroRedundancyOptimizer in the optimizer's place.

    Whole parameters are dealt out to the ranks. Each keeps the optimizer state of its own, steps them, and broadcasts
    them.
    """

    preset = {"shard": -1}
    from_meta = True
    Options = RecomputeOptions

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.group = axis(self.mesh, "shard").group
        self.model = model
        broadcast_module(model, self.group, self.device)  # rank 0's weights
        recompute_blocks(model, self.options.recompute)
        self.last_backward = LastBackward(model)
        self.replica = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), make_optimizer, process_group=self.group)

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            self.last_backward.begin()
            # gradients add up locally; only the last backward pass sends the sum
            with nullcontext() if number == len(micro_batches) else self.replica.no_sync():
                with self.autocast():
                    # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                    part = cross_entropy(self.replica(inputs), targets) / len(micro_batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        self.last_backward.require_all()
        total = dist.all_reduce(loss, group=self.group, async_op=True)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        total.wait()
        return loss / self.data_size, grad_norm

    def parts(self):
        """The parameters that this rank steps, among those that are trained."""
        own = {parameter for group in self.optimizer.optim.param_groups for parameter in group["params"]}
        return [part for part in super().parts() if part.owner is None or part.owner in own]

    def optimizer_state(self):
        return self.optimizer.optim.state  # of this rank's own parameters; ZeroRedundancyOptimizer itself has none

    def before_loading(self, first_batch):
        self.step(first_batch())  # after its first step DDP arranges its buckets anew, and then adds in another order

    def after_loading(self):
        self.optimizer._sync_params()  # as after a step: every owner broadcasts; there is no public way to ask for it


class Zero2(FSDP):
    """Stage 2: parameters stay gathered from the forward pass until the backward pass is over."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.set_reshard_after_forward(False)
