"""Tensor parallelism: every rank holds a part of every large weight, and all ranks read the same batch.

PyTorch's DTensor knows which part of a weight or an activation a rank has, and sends what is missing.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

import torch.distributed.tensor.parallel as tp
from torch.distributed.tensor import Replicate, distribute_module
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.run import Run
from common.strategy import Strategy, require_gradients
from common.task import make_task
from course.model_parallel import by_hand_tensor
from course.start import start

PLAN = {
    "embedding.tokens": tp.RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "embedding.positions": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "blocks.*.attention.[qkv]*": tp.ColwiseParallel(),  # query, key, value
    "blocks.*.attention.out": tp.RowwiseParallel(use_local_output=False),
    "blocks.*.mlp.up": tp.ColwiseParallel(),
    "blocks.*.mlp.down": tp.RowwiseParallel(use_local_output=False),
    "head.out": tp.ColwiseParallel(use_local_output=False),
}


def apply_tensor_parallel(model, mesh) -> None:
    """Cut the weights of a GPT over the ranks of a mesh of one dimension, in place, starting from the weights of the
    first of them. Each weight is moved to the mesh's device by itself, when it is cut. Raises UserError for a GPT that
    cannot be cut into equal parts."""
    by_hand_tensor.require_divisible(model, mesh.size())
    tied = model.head.out.weight is model.embedding.tokens.weight
    tp.parallelize_module(model, mesh, PLAN)
    if tied:
        model.head.out.weight = model.embedding.tokens.weight
    for block in model.blocks:
        block.attention.heads //= mesh.size()
    distribute_module(model, mesh)  # norms, biases, positions: whole on every rank
    words = model.embedding.tokens.weight
    if words.requires_grad:  # DTensor gives the gradient of an embedding whole: keep the words that this rank has
        words.register_hook(lambda gradient: gradient.redistribute(placements=words.placements))


class TensorParallel(Strategy):
    """All ranks read the same batch; each computes with its part of every large weight."""

    preset = {"tensor": -1}

    @classmethod
    def require(cls, config, axes):
        by_hand_tensor.TensorParallelByHand.require(config, axes)

    def __init__(self, model, make_optimizer, mesh, options=None, precision="fp32", max_norm=1.0):
        super().__init__(mesh, options, precision, max_norm)
        apply_tensor_parallel(model, mesh["tensor"])
        self.model = model
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with tp.loss_parallel():
                with self.autocast():
                    # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                    part = cross_entropy(self.model(inputs), targets) / len(micro_batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.full_tensor(), grad_norm.full_tensor()


def main(config: Config):
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        mesh = make_mesh(config.axes, ranks.device.type)
        strategy = config.strategy_class(
            task.make_model(), task.make_optimizer, mesh, config.options, config.precision
        )
        with Run(config, strategy, task) as run:
            batches = run.batches()
            for step in run.steps():
                strategy.set_learning_rate(run.learning_rate(step))
                loss, grad_norm = strategy.step(next(batches))
                run.log(step, loss, grad_norm)


if __name__ == "__main__":
    start("tensor")
