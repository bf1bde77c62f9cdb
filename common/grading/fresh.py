"""Cases that no submission has seen, for the grading of a class: an answer that is made for the known inputs fails.

What is expected of them is what the chapter's own solution answers, which runs here and not in the sandbox. An
exercise says in its row how they are drawn (`draw`, `draw_cases`). Every other one has tensors among its arguments: one
of its cases for each world size is repeated with every element of them multiplied by a number of its own.
"""

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from common.grading.engine import SIZES, Exercise, ExerciseCase, run_jobs
from common.grading.patterns import nothing_sent

DRAWN = 3  # calls of an exercise that calculates
FACTORS = (1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)  # few bits: sums that were exact stay exact


class NoSolution(Exception):
    """The chapter's solution does not answer a fresh case; the text says which."""


def multiplied(value, seed: int):
    """All tensors of floating-point numbers in an argument, each element times a factor of its own; everything else as
    it is. Tensors that were equal stay equal, as where all ranks have the same weights."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value
        content = repr((value.dtype, value.shape, value.detach().double().flatten().tolist()))
        drawn = torch.Generator().manual_seed(zlib.crc32(content.encode(), seed))
        factors = torch.tensor(FACTORS)[torch.randint(len(FACTORS), value.shape, generator=drawn)]
        return value * factors.to(value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(multiplied(item, seed) for item in value)
    return value


def largest(value) -> float:
    """The largest finite element of all tensors in an argument, 0 where there is none."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().abs().nan_to_num(0, 0, 0).max().item() if value.numel() else 0.0
    return max(map(largest, value), default=0.0) if isinstance(value, (list, tuple)) else 0.0


def can_be_varied(case: ExerciseCase) -> bool:
    """Whether other numbers change what is expected: there are some, and they are far from overflowing."""
    return 0 < largest(case.arguments) < 1e30 and not any(map(callable, case.expected))


def with_fresh_cases(exercises: list[Exercise], solutions: Path, seed: int) -> list[Exercise]:
    """The exercises, each of which has cases drawn with `seed` after its known ones. Raises NoSolution."""
    drawn = random.Random(seed)
    fresh: dict[tuple[str, int], list[ExerciseCase]] = {}
    for size in SIZES:
        asked: dict[str, list[ExerciseCase]] = {}
        for exercise in exercises:
            name = exercise.name
            if exercise.draw_cases:
                fresh[name, size] = list(exercise.draw_cases(drawn, size))
            elif exercise.draw:
                calls = [exercise.draw(drawn) for _ in range(DRAWN * (size == 2))]
                asked[name] = [ExerciseCase("other numbers", [call] * size, [], nothing_sent) for call in calls]
            elif known := [case for case in exercise.check(size) if can_be_varied(case)]:
                case, seed = drawn.choice(known), drawn.getrandbits(32)
                asked[name] = [replace(case, what=f"{case.what}, other numbers",
                                       arguments=[multiplied(own, seed) for own in case.arguments])]  # fmt: skip
        fresh |= {(name, size): found for name, found in answered(asked, solutions, size)}
    return [replace(exercise, check=all_cases(exercise, fresh)) for exercise in exercises]


def answered(asked: dict[str, list[ExerciseCase]], solutions: Path, size: int):
    """The cases of each exercise with what the solution answers as what is expected."""
    asked = {name: cases for name, cases in asked.items() if cases}
    jobs = {name: (name, [case.arguments for case in cases]) for name, cases in asked.items()}
    outcomes = run_jobs(solutions, jobs, size)
    for name, cases in asked.items():
        ranks = outcomes[name]
        if isinstance(ranks, str):
            raise NoSolution(f"{name} on {size} ranks: {ranks}")
        for number, rank in enumerate(ranks):
            if len(rank) < len(cases) or rank[-1].status != "returned":
                why = rank[-1].text if rank else "no answer"
                raise NoSolution(f"{name} on {size} ranks, rank {number}: {why}")
        yield (
            name,
            [replace(case, expected=[rank[number].value for rank in ranks]) for number, case in enumerate(cases)],
        )


def all_cases(exercise: Exercise, fresh: dict[tuple[str, int], list[ExerciseCase]]) -> Callable:
    def check(size: int) -> Iterable[ExerciseCase]:
        yield from exercise.check(size)
        yield from fresh.get((exercise.name, size), ())

    return check
