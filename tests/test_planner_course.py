"""The planner agrees with this course's own strategies: bytes with the ledger, memory with accelerators that are not
there."""

import math

import pytest
import torch
import torch.distributed as dist

from common import data
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from course.pipeline.options import PipelineOptions
from course.strategies import load
from planner import models, traffic
from planner.layout import Layout

SHAPE = {"layers": 2, "width": 16, "heads": 4, "context": equality.CONTEXT, "vocabulary": 64}  # of equality's GPTs


def ledger_of(strategy: str, implementation: str, axes: dict[str, int], micro_batches: int):
    """Bytes that this rank sends in a step, by axis. The first and the last stage are a group of their own."""
    mesh = make_mesh(axes)
    cls = load(strategy, implementation)
    torch.manual_seed(0)
    options = PipelineOptions(microbatches=micro_batches) if "pipeline" in axes else None
    made = cls(equality.tied(), equality.sgd, mesh, options)
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
]


@pytest.mark.parametrize("strategy, kind, axes, stage, micro_batches", CASES, ids=str)
def test_bytes_are_the_ledgers(strategy, kind, axes, stage, micro_batches):
    """On average over the ranks, along each axis."""
    size = math.prod(axes.values())
    ranks = launch(ledger_of, size, (strategy, kind, axes, micro_batches), timeout=120)
    readers = axes.get("data", 1) * axes.get("shard", 1)
    layout = Layout(
        tuple(axes.items()), equality.BATCH, equality.BATCH // readers // micro_batches, SHAPE["context"], stage,
        precision="float32", sequence_parallel=False, shard_context=False,
    )  # fmt: skip
    expected = traffic.sent(models.course_gpt(**SHAPE), layout)
    if "data" not in axes and stage == 0 and "context" in axes:  # all ranks have whole copies
        expected["context"] += expected.pop("data")
    found = {name: sum(rank.get(name, 0) for rank in ranks) / size for rank in ranks for name in rank}
    print(f"{strategy} {axes}: ledger {found}, planner {expected}")
    assert found == pytest.approx(expected, rel=1e-9)
