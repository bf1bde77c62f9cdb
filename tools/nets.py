"""Which net catches which mistake: all planted bugs and all incidents, through types, proofs and guards.

    pip install -r requirements-nets.txt    the type checker
    python -m tools.nets                    writes docs/nets.csv, a row for each mistake, and the page; 20 minutes
    python -m tools.nets --rows ddp         only rows of chapters and classes with this in their names
    python -m tools.nets --page             what docs/nets.md says of docs/nets.csv, and docs/nets.png; in seconds

A cell says what has caught the mistake, or nothing; "-" where a net cannot look (`docs/nets.md` says why). The rows of
kind "right" are what the mistakes were planted in: what a net says there is a false alarm.

    types        spmd_types, on one process, before a rank starts (`tools/nets_types.py`)
    proof        equality with one process (common/lab/equality.py), or the chapter's own check
    collectives  `--check-collectives`: all ranks are about to call the same
    ledger       the calls and bytes of each rank, against those of the right program
    copies       fingerprints of what ranks hold copies of
    norms        the logged gradient norm: the same on all ranks, finite, never the same twice

The seconds are processor time of all ranks, of one run each: a scale, no measurement.
"""

import argparse
import importlib
import math
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.lab import equality
from common.lab.equality import CASES, Case, NotEqual
from common.lab.guard import CheckCollectives, CollectiveMismatch
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from tools import nets_page

CHAPTERS = ("intro", "data_parallel", "ddp", "model_parallel", "pipeline", "fsdp")
# Seconds that the guard waits for a rank: briefly where a rank is known not to come, and else as long as a busy machine
# may take, since no row is to be decided by the clock.
PATIENCE, BRIEFLY = 120.0, 4.0
RECORDED = ("copies", "norms")  # what not every incident has


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
    calls: Counter | None = None
    seconds: float = 0.0


def watched(run: Callable, patience: float = PATIENCE) -> Watched:
    """Called on a rank: `run()` under the guards."""
    begin, found, ledger = time.process_time(), Watched(), Ledger()
    try:
        with CheckCollectives(patience), ledger:
            found.numbers = run()
    except CollectiveMismatch as mismatch:
        found.mismatch = str(mismatch).splitlines()[0]
    found.calls = Counter((entry.operation, entry.payload, entry.ranks) for entry in ledger.entries)
    found.seconds = time.process_time() - begin
    return found


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


def copies_alarm(ranks: list[equality.Outcome]) -> str:
    """Fingerprints of what several ranks hold of the same elements."""
    seen: dict[tuple, torch.Tensor] = {}
    for outcome in ranks:
        for name, where, values in outcome.own:
            first = seen.setdefault((name, str(where)), values)
            if first.shape != values.shape or not torch.equal(first, values):
                return f"{name} differs"
    return ""


def cases_for(ranks: int) -> list[Case]:
    """The two that the teeth of the proofs use: SGD, two steps, in as many micro-batches as the batch divides into."""
    accumulate = 3 if equality.BATCH % (3 * ranks) == 0 else 1
    found = [case for case in CASES if case.make_optimizer is equality.sgd and case.accumulate == accumulate]
    return [Case(c.make_model, c.make_optimizer, c.accumulate, c.max_norm, steps=2) for c in found]


Planted = tuple[str, str, Any]  # its name in the matrix, its kind, the class or function


