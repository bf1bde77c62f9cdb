"""DataParallel: one process and a thread for each GPU; the first GPU keeps the model and adds up all gradients.

Needs no launcher. Where there are not two GPUs, the version by hand does the same on one device used twice.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("dp")

from torch import nn
from torch.nn.utils import clip_grad_norm_

from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.run import Run
from common.strategy import Strategy
from common.task import make_task
from course.data_parallel import by_hand


class ThreadedDataParallel(Strategy):
    """One process reads the whole global batch; DataParallel divides it among its devices."""

    data_axes = ()  # all ranks read and do the same

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.model = model.to(self.device)
        by_hand.set_autocast_in_threads(self.model, self.precision)
        devices = by_hand.devices_of(self.mesh)
        self.parallel = (nn.DataParallel if len(set(devices)) > 1 else by_hand.ThreadedReplicas)(self.model, devices)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
                part = cross_entropy(self.parallel(inputs), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm


def main(config):
    with process_group(config.device, config.backend, config.timeout, config.check_collectives) as ranks:
        task = make_task(config)
        mesh = make_mesh(config.axes, ranks.device.type)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        with Run(config, strategy, task) as run:
            batches = run.batches()
            for step in run.steps:  # from the step of the checkpoint until --steps
                strategy.set_learning_rate(run.learning_rate(step))
                loss, grad_norm = strategy.step(next(batches))
                if run.end_step(loss, grad_norm):  # Ctrl-C or SIGTERM, on any rank
                    break


if __name__ == "__main__":
    start()
