"""The axes of a mesh by name and size: read, checked and put in order, before there are ranks (and without torch)."""

import math

from common.did_you_mean import did_you_mean
from common.errors import UserError

AXES = ("pipeline", "data", "shard", "context", "expert", "tensor")  # outermost first: the default order


def resolve(axes: dict[str, int], size: int) -> dict[str, int]:
    """Sizes of the axes for `size` ranks, with the one that is -1 filled in. Raises UserError where they do not fit."""
    known = math.prod(number for number in axes.values() if number != -1)
    text = ",".join(f"{name}={number}" for name, number in axes.items() if number != -1)
    if -1 in axes.values():
        rest = next(name for name, number in axes.items() if number == -1)
        if size % known:
            raise UserError(
                f"--mesh {text} leaves no whole number of ranks for axis '{rest}': {size} rank(s) do not divide by "
                f"{known}; start a multiple of {known}, or set --mesh"
            )
        return {name: size // known if number == -1 else number for name, number in axes.items()}
    if known != size:
        raise UserError(
            f"--mesh {text} is {known} rank(s), and there are {size}; take {known}, or make the product {size}"
        )
    return dict(axes)


def parse_axes(text: str) -> dict[str, int]:
    """Read "data=2,tensor=2". Raises UserError for what is no such list, names no axis, or names one twice."""
    axes = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES:
            hint = did_you_mean(name, AXES, otherwise=f"there are {', '.join(AXES)}")
            raise UserError(f"--mesh {text}: no axis '{name}'; {hint}")
        if name in axes:
            raise UserError(f"--mesh {text}: axis '{name}' is given twice")
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"--mesh {text}: expected a number of ranks as in '{name}=2', got '{part.strip()}'")
        axes[name] = int(number)
    return axes


def parse_order(text: str) -> tuple[str, ...]:
    """Read "data,pipeline,tensor", outermost first; axes that are not named keep their default order after these.
    Raises UserError."""
    named = tuple(word.strip() for word in text.split(",")) if text else ()
    wrong = next((name for name in named if name not in AXES), None)
    if wrong is not None:
        raise UserError(f"--mesh-order {text}: no axis '{wrong}'; there are {', '.join(AXES)}")
    if len(set(named)) < len(named):
        raise UserError(f"--mesh-order {text}: an axis is given twice")
    return (*named, *(name for name in AXES if name not in named))


def in_order(axes: dict[str, int], order: tuple[str, ...] = AXES) -> dict[str, int]:
    """The same axes, outermost first."""
    return {name: axes[name] for name in order if name in axes}
