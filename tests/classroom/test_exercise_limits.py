"""What exercises of chapters 04 to 06 allow: at most so many bytes, no message that nobody asked for, schedules within
their budget, and layouts that the planner takes."""

import random
from collections import Counter

import pytest

from common import check
from common.grading.engine import SIZES, Wrong
from common.grading.values import plain
from common.lab.ledger import LedgerEntry
from course.fsdp.classroom import grading as fsdp
from course.pipeline import schedules, simulator
from course.pipeline.classroom import fresh, solutions
from course.pipeline.classroom import grading as pipeline

# exercise -> bytes that it allows at most, on 2, 3 and 4 ranks: no wrong answer comes near enough to each limit
LIMITS = {
    "first_difference": ([4096],) * 3,
    "exact_accuracy": ([16],) * 3,  # two numbers of 8 bytes
    # All-reduces of 5 + 1 numbers of 4 bytes, of which 1, 4/3 and 3/2 are sent; one more than there are steps.
    "uneven_steps": ([72, 96], [96, 128], [108, 144]),
    "parallel_cross_entropy": ([120, 96, 72], [160, 128, 96], [180, 144, 108]),  # 3 of 8 bytes for 5, 4 and 3 tokens
    "gradient_norm": ([8],) * 3,
    "load_balancing_loss": ([72],) * 3,  # four counts and four sums, and one number more, of 8 bytes
    "global_norm": ([8],) * 3,
    "scaled_step": ([8],) * 3,
}


def passes(case, nbytes: int, size: int, operation: str) -> bool:
    try:
        case.pattern([[LedgerEntry(operation, nbytes, size, peer=(rank + 1) % size)] for rank in range(size)])
    except Wrong:
        return False
    return True


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_allowed_at_most_is_as_much(name):
    """So many bytes pass, in an all-reduce or sent to a neighbour, and one more does not."""
    (exercise,) = check.chosen_from(check.chapter_with(name), name)
    for size, limits in zip(SIZES, LIMITS[name], strict=True):
        for case in exercise.check(size):
            ways = [
                (limit, way) for limit in limits for way in ("all_reduce", "send") if passes(case, limit, size, way)
            ]
            assert any(not passes(case, limit + 1, size, way) for limit, way in ways), f"{name} on {size}: {case.what}"


AT_MOST = {"first_difference", "uneven_steps", "parallel_cross_entropy"}  # so many bytes, by any operation


def test_a_message_that_nobody_asked_for_is_refused_whatever_is_returned():
    """Of 4 bytes, or where only bytes have a limit, of a gigabyte: also where an answer is to calculate."""
    accepted = []
    for chapter in check.chapters():
        for exercise in check.exercises_of(chapter):
            nbytes = 10**9 if exercise.name in AT_MOST else 4
            for case in exercise.check(2):
                try:
                    case.pattern([[LedgerEntry("all_gather", nbytes, 2)]] * 2)
                    accepted.append(f"{case.what} of {exercise.name}")
                except Wrong:
                    pass
    assert not accepted, "inputs for which any message is accepted"


def right(case, answer) -> bool:
    """Does the judge of a case take an answer?"""
    try:
        case.expected[0](plain(answer(*case.arguments[0])))
    except Wrong as wrong:
        assert wrong.expected and wrong.got
        return False
    return True


# A wrong answer is refused at the first case that it gets wrong; the number of each that refuse it.
REFUSED = {
    "one_forward_one_backward": {solutions.no_warm_up: 4, solutions.all_forwards_first: 4},
    # With room for one there is no other way.
    "short_of_memory": {solutions.one_at_a_time: 3, solutions.limit_off_by_one: 4},
    "interleave": {solutions.interleave_without_a_lead: 4, solutions.interleave_far_ahead: 3},
    "place_weight_gradients": {
        solutions.weights_at_once: 4, solutions.weights_at_the_end: 4, solutions.weights_in_another_schedule: 4,
    },
    "blocks_per_stage": {
        lambda embedding, block, head, blocks, stages: [blocks - stages + 1, *[1] * (stages - 1)]: 3,
        lambda embedding, block, head, blocks, stages: [2] * (blocks // 2): 3,
    },
    "mend": {
        solutions.mend_nothing: 4,
        lambda schedule: [[*schedule[0][:-2], *schedule[0][:-3:-1]], *schedule[1:]]: 4,  # two others are swapped
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_case_of_a_schedule_has_its_budget(name):
    cases = list(getattr(pipeline, name)(2))
    for answer, number in REFUSED[name].items():
        assert [right(case, answer) for case in cases].count(False) == number, f"{name}, of {answer.__name__}"
    assert all(right(case, getattr(solutions, name)) for case in cases)


def test_slowest_stage_may_take_no_second_more():
    """9 seconds at least; 10 are refused."""
    first = next(iter(pipeline.blocks_per_stage(2)))
    assert not right(first, lambda *costs: [3, 5, 3, 1])


def test_schedule_to_be_mended_is_not_legal_as_it_is():
    """Those of the table, and those of a class: in the wrong order, or ranks wait for each other."""
    kinds = Counter()
    for case in [*pipeline.mend(2), *(case for seed in range(20) for case in fresh.mend(random.Random(seed), 2))]:
        given = [schedules.parse(" ".join(actions)) for actions in case.arguments[0][0]]
        try:
            simulator.simulate(given)
            kinds["legal"] += 1
        except simulator.IllegalSchedule as illegal:
            kinds[str(illegal).partition(":")[0]] += 1
    assert kinds.keys() == {"wrong order", "deadlock"}, kinds


def test_schedule_is_read_in_any_form_or_refused():
    case = next(iter(pipeline.one_forward_one_backward(2, [(2, 1)])))
    triples = [[(rank, kind, 0) for kind in "FB"] for rank in (0, 1)]
    for answer in (["0F0 0B0", "1F0 1B0"], [["0F0", "0B0"], ["1F0", "1B0"]], triples):
        assert right(case, lambda *_, answer=answer: answer), f"text, many texts, triples: {answer}"
    no_schedules = 3, "F0", ["0F0 0B0"], ["0F0 0Q1", ""]
    incomplete = ["0F0", "1F0 1B0"], ["0F0 0B0 0B0", "1F0 1B0"], ["0F0 0B0 1F0", "1B0"]
    illegal = ["0F0 0B0", "1B0 1F0"], ["0B0 0F0", "1F0 1B0"]
    for answer in (*no_schedules, *incomplete, *illegal):
        assert not right(case, lambda *_, answer=answer: answer), answer


@pytest.mark.parametrize(
    "layout, fits",
    [
        ((3, 1, 8, "full", True), True),
        ((3, 1, 4, "full", True), True),
        ((3, 1, 2, "full", True), False),  # too slow
        ((3, 1, 1, "full", False), False),  # does not fit
        ((0, 2, 1, "none", True), False),  # more of the machine's own memory than there is
        ((3, 1, 8, "full"), False),
        ((3, 1, 8, "full", 1), False),
        ((3, 3, 1, "full", True), False),  # no such mesh
    ],
)
def test_layout_for_four_cards_is_judged_by_the_planner(layout, fits):
    (case,) = fsdp.fit_on_four_cards(2)
    assert right(case, lambda: layout) == fits
