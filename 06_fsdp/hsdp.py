"""Two-dimensional meshes: hybrid sharding, and tensor parallelism inside of sharded data parallelism."""

import torch
import torch.distributed.tensor.parallel as tp
from torch.nn.utils import clip_grad_norm_

from common.collectives import broadcast_module
from common.mesh import axis
from common.model import cross_entropy
from common.recompute import RecomputeOptions
from common.strategy import require_gradients
from course.fsdp import fsdp_setup
from course.fsdp.distributed_training import FSDP
from course.fsdp.options import Offload
from course.model_parallel.division import require_tensor


class HSDP(FSDP):
    """Parameters are sharded over the ranks of an axis, and replicated over another, whose ranks average the gradients
    of their shards: the ranks of one "shard" group are a node, within which the links are fast."""

    preset = {"data": 2, "shard": -1}
    Options = Offload


class TensorFSDP(FSDP):
    """The ranks along "tensor" divide every large weight between them (chapter 04) and read the same data; over the
    ranks along "shard" each of these parts is sharded."""

    preset = {"shard": 2, "tensor": -1}
    tasks = ("text",)
    Options = RecomputeOptions

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_tensor(config, axes["tensor"])

    def prepare(self, unit):
        """Rank 0's weights, of which a rank keeps a part."""
        # With the axis over all ranks that this makes, PyTorch sums the gradient's norm in one message instead of one
        # for each dimension, and a warning.
        broadcast_module(unit, axis(self.mesh, "shard", "tensor").group, torch.device("cpu"))
        fsdp_setup.cut_unit(self.model, unit, self.mesh["tensor"])

    def step(self, micro_batches):
        with tp.loss_parallel():
            return super().step(micro_batches)


class SyncOnce(FSDP):
    """Gradients of several micro-batches are summed where they are, and sent once. Until then they are whole: 4P bytes
    instead of 4P/N."""

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            self.model.set_requires_gradient_sync(number == len(micro_batches))
            with self.autocast():
                part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return fsdp_setup.average(loss, self.readers.group), grad_norm.full_tensor()
