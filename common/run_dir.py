"""The run directory: configuration, metrics, checkpoints, loss curve. Only rank 0 writes.

config.json          every setting, with the strategy, the world size and the versions
metrics.jsonl        one JSON object per optimizer step, flushed at each
checkpoint-000150.pt the full state after 150 steps; the newest two are kept
loss.png             the loss curve
"""

import contextlib
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import torch

from common.errors import UserError

LINE = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one for each step
KEEP = 2  # if the newest checkpoint proves bad there is one before it


class RunDirectory:
    def __init__(self, config, world_size: int):
        """Begin a run in config.run_dir, or go on with one: on --resume, and where torchrun has restarted the ranks
        of a run that has a checkpoint already. Raises UserError where it cannot be written."""
        self.path = Path(config.run_dir)
        self.goes_on = config.resume or (restarts(self.path) and bool(self.checkpoints()))
        with self.told():
            self.path.mkdir(parents=True, exist_ok=True)
            facts = {
                "config": config.settings(),
                "strategy": config.strategy,
                "implementation": config.implementation,
                "mesh": config.axes,
                "world_size": world_size,
                "launch": this_launch(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            self._replace("config.json", lambda path: path.write_text(json.dumps(facts, indent=2) + "\n"))
            # A run that begins anew in its folder has died before its first checkpoint.
            self.metrics = open(self.path / "metrics.jsonl", "a" if self.goes_on else "w")

    @contextlib.contextmanager
    def told(self):
        """Failures of the disk become one line."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
            whole = "a checkpoint could not be written whole, as on a full disk"
            reason = error.strerror if isinstance(error, OSError) else whole
            raise UserError(
                f"run directory {self.path}: {reason}; make room or name another with --run-dir "
                f"(checkpoints written before are whole; --resume goes on from them)"
            ) from error

    def _replace(self, name: str, write) -> None:
        """Write beside the file and rename, so that at every moment `name` is whole or as it was."""
        beside = self.path / f".{name}.partial"
        try:
            write(beside)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            beside.replace(self.path / name)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def log(self, record: dict) -> None:
        with self.told():
            self.metrics.write(LINE(record) + "\n")
            self.metrics.flush()

    def records(self) -> list[dict]:
        """All lines of metrics.jsonl."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which a resumed run is about to do again."""
        kept = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # a last line cut off by a full disk
                kept += [line] if json.loads(line)["step"] <= step else []
        with self.told():
            self.metrics.close()
            self._replace("metrics.jsonl", lambda path: path.write_text("".join(line + "\n" for line in kept)))
            self.metrics = open(self.path / "metrics.jsonl", "a")

    def save(self, state: dict) -> Path:
        """Write a checkpoint of `state`, which has "step"; remove all but the newest ones."""
        path = self.path / f"checkpoint-{state['step']:06d}.pt"
        with self.told():
            self._replace(path.name, lambda beside: torch.save(state, beside))
            for old in self.checkpoints()[:-KEEP]:
                old.unlink()
        return path

    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.path.glob("checkpoint-*.pt"))

    def load(self) -> dict:
        """The newest checkpoint. Raises UserError where it cannot be read."""
        path = self.checkpoints()[-1]
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises what pickle, zip and the system raise
            raise UserError(
                f"--resume: {path} cannot be read ({type(error).__name__}); remove it to go on from the one before"
            ) from error

    def finish(self) -> None:
        """Close the metrics and draw the loss curve."""
        with self.told():
            self.metrics.close()
            records = self.records()
            if records:
                self._replace("loss.png", lambda path: loss_curve(records).savefig(path, format="png"))


def loss_curve(records: list[dict]):
    """The loss of each step, from the lines of metrics.jsonl, as a matplotlib figure."""
    from common.lab.plotting import plt  # not at the top: it takes half a second, and most ranks never draw

    fig, ax = plt.subplots(figsize=(7, 4))
    ax.plot([record["step"] for record in records], [record["loss"] for record in records], linewidth=1.5)
    ax.set(xlabel="optimizer step", ylabel="loss (mean over the global batch)", ylim=(0, None))
    return fig


def saved_settings(values: dict) -> dict:
    """The settings of the run that `values` ask to resume, with "run_dir". Raises UserError where there is none."""
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    folder = Path(values["run_dir"]) if values.get("run_dir") else runs[-1].parent if runs else None
    if folder is None:
        raise UserError("--resume: there is no run under runs/; name its folder with --run-dir")
    if not (folder / "config.json").exists() or not list(folder.glob("checkpoint-*.pt")):
        raise UserError(f"--resume: no checkpoint in {folder}; leave --resume out to start there")
    return json.loads((folder / "config.json").read_text())["config"] | {"run_dir": str(folder)}


def this_launch() -> str:
    """A name that no other launch has, and that stays when torchrun restarts the ranks; "" without torchrun."""
    # The elastic agent makes a folder for its logs, once, under a random name: NAME/attempt_0/0/error.json.
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return file.parents[2].name if len(file.parents) > 2 else ""


def restarts(folder: Path) -> bool:
    """Was the run in `folder` begun by this very launch: has torchrun --max-restarts started its ranks again?"""
    try:
        return bool(this_launch()) and json.loads((folder / "config.json").read_text()).get("launch") == this_launch()
    except (OSError, ValueError):
        return False


def new_run_dir(config) -> str:
    """A folder under runs/ that is not there yet, or that of the attempt before where torchrun restarts the ranks."""
    begun = [folder for folder in Path("runs").glob("*") if restarts(folder)]
    if begun:
        return str(begun[0])
    kind = "" if config.implementation == "pytorch" else f"-{config.implementation}"
    name = time.strftime("%Y%m%d-%H%M%S-") + config.strategy + kind
    taken = len(list(Path("runs").glob(name + "*")))
    return str(Path("runs", f"{name}-{taken + 1}" if taken else name))


def claim(folder: Path, resume: bool) -> None:
    """Raise UserError unless a run can be written to `folder`."""
    if (folder / "metrics.jsonl").exists() and not resume and not restarts(folder):
        raise UserError(f"--run-dir {folder} holds a run already; add --resume to go on, or name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be written: {error.strerror}; name another folder") from error
