"""Every exercise: wrong answers are refused for the reason that solutions.py names, and what a class is asked that
nobody has seen makes sense, has one answer and tells right answers from wrong ones."""

import copy
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from common import ROOT, check
from common.grading import engine
from common.grading.engine import SIZES, Wrong
from common.grading.values import plain
from common.lab.ledger import LedgerEntry
from course.fsdp.classroom import grading as fsdp
from course.pipeline import schedules, simulator
from course.pipeline.classroom import grading as pipeline

EXERCISES = {
    exercise.name: (chapter, exercise) for chapter in check.chapters() for exercise in check.exercises_of(chapter)
}


def answers_of(chapter: str):
    return engine.load(ROOT / chapter / "classroom" / "solutions.py")


@pytest.mark.parametrize("chapter", check.chapters())
def test_wrong_answers_are_refused_for_the_right_reason(chapter, monkeypatch):
    patience = f"no answer for {engine.PATIENCE:g} s"
    monkeypatch.setattr(engine, "PATIENCE", 4.0)  # seconds, of which a deadlock takes as many
    monkeypatch.setattr(engine, "CALL_LIMIT", 60.0)  # which none of these answers reaches, on a busy machine either
    file = ROOT / chapter / "classroom" / "solutions.py"
    table = engine.load(file).WRONG
    exercises = {exercise.name: exercise for exercise in check.exercises_of(chapter)}
    assert table.keys() == exercises.keys()
    assert min(len(answers) for answers in table.values()) >= 3
    wrong = [(exercises[name], function.__name__, reason) for name in table for function, reason in table[name]]
    # An answer that ends its process makes all others of its launch start again: it gets a launch of its own.
    launches = [[row for row in wrong if "SIG" not in row[2]], *([row] for row in wrong if "SIG" in row[2])]
    mistaken, whys = [], set()
    for rows in launches:
        verdicts = engine.grade([(exercise, name) for exercise, name, _ in rows], file)
        for (_, name, reason), verdict in zip(rows, verdicts, strict=True):
            said = f"{verdict.text}. {verdict.why}".replace("no answer for 4 s", patience)
            whys.add((verdict.exercise.name, verdict.why))
            if verdict.status != "wrong" or not engine.matches(reason, said):
                wanted = f"should be refused with {reason!r}, and is"
                mistaken.append(f"{name}: {wanted} {'accepted' if verdict.status == 'right' else said}")
    assert not mistaken, "\n".join(mistaken)
    known = {(name, why) for name, exercise in exercises.items() for why in exercise.mistakes.values()}
    assert known <= whys, f"reasons that nobody is told: {known - whys}"


# --- what a class is asked ------------------------------------------------------------------------------------


def answer(function, arguments):
    try:
        return repr(function(*copy.deepcopy(arguments)))
    except Exception as error:  # which is an answer too, and a wrong one
        return type(error).__name__


def right(case, function) -> bool:
    """Does the judge of a case take an answer?"""
    try:
        value = plain(function(*copy.deepcopy(case.arguments[0])))
    except Exception:  # which is no answer
        return False
    try:
        case.expected[0](value)
    except Wrong as wrong:
        assert wrong.expected and wrong.got
        return False
    return True


@pytest.mark.parametrize("name", [name for name, (_, exercise) in EXERCISES.items() if exercise.draw])
def test_calls_that_are_drawn_tell_right_answers_from_wrong_ones(name):
    chapter, exercise = EXERCISES[name]
    answers, drawn = answers_of(chapter), random.Random(0)
    calls = [exercise.draw(drawn) for _ in range(60)]
    expected = [answer(getattr(answers, name), call) for call in calls]
    assert not {"TypeError", "ValueError", "KeyError", "IndexError"} & set(expected), "a call without an answer"
    assert max(Counter(expected).values()) < 40, f"{name}: the same answer most of the time"
    for other in getattr(answers, "RIGHT", {}).get(name, ()):
        assert [answer(other, call) for call in calls] == expected, f"two right answers to {name}"
    seen = [[answer(wrong, call) for call in calls] != expected for wrong, _ in answers.WRONG[name]]
    # The others are mistakes at borders, which the known inputs have.
    assert sum(seen) >= 0.4 * len(seen), f"{name}: {sum(seen)} of {len(seen)} wrong answers are seen"


