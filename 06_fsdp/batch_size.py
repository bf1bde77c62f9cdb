"""The largest batch within a budget of memory, foretold by PyTorch's tracker: on tensors without data, and on rank 0 of
ranks that are not there, so that nothing can run out of memory.

    torchrun --nproc_per_node=2 distributed_training.py --distributed --find-batch-size --memory-budget 1.5
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.constants import GIB
from common.data import OwnStream
from common.errors import UserError
from common.lab.layouts import forget_layouts
from common.mesh import make_mesh
from common.ranks import environment
from common.strategy import Setup
from common.task import make_task
from course.fsdp import distributed_training

CPU = torch.device("cpu")


@contextmanager
def pretend(ranks: int):
    """A process group of `ranks`, in which this process is rank 0, and whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()


def predict(config, ranks: int, examples: int) -> dict[str, int]:
    """Bytes at the peak of a step on one of `ranks` ranks, by kind as FSDPMemTracker names them, and "Total".

    config:   with one of PyTorch's strategies fsdp and zero2
    examples: in each of a rank's micro-batches
    What PyTorch itself takes is not counted, and kernels are those of the CPU.
    """
    task = make_task(config)
    assert not isinstance(task.dataset, OwnStream)  # a model of the user's is refused
    inputs, targets = task.dataset.batch(torch.zeros(1, dtype=torch.long))
    # Loss scaling looks at gradients, and fake ones have no values: fp16 takes as much as bf16.
    precision = "fp32" if config.precision == "fp32" else "bf16"
    with pretend(ranks):
        mesh = make_mesh({"shard": ranks})
        with FakeTensorMode():
            model = task.make_model()
            strategy = config.strategy_class(model, task.make_optimizer, Setup(mesh, config.options, precision))
            inputs, targets = (torch.zeros((examples, *t.shape[1:]), dtype=t.dtype) for t in (inputs, targets))
            micro_batches = [(inputs, targets)] * config.accumulation_steps
            strategy.step(micro_batches)  # makes the optimizer's state
            with FSDPMemTracker(model, strategy.optimizer) as tracker:
                # It follows a model through one forward pass only, unless it is told to begin anew; the peak remains.
                model.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True)
                strategy.step(micro_batches)
            peak = tracker.get_tracker_snapshot("peak")[CPU]
    return {str(getattr(kind, "value", kind)): size for kind, size in peak.items()}


def main(config) -> None:
    """The script's main, or the answer to --find-batch-size."""
    if config.options.trains:
        distributed_training.main(config)
    else:
        find(config)


def find(config) -> None:
    """Print the largest --batch-size with which every rank stays within --memory-budget. Raises UserError for none."""
    rank, ranks, *_ = environment()
    if rank > 0:
        return

    def gib(examples: int) -> float:
        return predict(config, ranks, examples)["Total"] / GIB

    fits, taken, budget = 0, 0.0, config.options.memory_budget
    too_many, too_much = 1, gib(1)
    while too_much <= budget:
        fits, taken = too_many, too_much
        too_many *= 2
        too_much = gib(too_many)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        there = gib(middle)
        if there <= budget:
            fits, taken = middle, there
        else:
            too_many, too_much = middle, there
    if not fits:
        raise UserError(
            f"--memory-budget {budget:g}: one example in a micro-batch takes {too_much:.3g} GiB on each of {ranks} "
            f"rank(s) already; start more, --recompute full, or make the model smaller"
        )
    parts = ranks * config.accumulation_steps
    print(
        f"--batch-size {fits * parts}: {fits} example(s) x {config.accumulation_steps} micro-batch(es) x {ranks} "
        f"rank(s), of which each takes {taken:.3f} GiB of {budget:g}; --batch-size {too_many * parts} would take "
        f"{too_much:.3f}"
    )
