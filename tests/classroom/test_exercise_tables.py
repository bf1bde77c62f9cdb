"""What every exercise of chapters 04 to 06 asks, and what its hint says, against the tables in tests/exercises/.

A wrong answer is refused by the first case that it gets wrong, so no wrong answer needs most of the others. A table has
for each exercise its dots and points, its hint, and a line for each case, headed by the world sizes that have it; after
| what the ranks are given on the largest of these, of floating-point tensors the shape.
"""

import random
from collections import Counter

import pytest
import torch

from common import ROOT, check
from common.grading.engine import SIZES, Wrong
from common.grading.values import plain
from common.lab.ledger import LedgerEntry
from course.fsdp.classroom import grading as fsdp
from course.pipeline import schedules, simulator
from course.pipeline.classroom import fresh, solutions
from course.pipeline.classroom import grading as pipeline

TABLES = {file.stem: file for file in (ROOT / "tests" / "exercises").glob("*.txt")}


def written(table: str) -> dict[str, list[str]]:
    """exercise -> its heading, its hint and its cases. What is indented by more than two goes on with a line."""
    entries: dict[str, list[str]] = {}
    for line in table.splitlines():
        if not line.startswith(" "):
            name = line.split()[0]
            entries[name] = [line]
        elif line.startswith("   "):
            entries[name][-1] += " " + line.strip()
        else:
            entries[name].append(line.strip())
    return entries


def case_in_words(case) -> str:
    """A long list of actions is no part of its name: then all arguments are shown."""
    if "..." not in case.what:
        return case.what
    shown = [" / ".join(map(" ".join, a)) if isinstance(a, list) else str(a) for a in case.arguments[0]]
    return f"{case.what.partition('(')[0]}({', '.join(shown)})"


def held(value) -> str:
    """An argument: of floating-point tensors the shape, of all others what is in it."""
    if isinstance(value, torch.Tensor):
        return "x".join(map(str, value.shape)) or "()" if value.is_floating_point() else str(value.tolist())
    return f"[{', '.join(map(held, value))}]" if isinstance(value, (list, tuple)) else str(value)


def with_arguments(case) -> str:
    """What each rank is given, where the name of the case does not say it."""
    words = case_in_words(case)
    ranks = ["; ".join(map(held, own)) for own in case.arguments]
    shown = ranks[:1] if len({*ranks}) == 1 else ranks
    return words if "(" in words.partition(" ")[0] else f"{words} | {' / '.join(shown)}"


def asked(exercise) -> list[str]:
    """Its heading, its hint, and its cases with the world sizes that have them; arguments on the most ranks alone."""
    sizes: dict[tuple[int, str], list[int]] = {}
    cases = {size: list(exercise.check(size)) for size in SIZES}
    most = max(size for size in SIZES if cases[size])
    for size in SIZES:
        for place, case in enumerate(cases[size]):
            sizes.setdefault((place, case_in_words(case)), []).append(size)
    heading = f"{exercise.name} {exercise.difficulty} {exercise.points}"
    return [heading, exercise.hint, *(
        f"{' '.join(map(str, on))}: {with_arguments(cases[most][place]) if most in on else what}"
        for (place, what), on in sorted(sizes.items(), key=lambda entry: (entry[1], entry[0][0]))
    )]  # fmt: skip


@pytest.mark.parametrize("chapter", sorted(TABLES))
def test_exercises_ask_what_their_table_says(chapter):
    table = written(TABLES[chapter].read_text())
    exercises = {exercise.name: asked(exercise) for exercise in check.exercises_of(chapter)}
    different = [
        f"{name}: {sign} {line}"
        for name in dict.fromkeys([*table, *exercises])
        for sign, these, those in (
            ("no longer", table.get(name, []), exercises.get(name, [])),
            ("not in the table,", exercises.get(name, []), table.get(name, [])),
        )
        for line in these
        if these.count(line) > those.count(line)
    ]
    assert not different, "\n".join(different)


def test_every_chapter_with_many_wrong_answers_has_its_table():
    assert sorted(TABLES) == ["04_model_parallel", "05_pipeline", "06_fsdp"]


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


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_allowed_at_most_is_as_much(name):
    (exercise,) = check.chosen_from(check.chapter_with(name), name)
    found = []
    for size in SIZES:
        said = []
        for case in exercise.check(size):
            with pytest.raises(Wrong) as wrong:  # a message that nobody asks for
                case.pattern([[LedgerEntry("send", 10**9, size, peer=(rank + 1) % size)] for rank in range(size)])
            said.append(int(wrong.value.expected.partition("at most ")[2].split()[0]))
        found.append(list(dict.fromkeys(said)))
    assert tuple(found) == LIMITS[name], f"{name}: how many bytes it allows at most"


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


def judgements(cases, answer) -> list[str]:
    """What the judge of each case says of an answer, and what is drawn below it."""
    said = []
    for case in cases:
        try:
            case.expected[0](plain(answer(*case.arguments[0])))
            said.append("right")
        except Wrong as wrong:
            drawn = f" | {wrong.drawing.alt.partition(': ')[2]}" if wrong.drawing else ""
            said.append(f"{wrong.expected}, got {wrong.got}{drawn}")
    return said


