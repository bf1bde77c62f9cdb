"""Checkpoints in pieces, through torch.distributed.checkpoint (DCP): every rank writes what it has, and reads what it
needs, whatever the strategies and meshes on both sides.

What is kept, by how ranks share it:

sharded:    model and optimizer, each rank's pieces of them (common/pieces.py)
replicated: the same, where several ranks have equal pieces: compared when they are saved, and written once
per rank:   where each rank's random numbers are
global:     step, settings, mesh, the optimizer's hyperparameters, the loss scale: what rank 0 says in the manifest
            (the position in the data and the learning rate follow from the step)
"""

import concurrent.futures
import contextlib
import pickle
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.futures import Future

from common import manifest
from common.errors import UserError
from common.pieces import LoadPieces, Piece, SavePieces, pieces_of, pieces_to_load, pieces_to_save
from common.random_state import random_state, set_random_state
from common.state import whole


@dataclass(frozen=True)
class Written:
    """A file that a rank has written."""

    name: str
    size: int
    checksum: str


class Writer(FileSystemWriter):
    """Writes a checkpoint beside its place, with a manifest, and moves it into place when all ranks have written."""

    def __init__(self, folder: Path, about: dict):
        self.partial = manifest.partial(folder)
        super().__init__(self.partial)
        self.folder, self.about = folder, about

    def write_data(self, plan, planner) -> Future:
        results = super().write_data(plan, planner).wait()
        found = sorted(self.partial.glob(f"{plan.storage_data.prefix}*"))
        files = [Written(path.name, path.stat().st_size, manifest.checksum(path)) for path in found]
        future: Future = Future()
        future.set_result([results, files])
        return future

    def finish(self, metadata: Metadata, results: list) -> None:
        """On rank 0, when all ranks have written; `results` are those of the ranks' write_data."""
        super().finish(metadata, [written for written, _ in results])
        files = {}
        for rank, (_, written) in enumerate(results):
            for file in written:
                path = self.partial / file.name
                if not path.exists():
                    raise UserError(
                        f"rank 0 does not find {path}, which rank {rank} wrote: --run-dir must be on "
                        f"a disk that all nodes share"
                    )
                files[file.name] = (file.size, file.checksum)
        path = self.partial / ".metadata"
        files[path.name] = (path.stat().st_size, manifest.checksum(path))
        with open(self.partial / manifest.MANIFEST, "w") as file:
            file.write(manifest.seal(self.about, files))
        for path in (self.partial / manifest.MANIFEST, self.partial):
            manifest.sync(path)
        self.partial.rename(self.folder)
        manifest.sync(self.folder.parent)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the default has a path of this machine


class Reader(FileSystemReader):
    """Reads no Python objects but those that .metadata is made of: unpickling may call anything."""

    def read_metadata(self, *_args, **_kwargs) -> Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            return Unpickler(file).load()


class Unpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's .metadata, and no others."""

    ALLOWED = {
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
    }  # fmt: skip

    def find_class(self, module: str, name: str):
        if name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def pieces_of_random_numbers(device: torch.device) -> list[Piece]:
    """Where this rank's random numbers are, as tensors of its own."""
    states = enumerate(random_state(device))
    return [p for n, state in states for p in pieces_of(f"random.{dist.get_rank()}.{n}", state, whole(state))]


