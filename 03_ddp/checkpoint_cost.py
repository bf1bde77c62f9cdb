"""How often to write a checkpoint: what failures and checkpoints cost, as formulas and a picture.

All times are in one unit, say minutes.

cost:     what one checkpoint takes from training
interval: training between two checkpoints
mtbf:     mean time between failures of the whole job; failures come at random, equally likely at any time
restart:  from a failure until training goes on
"""

import math

import ipywidgets as widgets
from matplotlib.figure import Figure

from common.lab.plotting import BLUE, GREEN, VERMILION, plt
from common.lab.sliders import Sliders


def young(cost: float, mtbf: float) -> float:
    """The best interval where both cost and interval are much shorter than `mtbf` (Young 1974)."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """The best interval by Daly's (2006) higher-order estimate."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def time_per_work(interval: float, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """Expected time until one unit of training is done and kept, with everything that is done again (Daly 2006)."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) / interval


def lost(interval: float, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """The share of the time that is no lasting training: checkpoints, restarts, and what is done again."""
    return 1 - 1 / time_per_work(interval, cost, mtbf, restart)


def draw(cost: float, mtbf: float, restart: float) -> Figure:
    """What is lost against the interval, in minutes, and what it consists of."""
    best = daly(cost, mtbf)
    found = [best * 10 ** (exponent / 40) for exponent in range(-48, 49)]
    found = [one for one in found if one + cost < 30 * mtbf]
    fig, ax = plt.subplots(figsize=(8.5, 4.4))
    ax.plot(found, [100 * lost(one, cost, mtbf, restart) for one in found], color=BLUE)
    writing = [100 * cost / one / time_per_work(one, cost, mtbf, restart) for one in found]
    again = [100 * lost(one, cost, mtbf, restart) - share for one, share in zip(found, writing, strict=True)]
    ax.plot(found, writing, color=GREEN, linestyle="--", linewidth=1.5)
    ax.plot(found, again, color=VERMILION, linestyle=":", linewidth=2)
    ax.set(xscale="log", xlabel="minutes of training between two checkpoints")
    ax.set(ylabel="% of the time lost", ylim=(0, 60))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.text(found[10], writing[10] - 4, "writing ", color=GREEN, va="top", ha="right")
    ax.text(found[62], again[62] - 4, "done again, and restarts", color=VERMILION, va="top", ha="left")
    ax.plot([best], [100 * lost(best, cost, mtbf, restart)], "o", color=BLUE)
    ax.annotate(
        f"best: every {best:.1f} min,\n{100 * lost(best, cost, mtbf, restart):.1f}% lost",
        (best, 100 * lost(best, cost, mtbf, restart)), xytext=(best, 44), ha="center", color=BLUE,
        arrowprops={"arrowstyle": "->", "color": BLUE},
    )  # fmt: skip
    return fig


class Intervals(Sliders):
    """Sliders for the number of GPUs, the GPU-hours per failure, the seconds of a checkpoint and of a restart."""

    def __init__(self, gpus: int, hours_per_failure: float, seconds: float, restart: float):
        def log(value, low, high, name):
            return widgets.FloatLogSlider(
                value, min=math.log10(low), max=math.log10(high), step=0.05, description=name, readout_format=",.0f"
            )

        super().__init__(
            {
                "gpus": log(gpus, 8, 131072, "GPUs"),
                "hours_per_failure": log(hours_per_failure, 1000, 1e6, "GPU-h/failure"),
                "seconds": log(seconds, 0.1, 1000, "s/checkpoint"),
                "restart": log(restart, 1, 3600, "s/restart"),
            }
        )

    def draw(self, gpus: float, hours_per_failure: float, seconds: float, restart: float) -> Figure:
        return draw(seconds / 60, 60 * hours_per_failure / gpus, restart / 60)
