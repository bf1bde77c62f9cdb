"""The command line and the configuration file: one set of options for every strategy, defined once."""

import argparse
import difflib
import json
import os
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from course.strategies import find, load

from common.errors import UserError
from common.model import VOCABULARY
from common.ranks import choose, environment

# How the ranks get their examples: "shard" with every strategy, the others with that of chapter 03.
LOADING = ("dispatch", "shard", "stream", "shard-stream", "shard-stream-workers")


def option(default, help: str, choices: tuple = ()):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Config:
    """Every option, in the order in which --help shows them; `run_dir` is --run-dir, and so on."""

    distributed: bool = option(False, "join the processes that torchrun started")
    strategy: str = option("", "how training is spread over the ranks (default: the chapter's own)")
    by_hand: bool = option(False, "the implementation from collectives instead of PyTorch's")
    check_collectives: bool = option(False, "compare each collective across the ranks before it starts")
    task: str = option("text", "text: a GPT on bytes; images: a small ResNet", ("text", "images"))
    dataset: str = option("digits", "pictures for --task images", ("digits", "fashion-mnist", "cifar10"))
    data_dir: str = option("data", "where fashion-mnist or cifar10 lie")
    download: bool = option(False, "download the dataset to --data-dir if it is not there")
    steps: int = option(250, "optimizer steps")
    batch_size: int = option(32, "examples in the GLOBAL batch of a step")
    accumulate: int = option(1, "micro-batches per step on each rank")
    loading: str = option("shard", "who reads, decodes and sends the examples (with strategy ddp)", LOADING)
    optimizer: str = option("adamw", "", ("sgd", "adamw"))
    lr: float = option(2e-3, "learning rate, reached after a linear warm-up of 20 steps")
    seed: int = option(0, "of the initial weights and of the order of the data")
    precision: str = option("fp32", "of the forward pass", ("fp32", "bf16", "fp16"))
    layers: int = option(4, "the GPT's blocks")
    width: int = option(128, "the GPT's activations per token")
    heads: int = option(4, "the GPT's attention heads; they divide the width")
    context: int = option(128, "tokens per example of text")
    experts: int = option(8, "of each block's mixture (with strategy expert); the ranks divide them")
    top_k: int = option(2, "experts that each token goes to (with strategy expert)")
    schedule: str = option("1f1b", "of a pipeline: which stage does what when (05_pipeline/schedules.py)")
    microbatches: int = option(4, "that a pipeline cuts each micro-batch of --accumulate into")
    stages_per_rank: int = option(0, "of a pipeline; 0: what the schedule needs")
    split_spec: str = option("auto", "where a pipeline is cut: auto (by parameters), auto-time, or 'blocks.1: end'")
    replicas: int = option(2, "pipelines side by side (with strategies pipeline+ddp and pipeline+fsdp)")
    mesh: str = option("", "rows x ranks in a row, with strategy hsdp or tensor+fsdp (default there: 2x2)")
    recompute: str = option(
        "none", "what blocks, or a pipeline's stages, compute again for backward", ("none", "selective", "full")
    )
    offload: bool = option(False, "keep shards and optimizer in host memory (strategies fsdp, zero2, hsdp)")
    find_batch_size: bool = option(False, "tell the largest --batch-size within --memory-budget, and train nothing")
    memory_budget: float = option(0.0, "GiB that each rank may use, with --find-batch-size")
    backend: str = option("auto", "auto: NCCL where each process has a GPU, else gloo", ("auto", "gloo", "nccl"))
    device: str = option("auto", "auto: CUDA where there is one", ("auto", "cpu", "cuda"))
    run_dir: str = option("", "where the run is kept (default: a new folder under runs/)")
    checkpoint_every: int = option(50, "steps between checkpoints; 0: only one at the end")
    resume: bool = option(False, "go on from the newest checkpoint of --run-dir (default: of the newest run)")
    log_every: int = option(10, "steps between the lines that rank 0 prints")


RECOMPUTE = ("01_intro", "03_ddp", "05_pipeline", "06_fsdp")  # chapters whose strategies take --recompute

