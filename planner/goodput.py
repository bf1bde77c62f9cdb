"""How long a training takes when machines fail: `python -m planner goodput`.

Failures come at random, at a rate per GPU; each costs what was computed since the last checkpoint, and a restart. The
best interval between checkpoints and the expected time are those of common/checkpoint_interval.py. A node that failed
is away until it is repaired; where no spare node is left, the training waits.
"""

import math
from dataclasses import dataclass

from common.checkpoint_interval import daly, lost, young
from common.errors import UserError
from planner.hardware import require_gpus

ENOUGH = 0.99  # of the time there should be a node for each that is needed


@dataclass(frozen=True)
class Goodput:
    """Times in seconds.

    between:  failures of any GPU; young, daly: their best intervals between checkpoints; interval: the one taken
    share:    of the time that becomes progress; waiting: of the time that no spare node is there
    spares:   so many nodes are enough for ENOUGH of the time
    """

    between: float
    young: float
    daly: float
    interval: float
    share: float
    waiting: float
    spares: int

    def wall(self, work: float) -> float:
        """Seconds until so many seconds of steps are done."""
        return work / self.share


def available(mean: float, spares: int) -> float:
    """Probability that no more nodes are away than there are spares; their number is Poisson's."""
    logs = (count * math.log(mean) - mean - math.lgamma(count + 1) for count in range(spares + 1) if mean)
    return sum(math.exp(log) for log in logs) if mean else 1.0


def enough(mean: float) -> int:
    """The fewest spares that are there for ENOUGH of the time."""
    low, high = -1, 1
    while available(mean, high) < ENOUGH:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if available(mean, middle) >= ENOUGH else (middle, high)
    return high


def goodput(gpus: int, failures: float, checkpoint: float, restart: float, interval: float | None = None,
            repair: float = 0.0, spares: int | None = None) -> Goodput:  # fmt: skip
    """failures: per GPU and hour, each of which takes a node; checkpoint, restart, interval, repair: seconds. interval:
    Daly's where it is None; spares: nodes, as many as are needed where it is None. Raises UserError."""
    require_gpus(gpus)
    rates = {"failures": failures, "checkpoint-seconds": checkpoint}
    for what, rate in rates.items():
        if not 0 < rate < math.inf:
            raise UserError(f"--{what} must be more than 0, not {rate:g}")
    for what, least_zero in {"restart-minutes": restart, "repair-hours": repair, "spares": spares or 0}.items():
        if least_zero < 0:
            raise UserError(f"--{what} must not be less than 0, not {least_zero:g}")
    if interval is not None and interval <= 0:
        raise UserError(f"--interval-minutes must be more than 0, not {interval / 60:g}")
    between = 3600 / (gpus * failures)
    best = daly(checkpoint, between)
    taken = best if interval is None else interval
    away = gpus * failures * repair / 3600  # nodes on average
    stored = 1 - lost(taken, checkpoint, between, restart)
    needed = enough(away)
    there = available(away, needed if spares is None else spares)
    share = stored * there
    if share <= 0:
        raise UserError("nothing is ever stored: the interval is longer than the time between failures by far")
    return Goodput(between, young(checkpoint, between), best, taken, share, 1 - there, needed)


def text(found: Goodput, work: float | None) -> str:
    def hours(seconds):
        return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"

    best = f"best: Young {hours(found.young)}, Daly {hours(found.daly)}"
    spare = f"{found.spares} spare node(s) are enough for {ENOUGH:.0%}"
    out = [
        f"between two failures     {hours(found.between)}",
        f"checkpoint every         {hours(found.interval)}  ({best})",
        f"goodput                  {found.share:.1%} of the time becomes progress",
        f"waiting for a node       {found.waiting:.1%} of the time; {spare}",
    ]
    if work is not None:
        out.append(
            f"training                 {work / 86400:,.1f} days of steps take {found.wall(work) / 86400:,.1f} days"
        )
    return "\n".join(out)
