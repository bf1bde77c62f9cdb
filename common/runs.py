"""Look at runs, compare them, and take their models elsewhere.

    python -m common.runs list                          what there is under runs/
    python -m common.runs summary RUN ...               losses, speed, checkpoints; of several runs, speed-up
    python -m common.runs ranks RUN                     of each rank: host, memory, use of its processor, time waited
    python -m common.runs plot RUN ... --over tokens    a picture of metrics over steps, tokens or seconds
    python -m common.runs compare A B ...               the first step at which each differs from A
    python -m common.runs export RUN --safetensors      the model of a checkpoint in one file, for other programs

A run is named by its folder, or by the name of a folder under runs/. --json prints what is found as JSON. In a
notebook, `follow(RUN)` draws a run while it goes on.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import installed

if __name__ == "__main__":
    installed.at_start()  # first: without the packages, one line and not a traceback

from common import manifest, stored
from common.errors import Parser, UserError, finite, one_line_errors
from common.installed import missing
from common.lock import Lock
from common.text_table import aligned

METRICS = ("loss", "grad_norm")


class History:
    """What a run has left: `facts` (config.json), `records` (metrics.jsonl) and `checkpoints`, oldest first. Raises
    UserError where there is none, and for a damaged one."""

    def __init__(self, name: str):
        found = [path for path in (Path(name), Path("runs", name)) if os.path.exists(path / "config.json")]
        if not found:
            raise UserError(
                f"{name} is no run: it has no config.json; python -m common.runs list shows those under runs/"
            )
        self.path = found[0]
        self.name = self.path.name
        self.facts = stored.facts_of(self.path)
        self.settings = stored.check_settings(self.path / "config.json", self.facts.config)
        self.records = stored.records_of(self.path)
        self.checkpoints = manifest.checkpoints(self.path)

    @property
    def seconds(self) -> float | None:
        """The median time of a step, but for the first three, which are slower."""
        times = [record["step_seconds"] for record in self.records[3:] or self.records]
        return statistics.median(times) if times else None

    @property
    def unit(self) -> str:
        """What is counted: "tokens" or "examples"."""
        return "tokens" if self.settings.task == "text" else "examples"

    @property
    def per_step(self) -> int:
        return self.settings.batch_size * (self.settings.context if self.unit == "tokens" else 1)

    def axis(self, over: str) -> list[float]:
        """Where each record lies along "steps", "tokens" (or examples) or "seconds"."""
        if over == "seconds":
            return list(itertools.accumulate(record["step_seconds"] for record in self.records))
        return [record["step"] * (1 if over == "steps" else self.per_step) for record in self.records]


def summary(runs: list[History]) -> list[dict]:
    """A row for each run; of several, speed-up over the first and efficiency: speed-up by times the ranks."""
    rows = []
    for run in runs:
        first, last = (run.records[place] if run.records else {} for place in (0, -1))
        mesh = ",".join(f"{axis}={size}" for axis, size in run.facts.mesh.items())
        row: dict[str, Any] = {
            "run": run.name,
            "strategy": run.facts.strategy,
            "implementation": run.facts.implementation,
            "mesh": mesh,
            "ranks": run.facts.world_size,
            "steps": f"{last.get('step', 0)}/{run.settings.steps}",
            "first_loss": first.get("loss"),
            "last_loss": last.get("loss"),
            "step_seconds": run.seconds,
            f"{run.unit}_per_second": run.per_step / run.seconds if run.seconds else None,
            "checkpoints": [manifest.step_of(path) for path in run.checkpoints],
        }
        if validated := [record for record in run.records if record.get("validation_loss") is not None]:
            best = min(validated, key=lambda record: record["validation_loss"])
            row["validation_loss"] = validated[-1]["validation_loss"]
            row |= {"best_validation_loss": best["validation_loss"], "at_step": best["step"]}
        if len(runs) > 1 and run.seconds and runs[0].seconds:
            row["speed_up"] = runs[0].seconds / run.seconds * run.per_step / runs[0].per_step
            row["efficiency"] = row["speed_up"] * runs[0].facts.world_size / run.facts.world_size
        rows.append(row)
    return rows


def by_rank(run: History) -> list[dict]:
    """A row for each rank, from its last report. Raises UserError where there was none."""
    reports = [record for record in run.records if "ranks" in record]
    if not reports:
        raise UserError(f"{run.path} has no report of its ranks yet: the first one comes after --log-every steps")
    return [{"rank": rank, **row} for rank, row in enumerate(reports[-1]["ranks"])]


def compare(one: History, other: History, tolerance: float) -> dict:
    """Where `other` leaves `one`: the first step at which a metric differs by more than `tolerance`, relative to the
    larger of the two; the largest such difference, None where one run has a number and the other none; and the settings
    in which the runs differ."""
    theirs = {record["step"]: record for record in other.records}
    first, largest, at = None, 0.0, None
    steps = [record for record in one.records if record["step"] in theirs]
    for record in steps:
        for metric in METRICS:
            a, b = record[metric], theirs[record["step"]][metric]
            if a == b:
                continue
            difference = abs(a - b) / max(abs(a), abs(b)) if a is not None and b is not None else float("inf")
            if difference > largest:
                largest, at = difference, record["step"]
            if difference > tolerance and first is None:
                first = {"step": record["step"], "metric": metric, one.name: a, other.name: b}
    ours, its = one.facts.config, other.facts.config
    settings = {**ours, **its}
    differ = {key: [ours.get(key), its.get(key)] for key in settings if ours.get(key) != its.get(key)}
    return {
        "runs": [one.name, other.name],
        "steps_compared": len(steps),
        "first_difference": first,
        "largest_difference": largest if math.isfinite(largest) else None,
        "at_step": at,
        "settings": {key: values for key, values in differ.items() if key not in ("run_dir", "resume")},
    }


def known_metrics(run: History) -> list[str]:
    """The names of the numbers in a run's metrics, in the order in which they first come."""
    lines = (line.items() for line in run.records)
    return [*dict.fromkeys(key for line in lines for key, n in line if isinstance(n, int | float) and key != "step")]


