"""How a learner's functions are called and judged, without ranks: who is asked what, what ends a call, what is
compared, what is accepted, what is said, and what a file may replace."""

import contextlib
import copy
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.grading import engine, patterns, values
from common.grading.engine import CallOutcome, Exercise, ExerciseCase, Wrong
from common.grading.feedback import table
from common.lab import ledger
from common.lab.ledger import Ledger, LedgerEntry
from course.intro.classroom import grading as intro
from course.pipeline import schedules
from course.pipeline.classroom import grading as pipeline


def sends(*messages: tuple[int, int]) -> list[LedgerEntry]:
    return [LedgerEntry("send", nbytes, 2, torch.float32, peer) for peer, nbytes in messages]


def refusal(pattern, entries) -> str:
    """What a pattern says, "" where it accepts."""
    try:
        pattern(entries)
    except Wrong as wrong:
        return f"rank {wrong.rank}: expected {wrong.expected}, got {wrong.got}"
    return ""


def test_exactly_these_messages_in_this_order():
    pattern = patterns.exactly([[(1, 8), (1, 4)], []])
    assert refusal(pattern, [sends((1, 8), (1, 4)), []]) == ""
    assert refusal(pattern, [sends((1, 8), (1, 0), (1, 4)), []]) == "", "a message of nothing may be sent or not"
    assert refusal(pattern, [sends((1, 4), (1, 8)), []]).startswith("rank 0:"), "the order counts"
    assert refusal(pattern, [sends((1, 8), (1, 4)), sends((0, 4))]).startswith("rank 1:"), "every rank is looked at"
    anyhow = patterns.exactly([[(1, 8), (1, 4)], []], any_order=True)
    assert refusal(anyhow, [sends((1, 4), (1, 8)), []]) == ""
    for others in ([(1, 4)], [(1, 8), (1, 4), (1, 4)]):
        assert refusal(anyhow, [sends(*others), []]) != "", "one is missing, or comes twice"
    assert "all_reduce" in refusal(pattern, [[LedgerEntry("all_reduce", 8, 2)], []])
    others = [*sends((1, 8)), LedgerEntry("barrier", 0, 2), LedgerEntry("broadcast", 8, 2)]
    said = refusal(pattern, [[], others])
    assert said.startswith("rank 1:") and "barrier" in said, "the first call of another kind"
    empty = patterns.exactly([[(1, 0), (1, 8)], [(0, 0)]])
    assert refusal(empty, [sends((1, 8)), []]) == "", "a message of nothing that is asked for may be left out"


def test_exactly_these_collectives_in_this_order():
    calls = [LedgerEntry("all_gather", 64, 2), LedgerEntry("all_reduce", 8, 2)]
    exact, less = (patterns.collectives(("all_gather", 64), ("all_reduce", 8), at_most=most) for most in (False, True))
    assert refusal(exact, [calls, calls]) == refusal(less, [calls, calls]) == "", "as asked for"
    assert refusal(exact, [calls, calls[::-1]]).startswith("rank 1:"), "another order"
    assert refusal(exact, [calls[:1], calls]).startswith("rank 0:"), "one is missing"
    shorter = [LedgerEntry("all_gather", 32, 2), calls[1]]
    assert refusal(less, [shorter, calls]) == "", "less than allowed"
    assert refusal(exact, [shorter, calls]) != ""
    assert "64" in refusal(less, [[LedgerEntry("all_gather", 65, 2), calls[1]], calls])
    assert refusal(patterns.nothing_sent, [[], []]) == ""
    assert refusal(patterns.nothing_sent, [[], calls[:1]]).startswith("rank 1:")