@pytest.mark.parametrize("name", [name for name, (_, exercise) in EXERCISES.items() if exercise.draw_cases])
def test_cases_that_are_drawn_tell_right_answers_from_wrong_ones(name):
    chapter, exercise = EXERCISES[name]
    answers, drawn = answers_of(chapter), random.Random(0)
    cases = [case for _ in range(20) for case in exercise.draw_cases(drawn, 2)]
    assert len({repr(case.arguments) for case in cases}) > 10, f"{name}: other inputs each time"
    if not callable(cases[0].expected[0]):
        return  # its answers send messages: test_class.py has ranks answer it
    assert all(right(case, getattr(answers, name)) for case in cases)
    seen = [not all(right(case, wrong) for case in cases) for wrong, _ in answers.WRONG[name]]
    assert sum(seen) >= 0.4 * len(seen), f"{name}: {sum(seen)} of {len(seen)} wrong answers are seen"


def balanced_cut(costs, parts):
    cuts = [(0, *cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1)]
    return [max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts]


def best_devices(operations, start, compute, limit):
    return [operations * max(n * start, compute / n) for n in range(1, limit + 1)]


@pytest.mark.parametrize("costs_of", [balanced_cut, best_devices])
def test_the_best_is_one(costs_of):
    """Of all that can be answered, tried one by one."""
    drawn = random.Random(0)
    for _ in range(400):
        costs = sorted(costs_of(*EXERCISES[costs_of.__name__][1].draw(drawn)))
        assert costs[0] < costs[1], "two answers are equally good"


# --- messages: at most so many bytes, and none that nobody asked for -------------------------------------------

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
    for size, limits in zip(SIZES, LIMITS[name], strict=True):
        for case in EXERCISES[name][1].check(size):
            ways = [
                (limit, way) for limit in limits for way in ("all_reduce", "send") if passes(case, limit, size, way)
            ]
            assert any(not passes(case, limit + 1, size, way) for limit, way in ways), f"{name} on {size}: {case.what}"


def other_values(value):
    """What is not this result: other numbers by a thousandth, another type, another shape or length."""
    if isinstance(value, torch.Tensor):
        yield from (
            value.unsqueeze(0),
            value.to(torch.float16 if value.dtype == torch.float64 else torch.float64),
            None,
        )
        if value.numel():
            last = value.clone().flatten()
            if value.is_floating_point():
                last[-1] += max(0.001, 2 * torch.finfo(value.dtype).eps) * max(1, abs(last[-1]))
            else:
                last[-1] = ~last[-1]
            yield last.reshape(value.shape)
    elif isinstance(value, list):
        yield from ([*value, 0], value[:-1] or [0])
        yield from ([*value[:-1], other] for other in (other_values(value[-1]) if value else ()))
    elif isinstance(value, bool) or value is None:
        yield 7 if value is None else not value
    else:
        yield from (f"{value}x", value + 1) if isinstance(value, int) else (f"{value}x",)
        yield from (1.001 * value + 0.001,) if isinstance(value, float) else ()


