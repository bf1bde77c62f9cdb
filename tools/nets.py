"""Which net catches which mistake: all planted bugs and all incidents, through types, proofs and guards.

    pip install -r requirements-nets.txt    the type checker
    python -m tools.nets                    writes docs/nets.csv, a row for each mistake, and the page; 20 minutes
    python -m tools.nets --rows ddp         only rows of chapters and classes with this in their names: also "museum",
                                            "catalogue", "faulty", "standalone", "dropout", "sought"
    python -m tools.nets --page             what docs/nets.md says of docs/nets.csv, and docs/nets.png; in seconds

A cell says what has caught the mistake, and where first, or nothing; "-" where a net cannot look (`docs/nets.md` says
why). The rows of kind "right" are what the mistakes were planted in: what a net says there is a false alarm.

    types        spmd_types, on one process, before a rank starts (`tools/nets_types.py`)
    proof        equality with one process (common/lab/equality.py), or the chapter's own check
    collectives  `--check-collectives`: all ranks are about to call the same
    ledger       the calls and bytes of each rank, against those of the right program
    copies       fingerprints of what ranks hold copies of
    norms        the logged gradient norm: the same on all ranks, finite, never the same twice

The seconds are processor time of all ranks, of one run each: a scale, no measurement.
"""

import importlib
import itertools
import sys
import types
from collections.abc import Iterator

import torch

from common.errors import Parser
from common.lab.equality import NotEqual
from common.lab.guard import CheckCollectives
from common.lab.launch import RankFailed, launch
from tools import nets_page, nets_programs, nets_sought
from tools.nets_rows import (
    BRIEFLY,
    PATIENCE,
    Planted,
    Row,
    Watched,
    first_call,
    norms_alarm,
    strategy_rows,
    the_collective,
    watched,
)

CHAPTERS = ("intro", "data_parallel", "ddp", "model_parallel", "pipeline", "fsdp")
RECORDED = ("copies", "norms")  # what not every incident has


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
                row.collectives = the_collective(str(refused))
            elif refused.check in ("messages", "bytes", "pattern"):
                row.ledger = refused.check
            else:
                row.proof = refused.check
    return row


def incident_rows(incident) -> Iterator[Row]:
    from course.fsdp import museum
    from tools import nets_incidents

    programs = {"right": incident.fixed, "incident": incident.broken}
    found: dict[str, list[Watched] | None] = {}
    one = museum.of_one_process(incident.fixed)
    for kind, program in programs.items():
        row = Row("museum", incident.name, kind)
        row.types, row.types_seconds = nets_incidents.check(incident, program)
        try:
            patience = BRIEFLY if hasattr(program, "WAIT") else PATIENCE
            found[kind] = launch(lambda: watched(program.on_rank, patience), program.RANKS, timeout=300.0)  # noqa: B023
            seen = [watch.numbers for watch in found[kind] or []]
            row.run_seconds = sum(watch.seconds for watch in found[kind] or [])
            if any(watch.mismatch for watch in found[kind] or []):
                row.collectives = next(watch.mismatch for watch in found[kind] or [] if watch.mismatch)
                seen = museum.seen(program)
            elif found["right"]:
                row.ledger = first_call(*([watch.order for watch in found[which] or []] for which in (kind, "right")))
        except RankFailed as failure:
            found.setdefault(kind, None)
            row.collectives = row.collectives or the_collective(str(failure))
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
            if wanted not in f"{chapter} {target}" or file == "standalone.py":
                continue
            if target == "Executor":  # planted in a pipeline that is right but for it
                file, target = "by_hand.py", "PipelineByHand"
            right = getattr(importlib.import_module(f"course.{chapter}.{file.removesuffix('.py')}"), target)
            planted: list[Planted] = [(f"{target} on {ranks}", "right", right)]
            planted += [(name, "planted", bugs.plant(name)) for name in names]
            if chapter == "intro":
                yield from (all_reduce_row(name, kind, one, right, ranks) for name, kind, one in planted)
            elif isinstance(right, types.FunctionType):
                yield from (loading_row(chapter, name, kind, one, ranks) for name, kind, one in planted)
            else:
                hanging = {
                    n for n in names if bugs[n].refused_by == "timeout" or bugs[n].refused_by.startswith("error")
                }
                yield from strategy_rows(chapter, right, ranks, planted, hanging)
        if wanted in f"{chapter} faulty":
            yield from nets_programs.faulty_rows(chapter)
    from course.ddp.classroom.bugs import BUGS

    for name, rows in {
        "ddp standalone": lambda: nets_programs.copied_program_rows(BUGS),
        "pipeline dropout": nets_programs.dropout_rows,
        "catalogue": nets_programs.catalogue_rows,
        "sought": nets_sought.sought_rows,
    }.items():
        if wanted in name:
            yield from rows()
    from course.fsdp.museum import incidents

    for name, incident in incidents().items():
        if wanted in f"museum {name}":
            yield from incident_rows(incident)


def main() -> None:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows of chapters and classes with these in names")
    parser.add_argument("--page", action="store_true", help="the page alone, of the rows that are there")
    options = parser.asked()
    sys.argv = sys.argv[:1]  # chapters' programs read the command line when they are imported
    if not options.page:
        for row in itertools.chain.from_iterable(map(all_rows, options.rows)):
            nets_page.put(as_text(row))
            print(", ".join(map(str, vars(row).values())), flush=True)
    nets_page.write()


def as_text(row: Row) -> dict[str, str]:
    return {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in vars(row).items()}


if __name__ == "__main__":
    main()
