"""A row of the matrix of nets, and how a strategy's come about: trainings under all guards, and what each says."""

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from common.lab import equality
from common.lab.equality import CASES, Case, NotEqual
from common.lab.guard import CheckCollectives, CollectiveMismatch
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from tools import nets_types

# Seconds that the guard waits for a rank: briefly where a rank is known not to come, and else as long as a busy machine
# may take, since no row is to be decided by the clock.
PATIENCE, BRIEFLY, HANGS = 120.0, 15.0, 40.0


@dataclass
class Row:
    """What each net said of one mistake; seconds of processor time of types, and of a run under all the others."""

    chapter: str
    mistake: str
    kind: str  # "planted", "incident" or "right"
    types: str = "-"
    proof: str = ""
    collectives: str = ""
    ledger: str = ""
    copies: str = ""
    norms: str = ""
    types_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass
class Watched:
    """What one rank gave under the guards; numbers are an Outcome's, or what an incident has Seen."""

    numbers: Any = None
    mismatch: str = ""
    order: list = field(default_factory=list)  # the calls
    marks: list[int] = field(default_factory=list)  # how many calls there were before the first step, and after each
    copies: list = field(default_factory=list)  # what this rank held after each step, in each case
    seconds: float = 0.0

    @property
    def of_steps(self) -> list[Counter]:
        """The calls before the first step, in each step, and after the last: in no order, as threads make them."""
        ends = [0, *self.marks, len(self.order)]
        return [Counter(self.order[begin:end]) for begin, end in itertools.pairwise(ends)]


def watched(run: Callable, patience: float = PATIENCE) -> Watched:
    """Called on a rank: `run()` under the guards."""
    return watched_by_step(lambda _: run(), patience)


def watched_by_step(run: Callable, patience: float = PATIENCE) -> Watched:
    """The same of `run(after_step)`, which calls `after_step(strategy)`."""
    begin, found, ledger = time.process_time(), Watched(), Ledger()

    def after_step(strategy):
        found.marks.append(len(ledger.entries))
        if strategy is not None:
            found.copies.append(equality.own_elements(strategy))

    try:
        with ledger, CheckCollectives(patience):  # the guard first: it looks for the line of the caller
            found.numbers = run(after_step)
    except CollectiveMismatch as mismatch:
        found.mismatch = the_collective(str(mismatch))
    found.order = [(entry.operation, entry.payload, entry.ranks) for entry in ledger.entries]
    found.seconds = time.process_time() - begin
    return found


def the_collective(text: str) -> str:
    """What a refusal of the guard says of the place: "collective 3"; "" where there is none in a text."""
    found = re.search(r"((?:collective|message) \d+) (?:of|from) [^\n]*?: r(?:ank|anks) ", text)
    return found[1] if found else ""


def first_call(found: list[list], right: list[list]) -> str:
    """Which is the first call, on any rank, that is not the right program's."""
    for number, calls in enumerate(itertools.zip_longest(*found, *right), start=1):
        if calls[: len(found)] != calls[len(found) :]:
            return f"call {number}"
    return ""


def stepping(cls, after_step: Callable):
    """The class with `after_step(strategy)` before its first step and behind each."""

    class Stepping(cls):
        def step(self, batches):
            if not self.__dict__.get("has_stepped"):
                self.has_stepped = True
                after_step(None)
            result = super().step(batches)
            after_step(self)
            return result

    Stepping.__name__ = cls.__name__
    return Stepping


def under_guards(cls, case: Case, patience: float = PATIENCE) -> Watched:
    """On a rank: a strategy trains a case."""
    return watched_by_step(lambda after_step: equality.on_ranks(stepping(cls, after_step), [case]), patience)


def norms_alarm(norms: list[list[float]]) -> str:
    """norms[rank][step]"""
    for step, of_ranks in enumerate(zip(*norms, strict=True), start=1):
        if any(not math.isfinite(norm) for norm in of_ranks):
            return f"step {step}: not finite"
        if len(set(of_ranks)) > 1:
            return f"step {step}: ranks differ"
        if step > 1 and of_ranks[0] == norms[0][step - 2]:
            return f"step {step}: frozen"
    return ""


