"""DistributedDataParallel: every rank holds the whole model and reads its own slice of each batch.

Gradients are averaged over the ranks while the backward pass still runs, so all models stay the same.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

from contextlib import nullcontext

import torch.distributed as dist
from course.strategies import load
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.model import cross_entropy
from common.ranks import process_group
from common.strategy import Strategy, require_gradients
from common.task import make_task
from common.train import start, train


class DataParallel(Strategy):
    """Every rank reads one slice of the global batch; DistributedDataParallel averages the gradients."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.data_rank, self.data_size = ranks.rank, ranks.size
        self.model = model.to(ranks.device)
        self.replica = DistributedDataParallel(self.model)  # starts from rank 0's weights
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            # gradients add up locally; only the last backward pass sends the sum
            with nullcontext() if number == len(micro_batches) else self.replica.no_sync():
                with self.autocast():
                    # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                    part = cross_entropy(self.replica(inputs), targets) / len(micro_batches)
                self.scaler.scale(part).backward()
            loss += part.detach()
        require_gradients(self.model)
        dist.all_reduce(loss)
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss / self.data_size, grad_norm


def main(config: Config):
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, ranks, config.precision
        )
        train(strategy, task, config, ranks, LOADING[config.loading])


if __name__ == "__main__":
    start(main, strategy="ddp")
