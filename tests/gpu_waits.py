"""Modes that note what the CPU would wait for, if the tensors were on a GPU."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


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
