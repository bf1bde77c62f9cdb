"""Pipelines: every schedule equals one process, alone and beside replicas; what is sent between replicas."""

import dataclasses
import os
import runpy
import sys
import weakref
from collections import defaultdict

import pytest
import torch
from helpers import FULL
from pipelines import batch, deep, first_layers_frozen, mesh_of, small, tied_frozen
from proofs import Job, prove_all
from torch import nn

from common import ROOT
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.strategy import Setup
from course.pipeline import by_hand, schedules, torch_schedules
from course.pipeline import distributed_training as torchs
from course.pipeline import pipeline_hybrids as hybrid
from course.pipeline.by_hand import PipelineDDPByHand
from course.pipeline.options import PipelineOptions
from course.strategies import load

# Every schedule equals one process

# Twice as many as ranks, the fewest that every schedule has. With FULL=1 other numbers as well; of lists that schedules
# are made of, test_any_size.py and test_executor.py draw any.
MICROBATCHES = dict.fromkeys((2, 4), (1, 2, 4, 8)) if FULL else {2: (4,), 4: (8,)}


def runs(ranks: int) -> list[tuple]:
    """(schedule, micro-batches, stages per rank) wherever there is such a schedule."""
    found = []
    for name, entry in schedules.SCHEDULES.items():
        for m in MICROBATCHES[ranks]:
            if m >= entry.least * ranks:
                found.append((name, m, entry.stages_per_rank or 2))
    return found


def cases(ranks: int, stages_per_rank: int) -> list[equality.Case]:
    # At 0.3, parts of the deep one hardly move in two steps.
    make_model, max_norm = (deep, 0.6) if ranks * stages_per_rank > 4 else (equality.tied, 0.3)
    return [
        equality.Case(make_model, equality.sgd, 1, max_norm, steps=2),
        equality.Case(make_model, equality.adamw, 1, 100.0, steps=2),
    ]


def prove_pipelines(trained, nproc, strategy_class=by_hand.PipelineByHand) -> None:
    """Equality of many pipelines, each (options, cases), in one launch."""
    prove_all([Job(f"{o}", strategy_class, cases, options=PipelineOptions(**o)) for o, cases in trained], nproc)


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_schedule_by_hand_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)) for name, m, v in runs(nproc)
    ]
    if nproc == 4 and not FULL:  # on two they meet AdamW as well as SGD
        trained = [(options, some[:1]) for options, some in trained]
    assert len(trained) == ({2: 30, 4: 29} if FULL else {2: 8, 4: 8})[nproc]
    assert {options["schedule"] for options, _ in trained} == set(schedules.SCHEDULES)
    prove_pipelines(trained, nproc)


@pytest.mark.parametrize("nproc", [2, 4] if FULL else [4])
def test_every_schedule_of_pytorch_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)[:1])
        for name, m, v in runs(nproc)
        if m >= nproc
    ]
    assert {options["schedule"] for options, _ in trained} == set(torch_schedules.TORCH_SCHEDULES)
    assert set(torch_schedules.TORCH_SCHEDULES) == set(schedules.SCHEDULES)
    prove_pipelines(trained, nproc, torchs.PipelineParallel)


FROZEN = [equality.Case(make, equality.sgd, 3, 100.0, steps=2) for make in (first_layers_frozen, equality.frozen)]
ENDS_FROZEN = equality.Case(tied_frozen, equality.sgd, 1, 100.0, steps=2)


def test_frozen_layers_accumulation_and_recomputation():
    """Nobody wants the gradient that comes to a frozen stage; and whoever sends it must find somebody who takes it."""
    ways = [("1f1b", "none"), ("zb-h1", "full"), *[("1f1b", "full"), ("zb-h1", "none")] * FULL]
    trained = [({"schedule": name, "recompute": again}, FROZEN) for name, again in ways]
    if FULL:
        prove_pipelines(trained, 4)
    trained += [
        ({"schedule": "zbv"}, [*FROZEN, ENDS_FROZEN]),
        ({"schedule": "1f1b"}, [ENDS_FROZEN]),
        ({"schedule": "interleaved", "recompute": "full"}, FROZEN),
    ]
    prove_pipelines(trained, 2)


def test_what_pytorch_traces_equals_one_process():
    from course.pipeline.traced import TracedPipeline as traced

    trained = [({"schedule": name}, cases(2, 2)[:1]) for name in ("interleaved", *["1f1b"] * FULL)]
    prove_pipelines([*trained, ({"split_spec": "embedding: end"}, FROZEN[1:])], 2, traced)


def test_every_class_of_pytorch_is_there():
    classes = {
        value
        for name, value in vars(torch.distributed.pipelining).items()
        if name.startswith("Schedule") and isinstance(value, type)
    }
    assert set(torch_schedules.TORCH_SCHEDULES.values()) == classes


# Replicas


