"""DataParallel: one process and a thread for each GPU; the first GPU keeps the model and adds up all gradients.

Needs no launcher. Where there are not two GPUs, the version by hand does the same on one device used twice.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

import torch
from course.strategies import load
from torch import nn
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.model import cross_entropy
from common.ranks import process_group
from common.strategy import DTYPES, Strategy
from common.task import make_task
from common.train import start, train


class ThreadedDataParallel(Strategy):
    """One process reads the whole global batch; DataParallel divides it among its devices."""

    def __init__(self, model, make_optimizer, ranks, precision="fp32", max_norm=1.0):
        super().__init__(ranks, precision, max_norm)
        self.model = model.to(ranks.device)
        from course.data_parallel import by_hand
        devices = by_hand.devices_of(ranks)
        if len(set(devices)) > 1:
            self.replicas = nn.DataParallel(self.model, devices)
            # its threads are told whether to use autocast, but not which type
            self.model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", DTYPES[precision]))
        else:
            self.replicas = lambda inputs: by_hand.data_parallel(self.model, inputs, devices)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.replicas(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm


def main(config: Config):
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, ranks, config.precision
        )
        train(strategy, task, config, ranks)


if __name__ == "__main__":
    start(main, strategy="dp")
