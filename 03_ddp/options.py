"""What both versions of data parallelism share: the axis of ranks that they run on, and their own options."""

from dataclasses import dataclass

from common.errors import UserError
from common.mesh import axis
from common.options import option
from common.recompute import RecomputeOptions
from common.strategy import Strategy, require_gradients
from course.ddp.loading import LOADING


class ReplicatedModel(Strategy):
    """Every rank holds the whole model and reads its own slice of each batch."""

    preset = {"data": -1}

    @dataclass
    class Options(RecomputeOptions):
        loading: str = option("shard", "who reads, decodes and sends the examples", tuple(LOADING))

        @property
        def load(self):
            """How Run.batches reads."""
            return LOADING[self.loading]

    def __init__(self, setup):
        super().__init__(setup)
        self.group = axis(self.mesh, "data").group

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        if config.task != "text" and "stream" in config.options.loading:
            raise UserError(
                f"--loading {config.options.loading} reads a stream of records, which --task {config.task} does "
                f"not have; use --loading shard or dispatch"
            )


class LastBackward:
    """Which trainable parameters of a model in DistributedDataParallel a step's last backward pass has reached.

    It averages gradients in that pass, and then `grad` is a part of one of its buckets (gradient_as_bucket_view=True).
    Meanwhile the gradients of earlier passes lie beside the buckets, 4 bytes more for each parameter. One that an
    earlier pass left, and this one does not add to, stays there, and is this rank's own, without a word.
    """

    def __init__(self, model):
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def begin(self) -> None:
        self.before = [parameter.grad for parameter in self.trained]

    def require_all(self) -> None:
        """Raise UserError where it has left some out. Gradients were None when the step began."""
        before, self.before = self.before, []  # the optimizer wants their memory
        without = [parameter for parameter, grad in zip(self.trained, before, strict=True) if parameter.grad is grad]
        if without:
            require_gradients(self.model, without=set(without))
