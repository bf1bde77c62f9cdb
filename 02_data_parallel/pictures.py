"""Pictures of DataParallel: its moves, two threads beside each other, and a recording of an interpreter that starts
operations for a GPU."""

import threading
import time
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from common.lab import plotting, recordings

COLOUR_OF = {"data": plotting.BLUE, "model": plotting.GREEN, "output": plotting.ORANGE, "gradient": plotting.PURPLE}


MOVES = {  # what was done, and what is to be seen
    "before": "Between two steps, only device 0 holds anything.",
    "scatter": "Scatter: each other device gets a slice of the inputs.",
    "replicate": "Replicate: each other device gets a copy of all parameters. Replica 0 is the model itself.",
    "apply": "Apply: each replica computes in a thread of its own, and keeps activations. Nothing is sent.",
    "gather": "Gather: all outputs go to device 0, where the loss adds tensors of their size.",
    "backward begins": "Backward begins: two more tensors of that size, and each device gets its slice of one.",
    "backward": "Backward through the replicas: activations become gradients. Nothing is sent.",
    "add up": "Add up: the gradients of all copies go to device 0; then the replicas are thrown away.",
}


def draw_move(move: str):
    """What each of four devices holds after a move of a step (MOVES), and what was sent for it. There are eight
    examples, which the model multiplies by ten."""
    slices = [[0, 1], [2, 3], [4, 5], [6, 7]]
    outputs = [[10 * example for example in part] for part in slices]
    at, last = list(MOVES).index(move), move == "add up"
    home = {  # text -> kind; what is not true now is left out
        f"inputs [{slices[0][0]} … {slices[-1][-1]}]": "data",
        "model" if at < 2 or last else "model = replica 0": "model",
        "optimizer's state": "model",
        "activations": "output" if 3 <= at <= 5 else None,
        f"outputs {outputs[0]}": "output" if at == 3 else None,
        f"outputs [{outputs[0][0]} … {outputs[-1][-1]}]": "output" if at >= 4 else None,
        "their logarithms": "output" if at in (4, 5) else None,
        "gradients of both": "gradient" if at == 5 else None,
        "gradients": "gradient" if at == 6 else None,
        "sum of gradients": "gradient" if last else None,
    }
    others = [
        {
            f"inputs {slices[device]}": "data" if at >= 1 and not last else None,
            f"replica {device}": "model" if at >= 2 and not last else None,
            "activations": "output" if 3 <= at <= 5 else None,
            f"outputs {outputs[device]}": "output" if at == 3 else None,
            "outputs' gradient": "gradient" if at == 5 else None,
            "gradients": "gradient" if at == 6 else None,
        }
        for device in range(1, len(slices))
    ]
    sent = {
        "scatter": [f"inputs {part}" for part in slices[1:]],
        "replicate": ["all parameters"] * len(others),
        "gather": [f"outputs {part}" for part in outputs[1:]],
        "backward begins": ["outputs' gradient"] * len(others),
        "add up": ["all gradients"] * len(others),
    }
    return _star(home, others, sent.get(move, []), inwards=move in ("gather", "add up"))


def _star(home, others, sent, inwards):
    fig, ax = plt.subplots(figsize=(10, 3.5))
    rows = len(others)
    boxes = [(0, 3.75, 0, rows, home), *((5.75, 6.65, rows - 1 - row, 1, held) for row, held in enumerate(others))]
    for device, (left, width, bottom, height, held) in enumerate(boxes):
        frame = {"boxstyle": "round,pad=0,rounding_size=0.12", "fc": "#F4F4F4", "ec": "#777777", "lw": 1.2}
        ax.add_patch(FancyBboxPatch((left, bottom + 0.06), width, height - 0.12, **frame))
        ax.text(left + 0.12, bottom + height - 0.28, f"device {device}", size=10, color="#444444")
        present = [(text, kind) for text, kind in held.items() if kind]
        for place, (text, kind) in enumerate(present):
            if device == 0:
                x, y, wide = 0.12 + 1.8 * (place % 2), rows - 0.9 - 0.58 * (place // 2), 1.72
            else:
                x, y, wide = left + 0.12 + 1.62 * place, bottom + 0.14, 1.55
            ax.add_patch(Rectangle((x, y), wide, 0.42, color=COLOUR_OF[kind], alpha=0.35, lw=0))
            ax.text(x + wide / 2, y + 0.2, text, ha="center", va="center", size=9.5)
    for row, text in enumerate(sent):
        y = rows - 0.55 - row
        ends = ((3.85, y), (5.65, y)) if inwards else ((5.65, y), (3.85, y))
        arrow = {"arrowstyle": "-|>", "lw": 2.5, "color": plotting.VERMILION, "mutation_scale": 20}
        ax.annotate("", *ends, arrowprops=arrow)
        ax.text(4.75, y + 0.1, str(text), ha="center", va="bottom", size=10, color=plotting.VERMILION)
    ax.set(xlim=(-0.05, 12.5), ylim=(-0.05, rows + 0.05))
    ax.set_axis_off()
    return fig


def beside(work: Callable[[], object]) -> tuple[float, float]:
    """Call `work` while a second thread runs Python, as far as it is let.

    Returns the processor time of either thread in seconds, which other programs on a busy machine do not change much.
    """
    used, done = [0.0], threading.Event()

    def count():
        while not done.is_set():
            used[0] = time.thread_time()

    thread = threading.Thread(target=count)
    thread.start()
    before, begin = used[0], time.thread_time()
    work()
    first, second = time.thread_time() - begin, used[0] - before
    done.set()
    thread.join()
    return first, second


def recorded_forward() -> list[dict[str, Any]]:
    """The operations of the forward pass of common/recordings' trace_naive_ddp_2xv100, as the host started them.

    The step begins by setting all gradients to zero, one fill for each; the backward pass begins with the first
    kernel that is called so.
    """
    rows: list[dict[str, Any]] = [*recordings.read("trace_naive_ddp_2xv100")]
    rows.sort(key=lambda row: row["launch_us"])
    begin = next(place for place, row in enumerate(rows) if "FillFuncto" not in row["name"])
    end = next(place for place, row in enumerate(rows) if "sigmoid_ba" in row["name"] or "tanh_ba" in row["name"])
    return rows[begin:end]


def draw_recorded(rows: list[dict[str, Any]], begin: float, end: float):
    """Which operations the host started, and which the GPU computed, between two moments (microseconds)."""
    kernels = [event[2:] for event in recordings.events(rows, between=(begin, end))]
    fig, ax = plt.subplots(figsize=(10, 2.4))
    starts = [(row["launch_us"] - begin) / 1000 for row in rows if begin <= row["launch_us"] < end]
    ax.vlines(starts, 1.15, 1.85, color=plotting.ORANGE, lw=1)
    bars = [(1000 * start - begin / 1000, 1000 * (stop - start)) for start, stop in kernels]
    ax.broken_barh(bars, (0.15, 0.7), color=plotting.BLUE, lw=0)
    ax.set_yticks([1.5, 0.5], ["host starts one", "GPU computes"])
    ax.set(xlim=(0, (end - begin) / 1000), ylim=(0, 2), xlabel="time (ms)")
    return fig