def draw(runs: list[History], metrics: list[str], over: str):
    """Metrics of runs as a matplotlib figure, one below the other. Raises UserError for one that a run lacks."""
    from common.lab.plotting import plt  # not at the top: it takes half a second

    fig, axes = plt.subplots(len(metrics), figsize=(7, 1 + 3 * len(metrics)), sharex=True, squeeze=False)
    for metric, ax in zip(metrics, axes.flat, strict=True):
        for run in runs:
            known = known_metrics(run)
            if run.records and metric not in known:
                raise UserError(f"--metric {metric}: {run.name} has none; it has {', '.join(known)}")
            # A validation loss is there for some steps only.
            pairs = zip(run.axis(over), run.records, strict=True)
            points = [(x, record[metric]) for x, record in pairs if metric in record]
            values = [float("nan") if value is None else value for _, value in points]
            few = "." if len(points) < 50 else ""
            ax.plot([x for x, _ in points], values, label=run.name, linewidth=1.5, marker=few)
        ax.set(ylabel=metric)
    counted = " or ".join(sorted({run.unit for run in runs}))
    axes[-1, 0].set(xlabel=counted if over == "tokens" else over)
    axes[0, 0].legend()
    return fig


def plot(runs: list[History], metrics: list[str], over: str, file: Path) -> None:
    """Write a picture of metrics of runs. Raises UserError."""
    fig = draw(runs, metrics, over)
    kind = file.suffix.removeprefix(".")
    if kind not in fig.canvas.get_supported_filetypes():
        raise UserError(f"--out {file}: pictures can be {', '.join(fig.canvas.get_supported_filetypes())}")
    write_out(file, lambda path: fig.savefig(path, format=kind))


