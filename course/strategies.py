"""The one table of strategies. A line here puts a strategy on the command line and under all of the proofs.

It is data: "by_hand:DDPByHand" is the class of that name in that file of the chapter's folder, and it is imported when
a run asks for it. What a strategy declares of itself (mesh, options, requirements, model) stands with its class, in the
chapter.
"""

from typing import TYPE_CHECKING

from common.strategy_entry import Engine, StrategyEntry
from course import CHAPTERS

if TYPE_CHECKING:  # it imports torch
    from common.strategy import Strategy

DEEPSPEED, ACCELERATE, FABRIC, TRAINER = "deepspeed", "accelerate", "lightning", "transformers"  # packages


def entry(
    chapter: str, world_sizes, engines=None, main: str = "distributed_training:main", **kinds: str
) -> StrategyEntry:
    """A line of the table; `by_hand` and `pytorch` are implementations, `engines` more by name: (package, class)."""
    named = {kind.replace("_", "-"): f"course.{chapter}.{place}" for kind, place in kinds.items()}
    more = {name: Engine(package, f"course.{chapter}.{place}") for name, (package, place) in (engines or {}).items()}
    return StrategyEntry(CHAPTERS[chapter].name, f"course.{chapter}.{main}", named, world_sizes, more)


STRATEGIES = {
    "single": entry("intro", (1,), pytorch="distributed_training:SingleProcess"),
    "dp": entry(
        "data_parallel",
        (1,),
        pytorch="distributed_training:ThreadedDataParallel",
        by_hand="by_hand:ThreadedDataParallelByHand",
    ),
    "ddp": entry(
        "ddp",
        (1, 2, 4),
        {
            "accelerate": (ACCELERATE, "with_accelerate:DDPWithAccelerate"),
            "fabric": (FABRIC, "with_fabric:DDPWithFabric"),
        },
        pytorch="distributed_training:DDP",
        by_hand="by_hand:DDPByHand",
    ),
    "model": entry(  # PyTorch's version is one process, which may use several devices
        "model_parallel",
        {"pytorch": (1,), "by-hand": (1, 2, 4)},
        pytorch="layers_on_devices:LayersOnDevices",
        by_hand="by_hand_layers:SplitLayers",
    ),
    "tensor": entry(
        "model_parallel",
        (1, 2, 4),
        pytorch="distributed_training:TensorParallel",
        by_hand="by_hand_tensor:TensorParallelByHand",
    ),
    "sequence": entry("model_parallel", (1, 2, 4), by_hand="by_hand_tensor:SequenceParallelByHand"),
    "context": entry("model_parallel", (1, 2, 4), by_hand="by_hand_ring_attention:ContextParallel"),
    "ulysses": entry("model_parallel", (1, 2, 4), by_hand="by_hand_ulysses:Ulysses"),
    "expert": entry("model_parallel", (1, 2, 4), by_hand="by_hand_experts:ExpertParallel"),
    "pipeline": entry(
        "pipeline", (1, 2, 4), pytorch="distributed_training:PipelineParallel", by_hand="by_hand:PipelineByHand"
    ),
    "pipeline+ddp": entry(
        "pipeline", (2, 4), pytorch="pipeline_hybrids:PipelineDDP", by_hand="by_hand:PipelineDDPByHand"
    ),
    "pipeline+fsdp": entry("pipeline", (2, 4), pytorch="pipeline_hybrids:PipelineFSDP"),
    "zero1": entry(
        "fsdp",
        (1, 2, 4),
        {"deepspeed": (DEEPSPEED, "with_deepspeed:Zero1WithDeepSpeed")},
        pytorch="torch_zero:Zero1",
        by_hand="by_hand_zero1:Zero1ByHand",
    ),
    "zero2": entry(
        "fsdp",
        (1, 2, 4),
        {"deepspeed": (DEEPSPEED, "with_deepspeed:Zero2WithDeepSpeed")},
        main="batch_size:main",
        pytorch="torch_zero:Zero2",
        by_hand="by_hand_zero23:Zero2ByHand",
    ),
    "fsdp": entry(
        "fsdp",
        (1, 2, 4),
        {
            "accelerate": (ACCELERATE, "with_accelerate:FSDPWithAccelerate"),
            "deepspeed": (DEEPSPEED, "with_deepspeed:Zero3WithDeepSpeed"),
            "trainer": (TRAINER, "with_trainer:FSDPWithTrainer"),
        },
        main="batch_size:main",
        pytorch="distributed_training:FSDP",
        by_hand="by_hand_zero23:FSDPByHand",
    ),
    "hsdp": entry("fsdp", (4,), pytorch="hsdp:HSDP", by_hand="by_hand_zero23:HSDPByHand"),
    "tensor+fsdp": entry("fsdp", (4,), pytorch="hsdp:TensorFSDP"),
    # Proved on the meshes of the tests.
    "mesh": entry("fsdp", (2, 4, 8), pytorch="torch_mesh:MeshParallel", by_hand="by_hand_mesh:MeshByHand"),
}

# Which strategy a --mesh means that names these axes; all others mean "mesh".
BY_AXES = {
    frozenset(axes.split()): name
    for axes, name in {
        "data": "ddp",
        "shard": "fsdp",
        "tensor": "tensor",
        "context": "context",
        "expert": "expert",
        "data expert": "expert",
        "pipeline": "pipeline",
        "data pipeline": "pipeline+ddp",
        "shard pipeline": "pipeline+fsdp",
        "data shard": "hsdp",
        "shard tensor": "tensor+fsdp",
    }.items()
}


def load(strategy: str, implementation: str | bool = "pytorch") -> "type[Strategy]":
    """The class that implements a strategy: "pytorch", "by-hand" (or True), an engine such as "accelerate", ..."""
    if isinstance(implementation, bool):
        implementation = "by-hand" if implementation else "pytorch"
    return STRATEGIES[strategy].implementation(implementation)
