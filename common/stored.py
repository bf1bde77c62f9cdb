"""The files of a run that somebody else may have written: what stands in each, said once, for those who write it and
for those who read it.

Whoever reads gets one UserError, which names the file and the field, for whatever is not as it is said here. Only
regular files are opened (a FIFO or a device could be read for ever, and a link leads elsewhere), and a size that no run
comes to is refused before anything is read. Whoever writes writes beside the file, and never through a link.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType

from common.errors import UserError

MIB = 2**20
AT_MOST = {"config.json": MIB, "metrics.jsonl": 512 * MIB, "manifest.json": 512 * MIB}  # bytes; others: MIB
T = TypeVar("T")

Scalar = bool | int | float | str
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Indices = Annotated[list[Count], Meta(max_length=64)]
# Plain names: nothing that leads out of the folder, and no character that a terminal obeys.
NAME, TYPE, CHECKSUM = r"^(?!\.\.?$)[A-Za-z0-9_.-]{1,200}\Z", r"^[a-z0-9_]{1,30}\Z", r"^[0-9a-f]{8}\Z"
IN_WORDS = {
    NAME: "letters, digits, '.', '-' and '_', as a file of a run is named",
    TYPE: "a type of numbers, as in float32",
    CHECKSUM: "eight hexadecimal digits",
}
Name = Annotated[str, Meta(pattern=NAME)]


# --- config.json --------------------------------------------------------------------------------------------------


class Settings(Struct):
    """What readers ask of a run's settings. All others are scalars, which an option's own type judges where it is read
    again (common/command_line.py)."""

    task: str
    batch_size: Size
    context: Size
    steps: Count
    layers: Size
    width: Size
    heads: Size


class Facts(Struct):
    """config.json: what the run was asked for, and on what it runs. `launch` has the names of the launches whose ranks
    it has, `mesh` the sizes of its axes."""

    config: dict[str, Scalar]
    strategy: str
    implementation: str
    mesh: dict[str, Size]
    world_size: Size
    launch: list[str] = []
    torch: str = ""
    python: str = ""


def facts_of(run: Path) -> Facts:
    """What config.json says. Raises UserError."""
    path = run / "config.json"
    facts = checked(path, read(path), Facts)
    check_settings(path, facts.config)
    return facts


def check_settings(path: Path, settings: dict[str, Scalar], within: str = "config") -> Settings:
    """Raise UserError where the settings that stand in a file are none of a run."""
    return converted(path, settings, Settings, within)


# --- metrics.jsonl ------------------------------------------------------------------------------------------------

Number = float | int | None


class Line(Struct):
    """What every line of metrics.jsonl has; a validation loss, reports of the ranks and the like stand in some."""

    step: Positive
    loss: Number
    grad_norm: Number
    step_seconds: Annotated[float, Meta(ge=0)]
    ranks: list[dict[str, Scalar | None]] | UnsetType = UNSET
    validation_loss: Number | UnsetType = UNSET


def records_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl; without the last one where a run was killed while it wrote it. Raises UserError."""
    path = run / "metrics.jsonl"
    *lines, last = read(path).split(b"\n")
    found = []
    for number, line in enumerate([*lines, last] if last else lines, start=1):
        record = {}
        try:
            record = parsed(path, line, f"line {number}")
        except UserError:
            if number > len(lines):  # without the end of a line: it is being written
                break
            raise
        converted(path, record, Line, f"line {number}")
        converted(path, record, dict[str, Number | str | list], f"line {number}")
        found.append(record)
    return found


# --- manifest.json ------------------------------------------------------------------------------------------------


class About(Struct):
    """What a run says of its checkpoint. Those that are not set are not asked for where they stand alone, as in tests
    of a checkpoint's files."""

    step: Count
    examples: Count | UnsetType = UNSET
    settings: dict[str, Scalar] | UnsetType = UNSET
    strategy: str | UnsetType = UNSET
    implementation: str | UnsetType = UNSET
    mesh: dict[str, Size] | UnsetType = UNSET
    world_size: Size | UnsetType = UNSET
    optimizer: dict[str, bool | Number | list[float]] | UnsetType = UNSET
    scaler: dict[str, Any] | UnsetType = UNSET


class Box(Struct):
    """Where a part of a tensor lies: its place in the tensor, and the bytes of a file of the checkpoint."""

    offset: Indices
    size: Indices
    file: Name
    begin: Count
    bytes: Count


class SavedTensor(Struct):
    """A tensor of a checkpoint, which the files have in boxes."""

    dtype: Annotated[str, Meta(pattern=TYPE)]
    size: Indices
    boxes: list[Box]


