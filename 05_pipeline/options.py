"""The options of pipelines: whether they fit together, and how a strategy gets them."""

from common.errors import UserError
from course.pipeline import schedules, split


def of(config) -> dict:
    """What a pipeline's class takes beyond the contract of a strategy."""
    return {
        "schedule": config.schedule,
        "microbatches": config.microbatches,
        "stages_per_rank": config.stages_per_rank or None,
        "split_spec": config.split_spec,
        "recompute": config.recompute == "full",
    } | ({"replicas": config.replicas} if "+" in config.strategy else {})


def check(config, ranks: int) -> None:
    """Raise UserError for what does not fit, before the ranks meet."""
    replicas = config.replicas if "+" in config.strategy else 1
    require_replicas(ranks, replicas)
    pipeline = ranks // replicas
    schedule = schedules.build(config.schedule, pipeline, config.microbatches, config.stages_per_rank or None)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    split.check(config.split_spec, config.layers, stages)
    if config.recompute == "selective":
        raise UserError("--recompute selective: a pipeline's stages compute all again, or nothing; take full or none")
    if not config.by_hand:
        require_in_torch(config.schedule, pipeline, config.microbatches)
        require_in_hybrid(config.strategy, config.schedule, pipeline, config.microbatches)
    parts = replicas * config.accumulate * config.microbatches
    if config.batch_size % parts:
        nearest = max(1, round(config.batch_size / parts)) * parts
        raise UserError(
            f"--batch-size {config.batch_size} does not divide by {replicas} pipeline(s) x --accumulate "
            f"{config.accumulate} x --microbatches {config.microbatches} = {parts}; the nearest that does is {nearest}"
        )


def require_replicas(ranks: int, replicas: int) -> None:
    if ranks % replicas:
        raise UserError(
            f"{ranks} rank(s) are not {replicas} equal pipelines; start a multiple of {replicas}, or set --replicas"
        )


def require_in_hybrid(strategy: str, name: str, ranks: int, microbatches: int) -> None:
    """Raise UserError for schedules with which PyTorch's hybrids do not train right, on so many ranks of a pipeline."""
    # In torch 2.13 the reducer of DistributedDataParallel fails an assertion in the second step where all forwards come
    # before the first backward, and it never sees weight gradients that are computed apart from those of inputs.
    if strategy == "pipeline+ddp" and name != "1f1b":
        raise UserError(
            f"--schedule {name}: PyTorch's DistributedDataParallel works in a pipeline with schedule 1f1b alone; take "
            f"that, or --strategy pipeline+fsdp, or add --by-hand"
        )
    if strategy == "pipeline+ddp" and 1 < microbatches <= ranks:
        raise UserError(
            f"--microbatches {microbatches}: PyTorch's DistributedDataParallel works in a pipeline of {ranks} ranks "
            f"with more micro-batches than that; make it {2 * ranks}, or add --by-hand"
        )
    if strategy == "pipeline+fsdp" and name in ("zbv", "dualpipev"):
        raise UserError(
            f"--schedule {name} puts the first and the last stage on one rank, and fully_shard would make two weights "
            f"of the one that they share; take another schedule, or --strategy pipeline+ddp --by-hand"
        )


def require_in_torch(name: str, ranks: int, microbatches: int) -> None:
    if name not in SCHEDULES:
        raise UserError(f"--schedule {name}: PyTorch has no such class; add --by-hand, or take interleaved-zb")
    if name == "1f1b" and microbatches < ranks:
        raise UserError(
            f"--schedule 1f1b: PyTorch's wants a micro-batch for each of {ranks} ranks, not {microbatches}; make "
            f"--microbatches {ranks}, or add --by-hand"
        )
