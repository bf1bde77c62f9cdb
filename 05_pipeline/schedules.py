"""Schedules of a pipeline as data: for each rank, what it does in which order.

A schedule is a list with one list of actions per rank. It says nothing about time: a rank takes its next action as
soon as it is free and the action's input is there. How long that takes, and whether it ever ends, is for simulator.py
to find out. Messages are left out here too: `simulator.with_messages` puts them in, for every schedule alike.

Stages are placed on ranks in one of two ways. In a loop, stage s is on rank s mod p, where p is the number of ranks.
In a V, rank r has stages r and 2p-1-r, so that the first and the last stage are both on rank 0.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import UserError

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for input",  # B is I and W in one
    "W": "backward for weight",
    "SEND_F": "send activations",  # to the next stage
    "RECV_F": "receive activations",
    "SEND_B": "send gradients",  # to the stage before
    "RECV_B": "receive gradients",
}


class Action(NamedTuple):
    """What one rank does once: a kind of KINDS, by a stage, for a micro-batch. Written as PyTorch does: 2F0."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]


def parse(text: str) -> list[Action]:
    """The actions of one rank from text, e.g. "0F0 0F1 0B0 0B1". Raises UserError for what is no action."""
    pattern = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d+)")
    actions = []
    for word in text.split():
        match = pattern.fullmatch(word)
        if match is None:
            raise UserError(f"'{word}' is no action: write stage, kind ({', '.join(KINDS)}) and micro-batch, as in 2F0")
        actions.append(Action(int(match[1]), match[2], int(match[3])))
    return actions


