"""How long one layer takes: its products, attention, element-wise work, and the messages inside of it."""

from dataclasses import dataclass
from functools import lru_cache

from course.fsdp.formulas import layer_bytes, score_bytes
from planner import adapters, frameworks
from planner.constants import Constants
from planner.hardware import GPU
from planner.layout import LOW, PRECISIONS, Layout
from planner.models import Model


@dataclass(frozen=True)
class Work:
    """Seconds of the forward pass of a layer on one micro-batch, by what it does; backward: of the backward pass."""

    products: float
    core: float
    elementwise: float
    backward_products: float
    backward_core: float
    backward_elementwise: float

    @property
    def forward(self) -> float:
        return self.products + self.core + self.elementwise

    @property
    def backward(self) -> float:
        return self.backward_products + self.backward_core + self.backward_elementwise


def peak(gpu: GPU, precision: str) -> float:
    """FLOP/s of a data sheet, in 16 bit or float32: TF32 has half of 16 bit's, and a CPU's is that of float32."""
    return gpu.peak / 2 if precision == "float32" and not gpu.processor else gpu.peak


def rate(gpu: GPU, precision: str, constants: Constants) -> float:
    """FLOP/s of large products."""
    return peak(gpu, precision) * gpu.achievable * constants.matmul * faster(gpu, precision, constants)


def faster(gpu: GPU, precision: str, constants: Constants) -> float:
    """Products' rate over that in 16 bit. `constants.fp8` is less than the peaks' ratio of two because operands are
    converted; with fewer bits that takes as long as in 8."""
    if precision not in LOW or not gpu.low_peak(precision):
        return 1.0
    converting = 1 / constants.fp8 - gpu.peak / gpu.peak_fp8
    return 1 / (gpu.peak / gpu.low_peak(precision) + max(0.0, converting))


def product(m: float, k: float, n: float, gpu: GPU, precision: str, constants: Constants) -> float:
    """Seconds of [m, k] x [k, n]: arithmetic at the rate of large products, its three matrices once through the memory,
    and the start of the kernel. So small and thin products are less efficient, as they are."""
    itemsize = PRECISIONS[precision][0]
    moved = itemsize * (m * k + k * n + m * n) / (gpu.hbm * constants.memory_rate)
    return 2 * m * k * n / rate(gpu, precision, constants) + moved + constants.kernel


def unfused(model: Model, itemsize: int) -> float:
    """Share of the rate of large products that those of attention reach which stores its scores. Tensor cores want
    operands whose rows are multiples of 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", section 4):
    with other widths of a head the products are done without them, at a sixteenth of the rate (A100's data sheet: 19.5
    of 312 TFLOP/s)."""
    width = model.query // model.heads
    return 0.6 if itemsize == 4 or width * itemsize % 16 == 0 else 1 / 16