def test_as_many_bytes_at_most():
    pattern = patterns.sends_at_most(100)  # an all-reduce of n bytes on 2 ranks sends n
    assert refusal(pattern, [[LedgerEntry("all_reduce", 60, 2), LedgerEntry("send", 40, 2, peer=1)], []]) == ""
    too_many = [LedgerEntry("all_reduce", 60, 2), LedgerEntry("send", 41, 2, peer=1)]
    said = refusal(pattern, [[], too_many])
    assert said.startswith("rank 1:") and "100" in said and "101" in said, "too many bytes"
    of_four = [LedgerEntry("all_reduce", 60, 4), LedgerEntry("recv", 100, 4, peer=1)]  # 2 x 3/4 of 60 are 90
    assert refusal(pattern, [of_four, []]) == "", "what is received does not count, and of an all-reduce what is sent"
    said = refusal(pattern, [[LedgerEntry("all_reduce", 80, 4)], []])
    assert said.startswith("rank 0:") and "120" in said and "80" in said, said


def test_a_tree_passes_whole_tensors_on_in_few_rounds():
    pattern = intro.binomial_tree(0, 8)
    assert refusal(pattern, [sends((1, 8), (2, 8)), sends((3, 8)), [], []]) == ""
    halves = [sends((1, 4), (2, 8)), sends((3, 8)), [], []]
    assert refusal(pattern, halves).startswith("rank 0:"), "a part of the tensor"
    star = [sends((1, 8), (2, 8), (3, 8)), [], [], []]
    assert "2 rounds" in refusal(pattern, star) and "3 rounds" in refusal(pattern, star)
    twice = [sends((1, 8), (2, 8)), sends((3, 8)), sends((3, 8)), []]
    assert refusal(pattern, twice).startswith("rank 3:")


def test_a_schedule_keeps_its_budget_to_the_last_unit():
    schedule = pipeline.text_of(schedules.build("1f1b", 4, 8))  # makespan 22, and stores 4, 3, 2 and 1

    def said(span, stored) -> str:
        return refusal(pipeline.budget(span, stored, 4, 8), schedule)

    assert said(22, [4, 3, 2, 1]) == ""
    assert "21" in said(21, [4, 3, 2, 1]) and "22" in said(21, [4, 3, 2, 1])
    for rank in range(4):  # one less on this rank, which the others may have
        stored = [number + (1 if other != rank else -1) for other, number in enumerate([4, 3, 2, 1])]
        assert f"{stored}" in said(22, stored)


ONE = torch.tensor([1.0])
SAME = [
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])),
    (ONE, ONE + 1e-7),
    (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
    ([1, 2], [1, 2]),
    (15.25, 15.25 * (1 + 1e-8)),
    (10**10 + 1, 1e10),
    ("F0 F1", "F0 F1"),
    (None, None),
]
DIFFERENT = [  # expected, got, and words that are said of each
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), "2", "2.0999999"),
    (torch.tensor([0.0]), torch.tensor([1e-7]), "0", "1e-07"),
    (ONE, torch.tensor([1.00005]), "1", "1.0000"),
    (ONE, torch.tensor([1]), "(1,) float32", "(1,) int64"),
    (1e-8 * ONE, 1.1e-8 * ONE, "e-09", "1.1 e-08"),  # a gradient may be as small
    (torch.ones(2, 1), torch.ones(2), "(2, 1)", "(2,)"),
    (torch.zeros(20), torch.zeros(20).index_fill(0, torch.tensor([7, 9]), 3.0), "0 7", "3 2 20"),
    (torch.zeros(4, 5), torch.eye(4, 5), "0 [0, 0]", "1 4 20"),
    ([1, 2], [1, ONE], "2", "(1,)"),
    ([1, 2], [1, 3], "[1, 2]", "[1, 3]"),
    ([1, 2], [1], "[1, 2]", "[1]"),
    (["a", "b", "c"], ["a", "x", "y"], "b 1", "x"),
    ([torch.ones(20)], [torch.ones(20)] * 2, "(20,)", "(20,) (20,)"),
    (15.25, 15.2501, "15.25", "15.2501"),
    (10**10 + 1, 10**10, "10000000001", "10000000000"),
    ("F0 F1", "F1 F0", "F0 F1", "F1 F0"),
    (3, None, "int 3", "None"),
    (ONE, 1.0, "(1,)", "float 1"),
]


