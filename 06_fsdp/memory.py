"""Where the bytes are: formulas of what each stage keeps, a count of live tensors, and a timeline over one step."""

import gc
import time
import weakref
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.fsdp.formulas import STATE_KINDS, formula  # noqa: F401 (read as memory.formula on the pages)


def storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's memory; of a DTensor, that of this rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def kinds(strategy) -> dict[int, str]:
    """The kind of each piece of memory that a strategy keeps between steps, by its address."""
    optimizer = getattr(strategy.optimizer, "optim", strategy.optimizer)  # what is in a ZeroRedundancyOptimizer
    optimized = [p for group in strategy.optimizer.param_groups for p in group["params"]]
    trained = [*strategy.model.parameters(), *optimized]
    flats = getattr(strategy, "flats", [])
    found = {
        "optimizer": [*optimized, *(value for state in optimizer.state.values() for value in state.values())],
        "gradients": [*(p.grad for p in trained), *(flat.gradient for flat in flats)],
        "parameters": [
            *strategy.model.parameters(),
            *(getattr(flat, "part", flat.shard) for flat in flats),
            *strategy.model.buffers(),
        ],
    }  # where one memory is of two kinds, the later counts: in float32 what is optimized is the parameter
    memory = [(kind, storage(t)) for kind, tensors in found.items() for t in tensors if isinstance(t, torch.Tensor)]
    return {place.data_ptr(): kind for kind, place in memory if place.nbytes()}


def tensors_alive() -> list[torch.Tensor]:
    # by its type: isinstance asks an object for its __class__, and some lazy ones of PyTorch warn when asked
    return [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]


def live() -> dict[int, int]:
    """Bytes of every live tensor's memory, by its address: whatever Python can still reach, or C++ for it."""
    gc.collect()
    tensors = tensors_alive()
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    memory = [storage(tensor) for tensor in tensors]
    return {place.data_ptr(): place.nbytes() for place in memory if place.nbytes()}


def held(strategy, known: dict[int, int]) -> dict[str, int]:
    """Bytes of live tensors by kind, with "other" for what is none of a strategy's three; without those `known`,
    which `live` gave before the strategy and its model were made."""
    of_kind = kinds(strategy)
    for _ in range(50):  # a thread of gloo may hold the last message a moment longer, on busy cores a long one
        found = dict.fromkeys((*STATE_KINDS, "other"), 0)
        for place, size in live().items():
            if place in of_kind or place not in known:
                found[of_kind.get(place, "other")] += size
        if not found["other"]:
            break
        time.sleep(0.02)
    return found


class MemoryTimeline(TorchDispatchMode):
    """Memory over a step: `with MemoryTimeline(strategy) as timeline: strategy.step(micro_batches)`.

    After each operator `bytes` gets a line: what is alive by kind, in bytes. Kinds are those that the strategy keeps;
    "buffers", which messages are sent from and received into, such as gathered parameters; and "activations" for the
    rest, autograd's temporary tensors included.
    """

    KINDS = (*STATE_KINDS, "buffers", "activations")

    def __init__(self, strategy):
        super().__init__()
        self.strategy, self.alive, self.kind, self.sizes = strategy, {}, {}, []

    def __enter__(self):
        gc.collect()
        model, optimizer = self.strategy.model, self.strategy.optimizer
        of_kind = kinds(self.strategy)
        for tensor in tensors_alive():
            for place in (storage(t) for t in (tensor, tensor.grad if tensor.is_leaf else None) if t is not None):
                if place.data_ptr() in of_kind:
                    self.follow(place)
        self.name_kept()
        plain = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self.hooks = [p.register_hook(lambda gradient: self.name(gradient, "gradients")) for p in plain]
        self.hooks.append(optimizer.register_step_pre_hook(lambda *_: self.name_kept()))
        self.hooks.append(optimizer.register_step_post_hook(lambda *_: self.name_kept()))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.name_kept()
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls operators inside, which come by one at a time
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            self.follow(storage(tensor))
            if func.namespace in ("c10d", "fsdp"):
                self.name(tensor, "buffers")
        self.sizes.append({number: place.nbytes() for place, number in self.followed()})
        return result

    def follow(self, place):
        """A piece of memory gets a number at first sight: its address may be another's later."""
        if place._cdata not in self.alive:
            number = len(self.kind)
            self.kind[number] = None
            self.alive[place._cdata] = weakref.ref(place, lambda _, key=place._cdata: self.alive.pop(key, None)), number

    def followed(self):
        return [(place, number) for reference, number in list(self.alive.values()) if (place := reference())]

    def name(self, tensor, kind):
        self.follow(storage(tensor))
        number = self.alive[storage(tensor)._cdata][1]
        self.kind[number] = self.kind[number] or kind

    def name_kept(self):
        """What the strategy keeps, a buffer too that a message has left it in."""
        of_kind = kinds(self.strategy)
        for place, number in self.followed():
            if place.nbytes() and place.data_ptr() in of_kind and self.kind[number] in (None, "buffers"):
                self.kind[number] = of_kind[place.data_ptr()]

    @property
    def bytes(self) -> list[dict[str, int]]:
        lines = [dict.fromkeys(self.KINDS, 0) for _ in self.sizes]
        for line, sizes in zip(lines, self.sizes, strict=True):
            for number, size in sizes.items():
                line[self.kind[number] or "activations"] += size
        return lines

    @property
    def peak(self) -> int:
        """The largest sum of all kinds, in bytes."""
        return max(sum(line.values()) for line in self.bytes)


def over_a_step(strategy, step: Callable[[], object]) -> tuple[list[dict[str, int]], int, int]:
    """What `MemoryTimeline.bytes` gives while `step` runs, one step of the strategy, and the numbers of the operators
    at which its first backward pass and its optimizer's step begin."""
    begins: dict[str, int] = {}
    with MemoryTimeline(strategy) as timeline:

        def note(what):
            begins.setdefault(what, len(timeline.sizes))

        hooks = [
            strategy.model.register_forward_hook(lambda *_: note("backward")),
            strategy.optimizer.register_step_pre_hook(lambda *_: note("step")),
        ]
        step()
    for hook in hooks:
        hook.remove()
    return timeline.bytes, begins["backward"], begins["step"]


class Peak(TorchDispatchMode):
    """`with Peak() as peak: ...`: `peak.bytes` is the most that tensors made in the block took at any moment."""

    def __init__(self):
        super().__init__()
        self.alive, self.bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            place = storage(leaf) if isinstance(leaf, torch.Tensor) else None
            if place is not None and place._cdata not in given and place._cdata not in self.alive:
                self.alive[place._cdata] = place.nbytes()
                weakref.finalize(place, self.alive.pop, place._cdata, None)
        self.bytes = max(self.bytes, sum(self.alive.values()))
        return result
