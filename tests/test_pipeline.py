"""Pipelines: every schedule equals one process; what is sent, what is kept, where models are cut, what is refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common import equality
from common.launch import launch
from common.ledger import Ledger
from common.model import GPT
from common.ranks import Ranks
from common.strategies import module

schedules, simulator = module("05_pipeline", "schedules"), module("05_pipeline", "simulator")
by_hand, split = module("05_pipeline", "by_hand"), module("05_pipeline", "split")
CPU = torch.device("cpu")


def here() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), CPU)


def deep(model_class=GPT) -> nn.Module:
    """Eight layers, for eight stages. Less lively than the others: so many layers magnify rounding."""
    model = model_class(layers=6, width=16, heads=4, context=equality.CONTEXT, vocabulary=equality.VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 5
    return model


def first_layers_frozen(model_class=GPT) -> nn.Module:
    model = equality.frozen(model_class)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


# Every schedule equals one process

MICROBATCHES = (1, 4, 8)


def runs(ranks: int) -> list[tuple]:
    """(schedule, micro-batches, stages per rank) wherever there is such a schedule."""
    found = []
    for name, entry in schedules.SCHEDULES.items():
        for m in MICROBATCHES:
            if m >= entry.least * ranks:
                found.append((name, m, entry.stages_per_rank or 2))
    return found


def cases(ranks: int, stages_per_rank: int) -> list[equality.Case]:
    make_model = deep if ranks * stages_per_rank > 4 else equality.tied
    return [equality.Case(make_model, equality.sgd, 1, 0.3), equality.Case(make_model, equality.adamw, 1, 100.0)]


def train_all(trained):
    return [equality.on_ranks(functools.partial(by_hand.Pipeline, **options), list(some)) for options, some in trained]


def prove_all(trained, nproc) -> None:
    """Equality of many pipelines, each (options, cases), in one launch. Raises NotEqual."""
    outcomes = launch(train_all, nproc, (trained,), timeout=120)
    for number, (options, some) in enumerate(trained):
        for index, (case, reference) in enumerate(zip(some, equality.references(tuple(some)), strict=True)):
            equality.check_something_happened(case, reference)
            equality.compare(case, reference, [rank[number][index] for rank in outcomes], f"{options}, {nproc} ranks")


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_schedule_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)) for name, m, v in runs(nproc)
    ]
    assert len(trained) == {2: 23, 4: 22}[nproc]
    assert {options["schedule"] for options, _ in trained} == set(schedules.SCHEDULES)
    prove_all(trained, nproc)


FROZEN = [equality.Case(make, equality.sgd, 3, 100.0) for make in (first_layers_frozen, equality.frozen)]


def test_frozen_layers_accumulation_and_recomputation():
    """Nobody wants the gradient that comes to a frozen stage; and whoever sends it must find somebody who takes it."""
    trained = [({"schedule": name, "recompute": again}, FROZEN) for name in ("1f1b", "zb-h1") for again in (0, 1)]
    prove_all(trained, 4)
    prove_all([({"schedule": "zbv"}, FROZEN), ({"schedule": "interleaved", "recompute": True}, FROZEN)], 2)


# What is kept


def peaks(options):
    layers = len(simulator.placement(schedules.build(options["schedule"], dist.get_world_size(), 8))) - 2
    model = GPT(layers=max(layers, 2), width=16, heads=4, context=8, vocabulary=64)
    strategy = by_hand.Pipeline(model, equality.sgd, here(), microbatches=8, **options)
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    with Ledger() as ledger:
        strategy.step([(tokens[:, :-1], tokens[:, 1:])])
    executor = strategy.executor
    done = [event.action for event in executor.events]
    return executor.peak, executor.events, done, len(executor.kept), ledger.calls


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_what_is_done_sent_and_kept_is_what_the_schedule_says(name):
    schedule = schedules.build(name, 4, 8)
    full = simulator.with_messages(schedule)
    results = launch(peaks, 4, ({"schedule": name},))
    assert [result[0] for result in results] == simulator.simulate(schedule).peaks
    assert [result[2] for result in results] == schedule
    assert [result[3] for result in results] == [0] * 4
    for rank, (*_, calls) in enumerate(results):
        for kind in ("send", "recv"):
            expected = sum(action.kind.startswith(kind.upper()) for action in full[rank])
            assert calls.get(kind, 0) == expected, (name, rank)
    real = by_hand.timeline([result[1] for result in results])
    assert real.peaks == simulator.simulate(schedule).peaks
    assert min(events[0].start for events in real.ranks) == 0 and 0 < real.bubble < 1
