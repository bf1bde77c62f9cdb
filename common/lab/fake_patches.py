"""What of PyTorch does not work with fake tensors or a fake process group, and what stands in its place meanwhile.

Each is a Patch, which says where and why. All of it is PyTorch's inside and may change with a release:
tests/common/test_inside_torch.py asks of each patch by itself whether what it replaces is still there.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._dynamo  # noqa: F401  FakeTensorMode imports it, and it wants to see things in their own places
import torch.distributed.pipelining.stage as pipelining
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from common.lab.fake_stand_ins import DEVICE, place

if TYPE_CHECKING:
    from common.lab.fake_accelerator import Watch


@dataclass(frozen=True)
class Pretence:
    """What stand-ins work with: `watch` notes what they see; a pipeline's stages hand on tensors of shape `message`."""

    watch: "Watch"
    message: tuple[int, ...]


@dataclass(frozen=True)
class Patch:
    """Something in whose place something else stands for a while.

    at:         where, as "module:name" or "module:class.name"
    why:        what does not work without
    make:       from a Pretence and what stands there, what shall stand there
    parameters: names of the parameters of what stands there; None where Python cannot tell them
    called_by:  the function that calls it, where it is missing in a build of PyTorch without CUDA
    """

    at: str
    why: str
    make: Callable[[Pretence, Any], Any]
    parameters: tuple[str, ...] | None = None
    called_by: str = ""

    @property
    def name(self) -> str:
        return self.at.rpartition(":")[2].rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """The module or class that has it."""
        module, _, path = self.at.partition(":")
        outer = path.rpartition(".")[0]
        return resolve_name(f"{module}:{outer}" if outer else module)

    def broken(self) -> str:
        """What has changed, so that the patch has to be looked at; "" while all is as it was."""
        try:
            there = getattr(self.owner, self.name)
        except (ImportError, AttributeError) as error:
            if not self.called_by:
                return f"it is gone: {error}"
            names = resolve_name(self.called_by).__code__.co_names
            return "" if self.name in names else f"{self.called_by} does not call it any more"
        if self.parameters is None:
            return ""
        now = tuple(inspect.signature(there).parameters)
        return "" if now == self.parameters else f"it takes {', '.join(now)}, and took {', '.join(self.parameters)}"

    @contextmanager
    def applied(self, pretence: Pretence) -> Iterator[None]:
        stand_in = self.make(pretence, getattr(self.owner, self.name, None))
        with mock.patch.object(self.owner, self.name, stand_in, create=True):
            yield


PATCHES: list[Patch] = []


def patch(at: str, why: str, parameters: str | None = None, called_by: str = ""):
    """Make a Patch of the function below: it gives the stand-in. `parameters` are names between blanks."""

    def keep(make):
        PATCHES.append(Patch(at, why, make, None if parameters is None else tuple(parameters.split()), called_by))
        return make

    return keep


# --- tensors ------------------------------------------------------------------------------------------------------


@patch("torch:UntypedStorage.resize_", "the bytes alive on a device change, which no operation tells")
def resized(pretence, resize_storage):
    def resize_(storage, size):
        resize_storage(storage, size)
        pretence.watch.resized(storage)
        return storage

    return resize_


@patch(
    "torch:Tensor._make_subclass", "`parameter.data =` takes a tensor from CPU to device for CUDA, and not for others"
)
def with_keys_of_the_device(_, make_subclass):
    def made(*args, device_for_backend_keys=None, **kwargs):
        if device_for_backend_keys is not None:
            kwargs["device_for_backend_keys"] = torch.device(DEVICE, 0)
        return make_subclass(*args, **kwargs)

    return staticmethod(made)


@patch("torch._subclasses.fake_tensor:FakeTensor.data", "a fake tensor keeps its device beside its data")
def data_with_its_device(_, data):
    def set_data(tensor, value):
        data.__set__(tensor, value)
        tensor.fake_device = value.fake_device

    return property(data.__get__, set_data)


@patch("torch._subclasses.fake_tensor:FakeTensor.tolist", "a fake tensor has no numbers: they are 0")
def zeros(pretence, _):
    def tolist(tensor):
        if tensor.device.type == DEVICE:
            pretence.watch.waited("tolist")
        flat: list = [0.0 if tensor.dtype.is_floating_point else 0] * tensor.numel()
        for length in tensor.shape[:0:-1]:
            flat = [flat[begin : begin + length] for begin in range(0, len(flat), length or 1)]
        return flat if tensor.dim() else flat[0]

    return tolist


