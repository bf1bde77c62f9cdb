"""What every chapter needs of collectives: the same initial weights, the norm of a whole model, many tensors at once.

Each takes the group in which it talks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's rank 0: ranks may have been seeded differently."""
    if dist.get_world_size(group) > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A long vector on the CPU in pieces, whose norms PyTorch computes well.

    It adds up the squares of one vector in float32, in one sum for each lane of the processor (torch 2.13). The norm of
    a million elements is off by 1e-5, that of ten million by 6e-4. ZeRO's gradients are one such vector.
    """
    return tensor.reshape(-1).split(1 << 16) if tensor.device.type == "cpu" else (tensor,)


def global_norm(parts, device: torch.device) -> torch.Tensor:
    """The 2-norm of tensors that are spread over ranks: a scalar on `device`, the same on all ranks concerned.

    parts: pairs (tensors, groups). The squares of these tensors are summed over each process group of `groups`, which
           are those over which the tensors are cut; no group where every rank has all of them.
    """
    total = torch.zeros((), device=device)
    for tensors, groups in parts:
        tensors = [piece for tensor in tensors for piece in pieces(tensor)]
        square = get_total_norm(tensors).to(device).float() ** 2 if tensors else torch.zeros((), device=device)
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(square, group=group)
        total = total + square
    return total.sqrt()


def all_reduce_together(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the group's ranks, in place: one all-reduce for all tensors of a data type."""
    if dist.get_world_size(group) == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        dist.all_reduce(flat, group=group)
        for tensor, total in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(total.view_as(tensor))