class Saver:
    """Saves the checkpoints of a run: at once, or in the background. Then what is to be saved is copied, and a thread
    writes the copy while training goes on. Its messages have a process group of their own, so that they never meet
    those of training. Making one is collective then, as are `save` and `wait`.

    Both raise UserError on all ranks, whichever had it; then there is no such checkpoint, and nothing is left of it. In
    the background, `save` raises what went wrong with the checkpoint before.
    """

    def __init__(self, background: bool = False):
        self.group = dist.new_group(backend="gloo") if background else None
        self.under_way: tuple[Path, concurrent.futures.Future] | None = None

    def save(self, folder: Path, strategy, about: dict) -> None:
        """Write a checkpoint of a strategy to `folder`; `about` is what else a run wants to find in it again, as JSON
        has it."""
        self.wait()
        size, device = dist.get_world_size(), strategy.device
        pieces = pieces_to_save(strategy.parts(), strategy.optimizer_state()) + pieces_of_random_numbers(device)
        about = about | {"world_size": size, **strategy.global_state()}
        tensors, planner = {piece.key: piece.tensor for piece in pieces}, SavePieces(pieces, size)
        writer = Writer(folder, about)
        with disk_errors(folder, "written"):
            if self.group is None:
                dcp.save(tensors, storage_writer=writer, planner=planner)
            else:  # the writer copies the tensors to the CPU before async_save returns
                future = dcp.async_save(tensors, storage_writer=writer, planner=planner, process_group=self.group)
                assert not isinstance(future, AsyncSaveResponse)  # which has to be asked for
                self.under_way = folder, future

    def wait(self) -> None:
        """Until a checkpoint that is being written is in its place."""
        if self.under_way:
            (folder, future), self.under_way = self.under_way, None
            with disk_errors(folder, "written"):
                future.result()


def load(folder: Path, strategy) -> dict:
    """Take up the checkpoint in `folder`, whatever strategy wrote it on whatever mesh; what was said `about` it.
    Collective.

    Random numbers go on where they were if there are as many ranks as there were then: on another number of ranks no
    state belongs to a rank. Raises UserError on all ranks.
    """
    about, _ = manifest.read(folder)
    reader = Reader(folder)
    with disk_errors(folder, "read"):
        saved = reader.read_metadata()
        pieces = pieces_to_load(strategy.parts(), strategy.optimizer_state(), saved)
        random = []
        if about["world_size"] == dist.get_world_size():
            random = [p for p in pieces_of_random_numbers(strategy.device) if p.name in saved.state_dict_metadata]
        dcp.load({}, storage_reader=reader, planner=LoadPieces(pieces + random, str(folder)))
    if random:
        set_random_state([piece.tensor for piece in random], strategy.device)
    strategy.load_global_state(about)
    strategy.after_loading()
    return about


def whole_tensors(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint whose names begin with `prefix`, without it, on the CPU of this one process.
    Raises UserError."""
    reader = Reader(folder)
    with disk_errors(folder, "read"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # nobody else is needed
        saved = reader.read_metadata().state_dict_metadata
        found = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in saved.items()
            if name.startswith(prefix) and isinstance(tensor, TensorStorageMetadata)
        }
        pieces = [piece for name, tensor in found.items() for piece in pieces_of(name, tensor, whole(tensor))]
        dcp.load({}, storage_reader=reader, planner=LoadPieces(pieces, str(folder)), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


@contextlib.contextmanager
def disk_errors(folder: Path, done: str):
    """Failures, which DCP brings to all ranks, become one line."""
    try:
        yield
    except dcp.CheckpointException as error:
        if done == "written" and dist.get_rank() == 0:
            shutil.rmtree(manifest.partial(folder), ignore_errors=True)
        rank, (reason, _) = min(error.failures.items())
        several = dist.is_initialized() and dist.get_world_size() > 1
        raise disk_error(reason, folder, done, f"rank {rank}: " if several else "") from error
    except (OSError, pickle.UnpicklingError) as error:
        raise disk_error(error, folder, done, "") from error


def disk_error(error: BaseException, folder: Path, done: str, who: str) -> BaseException:
    """A UserError for what the disk may do to us; other errors as they are."""
    if not isinstance(error, OSError | RuntimeError | pickle.UnpicklingError):
        return error
    # torch.save raises RuntimeError for a full disk
    reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    advice = f"; make room, or name another folder with --run-dir{manifest.still_there(folder.parent)}"
    more = advice if done == "written" else ""
    return UserError(f"{folder} cannot be {done}: {who}{reason}{more}")
