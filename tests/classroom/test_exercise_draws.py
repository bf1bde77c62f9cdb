"""Arguments that are drawn for a class: of the sizes that were meant, and such that the question has one answer."""

import itertools
import math
import random

import pytest

from course.fsdp.classroom import fresh as fsdp
from course.model_parallel.classroom import fresh as model_parallel
from course.pipeline import schedules, simulator
from course.pipeline.classroom import fresh as pipeline

DRAWN = 400
STRATEGIES = {"ddp", "zero1", "zero2", "fsdp"}

# For each argument what it can be: numbers from ... to ..., a set, or None for what CONDITIONS tells.
RANGES = {
    model_parallel: {
        "balanced_cut": (None, (2, 4)),
        "naive_utilisation": (None, None, {0.0, 0.25, 0.5, 2.0}),
        "ring_pairs": (None,),
    },
    pipeline: {
        "microbatches_for": ((2, 16), (1, 4), (3, 40)),
        "peak_megabytes": (None, None),
        "makespan": (None, (1, 5), (1, 9), (0, 4)),
        "quickest_microbatches": ({24, 36, 48, 60}, (2, 6), (1, 200), (1, 20), {24, 36, 48, 60}),
        "loss_factors": (None,),
    },
    fsdp: {
        "own_pieces": (None, (0, 4), (2, 5)),
        "kept_bytes": (STRATEGIES, None, {2, 8, 16}, {False, True}),
        "sent_in_a_step": (STRATEGIES, None, {2, 4, 8}, (1, 5)),
        "gathered_peak": (None, (0, 3), {False, True}),
        "mesh_groups": (None, None),
        "recomputed": (None, (1, 6), (20, 200), None, (0.25, 2.0)),
        "micro_batch_for": ({1000}, None, (20, 200), None, {1, 2, 4}),
        "fewest_ranks": (STRATEGIES, None, (0, 40 * 10**9), {24 * 10**9, 40 * 10**9, 80 * 10**9}),
        "tokens_to_hide": ({"ddp", "zero1", "fsdp"}, (1, 8), (100e12, 900e12), {10e9, 25e9, 50e9, 400e9}),
        "best_offer": ({"llama-7b", "llama-13b"}, None, {2048, 4096}),
    },
}
DRAWS = [(module, name) for module, names in RANGES.items() for name in names]


def one_cut_is_best(costs, parts):
    cuts = [(0, *cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1)]
    largest = [max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts]
    return largest.count(min(largest)) == 1 and 5 <= len(costs) <= 9 and 1 <= min(costs) <= max(costs) <= 60


