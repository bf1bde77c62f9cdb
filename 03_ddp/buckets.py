"""Pictures of buckets: what lies in them, when a real run sends them, and a simulator with sliders of what is exposed.

The simulator is the alpha-beta model of chapter 01 beside a backward pass that runs at a constant pace. It leaves out
that communication slows computation down (NCCL's kernels occupy SMs, gloo's threads occupy cores).
"""

import base64
import io
import time
from dataclasses import dataclass

import ipywidgets as widgets
import matplotlib.pyplot as plt
import torch.distributed as dist
from IPython.display import display
from matplotlib.patches import Rectangle

from common.lab import plotting
from course.ddp.by_hand import MEBIBYTE

BLOCKS, WIDTH = 24, 1024
# The gradients of four weight matrices of each block (q, k and v in one; attention's output; up; down), in bytes: 302
# million parameters in float32. Embeddings, biases and norms are left out.
GRADIENTS = [4 * factor * WIDTH**2 for _ in range(BLOCKS) for factor in (3, 1, 4, 4)]
WAITING = "#DDDDDD"


@dataclass(frozen=True)
class Sent:
    """One bucket: its bytes; and, in seconds, when it was complete, and when its all-reduce began and ended."""

    nbytes: int
    ready: float
    start: float
    end: float


def simulate(gradients, bucket_bytes, backward, alpha, bandwidth) -> list[Sent]:
    """Buckets in the order in which they are sent.

    gradients:    bytes of each parameter's gradient, in the order of the forward pass
    bucket_bytes: a bucket is full once it holds this many
    backward:     seconds of the backward pass, spread over the gradients in proportion to their bytes
    alpha:        seconds that an all-reduce takes however small it is
    bandwidth:    bus bandwidth in bytes per second: an all-reduce of n bytes takes alpha + 2 n / bandwidth (the factor
                  2 (N - 1) / N for many ranks)
    """
    pace = backward / sum(gradients)
    sent, filled, computed, free = [], 0, 0, 0.0
    for number, nbytes in enumerate(reversed(gradients), start=1):
        filled, computed = filled + nbytes, computed + nbytes
        if filled >= bucket_bytes or number == len(gradients):
            ready = computed * pace
            start = max(ready, free)
            free = start + alpha + 2 * filled / bandwidth
            sent.append(Sent(filled, ready, start, free))
            filled = 0
    return sent


def exposed(sent: list[Sent], backward: float) -> float:
    """Seconds from the end of the backward pass until the last all-reduce has ended."""
    return max(0.0, sent[-1].end - backward)


