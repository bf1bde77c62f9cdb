"""Rows of the matrix of nets for mistakes that are in no strategy's class: programs and functions.

The programs to repair (`faulty.py`) are compared with the numbers of their exercises, the mistakes of the program to
copy with a run of it on one process, those of the executor that only dropout shows with a run that computes nothing
again, and the programs of the catalogue with what they print when they are repaired.
"""

import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common import ROOT
from common.lab.equality import TOLERANCE, difference
from common.lab.guard import CheckCollectives
from common.lab.launch import launch
from common.lab.ledger import Ledger
from tools.nets_rows import PATIENCE, Row, Watched, first_call, norms_alarm, the_collective, watched

FAULTY = {  # chapter: (what is wrong, what is right and its exercise, how many ranks)
    "intro": ("training_as_it_was", "repaired_training", 2),
    "data_parallel": ("replicas_as_they_were", "repaired_replicas", 1),
    "ddp": ("reducer_as_it_was", "repaired_reducer", 2),
    "model_parallel": ("attention_as_it_was", "repaired_attention", 2),
    "pipeline": ("repaired_nothing", "repaired_step", 2),
    "fsdp": ("decay_as_it_was", "repaired_decay", 2),
}
SAME_RESULT = ("intro", "ddp", "fsdp")  # on all ranks, by the exercise


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return isinstance(found, torch.Tensor) and difference(found.detach().double(), expected.double()) <= TOLERANCE


def faulty_rows(chapter: str) -> Iterator[Row]:
    wrong, right, ranks = FAULTY[chapter]
    solutions = importlib.import_module(f"course.{chapter}.classroom.solutions")
    grading = importlib.import_module(f"course.{chapter}.classroom.grading")
    cases = list(getattr(grading, right)(2))
    of_right: list[list] = []
    for name, kind, function in (
        (f"{right} on {ranks}", "right", getattr(solutions, right)),
        ("faulty.py", "planted", getattr(solutions, wrong)),
    ):
        row = Row(chapter, name, kind, norms="-", copies="" if chapter in SAME_RESULT else "-")

        def on_rank():
            rank = dist.get_rank()
            return [watched(lambda: function(*case.arguments[rank])) for case in cases]  # noqa: B023

        found = launch(on_rank, ranks, timeout=120.0)
        row.run_seconds = sum(one.seconds for rank in found for one in rank)
        if ranks == 1:
            row.collectives = row.ledger = "-"
        calls = [[call for one in rank for call in one.order] for rank in found]
        of_right = of_right or calls
        row.ledger = row.ledger or first_call(calls, of_right)
        for place, case in enumerate(cases):
            seen = [rank[place] for rank in found]
            row.collectives = row.collectives or next((one.mismatch for one in seen if one.mismatch), "")
            if any(one.mismatch for one in seen):
                continue
            results = [one.numbers for one in seen]
            if not row.copies and not all(equal(result, results[0]) for result in results):
                row.copies = "results differ"
            if not row.proof and not all(map(equal, results, case.expected)):
                row.proof = "result"
        yield row


def copied_program_rows(bugs) -> Iterator[Row]:
    """The program of chapter 03 to copy: an epoch on two ranks, and another after a restart, against one process."""
    from course.ddp import standalone

    planted = {name: bugs.plant(name) for name, bug in bugs.items() if bug.file == "standalone.py"}
    one = trained(standalone.train, 1)[0].numbers
    of_right: list[list] = []
    for name, train in {"train on 2": standalone.train, **planted}.items():
        row = Row("ddp", name, "planted" if of_right else "right", norms="-")
        found = trained(train, 2)
        calls = [rank.order for rank in found]
        of_right = of_right or calls
        row.run_seconds = sum(rank.seconds for rank in found)
        row.collectives = next((rank.mismatch for rank in found if rank.mismatch), "")
        row.ledger = first_call(calls, of_right)
        printed, saved, weights = found[0].numbers
        if not all(map(torch.equal, weights, found[1].numbers[2])):
            row.copies = "weights differ"
        if saved.keys() != one[1].keys() or any(difference(saved[key], one[1][key]) > TOLERANCE for key in saved):
            row.proof = "saved"
        elif printed != one[0]:
            row.proof = "printed"
        yield row