# A wrong answer is refused at the first schedule that it is asked for. What is allowed of each of the others:
BUDGETS = {
    # 2m + 4 (p-1) units; rank r stores 2 (p-r) - 1
    "one_forward_one_backward": {
        solutions.no_warm_up: [
            "a makespan of at most 28, got 112 | makespan 112, at most 1 stored",
            "a makespan of at most 14, got 30 | makespan 30, at most 1 stored",
            "a makespan of at most 14, got 30 | makespan 30, at most 1 stored",
            "a makespan of at most 16, got 28 | makespan 28, at most 1 stored",
        ],
        solutions.all_forwards_first: [
            "at most [7, 5, 3, 1] activations stored on the ranks, got [8, 8, 8, 8] | makespan 28, at most 8 stored",
            "at most [5, 3, 1] activations stored on the ranks, got [3, 3, 3] | makespan 14, at most 3 stored",
            "at most [3, 1] activations stored on the ranks, got [5, 5] | makespan 14, at most 5 stored",
            "at most [7, 5, 3, 1] activations stored on the ranks, got [2, 2, 2, 2] | makespan 16, at most 2 stored",
        ],
    },
    "short_of_memory": {
        solutions.one_at_a_time: [
            "a makespan of at most 34, got 64 | makespan 64, at most 1 stored",
            "a makespan of at most 26, got 64 | makespan 64, at most 1 stored",
            "a makespan of at most 24, got 42 | makespan 42, at most 1 stored",
            "right",  # with room for one there is no other way
        ],
        solutions.limit_off_by_one: [
            "at most [2, 2, 2, 2] activations stored on the ranks, got [3, 3, 3, 1] | makespan 26, at most 3 stored",
            "at most [3, 3, 3, 3] activations stored on the ranks, got [4, 4, 3, 1] | makespan 22, at most 4 stored",
            "at most [2, 2, 2] activations stored on the ranks, got [3, 3, 1] | makespan 18, at most 3 stored",
            "at most [1, 1, 1, 1] activations stored on the ranks, got [2, 2, 2, 1] | makespan 34, at most 2 stored",
        ],
    },
    # 2 (v m + p-1) units; rank r stores (v-1) p + p - r
    "interleave": {
        solutions.interleave_without_a_lead: [
            "a makespan of at most 38, got 104 | makespan 104, at most 5 stored",
            "a makespan of at most 26, got 40 | makespan 40, at most 5 stored",
            "a makespan of at most 16, got 24 | makespan 24, at most 4 stored",
            "a makespan of at most 10, got 12 | makespan 12, at most 3 stored",
        ],
        solutions.interleave_far_ahead: [
            "at most [8, 7, 6, 5] activations stored on the ranks, got [11, 9, 7, 5] | makespan 38, at most 11 stored",
            "at most [6, 5] activations stored on the ranks, got [7, 5] | makespan 26, at most 7 stored",
            "at most [6, 5, 4] activations stored on the ranks, got [6, 6, 4] | makespan 16, at most 6 stored",
            "right",  # so few micro-batches that it makes no difference
        ],
    },
    # 3m + p - 1 units; p stored
    "place_weight_gradients": {
        solutions.weights_at_once: [
            "a makespan of at most 27, got 30 | makespan 30, at most 4 stored",
            "a makespan of at most 13, got 14 | makespan 14, at most 2 stored",
            "a makespan of at most 11, got 13 | makespan 13, at most 3 stored",
            "a makespan of at most 18, got 21 | makespan 21, at most 4 stored",
        ],
        solutions.weights_at_the_end: [
            "at most [4, 4, 4, 4] activations stored on the ranks, got [8, 8, 8, 8] | makespan 30, at most 8 stored",
            "at most [2, 2] activations stored on the ranks, got [4, 4] | makespan 14, at most 4 stored",
            "a makespan of at most 11, got 13 | makespan 13, at most 3 stored",
            "at most [4, 4, 4, 4] activations stored on the ranks, got [5, 5, 5, 5] | makespan 21, at most 5 stored",
        ],
        solutions.weights_in_another_schedule: [
            "0I0 next on rank 0, in the order as given, got 0F4",
            "0I0 next on rank 0, in the order as given, got 0F2",
            "1I0 next on rank 1, in the order as given, got 1F2",
            "0I0 next on rank 0, in the order as given, got 0F4",
        ],
    },
    "blocks_per_stage": {
        lambda embedding, block, head, blocks, stages: [blocks - stages + 1, *[1] * (stages - 1)]: [
            "a slowest stage of 9, got [9, 1, 1, 1]: stages of [19, 2, 2, 9] | [9, 1, 1, 1]: stages of [19, 2, 2, 9]",
            "a slowest stage of 6, got [5, 1, 1, 1]: stages of [15, 3, 3, 3] | [5, 1, 1, 1]: stages of [15, 3, 3, 3]",
            "a slowest stage of 12, got [8, 1, 1]: stages of [25, 2, 7] | [8, 1, 1]: stages of [25, 2, 7]",
            "right",  # the head takes so long that the first stage may have all others
        ],
        lambda embedding, block, head, blocks, stages: [2] * (blocks // 2): [
            "4 numbers of 1 or more that add up to 12, got [2, 2, 2, 2, 2, 2]",
            "right",
            "3 numbers of 1 or more that add up to 10, got [2, 2, 2, 2, 2]",
            "4 numbers of 1 or more that add up to 9, got [2, 2, 2, 2]",
        ],
    },
    "mend": {
        solutions.mend_nothing: ["two neighbouring actions of one rank swapped, got 0 places are different"] * 4,
        # The last two actions of rank 0, which are not those that were swapped: nothing is mended.
        lambda schedule: [[*schedule[0][:-2], *schedule[0][:-3:-1]], *schedule[1:]]: [
            "a legal schedule, got wrong order: rank 1 does 1B0 before 1F0",
            "a legal schedule, got deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F2 for 0F2 of "
            "rank 0 | until it got stuck",
            "a legal schedule, got wrong order: rank 0 does 0W0 before 0I0 | until it got stuck",
            "a legal schedule, got wrong order: rank 3 does 3B3 before 3F3 | until it got stuck",
        ],
    },
}


