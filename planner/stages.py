"""Which stage of a pipeline has which layers, when it works, and what it stores: asked of chapter 05's simulator."""

import math
from functools import lru_cache

from course.pipeline import schedules, simulator
from planner.layout import Layout, rounds
from planner.models import Model


@lru_cache(maxsize=10_000)
def layers_of_stages(layers: int, stages: int, ends: bool = False) -> tuple[int, ...]:
    """Layers of each stage. Where they do not divide, the first and the last, which have the embedding and the head
    besides, have fewer (as with Llama 3: Grattafiori et al. 2024, section 3.3.2).

    ends: these two count as a layer each, and have a stage for themselves where each stage has one
    """
    if ends:
        first, *inner, last = layers_of_stages(layers + 2, stages)
        return (first - 1, *inner, last - 1)
    least, rest = divmod(layers, stages)
    counts = [least] * stages
    inner = list(range(1, stages - 1)) + [0, stages - 1]
    for stage in inner[:rest]:
        counts[stage] += 1
    return tuple(counts)


@lru_cache(maxsize=4_000)
def _run(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int, forward: tuple, backward: tuple, send):
    entry = schedules.SCHEDULES[schedule]
    fixed = entry.stages_per_rank == stages_per_rank
    actions = schedules.build(schedule, ranks, micro_batches, None if fixed else stages_per_rank)
    halves = [b / 2 for b in backward]
    return simulator.simulate(actions, simulator.Times(list(forward), halves, halves, send))


def makespan(
    layout: Layout, forward: list[float], backward: list[float], send: float, quick: bool = False
) -> tuple[float, float]:
    """(seconds from the first action to the last, seconds of work of the busiest rank), of a step of all micro-batches.

    forward, backward: seconds of one micro-batch by stage; send: of a message to the next stage

    A schedule repeats itself once it is under way, so a long one is run for two shorter numbers of micro-batches, and
    continued in a straight line (test_planner_time.py compares both). quick: as if all stages took as long as
    the mean of the busiest rank's, with twice that backward.
    """
    if layout.pipeline == 1:
        total = layout.micro_batches * (sum(forward) + sum(backward))
        return total, total
    unit = max(forward)
    # A stage with the embedding alone takes next to no time; for the simulator an action takes some.
    scaled = [tuple(max(0.01, round(time / unit, 2)) for time in times) for times in (forward, backward)]
    if quick:
        ranks = [stages_of(layout, rank) for rank in range(layout.pipeline)]
        unit = max(sum(forward[stage] + backward[stage] for stage in own) / len(own) for own in ranks) / 3
        scaled = [(1,) * len(forward), (2,) * len(forward)]
    wait, many, enough = round(send / unit, 2), layout.micro_batches, rounds(layout)
    if quick and wait:  # to half an octave, so that many layouts share a run of the simulator
        wait = 2 ** (round(2 * math.log2(wait)) / 2) if wait > 0.03 else 0

    def run(number):
        return _run(layout.schedule, layout.pipeline, number, layout.stages_per_rank, *scaled, wait)

    long = run(enough)
    ends = long.makespan
    if enough < many:
        fewer = enough - layout.pipeline
        ends += (ends - run(fewer).makespan) / (enough - fewer) * (many - enough)
    work = max(sum(event.end - event.start for event in events) for events in long.ranks) / enough * many
    return ends * unit, work * unit


@lru_cache(maxsize=10_000)
def stored(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int) -> tuple[int, ...]:
    """The most activations, each of one stage and micro-batch, that each rank holds at once."""
    if ranks == 1:
        return (1,)
    ones = (1,) * (ranks * stages_per_rank)
    return tuple(_run(schedule, ranks, micro_batches, stages_per_rank, ones, (2,) * len(ones), 0).peaks)


def stages_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """The stages on a rank of the pipeline."""
    return _owned(layout.schedule, layout.pipeline, layout.stages_per_rank)[rank]


@lru_cache(maxsize=10_000)
def _owned(schedule: str, ranks: int, stages_per_rank: int) -> tuple[tuple[int, ...], ...]:
    if schedule in ("zbv", "dualpipev") and ranks > 1:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(rank + ranks * chunk for chunk in range(stages_per_rank)) for rank in range(ranks))


def held(layout: Layout) -> tuple[int, ...]:
    """The most activations, each of one stage and micro-batch, that each rank of the pipeline holds at once. Some
    schedules hold more, the more micro-batches there are: a long one is continued in a straight line here too."""
    many, enough = layout.micro_batches, rounds(layout)

    def run(number):
        return stored(layout.schedule, layout.pipeline, number, layout.stages_per_rank)

    if enough == many:
        return run(many)
    fewer = enough - layout.pipeline
    more = (many - enough) // layout.pipeline
    return tuple(a + (a - b) * more for a, b in zip(run(enough), run(fewer), strict=True))


def shares(model: Model, layout: Layout) -> tuple[tuple[int, bool, bool], ...]:
    """For each rank of the pipeline: its layers, whether it has the embedding, whether it has the head."""
    return _shares(model.layers, layout.schedule, layout.pipeline, layout.stages_per_rank, layout.ends)


@lru_cache(maxsize=10_000)
def _shares(
    layers: int, schedule: str, ranks: int, stages_per_rank: int, ends: bool
) -> tuple[tuple[int, bool, bool], ...]:
    counts, found = layers_of_stages(layers, ranks * stages_per_rank, ends), []
    for own in _owned(schedule, ranks, stages_per_rank):
        found.append((sum(counts[stage] for stage in own), 0 in own, len(counts) - 1 in own))
    return tuple(found)
