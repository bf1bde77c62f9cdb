"""The few constants, fitted on published runs: on half of the sources, so that they can be judged on the others."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from planner import time
from planner.constants import FITTED, PRIOR, Constants
from planner.published import Run

# A constant goes no further than data sheets and published profiles allow.
BOUNDS = {
    "matmul": (0.6, 1.0), "passes": (0.5, 5.0), "eager": (1.0, 3.0), "attention": (0.5, 1.6), "fp8": (1.1, 1.9),
    "link": (0.5, 0.95), "network": (0.3, 0.95), "async_kept": (0.2, 1.0), "ring": (0.05, 1.2),
    "ring_alpha": (0.3, 3.0), "host": (2e-4, 2e-3), "host_moe": (3e-4, 6e-3), "dispatch": (1.0, 40.0),
    "fast_attention": (1.2, 2.2),
}  # fmt: skip
PULL = 0.01  # towards the prior: what the runs say nothing about stays there
MOST = 16  # runs of a source that a fit looks at, evenly spread over its table
SOFT = 0.05  # errors smaller than this count by their squares, larger ones by their sizes: outliers do not decide


def seconds(run: Run, constants: Constants, quick: bool = False) -> float:
    return time.estimate(run.model, run.cluster, run.layout, constants, quick).seconds


def project(source: str) -> str:
    """Who measured: the first word of a source. Reports of one project are no independent sources."""
    return source.split()[0]


def fitted_on(run: Run) -> bool:
    """Runs with adapters are predicted only: they check what has been fitted on trainings of all parameters."""
    return bool(run.seconds) and not run.layout.lora


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
    far = sum(math.log(max(getattr(constants, name), 0.01) / max(getattr(PRIOR, name), 0.01)) ** 2 for name in FITTED)
    means = [sum(errors) / len(errors) for errors in by_project.values()]
    return sum(means) / len(means) + PULL * far / len(FITTED)


def fit(runs: list[Run], start: Constants = PRIOR, sweeps: int = 2) -> Constants:
    """Constants that fit these runs best: one after the other is moved, in smaller and smaller steps."""
    best, least = start, loss(runs, start)
    step = 0.2
    for _ in range(sweeps):
        for name in FITTED:
            low, high = BOUNDS[name]
            for sign in (1, -1):
                while True:
                    value = min(high, max(low, getattr(best, name) * math.exp(sign * step)))
                    tried = replace(best, **{name: value})
                    if value == getattr(best, name) or (now := loss(runs, tried)) >= least - 1e-5:
                        break
                    best, least = tried, now
        step /= 2.3
    return best
