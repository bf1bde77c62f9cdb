"""How quick a schedule can be: every schedule of a level of the game is looked at, and the shortest time is stored.

    python -m course.pipeline.fastest

Time goes in units, and in each of them a rank begins one of the actions that are possible, or none. Micro-batches are
interchangeable, so what counts is how many of them have come how far, which leaves few enough positions to go through
all. A position is given up where what is left of one rank's work, or of one micro-batch's way, is longer than the time.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from common.errors import Parser
from course.pipeline.game import LEVELS, STORED, Level
from course.pipeline.schedules import Action, Schedule

Way = tuple[int, int]  # units that a micro-batch has gone along all stages and back; bits of the stages whose W is done
Position = tuple[Way, ...]
Loads = tuple[tuple[int, int], ...]  # of each rank: the stage whose parameters are there (-1: none), gathers so far


class Search:
    def __init__(self, game: Level):
        self.game, self.rank_of, self.stages = game, game.rank_of, len(game.rank_of)
        self.back = 1 if game.split else 2  # units of a backward on the way
        self.length = self.stages * (1 + self.back)
        self.failed: set[tuple[Position, int, Loads]] = set()

    def next_stage(self, gone: int) -> int:
        """The stage at which a micro-batch is that has gone so many units."""
        return gone if gone < self.stages else self.stages - 1 - (gone - self.stages) // self.back

    def halfway(self, gone: int) -> bool:
        return not self.game.split and gone > self.stages and (gone - self.stages) % 2 == 1

    def stored(self, position: Position, rank: int) -> int:
        """Activations on a rank: forward done, and the backward, weight part included, not."""
        count = 0
        for gone, weights in position:
            for stage in range(min(gone, self.stages)):
                turns = self.stages + self.back * (self.stages - stage)  # units after which it has gone back here
                over = weights >> stage & 1 if self.game.split else gone >= turns
                count += self.rank_of[stage] == rank and not over
        return count

    def stage_of(self, before: Way, after: Way) -> int:
        """The stage whose action makes this of that."""
        return self.next_stage(before[0]) if after[0] != before[0] else (before[1] ^ after[1]).bit_length() - 1

    def loaded(self, loads: Loads, position: Position, moves) -> Loads | None:
        """What ranks have gathered after these moves; None where one may not gather so often."""
        if self.game.gathers is None:
            return loads
        found = list(loads)
        for rank, at, way in moves:
            stage = self.stage_of(position[at], way)
            if found[rank][0] != stage:
                found[rank] = stage, found[rank][1] + 1
        return None if any(often > self.game.gathers for _, often in found) else tuple(found)

    def moves(self, position: Position, rank: int) -> list[tuple[int, Way] | None]:
        """What a rank can do in the next unit: (place of a micro-batch, how far it is then), or None for nothing."""
        found: list[tuple[int, Way] | None] = []
        full = self.game.most is not None and self.stored(position, rank) >= self.game.most
        for place, (gone, weights) in enumerate(position):
            if place and position[place - 1] == (gone, weights):
                continue  # just like the one before
            if gone < self.length and self.rank_of[self.next_stage(gone)] == rank:
                if self.halfway(gone):
                    return [(place, (gone + 1, weights))]  # a backward that has begun goes on
                if gone >= self.stages or not full:
                    found.append((place, (gone + 1, weights)))
            if self.game.split:
                for stage in range(self.stages):
                    came_back = gone >= 2 * self.stages - stage
                    if came_back and self.rank_of[stage] == rank and not weights >> stage & 1:
                        found.append((place, (gone, weights | 1 << stage)))
        return [*found, None]

    def least(self, position: Position) -> int:
        """No schedule ends earlier than in so many units."""
        work = [0] * self.game.ranks
        way = 0
        for gone, weights in position:
            for unit in range(gone, self.length):
                work[self.rank_of[self.next_stage(unit)]] += 1
            if self.game.split:
                for stage in range(self.stages):
                    work[self.rank_of[stage]] += not weights >> stage & 1
            left = self.length - gone
            way = max(way, left + (self.game.split and left > 0))  # the first stage's W comes after its I
        return max(*work, way)

    def within(self, position: Position, units: int, loads: Loads = ()) -> list[list[tuple[int, int, Way]]] | None:
        """What is done in each unit, as (rank, place of its micro-batch, how far that is then), with which all is over
        in time; None where nothing does it."""
        least = self.least(position)
        loads = loads or ((-1, 0),) * self.game.ranks
        if least == 0:
            return []
        if least > units or (position, units, loads) in self.failed:
            return None
        for chosen in product(*(self.moves(position, rank) for rank in range(self.game.ranks))):
            for moves in self.assigned(position, [(rank, *move) for rank, move in enumerate(chosen) if move]):
                then = self.loaded(loads, position, moves)
                if then is None:
                    continue
                rest = self.within(tuple(sorted(after(position, moves))), units - 1, then)
                if rest is not None:
                    return [moves, *rest]
        self.failed.add((position, units, loads))
        return None

    def assigned(self, position: Position, moves) -> Iterator[list[tuple[int, int, Way]]]:
        """The moves of a unit, with every choice of which of those that are alike is meant by each: two ranks may
        work at one micro-batch (its way, and weight gradients of other stages) or at two."""
        alike = [[place for place, way in enumerate(position) if way == position[at]] for _, at, _ in moves]
        for places in product(*alike):
            on_the_way = [at for at, (_, _, way) in zip(places, moves, strict=True) if way[0] != position[at][0]]
            if moves and len(on_the_way) == len({*on_the_way}):
                yield [(rank, at, way) for at, (rank, _, way) in zip(places, moves, strict=True)]


def after(position: Position, moves) -> list[Way]:
    """Where micro-batches are after a unit, in the same order."""
    ways = list(position)
    for _, at, (gone, weights) in moves:
        ways[at] = max(ways[at][0], gone), ways[at][1] | weights
    return ways


def fastest(game: Level) -> tuple[int, Schedule]:
    """The shortest time of a level, and a schedule that has it."""
    start: Position = ((0, 0),) * game.microbatches
    search = Search(game)
    units = search.least(start)
    while (found := search.within(start, units)) is None:
        units += 1
    return units, lists_of(search, start, found)


def lists_of(search: Search, position: Position, units) -> Schedule:
    """The moves as actions. Positions are sorted, so which micro-batch is where is followed through them."""
    lists: Schedule = [[] for _ in range(search.game.ranks)]
    numbers = list(range(len(position)))
    for moves in units:
        for rank, at, (gone, weights) in moves:
            before = position[at]
            if gone == before[0]:
                lists[rank].append(Action(search.stage_of(before, (gone, weights)), "W", numbers[at]))
            elif not search.halfway(before[0]):
                kind = "F" if before[0] < search.stages else "I" if search.game.split else "B"
                lists[rank].append(Action(search.next_stage(before[0]), kind, numbers[at]))
        ways = after(position, moves)
        order = sorted(range(len(ways)), key=ways.__getitem__)
        position, numbers = tuple(ways[at] for at in order), [numbers[at] for at in order]
    return lists


def main() -> None:
    Parser("python -m course.pipeline.fastest", description=__doc__.partition("\n")[0]).asked()
    found: dict[str, Any] = {}
    for game in LEVELS:
        par, lists = fastest(game)
        found[game.name] = {"par": par, "lists": [" ".join(map(str, own)) for own in lists]}
        print(f"{game.name}: {par}")
    STORED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
