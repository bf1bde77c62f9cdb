"""Whether a wrong answer is one that is known: the chapter's solutions.py has a catalogue of those, WRONG.

Two answers are taken for the same mistake where every rank returns and sends the same in the call that went wrong. The
catalogue's function is named, and described, by its mistake.
"""

from dataclasses import replace
from pathlib import Path

from common.grading import nearby
from common.grading.engine import CallOutcome, DoesNotLoad, Verdict, load, matches, run_jobs
from common.grading.values import difference

SLOW = ("deadlock", "SIG", "no end", "not finished")  # answers that wait, or end their process, are not run again


def with_reason(verdict: Verdict, solutions: Path) -> Verdict:
    """This verdict with what is known of its mistake, where nothing else says why, and the solutions are there."""
    if verdict.status != "wrong" or verdict.why or not verdict.tried or not solutions.exists():
        return verdict
    size, calls, outcomes = verdict.tried
    if any(outcome.status == "waited" for outcome in outcomes):
        return verdict
    try:
        rows = load(solutions).WRONG.get(verdict.exercise.name, ())
        # What the checker must say of a wrong answer stands beside it: whatever does not fit need not be run.
        near = [f for f, words in rows if matches(words, verdict.text) and not any(word in words for word in SLOW)]
        found = run_jobs(solutions, {f.__name__: (f.__name__, calls) for f in near}, size)
    except (DoesNotLoad, AttributeError):  # an instructor's own
        return verdict
    same = [f for f in near if alike([rank[len(calls) - 1 :] for rank in found[f.__name__]], outcomes)]
    if len(same) == 1:
        return replace(verdict, why=in_words(same[0]))
    return replace(verdict, why=nearby.in_words(solutions, verdict.exercise.name, size, calls, outcomes))


def alike(theirs: list[list[CallOutcome]], outcomes: list[CallOutcome]) -> bool:
    """Whether each rank of a known answer has come to this call, and did the same in it."""
    return all(len(rank) == 1 and one_alike(rank[0], own) for rank, own in zip(theirs, outcomes, strict=True))


def one_alike(a: CallOutcome, b: CallOutcome) -> bool:
    texts = [one.text.partition(", line ")[0] for one in (a, b)]
    messages = [[(e.operation, e.payload, e.peer) for e in one.entries] for one in (a, b)]
    same = a.status == b.status and a.changed_input == b.changed_input and texts[0] == texts[1]
    return same and messages[0] == messages[1] and difference(a.value, b.value) is None


def in_words(function) -> str:
    """What the name and the first line of a known answer say of its mistake."""
    name = function.__name__.replace("_", " ")
    about = (function.__doc__ or "").strip().partition("\n")[0]
    return f'The same comes of a known mistake, "{name}"{": " + about if about else "."}'
