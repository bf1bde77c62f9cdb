"""A checkpoint as a folder on disk: which steps there are, and whether a folder is what was written.

checkpoint-000150/
    manifest.json    what rank 0 says of all (step, settings, learning rates, loss scale, ...), and of each file below
                     its size and checksum; the checksum of all that comes last
    .metadata        where which piece of which tensor is, written by torch.distributed.checkpoint (DCP)
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

from common.errors import UserError

MANIFEST = "manifest.json"


def name_of(step: int) -> str:
    return f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    """The number of steps that a checkpoint has behind it, by its name."""
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; those that are being written are not among them."""
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=step_of)


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
    with open(path, "rb") as file:
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


def seal(about: dict, files: dict[str, tuple[int, str]]) -> str:
    """The text of a manifest."""
    content = {"about": about, "files": files}
    return json.dumps({**content, "checksum": f"{zlib.crc32(json.dumps(content).encode()):08x}"}, indent=1) + "\n"


def read(folder: Path) -> tuple[dict, dict[str, list]]:
    """What a checkpoint's manifest says: (about, files). Raises UserError where there is none, or a damaged one."""
    path = folder / MANIFEST
    try:
        text = path.read_text()
        content = json.loads(text)
        if text != seal(content["about"], content["files"]):
            raise ValueError
        return content["about"], content["files"]
    except FileNotFoundError:
        raise UserError(
            f"{folder} is no checkpoint of this course, or one that was cut: it has no {MANIFEST}"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged") from None


def damage(folder: Path, rank: int = 0, size: int = 1) -> str:
    """What is wrong with a checkpoint; "" where nothing is. Of `size` ranks, each looks at some of the files."""
    try:
        files = read(folder)[1]
    except UserError as error:
        return str(error)
    for name, (length, expected) in sorted(files.items())[rank::size]:
        path = folder / name
        try:
            if path.stat().st_size != length:
                return f"{path} has {path.stat().st_size:,} bytes and not {length:,}"
            if checksum(path) != expected:
                return f"{path} is damaged: its checksum is not that of the manifest"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""


def remove(folder: Path) -> None:
    """Remove a checkpoint; at no moment is there a part of it under its name."""
    aside = folder.with_name(f".{folder.name}.removed.partial")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder.rename(aside))
