"""DistributedDataParallel: every rank holds the whole model and reads its own slice of each batch.

Gradients are averaged over the ranks while the backward pass still runs, so all models stay the same.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("ddp")

from contextlib import nullcontext

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.recompute import recompute_blocks
from common.run import Run
from common.task import make_task
from course.ddp.options import LastBackward, ReplicatedModel


class DDP(ReplicatedModel):
    """Every rank reads one slice of each batch; DistributedDataParallel averages gradients, in its own buckets."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.model = recompute_blocks(model.to(self.device), self.options.recompute)
        self.replica = DistributedDataParallel(self.model, process_group=self.group, gradient_as_bucket_view=True)
        self.last_backward = LastBackward(self.model)
        self.optimizer = make_optimizer(self.model.parameters())

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

    def before_loading(self, first_batch):
        self.step(first_batch())  # after its first step DDP arranges its buckets anew, and then adds in another order


def main(config):
    with process_group(config.device, config.backend, config.timeout, config.check_collectives) as ranks:
        task = make_task(config)
        mesh = make_mesh(config.axes, ranks.device.type)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        with Run(config, strategy, task) as run:
            batches = run.batches(config.options.load)
            for step in run.steps:  # from the step of the checkpoint until --steps
                strategy.set_learning_rate(run.learning_rate(step))
                loss, grad_norm = strategy.step(next(batches))
                if run.end_step(loss, grad_norm):  # Ctrl-C or SIGTERM, on any rank
                    break


if __name__ == "__main__":
    start()