def trained(train: Callable, ranks: int) -> list[Watched]:
    """What two epochs print and save, with a restart between them, and each rank's weights after them."""

    def run():
        printed = io.StringIO()
        for epochs in (1, 2):
            train.__globals__["EPOCHS"] = epochs
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            with contextlib.redirect_stdout(printed):
                train(model, optimizer, torch.device("cpu"))
            dist.barrier()
        saved = torch.load("checkpoint-ddp.pt")["model"]
        return printed.getvalue(), saved, [parameter.detach() for parameter in model.parameters()]

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return launch(lambda: watched(run), ranks, timeout=300.0)


def dropout_rows() -> Iterator[Row]:
    """Mistakes of the executor that only dropout shows. No two ways to split a batch draw alike, so that there is no
    process to compare with: a run that computes activations again is compared with one that keeps them."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]
    from course.pipeline import by_hand
    from course.pipeline.classroom.bugs import DROPOUT_BUGS

    tests = importlib.import_module("test_executor")
    planted = {name: DROPOUT_BUGS.plant(name) for name in DROPOUT_BUGS}
    of_right: list[list] = []
    for name, cls in {"PipelineByHand with dropout": by_hand.PipelineByHand, **planted}.items():
        row = Row("pipeline", name, "planted" if of_right else "right", copies="-")
        try:
            tests.require_same_dropout(cls)
        except AssertionError:
            row.proof = "dropout"
        found = launch(lambda: watched(lambda: tests.with_dropout(cls, "1f1b", "full")), 2)  # noqa: B023
        row.run_seconds = sum(rank.seconds for rank in found)
        row.collectives = next((rank.mismatch for rank in found if rank.mismatch), "")
        calls = [rank.order for rank in found]
        of_right = of_right or calls
        row.ledger = first_call(calls, of_right)
        row.norms = norms_alarm([[float(norm) for norm in rank.numbers[0]] for rank in found])
        yield row


# --- the catalogue of hangs -----------------------------------------------------------------------------------

CALLS = "calls of this rank: "


def run_watched(source: str, file: str) -> None:
    """What a rank of the catalogue runs in place of a program: the same under the guards, from its process group on."""
    meet, leave, ledger, modes = dist.init_process_group, dist.destroy_process_group, Ledger(), contextlib.ExitStack()

    def init_process_group(*arguments, **named):
        meet(*arguments, **named)
        modes.enter_context(ledger)
        modes.enter_context(CheckCollectives(PATIENCE))  # it comes first, and looks for the line of the caller

    def destroy_process_group(*arguments):
        modes.close()
        leave(*arguments)

    dist.init_process_group, dist.destroy_process_group = init_process_group, destroy_process_group
    try:
        with modes:
            exec(compile(source, file, "exec"), {"__name__": "__main__", "__file__": file})
    finally:
        print(CALLS + json.dumps([[entry.operation, entry.payload, entry.ranks] for entry in ledger.entries]))


def catalogue_rows() -> Iterator[Row]:
    from course.ddp import catalogue

    entries = catalogue.mistakes()
    under = "from tools.nets_programs import run_watched\n\nrun_watched({!r}, __file__)\n"
    sources = {
        "right": {n: one.fixed for n, one in entries.items()},
        "planted": {n: o.source for n, o in entries.items()},
    }
    plain = {"right": catalogue.run(sources["right"], at_once=3), "planted": catalogue.run_wrong([*entries], at_once=3)}
    guarded = {
        kind: catalogue.run({name: under.format(source) for name, source in of_kind.items()}, at_once=3)
        for kind, of_kind in sources.items()
    }
    for name, entry in entries.items():
        of_right: list[list] = []
        for kind in ("right", "planted"):
            row = Row("catalogue", f"{name} repaired" if kind == "right" else name, kind, copies="-", norms="-")
            ended, watching = plain[kind][name], guarded[kind][name]
            if catalogue.missing(entry.then, ended):
                how = catalogue.outcome(name, ended)
                row.proof = {"silent": "result", "timeout": "hangs", "error": "a rank fails"}[how]
            calls = [re.findall(re.escape(CALLS) + r"(.*)", one.output) for one in watching]
            of_ranks = [json.loads(found[-1]) if found else [] for found in calls]
            row.collectives = next((n for one in watching if (n := the_collective(one.output))), "")
            if kind == "right":
                of_right = of_ranks
            if row.collectives:
                pass  # the guard has ended it
            elif not any(of_right) or (kind == "planted" and not any(of_ranks)):
                row.ledger = row.collectives = "-"  # they never met
            else:
                row.ledger = first_call(of_ranks, of_right)
            yield row
