"""The planner agrees with this course's own strategies: bytes with the ledger, memory with accelerators that are not
there."""

import contextlib
import math
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import pytest
import strategy_memory
import torch
import torch.distributed as dist
from accelerator_cases import CASES as EXAMINED
from accelerator_cases import CONTEXT, ONE_PROCESS, WIDTH, Case, settings, sizes
from helpers import FULL

from common import data
from common.lab import equality
from common.lab.launch import launch, ready_to_fork
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.strategy import Setup
from common.task import Task
from course.pipeline.options import PipelineOptions
from course.strategies import load
from planner import models, traffic
from planner.layout import Layout

SHAPE = {"layers": 2, "width": 16, "heads": 4, "context": equality.CONTEXT, "vocabulary": 64}  # of equality's GPTs


def ledger_of(strategy: str, implementation: str, axes: dict[str, int], micro_batches: int, recompute: str):
    """Bytes that this rank sends in a step, by axis. The first and the last stage are a group of their own."""
    mesh = make_mesh(axes)
    cls = load(strategy, implementation)
    torch.manual_seed(0)
    options = PipelineOptions(microbatches=micro_batches) if "pipeline" in axes else None
    if recompute != "none":
        options = cls.Options(recompute=recompute)
    made = cls(equality.tied(), equality.sgd, Setup(mesh, options))
    names = {tuple(dist.get_process_group_ranks(axis(mesh, name).group)): name for name in axes}
    indices = data.global_batch(0, 0, equality.BATCH, equality.Batches.size)
    batches = data.micro_batches(equality.Batches(), indices, made.data_rank, made.data_size, 1, "cpu")
    with Ledger() as ledger:
        made.step(batches)
    found = dict.fromkeys(axes, 0.0)
    for entry in ledger.entries:
        if entry.payload > 16 and entry.ranks > 1:  # not those of the loss, and of the norm
            name = names.get(entry.group, "pipeline")
            found[name] = found.get(name, 0.0) + entry.sent
    return found


CASES = [  # strategy, axes, stage, micro-batches
    ("ddp", "by-hand", {"data": 4}, 0, 1),
    ("fsdp", "by-hand", {"shard": 4}, 3, 1),
    ("context", "by-hand", {"context": 4}, 0, 1),
    ("tensor", "by-hand", {"tensor": 4}, 0, 1),
    ("pipeline", "by-hand", {"pipeline": 4}, 0, 4),
    ("mesh", "by-hand", {"pipeline": 2, "data": 2}, 0, 2),
    ("mesh", "by-hand", {"shard": 2, "context": 2}, 3, 1),
    ("mesh", "by-hand", {"pipeline": 2, "tensor": 2}, 0, 2),
    ("hsdp", "by-hand", {"data": 2, "shard": 2}, 3, 1),
    ("mesh", "by-hand", {"data": 2, "tensor": 2}, 0, 1, "full"),
    *[("mesh", "pytorch", {"data": 2, "tensor": 2}, 0, 1, "full")] * FULL,  # 5 s, for DTensor's rules
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_the_ledgers(case):
    """On average over the ranks, along each axis."""
    strategy, kind, axes, stage, micro_batches, recompute = *case, *["none"][len(case) - 5 :]
    size = math.prod(axes.values())
    ranks = launch(ledger_of, size, (strategy, kind, axes, micro_batches, recompute), timeout=120)
    readers = axes.get("data", 1) * axes.get("shard", 1)
    layout = Layout(
        tuple(axes.items()), equality.BATCH, equality.BATCH // readers // micro_batches, SHAPE["context"], stage,
        precision="float32", sequence_parallel=False, shard_context=False, recompute=recompute, framework="course",
    )  # fmt: skip
    expected = traffic.sent(models.course_gpt(**SHAPE), layout)
    if "data" not in axes and stage == 0 and "context" in axes:  # all ranks have whole copies
        expected["context"] += expected.pop("data")
    found = {name: sum(rank.get(name, 0) for rank in ranks) / size for rank in ranks for name in rank}
    print(f"{strategy} {axes}: ledger {found}, planner {expected}")
    assert found == pytest.approx(expected, rel=1e-9), "bytes along each axis: the planner's, and the ledger's"


# --- memory ---------------------------------------------------------------------------------------------------

TOKENS = 8192  # so many that activations are as large as states


def measured(case: Case) -> tuple[int, int]:
    """(the most bytes alive on a device in a step of two micro-batches, after a first step; what the planner says)."""
    from common.lab.fake_accelerator import pretend
    from common.lab.fake_stand_ins import register
    from course.data_parallel import by_hand as data_parallel

    warnings.filterwarnings("ignore", "PyTorch is not compiled with NCCL support")
    config, alone, extra = settings(case), case.who in ONE_PROCESS, {}
    rank, size, devices = (0, 1, case.size) if alone else (case.rank, case.size, 1)
    register(devices)
    gpus = [torch.device("gpu", number) for number in range(devices)] if alone else []
    if alone and case.who != ("dp", "pytorch"):
        extra["devices"] = gpus
    examples = TOKENS // CONTEXT
    message = (examples // getattr(config.options, "microbatches", 1), CONTEXT, WIDTH)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(data_parallel, "devices_of", lambda mesh: gpus))
        mesh, watch = stack.enter_context(pretend(config.axes, rank, size, devices, message))
        with torch.device("meta" if config.strategy_class.from_meta and rank > 0 else "cpu"):
            model = config.strategy_class.make_model(config)
        made = config.strategy_class(
            model, Task(None, config).make_optimizer, Setup(mesh, config.options, "fp32"), **extra
        )
        for number in (1, 2):
            phase = watch.begin(f"step {number}")
            tokens = torch.zeros(examples, CONTEXT, dtype=torch.long, device="gpu")
            made.step([(tokens, tokens.clone()) for _ in range(number)])
    return phase.peak, strategy_memory.peak(sizes(case), TOKENS)


# In make test one of each kind, and both ends of a pipeline; in make test-all every strategy.
FEW = [Case("tensor", "by-hand", 8, 7), Case("pipeline", "by-hand", 4, 0), Case("pipeline", "by-hand", 4, 3),
       Case("fsdp", "pytorch", 4, 0), Case("zero2", "by-hand", 4, 0)]  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere():
    """One process for all, since they change PyTorch for good."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("fork")) as pool:
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
        with ready_to_fork():
            pool.submit(int).result()
        yield lambda case: pool.submit(measured, case).result(timeout=300)


@pytest.mark.parametrize("case", EXAMINED if FULL else FEW, ids=str)
def test_memory_is_that_of_an_accelerator_that_is_not_there(case, elsewhere):
    peak, said = elsewhere(case)
    print(f"{case}: at most {peak:,} bytes, planner {said:,}: {said / peak - 1:+.1%}")
    assert abs(said / peak - 1) < 0.05, "bytes that the planner says, and the device's peak"
