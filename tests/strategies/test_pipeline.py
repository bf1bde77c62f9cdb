"""Pipelines: every schedule equals one process, alone and beside replicas; what is refused; runs that go on."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, do_not_draw
from pipelines import batch, deep, mesh_of, small
from torch import nn

from common import command_line
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.model import GPT
from common.run import Run
from common.strategy import Setup
from common.task import make_task
from course.pipeline import by_hand, schedules, torch_schedules
from course.pipeline import distributed_training as torchs
from course.pipeline import pipeline_hybrids as hybrid
from course.pipeline.by_hand import PipelineDDPByHand
from course.pipeline.options import PipelineOptions
from course.strategies import STRATEGIES


def first_layers_frozen(model_class=GPT) -> nn.Module:
    model = equality.frozen(model_class)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


# Every schedule equals one process

# Fewer than ranks on 2 and on 4 of them; as many, on 2; twice as many, on both. With FULL=1 all.
MICROBATCHES = dict.fromkeys((2, 4), (1, 2, 4, 8)) if FULL else {2: (1, 2, 4), 4: (1, 8)}


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


def train_all(trained, strategy_class):
    return [
        equality.on_ranks(strategy_class, list(some), None, PipelineOptions(**options)) for options, some in trained
    ]


def prove_all(trained, nproc, strategy_class=by_hand.PipelineByHand) -> None:
    """Equality of many pipelines, each (options, cases), in one launch. Raises NotEqual."""
    outcomes = launch(train_all, nproc, (trained, strategy_class), timeout=120)
    for number, (options, some) in enumerate(trained):
        for index, (case, reference) in enumerate(zip(some, equality.references(tuple(some)), strict=True)):
            equality.check_something_happened(case, reference)
            equality.compare(case, reference, [rank[number][index] for rank in outcomes], f"{options}, {nproc} ranks")


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_schedule_by_hand_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)) for name, m, v in runs(nproc)
    ]
    if not FULL:
        both = 4 if nproc == 2 else None  # the number of micro-batches that meets AdamW as well as SGD
        trained = [(options, some[: 1 + (options["microbatches"] == both)]) for options, some in trained]
    assert len(trained) == ({2: 30, 4: 29} if FULL else {2: 22, 4: 15})[nproc]
    assert {options["schedule"] for options, _ in trained} == set(schedules.SCHEDULES)
    prove_all(trained, nproc)


@pytest.mark.parametrize("nproc", [2, 4] if FULL else [4])
def test_every_schedule_of_pytorch_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)[:1])
        for name, m, v in runs(nproc)
        if m >= nproc
    ]
    assert {options["schedule"] for options, _ in trained} == set(torch_schedules.TORCH_SCHEDULES)
    assert set(torch_schedules.TORCH_SCHEDULES) == set(schedules.SCHEDULES)
    prove_all(trained, nproc, torchs.PipelineParallel)


def tied_frozen(model_class=GPT) -> nn.Module:
    """One weight at both ends, which is not trained."""
    model = equality.tied(model_class)
    model.embedding.requires_grad_(False)
    return model


FROZEN = [equality.Case(make, equality.sgd, 3, 100.0, steps=2) for make in (first_layers_frozen, equality.frozen)]
ENDS_FROZEN = equality.Case(tied_frozen, equality.sgd, 1, 100.0, steps=2)


def test_frozen_layers_accumulation_and_recomputation():
    """Nobody wants the gradient that comes to a frozen stage; and whoever sends it must find somebody who takes it."""
    trained = [
        ({"schedule": name, "recompute": again}, FROZEN) for name in ("1f1b", "zb-h1") for again in ("none", "full")
    ]
    prove_all(trained, 4 if FULL else 2)
    prove_all(
        [
            ({"schedule": "zbv"}, [*FROZEN, ENDS_FROZEN]),
            ({"schedule": "1f1b"}, [ENDS_FROZEN]),
            ({"schedule": "interleaved", "recompute": "full"}, FROZEN),
        ],
        2,
    )


def test_what_pytorch_traces_equals_one_process():
    from course.pipeline.traced import TracedPipeline as traced

    trained = [({"schedule": name}, cases(2, 2)[:1]) for name in ("1f1b", "interleaved")]
    prove_all([*trained, ({"split_spec": "embedding: end"}, FROZEN[1:])], 2, traced)


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
    for strategy_class in REPLICATED:
        names = list(schedules.SCHEDULES) if FULL else ["gpipe", "1f1b", "interleaved-zb", "dualpipev"]
        if strategy_class is hybrid.PipelineDDP:
            names = ["1f1b"]
        if strategy_class is hybrid.PipelineFSDP:
            names = [name for name in names if name not in ("zbv", "dualpipev")]
        trained = [({"schedule": name}, cases(2, 2)[:1]) for name in names]
        if strategy_class is hybrid.PipelineDDP:  # which refuses a stage in which nothing is trained
            trained.append(({}, FROZEN[:1]))
        if strategy_class is hybrid.PipelineFSDP:  # in the same launch, whose ranks know DTensor's rules by then
            trained.append(({}, [dataclasses.replace(case, accumulate=3) for case in FROZEN]))
        prove_all(trained, 4, strategy_class)


def test_which_axis_is_outside_changes_nothing():
    """Replicas far apart instead of neighbours: groups come from the mesh alone."""

    def both():
        results = []
        for strategy_class in REPLICATED:
            outer = next(iter(strategy_class.preset))
            pair = []
            for axes in ({outer: 2, "pipeline": 2}, {"pipeline": 2, outer: 2}):
                torch.manual_seed(4)
                strategy = strategy_class(small(), equality.sgd, Setup(mesh_of(strategy_class, **axes)))
                inputs, targets = batch(16)
                own = slice(strategy.data_rank * 8, strategy.data_rank * 8 + 8)
                steps = [strategy.step([(inputs[own], targets[own])]) for _ in range(2)]
                pair.append((steps, strategy.data_rank, dist.get_process_group_ranks(strategy.pipeline.group)))
            results.append(pair)
        return results

    for rank, results in enumerate(launch(both, 4)):
        for (one, place, row), (other, other_place, column) in results:
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5)
            assert (place, other_place) == (rank // 2, rank % 2)
            assert (row, column) == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])


# Precision, and runs that go on elsewhere

TEXT = "--layers 4 --width 32 --heads 4 --context 16 --batch-size 8 --checkpoint-every 2"


def train(lines):
    """Each run as the command line would start it, in this process group."""
    do_not_draw()
    for line in lines:
        config = command_line.parse(STRATEGIES, argv=f"{TEXT} {line} --distributed".split())
        task, mesh = make_task(config), make_mesh(config.axes)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        with Run(config, strategy, task) as run:
            batches = run.batches()
            for step in run.steps():
                strategy.set_learning_rate(run.learning_rate(step))
                run.log(step, *strategy.step(next(batches)))


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_half_precision_and_resumed_with_another_schedule(tmp_path):
    def run(folder, steps, more):
        return f"--run-dir {tmp_path / folder} --steps {steps} {more}"

    halves = [
        run(f"{precision}-{number}", 2, f"--strategy pipeline --precision {precision} --checkpoint-every 0 {how}")
        for precision in ("bf16", "fp16")
        for number, how in enumerate(["--by-hand --schedule zbv --recompute full", "--schedule 1f1b"])
    ]
    launch(train, 1, ([run("whole", 8, "--strategy pipeline --by-hand --checkpoint-every 0")],))
    launch(train, 2, ([run("parts", 2, "--strategy pipeline --by-hand --schedule interleaved"), *halves],))
    go_on = "--resume --strategy pipeline"
    launch(train, 4, ([run("parts", 4, f"{go_on}+fsdp --schedule 1f1b")],))
    last = [run("parts", 6, f"{go_on} --schedule 1f1b"), run("parts", 8, f"{go_on} --by-hand --schedule zbv")]
    launch(train, 2, (last,))
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == pytest.approx(expected, rel=3e-5)
    for half in halves:
        got = losses(Path(half.split()[1]))
        assert got == pytest.approx(expected[:2], rel=0.01) and got != expected[:2]
