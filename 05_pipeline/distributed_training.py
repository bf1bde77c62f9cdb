"""Pipeline: every rank holds some stages of the model, and micro-batches follow each other through them.

PyTorch's schedules say which stage computes what when, and send activations and gradients from stage to stage.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pp
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

from common.collectives import broadcast_module, global_norm
from common.config import Config
from common.errors import UserError
from common.mesh import axis, make_mesh
from common.model import cross_entropy
from common.ranks import process_group
from common.run import Run
from common.strategy import Strategy
from common.task import make_task
from course.pipeline import options as pipeline_options
from course.pipeline import schedules, simulator, split
from course.start import start

SCHEDULES = {
    "gpipe": pp.ScheduleGPipe,
    "1f1b": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "looped-bfs": pp.ScheduleLoopedBFS,
    "zb-h1": pp.ScheduleInterleavedZeroBubble,  # ZB-H1 is what this class does with one stage per rank
    "interleaved-zb": pp.ScheduleInterleavedZeroBubble,
    "zbv": pp.ScheduleZBVZeroBubble,
    "dualpipev": pp.ScheduleDualPipeV,
}


class Stage(nn.Module):
    """Layers that compute in a context, such as autocast, and forget what they can compute again."""

    def __init__(self, layers, context, recompute):
        super().__init__()
        self.layers, self.context, self.recompute = layers, context, recompute

    def forward(self, x):
        with self.context():
            return checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x)


class PipelineParallel(Strategy):
    """The model is cut as by hand, and tied weights and clipping are by hand too: PyTorch has nothing for them."""

    preset = {"pipeline": -1}
    Options = pipeline_options.PipelineOptions
    stage_class = pp.PipelineStage

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        pipeline_options.require(config, axes)
        require_in_torch(config.options.schedule, axes.get("pipeline", 1), config.options.microbatches)

    def __init__(self, model, make_optimizer, mesh, options=None, precision="fp32", max_norm=1.0):
        super().__init__(mesh, options, precision, max_norm)
        self.pipeline, everyone = axis(mesh, "pipeline"), axis(mesh, "pipeline", "data", "shard").group
        # GradScaler skips a step whose gradients overflow; this one does so on all ranks if it does on any.
        self.scaler = ShardedGradScaler(self.device.type, enabled=precision == "fp16", process_group=everyone)
        self.scaler.scale(torch.zeros((), device=self.device))  # begins its work on ranks without a loss, too
        split.move(model, torch.device("cpu"))  # a rank may have been given a model without memory
        broadcast_module(model, everyone)  # ranks may have been seeded differently
        self.microbatches = self.options.microbatches
        schedule = schedules.build(
            self.options.schedule, self.pipeline.size, self.microbatches, self.options.stages_per_rank or None
        )
        count = len(simulator.placement(schedule))
        names = split.stages_of(model, count, self.options.split_spec, everyone, self.device, self.autocast)
        self.stages = split.own_stages(model, schedule, self.pipeline, names, self.device)
        self.model, recompute = self.stages.model, self.options.recompute == "full"
        modules = {n: Stage(layers, self.autocast, recompute) for n, layers in self.stages.modules.items()}
        self.executor = self.make_executor(self.wrap_stages(modules))
        self.optimizer = make_optimizer(self.model.parameters())

    def wrap_stages(self, modules):
        """The stages as the schedule calls them: number -> module."""
        return modules

    def make_executor(self, modules):
        """PyTorch's schedule over this rank's stages."""
        count, group, schedule = len(self.stages.rank_of), self.pipeline.group, SCHEDULES[self.options.schedule]
        self.own = [self.stage_class(layers, n, count, self.device, group=group) for n, layers in modules.items()]
        own = self.own[0] if issubclass(schedule, PipelineScheduleSingle) else self.own
        # The loss is divided already, so no gradients are to be.
        return schedule(own, self.microbatches, loss_fn=self.loss, scale_grads=False)

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for inputs, targets in micro_batches:
            loss += self.run(inputs, targets, len(micro_batches))
        self.stages.add_tied_gradients()
        dist.broadcast(loss, group=self.pipeline.group, group_src=self.stages.rank_of[-1])
        self.scaler.unscale_(self.optimizer)
        grad_norm = global_norm([(self.stages.gradients_for_norm(), [self.pipeline.group])], self.device)
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def run(self, inputs, targets, batches):
        """Once through the pipeline with one of `batches` equal parts of the batch whose mean we want."""
        pipeline_options.require_divisible(inputs, self.microbatches)
        self.divisor, losses = self.microbatches * batches, []
        # the first stage reads the inputs, the last one the targets
        self.executor.step(*[inputs] * self.stages.first, target=targets, losses=losses, return_outputs=False)
        return sum(loss.detach() for loss in losses) / self.scaler.get_scale()

    def loss(self, logits, targets):
        return self.scaler.scale(cross_entropy(logits.float(), targets) / self.divisor)

    def parts(self):
        return self.stages.parts(super().parts())


def require_in_torch(name: str, ranks: int, microbatches: int) -> None:
    """Raise UserError for numbers of micro-batches that PyTorch's schedules do not take, and ours do."""
    if name == "1f1b" and microbatches < ranks:
        raise UserError(
            f"--schedule 1f1b: PyTorch's wants a micro-batch for each of {ranks} ranks, not {microbatches}; make "
            f"--microbatches {ranks}, or add --by-hand"
        )
    if name == "zb-h1" and microbatches % (rounds := max(1, microbatches // ranks)):
        raise UserError(
            f"--schedule zb-h1: PyTorch's deals micro-batches out to {rounds} equal rounds, and {microbatches} are "
            f"not; make --microbatches {rounds * ranks}, or add --by-hand"
        )


def main(config: Config):
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        mesh = make_mesh(config.axes, ranks.device.type)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, mesh, config.options, config.precision)
        with Run(config, strategy, task) as run:
            batches = run.batches()
            for step in run.steps():
                strategy.set_learning_rate(run.learning_rate(step))
                loss, grad_norm = strategy.step(next(batches))
                run.log(step, loss, grad_norm)


if __name__ == "__main__":
    start("pipeline")