@pytest.mark.parametrize(("expected", "got"), SAME)
def test_what_is_the_same_is_no_difference(expected, got):
    assert values.difference(expected, got) is None


@pytest.mark.parametrize(("expected", "got", "wanted", "had"), DIFFERENT)
def test_what_is_different_is_told(expected, got, wanted, had):
    found = values.difference(expected, got)
    assert found is not None, f"{got} is taken for {expected}"
    for words, said in zip((wanted, had), found, strict=True):
        assert not [word for word in words.split() if word not in said] and len(said) < 200, said


def test_plain_data_stays_as_it_is_and_all_else_is_described():
    result = [True, 2, 1.5, "x", None, (3, [4])]
    assert values.plain(result) == [True, 2, 1.5, "x", None, [3, [4]]], "results that can be compared"
    assert [type(value) for value in values.plain(result)[:4]] == [bool, int, float, str]
    described = values.plain({"a": "b" * 200})
    assert (type(described), described[:15], len(described)) == (values.Description, "dict {'a': 'bbb", 105)
    tensor = values.plain(2 * torch.ones(2, requires_grad=True))
    assert not tensor.requires_grad, "a result's graph does not travel"


def test_what_a_rank_returned_stays_as_it_was():
    """A function may give the same tensor at every call."""
    buffer = torch.ones(2)
    kept = values.plain([buffer])
    buffer.zero_()
    assert kept[0].tolist() == [1, 1], "a result that was changed after the call"


def write(tensors, place):
    tensors[place] += 1


@pytest.mark.parametrize(
    "function, arguments, changed",
    [
        (write, ([torch.zeros(2), torch.zeros(2)], 1), True),
        (write, ([torch.zeros(2)], 0), True),
        (lambda tensors: tensors[0] + 1, ([torch.zeros(2)],), False),
        (lambda tensors: tensors[0].requires_grad_(), ([torch.zeros(2)],), True),
    ],
)
def test_a_call_that_changes_its_arguments_is_noticed(function, arguments, changed):
    """In a list too, and where a tensor requires a gradient afterwards."""
    assert engine._call(function, arguments, None).changed_input is changed


EXERCISE = Exercise("sum", 3, "easy", lambda size: [], "a hint")


def judged(ranks, pattern=lambda entries: None, expected=5):
    case = ExerciseCase("the case", [()] * len(ranks), [expected] * len(ranks), pattern)
    return engine._judge(EXERCISE, len(ranks), [case], ranks, "f")


def returned(value=5, entries=(), changed=False) -> list[CallOutcome]:
    return [CallOutcome("returned", value, list(entries), changed)]


def test_a_verdict_looks_at_every_rank_and_names_the_first_that_is_wrong():
    assert (judged([returned(), returned()]).status, judged([returned(), returned()]).points) == ("right", 3)
    wrong = judged([returned(), returned(6)])
    assert (wrong.status, wrong.points) == ("wrong", 0)
    assert (wrong.where, wrong.expected, wrong.got) == ("world size 2, the case, rank 1", "5", "6")
    changed = judged([returned(), returned(changed=True)])
    assert changed.status == "wrong" and "arguments" in changed.got, "a changed input"
    assert changed.where == "world size 2, the case, rank 1"
    empty = CallOutcome("not attempted")
    assert judged([[empty], [empty]]).status == "not attempted"
    assert judged([[empty], returned()]).status == "wrong", "one rank answers, one does not"


