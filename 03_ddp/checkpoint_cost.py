"""Pictures of what checkpoints and failures cost, by the formulas of common/checkpoint_interval.py."""

import math

import ipywidgets as widgets
from matplotlib.figure import Figure

from common.checkpoint_interval import daly, lost, time_per_work
from common.lab.plotting import BLUE, GREEN, VERMILION, plt
from common.lab.sliders import Sliders


def draw(cost: float, mtbf: float, restart: float) -> Figure:
    """What is lost against the interval, in minutes, and what it consists of."""
    best = daly(cost, mtbf)
    found = [best * 10 ** (exponent / 40) for exponent in range(-48, 49)]
    found = [one for one in found if one + cost < 30 * mtbf]
    fig, ax = plt.subplots(figsize=(8.5, 4.4))
    at_best = lost(best, cost, mtbf, restart)
    near = [one for one in found if lost(one, cost, mtbf, restart) < at_best + 0.02]
    ax.axvspan(near[0], near[-1], color=BLUE, alpha=0.1, lw=0)
    ax.text(best, 58, "within 2 points of the best", color=BLUE, ha="center", va="top", size=11)
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
    ax.plot([best], [100 * at_best], "o", color=BLUE)
    ax.annotate(
        f"best: every {best:.1f} min,\n{100 * at_best:.1f}% lost",
        (best, 100 * at_best), xytext=(best, 40), ha="center", color=BLUE,
        arrowprops={"arrowstyle": "->", "color": BLUE},
    )  # fmt: skip
    return fig


class Intervals(Sliders):
    """Sliders for the number of GPUs, the GPU-hours per failure, the seconds of a checkpoint and of a restart."""

    def __init__(self, gpus: int, hours_per_failure: float, seconds: float, restart: float):
        def log(value, low, high, name):
            digits = ",.0f" if low >= 1 else ",.1f"
            return widgets.FloatLogSlider(
                value, min=math.log10(low), max=math.log10(high), step=0.05, description=name, readout_format=digits
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
