"""How a schedule runs: who does what when, how long ranks wait and what they have to remember, or why it never ends.

Time has no unit here: it is whatever the given times are in. With whole numbers or fractions results are exact.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

from common.errors import UserError
from course.pipeline.schedules import KINDS, Action, Schedule

MESSAGES = {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}


class IllegalSchedule(UserError):
    """A schedule that cannot run, or does not do the work of a step. Its text names the actions and the ranks;
    `so_far` is the timeline until it got stuck, None where it did not even begin."""

    def __init__(self, text: str, so_far: "Timeline | None" = None):
        super().__init__(text)
        self.so_far = so_far


@dataclass(frozen=True)
class Times:
    """How long actions take: one number for all stages, or a sequence with one per stage.

    forward, backward_input, backward_weight: more than 0; a whole backward takes the sum of the last two
    communication: from the end of an action until its result is on another rank, which keeps neither of them busy
    """

    forward: float | Sequence[float] = 1
    backward_input: float | Sequence[float] = 1
    backward_weight: float | Sequence[float] = 1
    communication: float = 0

    def per_stage(self, stages: int) -> dict[str, list]:
        """Kind of action -> how long it takes each stage. Raises UserError for times that cannot be."""
        times = {}
        for kind, name in [("F", "forward"), ("I", "backward_input"), ("W", "backward_weight")]:
            given = getattr(self, name)
            times[kind] = list(given) if isinstance(given, Sequence) else [given] * stages
            if len(times[kind]) != stages:
                raise UserError(
                    f"{name}: {len(times[kind])} times for {stages} stages; give one for each, or one number"
                )
            if min(times[kind]) <= 0:
                raise UserError(f"{name}: an action takes more than no time, not {min(times[kind])}")
        if self.communication < 0:
            raise UserError(f"communication: takes no less than no time, not {self.communication}")
        times["B"] = [sum(parts) for parts in zip(times["I"], times["W"], strict=True)]
        return times | {kind: [0] * stages for kind in KINDS if kind not in times}  # messages keep no rank busy


class Event(NamedTuple):
    """An action of a rank, and when it starts and ends."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """What each rank does when. `ranks` holds one list of events per rank; the first rank starts at time 0."""

    ranks: list[list[Event]]

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(events[-1].end for events in self.ranks if events)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, from 0 until the makespan."""
        busy = sum(event.end - event.start for events in self.ranks for event in events)
        return 1 - busy / (len(self.ranks) * self.makespan)

    def stored(self, rank: int) -> list[tuple[float, int]]:
        """(time, activations held from then on) at every change: one for each stage and micro-batch whose forward has
        begun and whose backward, weight part included, is not over. With several stages per rank one is smaller."""
        held, changes = 0, []
        for start, end, action in self.ranks[rank]:
            if action.kind in "FBW":
                held += 1 if action.kind == "F" else -1
                changes.append((start if action.kind == "F" else end, held))
        return changes

    @property
    def peaks(self) -> list[int]:
        """The most activations that each rank holds at once."""
        return [max((held for _, held in self.stored(rank)), default=0) for rank in range(len(self.ranks))]


