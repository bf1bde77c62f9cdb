"""Named axes of ranks: which ranks form a group along which axis, over PyTorch's DeviceMesh.

The ranks of a run are numbered from 0. Put them into a grid with one dimension for each axis, and the ranks that
differ in one coordinate only are a group along that axis: `--mesh pipeline=2,data=2,tensor=2` makes eight ranks
two pipeline stages of two replicas of two parts of every weight. The last axis varies fastest, so its groups are
neighbours: on a cluster, GPUs of one node. That is why tensor parallelism, which talks most, is innermost by default,
and the pipeline, which talks least, outermost (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters", SC 2021, section 3).
"""

import difflib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.errors import UserError

AXES = ("pipeline", "data", "shard", "context", "expert", "tensor")  # outermost first: the default order


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
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def axis(mesh: DeviceMesh, *names: str) -> Axis:
    """This rank's group along one axis, or over several at once. Collective at its first call for these names.

    An axis that the mesh does not have is a group of this rank alone: so code along an axis need not ask whether the
    axis is there, and never talks to the whole world instead.
    """
    there = tuple(name for name in mesh.mesh_dim_names if name in names)
    if not there:
        if not hasattr(mesh, "_this_rank_alone"):
            mesh._this_rank_alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return Axis(mesh._this_rank_alone, 0, 1)
    along = mesh[there[0]] if len(there) == 1 else mesh[there]._flatten()
    return Axis(along.get_group(), along.get_local_rank(), along.size())


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this process computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def resolve(axes: dict[str, int], size: int) -> dict[str, int]:
    """Sizes of the axes for `size` ranks, with the one that is -1 filled in. Raises UserError where they do not fit."""
    known = math.prod(number for number in axes.values() if number != -1)
    text = ",".join(f"{name}={number}" for name, number in axes.items() if number != -1)
    if -1 in axes.values():
        rest = next(name for name, number in axes.items() if number == -1)
        if size % known:
            raise UserError(
                f"--mesh {text} leaves no whole number of ranks for axis '{rest}': {size} rank(s) do not divide by "
                f"{known}; start a multiple of {known}, or set --mesh"
            )
        return {name: size // known if number == -1 else number for name, number in axes.items()}
    if known != size:
        raise UserError(
            f"--mesh {text} is {known} rank(s), and {size} are started; start {known}, or make the product {size}"
        )
    return dict(axes)


def parse_axes(text: str) -> dict[str, int]:
    """Read "data=2,tensor=2". Raises UserError for what is no such list, names no axis, or names one twice."""
    axes = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES:
            nearest = difflib.get_close_matches(name, AXES, n=1)
            hint = f"; did you mean '{nearest[0]}'?" if nearest else f"; there are {', '.join(AXES)}"
            raise UserError(f"--mesh {text}: no axis '{name}'{hint}")
        if name in axes:
            raise UserError(f"--mesh {text}: axis '{name}' is given twice")
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"--mesh {text}: expected a number of ranks as in '{name}=2', got '{part.strip()}'")
        axes[name] = int(number)
    return axes


def parse_order(text: str) -> tuple[str, ...]:
    """Read "data,pipeline,tensor", outermost first; axes that are not named keep their default order after these.
    Raises UserError."""
    named = tuple(word.strip() for word in text.split(",")) if text else ()
    wrong = next((name for name in named if name not in AXES), None)
    if wrong is not None:
        raise UserError(f"--mesh-order {text}: no axis '{wrong}'; there are {', '.join(AXES)}")
    if len(set(named)) < len(named):
        raise UserError(f"--mesh-order {text}: an axis is given twice")
    return (*named, *(name for name in AXES if name not in named))


def in_order(axes: dict[str, int], order: tuple[str, ...] = AXES) -> dict[str, int]:
    """The same axes, outermost first."""
    return {name: axes[name] for name in order if name in axes}
