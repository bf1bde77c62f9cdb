"""The run directory: configuration, metrics, checkpoints, loss curve. Rank 0 writes all but checkpoints.

config.json          every setting, with the strategy, the world size and the versions
metrics.jsonl        one JSON object per optimizer step, flushed at each
checkpoint-000150/   the state after 150 steps, in pieces (common/manifest.py); the newest are kept
loss.png             the loss curve
profile/             with --profile, what each rank did in some steps
tensorboard/         with --tensorboard, the metrics as TensorBoard reads them
.lock                locked by rank 0 while it writes here
"""

import contextlib
import errno
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common import manifest, stored
from common.errors import UserError
from common.launcher import environment
from common.lock import Lock
from common.options import LATEST

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LINE = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one for each step


class RunDirectory:
    """The folder of a run, as rank 0 has it, which alone writes to it.

    resumes:     a run that was begun in this folder goes on
    restarted:   because torchrun has started its ranks again
    checkpoints: those that it may go on from, the best first
    is_named:    whether the user named the one
    """

    writes = True

    def __init__(self, config, world_size: int, launches: list[str] | None = None):
        """Begin a run in config.run_dir, or go on with one: on --resume, and where torchrun has restarted the ranks
        of a run that has a checkpoint already. `launches` has `this_launch()` of every rank. Raises UserError where it
        cannot be written, and where a living run writes there."""
        import torch  # not at the top: a --resume that cannot be is refused before it is imported

        self.path, self.keep, self.keep_best = Path(config.run_dir), config.keep, config.keep_best
        self.best: tuple[float, int] | None = None  # the lowest loss of --validate-every, and the step that it is of
        self.board: SummaryWriter | None = None
        newest_first = manifest.checkpoints(self.path)[::-1]
        self.restarted = restarts(self.path) and bool(newest_first)
        self.resumes = self.restarted or resumes_in_place(config.resume, self.path)
        self.is_named = not self.restarted and config.resume not in ("", LATEST)
        self.checkpoints = [named(config.resume, self.path)] if self.is_named else newest_first if self.resumes else []
        with self.disk_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.path)
            for left in manifest.unfinished(self.path):
                shutil.rmtree(left)
            facts = stored.Facts(
                config=config.settings(),
                strategy=config.strategy,
                implementation=config.implementation,
                mesh=config.axes,
                world_size=world_size,
                # Of all nodes: when rank 0's is lost, another node's rank becomes rank 0.
                launch=sorted({*(launches or [this_launch()])}),
                torch=torch.__version__,
                python=platform.python_version(),
            )
            text = json.dumps(msgspec.structs.asdict(facts), indent=2) + "\n"
            self._replace("config.json", lambda path: path.write_text(text))
            # A run that begins anew in its folder has died before its first checkpoint.
            self.metrics = self._open_metrics(empty=not self.resumes)

    @contextlib.contextmanager
    def disk_errors(self):
        """Failures of the disk become one line."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run directory {self.path}: {error.strerror}; make room or name another with --run-dir"
                f"{manifest.still_there(self.path)}"
            ) from error

    def _replace(self, name: str, write) -> None:
        stored.replace(self.path / name, write)

    def _open_metrics(self, empty: bool = False):
        return os.fdopen(stored.to_append(self.path / "metrics.jsonl", os.O_TRUNC * empty), "a")

    def log(self, record: dict) -> None:
        self._note_best(record)
        with self.disk_errors():
            self.metrics.write(LINE(record) + "\n")
            self.metrics.flush()
            for name, value in record.items():
                if self.board and isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(name, value, record["step"])

    def _note_best(self, record: dict) -> None:
        loss = record.get("validation_loss")
        if loss is not None and (self.best is None or loss < self.best[0]):
            self.best = loss, record["step"]

    def write_board(self, done: int) -> None:
        """Write metrics for TensorBoard, too, from here on; what it has of steps after `done` it will not show."""
        from torch.utils.tensorboard import SummaryWriter  # whoever does not ask for it need not have it

        with self.disk_errors():
            self.board = SummaryWriter(self.path / "tensorboard", purge_step=done + 1)

    def drop_after(self, step: int) -> None:
        """Drop metrics and checkpoints of steps after `step`, which a resumed run is about to do again."""
        records = [record for record in stored.records_of(self.path) if record["step"] <= step]
        for record in records:
            self._note_best(record)
        kept = [LINE(record) for record in records]
        with self.disk_errors():
            self.metrics.close()
            self._replace("metrics.jsonl", lambda path: path.write_text("".join(line + "\n" for line in kept)))
            self.metrics = self._open_metrics()
            for later in manifest.checkpoints(self.path):
                if manifest.step_of(later) > step:
                    manifest.remove(later)

    def sync_metrics(self) -> None:
        """Before a checkpoint is written: whoever goes on from it wants the metrics before it."""
        with self.disk_errors():
            os.fsync(self.metrics.fileno())

    def keep_newest(self) -> None:
        """Remove all but the newest checkpoints, and with --keep-best the best."""
        best = self.best[1] if self.keep_best and self.best else None
        with self.disk_errors():
            for old in manifest.checkpoints(self.path)[: -self.keep]:
                if manifest.step_of(old) != best:
                    manifest.remove(old)

    def finish(self) -> None:
        """Close the metrics and draw the loss curve."""
        with self.disk_errors():
            self.metrics.close()
            if self.board:
                self.board.close()
            records = stored.records_of(self.path)
            if records:
                self._replace("loss.png", lambda path: loss_curve(records).savefig(path, format="png"))
        self.lock.release()


@dataclass(frozen=True)
class OtherRank:
    """The folder of a run as ranks other than 0 have it: they know what rank 0 does, and write nothing."""

    path: Path
    resumes: bool
    restarted: bool
    checkpoints: list[Path]
    is_named: bool

    writes = False

    def log(self, record: dict) -> None: ...
    def write_board(self, done: int) -> None: ...
    def drop_after(self, step: int) -> None: ...
    def sync_metrics(self) -> None: ...
    def keep_newest(self) -> None: ...
    def finish(self) -> None: ...


def open_run(config) -> RunDirectory | OtherRank:
    """The folder of the run that all ranks begin or go on with. Collective. What goes wrong raises UserError on rank 0,
    for which the others wait until it has ended."""
    import torch.distributed as dist

    launches = [""] * dist.get_world_size()
    dist.all_gather_object(launches, this_launch())
    main_rank = dist.get_rank() == 0
    directory = RunDirectory(config, len(launches), launches) if main_rank else None
    # Rank 0 knows: after a restart the nodes need not agree on how many checkpoints there were.
    names = [item.name for item in fields(OtherRank)]
    box = [[getattr(directory, name) for name in names] if directory else []]
    dist.broadcast_object_list(box, src=0)
    return directory or OtherRank(*box[0])


def loss_curve(records: list[dict]):
    """The loss of each step, from the lines of metrics.jsonl, as a matplotlib figure."""
    from common.lab.plotting import plt  # not at the top: it takes half a second, and most ranks never draw

    fig, ax = plt.subplots(figsize=(7, 4))
    ax.plot([record["step"] for record in records], [record["loss"] for record in records], linewidth=1.5)
    ax.set(xlabel="optimizer step", ylabel="loss (mean over the global batch)", ylim=(0, None))
    return fig


def resumes_in_place(resume: str, run: Path) -> bool:
    """Is `resume`, the value of --resume, a checkpoint of the run in folder `run`?"""
    return bool(resume) and (is_step(resume) or Path(resume).resolve().parent == run.resolve())


def is_step(resume: str) -> bool:
    """Does --resume name a checkpoint of the run directory, and not any folder?"""
    return resume == LATEST or resume.isdecimal()


def named(resume: str, run: Path) -> Path:
    """The checkpoint that --resume names, by its step or its folder."""
    return run / manifest.name_of(int(resume)) if resume.isdecimal() else Path(resume)


def saved_settings(values: dict) -> dict:
    """The settings of the run that `values` ask to resume, with "run_dir". Raises UserError where there is none."""
    resume = values["resume"]
    if not is_step(resume):
        if os.path.isfile(resume):  # unlike Path's, False for what may not be looked at, and for a name too long
            raise UserError(f"--resume {resume} is a file, and a checkpoint is a folder; give that, or a step")
        if not os.path.isdir(resume):
            raise UserError(f"--resume {resume}: no such folder; give a step or the folder of a checkpoint")
        if os.path.exists(Path(resume, "config.json")) and not os.path.exists(Path(resume, manifest.MANIFEST)):
            raise UserError(f"--resume {resume} is a run, not a checkpoint; write --resume --run-dir {resume}")
        about = manifest.read(Path(resume)).about
        refuse_damaged([Path(resume)])
        if "settings" not in about:
            raise UserError(f"--resume: {resume} is no checkpoint of a run of this course")
        return about["settings"] | {"run_dir": values.get("run_dir") or str(Path(resume).parent)}
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    folder = Path(values["run_dir"]) if values.get("run_dir") else runs[-1].parent if runs else None
    if folder is None:
        raise UserError("--resume: there is no run under runs/; name its folder with --run-dir")
    found = manifest.checkpoints(folder)
    if not found and os.path.isdir(folder) and list(folder.glob("checkpoint-*.pt")):
        raise UserError(
            f"--resume: the checkpoints in {folder} are single files, as earlier versions of this course wrote them; "
            f"this version reads folders only, so start a new run"
        )
    if not os.path.exists(folder / "config.json") or not found:
        begun = os.path.exists(folder / "metrics.jsonl")  # by a run that was killed before its first checkpoint
        advice = "start again in another folder" if begun else "leave --resume out to start there"
        raise UserError(f"--resume: no checkpoint in {folder}; {advice}")
    if resume != LATEST and named(resume, folder) not in found:
        there = ", ".join(str(manifest.step_of(path)) for path in found)
        raise UserError(f"--resume {resume}: {folder} has no checkpoint of that step; it has {there}")
    facts = stored.facts_of(folder)
    refuse_damaged([named(resume, folder)] if resume != LATEST else found[::-1])
    if os.path.exists(folder / "metrics.jsonl"):
        stored.records_of(folder)
    return facts.config | {"run_dir": str(folder)}


def refuse_damaged(candidates: list[Path]) -> None:
    """Raise UserError where all checkpoints that a run may go on from are seen to be damaged, the best first, before
    PyTorch is imported. Contents are compared with their checksums later, by all ranks together."""
    wrong = []
    for folder in candidates:
        found = manifest.damage_at_sight(folder)
        if not found:
            return
        wrong.append(found)
    advice = "--resume alone takes the newest checkpoint that is whole" if len(wrong) == 1 else "no other is whole"
    raise UserError(f"--resume: {wrong[0]}; {advice}")


def this_launch() -> str:
    """A name that no other launch has on this node, and that stays when torchrun restarts the ranks; "" without
    torchrun."""
    # The elastic agent makes a folder for its logs, once, under a random name: NAME/attempt_0/0/error.json.
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return file.parents[2].name if len(file.parents) > 2 else ""


def restarts(folder: Path) -> bool:
    """Was the run in `folder` begun by this very launch: has torchrun --max-restarts started its ranks again?"""
    try:
        return bool(this_launch()) and this_launch() in stored.facts_of(folder).launch
    except UserError:
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


def claim(config) -> None:
    """Name the folder of a run that has none yet. Raises UserError on rank 0 unless a run can be written there."""
    config.run_dir = config.run_dir or new_run_dir(config)
    if environment()[0] == 0:
        require_writable(Path(config.run_dir), config.resume)


def require_writable(folder: Path, resume: str) -> None:
    """Raise UserError unless a run can be written to `folder`, which is made if it is not there."""
    try:
        if (folder / "metrics.jsonl").exists() and not resumes_in_place(resume, folder) and not restarts(folder):
            how = "add --resume to go on, or name another" if manifest.checkpoints(folder) else "name another"
            raise UserError(f"--run-dir {folder} holds a run already; {how}")
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        Lock(folder).release()
    except OSError as error:
        advice = "make room, or name another folder" if error.errno == errno.ENOSPC else "name another folder"
        raise UserError(f"--run-dir {folder} cannot be written: {error.strerror}; {advice}") from error
