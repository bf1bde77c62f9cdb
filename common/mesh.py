"""Named axes of ranks: which ranks form a group along which axis, over PyTorch's DeviceMesh.

The ranks of a run are numbered from 0. Put them into a grid with one dimension for each axis, and the ranks that
differ in one coordinate only are a group along that axis: `--mesh pipeline=2,data=2,tensor=2` makes eight ranks
two pipeline stages of two replicas of two parts of every weight. The last axis varies fastest, so its groups are
neighbours: on a cluster, GPUs of one node. That is why tensor parallelism, which talks most, is innermost by default,
and the pipeline, which talks least, outermost (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters", SC 2021, section 3).
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.axes import AXES, in_order, parse_axes, parse_order, resolve

__all__ = ["AXES", "Axis", "axis", "device_of", "in_order", "make_mesh", "parse_axes", "parse_order", "resolve"]


# The group of this rank alone, made once in the life of the group of all ranks, and forgotten with it.
ALONE: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()


@dataclass(frozen=True)
class Axis:
    """One rank's view of an axis: the process group along it, the rank's place there, and how many ranks there are."""

    group: dist.ProcessGroup
    rank: int
    size: int


def make_mesh(axes: dict[str, int], device_type: str = "cpu") -> DeviceMesh:
    """All ranks of the current process group in a grid, e.g. {"data": 2, "tensor": 2}; the last axis varies fastest.

    A size of -1 is the number of ranks that the others leave. Collective. Raises UserError where the sizes do not
    multiply to the number of ranks.
    """
    sizes = resolve(axes, dist.get_world_size())
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        same_timeout(group)
    return mesh


def axis(mesh: DeviceMesh, *names: str) -> Axis:
    """This rank's group along one axis, or over several at once. Collective at its first call for these names.

    An axis that the mesh does not have is a group of this rank alone: so code along an axis need not ask whether the
    axis is there, and never talks to the whole world instead.
    """
    there = tuple(name for name in mesh.mesh_dim_names or () if name in names)
    if not there:
        if world() not in ALONE:
            ALONE[world()] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return Axis(ALONE[world()], 0, 1)
    along = mesh[there[0]] if len(there) == 1 else mesh[there]._flatten()
    same_timeout(along.get_group())
    return Axis(along.get_group(), along.get_local_rank(), along.size())


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None, "this process is in no process group"
    return dist.group.WORLD


def same_timeout(group: dist.ProcessGroup) -> None:
    """Let the collectives of `group` wait as long as those of the world do: PyTorch gives a new group half an hour
    with gloo and ten minutes with NCCL, whatever init_process_group was given."""
    options = getattr(world()._get_backend(torch.device("cpu")), "options", None)
    if options is not None:  # a pretended group waits for nobody
        dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this process computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