# What defines a run's numbers: on --resume these come from the run itself.
IDENTITY = (
    "task", "dataset", "batch_size", "optimizer", "lr", "seed",
    "layers", "width", "heads", "context", "experts", "top_k",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")


def parse(default_strategy: str | None = None, argv: list[str] | None = None) -> Config:
    """Read command line, --config file and, on --resume, the run's own settings; the first that says it wins.

    Without a default strategy it is "ddp" for --distributed, else "single".
    Raises UserError with one line for whatever cannot work, as far as it can be known before ranks have met.
    """
    parser = Parser(description="Train a small model; see README.md.", allow_abbrev=False)
    for item in fields(Config):
        flag, about = "--" + item.name.replace("_", "-"), item.metadata["help"]
        if item.type is bool:
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about)
        else:
            choices = item.metadata["choices"] or None
            about += f" (default: {item.default})" if item.default != "" else ""
            parser.add_argument(flag, type=item.type, choices=choices, default=argparse.SUPPRESS, help=about)
    parser.add_argument("--config", metavar="FILE.yaml", help="read options from a file; the command line wins")
    given = vars(parser.parse_args(argv))
    file = given.pop("config", None)
    values = (read_yaml(Path(file)) if file else {}) | given
    if values.get("resume"):
        values = resumed(values)
    config = Config(**values)
    if not config.strategy:
        config.strategy = default_strategy or ("ddp" if config.distributed else "single")
    config.run_dir = config.run_dir or new_run_dir(config)
    check(config)
    return config


