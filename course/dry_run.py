"""`--dry-run`: what each rank of a training would read, hold and send, without training and without starting ranks.

For each rank a process is that rank on a device that is not there (common/lab/fake_accelerator.py): the strategy's own
code cuts the model and takes two steps, with tensors that have shapes and no numbers. So shapes, bytes and messages are
those of the code, and not of a formula.
"""

import contextlib
import math
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from itertools import product
from typing import IO

import torch
from tqdm import tqdm

from common.config import Config
from common.data import OwnStream
from common.errors import UserError
from common.lab.fake_accelerator import pretend
from common.lab.launch import ready_to_fork
from common.lab.ledger import Ledger
from common.own import is_own
from common.ranks import environment
from common.strategy import Setup
from common.task import Task, check_batch, make_task
from common.text_table import aligned
from course.pipeline.options import PipelineOptions

CONTEXT = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
ALL = 4  # as many ranks are all looked at; of more, the first and the last (of each stage of a pipeline)
# What PyTorch's C++ says of devices and groups that are pretended, past Python's warnings and once for each process.
NOISE = ("No backend of type 0 found for Process Group", "Time stats are currently only collected for CPU and CUDA")


@dataclass(frozen=True)
class Forecast:
    """What one rank would do.

    place:   its coordinates in the mesh
    slice:   of each global batch, the first of its examples and the one after its last
    shapes:  what it holds of each parameter, as text, by name
    numbers: how many numbers of parameters that is
    state:   bytes between two steps: parameters, the optimizer's state, buckets, gradients that are kept
    peak:    the most bytes at any moment of a step
    sent:    bytes that it sends in a step, by axis; "context+data" is a group over two
    """

    place: dict[str, int]
    slice: tuple[int, int]
    shapes: dict[str, str]
    numbers: int
    state: int
    peak: int
    sent: dict[str, float]


def forecast(config: Config, ranks) -> dict[int, Forecast]:
    """What these ranks of the mesh would do. Raises UserError for data or a batch that cannot work."""
    check_batch(config, readers(config))
    task, found = make_task(config), dict[int, Forecast]()
    for rank in tqdm([*ranks], desc="dry run", unit="rank", leave=False, disable=None):
        # A process for each: what `pretend` changes in PyTorch stays changed, and DTensor remembers a rank's groups.
        receiver, sender = CONTEXT.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r", errors="replace") as stderr:
            how = (config, task, rank, sender, stderr.name)
            process = CONTEXT.Process(target=send_forecast, args=how)  # type: ignore[attr-defined]  # typeshed: of subclasses
            with ready_to_fork():
                process.start()
            sender.close()
            answer: Forecast | UserError | None = None
            with contextlib.suppress(EOFError):
                answer = receiver.recv()
            process.join()
            repeat(stderr)
        if answer is None:
            raise RuntimeError(f"the process that was rank {rank} has died; its message stands above")
        if isinstance(answer, UserError):
            raise answer
        found[rank] = answer
    return found


def readers(config: Config) -> int:
    """How many ranks read different slices of each batch."""
    return math.prod(number for name, number in config.axes.items() if name in config.strategy_class.data_axes)


def repeat(stderr: IO[str]) -> None:
    """Say what a rank has said on stderr, without what means nothing."""
    for line in stderr:
        if not any(words in line for words in NOISE):
            sys.stderr.write(line)


def looked_at(axes: dict[str, int]) -> list[int]:
    """The ranks to look at: all, where there are few; else, of each stage of a pipeline, those that have the least and
    the most of everything else."""
    size = math.prod(axes.values())
    if size <= ALL:
        return [*range(size)]
    ends = [range(n) if name == "pipeline" else (0, n - 1) for name, n in axes.items()]
    return sorted({rank_at(axes, place) for place in product(*ends) if alike(axes, place)})


def alike(axes: dict[str, int], place) -> bool:
    """Whether a rank is at the beginning of all axes but a pipeline's, or at the end of all of them."""
    others = [(n, number) for (name, number), n in zip(axes.items(), place, strict=True) if name != "pipeline"]
    return all(n == 0 for n, _ in others) or all(n == number - 1 for n, number in others)


def rank_at(axes: dict[str, int], place) -> int:
    """The rank that has these coordinates."""
    rank = 0
    for size, n in zip(axes.values(), place, strict=True):
        rank = rank * size + n
    return rank


def send_forecast(config: Config, task: Task, rank: int, sender, stderr: str) -> None:
    """Be a rank of the mesh, and send what it would do; what it says on stderr goes into the file `stderr`."""
    with open(stderr, "w") as file:
        os.dup2(file.fileno(), 2)
    warnings.filterwarnings("ignore", "PyTorch is not compiled with NCCL support")
    try:
        sender.send(forecast_of(config, task, rank))
    except UserError as error:
        sender.send(error)


