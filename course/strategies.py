"""The one table of strategies. A function here puts a strategy on the command line and under all of the proofs.

Each imports its chapter when it is asked for, so that a run loads the chapters that it needs. What a strategy declares
of itself (mesh, options, requirements, model) stands with its class, in the chapter.
"""

from common.strategy import StrategyEntry
from course import engines


def single() -> StrategyEntry:
    from course.intro import distributed_training as script

    return StrategyEntry("01_intro", script.main, {"pytorch": script.SingleProcess}, (1,))


def dp() -> StrategyEntry:
    from course.data_parallel import by_hand
    from course.data_parallel import distributed_training as script

    kinds = {"pytorch": script.ThreadedDataParallel, "by-hand": by_hand.ThreadedDataParallelByHand}
    return StrategyEntry("02_data_parallel", script.main, kinds, (1,))


def ddp() -> StrategyEntry:
    from course.ddp import by_hand
    from course.ddp import distributed_training as script

    kinds = {"pytorch": script.DDP, "by-hand": by_hand.DDPByHand}
    return StrategyEntry("03_ddp", script.main, kinds, (1, 2, 4), engines.OF["ddp"])


def model() -> StrategyEntry:
    from course.model_parallel import by_hand_layers, layers_on_devices
    from course.model_parallel import distributed_training as script

    kinds = {"pytorch": layers_on_devices.LayersOnDevices, "by-hand": by_hand_layers.SplitLayers}
    # PyTorch's version is one process, which may use several devices.
    return StrategyEntry("04_model_parallel", script.main, kinds, {"pytorch": (1,), "by-hand": (1, 2, 4)})


def tensor() -> StrategyEntry:
    from course.model_parallel import by_hand_tensor
    from course.model_parallel import distributed_training as script

    kinds = {"pytorch": script.TensorParallel, "by-hand": by_hand_tensor.TensorParallelByHand}
    return StrategyEntry("04_model_parallel", script.main, kinds, (1, 2, 4))


def sequence() -> StrategyEntry:
    from course.model_parallel import by_hand_tensor
    from course.model_parallel import distributed_training as script

    kinds = {"by-hand": by_hand_tensor.SequenceParallelByHand}
    return StrategyEntry("04_model_parallel", script.main, kinds, (1, 2, 4))


def context() -> StrategyEntry:
    from course.model_parallel import by_hand_ring_attention
    from course.model_parallel import distributed_training as script

    kinds = {"by-hand": by_hand_ring_attention.ContextParallel}
    return StrategyEntry("04_model_parallel", script.main, kinds, (1, 2, 4))


def ulysses() -> StrategyEntry:
    from course.model_parallel import by_hand_ulysses
    from course.model_parallel import distributed_training as script

    return StrategyEntry("04_model_parallel", script.main, {"by-hand": by_hand_ulysses.Ulysses}, (1, 2, 4))


def expert() -> StrategyEntry:
    from course.model_parallel import by_hand_experts
    from course.model_parallel import distributed_training as script

    return StrategyEntry("04_model_parallel", script.main, {"by-hand": by_hand_experts.ExpertParallel}, (1, 2, 4))


def pipeline() -> StrategyEntry:
    from course.pipeline import by_hand
    from course.pipeline import distributed_training as script

    kinds = {"pytorch": script.PipelineParallel, "by-hand": by_hand.PipelineByHand}
    return StrategyEntry("05_pipeline", script.main, kinds, (1, 2, 4))


def pipeline_ddp() -> StrategyEntry:
    from course.pipeline import distributed_training as script
    from course.pipeline import pipeline_hybrids

    kinds = {"pytorch": pipeline_hybrids.PipelineDDP, "by-hand": pipeline_hybrids.PipelineDDPByHand}
    return StrategyEntry("05_pipeline", script.main, kinds, (2, 4))


def pipeline_fsdp() -> StrategyEntry:
    from course.pipeline import distributed_training as script
    from course.pipeline import pipeline_hybrids

    return StrategyEntry("05_pipeline", script.main, {"pytorch": pipeline_hybrids.PipelineFSDP}, (2, 4))


def zero1() -> StrategyEntry:
    from course.fsdp import by_hand_zero1, torch_zero
    from course.fsdp import distributed_training as script

    kinds = {"pytorch": torch_zero.Zero1, "by-hand": by_hand_zero1.Zero1ByHand}
    return StrategyEntry("06_fsdp", script.main, kinds, (1, 2, 4), engines.OF["zero1"])


def zero2() -> StrategyEntry:
    from course.fsdp import batch_size, by_hand_zero23, torch_zero

    kinds = {"pytorch": torch_zero.Zero2, "by-hand": by_hand_zero23.Zero2ByHand}
    return StrategyEntry("06_fsdp", batch_size.main, kinds, (1, 2, 4), engines.OF["zero2"])


def fsdp() -> StrategyEntry:
    from course.fsdp import batch_size, by_hand_zero23
    from course.fsdp import distributed_training as script

    kinds = {"pytorch": script.FSDP, "by-hand": by_hand_zero23.FSDPByHand}
    return StrategyEntry("06_fsdp", batch_size.main, kinds, (1, 2, 4), engines.OF["fsdp"])


def hsdp() -> StrategyEntry:
    from course.fsdp import by_hand_zero23
    from course.fsdp import distributed_training as script
    from course.fsdp import hsdp as hybrids

    kinds = {"pytorch": hybrids.HSDP, "by-hand": by_hand_zero23.HSDPByHand}
    return StrategyEntry("06_fsdp", script.main, kinds, (4,))


def tensor_fsdp() -> StrategyEntry:
    from course.fsdp import distributed_training as script
    from course.fsdp import hsdp as hybrids

    return StrategyEntry("06_fsdp", script.main, {"pytorch": hybrids.TensorFSDP}, (4,))


def mesh() -> StrategyEntry:
    from course.fsdp import by_hand_mesh, torch_mesh
    from course.fsdp import distributed_training as script

    # Proved on the meshes of tests/test_mesh.py.
    kinds = {"pytorch": torch_mesh.MeshParallel, "by-hand": by_hand_mesh.MeshByHand}
    return StrategyEntry("06_fsdp", script.main, kinds, (2, 4, 8))


STRATEGIES = {
    "single": single,
    "dp": dp,
    "ddp": ddp,
    "model": model,
    "tensor": tensor,
    "sequence": sequence,
    "context": context,
    "ulysses": ulysses,
    "expert": expert,
    "pipeline": pipeline,
    "pipeline+ddp": pipeline_ddp,
    "pipeline+fsdp": pipeline_fsdp,
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor+fsdp": tensor_fsdp,
    "mesh": mesh,
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


def load(strategy: str, implementation: str | bool = "pytorch"):
    """The class that implements a strategy: "pytorch", "by-hand" (or True), an engine such as "accelerate", ..."""
    name = {True: "by-hand", False: "pytorch"}.get(implementation, implementation)
    return STRATEGIES[strategy]().implementation(name)
