"""The executor by hand: what is done, sent and kept, in which dtype, with which random numbers; half a backward."""

import copy
import itertools
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as some
from pipelines import batch, lists, mesh_of, small
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.model import GPT
from common.random_state import random_state
from common.strategy import Setup
from course.pipeline import schedules, simulator, sleeping
from course.pipeline.classroom.bugs import DROPOUT_BUGS
from course.pipeline.executor import Executor, timeline, with_random_state
from course.pipeline.options import PipelineOptions
from course.pipeline.split_backward import backward_for_input

# What is kept


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_keeps_what_its_backward_needs_and_the_loss_keeps_nothing(recompute):
    """One rank, one stage, whose result is computed again with --recompute full."""

    def run():
        kept, layer, records = [], nn.Linear(2, 2), []
        layer.register_forward_pre_hook(lambda *_: records.append(torch.is_grad_enabled()))

        class Looks(Executor):
            def forward(self, stage, m, x):
                super().forward(stage, m, x)
                kept.append([held is not None for held in self.kept[stage, m]])

        executor = Looks(schedules.build("gpipe", 1, 2), {0: layer}, dist.group.WORLD, recompute)
        loss = executor.run([torch.ones(1, 2)] * 2, lambda y, m: y.sum(), (1, 2))
        graphs = list(records)
        return kept, graphs, loss.requires_grad, loss.item(), 2 * layer(torch.ones(1, 2)).sum().item()

    ((kept, graphs, graph, loss, expected),) = launch(run, 1)
    first = [False, False, True, True] if recompute else [True, True]
    assert graphs == first, "whether each forward pass makes a graph; one that will be done again must not"
    assert kept == [[True, not recompute, recompute]] * 2, "whether input, output and random state are kept"
    assert not graph, "the loss that is told keeps the forward pass of every micro-batch in memory"
    assert loss == pytest.approx(expected)


def passed_on(name, microbatches):
    """Two steps of stages that hand on vectors. How many vectors that were sent or received are alive at most after an
    action of the first step; and how many are after the second, the inputs counted too."""
    schedule = schedules.build(name, dist.get_world_size(), microbatches)
    rank_of = simulator.placement(schedule)
    stages = {n: nn.Linear(3, 3) for n, rank in enumerate(rank_of) if rank == dist.get_rank()}
    seen, alive = [], []

    def see(tensor):
        seen.append(StorageWeakRef(tensor.untyped_storage()))

    def seeing(start):
        return lambda tensor, *args, **kwargs: (see(tensor), start(tensor, *args, **kwargs))[1]

    def living():
        return sum(not storage.expired() for storage in seen)

    class Watched(Executor):
        def compute(self, action):
            super().compute(action)
            alive.append(living())

    executor = Watched(schedule, stages, dist.group.WORLD)
    dist.isend, dist.irecv = seeing(dist.isend), seeing(dist.irecv)  # this process ends here
    executor.run([torch.ones(1, 3) for _ in range(microbatches)], lambda y, m: y.sum(), (1, 3))
    most, inputs = max(alive), [torch.ones(1, 3) for _ in range(microbatches)]
    for x in inputs:
        see(x)
    executor.run(inputs, lambda y, m: y.sum(), (1, 3))
    del inputs, x
    return most, living()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_messages_and_inputs_are_freed_when_they_have_been_used(name):
    """Wherever they are kept: inbox, outbox, handles, autograd's graph."""
    few, many = (launch(passed_on, 2, (name, m)) for m in (8, 32))
    for rank, ((most, _), (most_of_many, left)) in enumerate(zip(few, many, strict=True)):
        assert left == 0, f"rank {rank}: alive after a step of 32 micro-batches, inputs counted"
        assert 0 < most_of_many <= most, f"rank {rank}: alive at once, of 32 micro-batches and of 8"


