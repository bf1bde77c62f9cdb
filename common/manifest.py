"""A checkpoint as a folder on disk: which steps there are, and whether a folder is what was written.

checkpoint-000150/
    manifest.json    what rank 0 says of all (step, settings, learning rates, loss scale, ...), of each file below its
                     size and checksum, and where in them which piece of which tensor is; its own checksum comes last
    .metadata        where the pieces are, as torch.distributed.checkpoint (DCP) writes it for PyTorch's own readers: a
                     pickle, which may call anything, so the course never reads it
    __0_0.distcp     the pieces that rank 0 wrote
    __1_0.distcp     those of rank 1, and so on
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path

import msgspec

from common import stored
from common.errors import UserError

MANIFEST = "manifest.json"


def name_of(step: int) -> str:
    return f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    """The number of steps that a checkpoint has behind it, by its name."""
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; those that are being written are not among them."""
    if not os.path.isdir(run):
        return []
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{1,15}", path.name)]
    return sorted(filter(is_folder, found), key=step_of)


def is_folder(path: Path) -> bool:
    """Whether a folder is there, and not a link to one, which may lie anywhere."""
    return os.path.isdir(path) and not os.path.islink(path)


def still_there(run: Path) -> str:
    """What to add to the error when the disk is full: true of this run."""
    return " (checkpoints written before are whole; --resume goes on from them)" if checkpoints(run) else ""


def unfinished(run: Path) -> list[Path]:
    """What was left by somebody who was killed while writing or removing a checkpoint."""
    return sorted(run.glob(".checkpoint-*.partial"))


def partial(folder: Path) -> Path:
    """Where a checkpoint is written before it is moved into place."""
    return folder.with_name(f".{folder.name}.partial")


def checksum(path: Path) -> str:
    """CRC-32 of a file: any flipped byte changes it."""
    number = 0
    with stored.opened(path) as file:
        while block := file.read(2**20):
            number = zlib.crc32(block, number)
    return f"{number:08x}"


def sync(path: Path) -> None:
    """Have the system write a file or the names in a folder to disk, so that they outlive a loss of power."""
    with contextlib.suppress(PermissionError):  # Windows does not open folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def seal(about: dict, files: dict, tensors: dict | None = None) -> str:
    """The text of a manifest, of whose parts common/stored.py says what they are."""
    content = msgspec.to_builtins(stored.Manifest(about, files, tensors or {}))
    return json.dumps({**content, "checksum": f"{zlib.crc32(json.dumps(content).encode()):08x}"}, indent=1) + "\n"


def read(folder: Path) -> stored.Manifest:
    """What a checkpoint's manifest says. Raises UserError where there is none, or a damaged one."""
    path = folder / MANIFEST
    if not os.path.exists(path):
        raise UserError(f"{folder} is no checkpoint of this course, or one that was cut: it has no {MANIFEST}")
    data = stored.read(path)
    content = stored.parsed(path, data)
    found = stored.check_manifest(path, content)
    if data != seal(found.about, found.files, found.tensors).encode():
        raise UserError(f"{path} is damaged: its checksum is another")
    return found


def damage(folder: Path, rank: int = 0, size: int = 1) -> str:
    """What is wrong with a checkpoint; "" where nothing is. Of `size` ranks, each looks at some of the files."""
    if wrong := damage_at_sight(folder):
        return wrong
    for name, (_, expected) in sorted(read(folder).files.items())[rank::size]:
        try:
            if checksum(folder / name) != expected:
                return f"{folder / name} is damaged: its checksum is not that of the manifest"
        except UserError as error:
            return str(error)
    return ""


def damage_at_sight(folder: Path) -> str:
    """What the manifest and the sizes of a checkpoint's files show to be wrong with it, in milliseconds; "" where that
    is nothing."""
    try:
        files = read(folder).files
    except UserError as error:
        return str(error)
    for name, (length, _) in sorted(files.items()):
        path = folder / name
        try:
            with stored.opened(path) as file:
                there = os.fstat(file.fileno()).st_size
        except UserError as error:
            return str(error)
        if there != length:
            return f"{path} has {there:,} bytes and not {length:,}"
    return ""


def remove(folder: Path) -> None:
    """Remove a checkpoint; at no moment is there a part of it under its name."""
    aside = folder.with_name(f".{folder.name}.removed.partial")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder.rename(aside))
