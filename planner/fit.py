"""The few constants, fitted on published runs: on half of the sources, so that they can be judged on the others."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from planner import time
from planner.constants import FITTED, PRIOR, Constants
from planner.published import Run
from planner.scope import SEEN

# A constant goes no further than data sheets and published profiles allow.
BOUNDS = {
    "matmul": (0.6, 1.0), "passes": (0.5, 5.0), "eager": (1.0, 3.0), "attention": (0.5, 1.6), "fp8": (1.1, 1.9),
    "link": (0.5, 0.95), "network": (0.3, 0.95), "async_kept": (0.2, 1.0), "ring": (0.05, 1.2),
    "ring_alpha": (0.3, 3.0), "host": (2e-4, 2e-3), "host_moe": (3e-4, 6e-3), "dispatch": (1.0, 40.0),
    "fast_attention": (1.2, 2.2),
}  # fmt: skip
PULL = 0.1  # towards the prior: what the runs say little about stays there (0.1 to 1 predict the other half alike)
MOST = 10  # runs of a source that a fit looks at, evenly spread over its table
SOFT = 0.05  # errors smaller than this count by their squares, larger ones by their sizes: outliers do not decide


def seconds(run: Run, constants: Constants, quick: bool = False) -> float:
    return time.estimate(run.model, run.cluster, run.layout, constants, quick).seconds


def project(source: str) -> str:
    """Who measured: the first word of a source. Reports of one project are no independent sources."""
    return source.split()[0]


def fitted_on(run: Run) -> bool:
    """Runs with adapters, and on GPUs of which there are few runs, are predicted only: they check what has been fitted
    on trainings of all parameters."""
    return bool(run.seconds) and not run.layout.lora and run.cluster.gpu.name in SEEN


def halves(runs: Iterable[Run]) -> tuple[set[str], set[str]]:
    """Projects that constants are fitted on, in alphabetical order, one to the one half and the next to the other."""
    names = sorted({project(run.source) for run in runs if fitted_on(run)}, key=str.lower)
    return set(names[::2]), set(names[1::2])


def some(runs: Iterable[Run], most: int = MOST) -> list[Run]:
    """At most so many of each source, evenly spread over its table."""
    by_source = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    found = []
    for own in by_source.values():
        step = max(1.0, len(own) / most)
        found += [own[int(place * step)] for place in range(min(most, len(own)))]
    return found


def loss(runs: Iterable[Run], constants: Constants) -> float:
    """Mean over projects of the mean size of the logarithm of predicted over measured time; and the pull to the
    prior."""
    by_project = defaultdict(list)
    for run in runs:
        if run.seconds:
            error = math.log(seconds(run, constants, quick=True) / run.seconds)
            by_project[project(run.source)].append(math.sqrt(error**2 + SOFT**2) - SOFT)
    far = sum(math.log(getattr(constants, name) / getattr(PRIOR, name)) ** 2 for name in FITTED)
    means = [sum(errors) / len(errors) for errors in by_project.values()]
    return sum(means) / len(means) + PULL * far / len(FITTED)


def fit(runs: list[Run], start: Constants = PRIOR, rounds: int = 3) -> Constants:
    """Constants that fit these runs best: the logarithms of all times are taken for linear in those of the constants,
    round by round, which is a least-squares problem for each weighting of the errors."""
    best, least = start, loss(runs, start)
    for _ in range(rounds):
        step = towards(runs, best)
        for part in (1.0, 0.5, 0.25):
            tried = changed(best, {name: part * change for name, change in step.items()})
            if (now := loss(runs, tried)) < least:
                best, least = tried, now
                break
        else:
            break
    return best


def changed(constants: Constants, by: dict[str, float]) -> Constants:
    """The constants, with the logarithms of some changed by these, within their bounds."""
    values: dict[str, Any] = {name: within(name, getattr(constants, name) * math.exp(x)) for name, x in by.items()}
    return replace(constants, **values)


def within(name: str, value: float) -> float:
    low, high = BOUNDS[name]
    return min(high, max(low, value))


def towards(runs: list[Run], at: Constants, nudge: float = 0.1) -> dict[str, float]:
    """By how much the logarithm of each constant should change: to where `loss` is least if each run's error is linear
    in them. Those that reach a bound stay there, and the others are found anew."""
    import numpy as np  # which a browser lacks, where nothing is fitted

    def errors(constants):
        return np.array([math.log(seconds(run, constants, quick=True) / run.seconds) for run in runs if run.seconds])

    number: dict[str, int] = defaultdict(int)
    for run in runs:
        number[project(run.source)] += 1
    weights = np.array([1 / number[project(run.source)] for run in runs]) / len(number)
    here, slopes = errors(at), []
    for name in FITTED:
        moved = changed(at, {name: nudge})
        if getattr(moved, name) < getattr(at, name) * math.exp(nudge / 2):  # at its bound
            moved = changed(at, {name: -nudge})
        change = math.log(getattr(moved, name) / getattr(at, name))
        slopes.append((errors(moved) - here) / change)
    slope = np.array(slopes).T
    from_prior = np.array([math.log(getattr(at, name) / getattr(PRIOR, name)) for name in FITTED])
    low, high = (np.array([math.log(BOUNDS[name][side] / getattr(at, name)) for name in FITTED]) for side in (0, 1))
    pull, found = 2 * PULL / len(FITTED), np.zeros(len(FITTED))
    for _ in range(30):
        error = here + slope @ found
        weight = weights / np.sqrt(error**2 + SOFT**2)
        square = (slope * weight[:, None]).T @ slope + pull * np.eye(len(FITTED))
        wanted = -(slope * weight[:, None]).T @ here - pull * from_prior
        found, free = np.linalg.solve(square, wanted), np.ones(len(FITTED), bool)
        while (beyond := free & ((found < low - 1e-9) | (found > high + 1e-9))).any():
            free &= ~beyond
            found = np.clip(found, low, high)
            rest = wanted[free] - square[np.ix_(free, ~free)] @ found[~free]
            found[free] = np.linalg.solve(square[np.ix_(free, free)], rest)
    return dict(zip(FITTED, np.clip(found, low, high).tolist(), strict=True))