@pytest.mark.parametrize("name", BUDGETS)
def test_judge_says_what_it_allows_of_every_schedule(name):
    cases = list(getattr(pipeline, name)(2))
    for answer, expected in BUDGETS[name].items():
        assert judgements(cases, answer) == expected, f"{name}, of what {answer.__name__} answers"


def test_slowest_stage_may_take_no_second_more():
    first = next(iter(pipeline.blocks_per_stage(2)))
    stages = "[3, 5, 3, 1]: stages of [7, 10, 6, 9]"
    assert judgements([first], lambda *costs: [3, 5, 3, 1]) == [f"a slowest stage of 9, got {stages} | {stages}"]


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


def test_schedule_is_read_in_any_form_or_refused_in_words():
    def said(*answers):
        case = next(iter(pipeline.one_forward_one_backward(2, [(2, 1)])))
        return [judgements([case], lambda *arguments, answer=answer: answer)[0] for answer in answers]

    whole, triples = ["0F0 0B0", "1F0 1B0"], [[(rank, kind, 0) for kind in "FB"] for rank in (0, 1)]
    assert said(whole, [["0F0", "0B0"], ["1F0", "1B0"]], triples) == ["right"] * 3, "text, many texts, triples"
    of_two = "a list with the actions of each of 2 ranks, got"
    assert said(3, "F0", whole[:1]) == [f"{of_two} int 3", f"{of_two} str F0", f"{of_two} 1 items"]
    (strange,) = said(["0F0 0Q1", ""])
    assert strange.startswith("actions such as 2F0, got '0Q1' is no action"), strange
    assert said(["0F0", "1F0 1B0"], ["0F0 0B0 0B0", "1F0 1B0"], ["0F0 0B0 1F0", "1B0"]) == [
        "each action once on rank 0, got rank 0 does not do 0B0",
        "each action once on rank 0, got rank 0 should not do 0B0",
        "these stages, kinds and micro-batches only on rank 0, got rank 0 should not do 1F0",
    ]
    assert said(["0F0 0B0", "1B0 1F0"], ["0B0 0F0", "1F0 1B0"]) == [
        "a legal schedule, got wrong order: rank 1 does 1B0 before 1F0",  # stuck before it began: nothing to draw
        "a legal schedule, got wrong order: rank 0 does 0B0 before 0F0",
    ]


def test_layout_for_four_cards_is_judged_by_the_planner():
    said = [judgements(fsdp.fit_on_four_cards(2), lambda layout=layout: layout)[0] for layout in (
        (3, 1, 8, "full", True), (3, 1, 4, "full", True), (3, 1, 2, "full", True), (3, 1, 1, "full", False),
        (0, 2, 1, "none", True), (3, 1, 8, "full"), (3, 1, 8, "full", 1), (3, 3, 1, "full", True),
    )]  # fmt: skip
    asked = "fits: yes, at most 256 GiB of the machine's own memory, at least 3,300 tokens/s, got fits:"
    of_five = "(stage, tensor, micro-batch, recomputation, offload), got"
    assert said[:2] == ["right", "right"]
    assert said[2] == f"{asked} yes (6 GiB), 194 GiB of the machine's own memory, 2,741 tokens/s"
    assert said[3] == f"{asked} no (53 GiB), 0 GiB of the machine's own memory, 1,600 tokens/s"
    assert said[4] == f"{asked} yes (19 GiB), 388 GiB of the machine's own memory, 3,463 tokens/s"
    assert said[5:7] == [f"{of_five} [3, 1, 8, 'full']", f"{of_five} [3, 1, 8, 'full', 1]"]
    assert said[7].startswith("a layout that the planner takes, got --mesh tensor=3")
