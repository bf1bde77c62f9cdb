"""Pipelines: every schedule equals one process; what is sent, what is kept, where models are cut, what is refused."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common import command_line
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, in_order, make_mesh, resolve
from common.model import GPT
from common.run import Run
from common.task import make_task
from course.model_parallel.by_hand_layers import layers_of
from course.pipeline import by_hand, schedules, simulator, split, torch_schedules
from course.pipeline import distributed_training as torchs
from course.pipeline import pipeline_hybrids as hybrid
from course.pipeline.classroom.bugs import DROPOUT_BUGS
from course.pipeline.executor import Executor, timeline
from course.pipeline.options import PipelineOptions
from course.pipeline.split_backward import backward_for_input
from course.strategies import STRATEGIES

CPU = torch.device("cpu")


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
    assert len(trained) == {2: 23, 4: 22}[nproc]
    assert {options["schedule"] for options, _ in trained} == set(schedules.SCHEDULES)
    prove_all(trained, nproc)


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_schedule_of_pytorch_equals_one_process(nproc):
    trained = [
        ({"schedule": name, "microbatches": m, "stages_per_rank": v}, cases(nproc, v)[:1])
        for name, m, v in runs(nproc)
        if m >= nproc
    ]
    assert {options["schedule"] for options, _ in trained} == set(torch_schedules.SCHEDULES) == set(schedules.SCHEDULES)
    prove_all(trained, nproc, torchs.PipelineParallel)


FROZEN = [equality.Case(make, equality.sgd, 3, 100.0) for make in (first_layers_frozen, equality.frozen)]


def test_frozen_layers_accumulation_and_recomputation():
    """Nobody wants the gradient that comes to a frozen stage; and whoever sends it must find somebody who takes it."""
    trained = [
        ({"schedule": name, "recompute": again}, FROZEN) for name in ("1f1b", "zb-h1") for again in ("none", "full")
    ]
    prove_all(trained, 4)
    prove_all([({"schedule": "zbv"}, FROZEN), ({"schedule": "interleaved", "recompute": "full"}, FROZEN)], 2)


# What is kept


class Counting(Executor):
    """Notes how many tensors are kept because they may not have arrived yet."""

    def run(self, *args):
        self.most = {"F": 0, "B": 0}
        return super().run(*args)

    def compute(self, action):
        super().compute(action)
        for direction in self.most:
            live = sum(key[1] == direction for key in self.sends)
            self.most[direction] = max(self.most[direction], live)


class CountingPipeline(by_hand.PipelineByHand):
    executor_class = Counting


def small(layers=2, **more) -> nn.Module:
    return GPT(layers=layers, width=16, heads=4, context=8, vocabulary=64, **more)


def batch(examples=8):
    tokens = torch.randint(64, (examples, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def mesh_of(strategy_class, **axes):
    return make_mesh(axes or in_order(resolve(strategy_class.preset, dist.get_world_size())))


def peaks(options):
    layers = len(simulator.placement(schedules.build(options["schedule"], dist.get_world_size(), 8))) - 2
    options = PipelineOptions(microbatches=8, **options)
    strategy = by_hand.PipelineByHand(small(max(layers, 2)), equality.sgd, mesh_of(by_hand.PipelineByHand), options)
    with Ledger() as ledger:
        strategy.step([batch()])
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
    real = timeline([result[1] for result in results])
    assert real.peaks == simulator.simulate(schedule).peaks
    assert min(events[0].start for events in real.ranks) == 0 and 0 < real.bubble < 1


def unsent(name, numbers):
    mesh = mesh_of(CountingPipeline)
    counted = []
    for m in numbers:
        strategy = CountingPipeline(small(), equality.sgd, mesh, PipelineOptions(schedule=name, microbatches=m))
        strategy.step([batch(m)])
        counted.append((strategy.executor.most, len(strategy.executor.sends)))
    return counted


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_what_was_sent_is_not_kept_longer_the_more_micro_batches_there_are(name):
    """Activations at most as many as the rank stores, gradients at most one for each stage; afterwards nothing."""
    numbers = (4, 8, 32)
    for rank, counted in enumerate(launch(unsent, 2, (name, numbers))):
        for m, (most, left) in zip(numbers, counted, strict=True):
            schedule = schedules.build(name, 2, m)
            stages = len(simulator.placement(schedule))
            assert most["F"] <= simulator.simulate(schedule).peaks[rank] and most["B"] <= stages and left == 0, m
            assert sum(most.values()) > 0


class Dropping(nn.Module):
    """A layer with dropout behind it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5)


