"""What fully_shard is told, and how parameters get to where it shards them."""

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from common.errors import UserError
from common.strategy import DTYPES
from common.task import make_task
from course.fsdp import memory


def options(config) -> dict:
    """Of a run's options those that its strategy takes beyond the contract, where they are used."""
    return {name: getattr(config, name) for name in ("mesh", "offload") if getattr(config, name)}


def policies(precision: str, offload: bool) -> dict:
    """fully_shard's policies: parameters are gathered in the precision of the forward pass, gradients are summed over
    the ranks in float32. With `offload`, shards and their optimizer are in host memory."""
    dtype = None if precision == "fp32" else DTYPES[precision]
    found = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if offload:
        found["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return found


def average(loss: torch.Tensor) -> torch.Tensor:
    """The mean of all ranks' losses. Collective."""
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def materialise(unit: nn.Module, device: torch.device) -> None:
    """Rank 0's weights and buffers on every rank, wherever in the unit nothing is sharded yet. Those on the meta device
    get their memory here, so that a rank other than 0 never holds more than a unit that is not sharded. Collective."""
    there = {}  # what is tied stays tied
    for part in unit.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if tensor not in there:
                    if not tensor.is_meta:
                        tensor.data, there[tensor] = tensor.data.to(device), tensor
                    elif isinstance(tensor, nn.Parameter):
                        there[tensor] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
                    else:
                        there[tensor] = torch.empty_like(tensor, device=device)
                    dist.broadcast(there[tensor].detach(), src=0)
                tensors[name] = there[tensor]


def require_host_memory(config, size: int, local_size: int) -> None:
    """Raise UserError where this node's free memory is less than what its ranks would offload to it."""
    task = make_task(config)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in task.make_model().parameters())
    parts = shape_of(config.mesh or "2x2", size)[1] if config.strategy == "hsdp" else size
    needed = local_size * sum(memory.formula("fsdp", parameters, parts).values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--offload: the shards of {local_size} rank(s), with gradients and optimizer, take {needed / 2**30:.1f} "
            f"GiB of this node's memory, and {free / 2**30:.1f} are free; start more nodes, or make the model smaller"
        )