def draw_layout(names: list[str], buckets: list[list[int]]):
    """Parameters in the order of the model, and the buckets that hold their gradients.

    names:   of the parameters, in the order in which buckets take them (the last parameter first)
    buckets: indices of `names`
    """
    fig, ax = plt.subplots(figsize=(9.5, 3.2))
    count, place = len(names), 0.0
    colour = {index: plotting.PALETTE[number] for number, bucket in enumerate(buckets) for index in bucket}
    total = count + 0.6 * (len(buckets) - 1)
    step = total / count
    for number, bucket in enumerate(buckets):
        middle = place + len(bucket) / 2
        ax.text(middle, 2.95, f"bucket {number}", ha="center", va="center")
        for index in bucket:
            above = (count - 1 - index + 0.5) * step
            arrow = {"arrowstyle": "-|>", "color": colour[index], "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (place + 0.5, 2.05), (above, 0.8), arrowprops=arrow)
            for x, y in ((above - 0.46, 0.2), (place + 0.04, 2.05)):
                ax.add_patch(Rectangle((x, y), 0.92, 0.6, fc=colour[index], ec="black", lw=0.8))
            for x, y in ((above, 0.5), (place + 0.5, 2.35)):
                box = {"boxstyle": "round,pad=0.12", "fc": "white", "ec": "none"}
                ax.text(x, y, names[index], ha="center", va="center", size=10.5, bbox=box)
            place += 1
        place += 0.6
    arrow = {"arrowstyle": "-|>", "color": "black", "lw": 1.8}
    ax.annotate("", (total * 0.98, -0.15), (total * 0.02, -0.15), arrowprops=arrow)
    ax.text(total / 2, -0.4, "the forward pass uses the parameters in this order", ha="center", va="center", size=12)
    ax.annotate("", (total * 0.98, 3.35), (total * 0.02, 3.35), arrowprops=arrow)
    ax.text(total / 2, 3.65, "the backward pass completes the buckets in this order", ha="center", va="center", size=12)
    ax.set(xlim=(-0.1, total + 0.1), ylim=(-0.65, 3.9))
    ax.axis("off")
    return fig


def record(reducer_class, model, loss_of, bucket_mb, afterwards=False) -> list[tuple]:
    """Eight backward passes on this rank: (start, end of the backward pass, end of all, when each all-reduce ran).

    afterwards: hold all buckets back until the backward pass is over
    """

    class Timed(reducer_class):
        held, spans = False, ()

        def launch(self):
            if not self.held:
                super().launch()

        def average(self, bucket):
            begin, spans = time.perf_counter(), self.spans
            work = super().average(bucket)
            work.get_future().then(lambda _: spans.append((begin, time.perf_counter())))
            return work

    reducer, runs = Timed(model, dist.group.WORLD, bucket_mb=bucket_mb), []
    for _ in range(8):
        reducer.zero_grad()
        reducer.spans, reducer.held = [], afterwards
        loss = loss_of(model)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        middle = time.perf_counter()
        reducer.held = False
        reducer.launch()
        reducer.finish()
        runs.append((start, middle, time.perf_counter(), reducer.spans))
    return runs


def shortest(recorded: list[list[tuple]]) -> tuple:
    """Of the passes that `record` returned on each rank, the shortest: one tuple for each rank."""
    passes = zip(*recorded, strict=True)
    return min(passes, key=lambda ranks: max(run[2] for run in ranks) - min(run[0] for run in ranks))


def draw_runs(runs: dict):
    """Real backward passes: for each title, for each rank, (start, end of backward, end of all, spans of messages)."""
    fig, axes = plt.subplots(len(runs), 1, figsize=(9.5, 2.5 * len(runs) + 0.6), sharex=True, squeeze=False)
    for ax, (title, ranks) in zip(axes.flat, runs.items(), strict=True):
        origin = min(start for start, *_ in ranks)
        ticks = {}
        for rank, (start, middle, end, spans) in enumerate(ranks):
            bars = [(start, middle, 0, plotting.BLUE)]
            bars += [(max(middle, start), end, 0, WAITING)]
            # messages under way at the same time are drawn in two half rows, so that both can be seen
            bars += [(*span, 1.0 + 0.45 * (number % 2), plotting.ORANGE) for number, span in enumerate(spans)]
            for begin, stop, row, colour in bars:
                place = [((begin - origin) * 1e3, (stop - begin) * 1e3)]
                ax.broken_barh(place, (2.4 * rank + row, 0.42 if row else 0.85), fc=colour, ec="white", lw=0.6)
            ticks |= {2.4 * rank + 0.42: f"rank {rank} computes", 2.4 * rank + 1.42: "all-reduces"}
        ax.set_yticks(list(ticks), list(ticks.values()))
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.set_title(title, fontsize=13, loc="left")
    axes[-1][0].set_xlabel("time (ms)")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in (plotting.BLUE, plotting.ORANGE, WAITING)]
    labels = ["backward pass", "all-reduce of one bucket", "computes nothing, waits"]
    fig.legend(handles, labels, loc="outside upper center", ncols=3)
    return fig


SIZES = [1, 5, 10, 25, 50, 100, 200, 400, 800, 1200]  # MiB


