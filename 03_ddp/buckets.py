"""Buckets: a simulator with sliders of what is exposed.

The simulator is the alpha-beta model of chapter 01 beside a backward pass that runs at a constant pace. It leaves out
that communication slows computation down (NCCL's kernels occupy SMs, gloo's threads occupy cores).
"""

from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt

from common.constants import MEBIBYTE
from common.lab import plotting
from common.lab.sliders import Sliders

BLOCKS, WIDTH = 24, 1024
# The gradients of four weight matrices of each block (q, k and v in one; attention's output; up; down), in bytes: 302
# million parameters in float32. Embeddings, biases and norms are left out.
GRADIENTS = [4 * factor * WIDTH**2 for _ in range(BLOCKS) for factor in (3, 1, 4, 4)]
EXPOSED: dict[str, Any] = {"fc": plotting.VERMILION, "ec": "white", "hatch": "//"}  # hatched: not by its colour alone
RANKS = 64  # that the simulator's ring has


@dataclass(frozen=True)
class Sent:
    """One bucket: its bytes; and, in seconds, when it was complete, and when its all-reduce began and ended."""

    nbytes: int
    ready: float
    start: float
    end: float


def simulate(gradients, bucket_bytes, backward, alpha, bandwidth, ranks) -> list[Sent]:
    """Buckets in the order in which they are sent.

    gradients:    bytes of each parameter's gradient, in the order of the forward pass
    bucket_bytes: a bucket is full once it holds this many
    backward:     seconds of the backward pass, spread over the gradients in proportion to their bytes
    alpha:        seconds that an all-reduce takes however small it is
    bandwidth:    bus bandwidth in bytes per second
    ranks:        N; an all-reduce of n bytes takes alpha + 2 (N - 1) / N * n / bandwidth
    """
    pace = backward / sum(gradients)
    sent, filled, computed, free = [], 0, 0, 0.0
    for number, nbytes in enumerate(reversed(gradients), start=1):
        filled, computed = filled + nbytes, computed + nbytes
        if filled >= bucket_bytes or number == len(gradients):
            ready = computed * pace
            start = max(ready, free)
            free = start + alpha + 2 * (ranks - 1) / ranks * filled / bandwidth
            sent.append(Sent(filled, ready, start, free))
            filled = 0
    return sent


def exposed(sent: list[Sent], backward: float) -> float:
    """Seconds from the end of the backward pass until the last all-reduce has ended."""
    return max(0.0, sent[-1].end - backward)


SIZES = [16, 25, 50, 100, 200, 400, 800, 1200]  # MiB; below 16, no weight is cut, so the buckets stay as they are


def draw_overlap(bucket_mb, backward_ms, alpha_ms, bandwidth_gb):
    """The simulated timeline for one bucket size, and exposed time over all bucket sizes."""

    def of(size):
        return simulate(GRADIENTS, size * MEBIBYTE, backward_ms / 1e3, alpha_ms / 1e3, bandwidth_gb * 1e9, RANKS)

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[1.65, 1])
    sent = of(bucket_mb)
    for block in range(BLOCKS):
        shade = plotting.BLUE if block % 2 == 0 else plotting.SKY
        left.broken_barh([(block * backward_ms / BLOCKS, backward_ms / BLOCKS)], (0, 0.8), fc=shade, lw=0)
    for number, bucket in enumerate(sent):
        start, end = bucket.start * 1e3, bucket.end * 1e3
        row, height = 1.1, 0.8
        hidden = max(0.0, min(end, backward_ms) - start)
        edge = {"ec": "white", "lw": 0.8 if len(sent) < 60 else 0.2}
        left.broken_barh([(start, hidden)], (row, height), fc=plotting.ORANGE, **edge)
        begin = max(start, backward_ms)
        left.broken_barh([(begin, max(0.0, end - begin))], (row, height), **(EXPOSED | edge))
        if len(sent) <= 30 and number in (0, len(sent) - 1):
            left.text((start + end) / 2, row + height / 2, str(number), ha="center", va="center", size=10)
    tail = exposed(sent, backward_ms / 1e3) * 1e3
    stop = max(backward_ms + tail, backward_ms) * 1.02
    left.plot([backward_ms] * 2, [-0.4, 2.0], color="black", lw=1.2, ls=":")
    left.text(0.5 * backward_ms, -0.12, "last block  →  first block", ha="center", va="bottom", size=11)
    sizes = sorted({round(bucket.nbytes / MEBIBYTE) for bucket in sent})
    held = f"of {sizes[0]} MiB" if len(sizes) == 1 else f"of {sizes[0]} to {sizes[-1]} MiB"
    left.set_yticks([0.4, 1.5], ["backward", f"{len(sent)} all-reduces\n{held}"])
    left.set(ylim=(2.6, -0.75), xlim=(0, stop), xlabel="time (ms)")
    left.text(0.99 * stop, 2.3, f"exposed: {tail:.0f} ms", ha="right", va="center", color=plotting.VERMILION, size=14)
    left.set_title(f"bucket cap {bucket_mb:,} MiB", loc="left", fontsize=13)
    tails = [exposed(of(size), backward_ms / 1e3) * 1e3 for size in SIZES]
    right.plot(SIZES, tails, "o-", color="#555555", markersize=5)
    right.plot([bucket_mb], [tail], "o", color=plotting.VERMILION, markersize=12)
    right.annotate(f"{tail:.0f} ms", (bucket_mb, tail), textcoords="offset points", xytext=(0, -20), ha="center",
                   color=plotting.VERMILION)  # fmt: skip
    for x, text, side in ((0.03, "many\nmessages", "left"), (0.97, "one message:\nleaves late", "right")):
        right.text(x, 0.97, text, transform=right.transAxes, ha=side, va="top", size=11)
    right.set(xscale="log", xlabel="bucket cap (MiB)", ylabel="exposed (ms)", ylim=(0, 1.4 * max(*tails, 1)))
    right.set_xticks([16, 50, 100, 400, 1200], ["16", "50", "100", "400", "1,200"], minor=False)
    right.minorticks_off()
    right.set_title("all bucket caps", loc="left", fontsize=13)
    return fig


class BucketLab(Sliders):
    """Sliders for bucket size, backward time, latency and bandwidth, and the picture that follows them."""

    def __init__(self):
        controls = {
            "bucket_mb": ("bucket (MiB)", SIZES, 25),
            "backward_ms": ("backward (ms)", [20, 50, 100, 200, 500, 1000], 200),
            "alpha_ms": ("latency (ms)", [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0], 1.0),
            "bandwidth_gb": ("GB/s", [1.25, 2.5, 5, 12.5, 25, 50, 100, 200, 400], 12.5),
        }
        super().__init__({name: self.slider(*control) for name, control in controls.items()})

    @staticmethod
    def slider(what, values, value):
        return widgets.SelectionSlider(options=values, value=value, description=what, continuous_update=False)

    def draw(self, **values):
        return draw_overlap(**values)
