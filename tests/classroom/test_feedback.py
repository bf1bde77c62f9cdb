"""What learners and teachers read of verdicts: the table, hints, a class's rows and pages."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.grading import engine, known, nearby, reasons
from common.grading.engine import Exercise, Verdict
from common.grading.feedback import stages, table
from common.lab.ledger import LedgerEntry


def some_verdicts() -> list[Verdict]:
    """A right, a wrong and no answer."""
    right, wrong, left = (
        Exercise(name, points, "●" * number + "○" * (5 - number), lambda size: [], "A hint.")
        for number, (name, points) in enumerate([("sum", 3), ("mean_of_all", 12), ("tree", 2)], start=1)
    )
    drawing = engine.Drawing("rank 0  F0\nrank 1  .", lambda: None, "a picture")
    called = ("rank 0: mean_of_all([1])", "rank 1: mean_of_all([2])")
    mistaken = Verdict(wrong, "wrong", "world size 2, ones, rank 1", "5", "6", drawing, called, ("rank 1: half",))
    return [Verdict(right, "right"), mistaken, Verdict(left, "not attempted")]


def test_what_one_exercise_printed_is_shown_and_why_a_file_cannot_be_used():
    exercise = some_verdicts()[0].exercise
    alone = table([Verdict(exercise, "right", printed=("rank 0: 6", "rank 1: 6"))])
    assert "rank 0: 6" in alone and "rank 1: 6" in alone and "1 of 1" in alone
    unused = table([Verdict(exercise, "not graded", got="SyntaxError: invalid syntax")])
    assert unused.splitlines()[-1].endswith("SyntaxError: invalid syntax") and "0 of 1" in unused


def test_why_is_that_of_the_exercise_where_it_knows_the_mistake():
    known = replace(some_verdicts()[1].exercise, mistakes={"rank 1: ... got 6": "Twice.", "got 60": "No."})
    wrong = Verdict(known, "wrong", "world size 2, rank 1", "5", "6", why="in general")
    assert wrong.with_known_mistake().why == "Twice." and "Twice." in table([wrong.with_known_mistake()])
    assert replace(wrong, got="7").with_known_mistake().why == "in general"


@pytest.mark.parametrize(
    "expected, got, says",
    [
        ([1.0, 2.0], [3.0, 6.0], "3 ranks"),
        ([3.0, 6.0], [1.0, 2.0], "1/3"),
        ([1.0, 2.0], [-1.0, -2.0], "sign"),
        ([1.0, 2.0], [5.0, 10.0], "5 times"),
        ([1.0, 2.0], [0.0, 0.0], "zeros"),
        ([1.0, 2.0, 4.0], [2.0, 1.0, 4.0], "another order"),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]], "transpose"),
        ([[1.0, 2.0, 3.0]], [[1.0], [2.0], [3.0]], "transpose"),
        ([1.0, 2.0], [[1.0], [2.0]], "another shape"),
        ([1.0, 2.0], [1.0, 3.0], ""),
        ([0.0, 0.0], [1.0, 3.0], ""),
        ([1.0], [float("nan")], "never written"),
        ([], [1.0], ""),
    ],
)
def test_how_a_wrong_tensor_is_related_to_the_right_one(expected, got, says):
    found = reasons.relation(torch.tensor(expected), torch.tensor(got), ranks=3)
    assert says in found and bool(says) == bool(found)


def test_how_other_wrong_results_are_related_to_right_ones():
    for got, says in ((64.0, "square"), (8 / 2**0.5, "root"), (float("nan"), "never written"), (9.0, "")):
        found = reasons.relation(8.0, got, 2)
        assert says in found and bool(says) == bool(found), got
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert "0, 1" in reasons.relation([one, two, one], [two, one, one], 3), "which have changed places"
    assert "2 ranks" in reasons.relation([one, two], [one, 2 * two], 2)
    assert "2 ranks" in reasons.relation(3.0, 6.0, 2) and not reasons.relation(3.0, 6.0, 0), "calculated alike"
    for expected, got in ((0.0, 1.0), (True, 2), ("a", "b"), (one, None), ([one], [two, two]), (1.0, None)):
        assert reasons.relation(expected, got, 2) == ""
    assert "Item 1 is missing" in reasons.relation([one, two, one], [one, one], 2)
    assert "Item 2 is one too many" in reasons.relation([one, two], [one, two, one], 2)
    mine, yours = (one, 3), (two, [one])
    assert "this rank itself" in reasons.given(two, one.clone(), [mine, yours], 0)
    assert "rank 1" in reasons.given(one, two.clone(), [mine, yours], 0)
    assert "rank 1" in reasons.given([two, one], [two, two.clone()], [mine, yours], 0), "of items, the wrong one"
    assert "rank 1" in reasons.given(two, 3 * one, [mine, (two, [one, 3 * one])], 0), "an item of a list"
    assert not reasons.given(one, one + two, [mine, yours], 0) and not reasons.given(one, 3, [mine, yours], 0)


@pytest.mark.parametrize(
    "ends, says",
    [
        (["waiting in send, line 3 of f"], "isend"),
        (["waiting in recv, line 3 of f", "waiting for a message, line 4 of f"], "nobody has sent"),
        (["waiting in recv, line 3 of f", "had returned"], "returned"),
        (["waiting in send, line 3 of f", "had returned"], "returned"),
        (["waiting in recv, line 3 of f", "waiting in send, line 3 of f"], "exactly this rank"),
        (["waiting in all_reduce, line 3 of f", "waiting in broadcast, line 4 of f"], "same order"),
    ],
)
def test_why_ranks_wait_for_each_other(ends, says):
    assert says in reasons.of_a_deadlock(ends)


@pytest.mark.parametrize(
    "fails, says",
    [
        (lambda: torch.ones(3).view(2), "print it"),
        (lambda: torch.tensor([1, 2, 3]).reshape(2, 2), "print it"),
        (lambda: torch.cat([torch.ones(2, 3), torch.ones(2)]), "print both"),
        (lambda: torch.ones(2) + torch.ones(3), "print both"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "print both"),
        (lambda: sum([]).item(), "number of Python"),
        (lambda: torch.cat([torch.ones(2), None]), "None on this rank"),
        (lambda: torch.add(None, torch.ones(2)), "None on this rank"),
        (lambda: None + torch.ones(2), "None on this rank"),
        (lambda: None.sum(), "None on this rank"),
        (lambda: [][1], ""),
    ],
)
def test_an_error_of_python_or_pytorch_has_its_reason(fails, says):
    """As the installed versions put it."""
    with pytest.raises(Exception) as error:  # noqa: B017  # of any kind
        fails()
    found = reasons.of_an_error(f"{type(error.value).__name__}: {error.value}")
    assert says in found and bool(says) == bool(found), error.value


def test_a_factor_of_two_is_the_number_of_ranks_only_where_three_ranks_say_so():
    """Twice too much with two ranks: by an answer that sums over the ranks, and by one that always doubles."""
    sent = [LedgerEntry("all_reduce", 4, 2)]

    def total(size):
        yield engine.ExerciseCase("ones", [(1,)] * size, [torch.tensor([1.0, 5.0])] * size, lambda _entries: None)

    def run(_file, jobs, size):
        factor = {"summed": size, "doubled": 2}
        value = torch.tensor([1.0, 5.0])
        return {
            n: [[engine.CallOutcome("returned", factor[name] * value, sent)]] * size for n, (name, _) in jobs.items()
        }

    exercise = Exercise("total", 1, "●○○○○", total, "A hint.")
    summed, doubled = engine.grade([(exercise, "summed"), (exercise, "doubled")], Path("answer.py"), run)
    assert summed.status == doubled.status == "wrong" and summed.where.startswith("world size 2"), (
        "the smallest is told"
    )
    assert "2 ranks" in summed.why and "ranks" not in doubled.why


def test_a_result_that_only_the_root_has_is_told_to_the_others():
    calls = [("all_reduce", None), ("reduce", 0)]
    assert "rank 0 alone" in reasons.of_a_root(calls, 1)
    assert reasons.of_a_root(calls, 0) == reasons.of_a_root(calls[:1], 1) == "", "the root has it, or all have"


def test_a_receive_that_nobody_waits_for_is_told_from_one_that_is_missing():
    def judge(*taken: int) -> str:
        waits = engine.CallOutcome("waited", None, [LedgerEntry("send", 8, 2, peer=1)], text="waiting for a send")
        gone = engine.CallOutcome("returned", 1, [LedgerEntry("recv", nbytes, 2, peer=0) for nbytes in taken])
        case = engine.ExerciseCase("ones", [(), ()], [1, 1], lambda _entries: None)
        with pytest.raises(engine.Wrong) as wrong:
            engine._judge_case(case, [waits, gone])
        return wrong.value.why

    assert "Rank 1 has started a receive of rank 0's message" in judge(8)
    assert "has started" not in judge() and "has started" not in judge(8, 8), "none, or one too many"


@pytest.mark.parametrize(
    "got, says",
    [
        ([("send", 8), ("send", 4)], "another order"),
        ([("send", 4), ("send", 4), ("send", 4)], "more messages"),
        ([("send", 12)], "fewer messages"),
        ([("send", 8), ("send", 8)], "another size"),
        ([("all_reduce", 12)], ""),
        ([], ""),
    ],
)
def test_how_other_messages_are_related_to_those_asked_for(got, says):
    found = reasons.of_messages([("send", 4), ("send", 8)], got)
    assert says in found and bool(says) == bool(found)
    few, many = ([("send", 4)] * times + [("send", 8)] * (3 - times) for times in (1, 2))
    assert "another size" in reasons.of_messages(few, many)


CATALOGUE = """
import torch.distributed as dist
def doubled(x): return 2.5 * x
def without_adding(x):
    "Each rank keeps its own."
    return x + 0
