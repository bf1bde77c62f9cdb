"""torch.compile for a model whose blocks are alike: each is compiled by itself, in the place of its forward method."""

import shutil

import torch
from torch import nn

from common.errors import UserError
from common.model import Block, blocks_of


def compile_blocks(model: nn.Module, backend: str) -> list[nn.Module]:
    """Compile the forward method of each Block of a model, or, where it has none, of each item of its longest list of
    modules, or else that of the model itself, when it is first called. Returns the modules whose method it is.

    Parameters keep their names. And what a strategy has hung on a block, such as gathering its parameters and splitting
    its outputs, stays outside of the graph, where it runs as before. Blocks of one shape share the compiled code.
    """
    units: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    units = units or blocks_of(model) or [model]
    for unit in units:
        unit.forward = torch.compile(unit.forward, backend=backend)
    return units


def require(config) -> None:
    """Raise UserError where a run's blocks cannot be compiled."""
    backend, known = config.compile, torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise UserError(f"--compile {backend}: torch.compile has no such backend; it has {', '.join(known)}")
    if backend == "inductor" and not torch.cuda.is_available() and not any(map(shutil.which, ("g++", "clang++"))):
        raise UserError("--compile inductor writes C++ for CPUs, and there is no g++ here; take --compile aot_eager")
