"""Pictures of buckets: what lies in them, when a real run sends them, and a simulator with sliders of what is exposed.

The simulator is the alpha-beta model of chapter 01 beside a backward pass that runs at a constant pace. It leaves out
that communication slows computation down (NCCL's kernels occupy SMs, gloo's threads occupy cores).
"""

import time
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle

from common.lab import plotting
from common.lab.sliders import Sliders
from course.ddp.by_hand import MEBIBYTE

BLOCKS, WIDTH = 24, 1024
# The gradients of four weight matrices of each block (q, k and v in one; attention's output; up; down), in bytes: 302
# million parameters in float32. Embeddings, biases and norms are left out.
GRADIENTS = [4 * factor * WIDTH**2 for _ in range(BLOCKS) for factor in (3, 1, 4, 4)]
WAITING = "#DDDDDD"
EXPOSED: dict[str, Any] = {"fc": plotting.VERMILION, "ec": "white", "hatch": "//"}  # hatched: not by its colour alone
NAMES = {"after": "all buckets held back until the backward pass is over", "hooks": "sent by hooks"}
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


def draw_layout(names: list[str], sizes: list[int], buckets: list[list[int]]):
    """Parameters in the order of the model, and the buckets that hold their gradients, in the same colours.

    names:   of the parameters, in the order in which buckets take them (the last parameter first)
    sizes:   of their gradients, in bytes
    buckets: indices of `names`
    """
    fig, ax = plt.subplots(figsize=(9.5, 3.0))
    count = len(names)
    total = count + 0.6 * (len(buckets) - 1)
    colour = {index: plotting.PALETTE[number] for number, bucket in enumerate(buckets) for index in bucket}
    corners = {index: [((count - 1 - index + 0.5) * total / count - 0.46, 0.1)] for index in colour}
    place = 0.0
    for number, bucket in enumerate(buckets):
        ax.text(place + len(bucket) / 2, 2.95, f"bucket {number}", ha="center", va="center")
        for index in bucket:
            corners[index].append((place + 0.04, 1.75))
            place += 1
        place += 0.6
    for index, places in corners.items():
        for x, y in places:
            ax.add_patch(Rectangle((x, y), 0.92, 0.9, fc=colour[index], ec="black", lw=0.8))
            box = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"}
            text = f"{names[index]}\n{sizes[index]:,} B"
            ax.text(x + 0.46, y + 0.45, text, ha="center", va="center", size=10, bbox=box)
    for y, text in ((-0.15, "the forward pass uses the parameters in this order"),
                    (3.3, "the backward pass completes the buckets in this order")):  # fmt: skip
        arrow = {"arrowstyle": "-|>", "color": "black", "lw": 1.8}
        ax.annotate("", (total * 0.98, y), (total * 0.02, y), arrowprops=arrow)
        ax.text(total / 2, y + (0.3 if y > 0 else -0.3), text, ha="center", va="center", size=12)
    ax.set(xlim=(-0.1, total + 0.1), ylim=(-0.65, 3.85))
    ax.axis("off")
    return fig


@dataclass(frozen=True)
class Pass:
    """A real backward pass, in seconds of one clock: for each rank its start and end; for each bucket when its
    all-reduce was called on the last rank, and when it was over on all."""

    computed: list[tuple[float, float]]
    reduced: list[tuple[float, float]]

    @property
    def backward(self) -> float:
        """Until the slowest rank has computed its gradients."""
        return max(end for _, end in self.computed) - min(start for start, _ in self.computed)

    @property
    def exposed(self) -> float:
        """From then on, until the last all-reduce is over."""
        return max(0.0, max(end for _, end in self.reduced) - max(end for _, end in self.computed))

    @property
    def first_leaves(self) -> float:
        """When the first all-reduce begins, as a share of the backward pass."""
        return (self.reduced[0][0] - min(start for start, _ in self.computed)) / self.backward


def record(reducer_class, model, loss_of, bucket_mb, pairs=16) -> list[tuple]:
    """Backward passes on this rank, with buckets held back and with buckets sent by hooks in turns: for each pass
    (start, end, when each all-reduce was called and over)."""

    class Timed(reducer_class):
        held = False

        def send_complete(self):
            if not self.held:
                super().send_complete()

        def average_bucket(self, bucket):
            span = [time.perf_counter()]
            self.spans.append(span)
            work = super().average_bucket(bucket)
            self.over.append(work.get_future().then(lambda _: span.append(time.perf_counter())))
            return work

    reducer, runs = Timed(model, dist.group.WORLD, bucket_mb=bucket_mb), []
    for _ in range(pairs):
        for held in (True, False):
            reducer.zero_grad()
            reducer.spans, reducer.over, reducer.held = [], [], held
            loss = loss_of(model)
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            middle = time.perf_counter()
            reducer.held = False
            reducer.send_complete()
            reducer.finish()
            torch.futures.wait_all(reducer.over)
            runs.append((start, middle, reducer.spans))
    return runs


