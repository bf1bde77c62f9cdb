"""Every wrong answer of every chapter: the checker refuses it for the reason that solutions.py names, and the table of
its chapter in tests/wrong_answers/ says in what it is wrong, input by input and rank by rank.

The reason is a wrong answer's first mistake. The table tells the others too: a wrong answer is wrong in one way, which
its name or docstring says, and right wherever that does not matter. So an edit that makes it wrong in another way, or
on another rank, is seen, and so is an input that an exercise has lost. A table has for each exercise the number of its
inputs on 2, 3 and 4 ranks; for each wrong answer the world size that refuses it, and each input (from 0) for which it
is wrong there: the result of each rank (one for all that are alike; "right" where it is), messages that are not as
asked, arguments that it has changed. What two ranks refuse has the same for three.
"""

import math
import re

import pytest
import torch

from common import ROOT, check
from common.grading import engine
from common.grading.engine import Wrong
from common.grading.values import difference, numbers, show

TABLES = ROOT / "tests" / "wrong_answers"
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def result_of(outcome, expected) -> str:
    """What a rank has returned, "right" if that is what is expected of it, or how its call ended."""
    if outcome.status != "returned":
        return outcome.text.partition(":")[0].partition(",")[0] if outcome.status == "raised" else outcome.status
    if not callable(expected):
        return items(expected, outcome.value) or "right"
    try:
        expected(outcome.value)
    except Wrong as wrong:
        return f"{wrong.got}, not {wrong.expected}"
    return "right"


def items(expected, got) -> str:
    """What is different in a result; in a list with other lists or tensors in it, each item that is."""
    several = isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got) and not numbers(got)
    if several:
        pairs = enumerate(zip(expected, got, strict=True))
        return ", ".join(f"item {place}: {said}" for place, pair in pairs if (said := items(*pair)))
    large = isinstance(expected, torch.Tensor) and expected.numel() > 1000  # then `difference` takes its time
    if large and isinstance(got, torch.Tensor) and (expected.shape, expected.dtype) == (got.shape, got.dtype):
        wrong = ~torch.isclose(got, expected, rtol=1e-5, atol=0).flatten()
        first = show(got.flatten()[wrong.int().argmax()])
        return f"{first} ({wrong.sum()} of {got.numel()} elements differ)" if wrong.any() else ""
    return (difference(expected, got) or ("", ""))[1]


def wrong_in(case, outcomes) -> str:
    """All that is wrong with one call on all ranks; empty if nothing is."""
    results = [result_of(outcome, expected) for outcome, expected in zip(outcomes, case.expected, strict=True)]
    found = [] if {*results} == {"right"} else [results[0] if len({*results}) == 1 else " / ".join(results)]
    if all(outcome.status == "returned" for outcome in outcomes):
        entries = [outcome.entries for outcome in outcomes]
        for asked in (engine._every_message_received, case.pattern):
            try:
                asked(entries)
            except Wrong as wrong:
                found.append(f"messages: {wrong.got}")
                break
    if any(outcome.changed_input for outcome in outcomes):
        found.append("changes its arguments")
    return " ".join("; ".join(found).split())


def graded(rows: list, file) -> tuple[list, dict[str, str]]:
    """The verdicts of (exercise, wrong answer), and for each wrong answer its entry in the table."""
    told: dict[str, dict[int, str]] = {name: {} for _, name in rows}
    more = {}

    def run(file, jobs, size):
        ran = engine.run_jobs(file, jobs, size)
        for number, outcomes in ran.items():
            exercise, name = rows[number]
            if isinstance(outcomes, str):  # a process has died; which was the first is chance
                told[name][size] = re.sub("rank [0-9]", "a rank", outcomes.partition(":")[0])
                continue
            cases = zip(exercise.check(size), zip(*outcomes, strict=True), strict=False)
            wrong = [f"{place} {said}" for place, case in enumerate(cases) if (said := wrong_in(*case))]
            if wrong:
                told[name][size] = " | ".join(wrong)
            if wrong and size == 2 and all(rank[-1].status == "returned" for rank in outcomes):
                more[number] = (name, [case.arguments for case in exercise.check(3)])
        return ran

    verdicts = engine.grade(rows, file, run=run)
    # On two ranks a neighbour is everybody else, and half is one of them: what two refuse is looked at on three, too.
    run(file, {number: job for number, job in more.items() if job[1]}, 3)
    return verdicts, {
        name: " ".join([name, *(f"{size}: {wrong}" for size, wrong in found.items())]) for name, found in told.items()
    }