def draw_overlap(bucket_mb, backward_ms, alpha_ms, bandwidth_gb):
    """The simulated timeline for one bucket size, and exposed time over all bucket sizes."""

    def of(size):
        return simulate(GRADIENTS, size * MEBIBYTE, backward_ms / 1e3, alpha_ms / 1e3, bandwidth_gb * 1e9)

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
        left.broken_barh([(begin, max(0.0, end - begin))], (row, height), fc=plotting.VERMILION, **edge)
        if len(sent) <= 30 and number in (0, len(sent) - 1):
            left.text((start + end) / 2, row + height / 2, str(number), ha="center", va="center", size=10)
    tail = exposed(sent, backward_ms / 1e3) * 1e3
    stop = max(backward_ms + tail, backward_ms) * 1.02
    left.plot([backward_ms] * 2, [-0.4, 2.0], color="black", lw=1.2, ls=":")
    left.text(0.5 * backward_ms, -0.12, "last block  →  first block", ha="center", va="bottom", size=11)
    left.set_yticks([0.4, 1.5], ["backward", f"{len(sent)} all-reduces"])
    left.set(ylim=(2.6, -0.75), xlim=(0, stop), xlabel="time (ms)")
    left.text(0.99 * stop, 2.3, f"exposed: {tail:.0f} ms", ha="right", va="center", color=plotting.VERMILION, size=14)
    left.set_title(f"buckets of {bucket_mb:,} MiB", loc="left", fontsize=13)
    tails = [exposed(of(size), backward_ms / 1e3) * 1e3 for size in SIZES]
    right.plot(SIZES, tails, "o-", color="#555555", markersize=5)
    right.plot([bucket_mb], [tail], "o", color=plotting.VERMILION, markersize=12)
    right.annotate(f"{tail:.0f} ms", (bucket_mb, tail), textcoords="offset points", xytext=(0, -20), ha="center",
                   color=plotting.VERMILION)  # fmt: skip
    for x, text, side in ((0.03, "many messages:\nlatency", "left"), (0.97, "one message:\nleaves late", "right")):
        right.text(x, 0.97, text, transform=right.transAxes, ha=side, va="top", size=11)
    right.set(xscale="log", xlabel="bucket size (MiB)", ylabel="exposed (ms)", ylim=(0, 1.4 * max(*tails, 1)))
    right.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    right.set_title("all bucket sizes", loc="left", fontsize=13)
    return fig


class BucketLab(widgets.VBox):
    """Sliders for bucket size, backward time, latency and bandwidth, and the picture that follows them."""

    def __init__(self):
        self.controls = {
            "bucket_mb": self.slider("bucket (MiB)", SIZES, 25),
            "backward_ms": self.slider("backward (ms)", [20, 50, 100, 200, 500, 1000], 200),
            "alpha_ms": self.slider("latency (ms)", [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0], 1.0),
            "bandwidth_gb": self.slider("GB/s", [1.25, 2.5, 5, 12.5, 25, 50, 100, 200, 400], 12.5),
        }
        self.picture = widgets.Image(format="png", width=860)
        for control in self.controls.values():
            control.observe(self.redraw, "value")
        self.redraw()
        four = list(self.controls.values())
        super().__init__([widgets.HBox([widgets.VBox(four[:2]), widgets.VBox(four[2:])]), self.picture])

    @staticmethod
    def slider(what, values, value):
        control = widgets.SelectionSlider(options=values, value=value, description=what, continuous_update=False)
        control.style.description_width = "100px"
        return control

    def redraw(self, change=None):
        fig = draw_overlap(**{key: control.value for key, control in self.controls.items()})
        png = io.BytesIO()
        fig.savefig(png, format="png", dpi=130)
        plt.close(fig)
        self.picture.value = png.getvalue()

    def show(self, alt: str) -> None:
        """Display the sliders; where no kernel runs, and on pages that know no widgets, the picture alone."""
        data = {
            "text/plain": "Sliders: run this cell to move them.",
            "image/png": base64.b64encode(self.picture.value).decode(),
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2, "version_minor": 0, "model_id": self.model_id,
            },
        }  # fmt: skip
        display(data, metadata={"image/png": {"alt": alt, "width": 860}}, raw=True)


def draw_bars(groups: dict, ylabel: str):
    """One panel for each title -> (labels, values) with a value on each bar, on one scale; the first bar, which the
    others are compared with, is grey."""
    counts = [len(labels) for labels, _ in groups.values()]
    fig, axes = plt.subplots(1, len(groups), figsize=(11, 3.6), sharey=True, width_ratios=counts)
    for ax, (title, (labels, values)) in zip(axes, groups.items(), strict=True):
        colours = ["#999999"] + [plotting.BLUE] * (len(values) - 1)
        bars = ax.bar([label.replace(", ", ",\n") for label in labels], values, color=colours)
        ax.bar_label(bars, fmt="%.2f")
        ax.set_title(title)
        ax.tick_params(axis="x", labelsize=11, length=0)
    axes[0].set_ylabel(ylabel)
    return fig
