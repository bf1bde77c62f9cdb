"""What pipelines with PyTorch's schedules have in common: the model is cut, and this rank has its stages of it."""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from common.collectives import global_norm
from common.mesh import axis
from common.model import cross_entropy
from common.strategy import Strategy, mean_loss
from course.pipeline import options as pipeline_options
from course.pipeline import simulator, split
from course.pipeline.torch_schedules import InContext


class InStages(Strategy):
    """Cut as by hand (split.py), and tied weights and clipping are by hand too: PyTorch has nothing for them.

    It leaves `stages`, what this rank has, and `modules`, its stages by number as the schedule will call them.
    """

    preset = {"pipeline": -1}
    from_meta = True
    tasks = ("text",)
    Options = pipeline_options.PipelineOptions

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        pipeline_options.require(config, axes)
        pipeline_options.require_in_torch(config.options, axes.get("pipeline", 1))

    def __init__(self, model, setup):
        super().__init__(setup)
        self.pipeline, everyone = axis(self.mesh, "pipeline"), axis(self.mesh, "pipeline", "data", "shard").group
        self.scaler = self.make_scaler(everyone)
        self.microbatches, schedule = self.options.microbatches, self.options.build(self.pipeline.size)
        count = len(simulator.placement(schedule))
        names = split.stages_of(model, count, self.options.split_spec, everyone, self.device, self.autocast)
        self.stages = split.own_stages(model, schedule, self.pipeline, names, self.device, everyone=everyone)
        self.model, recompute = self.stages.model, self.options.recompute == "full"
        modules = {n: InContext(layers, self.autocast, recompute) for n, layers in self.stages.modules.items()}
        self.modules = self.wrap_stages(modules)

    def wrap_stages(self, modules):
        """The stages as the schedule calls them: number -> module."""
        return modules

    def for_first_stage(self, inputs) -> list[torch.Tensor]:
        """What this rank hands to the schedule: the first stage's rank the inputs, the others nothing. Raises UserError
        for inputs that are no whole number of equal micro-batches, which PyTorch would cut into unequal ones."""
        pipeline_options.require_divisible(inputs, self.microbatches)
        return [inputs] if self.stages.first else []

    def loss(self, logits, targets):
        """What the last stage makes of a micro-batch: `divisor` of these means add up to that of a batch."""
        return self.scaler.scale(cross_entropy(logits.float(), targets) / self.divisor)

    def from_last_stage(self, loss) -> torch.Tensor:
        """What the last stage's rank has, on every rank of the pipeline. Elsewhere `loss` may be a plain 0."""
        loss = loss if isinstance(loss, torch.Tensor) else torch.zeros((), device=self.device)
        dist.broadcast(loss, group=self.pipeline.group, group_src=self.stages.rank_of[-1])
        return loss

    def clip(self) -> torch.Tensor:
        """Clip by the norm of the whole model, and return that; each rank has the gradients of its own stages."""
        grad_norm = global_norm([(self.stages.gradients_for_norm(), [self.pipeline.group])], self.device)
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, grad_norm)
        return grad_norm

    def evaluate(self, inputs, targets):
        return self.stages.evaluate(self.modules, self.pipeline, inputs, lambda logits: mean_loss(logits, targets))

    def parts(self):
        return self.stages.parts(super().parts())