def with_dropout(strategy_class, schedule, recompute):
    model = small()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Dropping(block)
    options = PipelineOptions(schedule=schedule, recompute=recompute)
    strategy = strategy_class(model, equality.sgd, mesh_of(strategy_class), options)
    torch.manual_seed(5 + dist.get_rank())
    norms = [strategy.step([batch()] * 2)[1] for _ in range(2)]
    return norms, [p.grad.clone() for p in strategy.model.parameters()], torch.get_rng_state()


def require_same_dropout(strategy_class, schedule="1f1b"):
    """Raise AssertionError unless what is computed again drops what was dropped the first time, bit by bit, and what
    is drawn afterwards is the same too."""

    def both():
        torch.manual_seed(1)
        without = with_dropout(strategy_class, schedule, "none")
        torch.manual_seed(1)
        return without, with_dropout(strategy_class, schedule, "full")

    for (norms, gradients, state), (again, recomputed, state_after) in launch(both, 2):
        assert torch.equal(torch.stack(norms), torch.stack(again)) and torch.equal(state, state_after)
        assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))
        assert norms[0] != norms[1]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_what_is_computed_again_drops_the_same(name):
    require_same_dropout(by_hand.PipelineByHand, name)


def test_pytorchs_recomputation_drops_the_same():
    require_same_dropout(torchs.PipelineParallel)


@pytest.mark.parametrize("name", DROPOUT_BUGS)
def test_bugs_that_only_dropout_shows(name):
    with pytest.raises(AssertionError):
        require_same_dropout(DROPOUT_BUGS.plant(name))


def in_bfloat16():
    """Train with all parameters in bf16, so the activations between stages are too; the loss, that of plain autograd,
    and the dtypes that were handed on."""
    torch.manual_seed(3)
    model, same = (small().bfloat16() for _ in range(2))
    same.load_state_dict(model.state_dict())
    strategy = by_hand.PipelineByHand(same, equality.sgd, mesh_of(by_hand.PipelineByHand))
    sent, give = set(), strategy.executor.give

    def noting(stage, direction, m, tensor):
        sent.add((direction, tensor.dtype) if tensor is not None else None)
        give(stage, direction, m, tensor)

    strategy.executor.give = noting
    loss, _ = strategy.step([batch()])
    inputs, targets = batch()
    return loss.item(), equality.cross_entropy(model(inputs).float(), targets).item(), sent


def test_stages_hand_on_what_they_compute_in():
    for rank, (loss, expected, sent) in enumerate(launch(in_bfloat16, 2)):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert ("FB"[rank], torch.bfloat16) in sent


def with_other_dtype():
    def stage(x):
        return x.float() * torch.ones((), requires_grad=True)

    group = dist.group.WORLD
    executor = Executor(schedules.build("gpipe", 2, 1), {dist.get_rank(group): stage}, group, dtype=torch.bfloat16)
    try:
        executor.run([torch.ones(2)], lambda y, m: y.sum(), (2,))
    except UserError as error:
        return str(error)