class Manifest(Struct):
    """manifest.json: what the run says, each file with its size and checksum, and where in them which tensor is."""

    about: dict[str, Any]
    files: dict[Name, tuple[Count, Annotated[str, Meta(pattern=CHECKSUM)]]]
    tensors: dict[str, SavedTensor]


def check_manifest(path: Path, content: Any) -> Manifest:
    """Raise UserError where a manifest says what cannot be, whatever its checksum is."""
    found = converted(path, content, Manifest, "")
    about = converted(path, found.about, About, "about")
    if about.settings is not UNSET:
        check_settings(path, about.settings, "about.settings")
    for name, tensor in found.tensors.items():
        if why := wrong_boxes(tensor, found.files):
            raise UserError(f"{path} is damaged: tensors.{printable(name)}: {why}")
    return found


def wrong_boxes(tensor: SavedTensor, files: dict) -> str:
    """What cannot be in where a tensor's boxes are; "" where all can."""
    inside, dims = 0, len(tensor.size)
    for box in tensor.boxes:
        if len(box.offset) != dims or len(box.size) != dims:
            return "a box has other dimensions than the tensor"
        if any(a + b > c for a, b, c in zip(box.offset, box.size, tensor.size, strict=True)):
            return "a box lies outside of the tensor"
        if box.file not in files or box.begin + box.bytes > files[box.file][0]:
            return f"a box lies outside of the file {box.file}"
        if math.prod(box.size) > box.bytes:  # an element has a byte at least
            return "a box has more elements than bytes"
        inside += math.prod(box.size)
    return "" if inside == math.prod(tensor.size) else "its boxes are not the whole tensor"


# --- reading ------------------------------------------------------------------------------------------------------


def opened(path: Path, at_most: int | None = None) -> IO[bytes]:
    """A regular file, opened to be read. Raises UserError for anything else, and where it has more bytes."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():  # where it is one, the system's own error does not say so
            raise UserError(f"{path} is a link, and only regular files are read")
        file = os.fdopen(os.open(path, flags), "rb")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        file.close()
        raise UserError(f"{path} is no regular file")
    if at_most is not None and about.st_size > at_most:
        file.close()
        raise UserError(f"{path} has {about.st_size:,} bytes; more than {at_most:,} can't be right")
    return file


def read(path: Path, at_most: int | None = None) -> bytes:
    """The bytes of a file. Raises UserError."""
    limit = AT_MOST.get(path.name, MIB) if at_most is None else at_most
    with opened(path, limit) as file:
        return file.read(limit + 1)  # it may grow


def parsed(path: Path, data: bytes, within: str = "") -> Any:
    """JSON that somebody has written. Raises UserError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no text, a number of 5,000 digits
        where = f"{within}: " if within else ""
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(f"{path} is damaged: {where}not JSON ({printable(reason)})") from None


class NoAliases(yaml.SafeLoader):
    """Takes no alias: a few lines of them stand for more than there is memory."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(
                f"line {self.peek_event().start_mark.line + 1}: an alias; write out what it stands for"
            )
        return super().compose_node(parent, index)


def yaml_of(path: Path, data: bytes) -> Any:
    """YAML that somebody has written. Raises UserError."""
    try:
        return yaml.load(data.decode(), NoAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no text, brackets without end, the 40th of May
        raise UserError(f"{path}: not YAML ({printable(' '.join(str(error).split())[:300])})") from None


def converted(path: Path, content: Any, kind: type[T], within: str) -> T:
    """`content` as the schema has it. Raises UserError, which names file and field."""
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError, UnicodeError) as error:
        reason, _, place = str(error).partition(" - at ")
        for pattern, words in IN_WORDS.items():
            reason = reason.replace(f"`str` matching regex {pattern!r}", words)
        place = re.sub(r"^(key in )?\$\.?|`", "", place.replace("`", ""))
        field = ".".join(filter(None, (within, place)))
        raise UserError(f"{path} is damaged: {f'{field}: ' if field else ''}{printable(reason)}") from None


def checked(path: Path, data: bytes, kind: type[T]) -> T:
    return converted(path, parsed(path, data), kind, "")


def printable(text: str) -> str:
    """Text of somebody else's, for a terminal: what it would obey, such as escape sequences, is spelled out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


# --- writing ------------------------------------------------------------------------------------------------------


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a new file beside `path` and give it that name, so that at every moment `path` is whole or as
    it was. A link in its place is replaced; what it leads to is not touched."""
    beside = path.with_name(f".{path.name}.partial")
    beside.unlink(missing_ok=True)
    os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # new: no link, whoever puts one there
    try:
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def to_append(path: Path, flags: int = 0) -> int:
    """The number of a regular file that is opened to be read and written at its end. Raises UserError for another."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise UserError(f"{path} is a link, and a run writes to its own files only; remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise UserError(f"{path} is no regular file, and a run writes to its own files only; remove it")
    return number
