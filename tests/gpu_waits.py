"""Modes that note what the CPU would wait for, if the tensors were on a GPU; and how many bytes are alive at once."""

import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.state import is_dtensor


class Copies(TorchFunctionMode):
    """Notes copies of numbers to Python: on a GPU, the CPU waits for each."""

    NAMES = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.NAMES:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Shapes(TorchDispatchMode):
    """Notes operations whose results have shapes that depend on numbers: on a GPU, the CPU waits for these numbers."""

    NAMES = ("nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "_local_scalar_dense", "is_nonzero")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        masks = any(tensor is not None and tensor.dtype in (torch.bool, torch.uint8) for tensor in indices)
        unknown = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in self.NAMES or masks or unknown:
            self.found.append(name)
        return func(*args, **kwargs)


class Alive(TorchDispatchMode):
    """The most bytes of tensors that operators in the block made and that were alive at once."""

    def __init__(self):
        super().__init__()
        self.peak, self.followed = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls operators inside, which come by one at a time
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and not is_dtensor(tensor):
                place = tensor.untyped_storage()
                key = place._cdata
                self.followed.setdefault(key, weakref.ref(place, lambda _, key=key: self.followed.pop(key)))
        now = sum(place.nbytes() for ref in list(self.followed.values()) if (place := ref()) is not None)
        self.peak = max(self.peak, now)
        return result
