"""GPUs that are not there: run by_hand.py on four of them, and count the bytes that each would hold.

A fake tensor of PyTorch has a shape, a type and a device, and no numbers (torch._subclasses.FakeTensorMode). Its
device may be one that this machine lacks, if PyTorch believes that there is a backend for it: here "gpu", which
registers as custom hardware does. Both are private to PyTorch, and what they change holds for the whole process:
use them inside `launch(..., nproc=1)`, as `step_of` does.
"""

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration as backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.lab.launch import launch
from common.model import cross_entropy
from course.data_parallel import by_hand


class Meter(TorchDispatchMode):
    """Counts, while it is active, the bytes of all living storages and of all copies between devices.

    now, peak: bytes by the device's number; `peak` since the last `peak.clear()`
    moved:     bytes by (from, to), the numbers of two devices
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.moved, self.alive = Counter(), Counter(), Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and args[0].device != result.device:
            self.moved[args[0].device.index, result.device.index] += result.nbytes
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "gpu":
                self.enter(tensor.untyped_storage(), tensor.device.index)
        return result

    def enter(self, storage, device: int):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive:  # a view of it is no new memory
            return
        self.alive.add(key)
        self.now[device] += nbytes
        self.peak[device] = max(self.peak[device], self.now[device])
        weakref.finalize(storage, self.leave, key, device, nbytes)

    def leave(self, key: int, device: int, nbytes: int):
        self.alive.discard(key)
        self.now[device] -= nbytes


class Module(backend._DummyBackendModule):
    """What PyTorch asks of torch.gpu."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Modes:
    """Modes of PyTorch, which are set for each thread: any thread may enter these, one at a time, since a fake mode
    serves one thread at a time. A copy of it, as a replica's, is the same object."""

    def __init__(self, *modes):
        self.modes, self.lock = modes, threading.Lock()

    def __deepcopy__(self, memo):
        return self

    @contextmanager
    def entered(self):
        with self.lock, ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            yield


class Inside(nn.Module):
    """The model, to be called from any thread."""

    def __init__(self, model, modes: Modes):
        super().__init__()
        self.model, self.modes = model, modes

    def forward(self, inputs):
        with self.modes.entered():
            return self.model(inputs)


@contextmanager
def pretend_gpus(count: int, make_model):
    """Yields (devices, model, meter): `count` devices, make_model() on the first of them, and the count of bytes."""
    if not hasattr(torch, "gpu"):
        backend._setup_privateuseone_for_python_backend("gpu", Module())
    with torch.device("meta"):  # no random numbers are drawn
        model = make_model()
    fake, meter = FakeTensorMode(), Meter()
    # One thread for the backward pass, since PyTorch knows of one "gpu" only.
    with fake, meter, torch.autograd.set_multithreading_enabled(False):
        memo = {id(p): nn.Parameter(torch.empty(p.shape, device="gpu:0")) for p in model.parameters()}
        devices = [torch.device("gpu", place) for place in range(count)]
        yield devices, Inside(copy.deepcopy(model, memo), Modes(fake, meter)), meter


class Bytes(NamedTuple):
    """What one training step of DataParallel needs: the most that each device held, and what went from which device to
    which. `parameters` is what the model has, and `activations` what a replica keeps, its outputs included."""

    peak: dict[int, int]
    moved: dict[tuple[int, int], int]
    parameters: int
    activations: int


def step_of(
    make_model: Callable[[], nn.Module], count: int, batch: int, context: int, keep_outputs: bool = True
) -> Bytes:
    """The bytes of one step of by_hand.py on `count` pretended GPUs, with AdamW, counted tensor by tensor.

    make_model:   its outputs for tokens [batch, context] are logits, or the losses of the examples
    keep_outputs: whether a name of the training loop still refers to the outputs in the backward pass
    """
    # One process sends nothing, so the timeout is a safety net: a busy machine may need minutes.
    return launch(_step, 1, (make_model, count, batch, context, keep_outputs), timeout=600)[0]


def _step(make_model, count, batch, context, keep_outputs) -> Bytes:
    with pretend_gpus(count, make_model) as (devices, model, meter):
        parameters = meter.now[0]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()  # from its first step on, the optimizer has a state
        optimizer.zero_grad()
        inputs, targets = torch.zeros(2, batch, context, dtype=torch.int64, device=devices[0])
        slices = by_hand.scatter(inputs, devices)
        replicas, before = by_hand.replicate(model, devices), meter.now[count - 1]
        outputs = by_hand.parallel_apply(replicas, slices)
        activations = meter.now[count - 1] - before
        output = by_hand.gather(outputs, devices[0])
        del outputs  # as where no name of data_parallel refers to them any more
        loss = cross_entropy(output, targets) if output.dim() > 1 else output.mean()
        if not keep_outputs:
            del output
        loss.backward()
        return Bytes(dict(meter.peak), dict(meter.moved), parameters, activations)