def test_a_stage_that_hands_on_another_dtype_is_refused():
    def first():
        return with_other_dtype() if dist.get_rank(dist.group.WORLD) == 0 else None

    assert (
        "stage 1 expects torch.bfloat16 of shape (2,), and what its neighbour hands on is torch.float32"
        in (launch(first, 2)[0])
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
    assert set(torch_schedules.SCHEDULES.values()) == classes


def test_sleeping_stages_take_the_time_that_the_simulator_says_or_more():
    from course.pipeline import sleeping

    seconds = (0.01, 0.01, 0.01)
    for name in ("1f1b", "zbv"):
        events = launch(sleeping.run, 4, (name, 8, seconds))
        parts = schedules.SCHEDULES[name].stages_per_rank
        simulated = simulator.simulate(schedules.build(name, 4, 8), simulator.Times(*(s / parts for s in seconds)))
        real = timeline(events)
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
    of_x, later = backward_for_input(x, stage(x), gradient)
    assert all(p.grad is None for p in stage.parameters()) and torch.equal(of_x, whole[0])
    for outputs, gradients, parameters in later:
        torch.autograd.backward(outputs, gradients, inputs=parameters)
    assert all(torch.equal(p.grad, g) for p, g in zip(stage.parameters(), whole[1:], strict=True))
    assert sum(len(parameters) for *_, parameters in later) == len(whole) - 1


def test_a_parameter_that_is_used_twice_is_refused():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UserError, match="used twice in one stage"):
        backward_for_input(x, layer(layer(x)), torch.ones(2, 4))


# Where models are cut


def test_named_places():
    layers = ["embedding", "blocks.0", "blocks.1", "head"]
    assert split.named("blocks.0: end", layers, 2) == (2, 4)
    assert split.named("head: beginning, blocks.0:beginning", layers, 3) == (1, 3, 4)
    assert split.named("blocks.0: end, blocks.1: beginning", layers, 2) == (2, 4)  # the same place twice


def named_parts(spec):
    return split.stages_of(deep(), 3, spec, dist.group.WORLD)


def test_stages_are_the_same_on_all_ranks():
    by_time = launch(named_parts, 2, ("auto-time",))
    assert by_time[0] == by_time[1] and len(by_time[0]) == 3
    assert [name for stage in by_time[0] for name in stage] == list(layers_of(deep()))
    told = split.stages_of(deep(), 3, "embedding: end, blocks.4: end")
    assert [len(stage) for stage in told] == [1, 5, 2]
    assert [len(stage) for stage in split.stages_of(deep(), 2)] == [4, 4]


def test_the_time_of_the_last_stage_includes_its_loss(monkeypatch):
    """A loss that takes 50 ms longer must make the head 50 ms slower; and each layer is measured where it will be."""
    seen = []

    def slow(logits, targets):
        seen.append((logits.shape, logits.device))
        time.sleep(0.05)
        return equality.cross_entropy(logits, targets)

    model = small()
    quick = split.measured(model, CPU)
    monkeypatch.setattr(split, "cross_entropy", slow)
    seconds = split.measured(model, CPU)
    assert seconds[-1] >= 0.05 > 2 * quick[-1] and max(seconds[:-1]) < 0.05
    assert {shape for shape, _ in seen} == {(4, 8, 64)}
    assert all(p.grad is None for p in model.parameters())


def test_replicas_are_cut_alike_though_each_would_measure_other_times(monkeypatch):
    def measured(model, *_):
        rank = dist.get_rank(dist.group.WORLD)
        return [9.0 if number == rank else 1.0 for number in range(len(layers_of(model)))]

    def cut(strategy_class):
        options = PipelineOptions(split_spec="auto-time")
        return strategy_class(small(), equality.sgd, mesh_of(strategy_class), options).stages.names

    monkeypatch.setattr(split, "measured", measured)
    for strategy_class in (hybrid.PipelineDDPByHand, hybrid.PipelineDDP, hybrid.PipelineFSDP):
        assert launch(cut, 4, (strategy_class,)) == [[["embedding"], ["blocks.0", "blocks.1", "head"]]] * 4


def test_several_pipelines_are_not_measured_one_by_one():
    def cut():
        pipeline = axis(make_mesh({"data": 2, "pipeline": 1}), "pipeline")
        try:
            split.own_stages(small(), schedules.build("1f1b", 1, 4), pipeline, "auto-time")
        except UserError as error:
            return str(error)

    assert launch(cut, 2)[0].startswith("--split-spec auto-time: several pipelines have to be cut alike")