def one_number_is_best(batch, ranks, overhead, example, limit):
    """A step takes as long as m + p - 1 micro-batches."""
    divisors = [m for m in range(1, batch + 1) if batch % m == 0]
    seconds = [(m + ranks - 1) * (overhead + batch // m * example) for m in divisors]
    return seconds.count(min(seconds)) == 1 and limit == batch


def one_rank_of_a_schedule(actions, megabytes):
    parsed = schedules.parse(" ".join(actions))
    forwards = {action.microbatch for action in parsed if action.kind == "F"}
    freed = {action.microbatch for action in parsed if action.kind in "BW"}
    return len({action.stage for action in parsed}) == 1 and parsed[0].stage in megabytes and forwards == freed


def a_legal_schedule(schedule, *times):
    simulator.simulate([schedules.parse(" ".join(actions)) for actions in schedule])
    return 2 <= len(schedule) <= 4


def dealt_out(positions):
    dealt = sorted(position for own in positions for position in own)
    return dealt == list(range(len(dealt))) and 2 <= len(positions) <= 5 and len({len(own) for own in positions}) == 1


def of_three_different_gpus(model, offers, sequence):
    gpus, counts, dollars = zip(*offers, strict=True)
    return len(set(gpus)) == 3 and set(counts) <= {8, 16} and 0.5 <= min(dollars) <= max(dollars) <= 4


CONDITIONS = {
    "balanced_cut": one_cut_is_best,
    "naive_utilisation": lambda forward, backward, _: len(forward) == len(backward) and min(forward + backward) > 0,
    "ring_pairs": dealt_out,
    "peak_megabytes": one_rank_of_a_schedule,
    "makespan": a_legal_schedule,
    "quickest_microbatches": one_number_is_best,
    "loss_factors": lambda tokens: len({len(own) for own in tokens}) == 1 and min(map(min, tokens)) >= 1,
    "own_pieces": lambda sizes, rank, world: rank < world and 2 <= len(sizes) <= 6 and min(sizes) >= 1,
    "kept_bytes": lambda strategy, parameters, ranks, mixed: parameters % ranks == 0 and parameters // ranks >= 100,
    "sent_in_a_step": lambda strategy, parameters, ranks, _: parameters % ranks == 0 and parameters // ranks >= 100,
    "gathered_peak": lambda units, ahead, reshard: 3 <= len(units) <= 7 and min(units) >= 1,
    "mesh_groups": lambda sizes, rank: rank < math.prod(sizes) and set(sizes) <= {2, 3, 4} and len(sizes) in (2, 3),
    "recomputed": lambda blocks, every, activations, boundary, _: blocks % every == 0 and 1 <= boundary <= activations,
    "micro_batch_for": lambda budget, kept, example, batch, ranks: batch % ranks == 0 and 50 <= kept <= 900,
    "fewest_ranks": lambda strategy, parameters, activations, budget: 10**8 <= parameters <= 9 * 10**9,
    "best_offer": of_three_different_gpus,
}


@pytest.mark.parametrize(("module", "name"), DRAWS, ids=[name for _, name in DRAWS])
def test_arguments_are_drawn_as_they_are_meant(module, name):
    drawn = random.Random(0)
    calls = [module.ARGUMENTS[name](drawn) for _ in range(DRAWN)]
    holds = CONDITIONS.get(name, lambda *arguments: True)
    assert [call for call in calls if not holds(*call)][:1] == [], f"a call that {name} should not be asked"
    for place, allowed in enumerate(RANGES[module][name]):
        found = {call[place] for call in calls} if allowed else set()
        if isinstance(allowed, tuple):
            assert (min(found), max(found)) == allowed, f"{name}, argument {place}: from the least to the most"
        elif allowed:
            assert found == allowed, f"{name}, argument {place}"


# Exercises with a judge, of which whole cases are drawn.
SCHEDULES = {
    "one_forward_one_backward": ((2, 6), (3, 10)),
    "short_of_memory": ((3, 5), (5, 9), (1, 4)),
    "interleave": ((2, 5), (2, 15), (2, 4)),
    "blocks_per_stage": ((0, 9), (1, 5), (3, 30), (8, 12), (3, 4)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_cases_are_drawn_as_they_are_meant(name):
    drawn = random.Random(0)
    calls = [case.arguments[0] for _ in range(100) for case in pipeline.CASES[name](drawn, 2)]
    assert len(calls) == 100, "one case for each draw, on two ranks"
    assert [list(pipeline.CASES[name](drawn, size)) for size in (3, 4)] == [[], []]
    assert tuple((min(found), max(found)) for found in zip(*calls, strict=True)) == SCHEDULES[name], name
    if name == "interleave":
        assert {microbatches % ranks for ranks, microbatches, _ in calls} == {0}, "micro-batches in whole rounds"
    if name == "short_of_memory":
        assert all(limit < ranks for ranks, _, limit in calls), "less room than 1F1B wants"


def test_schedules_are_drawn_of_all_sizes():
    """As (ranks, micro-batches), read off the schedule that a learner is given."""
    drawn = random.Random(0)
    sizes, places = {"place_weight_gradients": set(), "late": set(), "stuck": set()}, set()
    for _ in range(100):
        given = [case.arguments[0][0] for case in pipeline.CASES["place_weight_gradients"](drawn, 2)]
        late, stuck = (case.arguments[0][0] for case in pipeline.CASES["mend"](drawn, 2))
        for kind, schedule in zip(sizes, [*given, late, stuck], strict=True):
            sizes[kind].add((len(schedule), sum("F" in action for action in schedule[0])))
        right = [str(action) for action in schedules.build("1f1b", len(late), len(late[0]) // 2)[-1]]
        places.add([new == old for new, old in zip(late[-1], right, strict=True)].index(False))
    expected = {(ranks, microbatches) for ranks in range(2, 6) for microbatches in range(ranks, 10)}
    assert sizes["place_weight_gradients"] <= expected, "at least as many micro-batches as ranks, and at most 9"
    assert len(sizes["place_weight_gradients"]) >= 0.8 * len(expected), "place_weight_gradients: nearly all sizes"
    assert sizes["late"] == {(ranks, many) for ranks in (3, 4, 5) for many in (5, 6, 7, 8)}, "mend, a backward early"
    assert sizes["stuck"] == {(3, 2), (5, 4), (6, 5)}, "mend, ranks that wait for each other"
    assert places == {0, 2, 4, 6, 8, 10, 12, 14}, "mend: any forward of the last rank and its backward"


def test_everything_that_is_drawn_is_looked_at():
    assert all(module.ARGUMENTS.keys() == names.keys() for module, names in RANGES.items())
