"""Fully sharded: every rank keeps its shard of parameters, gradients and optimizer state, and reads its own slice.

A block's parameters are gathered before it computes, forward and backward, and freed after.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("fsdp")

from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from common.mesh import make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.recompute import recompute_blocks
from common.run import Run
from common.strategy import require_gradients
from common.task import make_task
from course.fsdp import fsdp_setup


class FSDP(fsdp_setup.Sharded):
    """ZeRO stage 3: a unit for each block, for the embedding and for the head; one for both that share a weight."""

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.model = recompute_blocks(model, self.options.recompute)
        for unit, reshard in fsdp_setup.units_of(model).items():
            self.prepare(unit)  # from the meta device to rank 0's weights
            fully_shard(unit, reshard_after_forward=reshard, **self.how)
        self.optimizer = make_optimizer(self.model.parameters())
        if self.offloads:
            fsdp_setup.step_on_the_host(self.optimizer)

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
        return fsdp_setup.average(loss, self.readers.group), grad_norm.full_tensor()


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
