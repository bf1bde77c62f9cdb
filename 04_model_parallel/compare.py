"""What the pages of this chapter hold against one process: a program's losses and weights, and a block's gradients."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.model import Block


def run_program(*command: str | Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Run a command in an empty folder: the losses that it prints, and the weights that it saves there, by their names.

    Raises RuntimeError with what it has written to its standard error, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        weights = {name: w for file in Path(folder).glob("*.pt") for name, w in torch.load(file).items()}
    return re.findall(r"loss ([\d.]+)", done.stdout), weights


def off_from_one_process(split: Callable[[Block], Block], ranks: int) -> tuple[int, float, float]:
    """What a transformer block of width 32 with 8 heads, divided by `split`, computes on so many ranks.

    Returns the parameters that a rank holds, and the norm of the difference from the untouched block on one process,
    relative to its norm: of the output, and of the worst gradient (of the input, and of each parameter, put together
    from the ranks' parts along the dimension that is cut; of what isn't cut, that of the worst rank).
    """
    whole, found = _gradients(lambda block: block), launch(_gradients, ranks, (split,))
    off = [
        ((_together(parts, right) - right).norm() / right.norm()).item()
        for parts, right in zip(zip(*found, strict=True), whole, strict=True)
    ]
    return sum(part.numel() for part in found[0][2:]), off[0], max(off[1:])


def _gradients(split):
    """Output, gradient of the input, and gradients of the parameters."""
    torch.manual_seed(0)
    block, x = split(Block(width=32, heads=8)), torch.randn(2, 8, 32, requires_grad=True)
    y = block(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())]


def _together(parts, whole):
    cut = [dim for dim in range(whole.dim()) if parts[0].shape[dim] < whole.shape[dim]]
    return torch.cat(parts, cut[0]) if cut else max(parts, key=lambda part: (part - whole).norm())


def passes_of(block: nn.Module, mesh) -> tuple[float, dict[str, tuple], dict[str, int], dict[str, int]]:
    """A forward and a backward pass of a block of width 32 that `parallelize_module` has divided over a mesh, with a
    sequence of 8 tokens that is divided too.

    Returns the norm of all gradients; for each parameter, how it and its gradient lie on the mesh; and the collectives
    of the forward and of the backward pass, counted by kind. Collective.
    """
    x = distribute_tensor(torch.randn(2, 8, 32), mesh, [Shard(1)])
    with Ledger() as forward:
        y = block(x)
    with Ledger() as backward:
        y.square().mean().backward()
    pairs = {name: (cast(DTensor, p), cast(DTensor, p.grad)) for name, p in block.named_parameters()}
    layouts = {name: (p.placements[0], gradient.placements[0]) for name, (p, gradient) in pairs.items()}
    norm = nn.utils.get_total_norm([gradient.full_tensor() for _, gradient in pairs.values()]).item()
    return norm, layouts, forward.calls, backward.calls
