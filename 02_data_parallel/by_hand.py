"""Data parallelism with threads: one process drives several devices, and the first device keeps the only real model.

Five moves in every step: scatter the inputs, replicate the model, apply the replicas in threads, gather the outputs
and, in the backward pass, add up the gradients of all copies for the real parameters. Devices may repeat: on a machine
without GPUs, [cpu, cpu] runs all five. The same interface as distributed_training.py; start it with --by-hand.
"""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from common.mesh import device_of
from common.model import cross_entropy
from common.strategy import DTYPES, Strategy


def devices_of(mesh) -> list[torch.device]:
    """The GPUs of this machine, if it has several and this process is alone; else its one device, twice, and a note.

    The first is always that of this process, where the real model is.
    """
    device = device_of(mesh)
    if device.type == "cuda" and mesh.size() == 1 and torch.cuda.device_count() > 1:
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if mesh.get_rank() == 0:
        print(f"note: no two GPUs for nn.DataParallel; dp by hand uses '{device}' twice", file=sys.stderr)
    return [device] * 2


def scatter(inputs: torch.Tensor, devices: list[torch.device]) -> list[torch.Tensor]:
    """Cut [batch, ...] into consecutive slices, one for each device, and send them there.

    The last slice may be shorter; where examples are few there are fewer slices than devices.
    """
    return [part.to(device) for part, device in zip(inputs.chunk(len(devices)), devices, strict=False)]


def replicate(model: nn.Module, devices: list[torch.device]) -> list[nn.Module]:
    """A replica for each device, made of copies that autograd remembers: it leads back to the model's parameters, and
    adds up there what comes from all replicas.

    The first replica holds the model's own parameters and buffers; what a forward pass changes in
    the others is gone with them. Two names of one tensor stay two names of one copy: tied
    weights stay tied.
    """
    replicas = []
    for number, device in enumerate(devices):
        tensors = [*model.parameters(), *model.buffers()]
        memo = {id(tensor): tensor.to(device, copy=True) if number else tensor for tensor in tensors}
        replicas.append(copy.deepcopy(model, memo))  # copies all but what is in the memo
    return replicas


def parallel_apply(replicas: list[nn.Module], slices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Call each replica on its slice, in a thread of its own.

    An exception in a thread comes out of here, with its traceback.
    """
    # A new thread has the default settings. On another stream than the one that copies slices and replicas, its kernels
    # might begin before their inputs are there.
    kind, grad = slices[0].device.type, torch.is_grad_enabled()
    mixed, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    streams = [torch.cuda.current_stream(part.device) if kind == "cuda" else None for part in slices]

    def apply(replica, inputs, stream):
        on_stream = torch.cuda.stream(stream) if stream else nullcontext()  # and on its device
        with torch.set_grad_enabled(grad), torch.autocast(kind, dtype, enabled=mixed), on_stream:
            return replica(inputs)

    # A pool for each, so that no thread takes a second replica: autograd numbers operations thread by thread, and adds
    # up, and rounds, gradients in that order.
    with ExitStack() as until_all_end:
        pools = [until_all_end.enter_context(ThreadPoolExecutor(1)) for _ in replicas]
        calls = [pool.submit(apply, *three) for pool, *three in zip(pools, replicas, slices, streams, strict=False)]
        return [call.result() for call in calls]


def gather(outputs: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Bring the outputs of all slices to one device and join them in order: [batch, ...]."""
    return torch.cat([output.to(device) for output in outputs])


def data_parallel(model: nn.Module, inputs: torch.Tensor, devices: list[torch.device]):
    """model(inputs), computed on all devices. The model is on the first, and so is the result."""
    slices = scatter(inputs, devices)
    replicas = replicate(model, devices[: len(slices)])
    outputs = parallel_apply(replicas, slices)
    return gather(outputs, devices[0])


def set_autocast_in_threads(model: nn.Module, precision: str) -> None:
    """Have each call of the model set autocast's type for GPUs: nn.DataParallel tells its threads whether to use
    autocast, but not which type, and they would take float16."""
    model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", DTYPES[precision]))


class ThreadedReplicas(nn.Module):
    """nn.DataParallel by hand, which may use one device several times."""

    def __init__(self, module: nn.Module, device_ids: list[torch.device]):
        super().__init__()
        self.module, self.device_ids = module, device_ids

    def forward(self, inputs):
        return data_parallel(self.module, inputs, self.device_ids)


class ThreadedDataParallelByHand(Strategy):
    """One process reads the whole global batch and divides it among its devices."""

    data_axes = ()  # all ranks read and do the same

    def __init__(self, model, make_optimizer, setup, devices=None):
        super().__init__(setup)
        self.devices = devices or devices_of(self.mesh)
        self.model = model.to(self.devices[0])
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = 0.0
        for inputs, targets in micro_batches:
            with self.autocast():
                # one loss over all outputs: a mean of the devices' means would be wrong where slices are uneven
                part = cross_entropy(data_parallel(self.model, inputs, self.devices), targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm
