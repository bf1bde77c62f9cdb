"""Any torch.nn.Module: its parameters, what autograd keeps of a micro-batch and its operations, counted on tensors
without memory (FakeTensorMode), and what a GPU needs with it under each stage of ZeRO.

    python -m planner measure FILE.py:FUNCTION --gpu h100-80gb --gpus 8

FUNCTION takes nothing and returns (module, inputs): inputs is what the module is called with, one micro-batch of one
GPU, a tensor, a tuple of them or a dictionary by name. Nothing is allocated, so the module may be as large as it likes.
"""

import logging
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from common.collectives import change_tensors
from common.constants import GIB
from common.errors import UserError
from course.fsdp.formulas import formula
from planner import memory
from planner.constants import Constants
from planner.hardware import GPU
from planner.layer_time import rate
from planner.layout import PRECISIONS, STAGES, recipe_of

# PyTorch counts the operations of attention on GPUs only.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_args, **_more: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_args, **_more: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@dataclass(frozen=True)
class Measured:
    """parameters: all of them; largest: of the largest unit, which is a layer of a row, or what lies beside rows;
    kept: bytes that autograd keeps of one micro-batch, parameters and buffers not among them; flops: of the products
    and of attention, forward and backward; frozen: the parameters that are not trained; largest_trained: the
    others of the unit that has most of them."""

    parameters: int
    largest: int
    kept: int
    flops: int
    frozen: int = 0
    largest_trained: int = 0


class Fake(FakeTensorMode):
    """Tensors without memory, which modules may copy: a copied tensor belongs to the mode that it was made in."""

    def __deepcopy__(self, memo):
        return self


def measure(make: Callable, half: bool = False) -> Measured:
    """`make()` returns (module, inputs). half: what it makes of floating-point numbers is bfloat16.

    Raises UserError for what is no such pair, and where the module cannot be run on tensors without values."""
    before = torch.get_default_dtype()
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it says what we say in our line
    # It asks whether values are out of bounds, and there are none.
    draws = patch.object(torch.nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor)
    with Fake() as mode, warnings.catch_warnings(), draws:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as torch's own deepcopy does
        torch.set_default_dtype(torch.bfloat16 if half else before)
        try:
            made = made_by(make, mode)
        except Exception as error:  # it is the user's
            if "Uninitialized" in str(error):
                raise UserError("a lazy module has no sizes before its first input: give them, as in Linear") from error
            raise UserError(f"the function failed: {in_one_line(error, make)}") from error
        finally:
            torch.set_default_dtype(before)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
            raise UserError("the function should return (module, inputs), with inputs as a tuple of tensors")
        module, inputs = made
        named = inputs if isinstance(inputs, dict) else {}
        given = (inputs,) if torch.is_tensor(inputs) else () if named else inputs
        if not isinstance(given, (tuple, list)):
            raise UserError(f"the function returned inputs of type {type(inputs).__name__}; give a tensor or several")
        try:
            kept, flops = _run(module, given, named)
        except UserError:
            raise
        except Exception as error:
            what = f"the module cannot be run on tensors without values: {in_one_line(error, make)}"
            raise UserError(what) from error
    units = (*units_of(module), module)
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    trained = [sum(p.numel() for p in unit.parameters() if p.requires_grad) for unit in units]
    largest, largest_trained = (max(found[:-1] or found) for found in (sizes, trained))
    return Measured(sizes[-1], largest, kept, flops, sizes[-1] - trained[-1], largest_trained)


def in_one_line(error: Exception, make: Callable) -> str:
    """An error and, where it comes from the file of the user's function, the line there."""
    file = getattr(getattr(make, "__code__", None), "co_filename", None)
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
    where = f", line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def made_by(make: Callable, mode: FakeTensorMode):
    """What the function makes, on tensors without memory; where these cannot be what it does to them (peft casts its
    adapters), it is made in memory first."""
    try:
        return make()
    except (RuntimeError, DataDependentOutputException) as error:
        if "Couldn't swap" not in str(error) and not isinstance(error, DataDependentOutputException):
            raise
    with unset_fake_temporarily():
        made = make()
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
            change_tensors(made[0], mode.from_tensor)
            made = made[0], tree_map_only(torch.Tensor, mode.from_tensor, made[1])
    return made


