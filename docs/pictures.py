"""The pictures of README.md, from the course's own runs, written to docs/pictures/.

    python docs/pictures.py

schedules.gif  three schedules of one training step on four ranks, as the simulator of chapter 05 times them
losses.png     the losses of five runs, on one process and in four ways on four ranks; takes some minutes
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from common import ROOT
from common.errors import Parser
from common.lab import plotting
from course.pipeline import lab

FOLDER = ROOT / "docs" / "pictures"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zbv": "zero bubble (ZBV)"}
RUNS = {"one process": "single", "ddp": "ddp", "tensor": "tensor", "pipeline": "pipeline", "fsdp": "fsdp"}
SMALL = ["--layers=4", "--width=64", "--context=64", "--steps=120", "--checkpoint-every=0"]


def schedules(steps_per_unit: int = 1) -> list[Image.Image]:
    """The frames of the animation: what is done by time 0, 1/steps_per_unit, ... until the slowest is done."""
    times = {name: lab.run(name, ranks=4, microbatches=8) for name in SCHEDULES}
    titles = {
        f"{SCHEDULES[name]}: {float(line.makespan):g} units of time, idle {float(line.bubble):.0%}": line
        for name, line in times.items()
    }
    fig = plotting.pipeline(titles, memory=False, width=8)
    end = max(float(line.makespan) for line in times.values())
    covers = []
    for ax in fig.axes:
        cover = plt.Rectangle((0, -0.05), end * 1.01, 4.1, color="white", lw=0, animated=True)
        now = ax.axvline(0, color=plotting.BLACK, lw=1.2, animated=True)
        ax.add_patch(cover)
        covers.append((cover, now))
    fig.canvas.draw()  # without what is animated
    whole = fig.canvas.copy_from_bbox(fig.bbox)
    frames = []
    for number in range(round(end * steps_per_unit) + 1):
        fig.canvas.restore_region(whole)
        for cover, now in covers:
            cover.set_x(number / steps_per_unit)
            now.set_xdata([number / steps_per_unit] * 2)
            cover.axes.draw_artist(cover)
            cover.axes.draw_artist(now)
        frames.append(Image.fromarray(np.array(fig.canvas.buffer_rgba())[..., :3]))
    plt.close(fig)
    return frames


def save(frames: list[Image.Image], path: Path, milliseconds: int = 160, pause: int = 3000) -> None:
    """An animation in one palette for all frames. It begins with its last frame, the whole, which stands still: that is
    what is seen where nothing moves."""
    palette = frames[-1].quantize(64)
    last, *few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in (frames[-1], *frames[:-1])]
    last.save(path, save_all=True, append_images=few, duration=[pause] + [milliseconds] * len(few), loop=0)


def train(strategy: str, folder: Path) -> list[float]:
    """The losses of a run on four ranks, or on one process for "single"."""
    script, options = ROOT / "distributed_training.py", [*SMALL, f"--strategy={strategy}", f"--run-dir={folder}"]
    command = [sys.executable, script, *options]
    if strategy != "single":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
        command.append("--distributed")
    subprocess.run(command, check=True)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(runs: dict[str, list[float]]):
    """The figure: each run a line, and as they lie on each other, each a little wider than the one drawn above it."""
    fig, ax = plt.subplots(figsize=(8, 3.2))
    for number, (name, values) in enumerate(runs.items()):
        width = 2 + 3 * (len(runs) - 1 - number)
        ax.plot(range(1, len(values) + 1), values, lw=width, color=plotting.PALETTE[number], label=name)
    first = np.array(next(iter(runs.values())))
    apart = max(float(np.abs(np.array(values) / first - 1).max()) for values in runs.values())
    ax.set(xlabel="optimizer step", ylabel="loss")
    ax.set_title(f"largest relative difference at any step: {apart:.0e}", fontsize=12, loc="left")
    ax.legend(fontsize=11)
    return fig


if __name__ == "__main__":
    Parser(description=__doc__.splitlines()[0]).asked()  # it has no options
    save(schedules(), FOLDER / "schedules.gif")
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(strategy, Path(folder, strategy)) for name, strategy in RUNS.items()}
    losses(runs).savefig(FOLDER / "losses.png", dpi=100)