def follow(run: str, *metrics: str, over: str = "steps", every: float = 2.0) -> None:
    """In a notebook's cell: metrics of a run (its loss, where none is named), drawn anew every so many seconds while it
    trains in another process, until it has ended or the cell is interrupted. Raises UserError.

        from common.runs import follow
        follow("runs/20260101-120000-ddp", "loss", "grad_norm")
    """
    from IPython.display import display

    from common.lab.plotting import plt

    shown, length = display(display_id=True), -1
    if shown is None:
        raise UserError("follow draws in a notebook's cell; elsewhere: python -m common.runs plot")
    try:
        while True:
            goes_on = is_written(History(run).path)  # asked first: its last lines are there once it has ended
            history = History(run)
            if history.records and len(history.records) > length:
                length = len(history.records)
                there = [name for name in metrics or ("loss",) if any(name in line for line in history.records)]
                fig = draw([history], there or ["loss"], over)
                shown.update(fig)
                plt.close(fig)
            if not goes_on or length >= history.settings.steps:
                known = known_metrics(history)
                if missing := [name for name in metrics if name not in known]:
                    print(f"{history.name} has no {' or '.join(missing)}; it has {', '.join(known)}")
                return
            time.sleep(every)
    except KeyboardInterrupt:
        pass


def is_written(folder: Path) -> bool:
    """Whether some process trains a run in a folder now, or may do so: whoever can't write there can't know."""
    try:
        Lock(folder).release()
    except (UserError, OSError):
        return True
    return False


def write_out(file: Path, write) -> None:
    """Write the file that --out names, or one in the run's folder. Raises UserError where that can't be done."""
    if os.path.isdir(file):
        raise UserError(f"--out {file} is a folder; name a file")
    there = os.path.exists(file) and not os.path.islink(file)
    if (reserved := there and not os.path.isfile(file)) or not os.path.isdir(file.parent):
        raise UserError(f"--out {file} is no regular file" if reserved else f"--out {file}: there is no such folder")
    try:
        stored.replace(file, write)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch.save, where the disk is full
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{file} cannot be written: {reason}") from error


def checkpoint_of(run: History, step: int | None) -> Path:
    """The checkpoint after `step` steps, by default the newest that is whole. Raises UserError."""
    there = {manifest.step_of(path): path for path in run.checkpoints}
    if step is not None and step not in there:
        raise UserError(f"--step {step}: {run.path} has checkpoints of steps {', '.join(map(str, there))}")
    wanted = run.checkpoints[::-1] if step is None else [there[step]]
    wrong = [manifest.damage(folder) for folder in wanted]
    folder = next((folder for folder, why in zip(wanted, wrong, strict=True) if not why), None)
    if folder is None:
        raise UserError((wrong and wrong[0]) or f"{run.path} has no checkpoint")
    return folder


