"""What all pipelines have in common on the command line: their options, and which of them fit together."""

from dataclasses import dataclass

from common.constants import RECOMPUTE
from common.errors import UserError
from common.options import StrategyOptions, option
from course.pipeline import schedules, simulator, split


@dataclass
class PipelineOptions(StrategyOptions):
    schedule: str = option("1f1b", "in which order the stages of a pipeline work", tuple(schedules.SCHEDULES))
    microbatches: int = option(4, "micro-batches of a pipeline, into which each batch is cut", at_least=1)
    stages_per_rank: int = option(0, "stages on each rank of a pipeline; 0: what the schedule needs", at_least=0)
    split_spec: str = option(
        "auto", "where a pipeline is cut: auto, auto-time, or places: 'blocks.1: end, head: beginning'"
    )
    recompute: str = option("none", "what is computed again in the backward pass, to save memory", RECOMPUTE)

    def build(self, ranks: int) -> schedules.Schedule:
        """The schedule for a pipeline of so many ranks. Raises UserError for numbers that do not fit it."""
        return schedules.build(self.schedule, ranks, self.microbatches, self.stages_per_rank or None)


def require(config, axes: dict[str, int]) -> None:
    """Raise UserError for a schedule, stages or batches that do not fit, before the ranks meet.

    axes: their sizes; ranks along other axes than "pipeline" are replicas, and each reads its own slice of a batch
    """
    chosen, replicas = config.options, axes.get("data", 1) * axes.get("shard", 1)
    parts = replicas * config.accumulation_steps * chosen.microbatches
    if config.batch_size % parts:
        nearest = max(1, round(config.batch_size / parts)) * parts
        raise UserError(
            f"--batch-size {config.batch_size} does not divide by {replicas} pipeline(s) x --accumulation-steps "
            f"{config.accumulation_steps} x --microbatches {chosen.microbatches} = {parts}; the nearest that does is "
            f"{nearest}"
        )
    stages = len(simulator.placement(chosen.build(axes.get("pipeline", 1))))
    split.require_spec(chosen.split_spec, config.layers, stages)
    if chosen.recompute == "selective":
        raise UserError("--recompute selective: a pipeline's stages compute all again, or nothing; take full or none")


def require_divisible(inputs, microbatches: int) -> None:
    """Raise UserError for a batch [examples, ...] that is no whole number of equal micro-batches."""
    if len(inputs) % microbatches:
        raise UserError(f"{len(inputs)} examples cannot be cut into {microbatches} equal micro-batches")


def require_in_torch(chosen: PipelineOptions, ranks: int) -> None:
    """Raise UserError for what PyTorch's schedules do not do, or not well, and ours do."""
    name, microbatches = chosen.schedule, chosen.microbatches
    # A backward in two halves asks autograd once for the inputs' gradients and then once for each group of weights
    # (stage_backward_weight in torch/distributed/pipelining/_backward.py), and a checkpoint is computed again each time
    # that it is asked. With four blocks in a stage, each is then computed 19 times under zb-h1, and by hand twice.
    if chosen.recompute == "full" and schedules.in_halves(chosen.build(ranks)):
        raise UserError(
            f"--recompute full --schedule {name}: PyTorch's would compute a stage again for each of its weights' "
            f"gradients; take --schedule 1f1b or interleaved, or add --by-hand"
        )
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
