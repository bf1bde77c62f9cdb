"""An accelerator that is not there: run a strategy on one of many GPUs that this machine lacks, and watch it.

    with pretend({"tensor": 4}, rank=0, size=4) as (mesh, watch):
        phase = watch.begin("construction", {"parameters": 1_000_000})
        strategy = TensorParallelByHand(model, make_optimizer, Setup(mesh))
        for line in phase.refusals():
            print(line)

Tensors are fake (torch._subclasses.FakeTensorMode): they have a shape, a type and a device, and no numbers. Their
device is "gpu", which registers with PyTorch as custom hardware does, so that whatever asks whether a device is the
CPU gets the answer that it would get on a GPU; it is not "cuda", since autograd refuses a device that PyTorch was
built without. The process group is PyTorch's fake one: it has any number of ranks, this process is one of them, and
what is sent goes nowhere. What is watched:

* operations that mix tensors of the CPU with tensors of the device raise Refused where they stand;
* messages, with the kind of device that their tensors are on and the function that sends them;
* the bytes of all storages on a device that are alive at once, and what they were when there were too many of them;
* how often the host waits for the device: reading a number (`item`, `tolist`, `nonzero`, indexing by a mask),
  `synchronize`, and copies between host and device that are not `non_blocking`, in both directions
  (torch.cuda.set_sync_debug_mode names the same).

What is not as on a GPU:

* Every number that is read from the device is 0. So a router of experts drops all tokens, and a mask selects nothing.
* The memory that kernels and the allocator take for themselves is not counted, and threads work one after the other.
* autocast changes no types, so what fp16 and bf16 save is not seen; a GradScaler works.
* DistributedDataParallel does not compare the ranks' shapes, nor rebuild its buckets before the second step, for which
  it holds the old and the new ones at once; objects that ranks send each other are those of this rank; the CUDA parts
  of nn.DataParallel are written in Python (common/lab/fake_patches.py has all of that).

What is changed holds for the whole process, and some of it for ever: use it in a process of its own.
"""

import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from common import mesh as meshes
from common.lab.fake_patches import PATCHES, Pretence
from common.lab.fake_stand_ins import DEVICE, place, register

LARGE = 2**18  # bytes: of storages from this size on it is known where they were made


class Refused(AssertionError):
    """An operation that a real accelerator would refuse."""


@dataclass
class Phase:
    """A part of a run, such as a step, and what was seen in it.

    budget:   the bytes that may be alive on one device, by what they are for; None: any number
    peak:     the most bytes that were alive on one device
    crossed:  where there were first more than `budget`, and what they were
    waits:    (kind, place) -> how often the host waited for the device
    messages: (operation, kind of device, place) -> how many
    """

    name: str
    budget: dict[str, int] | None = None
    peak: int = 0
    crossed: str = ""
    waits: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)

    def refusals(self, waits: dict[str, int] | None = None, from_host=()) -> list[str]:
        """What was seen and is not allowed, a line for each.

        waits:     how often the host may wait, by kind; None: any number
        from_host: names of functions that may send tensors of the CPU, or objects
        """
        found = []
        if self.crossed:
            budget = self.budget or {}
            may = ", ".join(f"{size:,} {what}" for what, size in budget.items())
            found.append(f"{self.name}: more than {sum(budget.values()):,} bytes ({may}): {self.crossed}")
        if waits is not None:
            seen: Counter[str] = Counter()
            for (kind, _), number in self.waits.items():
                seen[kind] += number
            for kind in sorted({*seen, *waits}):
                if seen[kind] != waits.get(kind, 0):
                    places = ", ".join(sorted(f"{where} ({n})" for (k, where), n in self.waits.items() if k == kind))
                    found.append(
                        f"{self.name}: the host waits for the device {seen[kind]} times and not "
                        f"{waits.get(kind, 0)} times for '{kind}': {places or 'nowhere'}"
                    )
        for (operation, kind, where), number in self.messages.items():
            if kind != DEVICE and where.split()[-1] not in from_host:
                found.append(f"{self.name}: {operation} carries tensors of the {kind}, {number} times, at {where}")
        return found


