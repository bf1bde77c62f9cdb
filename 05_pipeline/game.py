"""The rules of the schedule game: place the actions of a pipeline one after the other, and see who waits for what.

A level says how many ranks, stages and micro-batches there are, whether the backward pass is cut in two, and how many
activations a rank may store. What is drawn is a schedule as in schedules.py, and simulator.py judges it when it is
whole. Here is what a game needs besides: schedules that are not finished, what may come next, and why a rank is idle.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from course.pipeline import schedules, simulator
from course.pipeline.schedules import Action, Schedule

STORED = Path(__file__).with_name("levels.json")  # what fastest.py has found
TIMES = simulator.Times(1, 1, 1)  # a forward takes one unit, and so does each half of a backward


@dataclass(frozen=True)
class Level:
    """What is to be done.

    stages: of a rank; with two they lie in a V where `v` is set, else in a loop
    split:  backward in two parts, I and W, in place of B
    most:   activations that a rank may store, None: any number
    gathers: how often a rank may gather the parameters of a stage, where they are sharded over other ranks (FSDP beside
             the pipeline) and there is room for one stage's at a time; None: they aren't sharded
    """

    name: str
    ranks: int
    microbatches: int
    stages: int = 1
    v: bool = False
    split: bool = False
    most: int | None = None
    gathers: int | None = None
    hint: str = ""

    @property
    def rank_of(self) -> list[int]:
        """The rank of each stage."""
        loop = [*range(self.ranks)] * self.stages
        return [*range(self.ranks), *reversed(range(self.ranks))] if self.v else loop

    @property
    def kinds(self) -> str:
        return "FIW" if self.split else "FB"

    def actions(self, rank: int) -> list[Action]:
        """All that this rank has to do."""
        own = [stage for stage, where in enumerate(self.rank_of) if where == rank]
        return [Action(stage, kind, m) for kind in self.kinds for stage in own for m in range(self.microbatches)]

    @property
    def par(self) -> int:
        """The shortest time that any schedule takes."""
        return stored()[self.name]["par"]


LEVELS = (
    Level("fill and drain", 2, 2, hint="Rank 1 can't begin before rank 0 hands on its first micro-batch."),
    Level("three ranks", 3, 3, hint="GPipe does all forwards first. Is any other order quicker?"),
    Level("no room", 2, 4, most=2, hint="GPipe would store four activations; 1F1B stores fewer and takes no longer."),
    Level("less than 1F1B", 3, 3, most=2, hint="1F1B's first rank stores three. What do two cost?"),
    Level("two halves", 2, 3, split=True, most=2, hint="Only I is waited for by others. Where does W do no harm?"),
    Level("zero bubble", 3, 3, split=True, most=3, hint="ZB-H1 moves weight gradients into the drain."),
    Level("a loop", 2, 2, stages=2, hint="Two smaller stages per rank: what is in flight comes round again."),
    Level("a V", 2, 3, stages=2, v=True, split=True, most=4, hint="Rank 0 has the first stage and the last one."),
    Level(
        "beside FSDP",
        2,
        4,
        stages=2,
        gathers=3,
        hint="Parameters are sharded, with room for one stage's at a time: who "
        "goes to the other stage gathers again. Interleaved 1F1B would gather 11 times.",
    ),
    Level(
        "gathers for memory",
        2,
        4,
        stages=2,
        gathers=5,
        most=5,
        hint="Breadth-first would store eight activations. "
        "With four gathers, five activations would cost nine units; with five?",
    ),
)


@cache
def stored() -> dict[str, dict]:
    """Level -> par, and a schedule that has it."""
    return json.loads(STORED.read_text())


def level(name: str) -> Level:
    found = next((one for one in LEVELS if one.name == name), None)
    if found is None:
        raise UserError(f"unknown level '{name}'; there are {', '.join(one.name for one in LEVELS)}")
    return found


class Gap(NamedTuple):
    """A time in which a rank does nothing, and why."""

    rank: int
    start: float
    end: float
    why: str


def needs(game: Level, action: Action) -> list[Action]:
    """What has to be over before an action can start, nearest first."""
    stage, kind, m = action
    back = "I" if game.split else "B"
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Action(stage, "I", m)]
    after = [Action(stage + 1, back, m)] if stage + 1 < len(game.rank_of) else []
    return [*after, Action(stage, "F", m)]


def check_own(game: Level, lists: Schedule) -> None:
    """Raise UserError for what is no action of this level, on another rank than its stage, or there twice."""
    for rank, own in enumerate(lists):
        possible = game.actions(rank)
        for place, action in enumerate(own):
            if action not in possible:
                what = f"'{action}' is no action of rank {rank} in this level"
                raise UserError(f"{what}: it has {', '.join(map(str, possible[:: game.microbatches]))} and so on")
            if action in own[:place]:
                raise UserError(f"twice: {action} on rank {rank}")


def play(game: Level, lists: Schedule) -> simulator.Timeline:
    """When everything that is placed happens, of a schedule that need not be finished. Raises UserError, which names
    what is missing or the ranks that wait for each other, where an action can never start."""
    check_own(game, lists)
    if all(len(own) == len(game.actions(rank)) for rank, own in enumerate(lists)):
        return simulator.simulate(lists, TIMES)  # the judge of whole schedules names circles of waiting ranks
    lasts = TIMES.per_stage(len(game.rank_of))
    ended: dict[Action, float] = {}
    events: list[list[simulator.Event]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for own, done in zip(lists, events, strict=True):
            for action in own[len(done) :]:
                wanted = needs(game, action)
                if not all(need in ended for need in wanted):
                    break
                start = max([done[-1].end if done else 0, *(ended[need] for need in wanted)])
                ended[action] = start + lasts[action.kind][action.stage]
                done.append(simulator.Event(start, ended[action], action))
                moved = True
    placed = {action for own in lists for action in own}
    for rank, (own, done) in enumerate(zip(lists, events, strict=True)):
        if len(done) < len(own):
            need = next(need for need in needs(game, own[len(done)]) if need not in ended)
            there = "comes too late" if need in placed else "is placed nowhere"
            raise UserError(f"rank {rank} waits at {own[len(done)]} for {need} of rank {game.rank_of[need.stage]}, "
                            f"which {there}")  # fmt: skip
    return simulator.Timeline(events)


def held(game: Level, own: Sequence[Action]) -> int:
    """The activations that a rank stores after these actions."""
    last = "W" if game.split else "B"
    return sum((action.kind == "F") - (action.kind == last) for action in own)


def gathered(own: Sequence[Action]) -> int:
    """How often a rank gathers parameters for these actions: once for each run of actions of one stage."""
    return sum(not place or own[place - 1].stage != action.stage for place, action in enumerate(own))


def ready(game: Level, lists: Schedule) -> list[dict[Action, str]]:
    """For each rank what it has not done: action -> why it can't come next; "" where it can."""
    placed = {action for own in lists for action in own}
    found = []
    for rank, own in enumerate(lists):
        full = game.most is not None and held(game, own) >= game.most
        why = {}
        for action in game.actions(rank):
            if action in placed:
                continue
            missing = [need for need in needs(game, action) if need not in placed]
            why[action] = ""
            if missing:
                why[action] = f"needs {missing[0]} of rank {game.rank_of[missing[0].stage]}"
            elif action.kind == "F" and full:
                why[action] = f"rank {rank} stores {game.most}, and may not store more"
            elif game.gathers is not None and gathered([*own, action]) > game.gathers:
                why[action] = f"rank {rank} has gathered parameters {game.gathers} times, and may not gather more"
        found.append(why)
    return found


