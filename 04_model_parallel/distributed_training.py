"""Tensor parallelism: every rank holds a part of every large weight, and all ranks read the same batch.

PyTorch's DTensor knows which part of a weight or an activation a rank has, and sends what is missing.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

import torch.distributed.tensor.parallel as tp
from course.strategies import load
from torch.distributed.tensor import Replicate, distribute_module, init_device_mesh
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.model import cross_entropy
from common.ranks import process_group
from common.strategy import Strategy, require_gradients
from common.task import make_task
from common.train import start, train

PLAN = {
    "embedding.tokens": tp.RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "embedding.positions": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "blocks.*.attention.[qkv]*": tp.ColwiseParallel(),  # query, key, value
    "blocks.*.attention.out": tp.RowwiseParallel(use_local_output=False),
    "blocks.*.mlp.up": tp.ColwiseParallel(),
    "blocks.*.mlp.down": tp.RowwiseParallel(use_local_output=False),
    "head.out": tp.ColwiseParallel(use_local_output=False),
}


class TensorParallel(Strategy):
    """All ranks read the same batch; each computes with its part of every large weight."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        by_hand_tensor.require_divisible(model, ranks.size)
        self.model = model.to(ranks.device)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        tied = model.head.out.weight is model.embedding.tokens.weight
        tp.parallelize_module(self.model, mesh, PLAN)  # starts from rank 0's weights
        if tied:
            model.head.out.weight = model.embedding.tokens.weight
        for block in model.blocks:
            block.attention.heads //= ranks.size
        distribute_module(self.model, mesh)  # norms, biases, positions: whole on every rank
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
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, ranks, config.precision
        )
        train(strategy, task, config, ranks)


if __name__ == "__main__":
    start(main, strategy="tensor")
