"""The settings of a run: what every strategy has in common, in groups, and the checks of their values.

What belongs to one strategy only (its options, and what it requires) is declared by that strategy, in its chapter.
common/command_line.py reads these settings.
"""

import os
import reprlib
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from common.axes import AXES
from common.constants import BEFORE_PROFILE, MOST_LAYERS, MOST_WIDTH, MOST_WRITTEN, PRECISIONS
from common.did_you_mean import did_you_mean
from common.errors import UserError
from common.installed import missing
from common.launcher import environment
from common.options import LATEST, StrategyOptions, flag, option
from common.own import file_of, is_own

if TYPE_CHECKING:  # both import torch, and a wrong value is refused before that
    from torch.distributed.device_mesh import DeviceMesh

    from common.strategy import Setup
    from common.strategy_entry import StrategyEntry


@dataclass
class Config:
    """Every option that all strategies share, in the order in which --help shows them; `run_dir` is --run-dir.

    Beside the fields, `options` are the strategy's own, `axes` the resolved sizes of its mesh, outermost axis first,
    and `entry` is its line in the table of strategies.
    """

    GROUPS = {  # the first option of each group of --help
        "strategy": "how training is spread over the ranks",
        "steps": "the run",
        "layers": "the model",
        "optimizer": "the optimizer",
        "task": "the data",
    }

    strategy: str = option(
        "", "one of these, or auto: the fastest by the planner (default: what --mesh names, else the chapter's own)"
    )
    implementation: str = option("", "pytorch, by-hand, or another that the strategy has (default: pytorch)")
    by_hand: bool = option(False, "short for --implementation by-hand: built from collectives")
    mesh: str = option("", f"ranks along each axis, as in data=2,tensor=2; axes: {', '.join(AXES)}")
    mesh_order: str = option("", "axes from outermost to innermost (default: as above)")
    distributed: bool = option(False, "join the processes that torchrun started")
    backend: str = option("auto", "auto: NCCL where each process has a GPU, else gloo", ("auto", "gloo", "nccl"))
    device: str = option("auto", "auto: CUDA where each process has a GPU, else the CPU", ("auto", "cpu", "cuda"))
    check_collectives: bool = option(False, "compare each collective across the ranks before it starts")
    debug_server: int = option(
        0,
        "port on which rank 0 shows where all ranks are, in a browser, for who can reach it; 0: none",
        at_least=0,
        at_most=65535,
    )
    timeout: float = option(300.0, "seconds that a rank waits for the others in a collective")
    steps: int = option(250, "optimizer steps", at_least=1)
    epochs: int = option(
        0, "passes over the data, in the place of --steps: as many steps as these have whole batches", at_least=0
    )
    dry_run: bool = option(False, "say what each rank would read, hold and send, for the ranks of --mesh, and exit")
    run_dir: str = option("", "where the run is kept (default: a new folder under runs/)")
    checkpoint_every: int = option(50, "steps between checkpoints; 0: only one at the end", at_least=0)
    keep: int = option(2, "newest checkpoints that are kept", at_least=1)
    keep_best: bool = option(False, "also keep the checkpoint with the lowest loss of --validate-every")
    async_checkpoint: bool = option(False, "write checkpoints while training goes on, from a copy in host memory")
    resume: str = option(
        "",
        "go on from a checkpoint of --run-dir (default: the newest, of the newest run), or from any",
        bare=LATEST,
        takes="STEP|FOLDER",
    )
    validate_every: int = option(
        0, "steps between losses on text that is not trained on, and one at the end; 0: none", at_least=0
    )
    validate_batch_size: int = option(
        0, "examples in a global batch of --validate-every; 0: as many as a step has at once", at_least=0
    )
    log_every: int = option(10, "steps between the lines that rank 0 prints", at_least=1)
    profile: int = option(0, "steps that torch.profiler records on each rank, after ten others", at_least=0)
    tensorboard: bool = option(False, "also write the metrics for TensorBoard, into the run directory")
    sample: int = option(0, "bytes that the model writes before and after training", at_least=0, at_most=MOST_WRITTEN)
    layers: int = option(4, "the GPT's blocks", identity=True, at_least=1, at_most=MOST_LAYERS)
    width: int = option(128, "the GPT's activations per token", identity=True, at_least=1, at_most=MOST_WIDTH)
    heads: int = option(4, "the GPT's attention heads; they divide the width", identity=True, at_least=1)
    precision: str = option("fp32", "of the forward pass", PRECISIONS)
    tf32: bool = option(False, "on GPUs, round what float32 products multiply to TF32")
    compile: str = option(
        "",
        "compile each block by torch.compile's backend of this name; bare: inductor",
        bare="inductor",
        takes="BACKEND",
    )
    seed: int = option(
        0, "of the initial weights and of the order of the data", identity=True, at_least=0, at_most=2**31 - 1
    )
    optimizer: str = option("adamw", "which one", ("sgd", "adamw"), identity=True)
    lr: float = option(2e-3, "learning rate, reached after a linear warm-up", identity=True)
    warmup_steps: int = option(20, "steps of the warm-up", identity=True, at_least=0)
    lr_schedule: str = option(
        "constant", "after the warm-up; cosine: down to a tenth at --steps", ("constant", "cosine"), identity=True
    )
    weight_decay: float = option(0.1, "of adamw: a step takes this x lr of a weight away", identity=True, at_least=0)
    beta1: float = option(0.9, "of adamw: how slowly the mean of gradients changes", identity=True, at_least=0)
    beta2: float = option(0.95, "of adamw: the same, of squared gradients", identity=True, at_least=0)
    fused: bool = option(False, "of adamw: a step in one kernel, in place of one for each operation")
    max_norm: float = option(1.0, "the gradient's 2-norm is clipped to this; inf: not at all", identity=True)
    task: str = option(
        "text", "text: a GPT on bytes; images: a small ResNet; FILE.py: its model() on its data()", identity=True
    )
    context: int = option(128, "tokens per example of text", identity=True, at_least=1)
    text: str = option("", "file or folder to learn the bytes of (default: Python's standard library)", identity=True)
    dataset: str = option("digits", "pictures for --task images", ("digits", "fashion-mnist", "cifar10"), identity=True)
    data_dir: str = option("data", "where fashion-mnist or cifar10 lie")
    download: bool = option(False, "download the dataset to --data-dir if it is not there")
    batch_size: int = option(32, "examples in the GLOBAL batch of a step", identity=True, at_least=1)
    accumulation_steps: int = option(1, "backward passes per step on each rank", at_least=1)

    options: Any = field(default_factory=StrategyOptions, metadata={})
    axes: dict = field(default_factory=lambda: {"data": 1}, metadata={})
    entry: "StrategyEntry" = field(default=None, metadata={})  # type: ignore[assignment]  # whoever starts a run has it

    @property
    def strategy_class(self):
        """The class that trains."""
        return self.entry.implementation(self.implementation)

    @property
    def trains(self) -> bool:
        """Whether this run trains, and so needs a folder of its own."""
        return self.options.trains and not self.dry_run

    @property
    def main(self):
        """The function that trains: of the strategy's chapter, or of an engine that has a loop of its own."""
        return self.strategy_class.main or self.entry.main

    def setup(self, mesh: "DeviceMesh") -> "Setup":
        """What the strategy is built with, on the ranks of a mesh."""
        from common.strategy import Setup

        return Setup(mesh, self.options, self.precision, self.max_norm)

    def settings(self) -> dict:
        """All options by name, the strategy's own included: what config.json keeps."""
        own = {item.name: getattr(self.options, item.name) for item in fields(self.options)}
        return {item.name: getattr(self, item.name) for item in shared()} | own