def idle(game: Level, timeline: simulator.Timeline, until: float) -> list[Gap]:
    """Every time in which a rank waits, until its end, and for what."""
    ended = {event.action: event.end for own in timeline.ranks for event in own}
    can = ready(game, [[event.action for event in own] for own in timeline.ranks])
    found = []
    for rank, own in enumerate(timeline.ranks):
        clock = 0.0
        for start, end, action in own:
            if start > clock:
                need = max(needs(game, action), key=lambda one: ended[one])
                other = game.rank_of[need.stage]
                found.append(Gap(rank, clock, start, f"{action} waits for {need} of rank {other}, over at {start:g}"))
            clock = end
        if clock < until:
            free = [str(action) for action, why in can[rank].items() if not why]
            closed = next((f"{action}: {why}" for action, why in can[rank].items()), "it has done all of its work")
            found.append(Gap(rank, clock, until, f"{free[0]} could come now" if free else closed))
    return found


def renumbered(lists: Schedule) -> Schedule:
    """The schedule with its micro-batches numbered as the first rank begins them, which changes nothing."""
    order = list(dict.fromkeys(action.microbatch for own in lists for action in own))
    return [[action._replace(microbatch=order.index(action.microbatch)) for action in own] for own in lists]


def allowed(game: Level, lists: Schedule) -> bool:
    """Whether a whole schedule keeps to the level: its kinds of actions, what a rank may store, and its gathers."""
    if any(action.kind not in game.kinds for own in lists for action in own):
        return False
    often = game.gathers is not None and max(map(gathered, lists)) > game.gathers
    return not often and (game.most is None or max(simulator.simulate(lists, TIMES).peaks) <= game.most)


