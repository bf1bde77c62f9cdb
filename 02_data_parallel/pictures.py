"""Pictures of DataParallel: its moves, who holds and sends how many bytes, and a simulator of one interpreter that
starts the operations of all devices.

The simulator is the rule of the exercise `best_devices`, step by step. It leaves out everything but the forward pass:
copies between devices, the backward pass, and that threads also wait for each other's turn.
"""

from dataclasses import dataclass

import ipywidgets as widgets
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from common.lab import plotting
from common.lab.sliders import Sliders

COLOUR_OF = {"data": plotting.BLUE, "model": plotting.GREEN, "output": plotting.ORANGE, "gradient": plotting.PURPLE}


MOVES = ("before", "scatter", "replicate", "apply", "gather", "backward begins", "backward", "add up")


def draw_move(move: str, slices: list[list[int]], outputs: list[list[int]]):
    """What each device holds after a move of a step (MOVES), and what was sent for it, from or to the first device.

    slices, outputs: of each device
    """
    at = MOVES.index(move)
    last = MOVES[-1] == move
    home = {  # text -> kind; what is not true now is left out
        f"inputs [{slices[0][0]} … {slices[-1][-1]}]": "data" if at == 0 else None,
        f"inputs {slices[0]}": "data" if 1 <= at <= 3 else None,
        f"outputs {outputs[0]}": "output" if at == 3 else None,
        f"outputs [{outputs[0][0]} … {outputs[-1][-1]}]": "output" if at == 4 else None,
        "loss": "output" if at == 4 else None,
        "gradient of outputs": "gradient" if at == 5 else None,
        "gradients": "gradient" if at == 6 else None,
        "sum of all gradients": "gradient" if last else None,
        "model": "model",
        "optimizer's state": "model",
    }
    others = [
        {
            f"inputs {slices[device]}": "data" if at >= 1 and not last else None,
            f"replica {device}": "model" if at >= 2 and not last else None,
            f"outputs {outputs[device]}": "output" if at == 3 else None,
            "gradients": "gradient" if at == 6 else None,
        }
        for device in range(1, len(slices))
    ]
    sent = {
        "scatter": slices[1:],
        "replicate": ["all parameters"] * len(others),
        "gather": outputs[1:],
        "backward begins": ["their gradient"] * len(others),
        "add up": ["all gradients"] * len(others),
    }
    return _star(home, others, sent.get(move, []), inwards=move in ("gather", "add up"))


def _star(home, others, sent, inwards):
    fig, ax = plt.subplots(figsize=(9, 3.5))
    rows = len(others)
    boxes = [(0, 3.3, 0, rows, home), *((6.0, 5.0, rows - 1 - row, 1, held) for row, held in enumerate(others))]
    for device, (left, width, bottom, height, held) in enumerate(boxes):
        frame = {"boxstyle": "round,pad=0,rounding_size=0.12", "fc": "#F4F4F4", "ec": "#777777", "lw": 1.2}
        ax.add_patch(FancyBboxPatch((left, bottom + 0.06), width, height - 0.12, **frame))
        ax.text(left + 0.12, bottom + height - 0.28, f"device {device}", size=10, color="#444444")
        present = [(text, kind) for text, kind in held.items() if kind]
        for place, (text, kind) in enumerate(present):
            if device == 0:
                x, y, wide = 0.25, rows - 0.85 - 0.52 * place, 2.8
            else:
                x, y, wide = left + 0.12 + 1.64 * place, bottom + 0.14, 1.56
            ax.add_patch(Rectangle((x, y), wide, 0.42, color=COLOUR_OF[kind], alpha=0.35, lw=0))
            ax.text(x + wide / 2, y + 0.2, text, ha="center", va="center", size=10)
    for row, text in enumerate(sent):
        y = rows - 0.55 - row
        ends = ((3.4, y), (5.9, y)) if inwards else ((5.9, y), (3.4, y))
        arrow = {"arrowstyle": "-|>", "lw": 2.5, "color": plotting.VERMILION, "mutation_scale": 20}
        ax.annotate("", *ends, arrowprops=arrow)
        ax.text(4.65, y + 0.1, str(text), ha="center", va="bottom", size=10, color=plotting.VERMILION)
    ax.set(xlim=(-0.05, 11.1), ylim=(-0.05, rows + 0.05))
    ax.set_axis_off()
    return fig


