"""How often to write a checkpoint, and what failures cost: the formulas of J. Young (1974) and of J. Daly ("A higher
order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006).

All times are in one unit.

cost:     what one checkpoint takes from training
interval: training between two checkpoints
mtbf:     mean time between failures of the whole job; failures come at random, equally likely at any time
restart:  from a failure until training goes on
"""

import math


def young(cost: float, mtbf: float) -> float:
    """The best interval where both cost and interval are much shorter than `mtbf` (Young 1974)."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """The best interval by Daly's (2006) higher-order estimate."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def time_per_work(interval: float, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """Expected time until one unit of training is done and kept, with everything that is done again (Daly 2006).
    Infinite where failures come so often that it is larger than a float."""
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) / interval
    except OverflowError:
        return math.inf


def lost(interval: float, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """The share of the time that is no lasting training: checkpoints, restarts, and what is done again."""
    return 1 - 1 / time_per_work(interval, cost, mtbf, restart)
