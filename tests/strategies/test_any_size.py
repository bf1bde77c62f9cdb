"""What holds for any number of ranks, layers, elements, tokens and examples: hypothesis chooses them. Where code needs
a process group, one process plays one rank after the other with PyTorch's fake one, which sends nothing."""

import itertools
import math
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as some
from pipelines import before, lists
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.data import Plan
from common.lab.launch import launch
from common.mesh import AXES, Axis, axis, make_mesh
from common.state import chunk
from course.ddp import by_hand as ddp
from course.ddp import loading
from course.fsdp import by_hand_zero1, by_hand_zero23
from course.model_parallel import by_hand_experts, by_hand_layers, moe_model
from course.model_parallel import by_hand_ring_attention as ring
from course.pipeline import schedules, simulator, torch_schedules

few = settings(max_examples=30, deadline=None, derandomize=True, database=None,
               suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
many = settings(few, max_examples=100)


@contextmanager
def as_rank(rank: int, size: int):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- schedules ------------------------------------------------------------------------------------------------


NAMES = sorted(schedules.SCHEDULES)


@some.composite
def pipelines(draw, names=NAMES) -> tuple[str, int, int, int]:
    """A schedule's name, ranks, micro-batches and stages per rank, for which there is such a schedule."""
    name, ranks = draw(some.sampled_from(names)), draw(some.integers(1, 6))
    least = 2 * ranks if name == "dualpipev" else 1
    microbatches = draw(some.integers(least, max(least, 13)))
    if name in ("interleaved", "interleaved-zb"):
        assume(microbatches % max(1, microbatches // ranks) == 0)
    several = name in ("interleaved", "interleaved-zb", "looped-bfs")
    return name, ranks, microbatches, draw(some.integers(2, 4)) if several else 1 + (name in ("zbv", "dualpipev"))


def most_stored(name: str, p: int, m: int, v: int) -> list[int]:
    """The most activations on each rank, as the schedule's paper says: not more than these."""
    per_round = m // max(1, m // p)
    return {
        "gpipe": [m] * p,
        "looped-bfs": [v * m] * p,
        "1f1b": [min(p - rank, m) for rank in range(p)],
        "zb-h1": [min(p, m)] * p,  # of 1F1B's first rank
        "interleaved": [min((v - 1) * per_round + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p)],
        "interleaved-zb": [min((v - 1) * per_round + p, v * m)] * p,
        "zbv": [2 * min(p, m)] * p,  # of half the size
        "dualpipev": [2 * p + 1] * p,
    }[name]


def stages_of(name: str, p: int, v: int) -> list[set[int]]:
    """The stages of each rank: in a V, or in a loop."""
    if name in ("zbv", "dualpipev"):
        return [{rank, 2 * p - 1 - rank} for rank in range(p)]
    return [set(range(rank, p * v, p)) for rank in range(p)]


def meet(lists) -> list:
    """Run lists in which a message passes only while both ranks are at it, the strictest kind. What is left over."""
    left, done = [list(actions) for actions in lists], set()
    moved = True
    while moved:
        moved = False
        for actions in left:
            while actions and actions[0].kind in "FBIW":
                done.add(actions.pop(0))
                moved = True
        heads = {actions[0]: actions for actions in left if actions}
        for action, actions in heads.items():
            peer = action.stage + (1 if action.kind == "SEND_F" else -1)
            other = heads.get((peer, action.kind.replace("SEND", "RECV"), action.microbatch))
            if action.kind.startswith("SEND") and other:
                del actions[0], other[0]
                moved = True
                break
    return [action for actions in left for action in actions]


def test_lists_in_which_ranks_face_each_other_are_left_over():
    assert meet(map(schedules.parse, ["0F0 0SEND_F0 0RECV_B0 0B0", "1SEND_B0 1RECV_F0 1F0 1B0"]))
    assert not meet(map(schedules.parse, ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]))


@many
@given(pipelines())
def test_any_schedule_does_the_work_in_order_within_its_memory_and_ends(pipeline):
    name, p, m, v = pipeline
    schedule = schedules.build(*pipeline)
    for rank, (actions, stages, most) in enumerate(
        zip(schedule, stages_of(name, p, v), most_stored(*pipeline), strict=True)
    ):
        done, held, peak = Counter(actions), 0, 0
        for stage, number in itertools.product(stages, range(m)):
            kinds = [kind for kind in "FBIW" if done.pop((stage, kind, number), 0) == 1]
            assert kinds in (["F", "B"], ["F", "I", "W"]), f"rank {rank}, stage {stage}, micro-batch {number}"
            places = [actions.index((stage, kind, number)) for kind in kinds]
            assert places == sorted(places)
        assert not done, f"rank {rank} does more than its work: {done}"
        for action in actions:
            held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            peak = max(peak, held)
        assert peak <= most, f"rank {rank} stores {peak} activations"


def spans_of(schedule, times: simulator.Times) -> dict:
    """When each action begins and ends: moved on, over and over, until none of them is too early."""
    lasts = {"F": times.forward, "I": times.backward_input, "W": times.backward_weight}
    lasts["B"] = [i + w for i, w in zip(lasts["I"], lasts["W"], strict=True)]
    rank_of = {action.stage: rank for rank, own in enumerate(schedule) for action in own}
    work = {action for own in schedule for action in own}
    spans, moved = {action: (0, lasts[action.kind][action.stage]) for action in work}, True
    while moved:
        moved = False
        for rank, place in ((rank, place) for rank, own in enumerate(schedule) for place in range(len(own))):
            action = schedule[rank][place]
            ends = [spans[schedule[rank][place - 1]][1]] if place else []
            ends += [spans[b][1] + times.communication * (rank_of[b[0]] != rank) for b in before(action, work)]
            start = max(ends, default=0)
            moved |= start > spans[action][0]
            spans[action] = start, start + lasts[action.kind][action.stage]
    return spans


def computing(actions) -> list:
    return [action for action in actions if action.kind not in simulator.MESSAGES]


@settings(many, phases=[Phase.generate])  # to find a smaller example takes minutes
@given(some.one_of(lists(), pipelines().map(lambda pipeline: schedules.build(*pipeline))), some.data())
def test_any_lists_take_the_time_that_they_must(schedule, data):
    """With messages and without, whatever times stages take; what is told of it is counted at each moment; and each
    message stands on both ranks where it happens."""
    stages = 1 + max(action.stage for own in schedule for action in own)
    each = some.lists(some.integers(1, 4), min_size=stages, max_size=stages)
    times = simulator.Times(*(data.draw(each) for _ in "FIW"), communication=data.draw(some.integers(0, 3)))
    spans, timeline = spans_of(schedule, times), simulator.simulate(schedule, times)
    assert timeline.ranks == [[(*spans[action], action) for action in own] for own in schedule]
    end, busy = max(end for _, end in spans.values()), sum(end - start for start, end in spans.values())
    assert (timeline.makespan, timeline.bubble) == (end, 1 - busy / (len(schedule) * end))
    text = [line.split()[2:] for line in simulator.rows(timeline).splitlines()]
    unit, several = (
        min(end - start for start, end in spans.values()),
        any(len({a.stage for a in own}) > 1 for own in schedule),
    )
    for rank, own in enumerate(schedule):
        over = {(s, n): spans[s, k, n][1] for s, k, n in own if k in "BW"}
        alive = [(spans[action][0], over[action.stage, action.microbatch]) for action in own if action.kind == "F"]
        held = [sum(first <= moment < last for first, last in alive) for moment in range(end + 1)]
        told = dict(timeline.stored(rank))  # at each moment what comes last
        assert told == {moment: held[moment] for moment in told} and {*told} == {
            moment for pair in alive for moment in pair
        }
        assert timeline.peaks[rank] == max(held) and text[rank][-2:] == [f"{max(held)}", "stored"]
        if unit == 1:
            cells = ["."] * end
            for s, k, n in own:
                first, last = spans[s, k, n]
                cells[first:last] = [f"{s if several else ''}{k}{n}", *["-"] * (last - first - 1)]
            assert [cell.strip("-") or "-" for cell in text[rank][:-2]] == cells
    placed = data.draw(some.sampled_from([simulator.Times([1] * stages, [1] * stages, [1] * stages), times]))
    full, happens = simulator.with_messages(schedule, placed), spans_of(schedule, placed)
    assert not meet(full), "ranks wait for each other for ever"
    assert simulator.with_messages(full, placed) == full
    for own in full:
        for place, (s, kind, n) in enumerate(own):
            if kind in simulator.MESSAGES:
                source = s - (kind == "RECV_F") + (kind == "RECV_B")
                (made,) = {
                    happens[source, k, n][1] for k in (kind[-1], "I"[: kind[-1] == "B"]) if (source, k, n) in happens
                }
                assert all(happens[action][0] < made for action in computing(own[:place]))
                assert all(happens[action][0] >= made for action in computing(own[place:]))
    again = simulator.simulate(full, times).ranks
    assert [[event for event in own if event.action.kind in "FBIW"] for own in again] == timeline.ranks
    if placed is not times:
        assert simulator.with_messages(schedule) == full, "without times each action takes one"


@pytest.mark.parametrize("name", NAMES)
@few
@given(some.data())
def test_any_schedule_is_pytorchs(name, data):
    _, p, m, v = pipeline = data.draw(pipelines([name]))
    assume(m >= p or name != "1f1b")  # PyTorch refuses fewer micro-batches than stages
    assume(name != "zb-h1" or m % max(1, m // p) == 0)  # and wants rounds of equal size
    ours = [[str(action) for action in actions] for actions in schedules.build(*pipeline)]
    theirs = torch_schedules.actions(*pipeline)
    if name == "1f1b":
        # On the last rank PyTorch 2.13 numbers the forwards of this list from 1, so that each backward comes before its
        # forward. What its Schedule1F1B runs does not use the list, and numbers them from 0 as ours.
        counted_from_1 = [f"{p - 1}{kind}{number + (kind == 'F')}" for number in range(m) for kind in "FB"]
        assert theirs[-1] == counted_from_1, "mended in PyTorch: compare the last rank like the others"
        theirs[-1] = [f"{p - 1}{kind}{number}" for number in range(m) for kind in "FB"]
    assert ours == theirs


# --- meshes and places where layers are cut -------------------------------------------------------------------


@few
@given(some.permutations(AXES), some.lists(some.integers(1, 3), min_size=1, max_size=4), some.data())
def test_groups_of_any_mesh_are_lines_of_a_grid(names, sizes, data):
    axes = dict(zip(names, sizes, strict=False))
    size = math.prod(axes.values())
    assume(size <= 16)
    ranks = list(itertools.product(*map(range, axes.values())))  # coordinates of rank 0, 1, ...: the last varies first
    chosen = [(name,) for name in axes] + [pair for pair in itertools.combinations(axes, 2)]
    rank = data.draw(some.integers(0, size - 1))
    with as_rank(rank, size):
        mesh = make_mesh(axes)
        for along in chosen:
            fixed = [number for number, name in enumerate(axes) if name not in along]
            line = [r for r, other in enumerate(ranks) if all(other[n] == ranks[rank][n] for n in fixed)]
            found = axis(mesh, *along)
            assert dist.get_process_group_ranks(found.group) == line, f"rank {rank} of {axes} along {along}"
            assert (found.rank, found.size) == (line.index(rank), len(line))
        alone = axis(mesh, next(name for name in AXES if name not in axes))
        assert (dist.get_process_group_ranks(alone.group), alone.size) == ([rank], 1), "an axis that is not there"


@many
@given(some.lists(some.integers(0, 9), min_size=1, max_size=8), some.data())
def test_the_cut_of_any_layers_is_the_best_of_all(costs, data):
    parts = data.draw(some.integers(1, len(costs)))
    ends = by_hand_layers.cut(costs, parts)

    def largest(ends):
        return max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *ends)))

    assert len(ends) == parts and ends[-1] == len(costs) and list(ends) == sorted(set(ends)) and ends[0] > 0
    ways = itertools.combinations(range(1, len(costs)), parts - 1)
    assert largest(ends) == min(largest((*way, len(costs))) for way in ways)


# --- buckets and shards ---------------------------------------------------------------------------------------

shapes = some.lists(some.integers(1, 7), max_size=3).map(tuple)


@many
@given(some.lists(shapes, min_size=1, max_size=12), some.integers(1, 2000))
def test_buckets_of_any_parameters_are_those_of_pytorch(sizes, cap):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = ddp.assign(parameters, cap)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes))), "each once, in order"
    assert buckets == dist._compute_bucket_assignment_by_size(parameters, [cap])[0]


