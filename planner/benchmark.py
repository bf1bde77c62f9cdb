"""A grid of small trainings as JSON, and a runner that trains each on this machine and compares it with what was
predicted: `python -m planner benchmark`.

A grid is a list of runs: a model, a number of processes, a layout, what is predicted of it, and the command that trains
it. It can be carried to another machine, or be cut up for a sweep. The runner adds what was measured. The work of one
step is measured a second time on one process, with what one rank computes: so a difference has two parts, that of the
work, and that of what comes with several processes.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import ROOT
from common.errors import UserError
from planner import as_course
from planner.constants import Constants
from planner.estimate import Estimate, estimate
from planner.hardware import GPU, cluster
from planner.layout import make_layout
from planner.models import course_gpt
from planner.names import lookup

SHAPES = {  # layers, width, heads, context: GPTs of this course that a CPU trains in seconds
    "tiny": (2, 64, 4, 64),
    "small": (4, 128, 4, 128),
    "wide": (2, 256, 8, 128),
    "deep": (8, 64, 4, 64),
}
LAYOUTS: dict[str, tuple[str, dict]] = {  # strategy: the axis along which all processes are, and what else it needs
    "ddp": ("data", {}),
    "zero1": ("shard", {"zero_stage": 1}),
    "zero2": ("shard", {"zero_stage": 2}),
    "fsdp": ("shard", {"zero_stage": 3}),
    "tensor": ("tensor", {"sequence_parallel": False}),
    "pipeline": ("pipeline", {"schedule": "1f1b"}),
}
WARM = 3  # steps before those that are timed


def grid(names: list[str], most: int, gpu: str | GPU, constants: Constants, batch_size: int = 16,
         precision: str = "float32") -> list[dict]:  # fmt: skip
    """Every strategy that divides the model on 1, 2, 4, ... processes. Raises UserError for an unknown model."""
    found = []
    for name in names:
        layers, width, heads, context = lookup(name, SHAPES, "model")
        model = replace(course_gpt(layers, width, heads, context), name=name)
        for size in (2**power for power in range(int(math.log2(most)) + 1)):
            nodes = cluster(gpu, size, size)
            for strategy, (axis, more) in LAYOUTS.items() if size > 1 else [("ddp", ("data", {}))]:
                micro = batch_size // size if axis in ("data", "shard") else batch_size
                micro = batch_size // (2 * size) if axis == "pipeline" else micro
                fields = {"batch_size": batch_size, "sequence": context, "precision": precision, "micro_batch": micro}
                try:
                    layout = make_layout(model, nodes, {axis: size}, fused=False, **fields, **more)
                except UserError:
                    continue
                found.append(described(estimate(model, nodes, layout, constants), strategy))
    return found


def described(found: Estimate, strategy: str) -> dict:
    """A run of the grid."""
    options = as_course.settings(found.model, found.layout) | as_course.shape(found.model, found.layout)
    words = ["--distributed"] if found.cluster.gpus > 1 else []
    words += [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    return {
        "model": found.model.name,
        "processes": found.cluster.gpus,
        "strategy": strategy,
        "batch_size": found.layout.batch_size,
        "precision": found.layout.precision,
        "options": words,
        "predicted": {"step_seconds": found.seconds, "parts": dict(found.step.parts)},
    }


def measure(run: dict, steps: int) -> float:
    """Seconds of a step: the median of those after the first. Raises UserError where a training fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={run['processes']}", str(ROOT / "distributed_training.py"), *run["options"]]
        command += [f"--strategy={run['strategy']}", f"--steps={steps + WARM}", "--checkpoint-every=0"]
        command += ["--device=cpu", f"--run-dir={folder}/run"]
        if run["processes"] == 1:
            command = [sys.executable, *command[5:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise UserError(f"{run['strategy']} of '{run['model']}' on {run['processes']} process(es) failed: {last}")
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_seconds"] for line in lines[WARM:])


def attribute(predicted: dict, seconds: float, work: float) -> dict:
    """To which term the difference between a prediction and a measurement belongs.

    predicted: `step_seconds` and its `parts`; seconds: measured; work: of the same step, measured without messages
    "work" is what a rank computes; "processes" all else: messages, bubble, optimizer, waiting. The two differences
    add up to the whole.
    """
    expected = predicted["parts"].get("work", predicted["step_seconds"])
    differences = {"work": work - expected, "processes": (seconds - work) - (predicted["step_seconds"] - expected)}
    return {
        "step_seconds": seconds,
        "work_seconds": work,
        "ratio": predicted["step_seconds"] / seconds,
        "difference_seconds": differences,
        "term": max(differences, key=lambda name: abs(differences[name])),
    }


def works(runs: list[dict], measured: list[float], cores: int) -> list[float]:
    """For each run, the work of one of its ranks: a process's step over the number of processes that compute at once,
    since every strategy here divides the same work. Raises UserError where the grid lacks the run of one process."""

    def same_work(run):
        return run["model"], run.get("batch_size"), run.get("precision")

    alone = {same_work(run): seconds for run, seconds in zip(runs, measured, strict=True) if run["processes"] == 1}
    for run in runs:
        if same_work(run) not in alone:
            raise UserError(f"the grid has no run of '{run['model']}' on one process, whose work is compared with")
    return [alone[same_work(run)] / min(run["processes"], cores) for run in runs]


def compare(runs: list[dict], steps: int) -> list[dict]:
    """Train each, and add what was measured."""
    measured = [measure(run, steps) for run in runs]
    per_rank = works(runs, measured, len(os.sched_getaffinity(0)))
    return [
        run | {"measured": attribute(run["predicted"], seconds, work)}
        for run, seconds, work in zip(runs, measured, per_rank, strict=True)
    ]


def table(runs: list[dict]) -> str:
    head = f"{'model':8} {'ranks':>5} {'strategy':10} {'predicted':>10} {'measured':>10} {'ratio':>6}  mostly"
    lines = [head]
    for run in runs:
        found, predicted = run["measured"], run["predicted"]["step_seconds"]
        off = found["difference_seconds"][found["term"]]
        lines.append(
            f"{run['model']:8} {run['processes']:5} {run['strategy']:10} {1000 * predicted:7.1f} ms "
            f"{1000 * found['step_seconds']:7.1f} ms {found['ratio']:6.2f}  {found['term']} ({1000 * off:+.1f} ms)"
        )
    return "\n".join(lines)
