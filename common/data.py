"""What is learned from, and in which order.

The examples of step k depend on the seed and on k alone: not on the number of ranks, not on the number of
micro-batches, not on whether the run was stopped and resumed. All of the course's comparisons rest on that.
"""

import functools
import itertools
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import default_collate

from common.errors import UserError

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Packages of the standard library, for validation: of those no file is trained on, since they lie one level deeper.
HELD_OUT = ("asyncio", "email", "json", "logging")
SHARE_HELD_OUT = 20  # of one's own text, one byte in so many is for validation: the last ones


class Text:
    """Bytes of a text: windows of `context` + 1 bytes, `context` apart."""

    unit = "tokens"

    def __init__(self, context: int, root: str | None = None, text: bytes | None = None):
        """`text`; by default the *.py files in the folder `root`, one level deep, or of the Python standard library."""
        folder = Path(root or STANDARD_LIBRARY)
        if text is None:
            text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
        self.context = context
        self.tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()) if text else torch.empty(0)
        self.size = (len(self.tokens) - 1) // context
        if self.size < 1:
            raise UserError(
                f"{folder} holds {len(text)} bytes of *.py files, fewer than one context of {context} bytes"
            )
        self.windows = self.tokens.unfold(0, context + 1, context)  # [size, context + 1], without copying anything

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Example numbers [n] -> inputs and targets, both [n, context] int64; the target is the next byte."""
        windows = self.windows[indices].long()
        return windows[:, :-1], windows[:, 1:]

    def record(self, index: int) -> bytes:
        """Example `index` as a stream carries it: raw, `context` + 1 bytes."""
        begin = index * self.context
        return bytes(self.tokens[begin : begin + self.context + 1].numpy())

    def decode(self, record: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """A record -> inputs and targets, both [context] int64, as `batch` has them."""
        window = torch.frombuffer(bytearray(record), dtype=torch.uint8).long()
        return window[:-1], window[1:]


def own_text(path: str, context: int) -> tuple[bytes, bytes]:
    """The bytes of a file, or of all files of a folder in the order of their names, without hidden ones: those to train
    on, and the last ones, which are for validation. Raises UserError."""
    place = Path(path)
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    files = [f for f in inside if f.is_file() and not any(p.startswith(".") for p in f.relative_to(place).parts)]
    try:
        text = b"\n".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UserError(f"--text {path}: {error.filename}: {error.strerror}") from error
    if not files:
        raise UserError(f"--text {path}: there is no file in it")
    held_out = max(len(text) // SHARE_HELD_OUT, context + 1)
    if len(text) < held_out + context + 1:
        raise UserError(
            f"--text {path} has {len(text)} bytes; at least {2 * (context + 1)} are needed, a context of {context} to "
            f"train on and one for validation; add text, or make --context smaller"
        )
    return text[:-held_out], text[-held_out:]


def training_text(context: int, path: str = "") -> Text:
    """What is trained on: the standard library, or one's own text at `path`. Raises UserError."""
    return Text(context, text=own_text(path, context)[0]) if path else Text(context)


def validation_text(context: int, path: str = "") -> Text:
    """Text of the same kind that is not trained on. Raises UserError."""
    if path:
        return Text(context, text=own_text(path, context)[1])
    files = [file for package in HELD_OUT for file in sorted((STANDARD_LIBRARY / package).glob("*.py"))]
    return Text(context, text=b"\n".join(file.read_bytes() for file in files))


class Images:
    """A labelled set of pictures, held in memory: inputs [n, channels, height, width] float32 in 0..1."""

    unit = "examples"
    classes = 10

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor):
        self.pixels, self.labels = pixels, labels
        self.size, self.channels = pixels.shape[:2]

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Example numbers [n] -> pixels [n, channels, height, width] and labels [n] int64."""
        return self.pixels[indices], self.labels[indices]


def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 pixels, which ship inside scikit-learn (UCI; Alpaydin & Kaynak 1998)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Images(torch.from_numpy(data.images / 16.0).float().unsqueeze(1), torch.from_numpy(data.target).long())


def torchvision_images(name: str, folder: str, download: bool) -> Images:
    """ "fashion-mnist" or "cifar10" through torchvision, from `folder`. Raises UserError where it is not there."""
    from common.vision import torchvision

    dataset = {"fashion-mnist": torchvision.datasets.FashionMNIST, "cifar10": torchvision.datasets.CIFAR10}[name]
    try:
        data = dataset(folder, train=True, download=download)
    except RuntimeError as error:
        raise UserError(f"--dataset {name}: not found in {folder}; add --download, or give its --data-dir") from error
    except OSError as error:
        raise UserError(f"--dataset {name}: cannot be downloaded to {folder} ({error})") from error
    pixels = torch.as_tensor(data.data).float() / 255
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Images(pixels, torch.as_tensor(data.targets).long())


class Own:
    """Examples of one's own that are found by number: a map-style dataset of PyTorch, of pairs (inputs, targets)."""

    unit = "examples"

    def __init__(self, examples, where: str):
        """`where` is what an error begins with."""
        self.examples, self.where, self.size = examples, where, len(examples)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Example numbers [n] -> inputs [n, ...] and targets [n, ...]. Raises UserError for what is no such pair."""
        numbers = indices.tolist()
        many = getattr(self.examples, "__getitems__", None)  # as DataLoader asks, for a dataset that reads many at once
        return together(many(numbers) if many else [self.examples[number] for number in numbers], self.where)


class OwnStream:
    """Examples of one's own that come one after the other: an iterable dataset of PyTorch, whose order is its own. With
    `set_epoch(epoch)`, as the library `datasets` has it, it may be another in each pass.

    Every rank reads the whole stream and keeps its slices, and whoever goes on at a step reads past what was before: so
    what a step learns from depends on neither the number of ranks nor on when a run was stopped.
    """

    unit = "examples"

    def __init__(self, examples: Iterable, where: str):
        self.examples, self.where = examples, where

    @property
    def size(self) -> int:
        raise UserError(
            f"{self.where}: its data is a stream, whose examples cannot be asked for by their numbers; give a dataset "
            f"with a length, or ask for what reads in order: --loading shard, --steps"
        )

    def __iter__(self) -> Iterator:
        """All passes, one after the other."""
        for epoch in itertools.count():
            if hasattr(self.examples, "set_epoch"):
                self.examples.set_epoch(epoch)
            found = False
            for found in self.examples:
                yield found
            if found is False:
                raise UserError(f"{self.where}: the stream gives no example")

    def shard(self, plan: "Plan", start: int) -> Iterator[list]:
        """This rank's micro-batches of steps start, start + 1, ..."""
        examples = itertools.islice(self, start * plan.batch_size, plan.examples)
        begin = plan.data_rank * plan.slice_size
        while batch := list(itertools.islice(examples, plan.batch_size)):
            yield plan.cut(*together(batch[begin : begin + plan.slice_size], self.where))