def never_called(x): return x + 1
WRONG = {"total": [(doubled, "got [2.5"), (without_adding, "got [1"), (never_called, "a deadlock")]}
"""


def test_why_is_that_of_a_known_wrong_answer_that_does_the_same(tmp_path, monkeypatch):
    """On every rank; and nothing is run again for what is right, or has a reason already."""
    (tmp_path / "solutions.py").write_text(CATALOGUE)
    returned = lambda value: engine.CallOutcome("returned", torch.tensor([value]))  # noqa: E731
    verdict = Verdict(some_verdicts()[0].exercise, "wrong", "world size 2", "[3]", "[1]")
    verdict = replace(verdict, exercise=replace(verdict.exercise, name="total"))
    asked = []

    def run_jobs(file, jobs, size):
        asked.append([*jobs])
        return {name: [[returned(1.0)], [returned(2.0)]] for name in jobs}

    monkeypatch.setattr(known, "run_jobs", run_jobs)
    for second, why in ((2.0, "without adding"), (5.0, "")):
        tried = replace(verdict, tried=(2, [[(1,), (2,)]], [returned(1.0), returned(second)]))
        found = known.with_reason(tried, tmp_path / "solutions.py").why
        assert why in found and bool(why) == bool(found)
        assert asked.pop() == ["without_adding"], "which alone could have said this"
    for other in (replace(tried, why="because"), replace(tried, status="right"), verdict):
        assert known.with_reason(other, tmp_path / "solutions.py") == other
    assert known.with_reason(tried, tmp_path / "none.py") == tried and asked == []


SOLUTION = """
import torch, torch.distributed as dist
def added(x):
    dist.all_reduce(x)
    return x
