"""Many proofs in one launch. Ranks are forked once, and what PyTorch works out when a rank first meets an operation
(for DTensor, half of the time) serves all that come after."""

from dataclasses import dataclass
from typing import Any

from common.lab import equality
from common.lab.equality import Case, NotEqual, Proof
from common.lab.launch import RankFailed, launch


@dataclass(frozen=True)
class Job:
    """One strategy to be proved: the arguments of `equality.prove`."""

    who: str
    strategy_class: Any
    cases: list[Case]
    axes: dict[str, int] | None = None
    options: Any = None


def on_ranks(jobs: list[Job]) -> list[list[equality.Outcome]]:
    return [equality.on_ranks(job.strategy_class, job.cases, job.axes, job.options) for job in jobs]


def prove_each(jobs: list[Job], nproc: int, timeout: float = 1800.0) -> list[list[Proof] | NotEqual | RankFailed]:
    """For each job its proofs, or why there are none. Where a rank fails, each job gets a launch of its own."""
    try:
        outcomes = launch(on_ranks, nproc, (jobs,), timeout)
    except RankFailed as failure:
        return [failure] if len(jobs) == 1 else [prove_each([job], nproc, timeout=300)[0] for job in jobs]
    found: list[list[Proof] | NotEqual | RankFailed] = []
    for number, job in enumerate(jobs):
        try:
            of_ranks = [outcome[number] for outcome in outcomes]
            found.append(equality.judge(job.strategy_class, of_ranks, job.axes, job.cases, job.who))
        except NotEqual as refusal:
            found.append(refusal)
    return found


def prove_all(jobs: list[Job], nproc: int) -> list[list[Proof]]:
    """The proofs of each job; fails with all that are refused."""
    found = prove_each(jobs, nproc)
    wrong = [f"{job.who}: {why}" for job, why in zip(jobs, found, strict=True) if isinstance(why, Exception)]
    assert not wrong, "\n".join(wrong)
    return found
