"""What every chapter needs of collectives: the same initial weights, the norm of a whole model, many tensors at once.

Each takes the group in which it talks.
"""

from collections.abc import Callable, Container

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from common.state import is_dtensor


def broadcast_module(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    own: Container[nn.Parameter] | None = None,
    cut: Callable[[str, nn.Parameter], None] | None = None,
) -> None:
    """Give every rank the parameters and buffers of the group's rank 0: ranks may have been seeded differently.

    device: where all of them will be, those on the meta device included; by default where they are (`leave_meta`).
            DTensors, which have been cut already, stay as they are.
    own:    the parameters that this rank keeps; the others have no memory afterwards
    cut:    called with the name of each of its own parameters and the parameter, when it has its values: to leave this
            rank's part in its `data`

    With any of these, one parameter comes after the other: no rank ever has more than its own parts and one whole
    parameter. Without, all come together in few messages. Collective.
    """
    if device is not None:
        leave_meta(module, device)
    one_by_one = device is not None or own is not None or cut is not None
    parameters = [(name, p) for name, p in module.named_parameters() if not is_dtensor(p)]
    buffers = [buffer for buffer in module.buffers() if not is_dtensor(buffer)]
    for name, parameter in parameters:
        if parameter.untyped_storage().nbytes() < parameter.nbytes:  # only a shape so far
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if device is not None:
            parameter.data = parameter.data.to(device)
        if one_by_one:
            broadcast_together([parameter], group)
        if own is not None and parameter not in own:
            parameter.data = shape_only(parameter, parameter.device)
        elif cut is not None:
            cut(name, parameter)
    broadcast_together(buffers if one_by_one else [parameter for _, parameter in parameters] + buffers, group)


def broadcast_together(tensors: list[torch.Tensor], group: dist.ProcessGroup, most: int = 250 * 2**20) -> None:
    """Give every rank of the group its rank 0's values, in place, in few broadcasts: each takes tensors of one data
    type, of together at most `most` bytes, which is what DistributedDataParallel takes. Collective."""
    if dist.get_world_size(group) == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        parts: list[list[torch.Tensor]] = []
        for tensor in (tensor.detach() for tensor in tensors if tensor.dtype == dtype):
            if not parts or sum(part.nbytes for part in parts[-1]) + tensor.nbytes > most:
                parts.append([])
            parts[-1].append(tensor)
        for part in parts:
            if len(part) == 1 and part[0].is_contiguous():
                dist.broadcast(part[0], group=group, group_src=0)
                continue
            flat = torch.cat([tensor.flatten() for tensor in part])
            dist.broadcast(flat, group=group, group_src=0)
            for tensor, value in zip(part, flat.split([tensor.numel() for tensor in part]), strict=True):
                tensor.copy_(value.view_as(tensor))


def leave_meta(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with nothing on the meta device: parameters that were there have a shape and, on `device`, no memory
    behind it yet, which `data` can be given later. All buffers are on `device`, those that were there without values.
    """

    def change(tensor):
        if is_dtensor(tensor):
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        return nn.Parameter(shape_only(tensor, device), tensor.requires_grad) if tensor.is_meta else tensor

    return change_tensors(model, change)


def shape_only(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros of a tensor's shape and type, all of which are the same one number."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def change_tensors(module: nn.Module, change) -> nn.Module:
    """Put `change(tensor)` in the place of each parameter and buffer, once for each: what is tied stays tied."""
    changed = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor not in changed:
                        changed[tensor] = change(tensor)
                    tensors[name] = changed[tensor]
    return module


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