def placement(schedule: Schedule) -> list[int]:
    """The rank of each stage. Raises IllegalSchedule where a stage is on two, or on none."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for rank, actions in enumerate(schedule):
        for stage in {action.stage for action in actions}:
            ranks[stage].add(rank)
    if not ranks:
        raise IllegalSchedule("the schedule is empty")
    for stage in range(max(ranks) + 1):
        if stage not in ranks:
            raise IllegalSchedule(f"missing: no rank has stage {stage}, and there is a stage {max(ranks)}")
        if len(ranks[stage]) > 1:
            raise IllegalSchedule(
                f"stage {stage} is on ranks {' and '.join(map(str, sorted(ranks[stage])))}, not on one"
            )
    return [min(ranks[stage]) for stage in range(max(ranks) + 1)]


def _check(schedule: Schedule, known: set[Action], stages: int):
    """Every stage does every micro-batch once forward and once backward, the latter either whole or in two parts."""
    if unknown := {action.kind for action in known} - KINDS.keys():
        raise IllegalSchedule(f"unknown: {min(unknown)} is no kind of action; there are {', '.join(KINDS)}")
    if negative := [action for action in known if action.stage < 0 or action.microbatch < 0]:
        raise IllegalSchedule(f"unknown: {min(negative)}: stages and micro-batches are counted from 0")
    if len(known) < sum(map(len, schedule)):
        counts = Counter(action for actions in schedule for action in actions)
        action, count = counts.most_common(1)[0]
        raise IllegalSchedule(f"twice: {action} comes {count} times")
    for stage, microbatch in product(range(stages), range(max(action.microbatch for action in known) + 1)):
        done = "".join(kind for kind in "FBIW" if (stage, kind, microbatch) in known)
        if done in ("FB", "FIW"):
            continue
        what = f"stage {stage} on micro-batch {microbatch}"
        if "B" in done and done != "B":
            raise IllegalSchedule(f"twice: {what} goes backward whole (B) and in parts (I, W)")
        lacks = "F" if "F" not in done else "W" if "I" in done else "I" if "W" in done else "B"
        raise IllegalSchedule(f"missing: {what} has no {KINDS[lacks]} ({lacks})")


def _needs(action: Action, known: set[Action], rank_of: list[int], messages: bool) -> list[Action]:
    """The actions that have to be over before this one can start, on its own rank or another."""
    stage, kind, microbatch = action
    if kind == "F":
        needs, source, direction = [], stage - 1, "F"
    elif kind in "BI":
        needs, source, direction = [Action(stage, "F", microbatch)], stage + 1, "B"
    elif kind == "W":
        return [Action(stage, "I", microbatch)]
    elif kind == "SEND_F":
        return [Action(stage, "F", microbatch)]
    elif kind == "SEND_B":
        return [Action(stage, "B" if (stage, "B", microbatch) in known else "I", microbatch)]
    else:
        return []
    if 0 <= source < len(rank_of):
        if messages and rank_of[source] != rank_of[stage]:
            needs += [Action(stage, f"RECV_{direction}", microbatch), Action(source, f"SEND_{direction}", microbatch)]
        elif direction == "B" and (source, "B", microbatch) not in known:
            needs.append(Action(source, "I", microbatch))
        else:
            needs.append(Action(source, direction, microbatch))
    return needs


def _check_messages(schedule: Schedule, rank_of: list[int]):
    """Each message joins neighbouring stages on two ranks. All that a rank sends another come in one order on both, and
    ranks do not wait for each other's messages in a circle.

    What has one sender and one receiver is matched by its order alone. Messages with no computing action between them
    are started together (batch_isend_irecv); there it does not matter whether the sends or the receives come first. But
    NCCL starts a rank's next batch of messages when all of the one before have passed.
    """
    together = [groupby(actions, lambda action: action.kind in MESSAGES) for actions in schedule]
    batches = [deque(set(batch) for are_messages, batch in own if are_messages) for own in together]
    # (from rank, to rank, as which rank has them) -> the sends
    between: dict[tuple[int, int, int], list[Action]] = defaultdict(list)
    there = {action for own in batches for batch in own for action in batch}
    for rank, actions in enumerate(schedule):
        for action in (action for action in actions if action.kind in MESSAGES):
            other = counterpart(action)
            if not 0 <= other.stage < len(rank_of) or rank_of[other.stage] == rank:
                raise IllegalSchedule(
                    f"no message: {action} on rank {rank}, but no other rank has a stage {other.stage}"
                )
            send, receive = (action, other) if action.kind.startswith("SEND") else (other, action)
            if other not in there:
                raise IllegalSchedule(f"missing: of {send} and its receive only one is there")
            between[rank_of[send.stage], rank_of[receive.stage], rank].append(send)
    for (source, to, rank), sends in between.items():
        for number, (a, b) in enumerate(zip(sends, between[source, to, source + to - rank], strict=True)):
            if a != b:
                raise IllegalSchedule(
                    f"mixed up: message {number} from rank {source} to rank {to} is {a} for rank {rank}, but {b} for "
                    f"rank {source + to - rank}"
                )
    while True:
        started = {action for own in batches if own for action in own[0]}
        passed = {action for action in started if counterpart(action) in started}
        if not passed:
            break
        for own in batches:
            if own:
                own[0] -= passed
                if not own[0]:
                    own.popleft()
    waiting = {rank: min(a for a in own[0] if counterpart(a) not in started) for rank, own in enumerate(batches) if own}
    if waiting:
        raise IllegalSchedule(_circle({rank: counterpart(at) for rank, at in waiting.items()}, waiting, rank_of))


def counterpart(action: Action) -> Action:
    """The receive of a send, the send of a receive."""
    stage, kind, microbatch = action
    peer = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
    return Action(peer, ("RECV_" if kind.startswith("SEND") else "SEND_") + kind[-1], microbatch)


def simulate(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Run a schedule, with or without messages. Every action starts as soon as its rank is free and its input there.

    A send starts the message and a receive makes room for it; neither takes time, and only the action that uses the
    message waits for it. Raises IllegalSchedule, and UserError for times that do not fit.
    """
    rank_of = placement(schedule)
    known = {action for actions in schedule for action in actions}
    _check(schedule, known, len(rank_of))
    if messages := any(action.kind in MESSAGES for action in known):
        _check_messages(schedule, rank_of)
    times = times or Times()
    lasts = times.per_stage(len(rank_of))
    events: list[list[Event]] = [[] for _ in schedule]
    ended: dict[Action, float] = {}
    sleepers: dict[Action, int] = {}  # action -> the rank that waits for it
    runnable = list(range(len(schedule)))
    while runnable:
        rank = runnable.pop()
        actions, done = schedule[rank], events[rank]
        clock = done[-1].end if done else 0
        for index in range(len(done), len(actions)):
            action = actions[index]
            needs = _needs(action, known, rank_of, messages)
            if open_needs := [need for need in needs if need not in ended]:
                need = open_needs[0]
                if need not in known:
                    raise IllegalSchedule(f"missing: {need}, which {action} on rank {rank} needs", Timeline(events))
                if rank_of[need.stage] == rank:
                    raise IllegalSchedule(f"wrong order: rank {rank} does {action} before {need}", Timeline(events))
                sleepers[need] = rank
                break
            start = clock
            for need in needs:
                start = max(start, ended[need] + (0 if rank_of[need.stage] == rank else times.communication))
            clock = ended[action] = start + lasts[action.kind][action.stage]
            done.append(Event(start, clock, action))
            if action in sleepers:
                runnable.append(sleepers.pop(action))
    if sleepers:
        waits_for = {rank: need for need, rank in sleepers.items()}
        at = {rank: schedule[rank][len(events[rank])] for rank in waits_for}
        raise IllegalSchedule(_circle(waits_for, at, rank_of), Timeline(events))
    return Timeline(events)


