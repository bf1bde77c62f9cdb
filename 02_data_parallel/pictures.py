"""Pictures of DataParallel: its moves, who holds how many bytes, two threads beside each other, and one interpreter
that starts the operations of all devices: in a recording, and in a simulator.

The simulator leaves out everything but the forward pass: copies between devices, the backward pass, and that threads
also wait for each other's turn.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from common.lab import plotting, recordings
from common.lab.sliders import Sliders

if TYPE_CHECKING:  # it imports torch
    from course.data_parallel.fake_gpus import Bytes

COLOUR_OF = {"data": plotting.BLUE, "model": plotting.GREEN, "output": plotting.ORANGE, "gradient": plotting.PURPLE}


MOVES = {  # what was done, and what is to be seen
    "before": "Between two steps, only device 0 holds anything.",
    "scatter": "Scatter: each other device gets a slice of the inputs.",
    "replicate": "Replicate: each other device gets a copy of all parameters. Replica 0 is the model itself.",
    "apply": "Apply: each replica computes in a thread of its own, and keeps activations. Nothing is sent.",
    "gather": "Gather: all outputs go to device 0, where the loss adds as many logarithms.",
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
        "scatter": slices[1:],
        "replicate": ["all parameters"] * len(others),
        "gather": outputs[1:],
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


def draw_memory(panels: "dict[str, tuple[Bytes, int]]"):
    """The fullest moment of each GPU, a panel for each title: horizontal bars on one scale, with their sums.

    panels: title -> the bytes of a step, and how many of them on device 0 are there because outputs are gathered
    """
    fig, axes = plt.subplots(len(panels), 1, figsize=(10, 0.6 + 1.75 * len(panels)), sharex=True)
    colours = {
        "parameters": plotting.GREEN,
        "AdamW's moments": plotting.SKY,
        "activations, and what the own slice needs": plotting.BLUE,
        "all outputs, their logarithms, the gradients of both": plotting.ORANGE,
    }
    for ax, (title, (step, gathered)) in zip(axes, panels.items(), strict=True):
        for device, held in sorted(step.peak.items()):
            parts = [step.parameters, 0, 0, 0] if device else [step.parameters, 2 * step.parameters, 0, gathered]
            parts[2] = held - sum(parts)
            left = 0.0
            for name, part in zip(colours, parts, strict=True):
                ax.barh(device, part / 1e9, left=left, color=colours[name], ec="white", height=0.78)
                left += part / 1e9
            ax.text(left + 0.3, device, f"{left:.1f} GB", va="center", size=11, weight="bold")
        ax.set_yticks(range(len(step.peak)), [f"gpu {device}" for device in range(len(step.peak))])
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=12)
    axes[0].set_xlim(0, 1.12 * axes[0].dataLim.xmax)
    axes[-1].set_xlabel("memory (GB)")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    fig.legend(handles, list(colours), loc="outside lower center", ncols=2, fontsize=11)
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
    starts = [  # from the start of one operation to that of the next the host is at work on the next
        row | {"start_us": row["launch_us"], "duration_us": after["launch_us"] - row["launch_us"]}
        for row, after in zip(rows, rows[1:], strict=False)
    ]
    lanes = {"host starts": (starts, plotting.ORANGE), "GPU computes": (rows, plotting.BLUE)}
    events = [
        (lane, lane, *event[2:])
        for lane, (bars, _) in lanes.items()
        for event in recordings.events(bars, between=(begin, end))
    ]
    return plotting.timeline(events, colours={lane: colour for lane, (_, colour) in lanes.items()})


@dataclass(frozen=True)
class Started:
    """One operation of one device: from when to when an interpreter starts it, and the device computes it."""

    device: int
    called: float
    returned: float
    begin: float
    end: float


def simulate(devices: int, operations: int, start: float, compute: float, threads: bool = True) -> list[Started]:
    """A forward pass of `operations` operations on each of `devices` devices, in the order in which they are started.

    start:   seconds of an interpreter for each operation of each device
    compute: seconds of a device for an operation on its slice, which is as large on several devices as on one
    threads: one interpreter starts the operations of all devices in turn; else each device has one of its own
    """
    interpreters, free, done = [0.0] * devices, [0.0] * devices, []
    for _ in range(operations):
        for device in range(devices):
            mine = 0 if threads else device
            called = interpreters[mine]
            interpreters[mine] = returned = called + start
            begin = max(returned, free[device])
            free[device] = begin + compute
            done.append(Started(device, called, returned, begin, free[device]))
    return done


def seconds(devices: int, operations: int, start: float, compute: float, threads: bool = True) -> float:
    return max(one.end for one in simulate(devices, operations, start, compute, threads))


SHADES = [*plotting.PALETTE[:7], "#999999"]
DEVICES = [1, 2, 3, 4, 5, 6, 8, 12, 16]
OPERATIONS = 100


def speedups(start: float, compute: float, threads: bool) -> list[float]:
    """The examples per second of each number of DEVICES in the forward pass, relative to those of one device."""
    alone = seconds(1, OPERATIONS, start, compute)
    return [devices * alone / seconds(devices, OPERATIONS, start, compute, threads) for devices in DEVICES]


def draw_threads(devices: int, start_us: float, compute_us: float):
    """Left the first operations on `devices` devices, right the examples per second with any number of them."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=[1.5, 1])
    shown = simulate(devices, 4, start_us, compute_us)
    for one in shown:
        colour, edge = SHADES[one.device % len(SHADES)], {"ec": "white", "lw": 0.8}
        left.broken_barh([(one.called, start_us)], (0, 0.8), fc=colour, **edge)
        left.broken_barh([(one.begin, one.end - one.begin)], (1.3 + one.device, 0.8), fc=colour, **edge)
    left.set_yticks([0.4, *(1.7 + d for d in range(devices))], ["interpreter", *(f"gpu {d}" for d in range(devices))])
    left.tick_params(axis="y", length=0, labelsize=11 if devices < 9 else 7)
    left.set(ylim=(1.4 + devices, -0.2), xlabel="time (µs), the first 4 operations of each")
    limit = "the interpreter" if devices * start_us > compute_us else "the GPUs"
    left.set_title(f"busy all the time: {limit}", loc="left", fontsize=13)
    ends: list[float] = []
    for threads, colour, name in ((False, plotting.BLUE, "processes"), (True, plotting.VERMILION, "threads")):
        values = speedups(start_us, compute_us, threads)
        right.plot(DEVICES, values, "o-", color=colour, markersize=5)
        y = values[-1] if not ends or ends[0] - values[-1] > 4 else ends[0] - 4  # labels beside each other
        right.text(16.4, y, f"{name}\n{values[-1]:.1f}", color=colour, va="center", size=12)
        ends.append(values[-1])
    right.set(xlabel="GPUs", ylabel="times the examples\nper second of one GPU", ylim=(0, 18), xlim=(0.5, 22))
    right.set_xticks([1, 2, 4, 8, 12, 16])
    return fig


class ThreadLab(Sliders):
    """Sliders for the number of devices and the times of an operation, and the picture that follows them."""

    def __init__(self):
        controls = {
            "devices": ("GPUs", DEVICES, 8),
            "start_us": ("start (µs)", [1, 2, 5, 10, 20, 50, 100], 20),
            "compute_us": ("compute (µs)", [10, 20, 50, 100, 200, 500, 1000, 2000, 5000], 100),
        }
        super().__init__(
            {
                name: widgets.SelectionSlider(options=values, value=value, description=what)
                for name, (what, values, value) in controls.items()
            }
        )

    def draw(self, **values):
        return draw_threads(**values)
