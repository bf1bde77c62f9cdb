"""Values in the checking of exercises: compared, and described in the words of a verdict."""

import io
import math
from numbers import Real

import torch

SHOWN = 12  # elements of a tensor that are shown whole
DEEPEST = 16  # lists within lists
MOST_PRINTED = 4000  # characters of what a function prints in one call, on each rank


class Description(str):
    """The description of a result that cannot be compared."""


def plain(value, depth: int = 0):
    """A learner's result as data that can travel and be compared: tensors, numbers, text, lists; else its
    description."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized:
            return value.detach().clone()
        return Description(f"{kind(value)} on {value.device.type}, {str(value.layout).removeprefix('torch.')}")
    if isinstance(value, (list, tuple)) and depth < DEEPEST:
        return [plain(item, depth + 1) for item in value]
    if type(value) is int and value.bit_length() > 63:
        return Description(f"a number of {value.bit_length()} bits")
    if value is None or type(value) in (int, float, bool, str):
        return value
    try:
        return Description(f"{type(value).__name__} {str(value)[:100]}")
    except Exception:  # of the learner's own class
        return Description(type(value).__name__)


def difference(expected, got) -> tuple[str, str] | None:
    """(expected, got) in words where `got` is not what was expected, None where it is."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            return kind(expected), kind(got)
        wrong = (~torch.isclose(got, expected, rtol=1e-5, atol=0, equal_nan=True)).nonzero().tolist()
        if wrong and expected.numel() > SHOWN:
            at, place = tuple(wrong[0]), f" at element {wrong[0][0] if len(wrong[0]) == 1 else wrong[0]}"
            return show(expected[at]) + place, f"{show(got[at])} ({len(wrong)} of {got.numel()} elements differ)"
        same = not wrong
    elif isinstance(expected, list) and isinstance(got, list):
        differences = list(map(difference, expected, got))
        different = [(number, texts) for number, texts in enumerate(differences) if texts is not None]
        same = len(expected) == len(got) and not different
        # Lists of numbers are short enough to be shown whole.
        if len(expected) == len(got) and different and not (numbers(expected) and numbers(got)):
            number, (want, have) = different[0]
            what, inner, rest = want.rpartition(" as item ")  # of an item that is a list itself
            return (f"{what} as item {number}, {rest}" if inner else f"{want} as item {number}"), have
    elif isinstance(expected, Real) and isinstance(got, Real):
        whole = isinstance(expected, int) and isinstance(got, int)  # bytes and counts are right or wrong
        same = expected == got if whole else math.isclose(expected, got, rel_tol=1e-6)
    elif type(expected) is type(got):
        same = expected == got
    else:
        return kind(expected), kind(got)
    return None if same else (show(expected), show(got))


def numbers(value) -> bool:
    return all(map(numbers, value)) if isinstance(value, list) else isinstance(value, Real)


def kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, Description):
        return str(value)
    return f"{type(value).__name__} {show(value)[:100]}"


def show(value) -> str:
    if isinstance(value, torch.Tensor):
        return show(value.tolist()) if value.numel() <= SHOWN else kind(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def inputs(arguments: list[tuple], name: str) -> list[str]:
    """A call of each rank in words, so that its numbers can be computed again; one line where all are alike."""
    calls = [f"{name}({', '.join(map(argument, mine))})" for mine in arguments]
    if len(set(calls)) == 1:
        return [f"every rank: {calls[0]}"]
    return [f"rank {rank}: {call}" for rank, call in enumerate(calls)]


def argument(value) -> str:
    """An argument, cut short where it is long."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        shape = "x".join(map(str, value.shape)) or "scalar"
        about = f" ({shape} {kind})" if kind != "float32" or value.dim() != 1 else ""
        if value.numel() <= SHOWN:
            return show(value) + about
        few = show(value.flatten()[:3])
        return f"{few[:-1]}, ...]" + (about or f" ({value.numel():,} {kind})")
    if isinstance(value, (list, tuple)):
        few = ", ".join(map(argument, value[:SHOWN])) + (", ..." if len(value) > SHOWN else "")
        return f"[{few}]" if isinstance(value, list) else f"({few}{',' * (len(value) == 1)})"
    text = repr(value) if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


class Printed(io.TextIOBase):
    """Takes what a function prints; of more than MOST_PRINTED characters the beginning."""

    def __init__(self):
        self.text, self.cut = "", False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.cut = self.cut or len(self.text) + len(text) > MOST_PRINTED
        self.text += text[: MOST_PRINTED - len(self.text)]
        return len(text)

    def getvalue(self) -> str:
        return self.text + ("\n... (cut here)" if self.cut else "")