def together(examples: list, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples as a batch. Raises UserError unless they are pairs of tensors of one shape."""
    try:
        inputs, targets = default_collate(examples)
        if torch.is_tensor(inputs) and torch.is_tensor(targets):
            return inputs, targets
    except (TypeError, ValueError, RuntimeError, KeyError):
        pass
    raise UserError(
        f"{where}: an example should be a pair (inputs, targets) of tensors, of one shape in all examples, and "
        f"it is {described(examples[0])}"
    )


def described(example) -> str:
    """An example in a few words."""
    if torch.is_tensor(example):
        return f"a tensor {[*example.shape]}"
    if isinstance(example, dict):
        return f"a dict with {', '.join(map(str, example))}"
    if isinstance(example, tuple | list):
        return f"({', '.join(map(described, example))})"
    return type(example).__name__


def own(examples, where: str) -> Own | OwnStream:
    """A dataset of one's own as the course reads it. Raises UserError for what is none."""
    if hasattr(examples, "__getitem__") and hasattr(examples, "__len__"):
        return Own(examples, where)
    if isinstance(examples, Iterable):
        return OwnStream(examples, where)
    raise UserError(f"{where}: its data should be datasets, and it is {type(examples).__name__}")


@functools.lru_cache(maxsize=2)  # a batch reaches into at most two epochs, unless it is larger than the dataset
def epoch_order(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order of one pass over `size` examples: a permutation [size] that depends on seed and epoch alone."""
    # The CPU's generator looks at the lower 32 bits of its seed; the prime keeps neighbouring seeds apart.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**32)
    return torch.randperm(size, generator=generator)


def global_batch(seed: int, step: int, batch_size: int, size: int) -> torch.Tensor:
    """The example numbers [batch_size] of step `step`, counted from 0.

    The epochs' orders, one after the other, cut into batches: every example comes up once before any comes twice.
    """
    begin, end, parts = step * batch_size, (step + 1) * batch_size, []
    for epoch in range(begin // size, (end - 1) // size + 1):
        order = epoch_order(seed, epoch, size)
        parts.append(order[max(begin - epoch * size, 0) : end - epoch * size])
    return torch.cat(parts)


def micro_batches(dataset, indices: torch.Tensor, data_rank: int, data_size: int, accumulate: int, device) -> list:
    """This rank's slice of a global batch, as `accumulate` pairs (inputs, targets) of equal size on `device`.

    The number of indices must divide by data_size x accumulate.
    """
    mine = indices.chunk(data_size)[data_rank]
    return [tuple(part.to(device) for part in dataset.batch(chunk)) for chunk in mine.chunk(accumulate)]


@dataclass(frozen=True)
class Plan:
    """What a run reads, and which part of it this rank reads.

    examples:   how many the run reads in all; those that do not fill a last global batch are left out
    data_rank:  of `data_size` equal slices of each global batch, the one that this rank reads
    accumulate: the number of micro-batches that a slice is cut into
    device:     where the micro-batches are wanted
    """

    seed: int
    batch_size: int
    examples: int
    data_rank: int = 0
    data_size: int = 1
    accumulate: int = 1
    device: torch.device | str = "cpu"

    @property
    def steps(self) -> int:
        return self.examples // self.batch_size

    @property
    def slice_size(self) -> int:
        """Examples per step on each rank."""
        return self.batch_size // self.data_size

    def cut(self, inputs: torch.Tensor, targets: torch.Tensor) -> list:
        """A slice, two tensors [slice_size, ...], as `accumulate` pairs (inputs, targets) on `device`."""
        parts = zip(inputs.chunk(self.accumulate), targets.chunk(self.accumulate), strict=True)
        return [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in parts]


def shard(dataset, plan: Plan, start: int = 0) -> Iterator[list]:
    """This rank's micro-batches of steps start, start + 1, ...: each rank looks up the examples of its own slice."""
    if isinstance(dataset, OwnStream):
        yield from dataset.shard(plan, start)
        return
    for step in range(start, plan.steps):
        indices = global_batch(plan.seed, step, plan.batch_size, dataset.size)
        yield micro_batches(dataset, indices, plan.data_rank, plan.data_size, plan.accumulate, plan.device)