def centred(x):
    return x - added(x.mean()) / dist.get_world_size()
"""


def test_why_is_the_one_change_that_makes_the_solution_do_the_same(tmp_path):
    """Or the two that do, and only where they are right in the calls before."""
    (tmp_path / "solutions.py").write_text(SOLUTION)
    ones, pair = [torch.ones(2)] * 2, [torch.tensor([1.0, 2]), torch.tensor([3.0, 4])]

    def why(values, *calls, writes=False):
        outcomes = [engine.CallOutcome("returned", value, changed_input=writes) for value in values]
        return nearby.in_words(
            tmp_path / "solutions.py", "centred", 2, [[(x,) for x in call] for call in calls], outcomes
        )

    undivided = [x - 5.0 for x in pair]
    said = why(undivided, pair)
    assert "without `/ dist.get_world_size()`" in said and "with `sum` for `mean`" in said, "both do the same here"
    assert why(undivided, pair, writes=True) == "", "neither writes into its argument"
    assert why(undivided, ones, pair) == "", "both are wrong for ones as well, where the answer was right"
    assert "with `a` for `not a`" in [words for words, _ in nearby.changed("def f(a):\n    return not a\n", "f")]
    ways = {words for words, _ in nearby.changed("def f(x):\n    dist.all_reduce(x)\n", "f")}
    assert {"with ReduceOp.MAX in `dist.all_reduce(x)`", "with ReduceOp.MIN in `dist.all_reduce(x)`"} <= ways


def test_hints_come_sentence_by_sentence():
    hint = "Count: all. Use `a.b` here! Is 2.5 more? 3 is. `x` too."
    shown = stages(Exercise("sum", 1, "easy", lambda size: [], hint))
    assert shown == ["Count: all.", "Use `a.b` here!", "Is 2.5 more?", "3 is.", "`x` too."], "a hint's sentences"