class Model(nn.Module):
    """Parameters of these shapes, some of them frozen, and a buffer."""

    def __init__(self, sizes, frozen):
        super().__init__()
        for number, size in enumerate(sizes):
            values = torch.arange(math.prod(size)).view(size) + 1000.0 * number
            setattr(self, f"p{number}", nn.Parameter(values, requires_grad=number not in frozen))
        self.register_buffer("count", torch.tensor(3.0))


@many
@given(some.lists(shapes, min_size=1, max_size=5), some.sets(some.integers(0, 4)), some.integers(1, 5), some.booleans())
def test_flat_shards_of_any_parameters_are_all_of_them_once(sizes, frozen, ranks, half):
    """Put together again, the parts of all ranks are the model; what is padded is less than a number for each rank."""
    model = Model(sizes, frozen)
    found, elements = {name: torch.full_like(value, -1.0) for name, value in model.state_dict().items()}, Counter()
    dtype = torch.bfloat16 if half else torch.float32
    with as_rank(0, ranks):
        for rank in range(ranks):
            own, place = Model(sizes, frozen), Axis(dist.group.WORLD, rank, ranks)
            flats = by_hand_zero1.flats_of(list(own.parameters()), place, dtype, "cpu", dist.group.WORLD)
            for flat in flats:
                assert len(flat.shard) * ranks == len(flat.vector) < flat.length + ranks
                assert flat.shard.dtype == torch.float32 and flat.shard.requires_grad == flat.requires_grad
                assert torch.equal(flat.own(flat.vector), flat.part)
                flat.shard.data += 0.5  # as if it were stepped
                flat.round()
                assert torch.equal(flat.part, flat.shard.detach().to(dtype))
            for part in by_hand_zero1.parts_of(own, flats):
                part.where.put(found[part.name], part.tensor)
                elements[part.name] += part.where.stop - part.where.start
                owned = part.owner is not None
                assert owned == (part.name != "count" and model.get_parameter(part.name).requires_grad)
                assert not owned or torch.equal(part.owner.detach()[part.span], part.tensor.flatten())
    for name, value in model.named_parameters():
        assert torch.equal(found[name], value + 0.5) and elements[name] == value.numel(), name