@lru_cache(maxsize=50_000)
def work(
    model: Model, gpu: GPU, tokens: float, sequence: int, tensor: int, cut: bool, flash: bool, dropout: bool,
    fused: bool, precision: str, experts: int, context_factor: float, fast: float, moe: bool, constants: Constants,
    lora: int = 0, on: str = "all", nf4: bool = False,
    whole: bool = False,
) -> Work:  # fmt: skip
    """The work of a layer with a dense MLP, or with a mixture of experts (moe) of which this rank has `experts`, which
    are `whole` or cut along "tensor". With lora, that of a frozen layer beside adapters: no gradients of its weights,
    but of theirs."""
    h, itemsize = model.width, PRECISIONS[precision][0]

    def timed(k, n, m=tokens, count=1):
        forward = product(m, k, n, gpu, precision, constants)
        # for the input [m, n] x [n, k], and for the weight [k, m] x [m, n]
        backward = product(m, n, k, gpu, precision, constants)
        backward += 0.0 if lora else product(k, m, n, gpu, precision, constants)
        return count * forward, count * backward

    scale = model.attention_parameters / (2 * h * (model.query + model.key))
    pairs = [timed(h, (model.query + 2 * model.key) / tensor * scale), timed(model.query / tensor * scale, h)]
    ups = model.matrices - 1
    if moe:
        rows = tokens * model.top_k / experts / (tensor if whole else 1)
        width = model.expert_width / (1 if whole else tensor)
        pairs += [timed(h, ups * width, rows, experts), timed(width, h, rows, experts)]
        if shared := model.shared_experts * model.expert_width / tensor:
            pairs += [timed(h, ups * shared), timed(shared, h)]
        mlp_width = (model.top_k + model.shared_experts) * model.expert_width
    else:
        pairs += [timed(h, ups * model.hidden / tensor), timed(model.hidden / tensor, h)]
        mlp_width = model.hidden
    flops = 4 * tokens * sequence * model.query / tensor * context_factor
    if flash:  # only the half under the diagonal; the backward pass computes the scores again: 5 products for 2
        core = flops / 2 / (peak(gpu, precision) * gpu.attention * constants.attention * fast)
        backward_core = 2.5 * core
    else:
        core = flops / (peak(gpu, precision) * gpu.achievable * constants.matmul * unfused(model, itemsize))
        backward_core = 2 * core
    gated = (3 if fused else 4) if model.mlp == "swiglu" else 0
    kept = layer_bytes(h, model.query, model.key, mlp_width, gated, dropout, "none", tensor, cut, itemsize) * tokens
    if not flash:
        kept += score_bytes(model.heads, sequence, dropout, tensor, itemsize) * tokens
    once = constants.passes * (1 if fused else constants.eager) * kept / (gpu.hbm * constants.memory_rate)
    forward, backward = (sum(times) for times in zip(*pairs, strict=True))
    again = 2 * once
    if lora:
        own = adapters.linears(model, tensor, on)
        more, back = beside(own, gpu, tokens, precision, lora, constants)
        forward, backward = forward + more, backward + back
        # What an adapter gives is added to what its layer gives, forward, and their inputs' gradients are, backward.
        sums = sum((3 if fused else 5) * n for _, n in own) * tokens * itemsize  # 2 for the scaling by itself
        packed = adapters.weights(model) * (adapters.PACKED + adapters.SCALES + itemsize) if nf4 else 0.0
        extra = (sums + packed) / (gpu.hbm * constants.memory_rate)
        once, again = once + extra, again + extra
    return Work(forward, core, once, backward, backward_core, again)


def beside(
    linears: list[tuple[float, float]], gpu: GPU, tokens: float, precision: str, rank: int, constants: Constants
) -> tuple[float, float]:
    """Seconds of the products of a layer's adapters, which stay in 16 bit: (forward, backward)."""
    high = "bf16-mixed" if precision in LOW else precision
    forward = backward = 0.0
    for k, n in linears:
        for inner, outer in ((k, rank), (rank, n)):
            forward += product(tokens, inner, outer, gpu, high, constants)
            backward += product(tokens, outer, inner, gpu, high, constants)
            backward += product(inner, tokens, outer, gpu, high, constants)
    return forward, backward


def again(layout: Layout, one: Work) -> float:
    """Seconds that the backward pass of a layer computes its forward pass again."""
    return {
        "none": 0.0,
        "attention": one.core + (0 if layout.flash else one.elementwise / 3),
        "operators": one.products / 2 + one.elementwise,
        "products": one.elementwise + one.core,
        "every-second": one.forward * layout.whole_again,
        "full": one.forward * layout.whole_again,
    }[layout.kept]


def attention_factor(gpu: GPU, layout: Layout, constants: Constants) -> float:
    """How much faster than FlashAttention-2 the layout's kernel is on this GPU: those of FlashAttention-3 and of cuDNN
    are made for Hopper and what came after it."""
    kernel = layout.attention or ("cudnn" if frameworks.of(layout).fused_attention else "flash2")
    return constants.fast_attention if kernel != "flash2" and gpu.peak_fp8 and gpu.link > 400e9 else 1.0


def of_layer(model: Model, gpu: GPU, layout: Layout, moe: bool, constants: Constants) -> Work:
    """Work of one layer on one micro-batch under a layout, recomputation not among it."""
    factor = 1 + (constants.ring if layout.balanced else 1.0) * (1 - 1 / layout.context)
    return work(
        model, gpu, layout.tokens, layout.sequence, layout.tensor, layout.sequence_parallel, layout.flash,
        layout.dropout, layout.fused, layout.precision, model.experts // layout.expert_ranks if moe else 0, factor,
        attention_factor(gpu, layout, constants), moe, constants, layout.lora, layout.lora_on, layout.nf4,
        layout.whole_experts,
    )  # fmt: skip