class Clock:
    """The events of a device whose time is `now`, in seconds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_on_a_device_events_say_when_it_computed(monkeypatch):
    """The host hands over two actions at once; the device takes a second for the first one, and two for the other."""
    waits = []
    device = SimpleNamespace(Event=Clock, synchronize=waits.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    executor = object.__new__(Executor)
    executor.device, executor.marks = torch.device("cuda", 0), []
    for number, seconds in enumerate((1.0, 2.0)):
        begin = executor.mark()
        Clock.now += seconds
        executor.marks.append((begin, executor.mark(), simulator.Action(0, "F", number)))
    assert not waits, "the host waits for nothing while it hands over actions"
    before = time.perf_counter()
    events, after = executor.events, time.perf_counter()
    assert len(waits) == 1
    assert [event.end - event.start for event in events] == pytest.approx([1.0, 2.0])
    assert events[0].end == events[1].start and before <= events[1].end <= after, "in seconds of the host's clock"


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
    strategy = strategy_class(model, equality.sgd, Setup(mesh_of(strategy_class), options))
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
        assert torch.equal(torch.stack(norms), torch.stack(again)), "losses with and without recomputation"
        assert torch.equal(state, state_after), "the random state after a step"
        different = sum(not torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))
        assert different == 0, "gradients that recomputation changes"
        assert norms[0] != norms[1]


@pytest.mark.parametrize("name", DROPOUT_BUGS)
def test_bugs_that_only_dropout_shows(name):
    with pytest.raises(AssertionError):
        require_same_dropout(DROPOUT_BUGS.plant(name))


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
    said = launch(lambda: with_other_dtype() if dist.get_rank() == 0 else None, 2)[0]
    assert "stage 1" in said and "torch.bfloat16" in said and "torch.float32" in said, said


class Adds(nn.Module):
    """Takes what has been computed, a mask, and a skip connection, and hands on all three; the last of `count` stages
    adds the skip connection."""

    def __init__(self, number, count):
        super().__init__()
        torch.manual_seed(number)
        self.layer, self.first, self.last = nn.Linear(4, 4), number == 0, number == count - 1

    def forward(self, x, mask, skip=None):
        y = torch.tanh(self.layer(x)) * mask
        skip = x if self.first else skip  # passed through, by all stages between
        return y + self.layer(skip) if self.last else (y, mask, 2 * y if self.first else skip)


class Turns(nn.Module):
    """One tensor, which does not lie in one piece; nor does the gradient that it hands back."""

    def __init__(self, number, count):
        super().__init__()
        torch.manual_seed(number)
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return torch.tanh(self.layer(x.t().contiguous())).t()


def executed() -> int:
    """On each rank, which draws what the others do: loss and gradients of any lists, frozen and recomputed at random,
    are those of one process; what is done, sent and kept is what the lists say; and nothing is left over. How many
    lists were compared."""
    rank, compared = dist.get_rank(), []

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(lists(), some.booleans(), some.booleans(), some.sets(some.integers(0, 4)), some.sets(some.integers(0, 4)))
    def equal_one_process(schedule, several, recompute, weights, biases):
        rank_of = simulator.placement(schedule)
        count, m = len(rank_of), 1 + max(action.microbatch for action in schedule[0])
        whole = [(Adds if several else Turns)(n, count) for n in range(count)]
        for n, stage in enumerate(whole):  # these are frozen
            stage.layer.weight.requires_grad_(n not in weights)
            stage.layer.bias.requires_grad_(n not in biases)
        own = {n: copy.deepcopy(whole[n]) for n in range(count) if rank_of[n] == rank}
        inputs = torch.randn(m, 2, 4, generator=torch.Generator().manual_seed(1))
        parts = list(zip(inputs, inputs.roll(1, 0) > 0, strict=True)) if several else list(inputs)
        expected = torch.zeros(())
        for values in parts:
            for stage in whole:
                values = stage(*values) if several else stage(values)
            expected = expected + values.square().sum()
        if expected.requires_grad:
            expected.backward()
        taken = [((2, 4), torch.float32), ((2, 4), torch.bool), ((2, 4), torch.float32)]
        shape = dict.fromkeys(range(1, count), taken) if several else (2, 4)
        lists_of_all = [*schedule, *[[]] * (dist.get_world_size() - len(schedule))]
        executor = Executor(lists_of_all, own, dist.group.WORLD, recompute)
        with Ledger() as ledger:
            loss = executor.run(parts, lambda y, m: y.square().sum(), shape)
        assert [event.action for event in executor.events] == lists_of_all[rank]
        assert executor.peak == simulator.simulate(lists_of_all).peaks[rank], "activations kept at once"
        forth, back = (3, 2) if several else (1, 1)  # tensors of a message; a mask has no gradient
        cuts = [pair for pair in itertools.pairwise(rank_of) if pair[0] != pair[1]]
        sent = m * sum(forth * (a == rank) + back * (b == rank) for a, b in cuts)
        received = m * sum(back * (a == rank) + forth * (b == rank) for a, b in cuts)
        assert (ledger.calls.get("send", 0), ledger.calls.get("recv", 0)) == (sent, received)
        torch.testing.assert_close(loss, expected.detach() if executor.last in own else torch.zeros(()))
        for n, stage in own.items():
            for (name, found), right in zip(stage.named_parameters(), whole[n].parameters(), strict=True):
                torch.testing.assert_close(found.grad, right.grad, msg=f"{name} of stage {n} in {schedule}")
        assert not any((executor.kept, executor.inbox, executor.outbox, executor.sends)), "left over"
        compared.append(schedule)

    equal_one_process()
    return len(compared)


def test_any_lists_of_any_stages_equal_one_process():
    """Stages with one tensor, or with masks and skip connections, in which weights and biases are trained or not."""
    assert min(launch(executed, 3, timeout=100)) >= 30


def test_the_random_state_is_as_it_was_after_an_error():
    before = random_state(torch.device("cpu"))
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="in a forward pass"), with_random_state(before, torch.device("cpu")):
        raise ValueError("in a forward pass")
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def slept(*run):
    """Events of a run of sleeping stages, and what each of this rank's stages sleeps."""
    make, made = sleeping.Sleeping, []
    sleeping.Sleeping = lambda *seconds: made.append(seconds) or make(*seconds)  # this process ends here
    return sleeping.run(*run), made


