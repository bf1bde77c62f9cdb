"""The one table of strategies. A line here puts a strategy on the command line and under all of the proofs."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # whoever unpickles something of a chapter imports the chapter by its name


@dataclass(frozen=True)
class Entry:
    """Where a strategy lives and what is promised of it.

    chapter:     its folder; `torch` and `by_hand` name its classes there, "file.Class" where that is not
                 distributed_training.py or by_hand.py. None: there is no such version
    world_sizes: on how many ranks it must equal one process
    alone:       PyTorch's version is one process, which may use several devices; world_sizes are of that by hand
    """

    chapter: str
    torch: str | None
    by_hand: str | None
    world_sizes: tuple[int, ...]
    alone: bool = False

    def sizes(self, by_hand: bool) -> tuple[int, ...]:
        """On how many ranks this version must equal one process."""
        return (1,) if self.alone and not by_hand else self.world_sizes


STRATEGIES = {
    "single": Entry("01_intro", "SingleProcess", None, (1,)),
    "dp": Entry("02_data_parallel", "ThreadedDataParallel", "ThreadedDataParallelByHand", (1,)),
    "ddp": Entry("03_ddp", "DataParallel", "DataParallelByHand", (1, 2, 4)),
    "model": Entry("04_model_parallel", "layers.LayersOnDevices", "by_hand_layers.SplitLayers", (1, 2, 4), alone=True),
    "tensor": Entry("04_model_parallel", "TensorParallel", "by_hand_tensor.TensorParallelByHand", (1, 2, 4)),
    "sequence": Entry("04_model_parallel", None, "by_hand_tensor.SequenceParallelByHand", (1, 2, 4)),
    "context": Entry("04_model_parallel", None, "by_hand_context.ContextParallel", (1, 2, 4)),
    "ulysses": Entry("04_model_parallel", None, "by_hand_ulysses.Ulysses", (1, 2, 4)),
    "expert": Entry("04_model_parallel", None, "by_hand_experts.ExpertParallel", (1, 2, 4)),
    "pipeline": Entry("05_pipeline", "PipelineParallel", "Pipeline", (1, 2, 4)),
    "pipeline+ddp": Entry("05_pipeline", "hybrid.PipelinesDDP", "hybrid.PipelinesByHand", (2, 4)),
    "pipeline+fsdp": Entry("05_pipeline", "hybrid.PipelinesFSDP", None, (2, 4)),
    "zero1": Entry("06_fsdp", "zero.ShardedOptimizer", "ShardedOptimizer", (1, 2, 4)),
    "zero2": Entry("06_fsdp", "zero.ShardedGradients", "by_hand_fsdp.ShardedGradients", (1, 2, 4)),
    "fsdp": Entry("06_fsdp", "FullyShard", "by_hand_fsdp.ShardedParameters", (1, 2, 4)),
    "hsdp": Entry("06_fsdp", "hybrid.HybridShard", None, (4,)),
    "tensor+fsdp": Entry("06_fsdp", "hybrid.TensorFullyShard", None, (4,)),
}


def module(chapter: str, name: str):
    """Import `name`.py of a chapter's folder, e.g. module("03_ddp", "by_hand"): a folder's name that begins with
    a digit is beyond the import statement, and every chapter has a file of the same name."""
    full = f"{chapter}.{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, ROOT / chapter / f"{name}.py")
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


def load(strategy: str, by_hand: bool):
    """The class that implements a strategy, with PyTorch's own API or by hand."""
    entry = find(strategy, by_hand)
    default, where = ("by_hand", entry.by_hand) if by_hand else ("distributed_training", entry.torch)
    file, _, name = where.rpartition(".")
    return getattr(module(entry.chapter, file or default), name)


def find(strategy: str, by_hand: bool = False) -> Entry:
    """The table's line for a strategy. Raises UserError for an unknown name, or a version that there is not."""
    if strategy not in STRATEGIES:
        raise UserError(f"unknown strategy '{strategy}'; known: {', '.join(STRATEGIES)}")
    if by_hand and STRATEGIES[strategy].by_hand is None:
        raise UserError(f"--by-hand: strategy '{strategy}' has no version by hand; leave it out")
    if not by_hand and STRATEGIES[strategy].torch is None:
        raise UserError(f"strategy '{strategy}' has a version by hand only; add --by-hand")
    return STRATEGIES[strategy]