def alike(one: str, other: str) -> bool:
    """Whether an entry of the table is this one: numbers with a point to three digits, all else letter by letter; what
    stands where the table has ... is chance."""
    one, chance, _ = one.partition(" ...")
    ours, theirs = NUMBER.split(one), NUMBER.split(other[: len(one)] if chance else other)
    return len(ours) == len(theirs) and all(
        a == b or (NUMBER.fullmatch(a) and NUMBER.fullmatch(b) and "." in a + b
                   and math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=1e-6))
        for a, b in zip(ours, theirs, strict=True)
    )  # fmt: skip


def written(table: str) -> dict[str, str]:
    """The first word of each entry -> the entry. What is indented by more than two goes on with a line."""
    entries = [entry.split() for entry in re.split(r"\n(?:  )?(?=\S)", table.rstrip())]
    return {words[0]: " ".join(words) for words in entries}


@pytest.mark.parametrize("chapter", check.chapters())
def test_wrong_answers_are_refused_for_the_right_reason(chapter, monkeypatch):
    patience = f"no answer for {engine.PATIENCE:g} s"
    monkeypatch.setattr(engine, "PATIENCE", 2.0)  # seconds, of which a deadlock takes as many
    monkeypatch.setattr(engine, "CALL_LIMIT", 4.0)
    file = ROOT / chapter / "classroom" / "solutions.py"
    table = engine.load(file).WRONG
    exercises = {exercise.name: exercise for exercise in check.exercises_of(chapter)}
    assert table.keys() == exercises.keys()
    assert min(len(answers) for answers in table.values()) >= 3
    wrong = [(exercises[name], function.__name__, reason) for name in table for function, reason in table[name]]
    # An answer that ends its process makes all others of its launch start again: it gets a launch of its own.
    launches = [[row for row in wrong if "SIG" not in row[2]], *([row] for row in wrong if "SIG" in row[2])]
    mistaken, entries = [], {
        f"{name}:": f"{name}: {' '.join(str(len(list(exercises[name].check(size)))) for size in engine.SIZES)}"
        for name in exercises
    }  # fmt: skip
    for rows in launches:
        verdicts, found = graded([(exercise, name) for exercise, name, _ in rows], file)
        entries |= found
        for (_, name, reason), verdict in zip(rows, verdicts, strict=True):
            said = f"{verdict.status} {verdict.where}: expected {verdict.expected}, got {verdict.got}"
            said = said.replace("no answer for 2 s", patience)
            words = ".*".join(map(re.escape, reason.split(" ... ")))
            if verdict.status != "wrong" or not re.search(words, said):
                wanted = f"should be refused with {reason!r}, and is"
                mistaken.append(f"{name}: {wanted} {'accepted' if verdict.status == 'right' else said}")
    assert not mistaken, "\n".join(mistaken)
    table = written((TABLES / f"{chapter}.txt").read_text())
    different = [
        f"the table says {table.get(name, 'nothing')!r}, it is {entries.get(name, 'not there')!r}"
        for name in dict.fromkeys([*table, *entries])
        if not alike(table.get(name, ""), entries.get(name, ""))
    ]
    assert not different, "wrong answers that are wrong in another way:\n" + "\n".join(different)
