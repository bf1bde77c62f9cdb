"""Pipeline: every rank holds some stages of the model, and micro-batches follow each other through them.

PyTorch's schedules say which stage computes what when, and send activations and gradients from stage to stage.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

if __name__ == "__main__":  # before anything else is imported: a wrong command is refused at once
    from course.start import read_command

    start = read_command("pipeline")

import torch.distributed.pipelining as pp

from common.mesh import make_mesh
from common.ranks import process_group
from common.run import Run
from common.task import make_task
from course.pipeline.torch_schedules import make_schedule
from course.pipeline.torch_stages import InStages


class PipelineParallel(InStages):
    """Every rank has some stages of the GPT; each batch goes through them in micro-batches, by PyTorch's schedule."""

    stage_class = pp.PipelineStage

    def __init__(self, model, make_optimizer, setup):
        super().__init__(model, setup)
        place = len(self.stages.rank_of), self.device  # stages in all, and where this rank's are
        self.own = [self.stage_class(s, n, *place, group=self.pipeline.group) for n, s in self.modules.items()]
        self.schedule = make_schedule(self.options, self.own, self.loss)
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            loss += self.run(inputs, targets, len(micro_batches))
        self.stages.add_tied_gradients()
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.from_last_stage(loss), grad_norm

    def run(self, inputs, targets, batches):
        """Once through the pipeline with one of `batches` equal parts of the batch whose mean we want."""
        self.divisor, losses = self.microbatches * batches, []
        self.schedule.step(*self.for_first_stage(inputs), target=targets, losses=losses, return_outputs=False)
        return sum(loss.detach() for loss in losses) / self.scaler.get_scale()


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
