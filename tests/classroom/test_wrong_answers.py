"""Every wrong answer of every chapter: the checker refuses it, and for the reason that solutions.py names."""

import re

import pytest

from common import ROOT, check
from common.grading import engine


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
    mistaken = []
    for rows in launches:
        verdicts = engine.grade([(exercise, name) for exercise, name, _ in rows], file)
        for (_, name, reason), verdict in zip(rows, verdicts, strict=True):
            said = f"{verdict.status} {verdict.where}: expected {verdict.expected}, got {verdict.got}"
            said = said.replace("no answer for 2 s", patience)
            words = ".*".join(map(re.escape, reason.split(" ... ")))
            if verdict.status != "wrong" or not re.search(words, said):
                wanted = f"should be refused with {reason!r}, and is"
                mistaken.append(f"{name}: {wanted} {'accepted' if verdict.status == 'right' else said}")
    assert not mistaken, "\n".join(mistaken)
