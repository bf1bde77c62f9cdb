"""Pipeline: every rank holds some stages of the model, and micro-batches follow each other through them.

PyTorch's schedules say which stage computes what when, and send activations and gradients from stage to stage.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
"""

import torch.distributed.pipelining as pp
from course.strategies import load
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils.checkpoint import checkpoint

from common.config import Config
from common.model import cross_entropy
from common.ranks import process_group
from common.task import make_task
from common.train import start, train
from course.pipeline import by_hand, options

SCHEDULES = {
    "gpipe": pp.ScheduleGPipe,
    "1f1b": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "looped-bfs": pp.ScheduleLoopedBFS,
    "interleaved-zb": pp.ScheduleInterleavedZeroBubble,
    "zbv": pp.ScheduleZBVZeroBubble,
    "dualpipev": pp.ScheduleDualPipeV,
}


class PipelineParallel(by_hand.Pipeline):
    """The model is cut as by hand, and tied weights and clipping are by hand too: PyTorch has nothing for them."""

    def make_executor(self, name, modules):
        """PyTorch's schedule over this rank's stages."""
        for layers in modules.values():
            layers.forward = self.in_context(layers.forward)
        count, device = len(self.rank_of), self.ranks.device
        stages = [pp.PipelineStage(layers, n, count, device, group=self.group) for n, layers in modules.items()]
        single = issubclass(SCHEDULES[name], PipelineScheduleSingle)
        # The loss is divided already, so no gradients are to be.
        return SCHEDULES[name](stages[0] if single else stages, self.microbatches, loss_fn=self.loss, scale_grads=False)

    def in_context(self, forward):
        def call(x):
            with self.autocast():
                return checkpoint(forward, x, use_reentrant=False) if self.recompute else forward(x)

        return call

    def loss(self, logits, targets):
        return self.scaler.scale(cross_entropy(logits.float(), targets) / self.parts)

    def run(self, inputs, targets, batches):
        """Once through the pipeline with one of `batches` equal parts of the batch whose mean we want."""
        self.require_divisible(inputs)
        self.parts, losses = self.microbatches * batches, []
        # the first stage reads the inputs, the last one the targets
        self.executor.step(*[inputs] * self.first, target=targets, losses=losses, return_outputs=False)
        return sum(losses) / self.scaler.get_scale()


def main(config: Config):
    with process_group(config.device, config.backend, check=config.check_collectives) as ranks:
        task = make_task(config)
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, ranks, config.precision, **options.of(config)
        )
        train(strategy, task, config, ranks)


if __name__ == "__main__":
    start(main, strategy="pipeline")