def copies_alarm(ranks: list[Watched]) -> str:
    """Fingerprints of what several ranks hold of the same elements, after each step."""
    for step, of_ranks in enumerate(zip(*(rank.copies for rank in ranks), strict=True), start=1):
        seen: dict[tuple, torch.Tensor] = {}
        for own in of_ranks:
            for name, where, values in own:
                first = seen.setdefault((name, str(where)), values)
                if first.shape != values.shape or not torch.equal(first, values):
                    return f"step {step}: {name} differs"
    return ""


def ledger_alarm(ranks: list[Watched], right: list[Watched]) -> str:
    """In which step some rank's calls are not the right program's."""
    for step, calls in enumerate(itertools.zip_longest(*(rank.of_steps for rank in [*ranks, *right]))):
        if calls[: len(ranks)] != calls[len(ranks) :]:
            return "before step 1" if step == 0 else "at the end" if step > len(right[0].marks) - 1 else f"step {step}"
    return ""


def cases_for(ranks: int) -> list[Case]:
    """The two that the teeth of the proofs use: SGD, two steps, in as many micro-batches as the batch divides into."""
    accumulate = 3 if equality.BATCH % (3 * ranks) == 0 else 1
    found = [case for case in CASES if case.make_optimizer is equality.sgd and case.accumulate == accumulate]
    return [Case(c.make_model, c.make_optimizer, c.accumulate, c.max_norm, steps=2) for c in found]


Planted = tuple[str, str, Any]  # its name in the matrix, its kind, the class or function


def strategy_rows(chapter: str, right, ranks: int, planted: list[Planted], hanging: set[str]) -> Iterator[Row]:
    """Rows of a class of chapters 02 to 06, and of what is planted in it. All that end are run in one launch."""
    cases, together = cases_for(ranks), [mistake for mistake in planted if mistake[0] not in hanging]

    def on_rank():
        return [[under_guards(cls, case) for case in cases] for _, _, cls in together]

    try:
        launched = launch(on_rank, ranks, timeout=600.0)
        found = {name: [rank[place] for rank in launched] for place, (name, _, _) in enumerate(together)}
    except RankFailed:
        found = {}
    expected = found.get(f"{right.__name__} on {ranks}") or launch(
        lambda: [under_guards(right, case) for case in cases],
        ranks,
        timeout=120.0,
    )
    for name, kind, cls in planted:
        row = Row(chapter, name, kind)
        if ranks == 1:
            row.collectives = row.ledger = row.copies = "-"
        row.types, row.types_seconds = nets_types.check(cls, right, ranks)
        for place, case in enumerate(cases):
            if not row.proof:
                of_ranks = [rank[place] for rank in found[name]] if name in found else guarded(cls, case, ranks, row)
                judge_case(row, cls, right, ranks, case, of_ranks, [rank[place] for rank in expected])
        if not row.proof and [*right.preset] == ["data"] and right.tasks != ("text",):  # BatchNorm
            try:
                equality.agree(cls, ranks, name)
            except NotEqual as refusal:
                row.proof = refusal.what
        yield row


def guarded(cls, case: Case, ranks: int, row: Row) -> list[Watched] | None:
    """A launch of its own; None where ranks fail without having come to an end."""
    try:
        return launch(lambda: under_guards(cls, case, BRIEFLY), ranks, timeout=HANGS)
    except RankFailed as failure:
        row.collectives = the_collective(str(failure))
        return None


def judge_case(row: Row, cls, right, ranks: int, case: Case, found: list[Watched] | None, expected: list) -> None:
    if found is not None:
        row.run_seconds += sum(one.seconds for one in found)
    if found is None or any(one.mismatch for one in found):
        row.collectives = row.collectives or next((one.mismatch for one in found or [] if one.mismatch), "")
        try:  # the guard's verdict is not the proof's: again without it
            outcomes = launch(lambda: equality.on_ranks(cls, [case]), ranks, timeout=HANGS)
        except RankFailed as failure:
            row.proof = "hangs" if "wait" in str(failure) or "imed out" in str(failure) else "a rank fails"
            return
    else:
        outcomes = [one.numbers for one in found]
        if ranks > 1:
            row.ledger = row.ledger or ledger_alarm(found, expected)
            row.copies = row.copies or copies_alarm(found)
        row.norms = row.norms or norms_alarm([outcome[0].grad_norms for outcome in outcomes])
    try:
        equality.judge(right, outcomes, None, [case], row.mistake)
    except NotEqual as refusal:
        step = re.search(r" of step (\d+)", str(refusal))
        row.proof = f"{refusal.what}, step {step[1]}" if step else f"{refusal.what}, at the end"
