"""What `calibrate` writes, read again: a file that somebody else may have written, so each of its numbers is checked.

It stands by itself because it needs msgspec, and what only predicts runs without any package, in a browser too.
"""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from common import stored
from common.errors import UserError

KINDS: tuple[Any, Any] = (Annotated[float, Meta(ge=0, le=1e12)], str)  # of a constant, and of `source`


class Calibrated(Struct):
    """What `calibrate` says of this machine, in its file: numbers by name, of which three are always there."""

    here: dict[str, Annotated[float, Meta(ge=0, le=1e30)]] = {}

    def __post_init__(self):
        if self.here and (lacking := {"peak", "hbm", "link"} - {*self.here}):
            raise ValueError(f"here has no {min(lacking)}")


def numbers_of(path: Path) -> dict[str, float]:
    """This machine's numbers; empty where the file has none. Raises UserError."""
    return stored.checked(path, stored.read(path), Calibrated).here


def probes_of(path: Path) -> list[float]:
    """Ratios of measured to predicted steps that `planner probe` wrote. Raises UserError for another file."""
    found = table_of(path)
    if "probes" not in found:
        raise UserError(f"--out {path}: not a file that `planner probe` wrote; give another name")
    return stored.converted(path, found["probes"], list[Annotated[float, Meta(gt=0, le=1e12)]], "probes")


def table_of(path: Path) -> dict[str, Any]:
    """All that stands in the file, of which nothing but its being a table is checked. Raises UserError."""
    return stored.checked(path, stored.read(path), dict[str, Any])


def constants_of(path: Path, found: Any, known: set[str]) -> dict[str, float | str]:
    """Constants by name, as a file has them. Raises UserError for one that cannot be."""
    named = stored.converted(path, found, dict[str, Any], "constants")
    if unknown := sorted({*named} - known):
        raise UserError(f"--constants {path}: unknown constant '{stored.printable(unknown[0])}'")
    return {
        name: stored.converted(path, value, KINDS[name == "source"], f"constants.{name}")
        for name, value in named.items()
    }