def strategy_rows(chapter: str, right, ranks: int, planted: list[Planted], hanging: set[str]) -> Iterator[Row]:
    """Rows of a class of chapters 02 to 06, and of what is planted in it. All that end are run in one launch."""
    from tools import nets_types

    cases, together = cases_for(ranks), [mistake for mistake in planted if mistake[0] not in hanging]

    def on_rank():
        return [[watched(lambda: equality.on_ranks(cls, [c])) for c in cases] for _, _, cls in together]  # noqa: B023

    try:
        launched = launch(on_rank, ranks, timeout=600.0)
        found = {name: [rank[place] for rank in launched] for place, (name, _, _) in enumerate(together)}
    except RankFailed:
        found = {}
    expected = found.get(f"{right.__name__} on {ranks}") or launch(
        lambda: [watched(lambda: equality.on_ranks(right, [c])) for c in cases],  # noqa: B023
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
                judge_case(row, cls, right, ranks, case, of_ranks, [rank[place].calls for rank in expected])
        if not row.proof and [*right.preset] == ["data"] and right.tasks != ("text",):  # BatchNorm
            try:
                equality.agree(cls, ranks, name)
            except NotEqual as refusal:
                row.proof = refusal.what
        yield row


def guarded(cls, case: Case, ranks: int, row: Row) -> list[Watched] | None:
    """A launch of its own; None where ranks fail without having come to an end."""
    try:
        return launch(lambda: watched(lambda: equality.on_ranks(cls, [case]), BRIEFLY), ranks, timeout=8.0)
    except RankFailed as failure:
        row.collectives = "calls differ" if "CollectiveMismatch" in str(failure) else ""
        return None


def judge_case(row: Row, cls, right, ranks: int, case: Case, found: list[Watched] | None, expected: list) -> None:
    if found is not None:
        row.run_seconds += sum(one.seconds for one in found)
    if found is None or any(one.mismatch for one in found):
        row.collectives = row.collectives or ("calls differ" if found else "")
        try:  # the guard's verdict is not the proof's: again without it
            outcomes = launch(lambda: equality.on_ranks(cls, [case]), ranks, timeout=6.0)
        except RankFailed as failure:
            row.proof = "hangs" if "wait" in str(failure) or "imed out" in str(failure) else "a rank fails"
            return
    else:
        outcomes = [one.numbers for one in found]
        if ranks > 1 and [one.calls for one in found] != expected:  # of the whole run
            row.ledger = "calls differ"
        row.copies = row.copies or copies_alarm([outcome[0] for outcome in outcomes])
        row.norms = row.norms or norms_alarm([outcome[0].grad_norms for outcome in outcomes])
    try:
        equality.judge(right, outcomes, None, [case], row.mistake)
    except NotEqual as refusal:
        step = re.search(r" of step (\d+)", str(refusal))
        row.proof = f"{refusal.what}, step {step[1]}" if step else f"{refusal.what}, at the end"


def loading_row(chapter: str, name: str, kind: str, load, ranks: int) -> Row:
    from course.ddp.classroom.check_loading import check_loading

    row = Row(chapter, name, kind, collectives="-", ledger="-", copies="-", norms="-")
    try:
        check_loading([load], ranks, timeout=20.0)
    except NotEqual as refusal:
        row.proof = refusal.what
    return row


def all_reduce_row(name: str, kind: str, algorithm, right, ranks: int) -> Row:
    """Chapter 01: all-reduce from messages. Its check looks at the sum and, message by message, at what is sent."""
    from course.intro import by_hand
    from course.intro.classroom import check_all_reduce

    row = Row("intro", name, kind, copies="-", norms="-")
    cost = by_hand.COSTS[right.__name__]

    def under_guard(tensor, group=None):
        with CheckCollectives(BRIEFLY):
            algorithm(tensor, group)

    for net, one in (("proof", algorithm), ("collectives", under_guard)):
        try:
            check_all_reduce.prove(one, cost, ranks, timeout=6.0)
        except check_all_reduce.Refused as refused:
            if net == "collectives":
                row.collectives = "calls differ" if "CollectiveMismatch" in str(refused) else ""
            elif refused.check in ("messages", "bytes", "pattern"):
                row.ledger = refused.check
            else:
                row.proof = refused.check
    return row


def incident_rows(incident) -> Iterator[Row]:
    from course.fsdp import museum

    programs = {"right": incident.fixed, "incident": incident.broken}
    found: dict[str, list[Watched] | None] = {}
    one = museum.of_one_process(incident.fixed)
    for kind, program in programs.items():
        row = Row("museum", incident.name, kind)
        try:
            patience = BRIEFLY if hasattr(program, "WAIT") else PATIENCE
            found[kind] = launch(lambda: watched(program.on_rank, patience), program.RANKS, timeout=300.0)  # noqa: B023
            seen = [watch.numbers for watch in found[kind] or []]
            row.run_seconds = sum(watch.seconds for watch in found[kind] or [])
            if any(watch.mismatch for watch in found[kind] or []):
                row.collectives = "calls differ"
                seen = museum.seen(program)
            elif found["right"] and [w.calls for w in found[kind] or []] != [w.calls for w in found["right"]]:
                row.ledger = "calls differ"
        except RankFailed as failure:
            found.setdefault(kind, None)
            row.collectives = row.collectives or ("calls differ" if "CollectiveMismatch" in str(failure) else "")
            row.proof = "hangs" if kind == "incident" else "a rank fails"
            right = [watch.numbers for watch in found["right"] or []]
            row.copies, row.norms = ("" if all(getattr(one, what) for one in right) else "-" for what in RECORDED)
            yield row
            continue
        apart = [
            key
            for key, value in seen[0].copies.items()
            if any(not torch.equal(value, rank.copies[key]) for rank in seen if key in rank.copies)
        ]
        row.copies = f"{apart[0]} differs" if apart else "" if all(rank.copies for rank in seen) else "-"
        row.norms = norms_alarm([rank.norms for rank in seen]) if all(rank.norms for rank in seen) else "-"
        off = [key for key, difference in museum.compared(seen, one).items() if not difference <= museum.TOLERANCE]
        row.proof = off[0] if off else ""
        yield row


def all_rows(wanted: str = "") -> Iterator[Row]:
    """All rows, of chapters and groups whose names contain `wanted`."""
    for chapter in CHAPTERS:
        bugs = importlib.import_module(f"course.{chapter}.classroom.bugs").BUGS
        groups: dict[tuple, list[str]] = {}
        for name, bug in bugs.items():
            groups.setdefault((bug.file, bug.target, bug.ranks), []).append(name)
        for (file, target, ranks), names in groups.items():
            if wanted not in f"{chapter} {target}" or file == "standalone.py":  # programs: their own tests run them
                continue
            right = getattr(importlib.import_module(f"course.{chapter}.{file.removesuffix('.py')}"), target)
            planted: list[Planted] = [(f"{target} on {ranks}", "right", right)]
            planted += [(name, "planted", bugs.plant(name)) for name in names]
            if chapter == "intro":
                yield from (all_reduce_row(name, kind, one, right, ranks) for name, kind, one in planted)
            elif isinstance(right, types.FunctionType):
                yield from (loading_row(chapter, name, kind, one, ranks) for name, kind, one in planted)
            elif target != "Executor":  # no strategy: its own tests run it
                hanging = {
                    n for n in names if bugs[n].refused_by == "timeout" or bugs[n].refused_by.startswith("error")
                }
                yield from strategy_rows(chapter, right, ranks, planted, hanging)
    from course.fsdp.museum import incidents

    for name, incident in incidents().items():
        if wanted in f"museum {name}":
            yield from incident_rows(incident)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows of chapters and classes with this in their names")
    parser.add_argument("--page", action="store_true", help="the page alone, of the rows that are there")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # chapters' programs read the command line when they are imported
    if not options.page:
        for row in all_rows(options.rows):
            nets_page.put(as_text(row))
            print(", ".join(map(str, vars(row).values())), flush=True)
    nets_page.write()


def as_text(row: Row) -> dict[str, str]:
    return {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in vars(row).items()}


if __name__ == "__main__":
    main()
