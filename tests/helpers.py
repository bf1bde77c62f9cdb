"""What tests borrow: settings as the command line makes them, training through a real main, metrics, ports,
processes."""

import ast
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from common import ROOT, manifest, run_dir
from common.checkpoint import whole_tensors
from common.command_line import parse
from common.config import Config, shared
from common.errors import UserError
from common.lab import launch as launching
from common.run import Run
from common.run_dir import claim
from course.strategies import BY_AXES, STRATEGIES

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FULL = bool(os.environ.get("FULL"))  # make test-all: every case, and every script in a process of its own
SMALL: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "context": 16,
    "batch_size": 12,
}  # a GPT that trains in milliseconds
TEXT = SMALL | {"checkpoint_every": 2, "steps": 4}  # a run of it
EVERY = SMALL | {"batch_size": 24}  # divides among whatever every_strategy() has


@contextmanager
def launcher(rank: int = 0, size: int = 1, local_size: int | None = None):
    """The environment of a rank that torchrun started; size 1: that of a process which nobody launched."""
    before = {name: os.environ.pop(name, None) for name in LAUNCHER}
    if size > 1:
        local_size = local_size or size
        numbers = (rank, size, rank % local_size, local_size)
        os.environ.update(zip(LAUNCHER, map(str, numbers), strict=False))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def as_options(settings: dict[str, Any]) -> list[str]:
    """{"batch_size": 4, "by_hand": True} -> ["--batch-size=4", "--by-hand"]."""
    return [f"--{name.replace('_', '-')}" + f"={value}" * (value is not True) for name, value in settings.items()]


def configure(line: str = "", size: int = 1, rank: int = 0, default: str | None = None, **settings) -> Config:
    """The settings that a command line makes on one of `size` ranks: configure("--by-hand", 2, strategy="ddp")."""
    distributed = ["--distributed"] if size > 1 else []
    with launcher(rank, size):
        config = parse(STRATEGIES, default, [*line.split(), *as_options(settings), *distributed], BY_AXES)
        if config.trains:
            claim(config)
        return config


# Their state lies on the ranks, and is validated, as that of another: with FULL=1 they are looked at, too.
ALIKE = {"sequence": "tensor", "ulysses": "context", "zero2": "fsdp", "hsdp pytorch": "tensor+fsdp",
         "pipeline+ddp pytorch": "pipeline"}  # fmt: skip


def every_strategy() -> list[tuple[int, str, str, str]]:
    """(ranks, strategy, implementation, its options): each on two ranks or, where it needs four, on four."""
    sizes = {(name, kind): entry.sizes(kind) for name, entry in STRATEGIES.items() for kind in entry.implementations}
    table = [
        (2 if 2 in sizes[who] else 4, *who, "--microbatches 4" if who == ("pipeline+ddp", "pytorch") else "")
        for who in sizes
        if who[0] != "mesh" and max(sizes[who]) > 1 and (FULL or not {who[0], " ".join(who)} & ALIKE.keys())
    ]
    return [
        *sorted(table),
        (2, "pipeline", "by-hand", "--schedule zbv"),  # the first rank has both ends, and a tied weight once
        (2, "fsdp", "pytorch", "--precision fp16"),
        (4, "mesh", "by-hand", "--mesh shard=2,tensor=2"),  # flat shards of weights that are cut
        (4, "mesh", "by-hand", "--mesh pipeline=2,tensor=2"),
        # DTensors of two axes, and stages of PyTorch's, are in the rows of the table, too
        *([(4, "mesh", "pytorch", f"--mesh pipeline=2,{axis}=2") for axis in ("tensor", "shard")] if FULL else []),
    ]


def config_of(folder: Path, size: int, strategy: str, implementation: str = "pytorch", line: str = ""):
    run_dir = folder / f"{strategy}-{implementation}-{line}".replace(" ", "")
    return configure(line, size, **EVERY, strategy=strategy, implementation=implementation, run_dir=run_dir)


@contextmanager
def refused(*words: str):
    """The block ends with an error of use: one line that has each of these words."""
    with pytest.raises(UserError) as error:
        yield error
        pytest.fail(f"not refused, with {' '.join(words)}")
    said = str(error.value)
    assert said and "\n" not in said, said
    assert [word for word in words if word not in said] == [], said


class SlowDevice:
    """A device on which the host only puts work: the clock moves when somebody waits for it."""

    def __init__(self):
        self.now = self.behind = 0.0

    def work(self, seconds: float) -> None:
        self.behind += seconds

    def synchronize(self, *_) -> None:
        self.now, self.behind = self.now + self.behind, 0.0


class NoFigure:
    """Stands for a loss curve. To draw one takes three times as long as to train what the tests train."""

    def savefig(self, path: Path, format: str) -> None:
        Path(path).touch()


def do_not_draw() -> None:
    """Runs of this process, which should be a rank of a launch, leave loss.png empty from now on."""
    run_dir.loss_curve = lambda records: NoFigure()