ROWS = (torch.nn.ModuleList, torch.nn.Sequential)


def units_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers of a row, wherever it is, and what lies beside rows."""
    found = []
    for child in module.children():
        within = isinstance(child, ROWS) or not isinstance(module, ROWS)
        has_row = any(isinstance(each, ROWS) for each in child.modules())
        found += units_of(child) if within and has_row else [child]
    return found


def _run(module, inputs, named) -> tuple[int, int]:
    own = {key(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    kept = {}

    def note(tensor):
        if key(tensor) not in own:
            kept[key(tensor)] = tensor  # as a whole storage, once, however many views of it are kept
        return tensor

    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = module(*inputs, **named)
        trained = [x.sum() for x in results_of(output) if x.requires_grad]
        if not trained:
            raise UserError("nothing in the module is trained: no output depends on a parameter that wants a gradient")
        torch.autograd.backward(trained)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), counter.get_total_flops()


def results_of(output) -> list[torch.Tensor]:
    """The tensors of what a module gives. Of a mapping with a loss, as models of Transformers give where they get
    labels, it is the loss."""
    if isinstance(output, Mapping) and torch.is_tensor(output.get("loss")):
        return [output["loss"]]
    return [x for x in tree_leaves(dict(output) if isinstance(output, Mapping) else output) if torch.is_tensor(x)]


def key(tensor: torch.Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def needed(found: Measured, gpus: int, precision: str) -> dict[str, dict[str, float]]:
    """Stage -> bytes on a GPU by part, before what the allocator adds. What is frozen has neither gradients nor
    optimizer state nor a copy in float32: it is there in the precision of the computation, and stage 3 shards it."""
    itemsize, message = PRECISIONS[precision]
    units = (found.largest, found.largest_trained if found.frozen else None)
    return {
        name: formula(name, found.parameters - found.frozen, gpus, recipe_of(precision, stage))
        | ({"frozen parameters": itemsize * found.frozen / (gpus if name == "fsdp" else 1)} if found.frozen else {})
        | {"activations": found.kept}
        | (memory.around_units(stage, itemsize, message, *units) if gpus > 1 else {})
        for stage, name in enumerate(STAGES)
    }


def report(make: Callable, gpu: GPU, gpus: int, precision: str, constants: Constants) -> dict:
    """What the command prints, with bytes."""
    found = measure(make, half=PRECISIONS[precision][0] == 2)
    stages = {}
    for name, parts in needed(found, gpus, precision).items():
        low, high = (sum(parts.values()) * factor for factor in (constants.allocator_low, constants.allocator_high))
        fits = "yes" if high <= gpu.memory else "tight" if low <= gpu.memory else "no"
        stages[name] = {"fits": fits, "bytes": sum(parts.values()) * constants.allocator, "parts": parts}
    seconds = found.flops / rate(gpu, precision, constants)
    return asdict(found) | {"gpu": gpu.name, "gpus": gpus, "precision": precision, "stages": stages,
                            "seconds_of_products": seconds}  # fmt: skip


def table(report: dict) -> str:
    frozen = f", {report['frozen']:,} of them frozen" if report["frozen"] else ""
    unit, size = ("GiB", GIB) if max(found["bytes"] for found in report["stages"].values()) >= GIB else ("MiB", 2**20)
    lines = [
        f"{report['parameters']:,} parameters{frozen}; a micro-batch keeps {report['kept'] / size:,.3f} {unit} for its "
        f"backward pass",
        f"and takes {report['flops'] / 1e12:,.3f} TFLOP, at least {report['seconds_of_products'] * 1000:,.2f} ms",
        f"{'':6} {unit:>9}  fits   of which",
    ]
    for name, found in report["stages"].items():
        parts = ", ".join(f"{part} {bytes / size:,.2f}" for part, bytes in found["parts"].items() if bytes)
        lines.append(f"{name:6} {found['bytes'] / size:9,.2f}  {found['fits']:5}  {parts}")
    return "\n".join(lines)