@patch("torch.nn:Module._apply", "for fake tensors it makes new parameters, and no others do", "self fn recurse")
def parameters_stay(_, __):
    def apply(module, fn, recurse=True):
        for part in module.modules() if recurse else [module]:
            for parameter in filter(None.__ne__, part._parameters.values()):
                with torch.no_grad():
                    parameter.data = fn(parameter)
            for name, buffer in part._buffers.items():
                part._buffers[name] = buffer if buffer is None else fn(buffer)
        return module

    return apply


@patch("torch.optim.optimizer:_foreach_supported_types", "on a GPU the default is all parameters at once (foreach)")
def fake_ones_too(_, types):
    return [*types, FakeTensor]


@patch("concurrent.futures:ThreadPoolExecutor.submit", "modes hold for one thread", "self fn args kwargs")
def at_once(_, __):
    def submit(_pool, function, /, *args, **kwargs):
        future: Future = Future()
        future.set_result(function(*args, **kwargs))
        return future

    return submit


# --- meshes and DTensor -------------------------------------------------------------------------------------------


@patch("torch.distributed.device_mesh:DeviceMesh.__init__", "the ranks of a mesh are numbers that are read")
@patch("torch.distributed.device_mesh:DeviceMesh.__getitem__", "as above", "self mesh_dim_names")
@patch("torch.distributed.device_mesh:DeviceMesh._flatten", "as above", "self mesh_dim_name backend_override")
@patch("common.mesh:init_device_mesh", "as above")
def without_modes(_, function):
    def called(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


@patch(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
    "DTensor asks for shapes by computing with fake tensors of the whole size",
    "self op_schema",
)
def not_looking(pretence, propagate):
    def called(*args, **kwargs):
        watch = pretence.watch
        before, watch.looking = watch.looking, False
        try:
            return propagate(*args, **kwargs)
        finally:
            watch.looking = before

    return called


# --- what ranks tell each other -----------------------------------------------------------------------------------


@patch(
    "torch.distributed:all_gather_object", "nobody else is there: all have what this rank has", "object_list obj group"
)
def of_this_rank(pretence, _):
    def all_gather_object(object_list, obj, group=None):  # noqa: ARG001  it is called with these names
        pretence.watch.phase.messages["all_gather_object", "cpu", place()] += 1
        object_list[:] = [obj] * len(object_list)

    return all_gather_object


@patch(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "DistributedDataParallel compares shapes that the others do not send",
    "process_group tensors logger",
)
def nothing(_, __):
    return lambda *_args: None


@patch("torch.distributed:Reducer._rebuild_buckets", "the order of gradients is sent as numbers, which are 0 here")
def never(_, __):
    return lambda _reducer: False


@patch("torch.distributed.pipelining.stage:PipelineStage._recv_meta", "shapes come from other ranks", "self src_stage")
def received(pretence, _):
    def recv_meta(stage, src_stage):
        if src_stage > stage.stage_index:
            return pipelining._StageBackwardMeta(pipelining._derive_grad_metas(stage._stage_meta.outputs))
        like = torch.empty(pretence.message, device=stage.device, requires_grad=True)
        return pipelining._StageForwardMeta((pipelining.extract_tensor_meta(like),))

    return recv_meta


@patch("torch.distributed.pipelining.stage:PipelineStage._send_meta", "they go nowhere", "self meta dst_stage")
def not_sent(_, __):
    return lambda *_args: None


# --- nn.DataParallel, whose inside is written for CUDA ------------------------------------------------------------


def gpu(number: int) -> torch.device:
    return torch.device(DEVICE, number)


@patch("torch._C:_broadcast_coalesced", "it is for CUDA alone", called_by="torch.nn.parallel.comm:broadcast_coalesced")
def copied(_, __):
    return broadcast_to_devices


def broadcast_to_devices(tensors, devices, _):
    return [[t if t.device.index == number else t.to(gpu(number)) for t in tensors] for number in devices]


@patch("torch._C:_scatter", "it is for CUDA alone", called_by="torch.nn.parallel.comm:scatter")
def scattered(_, __):
    def scatter_to_devices(tensor, devices, sizes, dim, _):
        parts = tensor.split(sizes, dim) if sizes else tensor.split(math.ceil(tensor.shape[dim] / len(devices)), dim)
        return [part.to(gpu(number)) for part, number in zip(parts, devices, strict=False)]

    return scatter_to_devices


@patch("torch._C:_gather", "it is for CUDA alone", called_by="torch.nn.parallel.comm:gather")
def gathered(_, __):
    return lambda parts, dim, device: torch.cat([part.to(gpu(device)) for part in parts], dim)


@patch(
    "torch.nn.parallel.data_parallel:parallel_apply", "modes hold for one thread", "modules inputs kwargs_tup devices"
)
def one_after_the_other(_, __):
    def call_replicas(modules, inputs, kwargs_tup, _devices):
        return [module(*args, **named) for module, args, named in zip(modules, inputs, kwargs_tup, strict=True)]

    return call_replicas
