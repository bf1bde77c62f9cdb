"""The few constants, fitted on published runs: on some sources, so that they can be judged on the others."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from planner import memory, time
from planner.constants import FITTED, PRIOR, Constants
from planner.published import Run

# A constant goes no further than data sheets and published profiles allow.
BOUNDS = {
    "matmul": (0.6, 1.0), "passes": (0.5, 5.0), "eager": (1.0, 3.0), "attention": (0.5, 1.6), "fp8": (1.1, 1.9),
    "network": (0.3, 0.95), "async_kept": (0.2, 1.0), "ring": (0.0, 1.2),
}  # fmt: skip
PULL = 0.02  # towards the prior: what the runs say nothing about stays there


def seconds(run: Run, constants: Constants) -> float:
    return time.estimate(run.model, run.cluster, run.layout, constants).seconds


def loss(runs: Iterable[Run], constants: Constants) -> float:
    """Mean over sources of the mean squared logarithm of predicted over measured time; and the pull to the prior."""
    by_source = defaultdict(list)
    for run in runs:
        if run.seconds:
            by_source[run.source].append(math.log(seconds(run, constants) / run.seconds) ** 2)
    far = sum(math.log(max(getattr(constants, name), 0.01) / getattr(PRIOR, name)) ** 2 for name in FITTED)
    return sum(sum(errors) / len(errors) for errors in by_source.values()) / len(by_source) + PULL * far / len(FITTED)


def fit(runs: list[Run], start: Constants = PRIOR, sweeps: int = 3) -> Constants:
    """Constants that fit these runs best: one after the other is moved, in smaller and smaller steps."""
    best, least = start, loss(runs, start)
    step = 0.16
    for _ in range(sweeps):
        for name in FITTED:
            low, high = BOUNDS[name]
            for sign in (1, -1):
                while True:
                    value = min(high, max(low, getattr(best, name) * math.exp(sign * step)))
                    tried = replace(best, **{name: value})
                    if value == getattr(best, name) or (now := loss(runs, tried)) >= least - 1e-7:
                        break
                    best, least = tried, now
        step /= 2.5
    return fit_memory(runs, best)


def fit_memory(runs: list[Run], constants: Constants) -> Constants:
    """What allocators reserve of what is needed: the middle of the published peaks, and how far they lie apart. Every
    source counts alike."""
    by_source = defaultdict(list)
    for run in runs:
        if run.gib:
            by_source[run.source].append(run.gib * 2**30 / memory.estimate(run.model, run.layout, constants).needed)
    if not by_source:
        return constants
    middles = [sorted(ratios)[len(ratios) // 2] for ratios in by_source.values()]
    middle = math.exp(sum(math.log(ratio) for ratio in middles) / len(middles))
    return replace(constants, allocator=middle, allocator_low=middle - 0.1, allocator_high=middle + 0.1)
