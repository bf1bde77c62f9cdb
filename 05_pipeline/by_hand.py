"""A pipeline by hand: every rank has some stages of the model, and works through its list of actions (executor.py).

With an axis "data" in the mesh there are several equal pipelines. Each reads its own slice of every batch, and ranks
with the same stages sum their gradients once in a step. The same interface as distributed_training.py; start it with
--by-hand.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import all_reduce_together, global_norm
from common.mesh import axis
from common.model import cross_entropy
from common.strategy import Strategy, mean_loss
from course.pipeline import options as pipeline_options
from course.pipeline import simulator, split
from course.pipeline.executor import Executor


class PipelineByHand(Strategy):
    """Every rank has some stages of the GPT; each batch goes through them in micro-batches, by a schedule.

    What --accumulation-steps makes of a batch goes through the pipeline one after the other; each is cut into
    micro-batches.
    """

    preset = {"pipeline": -1}
    from_meta = True
    tasks = ("text",)
    axes = ("pipeline", "data")
    Options = pipeline_options.PipelineOptions
    executor_class = Executor

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        pipeline_options.require(config, axes)

    def __init__(self, model, make_optimizer, setup):
        super().__init__(setup)
        self.pipeline, self.replicas = axis(self.mesh, "pipeline"), axis(self.mesh, "data")
        self.scaler = self.make_scaler(self.pipeline.group)
        everyone = axis(self.mesh, "pipeline", "data").group
        self.microbatches, self.actions = self.options.microbatches, self.options.build(self.pipeline.size)
        count = len(simulator.placement(self.actions))
        names = split.stages_of(model, count, self.options.split_spec, everyone, self.device, self.autocast)
        self.stages = split.own_stages(model, self.actions, self.pipeline, names, self.device, everyone=everyone)
        self.model = self.stages.model
        self.executor = self.make_executor(self.wrap_stages(self.stages.modules))
        self.optimizer = make_optimizer(self.model.parameters())

    def wrap_stages(self, modules):
        """The stages as the executor calls them: number -> module."""
        return modules

    def make_executor(self, modules):
        recompute = self.options.recompute == "full"
        return self.executor_class(
            self.actions, modules, self.pipeline.group, recompute, self.autocast, self.stages.dtype
        )

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for inputs, targets in micro_batches:
            loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)
        # Once in a step, over the ranks of other pipelines that have the same stages.
        all_reduce_together([loss, *self.stages.gradients()], self.replicas.group)
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
        inputs, targets = inputs.chunk(self.microbatches), targets.chunk(self.microbatches)

        def loss(logits, m):
            return self.scaler.scale(cross_entropy(logits.float(), targets[m]) / (self.microbatches * batches))

        return self.executor.run(inputs, loss, (*inputs[0].shape, self.stages.width)) / self.scaler.get_scale()

    def evaluate(self, inputs, targets):
        own = self.executor.stages, self.pipeline
        return self.stages.evaluate(*own, inputs, lambda logits: mean_loss(logits, targets), self.autocast)

    def parts(self):
        return self.stages.parts(super().parts())


class PipelineDDPByHand(PipelineByHand):
    """The same, with two pipelines where --mesh doesn't say how many."""

    preset = {"data": 2, "pipeline": -1}
