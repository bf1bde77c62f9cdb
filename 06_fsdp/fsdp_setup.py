"""What fully_shard is told, and how parameters get to where it shards them."""

import os
from fnmatch import fnmatch

import psutil
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_module

from common.collectives import broadcast_module
from common.constants import GIB
from common.errors import UserError
from common.mesh import axis
from common.model import Attention, children_or_items
from common.own import is_own
from common.ranks import environment
from common.reshard import reshard
from common.strategy import DTYPES, Strategy
from common.task import make_task
from course.fsdp import memory
from course.fsdp.options import Budget, Offload
from course.model_parallel.torch_tensor import PLAN


def policies(precision: str, offload: bool) -> dict:
    """fully_shard's policies: parameters are gathered in the precision of the forward pass, gradients are summed over
    the ranks in float32. With `offload`, shards and their optimizer are in host memory."""
    dtype = None if precision == "fp32" else DTYPES[precision]
    found: dict[str, object] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if offload:
        found["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return found


class Sharded(Strategy):
    """What the strategies with fully_shard have in common: what they require, and over which axes they shard."""

    preset = {"shard": -1}
    from_meta = True
    Options: type = Budget

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_memory_options(config, axes)

    def __init__(self, setup):
        super().__init__(setup)
        self.readers = axis(self.mesh, *self.data_axes)  # of ranks that read different slices
        both = "data" in self.mesh.mesh_dim_names  # replicated over the first axis, sharded over the second
        self.offloads = isinstance(self.options, Offload) and self.options.offload
        mesh = self.mesh["data", "shard"] if both else self.mesh["shard"]
        self.how = {"mesh": mesh, **policies(self.precision, self.offloads)}

    def prepare(self, unit: nn.Module) -> None:
        """Give a unit what fully_shard will shard: rank 0's weights, on every rank. Collective."""
        broadcast_module(unit, self.readers.group, self.device)

    def evaluate(self, inputs, targets):
        loss = super().evaluate(inputs, targets)
        reshard(self.model)
        return loss

    def global_state(self):
        """Without what only says how this run computes a step: another one may keep its state elsewhere."""
        state = super().global_state()
        return state | {"optimizer": state["optimizer"] | dict.fromkeys(state["optimizer"].keys() & HOW)}

    def load_global_state(self, state):
        own = [{key: group[key] for key in group.keys() & HOW} for group in self.optimizer.param_groups]
        super().load_global_state(state)
        for group, how in zip(self.optimizer.param_groups, own, strict=True):
            group.update(how)


HOW = {"fused", "foreach"}  # of PyTorch's optimizers: in how many passes over memory they take a step


def step_on_the_host(optimizer: torch.optim.Optimizer) -> None:
    """Let the CPU take the optimizer's steps, which are bound by its memory: one pass over parameters, gradients and
    averages in the place of one for each operation (measured with AdamW and one thread: 3.8 ns for a parameter, not
    25.3), by this process's share of the node's cores. torchrun leaves a process one thread where nobody has set
    OMP_NUM_THREADS. SGD steps as before: of the fused operations DTensor has rules for Adam's only."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            group.update(fused=True, foreach=False)
    *_, local_size = environment()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_size))


def units_of(model: nn.Module) -> dict[nn.Module, bool]:
    """The modules that are units, in the order in which fully_shard is called, each with whether it is freed after its
    forward pass.

    They are the model's children, or their items, such as blocks; the model itself comes last, as the unit of what is
    left: weights that two of those share, such as a tied embedding's, since a weight has one unit. What the forward
    pass ends with is not freed: the backward pass begins with it.
    """
    parts = children_or_items(model)
    owned = {part: set(part.parameters()) for part in parts}
    alone = [part for part in parts if all(owned[part].isdisjoint(owned[p]) for p in parts if p is not part)]
    return {**{part: part is not parts[-1] for part in alone}, model: False}


def cut_unit(model: nn.Module, unit: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the weights of a unit of a GPT over the ranks of a mesh of one dimension, as apply_tensor_parallel (chapter
    04) cuts those of a whole model: so that each unit can be sharded before the next one is moved to the device. What
    has been cut with another unit stays as it is. Only fully_shard may come after it, which leaves each rank the
    gradient of its own words. Collective."""
    todo = {module for module in unit.modules() if not any(isinstance(p, DTensor) for p in module.parameters())}
    names = [name for name, module in model.named_modules() if module in todo]
    plan = {name: style for name in names for pattern, style in PLAN.items() if fnmatch(name, pattern)}
    ends = [model.get_submodule(name) for name in ("embedding.tokens", "head.out") if name in plan]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    tp.parallelize_module(model, mesh, plan)
    if tied:
        ends[1].weight = ends[0].weight
    for module in todo:
        if isinstance(module, Attention):
            module.heads //= mesh.size()
    distribute_module(unit, mesh)  # norms, biases, positions: whole on every rank


def average(loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean of the losses of all ranks of a group. Collective."""
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group)


def require_memory_options(config, axes: dict[str, int]) -> None:
    """Raise UserError for --offload, --find-batch-size and --memory-budget that exclude each other, or that this
    machine cannot have, as far as the run is on this machine: a dry run may be for another. `axes`: the sizes of the
    mesh."""
    options = config.options
    if isinstance(options, Offload) and options.offload and not config.dry_run:
        require_host_memory(config, axes)
    if not isinstance(options, Budget):
        return
    if options.find_batch_size:
        if is_own(config.task):
            raise UserError(
                "--find-batch-size is for the course's models; python -m planner measure FILE.py:FUNCTION counts yours"
            )
        if options.offload:
            raise UserError(
                f"--find-batch-size is for PyTorch's fsdp and zero2, not for '{config.strategy}' with --offload"
            )
        if not 0 < options.memory_budget < float("inf"):
            raise UserError(f"--find-batch-size: --memory-budget {options.memory_budget} should be the GiB of a rank")
    elif options.memory_budget:
        raise UserError("--memory-budget is what --find-batch-size stops at; add that, or leave it out")


def require_host_memory(config, axes: dict[str, int]) -> None:
    """Raise UserError where this node's free memory is less than what its ranks would offload to it."""
    *_, local_size = environment()
    task = make_task(config)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in task.make_model().parameters())
    needed = local_size * sum(memory.formula("fsdp", parameters, axes["shard"]).values())
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--offload: the shards of {local_size} rank(s), with gradients and optimizer, take {needed / GIB:.1f} "
            f"GiB of this node's memory, and {free / GIB:.1f} are free; start more nodes, or make the model smaller"
        )