class Watch(TorchDispatchMode):
    """Sees every operation; see the module's docstring. `begin` starts a phase."""

    def __init__(self):
        super().__init__()
        self.phase, self.looking = Phase("before the first phase"), True
        self.now: Counter = Counter()  # bytes alive on each device, by its number
        self.alive: dict[int, list] = {}  # storage -> [bytes, number of its device, where it was made]

    def begin(self, name: str, budget: dict[str, int] | None = None) -> Phase:
        self.phase = Phase(name, budget, max(self.now.values(), default=0))
        return self.phase

    def waited(self, kind: str) -> None:
        self.phase.waits[kind, place()] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that the long way would take a third of the time
        kwargs = kwargs or {}
        if any(not issubclass(kind, FakeTensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: what it does with its local tensors comes by here later
        if not self.looking:
            return func(*args, **kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        real = tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if real and kwargs.get("device", torch.device("cpu")).type == "cpu":
            with _disable_current_modes():  # numbers on the host, as those of a mesh, stay real
                return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name != "wait_tensor":
            result = self.message(func, name, tensors, args, kwargs)
        else:
            result = self.compute(func, name, tensors, args, kwargs)
        for tensor in tensors_in((result,)):
            if tensor.device.type == DEVICE:
                self.made(tensor.untyped_storage(), tensor.device.index, name)
        return result

    def message(self, func, name, tensors, args, kwargs):
        for kind in {tensor.device.type for tensor in tensors}:
            self.phase.messages[name, kind, place()] += 1
        if name == "allreduce_":  # DistributedDataParallel wants the tensors in the future of the work
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(list(args[0]))
            return args[0], torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]  # missing in torch's stub
        return func(*args, **kwargs)

    def compute(self, func, name, tensors, args, kwargs):
        on_device = any(tensor.device.type == DEVICE for tensor in tensors)
        if name in ("_to_copy", "copy_"):
            to = kwargs.get("device") or tensors[0].device if name == "_to_copy" else args[0].device
            come_from = tensors[0].device if name == "_to_copy" else args[1].device
            if to.type != come_from.type and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
                self.waited("copy to the host" if come_from.type == DEVICE else "copy to the device")
            return func(*args, **kwargs)
        if name in INDEXING and on_device:
            return self.index(func, name, args, kwargs)
        # A scalar of the CPU may go to the device with a kernel; foreach takes lists of such scalars.
        written = args[0] if name.endswith("_") else None
        on_host = any(tensor.device.type == "cpu" and (tensor.dim() > 0 or tensor is written) for tensor in tensors)
        if on_device and on_host and "foreach" not in name:
            raise Refused(f"aten.{name} mixes tensors of the cpu and of the {DEVICE} at {place()}")
        if name in READ:
            if on_device:
                self.waited(READ[name])
                return zeros_for(name, *args)
            return self.read_on_host(func, args, kwargs)
        return func(*args, **kwargs)

    def index(self, func, name, args, kwargs):
        """Indices of the CPU are copied to the device first, and a mask is looked at: how many does it select?"""
        tensor, indices, *values = args
        masks = [index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices]
        for index in indices:
            if index is not None and index.device != tensor.device:
                self.waited("copy to the device")
        if not any(masks):
            return func(*args, **kwargs)
        if values and values[0].numel() == 1 and not any(values[1:]):  # x[mask] = 0 does not look
            return tensor if name.endswith("_") else torch.empty_like(tensor)
        self.waited("indexing by a mask")
        nothing, few = torch.empty(0, dtype=torch.long, device=tensor.device), []
        for index, mask in zip(indices, masks, strict=True):
            few += [nothing] * index.dim() if mask else [index]
        return func(tensor, few, *values, **kwargs)

    def read_on_host(self, func, args, kwargs):
        """A fake number of the host, such as AdamW's count of steps. Nobody waits for it; it is 1."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return 1.0 if args[0].dtype.is_floating_point else 1

    def made(self, storage, device: int, name: str) -> None:
        if storage._cdata in self.alive:  # a view of it is no new memory
            return
        size = storage.nbytes()
        self.alive[storage._cdata] = [size, device, f"{name} at {place()}" if size >= LARGE else "small tensors"]
        self.grow(device, size)
        weakref.finalize(storage, self.freed, storage._cdata)

    def freed(self, key: int) -> None:
        size, device, _ = self.alive.pop(key)
        self.now[device] -= size

    def resized(self, storage) -> None:
        if entry := self.alive.get(storage._cdata):
            before, entry[0] = entry[0], storage.nbytes()
            self.grow(entry[1], entry[0] - before)

    def grow(self, device: int, size: int) -> None:
        self.now[device] += size
        phase, now = self.phase, self.now[device]
        phase.peak = max(phase.peak, now)
        if phase.budget is not None and now > sum(phase.budget.values()) and not phase.crossed:
            made: Counter[str] = Counter()
            for nbytes, there, where in self.alive.values():
                made[where] += nbytes if there == device else 0
            what = "; ".join(f"{nbytes:,} of {where}" for where, nbytes in made.most_common(6))
            phase.crossed = f"{now:,} on {DEVICE}:{device} at {place()}, which are {what}"


def tensors_in(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


INDEXING = ("index", "index_put", "index_put_")
READ = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "equal",
    "is_nonzero": "item",
}


def zeros_for(name, tensor, *_others):
    """What reading gives, where all numbers are 0."""
    if name == "nonzero":
        return tensor.new_empty((0, tensor.dim()), dtype=torch.long)
    if name == "masked_select":
        return tensor.new_empty(0)
    return True if name == "equal" else 0.0 if tensor.dtype.is_floating_point else 0


class NoDevice(FakeTensorMode):
    avoid_device_init = True  # else torch.tensor(1, device="gpu") wants to copy a real 1 there


@contextmanager
def pretend(axes: dict[str, int], rank: int = 0, size: int = 1, devices: int = 1, message: tuple[int, ...] = ()):
    """Be rank `rank` of `size`, each with an accelerator. Yields (mesh, watch).

    axes:    of the mesh, as for make_mesh
    devices: how many this process has, "gpu:0" being the current one
    message: the shape of what PyTorch's pipeline stages hand on, which a stage asks the one before it for
    """
    backend, watch = register(devices), Watch()
    dist.init_process_group(f"cpu:fake,{DEVICE}:fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        mesh = meshes.make_mesh(axes, DEVICE)
        for patch in PATCHES:
            stack.enter_context(patch.applied(Pretence(watch, message)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # modes hold for one thread
        stack.enter_context(NoDevice(allow_non_fake_inputs=True))
        stack.callback(setattr, backend, "watch", None)
        backend.watch = watch
        yield mesh, stack.enter_context(watch)
