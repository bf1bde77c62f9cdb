"""What common/lab/fake_accelerator.py puts in the place of things: a backend of PyTorch for devices that are not there,
and functions that work without them, without numbers and without other ranks."""

import linecache
import math
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  FakeTensorMode imports it, and it wants to see things in their own places
import torch.distributed as dist
import torch.distributed.pipelining.stage as pipelining
import torch.nn.parallel.distributed as ddp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import backend_registration
from torch.utils._python_dispatch import _disable_current_modes

from common import mesh as meshes

DEVICE = "gpu"
ROOT = str(Path(__file__).resolve().parents[2]) + os.sep


def place() -> str:
    """The innermost line of the course that is being executed: "by_hand.py:51 step"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith(ROOT) and f"{os.sep}.venv{os.sep}" not in file and f"{os.sep}fake_" not in file
        if ours or file == f"<{frame.f_globals.get('__name__')}>" and file in linecache.cache:  # common/lab/bugs.py
            return f"{os.path.basename(file)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "a place outside of the course"


class Idle:
    """A stream or an event: nothing is ever under way."""

    def __init__(self, *args, **kwargs):
        pass

    wait_stream = wait_event = record = wait = __exit__ = __init__

    def record_event(self, event=None):
        return event or Idle()

    def query(self):
        return True

    def synchronize(self):
        Backend.watch.waited("synchronize")

    def __enter__(self):
        return self


class Backend(backend_registration._DummyBackendModule):
    """torch.gpu: what PyTorch and its users ask of torch.cuda."""

    Stream = Event = current_stream = Idle
    count, watch = 1, None  # devices of this process; the Watch that is told of waits, resizes and objects sent
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")

    def device_count(self):
        return self.count

    def set_device(self, device):
        pass

    def stream(self, stream):
        return stream

    def synchronize(self, device=None):
        Backend.watch.waited("synchronize")

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16, torch.float32]

    def get_rng_state(self, device=None):
        return torch.empty(16, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        pass


def register(devices: int) -> None:
    """Let PyTorch believe in hardware named "gpu". It stays registered."""
    if not hasattr(torch, DEVICE):
        backend_registration._setup_privateuseone_for_python_backend(DEVICE, Backend())
        Backend.library.fallback(torch.library.fallthrough_kernel)
    Backend.count = devices


# --- stand-ins ----------------------------------------------------------------------------------------------------


def stand_ins(message):
    """(owner, name, what stands there meanwhile) for what does not work with fake tensors or a fake process group."""
    resize_storage, make_subclass = torch.UntypedStorage.resize_, torch.Tensor._make_subclass

    def resize_(storage, size):
        resize_storage(storage, size)
        Backend.watch.resized(storage)
        return storage

    def with_keys_of_the_device(*args, device_for_backend_keys=None, **kwargs):
        # Then `parameter.data =` takes a tensor from the CPU to the device, as it does for CUDA and not for others.
        keys = {} if device_for_backend_keys is None else {"device_for_backend_keys": torch.device(DEVICE, 0)}
        return make_subclass(*args, **keys, **kwargs)

    def received(stage, source):
        if source > stage.stage_index:
            return pipelining._StageBackwardMeta(pipelining._derive_grad_metas(stage._stage_meta.outputs))
        like = torch.empty(message, device=stage.device, requires_grad=True)
        return pipelining._StageForwardMeta((pipelining.extract_tensor_meta(like),))

    yield torch.UntypedStorage, "resize_", resize_
    yield torch.Tensor, "_make_subclass", staticmethod(with_keys_of_the_device)
    yield FakeTensor, "data", property(torch.Tensor.data.__get__, set_data)
    yield FakeTensor, "tolist", tolist
    yield nn.Module, "_apply", apply
    optimizers = sys.modules["torch.optim.optimizer"]  # all parameters at once, as is the default on a GPU
    yield optimizers, "_foreach_supported_types", [*optimizers._foreach_supported_types, FakeTensor]
    yield ThreadPoolExecutor, "submit", submit
    # The ranks of a mesh are numbers that are read.
    yield meshes, "init_device_mesh", without_modes(meshes.init_device_mesh)
    for name in ("__init__", "__getitem__", "_flatten"):
        yield DeviceMesh, name, without_modes(getattr(DeviceMesh, name))
    # DTensor asks for shapes by computing with fake tensors of the whole size.
    propagate = "_propagate_tensor_meta_non_cached"
    yield ShardingPropagator, propagate, not_looking(getattr(ShardingPropagator, propagate))
    yield dist, "all_gather_object", all_gather_object
    yield ddp, "_verify_param_shape_across_processes", lambda *args: None
    yield dist.Reducer, "_rebuild_buckets", lambda reducer: False
    yield pipelining.PipelineStage, "_recv_meta", received
    yield pipelining.PipelineStage, "_send_meta", lambda *args: None
    yield torch._C, "_broadcast_coalesced", broadcast_to_devices
    yield torch._C, "_scatter", scatter_to_devices
    yield torch._C, "_gather", lambda parts, dim, device: torch.cat([part.to(gpu(device)) for part in parts], dim)
    yield sys.modules["torch.nn.parallel.data_parallel"], "parallel_apply", call_replicas


def set_data(tensor, value):
    torch.Tensor.data.__set__(tensor, value)
    tensor.fake_device = value.fake_device


def tolist(tensor):
    if tensor.device.type == DEVICE:
        Backend.watch.waited("tolist")
    flat = [0.0 if tensor.dtype.is_floating_point else 0] * tensor.numel()
    for length in tensor.shape[:0:-1]:
        flat = [flat[begin : begin + length] for begin in range(0, len(flat), length or 1)]
    return flat if tensor.dim() else flat[0]


def apply(module, change, recurse=True):
    """nn.Module._apply as it is for tensors that are not fake: parameters stay the objects that they are."""
    for part in module.modules() if recurse else [module]:
        for parameter in filter(None.__ne__, part._parameters.values()):
            with torch.no_grad():
                parameter.data = change(parameter)
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else change(buffer)
    return module


def submit(pool, function, /, *args, **kwargs):
    future = Future()
    future.set_result(function(*args, **kwargs))
    return future


def without_modes(function):
    def called(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def not_looking(function):
    def called(*args, **kwargs):
        watch = Backend.watch
        before, watch.looking = watch.looking, False
        try:
            return function(*args, **kwargs)
        finally:
            watch.looking = before

    return called


def all_gather_object(object_list, obj, group=None):
    Backend.watch.phase.messages["all_gather_object", "cpu", place()] += 1
    object_list[:] = [obj] * len(object_list)


def gpu(number: int) -> torch.device:
    return torch.device(DEVICE, number)


def broadcast_to_devices(tensors, devices, _):
    return [[t if t.device.index == number else t.to(gpu(number)) for t in tensors] for number in devices]


def scatter_to_devices(tensor, devices, sizes, dim, _):
    parts = tensor.split(sizes, dim) if sizes else tensor.split(math.ceil(tensor.shape[dim] / len(devices)), dim)
    return [part.to(gpu(number)) for part, number in zip(parts, devices, strict=False)]


def call_replicas(modules, inputs, kwargs, devices):
    return [module(*args, **named) for module, args, named in zip(modules, inputs, kwargs, strict=True)]