def forecast_of(config: Config, task: Task, rank: int) -> Forecast:
    size = math.prod(config.axes.values())
    in_a_pipeline = config.options.microbatches if isinstance(config.options, PipelineOptions) else 1
    micro_batches = config.accumulation_steps * in_a_pipeline
    assert not isinstance(task.dataset, OwnStream)  # the course's own data alone
    shapes = [(tensor.shape[1:], tensor.dtype) for tensor in task.dataset.batch(torch.zeros(1, dtype=torch.long))]
    message = (max(1, config.batch_size // readers(config) // micro_batches), config.context, config.width)
    with pretend(config.axes, rank, size, 1, message) as (mesh, watch):
        model = task.make_model()
        strategy = config.strategy_class(model, task.make_optimizer, Setup(mesh, config.options))
        examples = config.batch_size // strategy.data_size
        each = examples // config.accumulation_steps
        for name in ("first", "second"):  # optimizers make their state in the first step
            phase = watch.begin(name)
            with Ledger() as ledger:
                inputs, targets = (torch.zeros((each, *s), dtype=t, device="gpu") for s, t in shapes)
                strategy.step([(inputs, targets)] * config.accumulation_steps)
        parts = strategy.parts()
        return Forecast(
            dict(zip(config.axes, coordinates(config.axes, rank), strict=True)),
            (strategy.data_rank * examples, (strategy.data_rank + 1) * examples),
            {part.name: described(part.where) for part in parts},
            sum(part.tensor.numel() for part in parts),
            watch.now[0],
            phase.peak,
            along_axes(ledger, config.axes),
        )


def coordinates(axes: dict[str, int], rank: int) -> list[int]:
    """The coordinates of a rank in a mesh, whose last axis varies fastest."""
    place: list[int] = []
    for size in reversed(axes.values()):
        rank, here = divmod(rank, size)
        place.insert(0, here)
    return place


def described(where) -> str:
    """Which elements of a tensor a part is."""
    if (where.start, where.stop) != (0, math.prod(where.size)):
        inside = "" if where.size == where.shape else f" of {list(where.size)}"
        return f"elements {where.start:,} to {where.stop:,}{inside} of {list(where.shape)}"
    return f"{list(where.size)}" + ("" if where.size == where.shape else f" of {list(where.shape)}")


def along_axes(ledger: Ledger, axes: dict[str, int]) -> dict[str, float]:
    """Bytes sent, by the axes along which the ranks of the group differ."""
    sent: dict[str, float] = {}
    for entry in ledger.entries:
        if entry.sent:
            places = zip(*(coordinates(axes, rank) for rank in entry.group), strict=True)
            name = "+".join(name for name, numbers in zip(axes, places, strict=True) if len({*numbers}) > 1)
            sent[name] = sent.get(name, 0.0) + entry.sent
    return sent


# --- as text --------------------------------------------------------------------------------------------------------


def dry_run(config: Config) -> None:
    """Print what each rank would do; under torchrun, on rank 0 alone. Raises UserError."""
    if environment()[0] > 0:
        return
    if is_own(config.task):
        raise UserError(
            "--dry-run is for the course's models; python -m planner measure FILE.py:FUNCTION counts what yours needs"
        )
    size = math.prod(config.axes.values())
    found = forecast(config, looked_at(config.axes))
    mesh = ",".join(f"{name}={number}" for name, number in config.axes.items())
    print(f"{config.strategy} ({config.implementation}) on {size} rank(s), mesh {mesh}; a dry run: nothing is trained")
    unit = f"{config.batch_size} examples"
    unit += f" of {config.context} tokens" if config.task == "text" else ""
    print(f"a step: {unit} over all ranks; --accumulation-steps {config.accumulation_steps}")
    print("\n".join(rows(found)))
    if len(found) < size:
        stage = " of their stage" if "pipeline" in config.axes else ""
        print(f"(the other {size - len(found)} ranks are like these{stage})")
    for line in holdings(found):
        print(line)
    print("Bytes are those of tensors on a rank's device; what PyTorch and its kernels take is not among them.")
    if config.precision != "fp32":
        print(f"They are counted as in fp32: what --precision {config.precision} saves is not seen.")
    if config.strategy_class.uncounted:
        print(config.strategy_class.uncounted)


def rows(found: dict[int, Forecast]) -> list[str]:
    """A line for each rank."""
    axes = list(found[0].place)
    head = ["rank", *axes, "reads examples", "numbers held", "between steps", "at most", "sends in a step"]
    lines = [head]
    for rank, seen in found.items():
        place = [str(number) for number in seen.place.values()]
        first, end = seen.slice
        sent = ", ".join(f"{name} {size_of(number)}" for name, number in seen.sent.items()) or "nothing"
        numbers = [f"{seen.numbers:,}", size_of(seen.state), size_of(seen.peak)]
        lines.append([str(rank), *place, f"{first} to {end - 1}", *numbers, sent])
    return aligned(lines)


def size_of(number: float) -> str:
    """Bytes, in GiB, MiB or KiB."""
    if number >= 2**30:
        return f"{number / 2**30:,.2f} GiB"
    return f"{number / 2**20:,.1f} MiB" if number >= 2**20 else f"{number / 2**10:,.1f} KiB"


def holdings(found: dict[int, Forecast]) -> list[str]:
    """What the ranks hold, once for those that hold the same; of blocks that are alike, once for all."""
    groups: dict[tuple, list[int]] = {}
    for rank, seen in found.items():
        groups.setdefault(tuple(seen.shapes.items()), []).append(rank)
    lines = []
    for shapes, ranks in groups.items():
        who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} each hold"
        lines.append(who + (":" if shapes else " no parameters"))
        blocks: dict[tuple[str, str], list[str]] = {}
        for name, shape in shapes:
            number = re.search(r"^blocks\.(\d+)\.", name)
            key = re.sub(r"^blocks\.\d+\.", "blocks.*.", name), shape
            blocks.setdefault(key, []).append(number[1] if number else "")
        width = max((len(name) for name, _ in blocks), default=0)
        for (name, shape), numbers in blocks.items():
            lines.append(f"  {name:{width}}  {shape}" + (f"  (blocks {spans(numbers)})" if numbers[0] else ""))
    return lines


def spans(numbers: list[str]) -> str:
    """ "0 to 3, 5" for 0, 1, 2, 3, 5; what is no more than two stays as it is."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