def read_yaml(path: Path) -> dict:
    """Options from a YAML file, under the command line's names with - or _. Raises UserError."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected lines like 'batch-size: 32'")
    known = {item.name: item for item in fields(Config)}
    values = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0].replace("_", "-")
            raise UserError(f"--config {path}: unknown key '{key}'; did you mean '{nearest}'?")
        values[name] = convert(f"--config {path}: {key}", value, known[name])
    return values


def convert(where: str, value, item):
    """YAML reads 1e-3 as text and 1 as an integer; give an option the type that it has on the command line."""
    if item.type is bool and isinstance(value, bool):
        return value
    if item.name == "split_spec" and isinstance(value, dict):
        value = ", ".join(f"{layer}: {side}" for layer, side in value.items())
    try:
        if item.type is bool or isinstance(value, bool | list | dict | type(None)):
            raise ValueError
        if item.type is int and float(value) != int(value):
            raise ValueError
        value = item.type(value)
    except (ValueError, TypeError):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
        raise UserError(f"{where}: expected {names[item.type]}, got {value!r}") from None
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"{where}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def resumed(values: dict) -> dict:
    """Fill in from the run that is resumed. Raises UserError where there is none, or where `values` would change
    what makes its numbers what they are."""
    runs = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    folder = Path(values["run_dir"]) if values.get("run_dir") else runs[-1].parent if runs else None
    if folder is None:
        raise UserError("--resume: there is no run under runs/; name its folder with --run-dir")
    if not (folder / "config.json").exists() or not list(folder.glob("checkpoint-*.pt")):
        raise UserError(f"--resume: no checkpoint in {folder}; leave --resume out to start there")
    saved = json.loads((folder / "config.json").read_text())["config"]
    changed = [name for name in IDENTITY if name in values and values[name] != saved[name]]
    if changed:
        told = ", ".join(f"--{n.replace('_', '-')} {values[n]} (it has {saved[n]})" for n in changed)
        raise UserError(
            f"--resume: a resumed run keeps its settings, but got {told}; leave that out, or start a new run"
        )
    anew = ("distributed", "download", "backend", "device")  # these belong to the machine, not to the run
    kept = {item.name: saved[item.name] for item in fields(Config) if item.name in saved and item.name not in anew}
    return kept | values | {"run_dir": str(folder)}


def check(config: Config) -> None:
    """Raise UserError for what cannot work."""
    find(config.strategy, config.by_hand)
    rank, size, _, local_size = environment()
    if config.distributed and "RANK" not in os.environ:
        raise UserError(
            "--distributed: no launcher started this process; "
            "try: torchrun --nproc_per_node=2 distributed_training.py --distributed"
        )
    if size > 1 and not config.distributed:
        raise UserError(
            f"{size} processes were started without --distributed: each would train alone; add --distributed"
        )
    counts = "steps batch_size accumulate layers width heads context experts top_k microbatches replicas log_every"
    for name in counts.split():
        if getattr(config, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}")
    for name, top in (("checkpoint_every", None), ("stages_per_rank", None), ("seed", 2**31 - 1)):
        value = getattr(config, name)
        if value < 0 or (top and value > top):
            raise UserError(
                f"--{name.replace('_', '-')} must be at least 0{f' and at most {top}' if top else ''}, got {value}"
            )
    if config.loading != "shard" and config.strategy != "ddp":
        raise UserError(f"--loading {config.loading} is for strategy ddp, not '{config.strategy}'; use --loading shard")
    if "stream" in config.loading and config.task == "images":
        raise UserError(
            f"--loading {config.loading} reads a stream of records, and --task images is one table in memory; "
            f"use --loading shard or dispatch"
        )
    chapter = find(config.strategy, config.by_hand).chapter
    if config.task == "images" and chapter in ("04_model_parallel", "05_pipeline"):
        raise UserError(f"--task images: strategy '{config.strategy}' divides a GPT; use --task text")
    layers = config.layers + 2
    if config.strategy == "model" and config.by_hand and size > layers:
        raise UserError(
            f"{size} ranks are more than {layers} layers (embedding, {config.layers} blocks, head), and each needs "
            f"one; start at most {layers} ranks, or make --layers {size - 2}"
        )
    if not 0 < config.lr < float("inf"):
        raise UserError(f"--lr must be a positive number, got {config.lr}")
    if config.width % config.heads:
        raise UserError(f"--width {config.width} does not divide by --heads {config.heads}")
    if config.strategy == "expert":
        check_experts(config.experts, config.top_k, size)
    if config.strategy in ("tensor", "sequence"):
        numbers = {"--heads": config.heads, "--width": config.width, "the vocabulary of": VOCABULARY}
        numbers |= {"--context": config.context} if config.strategy == "sequence" else {}
        module("04_model_parallel", "by_hand_tensor").check(size, numbers)
    if config.strategy in ("context", "ulysses"):
        load(config.strategy, config.by_hand).check(config.context, config.heads, size)
    if chapter == "05_pipeline":
        module("05_pipeline", "options").check(config, size)
    device = choose(config.device, config.backend, local_size)[0]
    check_sharding(config, size, local_size, device)
    if rank == 0 and not config.find_batch_size:
        claim(Path(config.run_dir), config.resume)


def check_experts(experts: int, top_k: int, ranks: int) -> None:
    """Raise UserError where there is no such mixture of experts, or it cannot be divided among the ranks."""
    if top_k > experts:
        raise UserError(f"--top-k {top_k} is more than --experts {experts}: a token goes to an expert once")
    if experts < ranks:
        raise UserError(f"--experts {experts} are fewer than {ranks} ranks; use {ranks} or a multiple")
    if experts % ranks:
        raise UserError(f"--experts {experts} do not divide by {ranks} ranks; use a multiple of {ranks}")


def check_sharding(config: Config, size: int, local_size: int, device: str) -> None:
    """Raise UserError for options of chapter 06 that exclude each other, or that this machine cannot have."""
    name, chapter = config.strategy, find(config.strategy, config.by_hand).chapter
    if config.strategy in ("hsdp", "tensor+fsdp"):
        rows = module("06_fsdp", "hybrid").shape_of(config.mesh or "2x2", size)
        if name == "tensor+fsdp":
            numbers = {"--heads": config.heads, "--width": config.width, "the vocabulary of": VOCABULARY}
            module("04_model_parallel", "by_hand_tensor").check(rows[1], numbers)
            if config.task == "images":
                raise UserError("--task images: strategy 'tensor+fsdp' divides a GPT; use --task text")
    elif config.mesh:
        raise UserError(f"--mesh is for strategies hsdp and tensor+fsdp, not '{name}'; leave it out")
    if config.recompute != "none" and (config.task == "images" or chapter not in RECOMPUTE):
        raise UserError(
            f"--recompute {config.recompute} is for the GPT's blocks with strategies single, ddp and those of chapters "
            f"05 and 06, not for --task {config.task} with strategy '{name}'"
        )
    if config.offload:
        if config.by_hand or name not in ("fsdp", "zero2", "hsdp"):
            by_hand = " by hand" if config.by_hand else ""
            raise UserError(f"--offload is for PyTorch's fsdp, zero2 and hsdp, not for '{name}'{by_hand}; leave it out")
        module("06_fsdp", "sharding").require_host_memory(config, size, local_size)
    if config.find_batch_size:
        if config.by_hand or config.offload or name not in ("fsdp", "zero2"):
            kind = " by hand" if config.by_hand else " with --offload" if config.offload else ""
            raise UserError(f"--find-batch-size is for PyTorch's fsdp and zero2, not for '{name}'{kind}")
        if not 0 < config.memory_budget < float("inf"):
            raise UserError(f"--find-batch-size: --memory-budget {config.memory_budget} should be the GiB of a rank")
    elif config.memory_budget:
        raise UserError("--memory-budget is what --find-batch-size stops at; add that, or leave it out")


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


def new_run_dir(config: Config) -> str:
    """A folder under runs/ that is not there yet, or that of the attempt before where torchrun restarts the ranks."""
    begun = [folder for folder in Path("runs").glob("*") if restarts(folder)]
    if begun:
        return str(begun[0])
    name = time.strftime("%Y%m%d-%H%M%S-") + config.strategy + ("-by-hand" if config.by_hand else "")
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
