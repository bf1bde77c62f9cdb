"""Fully sharded: every rank keeps its shard of parameters, gradients and optimizer state, and reads its own slice.

A block's parameters are gathered before it computes, forward and backward, and freed after.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

from course.strategies import load
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.model import cross_entropy
from common.ranks import process_group
from common.strategy import Strategy, require_gradients
from common.task import make_task
from common.train import start, train
from course.fsdp import fsdp_setup as sharding


class FullyShard(Strategy):
    """ZeRO stage 3: a unit for each block, and one for all that is in none, where tied weights meet."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0, mesh=None, offload=False):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.model = model
        mesh = mesh or init_device_mesh(ranks.device.type, (ranks.size,))
        for unit in (*getattr(model, "blocks", ()), model):
            sharding.materialise(unit, ranks.device)  # rank 0's weights
            fully_shard(unit, mesh=mesh, **sharding.policies(precision, offload))
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
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
        return sharding.average(loss), grad_norm.full_tensor()


def main(config: Config):
    if config.find_batch_size:
        return find(config)
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, ranks, config.precision, **sharding.options(config)
        )
        train(strategy, task, config, ranks)


if __name__ == "__main__":
    start(main, strategy="fsdp")