def other_outcomes(case, outcomes):
    """(what is wrong, the outcomes of all ranks) for what the first or the last rank may do wrong in a call."""
    size = len(outcomes)
    for rank in {0, size - 1}:
        last, call = outcomes[rank], LedgerEntry("send", 4, size, peer=(rank + 1) % size)
        wrong = [replace(last, status=status) for status in ("raised", "waited", "not attempted")]
        wrong += [replace(last, changed_input=True)]
        wrong += [
            replace(last, entries=[*last.entries, more]) for more in (call, LedgerEntry("all_gather", 10**9, size))
        ]
        for n, entry in enumerate(last.entries):
            if entry.operation == "recv":
                longer = replace(entry, payload=entry.payload + 4)
                wrong.append(replace(last, entries=[*last.entries[:n], longer, *last.entries[n + 1 :]]))
        if not callable(case.expected[rank]):
            wrong += [replace(last, value=value) for value in other_values(last.value)]
        for one in wrong:
            yield one, [[one if n == rank else own] for n, own in enumerate(outcomes)]
        yield "no answer", [[own][: n != rank] for n, own in enumerate(outcomes)]


@pytest.mark.parametrize("chapter", check.chapters())
def test_right_answers_are_right_and_whatever_one_rank_does_otherwise_is_wrong(chapter, monkeypatch):
    ran: dict[int, tuple] = {}

    def run(file, jobs, size):
        found = engine.run_jobs(file, jobs, size)
        ran.update({number: (size, ranks) for number, ranks in found.items()})
        return found

    monkeypatch.setattr(engine, "SIZES", (2, 4))
    file = ROOT / chapter / "classroom" / "solutions.py"
    others = getattr(answers_of(chapter), "RIGHT", {})  # that are right in another way
    exercises = check.exercises_of(chapter)
    attempts = [(e, name) for e in exercises for name in (e.name, *(f.__name__ for f in others.get(e.name, ())))]
    verdicts = engine.grade(attempts, file, run)
    said = [(name, v.text) for (_, name), v in zip(attempts, verdicts, strict=True) if v.status != "right"]
    assert said == [], "right answers that are refused"
    for number, (size, ranks) in ran.items():
        exercise, name = attempts[number]
        *_, case = exercise.check(size)
        same = replace(exercise, check=lambda asked, case=case, size=size: [case] * (asked == size))
        for what, spoiled in other_outcomes(case, [own[-1] for own in ranks]):
            (verdict,) = engine.grade([(same, name)], file, lambda *_, spoiled=spoiled: {0: spoiled})
            assert verdict.status == "wrong", f"{name} on {size} ranks: nobody minds {what}"


# --- schedules and layouts ------------------------------------------------------------------------------------


def test_schedule_to_be_mended_is_not_legal_as_it_is():
    """Those of the table, and those of a class: in the wrong order, or ranks wait for each other."""
    kinds, drawn = Counter(), random.Random(0)
    for case in [*pipeline.mend(2), *(case for _ in range(20) for case in pipeline.draw_mend(drawn, 2))]:
        given = [schedules.parse(" ".join(actions)) for actions in case.arguments[0][0]]
        try:
            simulator.simulate(given)
            kinds["legal"] += 1
        except simulator.IllegalSchedule as illegal:
            kinds[str(illegal).partition(":")[0]] += 1
    assert len(kinds) == 2 and "legal" not in kinds, kinds


def test_schedule_is_read_in_any_form_or_refused():
    case = next(iter(pipeline.one_forward_one_backward(2, [(2, 1)])))
    triples = [[(rank, kind, 0) for kind in "FB"] for rank in (0, 1)]
    for schedule in (["0F0 0B0", "1F0 1B0"], [["0F0", "0B0"], ["1F0", "1B0"]], triples):
        assert right(case, lambda *_, answer=schedule: answer), f"text, many texts, triples: {schedule}"
    no_schedules = 3, "F0", ["0F0 0B0"], ["0F0 0Q1", ""]
    incomplete = ["0F0", "1F0 1B0"], ["0F0 0B0 0B0", "1F0 1B0"], ["0F0 0B0 1F0", "1B0"]
    illegal = ["0F0 0B0", "1B0 1F0"], ["0B0 0F0", "1F0 1B0"]
    for schedule in (*no_schedules, *incomplete, *illegal):
        assert not right(case, lambda *_, answer=schedule: answer), schedule


@pytest.mark.parametrize(
    "layout, fits",
    [
        ((3, 1, 8, "full", True), True),
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
