"""PyTorch's tracer instead of modules cut by hand: `pipeline()` follows one micro-batch through the whole model, and
cuts the graph that it saw at split points. Good for models whose forward is no plain sequence of layers."""

import copy

import torch.distributed.pipelining as pp

from course.pipeline.distributed_training import PipelineParallel
from course.pipeline.torch_schedules import make_schedule


class TracedPipeline(PipelineParallel):
    """Traced with the first micro-batch, of whose shape all others have to be. Parameters keep their names. Computes in
    float32, and keeps all activations."""

    def __init__(self, model, *args, **options):
        self.whole = copy.deepcopy(model)
        super().__init__(model, *args, **options)

    def run(self, inputs, targets, batches):
        if self.whole is not None:
            self.schedule = self.trace(inputs.chunk(self.microbatches)[0])
        return super().run(inputs, targets, batches)

    def trace(self, inputs):
        points = {names[0]: pp.SplitPoint.BEGINNING for names in self.stages.names[1:]}
        pipe = pp.pipeline(self.whole, (inputs.cpu(),), split_spec=points)
        self.whole = None
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for n in self.stages.modules:
            stage = pipe.get_stage_module(n)
            for name, _ in list(stage.named_parameters(remove_duplicate=False)):
                owner, _, attribute = name.rpartition(".")  # a tied weight may be here under its other place's name
                setattr(stage.get_submodule(owner), attribute, own.get(name, self.stages.tied))
        stages = [pipe.build_stage(n, self.device, self.pipeline.group) for n in self.stages.modules]
        return make_schedule(self.options, stages, self.loss)