def test_what_was_printed_is_shown_of_a_right_answer_too():
    case = ExerciseCase("the case", [(), ()], [5, 5], patterns.nothing_sent)
    exercise = Exercise("sum", 3, "easy", lambda size: [case] * (size == 2), "a hint")
    ranks = [[CallOutcome("returned", 5, printed=f"I am {rank}\n")] for rank in range(2)]
    verdicts = engine.grade([(exercise, "f")], None, run=lambda file, jobs, size: dict.fromkeys(jobs, ranks))
    assert (verdicts[0].status, verdicts[0].printed) == ("right", ("rank 0: I am 0", "rank 1: I am 1"))
    assert "rank 0: I am 0" in table(verdicts) and "rank 1: I am 1" in table(verdicts)
    assert "printed" not in table(verdicts * 2), "of many exercises the wrong ones alone"


def test_an_error_is_told_with_the_line_that_it_came_from(tmp_path, monkeypatch):
    file = tmp_path / "exercises.py"
    file.write_text("def inner(error):\n    raise error\n\n\ndef outer(error):\n    inner(error)\n")
    outer = engine.load(file).outer
    for error, status, words in (
        (ValueError("no\nmore"), "raised", "ValueError no"),
        (ValueError(), "raised", "ValueError"),
        (RuntimeError("[/x/a.cc:12] Bad size"), "raised", "RuntimeError Bad size"),
        (engine._OutOfTime(), "raised", "10 s"),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), "waited", "recv"),
        (RuntimeError("Timed out waiting 5000ms for send operation to complete"), "waited", "send"),
        (RuntimeError("wait timeout after 5000ms, keys: /job 1/x"), "waited", ""),
        (RuntimeError("Connection closed by peer"), "waited", ""),
        (RuntimeError("[/x/pair.cc:9] Connection reset by peer [::1]:5"), "waited", ""),
        (RuntimeError("a connection of mine"), "raised", "RuntimeError a connection of mine"),
        (NotImplementedError(), "not attempted", "NotImplementedError"),
        (NotImplementedError("in part"), "raised", "NotImplementedError in part"),
    ):
        outcome = engine._call(outer, (error,), file)
        assert outcome.status == status, error
        there = (*words.split(), "line 2", "inner", "raise error")
        assert not [word for word in there if word not in outcome.text], outcome.text
        assert not [part for part in ("\n", "/x/", "5000ms") if part in outcome.text], outcome.text


def test_no_alarm_is_left_when_a_call_is_over():
    with engine._alarm():
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, "seconds until an alarm that nobody waits for"


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there is no alarm on Windows")
def test_who_waited_for_a_core_has_had_no_time(monkeypatch):
    monkeypatch.setattr(engine, "CALL_LIMIT", 0.1)
    monkeypatch.setattr(engine, "waited_for_a_core", lambda _pid: 0.0)
    with pytest.raises(engine._OutOfTime), engine._alarm():
        time.sleep(60)
    waited = iter([0.0, 100.0])
    monkeypatch.setattr(engine, "waited_for_a_core", lambda _pid: next(waited, 100.0))
    with engine._alarm():
        time.sleep(0.3)
    assert next(waited, None) is None, "the alarm has asked"


def test_a_cause_comes_before_its_consequence():
    waited, raised = CallOutcome("waited", text="waiting in recv"), CallOutcome("raised", text="ValueError: no")
    assert judged([[waited], [raised]]).got == "ValueError: no"
    stuck = judged([[waited], returned()])
    assert "deadlock" in stuck.got and "rank 0 waiting in recv" in stuck.got and "rank 1" in stuck.got
    assert "rank 0 and rank 1 waiting in recv" in judged([[waited], [waited]]).got


def test_a_judge_and_a_pattern_are_called():
    def judge(value):
        if value != 5:
            raise Wrong("five", str(value))

    assert judged([returned(), returned()], expected=judge).status == "right"
    assert judged([returned(), returned(4)], expected=judge).got == "4"
    refused = judged([returned(), returned(entries=[LedgerEntry("barrier", 0, 2)])], patterns.nothing_sent)
    assert refused.got == "barrier of 0 bytes", "a message where none is asked for"
    assert refused.where == "world size 2, the case, rank 1"