def draw_memory(panels: dict):
    """A panel for each title -> {part: bytes on each device}: horizontal bars on one scale, with their sums."""
    fig, axes = plt.subplots(len(panels), 1, figsize=(10, 0.6 + 1.75 * len(panels)), sharex=True)
    names = dict.fromkeys(part for parts in panels.values() for part in parts)
    colours = dict(zip(names, plotting.PALETTE, strict=False))
    for ax, (title, parts) in zip(axes, panels.items(), strict=True):
        devices = len(next(iter(parts.values())))
        ends = [0.0] * devices
        for part, counts in parts.items():
            widths = [count / 1e9 for count in counts]
            bars = ax.barh(range(devices), widths, left=ends, color=colours[part], ec="white", height=0.78)
            labels = [f"{width:.1f}" if width > 1.2 else "" for width in widths]
            ax.bar_label(bars, labels, label_type="center", size=10)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for device, end in enumerate(ends):
            ax.text(end + 0.3, device, f"{end:.1f} GB", va="center", size=11, weight="bold")
        ax.set_yticks(range(devices), [f"gpu {device}" for device in range(devices)])
        ax.invert_yaxis()
        ax.set_title(title, loc="left", fontsize=12)
    axes[0].set_xlim(0, 1.12 * axes[0].dataLim.xmax)
    axes[-1].set_xlabel("memory (GB)")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    fig.legend(handles, colours, loc="outside lower center", ncols=2, fontsize=11)
    return fig


def draw_traffic(lines: dict, counts):
    """Milliseconds on the wires against the number of devices: name -> (times, hidden, colour). Hidden behind the
    computation is dashed."""
    fig, ax = plt.subplots(figsize=(9.5, 3.8))
    top, above = max(max(times) for times, _, _ in lines.values()), None
    for name, (times, hidden, colour) in sorted(lines.items(), key=lambda line: -line[1][0][-1]):
        ax.plot(counts, times, "--" if hidden else "-", color=colour)
        y = times[-1] if above is None else min(times[-1], above - 0.09 * top)
        ax.text(counts[-1] + 0.25, y, f"{times[-1]:.0f} ms: {name}", va="center", size=11, color=colour)
        above = y
    ax.set(xlabel="GPUs", ylabel="sending parameters\nand gradients (ms)", ylim=(-0.06 * top, None))
    ax.set_xlim(min(counts) - 0.3, 1.95 * max(counts))
    ax.spines["bottom"].set_bounds(min(counts), max(counts))
    ax.set_xticks(range(min(counts), max(counts) + 1, 2))
    return fig