def test_only_what_is_measured_and_only_the_own_share_are_moved_to_the_device():
    """Seen with the meta device in place of a GPU: what was moved there has no memory here."""

    def cut():
        model = small(layers=4)
        kept = layers_of(model)
        axis_of_all = axis(make_mesh({"pipeline": -1}), "pipeline")
        own = split.own_stages(model, schedules.build("1f1b", 2, 4), axis_of_all, device=torch.device("meta"))
        moved = [name for name, layer in kept.items() if next(layer.parameters()).is_meta]
        return moved, own.names[axis_of_all.rank], own.width, own.dtype, list(own.modules)

    for rank, (moved, names, *rest) in enumerate(launch(cut, 2)):
        assert moved == names and rest == [16, torch.float32, [rank]]


def test_a_model_without_memory_takes_what_rank_0_has():
    def losses_of(meta):
        torch.manual_seed(2)
        with torch.device("meta" if meta and dist.get_rank(dist.group.WORLD) > 0 else "cpu"):
            model = small()
        strategy = by_hand.PipelineByHand(model, equality.sgd, mesh_of(by_hand.PipelineByHand))
        return [strategy.step([batch()])[0].item() for _ in range(3)]

    for with_meta, without in launch(lambda: (losses_of(True), losses_of(False)), 4):
        assert with_meta == without and with_meta[2] != with_meta[0]


def test_micro_batches_that_do_not_divide():
    def step():
        strategy = by_hand.PipelineByHand(equality.tied(), equality.sgd, mesh_of(by_hand.PipelineByHand))
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
            command_line.parse(STRATEGIES, argv=f"{line} {more}".split())
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "8 stages are more than 6 layers" in refusal("--schedule zbv --layers 4")
    assert "1 cut(s) make 2 stages, but ranks x stages per rank are 4" in refusal("--split-spec blocks.1:end")
    assert "on 4 ranks needs 8 or more micro-batches, not 4" in refusal("--schedule dualpipev --layers 6")
    if not by_hand_too:
        assert "wants a micro-batch for each of 4 ranks, not 2" in refusal("--microbatches 2")
        assert "deals micro-batches out to 2 equal rounds, and 9 are not" in refusal(
            "--schedule zb-h1 --microbatches 9 --batch-size 36"
        )
        assert "in a pipeline of 2 ranks with more micro-batches" in refusal("--strategy pipeline+ddp --microbatches 2")
    assert "a pipeline's stages compute all again, or nothing" in refusal("--recompute selective")
    assert "--batch-size 32 does not divide by 1 pipeline(s) x --accumulation-steps 3 x --microbatches 4 = 12" in (
        refusal("--accumulation-steps 3")
    )
    assert "--task images: strategy 'pipeline' divides a GPT" in refusal("--task images")
    command_line.parse(STRATEGIES, argv=f"{line} --split-spec blocks.0:end,blocks.1:end,blocks.2:end".split())
    Path("options.yaml").write_text("split-spec:\n  blocks.0: end\n  blocks.1: end\n  head: beginning\n")
    read = command_line.parse(STRATEGIES, argv=f"{line} --config options.yaml".split())
    assert read.options.split_spec == "blocks.0: end, blocks.1: end, head: beginning"


# Replicas


def reductions(strategy_class, accumulate):
    """What one step of a grid of 2 x 2 sends between replicas: calls, and bytes of gradients."""
    strategy = strategy_class(equality.tied(), equality.sgd, mesh_of(strategy_class))
    strategy.step([batch(4)] * accumulate)
    with Ledger() as ledger:
        strategy.step([batch(4)] * accumulate)
    large = [entry.payload for entry in ledger.entries if entry.operation == "all_reduce" and entry.payload > 100]
    return ledger.calls, large, sum(p.nbytes for p in strategy.model.parameters()), strategy.data_rank


