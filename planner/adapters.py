"""LoRA and QLoRA: which parameters are trained, what the frozen ones occupy, and what adapters compute.

An adapter of a linear layer is two matrices, [inputs, rank] and [rank, outputs] (Hu et al. 2021, section 4.1). Which of
a block's linear layers have one is a choice (ON). Embedding, norms and head are frozen in 16 bits.
"""

from functools import lru_cache

from common.errors import UserError
from planner.models import Model
from planner.names import lookup

# All of them: Dettmers et al. 2023, section 4. Queries and values: peft's default for Llama. The three of the input of
# attention: NVIDIA's recipes (Megatron-Bridge, perf_recipes/llama, target_modules).
ON = {
    "all": ("query", "key", "value", "output", "up", "down"), "attention": ("query", "key", "value", "output"),
    "qkv": ("query", "key", "value"), "qv": ("query", "value"),
}  # fmt: skip
# Bytes of a frozen weight in 4 bits, and of its share of the scales: 8 bits for each block of 64, and 32 bits for each
# 256 of those (Dettmers et al. 2023, section 3: double quantization). bitsandbytes keeps scales beside the parameters,
# so fully_shard does not cut them.
PACKED, SCALES = 0.5, 1 / 64 + 4 / (64 * 256)
# Kernels that an adapter adds (dropout, two products, scaling, sum), and that a block starts for each of its linear
# layers without them, all others counted in: about 36 for 7 in Transformers' Llama.
KERNELS, KERNELS_WITHOUT = 5, 36 / 7


def require(model: Model, lora: int = 0, lora_on: str = "all", nf4: bool = False) -> None:
    """Raise UserError for adapters that cannot be, and for blocks whose linear layers the planner does not know one by
    one. The arguments are fields of Layout."""
    lookup(lora_on, ON, "choice of linear layers")
    if lora < 0 or (nf4 and not lora):
        raise UserError(f"--lora must be at least {int(nf4)}{' with --nf4' if nf4 else ''}, not {lora}")
    if lora and (model.experts or model.attention is not None):
        what = "a mixture of experts" if model.experts else "attention of its own kind"
        raise UserError(f"--lora: {model.name} has {what}, for which adapters are not modelled")


def linears(model: Model, tensor: int = 1, on: str = "all") -> list[tuple[float, float]]:
    """(inputs, outputs) of the linear layers of a block that have an adapter, on a tensor rank: columns of the first
    ones are cut, and rows of what gives the stream again (Megatron-LM's way, chapter 04)."""
    h, cut = model.width, tensor
    found = [
        ("query", h, model.query / cut), ("key", h, model.key / cut), ("value", h, model.key / cut),
        ("output", model.query / cut, h), *[("up", h, model.hidden / cut)] * (model.matrices - 1),
        ("down", model.hidden / cut, h),
    ]  # fmt: skip
    return [(k, n) for name, k, n in found if name in ON[on]]


@lru_cache
def parameters(model: Model, rank: int, on: str, tensor: int = 1) -> float:
    """Parameters of a block's adapters on a tensor rank."""
    return sum(rank * (k + n) for k, n in linears(model, tensor, on))


@lru_cache
def weights(model: Model) -> float:
    """Parameters of a block's linear layers, which QLoRA keeps in 4 bits; biases not among them."""
    return sum(k * n for k, n in linears(model))


def frozen(model: Model, parameters: float, layers: int, nf4: bool, itemsize: int) -> tuple[float, float]:
    """(bytes that ZeRO-3 divides, bytes of scales, which it doesn't) of `parameters` that have so many blocks."""
    if not nf4:
        return itemsize * parameters, 0.0
    small = layers * weights(model)
    return itemsize * (parameters - small) + PACKED * small, SCALES * small


def spared(model: Model, on: str, tensor: int, rest: int) -> float:
    """Numbers per token that a block need not keep, because they are inputs of frozen weights that no adapter reads:
    without adapters in the MLP the second norm's output, and what its last product takes."""
    return 0.0 if on == "all" else model.width / rest + model.hidden / tensor


def host(model: Model, on: str, nf4: bool) -> float:
    """How many times as many kernels a block's host starts: with 4 bits, each weight's scales and the weight itself
    are unpacked by one each."""
    every = len(linears(model))
    return 1 + (KERNELS * len(linears(model, 1, on)) + 2 * nf4 * every) / (KERNELS_WITHOUT * every)