@cache
def named(game: Level) -> dict[str, Schedule]:
    """The schedules with a name that keep to the level."""
    found = {}
    for name in schedules.SCHEDULES:
        try:
            lists = schedules.build(name, game.ranks, game.microbatches, game.stages)
        except UserError:
            continue
        if simulator.placement(lists) == game.rank_of and allowed(game, lists):
            found[name] = renumbered(lists)
    return found


def names(game: Level, lists: Schedule) -> list[str]:
    """The named schedules of this level that begin like this one, or are this one where it is whole."""
    if not any(lists):
        return []
    ours = renumbered(lists)
    # the numbers that the first list gives are those of all lists
    return [name for name, known in named(game).items()
            if all(own == theirs[: len(own)] for own, theirs in zip(ours, known, strict=True))]  # fmt: skip


def judge(game: Level, lists: Schedule) -> dict:
    """What the page shows of a position, as numbers and text: the timeline, what may come next, who waits for what,
    and of a whole schedule how it compares with par. `wrong` says why the lists cannot be played, "" where they can."""
    lists = [*lists, *([] for _ in range(game.ranks - len(lists)))]
    wrong, timeline = "", simulator.Timeline([[] for _ in lists])
    try:
        timeline = play(game, lists)
        over = [rank for rank, most in enumerate(timeline.peaks) if game.most is not None and most > game.most]
        if over:
            wrong = f"rank {over[0]} stores {timeline.peaks[over[0]]} activations, and may store {game.most}"
        often = [rank for rank, own in enumerate(lists) if game.gathers is not None and gathered(own) > game.gathers]
        if often:
            wrong = f"rank {often[0]} gathers {gathered(lists[often[0]])} times, and may gather {game.gathers} times"
    except UserError as error:
        wrong = str(error)
    whole = not wrong and not any(ready(game, lists))
    end = max((own[-1].end for own in timeline.ranks if own), default=0)
    return {
        "level": game.name, "lists": [" ".join(map(str, own)) for own in lists], "wrong": wrong, "whole": whole,
        "events": [[(start, end, str(action)) for start, end, action in own] for own in timeline.ranks],
        "gathered": [gathered(own) for own in lists], "makespan": end, "par": game.par, "stored": timeline.peaks,
        "names": names(game, lists),
        "bubble": timeline.bubble if whole else None,
        "idle": [tuple(one) for one in idle(game, timeline, max(end, game.par))] if not wrong else [],
        "ready": [{str(action): why for action, why in own.items()} for own in ready(game, lists)],
    }  # fmt: skip