REPLICATED = (PipelineDDPByHand, hybrid.PipelineDDP, hybrid.PipelineFSDP)


def reductions():
    """What one step of a grid of 2 x 2 sends between replicas, by class and accumulation: calls, bytes of gradients."""
    found = {}
    for strategy_class in REPLICATED:
        strategy = strategy_class(equality.tied(), equality.sgd, Setup(mesh_of(strategy_class)))
        strategy.step([batch(4)])
        own = sum(p.nbytes for p in strategy.model.parameters())
        for accumulate in (1, 3):
            with Ledger() as ledger:
                strategy.step([batch(4)] * accumulate)
            large = [e.payload for e in ledger.entries if e.operation == "all_reduce" and e.payload > 100]
            found[strategy_class, accumulate] = ledger.calls, large, own, strategy.data_rank
    return found


def test_gradients_are_reduced_once_in_a_step_however_many_passes_it_has():
    """The large all-reduces: one over the replicas, one for the tied weight. With fully_shard, each of a rank's two
    layers is gathered by itself and once, and so are its gradients reduced."""
    tied = 64 * 16 * 4
    for rank, found in enumerate(launch(reductions, 4)):
        assert len(found) == 6
        for (strategy_class, _), (calls, large, own, place) in found.items():
            assert place == rank % 2  # pipelines are outermost
            if strategy_class is hybrid.PipelineFSDP:
                assert calls["reduce_scatter"] == calls["all_gather"] == 2
            else:
                loss = 4 if strategy_class is PipelineDDPByHand else 0  # in the same message by hand
                assert sorted(large) == sorted([own + loss, tied])


def test_replicas_of_every_schedule_equal_one_process():
    """What is sent between replicas does not depend on the order in which a pass goes: daily few orders."""
    plain = [name for name in schedules.SCHEDULES if name not in ("zbv", "dualpipev")]
    some = {PipelineDDPByHand: list(schedules.SCHEDULES) if FULL else ["1f1b", "dualpipev"],
            hybrid.PipelineDDP: ["1f1b"], hybrid.PipelineFSDP: plain if FULL else ["interleaved-zb"]}  # fmt: skip
    for strategy_class, names in some.items():
        trained = [({"schedule": name}, cases(2, 2)[:1]) for name in names]
        if strategy_class is hybrid.PipelineDDP:  # which refuses a stage in which nothing is trained
            trained.append(({}, FROZEN[:1]))
        if strategy_class is hybrid.PipelineFSDP:  # in the same launch, whose ranks know DTensor's rules by then
            trained.append(({}, [dataclasses.replace(case, accumulate=3) for case in FROZEN]))
        prove_pipelines(trained, 4, strategy_class)


def most_outputs(train) -> tuple[int, set[int]]:
    """While `train` trains: the most outputs of one of this rank's layers that are there at once, and how often each
    layer computes."""
    kept, most = defaultdict(list), [0]

    def hook(layer, _, output):
        if isinstance(layer, nn.Linear):
            kept[layer].append(weakref.ref(output))
            most.append(sum(there() is not None for there in kept[layer]))

    handle = nn.modules.module.register_module_forward_hook(hook)
    train()
    handle.remove()
    return max(most), {len(outputs) for outputs in kept.values()}


def kept_at_the_end(folder) -> dict[str, tuple]:
    """Of a step's micro-batches: by the course's two ways of running PyTorch's schedules, by the program to copy and by
    the one to put a model into."""
    cpu, found, sys.argv = torch.device("cpu"), {}, ["standalone.py", "1"]
    for name in ("pipeline", "mesh"):
        strategy_class = load(name)
        setup = Setup(make_mesh({"pipeline": 2}), strategy_class.Options(microbatches=8))
        strategy = strategy_class(small(), equality.sgd, setup)
        found[name] = most_outputs(lambda strategy=strategy: strategy.step([batch(8)]))
    os.chdir(folder)  # where it leaves its checkpoint
    train = runpy.run_path(str(ROOT / "05_pipeline" / "standalone.py"))["train"]
    found["standalone"] = most_outputs(lambda: train(cpu))
    train = runpy.run_path(str(ROOT / "docs" / "your_own.py"))["train"]
    found["your own"] = most_outputs(lambda: train("pipeline", cpu, steps=2))
    return found


def test_the_last_stage_keeps_no_outputs_of_micro_batches_that_are_done(tmp_path):
    """PyTorch's schedules by default return the outputs of the whole batch: with 64,000 classes, most of the memory."""
    ranks = launch(kept_at_the_end, 2, (tmp_path,))
    for name, (most, _) in ranks[1].items():
        assert most <= 2, f"{name}: outputs that the last stage has at once"
    for found in ranks:
        assert len(found) == 4 and found["standalone"][1] == {8 * (1797 // 96)}, "no stage is run to learn shapes"