def comparable(recorded: list[list[tuple]], rooms=(1.2, 1.3, 1.5, 2, 3)) -> tuple[dict[str, Pass], float]:
    """Of what `record` returned on each rank, the shortest two passes in a row, held back and by hooks, that no other
    program has disturbed: on all ranks the longest backward pass of the two took at most `room` times as long as the
    shortest, for the first of `rooms` for which there are such, and with hooks less is exposed. And in which share of
    all pairs that is so. Raises RuntimeError if there are no such two."""
    passes = []
    for ranks in zip(*recorded, strict=True):
        spans = zip(*(run[2] for run in ranks), strict=True)
        reduced = [(max(start for start, _ in bucket), max(end for _, end in bucket)) for bucket in spans]
        passes.append(Pass([run[:2] for run in ranks], reduced))
    pairs = list(zip(passes[::2], passes[1::2], strict=True))
    better = [pair for pair in pairs if pair[1].exposed < pair[0].exposed]
    for room in rooms:
        alike = [pair for pair in better if unlike(pair) <= room]
        if alike:
            best = min(alike, key=lambda pair: sum(run.backward + run.exposed for run in pair))
            return dict(zip(NAMES, best, strict=True)), len(better) / len(pairs)
    raise RuntimeError("other programs keep this computer too busy: run the cell again")


def unlike(passes) -> float:
    """How many times as long as the shortest backward pass of a rank the longest took."""
    lengths = [end - start for run in passes for start, end in run.computed]
    return max(lengths) / min(lengths)


def draw_runs(runs: dict[str, Pass]):
    """Real backward passes: for each rank when it computes, and a thin line for each bucket's all-reduce."""
    fig, axes = plt.subplots(len(runs), 1, figsize=(9.5, 3.1 * len(runs) + 0.5), sharex=True, squeeze=False)
    for ax, (kind, run) in zip(axes.flat, runs.items(), strict=True):
        origin = min(start for start, _ in run.computed)
        slowest = max(end for _, end in run.computed)

        def bar(start, end, y, height, origin=origin, ax=ax, **colours):
            place = [((start - origin) * 1e3, max(0.0, end - start) * 1e3)]
            ax.broken_barh(place, (y, height), **({"ec": "white", "lw": 0.6} | colours))

        for rank, (start, end) in enumerate(run.computed):
            bar(start, end, rank, 0.8, fc=plotting.BLUE)
            bar(end, slowest, rank, 0.8, fc=WAITING)
        below = len(run.computed) + 0.2
        for number, (start, end) in enumerate(run.reduced):
            y = below + 0.3 * number
            bar(start, min(end, slowest), y, 0.26, fc=plotting.ORANGE)
            bar(max(start, slowest), end, y, 0.26, **EXPOSED)
        last = below + 0.3 * len(run.reduced)
        ax.axvline((slowest - origin) * 1e3, color="black", lw=1.2, ls=":")
        ticks = {rank + 0.4: f"rank {rank}" for rank in range(len(run.computed))}
        ticks |= {below + 0.13: "bucket 0", last - 0.17: f"bucket {len(run.reduced) - 1}"}
        ax.set_yticks(list(ticks), list(ticks.values()))
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(last + 0.1, -0.1)
        ax.set_title(f"{NAMES[kind]}: {run.exposed * 1e3:.0f} ms exposed", fontsize=13, loc="left")
    axes[-1][0].set_xlabel("time (ms)")
    styles: list[dict[str, Any]] = [{"fc": plotting.BLUE}, {"fc": WAITING}, {"fc": plotting.ORANGE}, EXPOSED]
    labels = ["backward pass", "waits for the slower rank", "all-reduce", "all-reduce, exposed"]
    handles = [Rectangle((0, 0), 1, 1, **style) for style in styles]
    fig.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=12)
    return fig


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
    left.set_yticks([0.4, 1.5], ["backward", f"{len(sent)} all-reduces"])
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


def draw_bars(groups: dict, ylabel: str):
    """One panel for each title -> (labels, values), where a value is the results of several seeds: a bar for their
    mean, a line from the least to the largest, on one scale; the first bar, which others are compared with, is grey."""
    counts = [len(labels) for labels, _ in groups.values()]
    fig, axes = plt.subplots(1, len(groups), figsize=(11, 3.6), sharey=True, width_ratios=counts)
    for ax, (title, (labels, values)) in zip(axes, groups.items(), strict=True):
        colours = ["#999999"] + [plotting.BLUE] * (len(values) - 1)
        means = [sum(seeds) / len(seeds) for seeds in values]
        ends = list(zip(*((mean - min(v), max(v) - mean) for mean, v in zip(means, values, strict=True)), strict=True))
        bars = ax.bar(labels, means, color=colours, yerr=ends, capsize=5, error_kw={"lw": 1.5})
        ax.bar_label(bars, fmt="%.2f", padding=2)
        ax.set_title(title, pad=14)
        ax.tick_params(axis="x", labelsize=10, length=0)
    axes[0].set_ylabel(ylabel)
    return fig
