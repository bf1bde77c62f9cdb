"""Pipelines: every schedule equals one process; what is sent, what is kept, where models are cut, what is refused."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from course.strategies import load
from torch import nn

from common import config
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.model import GPT
from common.ranks import Ranks
from common.task import make_task
from common.train import train
from course.pipeline import by_hand, schedules, simulator, split
from course.pipeline import distributed_training as torchs
from course.pipeline import options as pipeline_options
from course.pipeline import pipeline_hybrids as hybrid

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


def train_all(trained, strategy_class):
    return [equality.on_ranks(functools.partial(strategy_class, **options), list(some)) for options, some in trained]


def prove_all(trained, nproc, strategy_class=by_hand.Pipeline) -> None:
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
    assert len(trained) == {2: 23, 4: 22}[nproc]
    assert {options["schedule"] for options, _ in trained} == set(schedules.SCHEDULES)
    prove_all(trained, nproc)


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_schedule_of_pytorch_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)[:1])
        for name, m, v in runs(nproc)
        if name in torchs.SCHEDULES and m >= nproc
    ]
    assert {options["schedule"] for options, _ in trained} == set(torchs.SCHEDULES)
    prove_all(trained, nproc, torchs.PipelineParallel)


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
    assert set(torchs.SCHEDULES.values()) == classes


def test_sleeping_stages_take_the_time_that_the_simulator_says_or_more():
    from course.pipeline import sleeping

    seconds = (0.01, 0.01, 0.01)
    for name in ("1f1b", "zbv"):
        events = launch(sleeping.run, 4, (name, 8, seconds))
        parts = schedules.SCHEDULES[name].stages_per_rank
        simulated = simulator.simulate(schedules.build(name, 4, 8), simulator.Times(*(s / parts for s in seconds)))
        real = by_hand.timeline(events)
        assert [[e.action for e in rank] for rank in real.ranks] == [
            [e.action for e in rank] for rank in simulated.ranks
        ]
        for rank, expected in zip(real.ranks, simulated.ranks, strict=True):
            assert all(e.end - e.start >= 0.99 * (s.end - s.start) for e, s in zip(rank, expected, strict=True))
        assert real.makespan >= 0.99 * simulated.makespan and real.peaks == simulated.peaks
        measured, told = sleeping.bubbles(events, name, 8, seconds)
        assert told == simulated.bubble and 0 < measured < 1


# Half of a backward


def test_backward_in_two_halves_is_the_whole():
    torch.manual_seed(0)
    stage = nn.Sequential(*GPT(layers=2, width=16, heads=4, context=8, vocabulary=64).blocks)
    x = torch.randn(3, 8, 16, requires_grad=True)
    gradient = torch.randn(3, 8, 16)
    stage(x).backward(gradient)
    whole = [x.grad, *(p.grad for p in stage.parameters())]
    for p in stage.parameters():
        p.grad = None
    of_x, later = by_hand.backward_for_input(x, stage(x), gradient)
    assert all(p.grad is None for p in stage.parameters()) and torch.equal(of_x, whole[0])
    for outputs, gradients, parameters in later:
        torch.autograd.backward(outputs, gradients, inputs=parameters)
    assert all(torch.equal(p.grad, g) for p, g in zip(stage.parameters(), whole[1:], strict=True))
    assert sum(len(parameters) for *_, parameters in later) == len(whole) - 1


def test_a_parameter_that_is_used_twice_is_refused():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UserError, match="used twice in one stage"):
        by_hand.backward_for_input(x, layer(layer(x)), torch.ones(2, 4))


# Where models are cut


def test_named_places():
    layers = ["embedding", "blocks.0", "blocks.1", "head"]
    assert split.named("blocks.0: end", layers, 2) == (2, 4)
    assert split.named("head: beginning, blocks.0:beginning", layers, 3) == (1, 3, 4)
    assert split.named("blocks.0: end, blocks.1: beginning", layers, 2) == (2, 4)  # the same place twice


def named_parts(spec):
    return split.stages_of(deep(), 3, spec)


def test_stages_are_the_same_on_all_ranks():
    by_time = launch(named_parts, 2, ("auto-time",))
    assert by_time[0] == by_time[1] and len(by_time[0]) == 3
    assert [name for stage in by_time[0] for name in stage] == list(by_hand.layers.layers_of(deep()))
    told = split.stages_of(deep(), 3, "embedding: end, blocks.4: end")
    assert [len(stage) for stage in told] == [1, 5, 2]
    assert [len(stage) for stage in split.stages_of(deep(), 2)] == [4, 4]


def test_micro_batches_that_do_not_divide():
    def step():
        strategy = by_hand.Pipeline(equality.tied(), equality.sgd, here(), microbatches=4)
        tokens = torch.zeros(6, 8, dtype=torch.long)
        try:
            strategy.step([(tokens, tokens)])
        except UserError as error:
            return str(error)

    assert launch(step, 1) == ["6 examples cannot be cut into 4 equal micro-batches"]


@pytest.mark.parametrize("by_hand_too", [True, False])
def test_two_ranks_on_the_command_line(by_hand_too, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    line = "--distributed --strategy pipeline" + " --by-hand" * by_hand_too

    def refusal(more):
        with pytest.raises(UserError) as refused:
            config.parse(argv=f"{line} {more}".split())
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "8 stages are more than 6 layers" in refusal("--schedule zbv --layers 4")
    assert "1 cut(s) make 2 stages, but ranks x stages per rank are 4" in refusal("--split-spec blocks.1:end")
    assert "on 4 ranks needs 8 or more micro-batches, not 4" in refusal("--schedule dualpipev --layers 6")
    if not by_hand_too:
        assert "wants a micro-batch for each of 4 ranks, not 2" in refusal("--microbatches 2")
        assert "in a pipeline of 2 ranks with more micro-batches" in refusal("--strategy pipeline+ddp --microbatches 2")
    config.parse(argv=f"{line} --split-spec blocks.0:end,blocks.1:end,blocks.2:end".split())
    Path("options.yaml").write_text("split-spec:\n  blocks.0: end\n  blocks.1: end\n  head: beginning\n")
    read = config.parse(argv=f"{line} --config options.yaml".split())
    assert read.split_spec == "blocks.0: end, blocks.1: end, head: beginning"


# Replicas


def reductions(strategy_class, accumulate):
    """What one step of a grid of 2 x 2 sends along its columns."""
    strategy = strategy_class(equality.tied(), equality.sgd, here())
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    strategy.step([(tokens[:, :-1], tokens[:, 1:])] * accumulate)
    with Ledger() as ledger:
        strategy.step([(tokens[:, :-1], tokens[:, 1:])] * accumulate)
    return ledger.calls, [strategy.data_rank, strategy.data_size]


def test_gradients_are_reduced_once_after_the_last_micro_batch():
    """By hand one all-reduce for gradients; the others are for the tied weight, the norm and the loss."""
    for accumulate in (1, 3):
        results = launch(reductions, 4, (hybrid.PipelinesByHand, accumulate))
        assert [calls["all_reduce"] for calls, _ in results] == [1 + 3] * 4
        assert [place for _, place in results] == [[0, 2], [0, 2], [1, 2], [1, 2]]
        results = launch(reductions, 4, (hybrid.PipelinesDDP, accumulate))
        assert [calls["all_reduce"] for calls, _ in results] == [accumulate + 3] * 4
        results = launch(reductions, 4, (hybrid.PipelinesFSDP, accumulate))
        assert [calls["reduce_scatter"] for calls, _ in results] == [accumulate] * 4


def test_replicas_of_every_schedule_equal_one_process():
    for strategy_class in (hybrid.PipelinesByHand, hybrid.PipelinesDDP, hybrid.PipelinesFSDP):
        names = [n for n in schedules.SCHEDULES if strategy_class is hybrid.PipelinesByHand or n in torchs.SCHEDULES]
        if strategy_class is hybrid.PipelinesDDP:
            names = ["1f1b"]
        if strategy_class is hybrid.PipelinesFSDP:
            names = [name for name in names if name not in ("zbv", "dualpipev")]
        prove_all([({"schedule": name}, cases(2, 2)[:1]) for name in names], 4, strategy_class)


# Precision, and runs that go on elsewhere

TEXT = {"layers": 4, "width": 32, "heads": 4, "context": 16, "batch_size": 8, "checkpoint_every": 2}


def train_configs(configs):
    for one in configs:
        task = make_task(one)
        strategy = load(one.strategy, one.by_hand)(
            task.make_model(), task.make_optimizer, here(), one.precision, **pipeline_options.of(one)
        )
        train(strategy, task, one, here())


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_half_precision_and_resumed_with_another_schedule(tmp_path):
    def run(folder, steps, strategy="pipeline", **more):
        return config.Config(**TEXT, steps=steps, strategy=strategy, run_dir=str(tmp_path / folder), **more)

    whole = [run("whole", 8, by_hand=True)]
    halves = [
        run(
            f"{precision}-{number}",
            4,
            precision=precision,
            by_hand=hand,
            schedule=schedule,
            recompute="full" if hand else "none",
        )
        for precision in ("bf16", "fp16")
        for number, (hand, schedule) in enumerate([(True, "zbv"), (False, "1f1b")])
    ]
    launch(train_configs, 1, (whole,))
    launch(train_configs, 2, ([run("parts", 2, by_hand=True, schedule="interleaved"), *halves],))
    go_on = {"resume": True, "schedule": "1f1b"}
    launch(train_configs, 4, ([run("parts", 4, "pipeline+fsdp", **go_on), run("parts", 6, **go_on)],))
    launch(train_configs, 2, ([run("parts", 8, by_hand=True, resume=True, schedule="zbv")],))
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == pytest.approx(expected, rel=3e-5)
    for half in halves:
        got = losses(Path(half.run_dir))
        assert got == pytest.approx(expected[:4], rel=0.01) and got != expected[:4]