# --- calls ----------------------------------------------------------------------------------------------------


def exercise(name: str, check=None) -> Exercise:
    return Exercise(name, 1, "easy", check or one_case, "A hint.")


def one_case(size: int) -> list[ExerciseCase]:
    return [ExerciseCase("a case", [(size, rank) for rank in range(size)], [5] * size, lambda entries: None)]


def test_who_is_asked_what_on_how_many_ranks():
    """An exercise that is wrong is asked no more; one that has no cases for a world size is not asked there."""
    on_two = exercise("calculates", lambda size: one_case(size) if size == 2 else [])
    attempts = [(exercise("good"), "f"), (exercise("bad"), "g"), (on_two, "h"), (exercise("late"), "k")]
    asked, told = [], []

    def run(file, jobs, size):
        asked.append((file, size, {name: calls for name, calls in jobs.values()}))
        wrong = {"g"} if size == 2 else {"k"} if size == 4 else {}
        return {n: [[CallOutcome("returned", 6 if name in wrong else 5)]] * size for n, (name, _) in jobs.items()}

    verdicts = engine.grade(attempts, "mine.py", run, told.append)
    calls = {size: [[(size, rank) for rank in range(size)]] for size in (2, 3, 4)}
    assert asked == [
        ("mine.py", 2, dict.fromkeys("fghk", calls[2])),
        ("mine.py", 3, dict.fromkeys("fk", calls[3])),
        ("mine.py", 4, dict.fromkeys("fk", calls[4])),
    ], "file, ranks, and the calls of each function"
    assert len(told) == 3, "progress"
    said = [(verdict.exercise.name, verdict.status, verdict.where) for verdict in verdicts]
    assert said == [
        ("good", "right", ""),
        ("bad", "wrong", "world size 2, a case, rank 0"),
        ("calculates", "right", ""),
        ("late", "wrong", "world size 4, a case, rank 0"),
    ], "verdicts in the order of the attempts"


def test_a_file_is_a_module_that_knows_its_place(tmp_path):
    """A dataclass asks for its module, where annotations are text."""
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Point:\n    x: int = 3\nhere = __file__\n"
    (tmp_path / "mine.py").write_text(text)
    module = engine.load(tmp_path / "mine.py")
    assert (module.Point().x, module.here) == (3, str(tmp_path / "mine.py")), "what a file has defined"
    (tmp_path / "mine.py").write_text("here = 2\n")
    assert engine.load(tmp_path / "mine.py").here == 2, "its present text"


def test_who_has_replaced_something_once_is_not_believed_again(tmp_path):
    (tmp_path / "mine.py").write_text("def f(x):\n    return x\n")
    rank, broken = engine.CheckedRank(tmp_path / "mine.py"), iter([False, False, True, False])
    rank.seal = SimpleNamespace(broken=lambda: next(broken, False))
    assert rank.load() is None
    assert [rank.call("f", (n,)).status for n in range(4)] == ["returned", *["raised"] * 3]


SEALED = [
    (engine, "difference"), (engine, "_judge_case"), (ledger, "describe"), (ledger, "wire_bytes"), (values, "plain"),
    (Ledger, "__torch_dispatch__"), (LedgerEntry, "sent"), (dist, "send"), (dist.distributed_c10d, "isend"),
    (torch, "equal"), (torch.Tensor, "clone"), (copy, "deepcopy"), (contextlib, "suppress"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), SEALED)
def test_what_counts_and_compares_cannot_be_replaced(owner, name, monkeypatch):
    seal = engine._Seal()
    assert not seal.broken(), "nothing has been replaced"
    monkeypatch.setattr(owner, name, lambda *args, **named: True)
    assert seal.broken(), f"{name} of {owner.__name__} was replaced, and nobody notices"