def rows(timeline: Timeline) -> str:
    """The timeline as text: a row per rank, a cell for each stretch of time as long as the shortest action. A longer
    action goes on as dashes, dots are idle, and a number at the end says how many activations the rank stores at most.
    """
    events = [event for events in timeline.ranks for event in events if event.end > event.start]
    unit = min((event.end - event.start for event in events), default=1)
    several = any(len({event.action.stage for event in events}) > 1 for events in timeline.ranks)
    label = {action: str(action) if several else f"{action.kind}{action.microbatch}" for _, _, action in events}
    width = max(map(len, label.values()), default=1)
    lines = []
    for rank, own in enumerate(timeline.ranks):
        cells = [".".ljust(width)] * max((round(event.end / unit) for event in events), default=0)
        for start, end, action in own:
            for cell in range(round(start / unit), round(end / unit)):
                cells[cell] = "-" * width if cell > round(start / unit) else label[action].ljust(width)
        lines.append(f"rank {rank}  {' '.join(cells)}  {timeline.peaks[rank]} stored")
    return "\n".join(lines)


def _circle(needs: dict[int, Action], at: dict[int, Action], rank_of: list[int]) -> str:
    """Who waits for whom: every waiting rank waits for another that waits, so following them leads into a circle.

    needs: what each rank waits for; at: with which action
    """
    rank, seen = min(needs), []
    while rank not in seen:
        seen.append(rank)
        rank = rank_of[needs[rank].stage]
    circle = seen[seen.index(rank) :]
    first = circle.index(min(circle))
    lines = []
    for rank in circle[first:] + circle[:first]:
        lines.append(f"rank {rank} waits at {at[rank]} for {needs[rank]} of rank {rank_of[needs[rank].stage]}")
    return f"deadlock: {'; '.join(lines)}"


def with_messages(schedule: Schedule, times: Times | None = None) -> Schedule:
    """The schedule with its sends and receives, placed where they happen when actions take these times.

    A send follows the action whose result it carries; its receive stands on the other rank at the same point in time.
    So the lists of all ranks are parts of one common order in which each message is a single event. Whoever follows
    them cannot deadlock: not where messages are matched by their order (NCCL), nor even where a send returns only
    when it is received. To lose no time, start both without waiting and wait where the message is used.

    Messages that are there already are placed anew. Raises what simulate raises.
    """
    schedule = [[action for action in actions if action.kind not in MESSAGES] for actions in schedule]
    rank_of = placement(schedule)
    order: list[list[tuple[tuple, Action]]] = [[] for _ in schedule]  # on each rank: (time, message before action)
    for rank, events in enumerate(simulate(schedule, times).ranks):
        for start, end, action in events:
            order[rank].append(((start, 1), action))
            stage, kind, microbatch = action
            direction, receiver = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
            if kind == "W" or not 0 <= receiver < len(rank_of) or rank_of[receiver] == rank:
                continue
            when = (end, 0, stage, direction, microbatch)  # on both ranks the same, for messages at the same time too
            order[rank].append((when, Action(stage, f"SEND_{direction}", microbatch)))
            order[rank_of[receiver]].append((when, Action(receiver, f"RECV_{direction}", microbatch)))
    return [[action for _, action in sorted(actions)] for actions in order]