def take_over(config: Config, settings: dict, whose: str) -> None:
    """Make what a file of an engine sets the run's own settings. Raises UserError where an option says otherwise.
    `whose` is what the error begins with."""
    for name, value in settings.items():
        given = getattr(config, name)
        if given not in (getattr(type(config), name), value):
            raise UserError(f"{whose} means {flag(name)} {value}, and {flag(name)} is {given}; leave one of them out")
        setattr(config, name, value)


def shared():
    """The fields of Config that are options."""
    return [item for item in fields(Config) if item.metadata]


def check(config: Config) -> None:
    """Raise UserError for what cannot work, as far as it can be known before ranks meet."""
    from common import compiled
    from common.ranks import choose

    check_alone(config)
    if not config.dry_run:
        choose(config.device, config.backend, environment()[3])
    if config.compile:
        compiled.require(config)
    config.strategy_class.require(config, config.axes)


def check_alone(config: Config) -> None:
    """The part of `check` that needs no PyTorch."""
    check_launch(config)
    check_values(config)
    check_combinations(config)
    check_length(config)
    if config.task == "images":
        lacking = missing(("torchvision", "sklearn") if config.dataset == "digits" else ("torchvision",))
        if lacking:
            raise UserError(f"--task images: {lacking}")
    if config.tensorboard and missing(("tensorboard",)):
        raise UserError("--tensorboard needs the package tensorboard: pip install tensorboard; or leave it out")