@few
@given(some.lists(some.tuples(some.integers(1, 5), some.integers(1, 4)), min_size=1, max_size=4),
       some.integers(1, 4), some.integers(1, 3))  # fmt: skip
def test_flat_shards_of_rows_are_all_of_them_once(sizes, shards, rows):
    """Parameters that tensor parallelism has cut by rows, in units that are cut flat along another axis."""
    whole = [torch.arange(float(rows * a * b)).view(rows * a, b) + 100 * n for n, (a, b) in enumerate(sizes)]
    found = [torch.full_like(tensor, -1.0) for tensor in whole]
    with as_rank(0, shards):
        for row, shard in itertools.product(range(rows), range(shards)):
            layers = nn.ModuleList(nn.ParameterList([tensor.chunk(rows)[row].clone()]) for tensor in whole)
            along, place = Axis(None, row, rows), Axis(dist.group.WORLD, shard, shards)
            model = nn.Sequential()
            model.layers = layers
            units = dict.fromkeys(unit for _, unit in by_hand_zero23.units_of(model, place))
            flats = [flat for unit in units for flat in unit.flats]
            for part in by_hand_zero1.parts_of(model, flats, lambda parameter, along=along: chunk(parameter, 0, along)):
                part.where.put(found[int(part.name.split(".")[1])], part.tensor)
    for got, expected in zip(found, whole, strict=True):
        assert torch.equal(got, expected)