def train(configs: list[Config], draw: bool = False) -> None:
    """On each rank of a launch: what the scripts do, once for each configuration; the loss curve only with `draw`."""
    if not draw:
        do_not_draw()
    for config in configs:
        config.main(config)


def draw_masks() -> None:
    """From here on, runs of this process draw a mask on the embedding's output in each step, as dropout does: of each
    rank with examples of its own another one."""
    make = Run.__init__

    def masked(module, _, output):
        return torch.nn.functional.dropout(output, 0.2, module.training)

    def seeded(run, config, strategy, task):
        torch.manual_seed(100 + strategy.data_rank)
        if hasattr(strategy.model, "embedding"):  # a rank of a pipeline may not have it
            strategy.model.embedding.register_forward_hook(masked)
        make(run, config, strategy, task)

    Run.__init__ = seeded


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint: "model.NAME" and "optimizer.NAME.KEY"."""
    return {name: value for name, value in whole_tensors(folder, "").items() if not name.startswith("random.")}


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[float]:
    """Loss and gradient norm of each step of a run."""
    return [value for record in metrics(folder) for value in (record["loss"], record["grad_norm"])]


def write_facts(folder: Path, settings: dict | None = None, **facts) -> None:
    """A config.json of one process, with other `settings` than the defaults, and other facts."""
    known = {item.name: item.default for item in shared()}
    about = {"strategy": "single", "implementation": "pytorch", "mesh": {"data": 1}, "world_size": 1, **facts}
    Path(folder, "config.json").write_text(json.dumps({"config": known | (settings or {}), **about}))


def running() -> set[int]:
    """Processes that descend from this one, or that have lost their parent and are at work in this folder."""
    found = {process.pid for process in psutil.Process().children(recursive=True)}
    for orphan in psutil.Process(1).children():
        with suppress(psutil.Error):  # it has ended meanwhile, or is somebody else's
            found |= {orphan.pid} if orphan.cwd() == os.getcwd() else set()
    return found


def begun(folder: Path, **settings) -> Path:
    """A run that may be resumed, and has not trained."""
    config = configure(run_dir=folder, **settings)
    (folder / manifest.name_of(1)).mkdir()
    (folder / manifest.name_of(1) / manifest.MANIFEST).write_text(manifest.seal({"step": 1}, {}))
    write_facts(folder, config.settings(), strategy=config.strategy)
    return folder


def first_line_of(file: Path, function: str) -> int:
    """The number of the first line of a function, or method, that does something."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    body = next(node.body for node in functions if node.name == function)
    return body[isinstance(body[0], ast.Expr)].lineno


def definitions(source: str) -> dict[str, str]:
    """The functions and methods of a file or cell: "name" or "Class.name" -> its code, without docstring, comments and
    annotations. Of several with one name the last counts."""
    top = ast.parse(source).body
    methods = [(f"{cls.name}.", node) for cls in top if isinstance(cls, ast.ClassDef) for node in cls.body]
    found = {}
    for prefix, node in [*(("", node) for node in top), *methods]:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                node.body = node.body[1:]
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[prefix + node.name] = ast.dump(node)
    return found


def code_of_page(path: str) -> list[str]:
    """The code cells of a notebook, whose path is relative to the repository."""
    cells = json.loads((ROOT / path).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def when_inside(function: str, then) -> None:
    """Call `then` in a thread of its own once this one is inside `function`, which may be a collective that waits."""
    me = threading.get_ident()

    def names():
        frame = sys._current_frames()[me]
        while frame:
            yield frame.f_code.co_name
            frame = frame.f_back

    def watch():
        while function not in names():
            time.sleep(0.005)
        then()

    threading.Thread(target=watch, daemon=True).start()


def wait_until(is_so: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    """Returns when `is_so()` is true; fails, with what has not come, where that takes too long."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.02)


def impatient(seconds: float) -> None:
    """From here on this rank's collectives time out after `seconds`: the ranks had all the time to meet."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def arrive(folder: Path) -> None:
    """This rank is where it will stay (`time_is_up_when_all_have_arrived`)."""
    Path(folder, f"arrived-{os.environ['RANK']}").touch()


def time_is_up_when_all_have_arrived(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `launch` lose its patience when each rank has come to where it stays, or is stopped; not earlier on a busy
    machine, and not later on a quiet one. From then on its clock goes slowly: what it waits for comes in time."""
    wait, ranks, ahead = launching._wait, [], 0.0

    def remember(processes, *args):
        ranks[:] = processes
        try:
            return wait(processes, *args)
        finally:
            ranks.clear()

    def arrived(rank, process):
        with suppress(psutil.NoSuchProcess):
            return Path(folder, f"arrived-{rank}").exists() or psutil.Process(process.pid).status() == "stopped"

    def monotonic():
        nonlocal ahead
        if ranks and all(arrived(rank, process) for rank, process in enumerate(ranks)):
            ahead += 1e6  # each time that it looks: who looks late begins to wait when all have arrived
        return ahead + time.monotonic() / (50 if ahead else 1)

    patch.setattr(launching, "_wait", remember)
    patch.setattr(launching, "time", SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=monotonic))
