"""How a learner's functions are called and graded, without ranks: who is asked what, what ends a call, what a file may
replace, and what is told of it."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist

from common.grading import engine, values
from common.grading.engine import CallOutcome, Exercise, ExerciseCase
from common.lab import ledger
from common.lab.ledger import Ledger, LedgerEntry


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


def judged(*ranks: CallOutcome) -> tuple[str, str]:
    case = ExerciseCase("a case", [()] * len(ranks), [5] * len(ranks), lambda entries: None)
    verdict = engine._judge(exercise("sum"), len(ranks), [case], [[outcome] for outcome in ranks], "f")
    return verdict.where, verdict.got


def messages(operation: str, *about: tuple[int, int]) -> CallOutcome:
    return CallOutcome("returned", 5, [LedgerEntry(operation, nbytes, 3, peer=peer) for peer, nbytes in about])


def test_messages_of_several_ranks_are_received_in_any_order():
    ranks = messages("send", (2, 8)), messages("send", (2, 4)), messages("recv", (0, 8), (1, 4))
    assert judged(*ranks) == ("", ""), "what rank 2 receives is what was sent to it"
    ranks[2].entries.append(LedgerEntry("recv", 4, 3, peer=0))
    assert judged(*ranks) == ("world size 3, a case, rank 2", "receives of [4, 4, 8] bytes")


def write(tensors, place):
    tensors[place] += 1


def test_a_call_that_writes_into_its_arguments_is_noticed():
    calls = [([torch.zeros(2), torch.zeros(2)], 1), ([torch.zeros(2)], 0), ([torch.zeros(2)], 3)]
    first, second, third = (engine._call(write, arguments, None) for arguments in calls)
    assert (first.changed_input, second.changed_input) == (True, True), "a tensor in a list was changed"
    assert third.status == "raised"
    assert not engine._call(lambda tensors: tensors[0] + 1, ([torch.zeros(2)],), None).changed_input


def test_a_file_is_a_module_that_knows_its_place(tmp_path):
    """A dataclass asks for its module, where annotations are text."""
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Point:\n    x: int = 3\nhere = __file__\n"
    (tmp_path / "mine.py").write_text(text)
    module = engine.load(tmp_path / "mine.py")
    assert (module.Point().x, module.here) == (3, str(tmp_path / "mine.py")), "what a file has defined"
    (tmp_path / "mine.py").write_text("here = 2\n")
    assert engine.load(tmp_path / "mine.py").here == 2, "its present text"


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