# --- tokens ---------------------------------------------------------------------------------------------------


@many
@given(some.integers(1, 9), some.integers(1, 4), some.booleans(), some.booleans())
def test_a_ring_of_any_size_computes_each_pair_of_tokens_once_and_zigzag_divides_the_work(ranks, each, zigzag, causal):
    order, time = (ring.zigzag if zigzag else ring.contiguous), 2 * ranks * each
    where = [ring.positions(rank, ranks, time, order).tolist() for rank in range(ranks)]
    assert sorted(itertools.chain(*where)) == list(range(time)), "every token has one place"
    computed, work = Counter(), []
    for mine in range(ranks):
        before = computed.total()
        for theirs in range(ranks):
            for i, j, diagonal in ring.pairs(order(mine, ranks), order(theirs, ranks), causal):
                queries = where[mine][i * each : (i + 1) * each]
                keys = where[theirs][j * each : (j + 1) * each]
                computed.update((q, k) for q in queries for k in keys if not diagonal or k <= q)
        work.append(computed.total() - before)
    assert computed == Counter((q, k) for q in range(time) for k in range(time) if not causal or k <= q)
    assert len(set(work)) == 1 or not zigzag, f"pairs that each rank computes: {work}"
    if causal and not zigzag and ranks > 1:
        assert work[-1] > 1.4 * work[0]


