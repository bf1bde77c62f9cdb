"""What a reader brings along: functions of a Python file. `--task FILE.py` trains its model() on its data(), and
`--task FILE.py:NAME` on that of another function.

model() returns a torch.nn.Module that turns the inputs of a batch into logits [..., classes]. data() returns a pair of
PyTorch's datasets, to train on and to validate on (or None), whose examples are pairs (inputs, targets) of tensors.
docs/your-task.md has two such files.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from torch import nn


def is_own(task: str) -> bool:
    """Whether --task names a file."""
    return bool(re.fullmatch(r".+\.py(:\w*)?", task))


def file_of(task: str) -> str:
    """The file of such a task."""
    return task.removesuffix(":" + data_of(task))


def data_of(task: str) -> str:
    """The name of its function that gives data."""
    return task.rpartition(".py")[2].removeprefix(":") or "data"


@functools.cache
def module_of(path: str) -> ModuleType:
    """A Python file, imported. Raises UserError."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: there is no such file")
    if Path(path).suffix != ".py":
        raise UserError(f"{path} is no file of Python, whose name ends in .py")
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    assert spec and spec.loader  # as for every .py file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    from common import vision  # noqa: F401  Transformers imports torchvision, which fails beside some builds of torch

    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:  # it is the user's
        raise UserError(f"{path} cannot be imported: {first_line(error)}") from error
    return module


def function_of(path: str, name: str) -> Callable:
    """The function of that name in a Python file. Raises UserError."""
    found = getattr(module_of(path), name, None)
    if not callable(found):
        raise UserError(f"{path} has no function '{name}'")
    return found


def named(what: str) -> Callable:
    """The function that FILE.py:FUNCTION names. Raises UserError."""
    path, _, name = what.rpartition(":")
    if not path:
        raise UserError(f"'{what}' names no function; give FILE.py:FUNCTION")
    if not os.path.isfile(path):
        raise UserError(f"'{what}': there is no such file; give FILE.py:FUNCTION")
    return function_of(path, name)


def load_weights(module: "nn.Module", path: str) -> None:
    """Read a file that `python -m common.runs export RUN --safetensors` has written into a module. Raises UserError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        module.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} has no weights for this model: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An error of somebody else's in one line, with its cause's where it has one, since libraries often say only there
    what was wrong."""
    cause = error.__cause__
    return words_of(error) + (f" ({words_of(cause)})" if cause else "")


def words_of(error: BaseException) -> str:
    """The name of an error and its first line; and the second one where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return type(error).__name__ + (f": {text[:300]}" if text else "")