def check_launch(config: Config) -> None:
    """Raise UserError where the processes were not started as --distributed says."""
    size = environment()[1]
    if config.distributed and "RANK" not in os.environ and not config.dry_run:
        raise UserError(
            "--distributed: no launcher started this process; "
            "try: torchrun --nproc_per_node=2 distributed_training.py --distributed"
        )
    if size > 1 and not config.distributed:
        raise UserError(
            f"{size} processes were started without --distributed: each would train alone; add --distributed"
        )


def check_values(config: Config) -> None:
    """Raise UserError for an option whose value cannot be, whatever the others are."""
    values = [(item, getattr(config, item.name)) for item in shared()]
    values += [(item, getattr(config.options, item.name)) for item in fields(config.options)]
    for item, value in values:
        least, most = item.metadata["at_least"], item.metadata["at_most"]
        if least is not None and not least <= value < float("inf"):
            raise UserError(f"{flag(item.name)} must be a number of at least {least}, got {value}")
        if most is not None and value > most:
            raise UserError(f"{flag(item.name)} must be at most {most}, got {value}")
        if item.metadata["choices"] and value not in item.metadata["choices"]:
            choices, given = ", ".join(item.metadata["choices"]), reprlib.repr(value)  # a file's may be very long
            raise UserError(f"{flag(item.name)}: expected one of {choices}, got {given}")
    if config.task not in ("text", "images") and not is_own(config.task):
        hint = did_you_mean(config.task, ("text", "images"))
        raise UserError(f"--task {config.task}: expected text, images, or a FILE.py of yours; {hint}".rstrip("; "))
    if is_own(config.task) and not os.path.isfile(file_of(config.task)):
        raise UserError(f"--task {config.task}: there is no such file")
    if not 0 < config.lr < float("inf"):
        raise UserError(f"--lr must be a positive number, got {config.lr}")
    if not config.max_norm > 0:
        raise UserError(f"--max-norm must be a positive number, or inf for no clipping; got {config.max_norm}")
    if not 0 < config.timeout < float("inf"):
        raise UserError(f"--timeout must be a positive number of seconds, got {config.timeout}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"--{name} must be at least 0 and less than 1, got {getattr(config, name)}")


def check_combinations(config: Config) -> None:
    """Raise UserError for options that do not belong together."""
    for item in shared():
        of_adamw = item.name in ("weight_decay", "beta1", "beta2", "fused")
        if of_adamw and getattr(config, item.name) != item.default and config.optimizer == "sgd":
            raise UserError(f"{flag(item.name)} belongs to --optimizer adamw; leave one of them out")
    for name in ("sample", "validate_every", "text"):
        fits = config.task == "text" or name == "validate_every" and is_own(config.task)
        if getattr(config, name) and not fits:
            raise UserError(f"{flag(name)} is for --task text; leave it out")
    if config.dataset != "digits" and config.task != "images":
        raise UserError(f"--dataset {config.dataset} is for --task images; add that, or leave it out")
    if config.data_dir != "data" and config.dataset == "digits":
        where = "; text of your own: --text FILE_OR_FOLDER" if config.task == "text" else ", and --dataset is digits"
        raise UserError(f"--data-dir is where fashion-mnist or cifar10 lie{where}")
    if config.download and config.dataset == "digits":
        raise UserError("--download is for fashion-mnist and cifar10, and --dataset is digits; leave it out")
    if config.async_checkpoint and not config.checkpoint_every:
        raise UserError(
            "--async-checkpoint writes while training goes on, and with --checkpoint-every 0 only the end is written; "
            "leave one of them out"
        )
    if config.text and not os.path.exists(config.text):
        raise UserError(f"--text {config.text}: no such file or folder")
    if config.width % config.heads:
        raise UserError(f"--width {config.width} does not divide by --heads {config.heads}")


def check_length(config: Config) -> None:
    """Raise UserError for a run's length and for what is done every so many steps, where these do not fit."""
    default = next(item.default for item in shared() if item.name == "steps")
    if config.epochs and config.steps != default and not config.resume:
        raise UserError("--steps and --epochs say the same thing in two units; leave one of them out")
    for name in ("keep_best", "validate_batch_size"):
        if getattr(config, name) and not config.validate_every:
            raise UserError(f"{flag(name)} is for the losses of --validate-every; add that, or leave it out")
    if config.keep_best and config.checkpoint_every and config.validate_every % config.checkpoint_every:
        raise UserError(
            f"--keep-best: there is a loss every {config.validate_every} steps and a checkpoint every "
            f"{config.checkpoint_every}; let --validate-every be a multiple of --checkpoint-every"
        )
    if config.profile and not config.epochs and config.steps <= BEFORE_PROFILE:
        raise UserError(
            f"--profile records after {BEFORE_PROFILE} steps, and there are {config.steps}; ask for more --steps"
        )