def dispatched() -> int:
    """On each rank, which draws the same numbers as the others: experts that are elsewhere answer as if they were here,
    forward and backward. How many mixtures were compared."""
    rank, ranks, compared = dist.get_rank(), dist.get_world_size(), []

    @settings(few, max_examples=15, phases=[Phase.generate])
    @given(some.integers(1, 3), some.integers(1, 4), some.integers(1, 6), some.floats(0.1, 3), some.integers(0, 99))
    def equals_the_dense_one(multiple, top_k, time, capacity_factor, seed):
        torch.manual_seed(seed)
        experts = multiple * ranks
        dense = moe_model.Mixture(4, experts, min(top_k, experts), capacity_factor, std=0.5)
        with torch.no_grad():
            for parameter in dense.parameters():
                parameter.normal_()
        sparse = moe_model.Mixture(4, experts, min(top_k, experts), capacity_factor, std=0.5)
        sparse.load_state_dict(dense.state_dict())
        for parameter in sparse.experts.parameters():
            parameter.data = parameter.data.chunk(ranks)[rank].clone()
        sparse = by_hand_experts.ParallelMixture(sparse, Axis(dist.group.WORLD, rank, ranks))
        everyone = torch.randn(ranks, 2, time, 4)
        whole, own = everyone.clone().requires_grad_(), everyone[rank].clone().requires_grad_()
        outputs = [(dense(one), dense.imbalance, dense.dropped) for one in whole]
        got = sparse(own)
        torch.testing.assert_close(got, outputs[rank][0])
        torch.testing.assert_close(sparse.imbalance, outputs[rank][1])
        assert sparse.dropped == outputs[rank][2]
        assert sparse.load.sum() + sparse.dropped == 2 * time * min(top_k, experts)
        torch.stack([y for y, *_ in outputs]).square().sum().backward()
        got.square().sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[rank])
        for name, parameter in sparse.experts.named_parameters():
            torch.testing.assert_close(parameter.grad, dense.experts.get_parameter(name).grad.chunk(ranks)[rank])
        router = sparse.router.weight.grad
        dist.all_reduce(router)
        torch.testing.assert_close(router, dense.router.weight.grad, rtol=1e-4, atol=1e-5)
        compared.append(experts)

    equals_the_dense_one()
    return len(compared)


def test_any_routing_is_that_of_the_dense_mixture():
    for ranks in (1, 3):
        assert min(launch(dispatched, ranks, timeout=120)) >= 10


# --- examples -------------------------------------------------------------------------------------------------


class Numbers:
    """Example i is the number i."""

    def __init__(self, size):
        self.size = size

    def batch(self, indices):
        return indices, -indices

    def record(self, index: int) -> int:
        return index

    def decode(self, record: int):
        return torch.tensor(record), -torch.tensor(record)


@few
@given(some.sampled_from([loading.shard, loading.stream, loading.shard_stream]), some.integers(1, 4),
       some.integers(1, 3), some.integers(1, 2), some.integers(1, 30), some.integers(0, 99),
       some.integers(0, 2))  # fmt: skip
def test_any_ranks_read_every_example_once_in_an_epoch(way, ranks, accumulate, each, size, seed, start):
    """And each micro-batch has equally many; a run that starts later reads what it would have read."""
    batch = ranks * accumulate * each
    examples = (3 * size // batch + 1) * batch
    of_ranks = []
    for rank in range(ranks):
        plan = Plan(seed, batch, examples, rank, ranks, accumulate)
        of_ranks.append(list(way(Numbers(size), plan, 0)))
        assert all(len(x) == each and torch.equal(x, -y) for step in of_ranks[-1] for x, y in step)
        later = [x.tolist() for step in way(Numbers(size), plan, start) for x, _ in step]
        assert later == [x.tolist() for step in of_ranks[-1][start:] for x, _ in step]
    read = [x for steps in zip(*of_ranks, strict=True) for step in steps for x, _ in step]
    numbers = torch.cat(read).tolist()
    assert len(numbers) == examples
    for epoch in range(3):
        assert sorted(numbers[epoch * size : (epoch + 1) * size]) == list(range(size)), f"epoch {epoch}"