def draw_beats(runs: dict, bins: int = 150):
    """When a second thread ran: name -> (seconds of the first thread's call, times at which the second ran)."""
    fig, ax = plt.subplots(figsize=(10, 0.75 * len(runs) + 1.1))
    for row, (name, (seconds, beats)) in enumerate(runs.items()):
        ran = {int(bins * beat / seconds) for beat in beats}
        ax.broken_barh([(0, bins)], (row, 0.36), color=plotting.BLUE, lw=0)
        ax.broken_barh([(0, bins)], (row + 0.38, 0.36), color="#E4E4E4", lw=0)
        ax.broken_barh([(slot, 1) for slot in sorted(ran)], (row + 0.38, 0.36), color=plotting.ORANGE, lw=0)
        ax.text(-3, row + 0.37, name, ha="right", va="center", size=12)
        ax.text(bins + 3, row + 0.37, f"{1e3 * seconds:.0f} ms", va="center", size=11)
    ax.set(xlim=(-70, bins + 22), ylim=(len(runs), -0.1))
    ax.set_axis_off()
    colours = {"first thread, one call": plotting.BLUE, "second thread runs Python": plotting.ORANGE}
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in [*colours.values(), "#E4E4E4"]]
    fig.legend(handles, [*colours, "second thread waits"], loc="outside lower center", ncols=3, fontsize=11)
    return fig


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
    compute: seconds of one device for an operation on the whole batch; each device has 1/devices of it
    threads: one interpreter starts the operations of all devices in turn; else each device has one of its own
    """
    interpreters, free, done = [0.0] * devices, [0.0] * devices, []
    for _ in range(operations):
        for device in range(devices):
            mine = 0 if threads else device
            called = interpreters[mine]
            interpreters[mine] = returned = called + start
            begin = max(returned, free[device])
            free[device] = begin + compute / devices
            done.append(Started(device, called, returned, begin, free[device]))
    return done


def seconds(devices: int, operations: int, start: float, compute: float, threads: bool = True) -> float:
    return max(one.end for one in simulate(devices, operations, start, compute, threads))


SHADES = [*plotting.PALETTE[:7], "#999999"]
DEVICES = [1, 2, 3, 4, 5, 6, 8, 12, 16]
OPERATIONS = 100


def speedups(start: float, compute: float, threads: bool) -> list[float]:
    """Of a forward pass on each number of DEVICES, relative to one device."""
    alone = seconds(1, OPERATIONS, start, compute)
    return [alone / seconds(devices, OPERATIONS, start, compute, threads) for devices in DEVICES]


def draw_threads(devices: int, start_us: float, compute_us: float):
    """Left the first operations on `devices` devices, right the speed-up on any number of them."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=[1.5, 1])
    shown = simulate(devices, 5, start_us, compute_us)
    for one in shown:
        colour, edge = SHADES[one.device % len(SHADES)], {"ec": "white", "lw": 0.8}
        left.broken_barh([(one.called, start_us)], (0, 0.8), fc=colour, **edge)
        left.broken_barh([(one.begin, one.end - one.begin)], (1.3 + one.device, 0.8), fc=colour, **edge)
    left.set_yticks([0.4, *(1.7 + d for d in range(devices))], ["interpreter", *(f"gpu {d}" for d in range(devices))])
    left.tick_params(axis="y", length=0, labelsize=11 if devices < 9 else 7)
    left.set(ylim=(1.4 + devices, -0.2), xlabel="time (µs), the first 5 operations of each")
    share, turn = compute_us / devices, devices * start_us
    limit = "the interpreter" if turn > share else "the GPUs"
    left.set_title(f"busy all the time: {limit}", loc="left", fontsize=13)
    for threads, colour, name in ((False, plotting.BLUE, "processes"), (True, plotting.VERMILION, "threads")):
        values = speedups(start_us, compute_us, threads)
        right.plot(DEVICES, values, "o-", color=colour, markersize=5)
        right.text(16.4, values[-1], f"{name}\n{values[-1]:.1f}", color=colour, va="center", size=12)
        if threads:
            best = max(range(len(DEVICES)), key=lambda place: values[place])
            right.plot(DEVICES[best], values[best], "o", color=colour, markersize=12)
    right.set(xlabel="GPUs", ylabel="speed-up", ylim=(0, None), xlim=(0.5, 22))
    right.set_xticks([1, 2, 4, 8, 12, 16])
    right.set_title(f"threads: best with {DEVICES[best]}", loc="left", fontsize=13)
    return fig


class ThreadLab(Sliders):
    """Sliders for the number of devices and the times of an operation, and the picture that follows them."""

    def __init__(self):
        controls = {
            "devices": ("GPUs", DEVICES, 8),
            "start_us": ("start (µs)", [1, 2, 5, 10, 20], 5),
            "compute_us": ("compute (µs)", [20, 50, 100, 200, 500, 1000, 2000, 5000], 200),
        }
        super().__init__(
            {
                name: widgets.SelectionSlider(options=values, value=value, description=what)
                for name, (what, values, value) in controls.items()
            }
        )

    def draw(self, **values):
        return draw_threads(**values)
