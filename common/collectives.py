"""What every chapter needs of collectives: the same initial weights, the norm of a whole model, many tensors at once.

Each takes the group in which it talks.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm


def broadcast_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's rank 0: ranks may have been seeded differently."""
    broadcast_together([*module.parameters(), *module.buffers()], group)


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
            flat = torch.cat([tensor.flatten() for tensor in part])
            dist.broadcast(flat, group=group, group_src=0)
            for tensor, value in zip(part, flat.split([tensor.numel() for tensor in part]), strict=True):
                tensor.copy_(value.view_as(tensor))


def weights_of_rank_0(model: nn.Module, group: dist.ProcessGroup, own=None) -> Iterator[tuple[str, nn.Parameter]]:
    """broadcast_module one parameter at a time: (name, parameter) for each, when it has the values of the group's rank
    0. Whoever cuts each of them at once, in place, never has more than its own parts and one whole parameter.

    model: after `leave_meta`, where it came without memory
    own:   the parameters that this rank keeps; the others are not given out, and have no memory afterwards

    Collective, as long as the caller goes on to the end.
    """
    for name, parameter in model.named_parameters():
        take_from_rank_0(parameter, group)
        if own is None or parameter in own:
            yield name, parameter
        else:
            parameter.data = shape_only(parameter, parameter.device)
    for buffer in model.buffers():
        dist.broadcast(buffer, group=group, group_src=0)


def take_from_rank_0(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Give every rank the values of the group's rank 0, and memory for them where there is none (`leave_meta`)."""
    if parameter.untyped_storage().nbytes() < parameter.nbytes:
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if dist.get_world_size(group) > 1:
        dist.broadcast(parameter.detach(), group=group, group_src=0)


def leave_meta(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with nothing on the meta device: parameters that were there have a shape and, on `device`, no memory
    behind it yet, which `data` can be given later. All buffers are on `device`, those that were there without values.
    """

    def change(tensor):
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