def _number(operations: Iterable[tuple[str, int | None]]) -> list[Action]:
    """Give each (kind, stage) its micro-batch: every stage takes them in order, forward and backward. A "W" is for the
    oldest "I" that still lacks its weight gradient, of any stage where it names none."""
    actions: list[Action] = []
    unfinished: list[Action] = []
    count: Counter[tuple[int, bool]] = Counter()
    for kind, stage in operations:
        if kind == "W":
            action = next(action for action in unfinished if stage in (None, action.stage))
            unfinished.remove(action)
            actions.append(action._replace(kind="W"))
            continue
        assert stage is not None  # a "W" alone may name none
        direction = (stage, kind == "F")
        actions.append(Action(stage, kind, count[direction]))
        count[direction] += 1
        if kind == "I":
            unfinished.append(actions[-1])
    return actions


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.2 and figure 2).

    The paper goes back from the last micro-batch to the first, PyTorch and we from the first to the last: with equal
    times neither is faster, and each holds the activations of all micro-batches.
    """
    return [[Action(rank, kind, m) for kind in "FB" for m in range(microbatches)] for rank in range(ranks)]


def _alternate(ranks: int, microbatches: int, stages_per_rank: int = 1, lead: int = 1, split: bool = False) -> Schedule:
    """One forward, one backward, stages placed in a loop: what four schedules have in common.

    Micro-batches go in rounds of about `ranks`: a whole round through a rank's first stage, then through its second.
    A rank does as many forwards ahead of its backwards as the last rank needs to reach its last stage, and `lead`
    more for each rank that comes after it.

    split: backward in two parts. The weight part waits for `rank` more backwards, so that all ranks hold equally many
    activations, and what waits at the end fills the time in which gradients travel.
    """
    per_round = microbatches // max(1, microbatches // ranks)
    total = stages_per_rank * microbatches
    turns = [turn // per_round % stages_per_rank for turn in range(total)]

    def actions_of(rank):
        forwards = [("F", rank + ranks * turn) for turn in turns]
        backwards = [("I" if split else "B", rank + ranks * (stages_per_rank - 1 - turn)) for turn in turns]
        ahead = min((stages_per_rank - 1) * per_round + lead * (ranks - 1 - rank), total)
        operations = forwards[:ahead]
        for done, backward in enumerate(backwards):
            operations += [*forwards[ahead + done : ahead + done + 1], backward]
            if split and done >= rank:
                operations.append(("W", None))
        if split:
            operations += [("W", None)] * min(rank, total)
        return _number(operations)

    return [actions_of(rank) for rank in range(ranks)]


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """1F1B: backward as soon as possible, so that rank r holds at most p-r activations (Narayanan et al. 2019,
    "PipeDream", section 3.2; with a flush at the end of the batch, as here, Narayanan et al. 2021, section 2.2.1)."""
    return _alternate(ranks, microbatches)


def interleaved(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Interleaved 1F1B: several smaller stages per rank, placed in a loop, make the bubble smaller by their number
    (Narayanan et al. 2021, "Efficient large-scale language model training", section 2.2.2)."""
    return _alternate(ranks, microbatches, stages_per_rank, lead=2)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Breadth first: all micro-batches through one stage, then through the rank's next; backwards the same way, the
    last micro-batch first (Lamy-Poirier 2023, "Breadth-first pipeline parallelism")."""

    def actions_of(rank):
        stages = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in range(microbatches)]
        return forwards + [action._replace(kind="B") for action in reversed(forwards)]

    return [actions_of(rank) for rank in range(ranks)]


def zero_bubble_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose backward is split, with weight gradients computed while others wait; the memory of 1F1B's
    first rank on every rank (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2)."""
    return _alternate(ranks, microbatches, split=True)


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """ZB-H1 with several stages per rank, placed in a loop: PyTorch's combination of the two papers above."""
    return _alternate(ranks, microbatches, stages_per_rank, split=True)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two stages per rank, placed in a V, backward split. No rank idles between its first and its last action
    when forward and both parts of backward take equally long, with the memory of 1F1B's first rank on every rank
    (Qi et al. 2023, section 6; more such placements in Qi et al. 2024, "Pipeline parallelism with controllable
    memory")."""
    enough = max(2 * ranks - 1, microbatches)  # to fill the V; micro-batches that there are not are left out again

    def actions_of(rank):
        after = ranks - 1 - rank
        f0, i0, w0, f1, i1, w1 = [(kind, stage) for stage in (rank, 2 * ranks - 1 - rank) for kind in "FIW"]
        operations = [f0] * (2 * after + 1) + [f1, f0] * rank + [f1, i1, w1] * (after + 1)
        operations += [f0, i0, w0, f1, i1, w1] * (enough - ranks - after) + [i0, w0, f1, i1, w1] * after
        operations += [i0, i1] * rank + [i0, w0] * (after + 1) + [w1] * rank + [w0] * rank
        return [action for action in _number(operations) if action.microbatch < microbatches]

    return [actions_of(rank) for rank in range(ranks)]


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV: two stages per rank, placed in a V; a forward of one stage is paired with a backward of the other,
    and backward is split only where that fills a gap (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section
    3.2.1, and its repository deepseek-ai/DualPipe, which cuts DualPipe in half to the V).

    DeepSeek computes a pair at the same time, so that the messages of one hide behind the arithmetic of the other. Here
    its two actions simply follow each other, the forward first, which is how PyTorch runs them.
    """

    def actions_of(rank):
        after = ranks - 1 - rank
        f0, b0, i0, f1, b1, i1 = [(kind, stage) for stage in (rank, 2 * ranks - 1 - rank) for kind in "FBI"]
        w = ("W", None)
        operations = [f0] * (2 * after) + [f0, f1] * (rank + 1) + [i1, w, f1] * after
        operations += [f0, b1, f1, b0] * (microbatches - ranks - after) + [b1, f1, b0] * after
        operations += ([b1, b0] * (rank + 1))[: rank + 1] + ([i1, i0] * (rank + 1))[rank + 1 :]
        return _number(operations + [w, i0] * after + [w] * (rank + 1))

    return [actions_of(rank) for rank in range(ranks)]


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule, and what it needs.

    function:         (ranks, microbatches), and stages_per_rank where that can be chosen -> Schedule
    stages_per_rank:  the only number that fits, or None: 2 or more
    least:            so many micro-batches per rank, or more
    rounds:           micro-batches go in rounds of equal size
    """

    function: Callable[..., Schedule]
    stages_per_rank: int | None = 1
    least: int = 0
    rounds: bool = False


SCHEDULES = {
    "gpipe": ScheduleEntry(gpipe),
    "1f1b": ScheduleEntry(one_forward_one_backward),
    "interleaved": ScheduleEntry(interleaved, stages_per_rank=None, rounds=True),
    "looped-bfs": ScheduleEntry(looped_bfs, stages_per_rank=None),
    "zb-h1": ScheduleEntry(zero_bubble_h1),
    "interleaved-zb": ScheduleEntry(interleaved_zero_bubble, stages_per_rank=None, rounds=True),
    "zbv": ScheduleEntry(zbv, stages_per_rank=2),
    "dualpipev": ScheduleEntry(dualpipev, stages_per_rank=2, least=2),
}


def in_halves(schedule: Schedule) -> bool:
    """Whether the gradients of weights are computed apart from those of inputs."""
    return any(action.kind == "W" for own in schedule for action in own)


def build(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of that name. stages_per_rank: by default as many as the schedule needs, 2 where it can be chosen.

    Raises UserError for an unknown name, and for numbers that do not fit the schedule.
    """
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule '{name}'; known: {', '.join(SCHEDULES)}")
    entry = SCHEDULES[name]
    stages = stages_per_rank if stages_per_rank is not None else entry.stages_per_rank or 2
    for what, number in [("ranks", ranks), ("micro-batches", microbatches), ("stages per rank", stages)]:
        if number < 1:
            raise UserError(f"a pipeline needs at least 1 of its {what}, not {number}")
    if entry.stages_per_rank is None and stages < 2:
        raise UserError(f"schedule '{name}' needs 2 or more stages per rank, not {stages}")
    if entry.stages_per_rank not in (None, stages):
        raise UserError(f"schedule '{name}' needs {entry.stages_per_rank} stage(s) per rank, not {stages}")
    if microbatches < entry.least * ranks:
        least = entry.least * ranks
        raise UserError(f"schedule '{name}' on {ranks} ranks needs {least} or more micro-batches, not {microbatches}")
    if entry.rounds and microbatches % (rounds := max(1, microbatches // ranks)):
        raise UserError(
            f"schedule '{name}' on {ranks} ranks cannot deal {microbatches} micro-batches out to {rounds} equal "
            f"rounds; take {microbatches // ranks * ranks} or {(microbatches // ranks + 1) * ranks}"
        )
    return entry.function(ranks, microbatches, *([stages] if entry.stages_per_rank is None else []))
