"""Tensor parallelism: every rank holds a part of every large weight, and all ranks read the same batch.

PyTorch's DTensor knows which part of a weight or an activation a rank has, and sends what is missing.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("tensor")

import torch.distributed.tensor.parallel as tp
from torch.nn.utils import clip_grad_norm_

from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.run import Run
from common.strategy import require_gradients
from common.task import make_task
from course.model_parallel.division import DividedModel
from course.model_parallel.torch_tensor import apply_tensor_parallel


class TensorParallel(DividedModel):
    """All ranks read the same batch; each computes with its part of every large weight."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        apply_tensor_parallel(model, self.mesh["tensor"])
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