def test_gradients_are_reduced_once_in_a_step_however_many_passes_it_has():
    """The large all-reduces: one over the replicas, one for the tied weight. With fully_shard, one reduce-scatter."""
    tied = 64 * 16 * 4
    for accumulate in (1, 3):
        for strategy_class in (hybrid.PipelineDDPByHand, hybrid.PipelineDDP):
            loss = 4 if strategy_class is hybrid.PipelineDDPByHand else 0  # in the same message by hand
            for rank, (_, large, own, place) in enumerate(launch(reductions, 4, (strategy_class, accumulate))):
                assert sorted(large) == sorted([own + loss, tied]) and place == rank % 2  # pipelines are outermost
        results = launch(reductions, 4, (hybrid.PipelineFSDP, accumulate))
        assert [calls["reduce_scatter"] for calls, *_ in results] == [1] * 4
        assert [place for *_, place in results] == [0, 1, 0, 1]


def test_replicas_of_every_schedule_equal_one_process():
    for strategy_class in (hybrid.PipelineDDPByHand, hybrid.PipelineDDP, hybrid.PipelineFSDP):
        names = list(schedules.SCHEDULES)
        if strategy_class is hybrid.PipelineDDP:
            names = ["1f1b"]
        if strategy_class is hybrid.PipelineFSDP:
            names = [name for name in names if name not in ("zbv", "dualpipev")]
        prove_all([({"schedule": name}, cases(2, 2)[:1]) for name in names], 4, strategy_class)
    prove_all([({}, [dataclasses.replace(case, accumulate=3) for case in FROZEN])], 4, hybrid.PipelineFSDP)


def test_which_axis_is_outside_changes_nothing():
    """Replicas far apart instead of neighbours: groups come from the mesh alone."""
    for strategy_class in (hybrid.PipelineDDPByHand, hybrid.PipelineDDP, hybrid.PipelineFSDP):
        outer = next(iter(strategy_class.preset))

        def both(strategy_class=strategy_class, outer=outer):
            results = []
            for axes in ({outer: 2, "pipeline": 2}, {"pipeline": 2, outer: 2}):
                torch.manual_seed(4)
                strategy = strategy_class(small(), equality.sgd, mesh_of(strategy_class, **axes))
                inputs, targets = batch(16)
                own = slice(strategy.data_rank * 8, strategy.data_rank * 8 + 8)
                steps = [strategy.step([(inputs[own], targets[own])]) for _ in range(3)]
                results.append((steps, strategy.data_rank, dist.get_process_group_ranks(strategy.pipeline.group)))
            return results

        for rank, ((one, place, row), (other, other_place, column)) in enumerate(launch(both, 4)):
            assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=1e-5)
            assert (place, other_place) == (rank // 2, rank % 2)
            assert (row, column) == ([rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2])


# Precision, and runs that go on elsewhere

TEXT = "--layers 4 --width 32 --heads 4 --context 16 --batch-size 8 --checkpoint-every 2"


def train(lines):
    """Each run as the command line would start it, in this process group."""
    for line in lines:
        config = command_line.parse(STRATEGIES, argv=f"{TEXT} {line} --distributed".split())
        task, mesh = make_task(config), make_mesh(config.axes)
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, mesh, config.options, config.precision)
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
        run(f"{precision}-{number}", 4, f"--strategy pipeline --precision {precision} {how}")
        for precision in ("bf16", "fp16")
        for number, how in enumerate(["--by-hand --schedule zbv --recompute full", "--schedule 1f1b"])
    ]
    launch(train, 1, ([run("whole", 8, "--strategy pipeline --by-hand")],))
    launch(train, 2, ([run("parts", 2, "--strategy pipeline --by-hand --schedule interleaved"), *halves],))
    go_on = "--resume --schedule 1f1b --strategy"
    launch(train, 4, ([run("parts", 4, f"{go_on} pipeline+fsdp"), run("parts", 6, f"{go_on} pipeline")],))
    launch(train, 2, ([run("parts", 8, "--resume --by-hand --strategy pipeline --schedule zbv")],))
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == pytest.approx(expected, rel=3e-5)
    for half in halves:
        got = losses(Path(half.split()[1]))
        assert got == pytest.approx(expected[:4], rel=0.01) and got != expected[:4]