def test_sleeping_stages_take_the_time_that_the_simulator_says_or_more():
    seconds = (0.005, 0.015, 0.01)
    for name, each in (("1f1b", [seconds]), ("zbv", [(0.0025, 0.0075, 0.005)] * 2)):
        events, made = zip(*launch(slept, 4, (name, 8, seconds)), strict=True)
        assert made == (each,) * 4, f"{name}: seconds of each stage's forward and both halves of its backward"
        parts = schedules.SCHEDULES[name].stages_per_rank
        simulated = simulator.simulate(schedules.build(name, 4, 8), simulator.Times(*(s / parts for s in seconds)))
        real = timeline(events)
        assert min(rank[0].start for rank in real.ranks) == 0
        done = [[[e.action for e in rank] for rank in timeline.ranks] for timeline in (real, simulated)]
        assert done[0] == done[1], f"{name}: what each rank does in which order"
        for rank, expected in zip(real.ranks, simulated.ranks, strict=True):
            pairs = zip(rank, expected, strict=True)
            short = [str(e.action) for e, s in pairs if e.end - e.start < 0.99 * (s.end - s.start)]
            assert not short, f"{name}: these actions took less time than their stages sleep"
        assert real.makespan >= 0.99 * simulated.makespan, f"{name}: seconds go on where a rank sleeps or waits"
        first = [timeline.ranks[-1][0].start for timeline in (real, simulated)]
        assert first[0] >= 0.99 * first[1], f"{name}: waiting for an input counts as computing"
        measured, told = sleeping.bubbles(events, name, 8, seconds)
        assert real.peaks == simulated.peaks and told == simulated.bubble and 0 < measured < 1, name


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
    assert all(p.grad is None for p in stage.parameters()), "the backward pass for the input leaves weights alone"
    assert torch.equal(of_x, whole[0]), "the gradient of the input, in two halves and in one pass"
    for outputs, gradients, parameters in later:
        torch.autograd.backward(outputs, gradients, inputs=parameters)
    different = sum(not torch.equal(p.grad, g) for p, g in zip(stage.parameters(), whole[1:], strict=True))
    assert different == 0, "gradients of weights that differ from those of one pass"
    assert sum(len(parameters) for *_, parameters in later) == len(whole) - 1


def test_a_parameter_that_is_used_twice_is_refused():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(UserError, match="used twice in one stage"):
        backward_for_input(x, layer(layer(x)), torch.ones(2, 4))
