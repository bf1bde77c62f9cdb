"""Meshes: who is in which group; every nesting of parallelisms equals one process; each axis sends what its formula
says; what cannot be combined is refused."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, configure
from pipelines import apart
from proofs import Job, prove_all

from common import data
from common.errors import UserError
from common.lab import equality
from common.lab.equality import CASES, Case
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import AXES, axis, in_order, make_mesh, parse_order
from common.model import GPT
from common.strategy import Setup
from course.fsdp.by_hand_mesh import MeshByHand
from course.fsdp.torch_mesh import MeshParallel
from course.model_parallel.by_hand_experts import ExpertParallel
from course.pipeline.options import PipelineOptions
from course.strategies import STRATEGIES, load

EIGHT = {"pipeline": 2, "data": 2, "tensor": 2}


def timeouts() -> list[float]:
    mesh = make_mesh(EIGHT)
    of_axes = [*mesh.get_all_groups(), axis(mesh, "data", "tensor").group]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in of_axes]


def test_groups_wait_no_longer_than_the_world():
    assert launch(timeouts, 8, timeout=77) == [[77.0] * 4] * 8, "seconds: of each axis, and of data and tensor together"


# SGD as well as AdamW, accumulation 1 and 3, tied and frozen weights, clipped and not: each once with each of the rest.
TWO = [replace(case, steps=case.steps if FULL else 2) for case in (CASES[2], CASES[5])]
SMALL = PipelineOptions(microbatches=2)
BY_HAND = [
    EIGHT,
    {"data": 2, "shard": 2, "tensor": 2},
    {"pipeline": 2, "context": 2, "tensor": 2},
    {"data": 2, "shard": 2, "context": 2},
    {"data": 2, "pipeline": 2},  # the other order
]
TORCH = [
    {"data": 2, "tensor": 2},
    {"pipeline": 2, "data": 2},
    {"pipeline": 2, "shard": 2},
    {"pipeline": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"data": 2, "shard": 2},
    EIGHT,
]


BY_TIME = PipelineOptions(microbatches=2, split_spec="auto-time")


@dataclass(frozen=True)
class Barely:
    """A model of which little is trained, of sizes that are no powers of two; all ranks begin with equal weights."""

    trained: tuple[str, ...]
    vocabulary: int

    @property
    def __name__(self):
        return f"only {' and '.join(self.trained)} trained"

    def __call__(self, model_class=GPT):
        torch.manual_seed(equality.SEED)
        model = model_class(layers=3, width=20, heads=4, context=equality.CONTEXT, vocabulary=self.vocabulary)
        for name, parameter in equality.scaled_up(model).named_parameters():
            parameter.requires_grad_(name.startswith(self.trained))
        return model


def barely(preset) -> list[Case]:
    """In the first nobody before the last block wants a gradient, and the weight at both ends is frozen; in the second
    that is trained, and gradients have to come all the way through what is frozen, also in a block of which only what
    comes last is trained."""
    vocabulary = 68 if "tensor" in preset else 65  # only tensor parallelism has to divide it
    last = "blocks.1.mlp.down.bias", "blocks.1.mlp.experts.down_bias"
    return [
        Case(Barely(("blocks.2.norm", "head.norm"), vocabulary), equality.sgd, 3, 0.05, steps=2),
        Case(Barely(("embedding", *last), vocabulary), equality.adamw, 1, 100.0, steps=2),
    ]


# Of PyTorch's, stages of what is sharded (FULL=1: every two axes, and eight ranks; in one process of "tensor+fsdp"
# test_equality.py has the other two ways to cut a model); by hand every mesh meets SGD, and one AdamW too.
JOBS = [
    *(Job("by hand", MeshByHand, TWO if FULL or axes == EIGHT else TWO[:1], axes, SMALL) for axes in BY_HAND),
    *(
        Job("PyTorch's", MeshParallel, TWO[:1], axes, SMALL)
        for axes in TORCH
        if FULL or axes.keys() in ({"pipeline", "shard"}, {"pipeline", "tensor"})
    ),
    Job("experts and replicas", ExpertParallel, TWO, {"data": 2, "expert": 2}),
    Job("stages balanced by time", MeshByHand, TWO[:1], {"pipeline": 2, "tensor": 2}, replace(BY_TIME, schedule="zbv")),
    *(
        Job(f"{name}, {kind}, of which little is trained", cls, barely(cls.preset), apart(cls.preset))
        for name, entry in STRATEGIES.items()
        for kind, cls in entry.implementations.items()
        if max(entry.sizes(kind)) > 1 and name != "mesh" and (FULL or kind == "by-hand")
    ),
    *([Job("stages balanced by time", MeshParallel, TWO[:1], {"pipeline": 2, "tensor": 2}, BY_TIME)] if FULL else []),
]


@pytest.mark.parametrize("nproc", (4, 8))
def test_every_mesh_equals_one_process(nproc):
    jobs = [job for job in JOBS if math.prod(job.axes.values()) == nproc]
    assert [len(proofs) for proofs in prove_all(jobs, nproc)] == [len(job.cases) for job in jobs]


def test_the_cases_are_different_enough():
    (one, other) = TWO
    assert one.make_optimizer is not other.make_optimizer and one.make_model is not other.make_model
    assert {one.accumulate, other.accumulate} == {1, 3} and {one.max_norm < 1, other.max_norm < 1} == {True, False}


# --- what each axis sends -------------------------------------------------------------------------------------


def sent_along_each_axis(axes):
    """Calls and payload bytes of one step of MeshByHand on this rank, by axis and operation, and its sizes."""
    mesh = make_mesh(axes)
    torch.manual_seed(0)
    strategy = MeshByHand(equality.tied(), equality.sgd, Setup(mesh, SMALL))
    names = {tuple(dist.get_process_group_ranks(axis(mesh, name).group)): name for name in axes}
    indices = data.global_batch(0, 0, equality.BATCH, equality.Batches.size)
    place = (strategy.data_rank, strategy.data_size)
    batches = data.micro_batches(equality.Batches(), indices, *place, 1, "cpu")
    with Ledger() as ledger:
        strategy.step(batches)
    found = {}
    for entry in ledger.entries:
        name = names.get(entry.group, "all" if entry.ranks > 1 else "alone")
        calls, payload = found.get((name, entry.operation), (0, 0))
        found[name, entry.operation] = calls + 1, payload + entry.payload
    own = sum(p.numel() for p in strategy.model.parameters())
    return found, own, len(strategy.stages.modules) if strategy.stages else 0


def test_each_axis_sends_what_its_formula_says():
    """On pipeline=2, data=2, tensor=2: a GPT of 2 blocks, batch 24 in two slices, each in two micro-batches."""
    found = launch(sent_along_each_axis, 8, (EIGHT,), timeout=600)
    width, float32, micro, examples = 16, 4, 2, equality.BATCH // 2
    activations = examples * equality.CONTEXT * width * float32  # of all micro-batches of a slice, on one stage
    for rank, (sent, own, stages) in enumerate(found):
        assert stages == 1
        first = rank < 4
        # pipeline: activations of every micro-batch forward, their gradients back
        assert sent["pipeline", "send"] == (micro, activations)
        assert sent["pipeline", "recv"] == (micro, activations)
        # data: all gradients that this rank has, in one message, and the loss in another
        assert sent["data", "all_reduce"] == (2, float32 * own + float32)
        # tensor: in each block and micro-batch two sums forward and two back; one more for the embedding (g, forward)
        # or for the head (f, back) and the three of the cross entropy; one for the norm
        blocks = 1
        calls, _ = sent["tensor", "all_reduce"]
        assert calls == micro * 4 * blocks + (micro if first else micro + 2 * micro) + 1


SAME = [  # axes, and the strategy that has those alone
    *((axes, strategy, kind) for kind in ("by-hand", "pytorch") for axes, strategy in (
        ({"shard": 2}, "fsdp"), ({"tensor": 2}, "tensor"), ({"pipeline": 2}, "pipeline"))),
    ({"context": 2}, "context", "by-hand"),
    ({"pipeline": 2, "shard": 2}, "pipeline+fsdp", "pytorch"),
]  # fmt: skip


def sent_by_both(rows):
    """What a step of two micro-batches sends but scalars: of the mesh, and of the strategy."""
    found = []
    for axes, *who in rows:
        for kind in (load("mesh", who[1]), load(*who)):
            options = kind.Options(schedule="interleaved") if axes.keys() > {"pipeline"} else None
            torch.manual_seed(0)
            trained = kind(equality.tied(), equality.sgd, Setup(make_mesh(axes), options))
            batch = [(part[:, :-1], part[:, 1:]) for part in equality.Batches().tokens[:8].chunk(2)]
            trained.step(batch)
            with Ledger() as ledger:
                trained.step(batch)
            large = [entry for entry in ledger.entries if entry.payload > 200 and entry.ranks > 1]
            found.append(Counter((entry.operation, entry.payload) for entry in large))
    return found


@pytest.mark.parametrize("nproc", (2, 4))
def test_a_mesh_sends_what_the_strategy_of_its_axes_sends(nproc):
    rows = [row for row in SAME if math.prod(row[0].values()) == nproc]
    for found in launch(sent_by_both, nproc, (rows,)):
        for row, mesh, own in zip(rows, found[::2], found[1::2], strict=True):
            assert mesh == own and own, row


# --- what does not go together --------------------------------------------------------------------------------


def test_every_pair_of_axes_is_proved_or_refused():
    proved = {frozenset(pair) for axes in BY_HAND for pair in itertools.combinations(axes, 2)} | {
        frozenset(("data", "expert"))
    }
    for pair in itertools.combinations(AXES, 2):
        line = "--by-hand --mesh " + ",".join(f"{name}=2" for name in pair)
        if frozenset(pair) in proved:
            continue
        with pytest.raises(UserError, match="^--mesh"):
            configure(line, 4)


def groups(axes):
    """On each rank: the global ranks of its group along each axis, and along data and tensor together."""
    mesh = make_mesh(axes)
    alone = axis(mesh, "expert")
    along = {name: dist.get_process_group_ranks(axis(mesh, name).group) for name in axes}
    both = axis(mesh, "data", "tensor")
    return (
        along,
        (alone.rank, alone.size, dist.get_process_group_ranks(alone.group)),
        (dist.get_process_group_ranks(both.group), both.rank),
    )


def test_the_last_axis_varies_fastest():
    found = launch(groups, 8, (EIGHT,))
    assert found[5][0] == {"pipeline": [1, 5], "data": [5, 7], "tensor": [4, 5]}
    assert found[2][0] == {"pipeline": [2, 6], "data": [0, 2], "tensor": [2, 3]}
    assert [alone for _, alone, _ in found] == [(0, 1, [rank]) for rank in range(8)], "an axis that is not there"
    assert found[7][2] == ([4, 5, 6, 7], 3), "rank 7's place along data and tensor together"
    assert found[1][2] == ([0, 1, 2, 3], 1)
    turned = launch(groups, 8, (in_order(EIGHT, parse_order("data,pipeline")),))
    assert turned[5][0] == {"data": [1, 5], "pipeline": [5, 7], "tensor": [4, 5]}, "data outermost"