def export(run: History, step: int | None, safetensors: bool, file: Path | None) -> dict:
    """Put the model of a checkpoint together in this process, tensor by tensor, and write one file. A weight that is
    tied stands there once, under its first name. Raises UserError."""
    folder = checkpoint_of(run, step)
    manifest.read(folder)  # refused at once, if it is damaged
    import torch  # what else looks at runs is there at once

    from common.checkpoint import whole_tensors

    lack = missing(("safetensors",)) if safetensors else None
    if lack:
        raise UserError(f"--safetensors: {lack}")
    file = file or run.path / f"model-{manifest.step_of(folder):06d}.{'safetensors' if safetensors else 'pt'}"
    tensors = whole_tensors(folder)
    if safetensors:
        from safetensors.torch import save_file  # what else looks at runs needs no such package

        # transformers refuses a file that lacks the metadata
        write_out(file, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    else:
        write_out(file, lambda path: torch.save(tensors, path))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return {"file": str(file), "checkpoint": str(folder), "tensors": len(tensors), "numbers": numbers}


# --- the command --------------------------------------------------------------------------------------------------


def shown(value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return stored.printable(text)


def table(rows: list[dict]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return "\n".join(aligned([columns, *([shown(row.get(key)) for key in columns] for row in rows)]))


def comparison_text(result: dict) -> str:
    """A comparison in words."""
    a, b = result["runs"]
    lines = [f"{a} and {b}: {result['steps_compared']} steps"]
    first = result["first_difference"]
    if first:
        lines.append(f"  differ first at step {first['step']}: {first['metric']} {first[a]} and {first[b]}")
    else:
        lines.append("  differ nowhere by more than the tolerance")
    at = f", at step {result['at_step']}" if result["at_step"] else ""
    largest = result["largest_difference"]
    size = "infinite (one has no number)" if largest is None else f"{largest:.2g}"
    lines.append(f"  largest relative difference {size}{at}")
    lines += [f"  {key.replace('_', '-')}: {one} and {other}" for key, (one, other) in result["settings"].items()]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="python -m common.runs", description=__doc__.splitlines()[0])
    commands = top.add_subparsers(dest="command", required=True)
    made = {}
    for name, about, how_many in (
        ("list", "what there is under runs/", None),
        ("summary", "losses, speed, checkpoints; of several runs, speed-up over the first", "+"),
        ("ranks", "of each rank: host, memory, use of its processor, time waited", 1),
        ("plot", "metrics over steps, tokens or seconds", "+"),
        ("compare", "the first step at which each run differs from the first", "+"),
        ("export", "the model of a checkpoint in one file", 1),
    ):
        made[name] = commands.add_parser(name, help=about)
        made[name].add_argument("--json", action="store_true", help="print JSON")
        if how_many:
            made[name].add_argument("runs", nargs=how_many, metavar="RUN")
    made["plot"].add_argument(
        "--metric",
        nargs="+",
        default="loss",
        help="keys of metrics.jsonl, drawn one below the other (default: loss)",
    )
    made["plot"].add_argument("--over", choices=("steps", "tokens", "seconds"), default="steps")
    made["plot"].add_argument("--out", type=Path, default=Path("runs.png"), help="the picture (default: runs.png)")
    made["compare"].add_argument("--tolerance", type=finite, default=1e-5, help="relative (default: 1e-5)")
    made["export"].add_argument("--safetensors", action="store_true", help="in this format, and not as torch.save does")
    made["export"].add_argument("--step", type=int, help="of which checkpoint (default: the newest that is whole)")
    made["export"].add_argument("--out", type=Path, help="the file (default: in the run's folder)")
    return top


def main(argv: list[str] | None = None) -> None:
    asked = parser().parse_args(argv)
    if asked.command == "list":
        names = sorted(str(path.parent) for path in Path("runs").glob("*/config.json"))
    else:
        names = asked.runs
    if asked.command == "compare" and not asked.tolerance >= 0:  # nor nan
        raise UserError(f"--tolerance must be 0 or more, not {asked.tolerance:g}")
    runs, damaged = [], []
    for name in names:
        try:
            runs.append(History(name))
        except UserError as error:
            if asked.command != "list":  # one folder that is damaged says nothing of the others
                raise
            damaged.append(f"left out: {error}")
    found: list[dict] | dict
    if asked.command in ("list", "summary"):
        rows = [summary([run])[0] for run in runs] if asked.command == "list" else summary(runs)
        found, text = rows, table(rows) if rows else "there is no run under runs/"
    elif asked.command == "ranks":
        found = rows = by_rank(runs[0])
        text = table(rows)
    elif asked.command == "plot":
        metrics = asked.metric if isinstance(asked.metric, list) else [asked.metric]
        plot(runs, metrics, asked.over, asked.out)
        found, text = {"file": str(asked.out)}, str(asked.out)
    elif asked.command == "compare":
        if len(runs) < 2:
            raise UserError("compare needs two runs or more")
        found = rows = [compare(runs[0], other, asked.tolerance) for other in runs[1:]]
        text = "\n".join(map(comparison_text, rows))
    else:
        found = export(runs[0], asked.step, asked.safetensors, asked.out)
        text = f"{found['file']}: {found['tensors']} tensors, {found['numbers']:,} numbers, of {found['checkpoint']}"
    print(json.dumps(found, indent=1, allow_nan=False) if asked.json else text)
    for line in damaged:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
