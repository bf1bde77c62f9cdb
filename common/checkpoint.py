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
import dataclasses
import io
import pickletools
import shutil
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.futures import Future

from common import manifest, stored
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
        with open(self.partial / manifest.MANIFEST, "x") as file:
            file.write(manifest.seal(self.about, files, places(metadata)))
        for path in (self.partial / manifest.MANIFEST, self.partial):
            manifest.sync(path)
        self.partial.rename(self.folder)
        manifest.sync(self.folder.parent)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # the default has a path of this machine


def places(metadata: Metadata) -> dict[str, stored.SavedTensor]:
    """Where which piece of which tensor is, as the manifest has it, from DCP's metadata."""
    found = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)  # pieces are tensors
        boxes = []
        for chunk in tensor.chunks:
            info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            where = info.relative_path, info.offset, info.length
            boxes.append(stored.Box([*chunk.offsets], [*chunk.sizes], *where))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        found[name] = stored.SavedTensor(dtype, [*tensor.size], boxes)
    return found


class Reader(FileSystemReader):
    """Reads what the manifest names, and unpickles nothing but tensors: DCP's own reader begins with .metadata, whose
    pickle may call anything. Files may come from somebody else: whatever is wrong with one is a UserError."""

    def read_metadata(self, *_args, **_kwargs) -> Metadata:
        tensors: dict[str, STORAGE_TYPES] = {}
        storage = {}
        folder = Path(self.path)
        for name, saved in manifest.read(folder).tensors.items():
            dtype = getattr(torch, saved.dtype, None)
            if not isinstance(dtype, torch.dtype):
                where = f"{folder / manifest.MANIFEST} is damaged: tensors.{stored.printable(name)}.dtype"
                raise UserError(f"{where}: {saved.dtype} is no type of tensors")
            chunks = []
            for box in saved.boxes:
                chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
                storage[MetadataIndex(name, box.offset)] = _StorageInfo(box.file, box.begin, box.bytes)
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(saved.size), chunks)
        return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta())

    def read_data(self, plan, planner) -> Future:
        """Read the pieces of `plan`, file by file, so that an error names one."""
        per_file: dict[str, list] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done: Future = Future()
        for name, items in per_file.items():
            path = Path(self.path, name)
            looked_at = set()
            try:
                with stored.opened(path) as file:
                    for item in items:
                        info = self.storage_data[item.storage_index]
                        if info.offset not in looked_at:
                            refuse_bombs(Slice(file, info.offset, info.length), info.length)
                            looked_at.add(info.offset)
                done = super().read_data(dataclasses.replace(plan, items=items), planner)
            except (UserError, MemoryError, OSError):
                raise
            except Exception as error:  # what PyTorch says of it is a paragraph, with advice to read it unsafely
                about = f"{path} is damaged, or not of this course: what it has is not the tensors of the manifest"
                raise UserError(about) from error
        if not per_file:
            done.set_result(None)
        return done


class Slice(io.RawIOBase):
    """A part of a file, as a file: archives are read from their end."""

    def __init__(self, file: IO[bytes], begin: int, length: int):
        self.file, self.begin, self.length, self.place = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.place = (0, self.place, self.length)[whence] + offset
        if self.place < 0:
            raise OSError("before the beginning")
        return self.place

    def readinto(self, buffer) -> int:
        self.file.seek(self.begin + self.place)
        data = self.file.read(max(0, min(len(buffer), self.length - self.place)))
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def refuse_bombs(piece: io.RawIOBase, length: int) -> None:
    """Raise ValueError where reading a tensor that torch.save wrote would take memory or time out of proportion to its
    bytes: where the archive is compressed, or its pickle takes one object several times, which may double what there
    is with every byte."""
    with zipfile.ZipFile(cast(IO[bytes], piece)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > length:
                raise ValueError(f"{entry.filename} is compressed")
            if entry.filename.endswith("data.pkl"):
                for operation, _, _ in pickletools.genops(archive.read(entry)):
                    if operation.name in ("GET", "BINGET", "LONG_BINGET", "DUP"):
                        raise ValueError("an object stands in several places")


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
    about = manifest.read(folder).about
    reader = Reader(folder)
    with disk_errors(folder, "read"):
        saved = reader.read_metadata()
        pieces = pieces_to_load(strategy.parts(), strategy.optimizer_state(), saved)
        random = []
        if about.get("world_size") == dist.get_world_size():
            random = [p for p in pieces_of_random_numbers(strategy.device) if p.name in saved.state_dict_metadata]
        dcp.load({}, storage_reader=reader, planner=LoadPieces(pieces + random, str(folder)))
    if random:
        set_random_state([piece.tensor for piece in random], strategy.device)
    require_alike(folder / manifest.MANIFEST, about, strategy.global_state())
    strategy.load_global_state(about)
    strategy.after_loading()
    return about


def require_alike(path: Path, about: dict, own: dict) -> None:
    """Raise UserError where a manifest's hyperparameters or loss scale are of other kinds than this strategy's own."""

    def kind(value) -> tuple:
        numbers = value if isinstance(value, list | tuple) else [value]
        return len(numbers), *("bool" if isinstance(one, bool) else isinstance(one, int | float) for one in numbers)

    for part in ("optimizer", "scaler"):
        if not isinstance(about.get(part), dict):
            raise UserError(f"{path} is damaged: about.{part}: missing")
        for key, value in about[part].items():
            if key in own[part] and own[part][key] is not None and kind(value) != kind(own[part][key]):
                raise UserError(f"{path} is damaged: about.{part}.{stored.printable(key)} can't be {value!r}")
        if part == "scaler" and about[part] and {*own[part]} - {*about[part]}:
            raise UserError(f"{path} is damaged: about.scaler: {min({*own[part]} - {*about[part]})} is missing")


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
    except OSError as error:
        raise disk_error(error, folder, done, "") from error


def disk_error(error: BaseException, folder: Path, done: str, who: str) -> BaseException:
    """A UserError for what the disk may do to us; other errors as they are."""
    if not isinstance(error, OSError | RuntimeError):
        return error
    # torch.save raises RuntimeError for a full disk
    reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
    advice = f"; make room, or name another folder with --run-dir{manifest.still_there(folder.parent)}"
    more = advice if done == "written" else ""
    return UserError(f"{folder} cannot be {done}: {who}{reason}{more}")
