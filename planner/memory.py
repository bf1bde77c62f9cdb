"""How many bytes a GPU needs: the largest of a step's phases, for each rank of the pipeline.

State by chapter 06's formula, activations by its formula of a layer, stored micro-batches from chapter 05's simulator.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from course.fsdp.formulas import BYTES, STATE_KINDS, formula, layer_bytes, score_bytes
from planner import adapters, frameworks, stages
from planner.constants import Constants
from planner.layout import STAGES, Layout
from planner.models import Model


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that needs most. `parts` are those that are alive at its peak, which is in `phase`.

    needed: their sum; low, expected, high: what the allocator reserves for it, and what is outside of it (the
    framework's constant); worst: what is expected with the framework that needs most, of those that it may run on;
    framework: whose recipe it is, outside: how much of `expected` its constant is
    """

    parts: dict[str, float]
    phase: str
    rank: int
    needed: float
    low: float
    expected: float
    high: float
    host: float = 0.0
    worst: float = 0.0
    framework: str = ""
    outside: float = 0.0


@lru_cache(maxsize=20_000)
def _layer(model: Model, tensor: int, sequence: int, kept: str, flash: bool, dropout: bool, fused: bool, cut: bool,
           itemsize: int, expert_tensors: int) -> float:  # fmt: skip
    """Bytes per token that a layer keeps, on average over dense layers and mixtures."""
    gated = (3 if fused else 4) if model.mlp == "swiglu" else 0

    def keeps(mlp_width: int, copies: int) -> float:
        """copies: experts that each token goes to."""
        args = (model.width, model.query, model.key, mlp_width, gated, dropout, kept, tensor, cut, itemsize)
        found = layer_bytes(*args)
        if kept != "full":
            found += expert_tensors * itemsize * copies * model.width / tensor
        return found

    dense, moe = model.layers - model.moe_layers, model.moe_layers
    total = dense * keeps(model.hidden, 0) if dense else 0
    total += moe * keeps((model.top_k + model.shared_experts) * model.expert_width, model.top_k) if moe else 0
    scores = score_bytes(model.heads, sequence, dropout, tensor, itemsize) if not flash and kept == "none" else 0
    return total / model.layers + scores


def layer_memory(model: Model, layout: Layout, kept: str | None = None) -> float:
    """Bytes that one layer keeps of one micro-batch, on one GPU."""
    itemsize = layout.itemsize

    def per_layer(how):
        return _layer(model, layout.tensor, layout.sequence, how, layout.flash, layout.dropout, layout.fused,
                      layout.sequence_parallel, itemsize, frameworks.of(layout).expert_tensors)  # fmt: skip

    share = 0.0 if kept else layout.whole_again
    rest = kept or ("none" if share else layout.kept)
    per_token = share * per_layer("full") + ((1 - share) * per_layer(rest) if share < 1 else 0.0)
    if layout.lora:  # what lies between an adapter's two matrices
        more = float(len(adapters.linears(model, 1, layout.lora_on)) * layout.lora)
        if rest == "none":
            cut = layout.tensor if layout.sequence_parallel else 1
            more -= adapters.spared(model, layout.lora_on, layout.tensor, cut)
        per_token += (1 - share) * more * itemsize
    return per_token * layout.tokens


def parameters_of(model: Model, layout: Layout, layers: int, embedding: bool, head: bool) -> tuple[float, float]:
    """(parameters that all of an expert group use, experts') on a GPU of the pipeline's rank that has these layers."""
    return _parameters(model, layout.tensor, layout.size("expert"), layers, embedding, head)


@lru_cache(maxsize=50_000)
def _parameters(model: Model, tensor: int, expert: int, layers: int, embedding: bool, head: bool):
    cut = (model.layer_parameters - model.uncut_parameters) / tensor + model.uncut_parameters
    dense = layers * cut
    if embedding:
        dense += model.embedding_parameters / tensor + model.positions * model.width
    if head:
        dense += model.width * (2 if model.bias != "none" else 1)
        if not (model.tied and embedding):
            dense += model.embedding_parameters / tensor
    return dense, model.expert_parameters / model.layers * layers / expert / tensor


def trained_of(model: Model, layout: Layout, layers: int, embedding: bool, head: bool) -> tuple[float, float]:
    """Those of parameters_of that are trained: all of them, or the adapters of these layers."""
    if layout.lora:
        return layers * adapters.parameters(model, layout.lora, layout.lora_on, layout.tensor), 0.0
    return parameters_of(model, layout, layers, embedding, head)


def frozen_of(model: Model, layout: Layout, layers: int, embedding: bool, head: bool) -> tuple[float, float]:
    """Bytes of what adapters leave as it is: (those that stage 3 divides and gathers, those that it does not)."""
    if not layout.lora:
        return 0.0, 0.0
    dense, _ = parameters_of(model, layout, layers, embedding, head)
    return adapters.frozen(model, dense, layers, layout.nf4, layout.itemsize)


def gathered_of(model: Model, layout: Layout, layers: int, embedding: bool, head: bool) -> tuple[float, float]:
    """Bytes of a rank's parameters as stage 3 gathers them: (what all of an expert group use, experts')."""
    dense, experts = trained_of(model, layout, layers, embedding, head)
    frozen, _ = frozen_of(model, layout, layers, embedding, head)
    return layout.itemsize * dense + frozen, layout.itemsize * experts


def largest(model: Model, layout: Layout) -> tuple[float, float]:
    """Parameters that are trained on the pipeline's rank that has most of them, as trained_of counts them."""
    return max(trained_of(model, layout, *share) for share in set(stages.shares(model, layout)))


def state(layout: Layout, dense: float, experts: float) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state between steps, by chapter 06's formula."""
    stage = STAGES[layout.zero_stage]
    found = formula(stage, dense, layout.shards, layout.recipe)
    for kind, size in formula(stage, experts, layout.expert_shards, layout.recipe).items():
        found[kind] += size
    return found


def around_units(
    zero_stage: int, itemsize: int, message: int, unit: float, trained: float | None = None
) -> dict[str, float]:
    """Bytes beside the shards: under stage 3 one unit that computes and the next one, whole, and gradients of the
    former; under stage 2 a bucket of gradients that is reduced and the next one. `trained`: how many of a unit's
    parameters have gradients, where not all do."""
    trained = unit if trained is None else trained
    return {
        3: {"gathered": 2 * itemsize * unit, "unsharded gradients": (itemsize + message) * trained},
        2: {"buckets of gradients": 2 * message * trained},
    }.get(zero_stage, {})


def estimate(model: Model, layout: Layout, constants: Constants) -> Memory:
    """The rank of the pipeline that needs most. Ranks that are alike are looked at once.

    Where the layout names no framework, it is the middle one of those of the frameworks that it may run on, and all of
    these lie from `low` to `high`.
    """
    each = sorted(
        (_estimate(model, replace(layout, framework=name), constants) for name in frameworks.possible(layout)),
        key=lambda memory: memory.expected,
    )
    middle, worst = each[len(each) // 2], each[-1].expected
    return replace(middle, low=min(middle.low, each[0].expected), high=max(middle.high, worst), worst=worst)


def _estimate(model: Model, layout: Layout, constants: Constants) -> Memory:
    held, found = stages.held(layout), {}
    for rank, share in enumerate(stages.shares(model, layout)):
        if (share, held[rank]) not in found:
            found[share, held[rank]] = on_rank(model, layout, constants, rank, share, held[rank])
    return max(found.values(), key=lambda memory: memory.needed)


def between_steps(model: Model, layout: Layout, share: tuple) -> tuple[dict[str, float], float]:
    """(bytes by part that a GPU of the pipeline's rank with this share keeps between steps, bytes in the host)."""
    kept = state(layout, *trained_of(model, layout, *share))
    if layout.lora:
        frozen, scales = frozen_of(model, layout, *share)
        kept["frozen parameters"] = frozen / (layout.shards if layout.zero_stage == 3 else 1) + scales
    if not layout.offload:
        return kept, 0.0
    there = ["gradients", "optimizer"]
    if layout.zero_stage == 3 and layout.shards > 1:  # fully_shard keeps its shards there as well
        there += ["parameters", "frozen parameters"]
    return kept, sum(kept.pop(kind, 0.0) for kind in there)


def in_step(layout: Layout, dense: float, experts: float) -> dict[str, float]:
    """Bytes by part that are there in the optimizer's step alone, when there are no activations any more.

    PyTorch's default for CUDA works on lists of all parameters at once ("foreach"), which takes a temporary of their
    size (torch/optim/optimizer.py, _foreach_doc); a fused optimizer takes none.
    """
    recipe, own = frameworks.of(layout), dense / layout.shards + experts / layout.expert_shards
    temporary = 0.0 if layout.offload or not recipe.foreach else (2 if layout.recipe == "bf16" else 4) * own
    found = {"activations": 0.0, "temporaries of the optimizer": temporary}
    if recipe.step_gradient and layout.precision == "bf16-mixed-16":  # whose gradients have 16 bits until then
        found["gradients in float32"] = recipe.step_gradient * own
    return found


def on_rank(model: Model, layout: Layout, constants: Constants, rank: int, share: tuple, held: int) -> Memory:
    layers, embedding, head = share
    dense, experts = trained_of(model, layout, *share)
    kept, host = between_steps(model, layout, share)
    itemsize, message = layout.itemsize, layout.message
    recipe = frameworks.of(layout)
    accumulates = recipe.accumulates and layout.micro_batches > 1 and layout.zero_stage == 3 and layout.pipeline == 1
    per_layer = layer_memory(model, layout)
    chunk = layers / layout.stages_per_rank
    kept["activations"] = held * chunk * per_layer
    rest = layout.tensor if layout.sequence_parallel else 1
    stream = layout.tokens * model.width * itemsize / rest  # the residual stream at one place
    phases = {}
    units = [(1, False, False), *[(0, True, False)] * embedding, *[(0, False, True)] * head]
    unit = max(gathered_of(model, layout, *one)[0] for one in units) / itemsize
    trained_unit = max(trained_of(model, layout, *one)[0] for one in units)
    if layout.zero_stage == 3:
        if layout.pipeline > 1 and layout.shards > 1:
            # Gathered from a stage's first micro-batch to its last, and gradients are added up unsharded meanwhile.
            kept["gathered"] = sum(gathered_of(model, layout, *share))
            kept["unsharded gradients"] = message * (dense + experts)
        elif layout.shards > 1 and accumulates:
            # No micro-batch but the last reduces its gradients: they are whole, and there are no shards of them yet.
            kept |= {"gathered": 2 * itemsize * unit, "gradients": 0.0, "unsharded gradients": 4 * (dense + experts)}
        elif layout.shards > 1:
            kept |= around_units(3, itemsize, message, unit, trained_unit)
        elif itemsize < BYTES[layout.recipe][0]:
            kept["16-bit copies"] = itemsize * (dense + experts)  # of what is float32 in the optimizer
    elif layout.zero_stage == 2 and layout.shards > 1:
        kept |= around_units(2, itemsize, message, trained_unit)
    # The backward pass of a layer: what it did not keep is computed again, and gradients of its largest tensors.
    again = layer_memory(model, layout, "none") - per_layer if layout.kept != "none" else 0.0
    widest = max(model.hidden if not model.experts else (model.top_k + model.shared_experts) * model.expert_width,
                 2 * model.query)  # fmt: skip
    gradients = itemsize * layout.tokens * 2 * widest / layout.tensor + 2 * stream
    phases["backward"] = {"a layer computed again": max(0.0, again), "gradients of activations": gradients}
    if layout.nf4:  # a weight is unpacked whole for its product
        phases["backward"]["a weight out of 4 bits"] = itemsize * max(k * n for k, n in adapters.linears(model))
    if layout.tensor > 1 and layout.sequence_parallel:  # inputs of attention and MLP whole again, and one's gradient
        phases["backward"]["gathered activations"] = 3 * layout.tokens * model.width * itemsize
    if layout.pipeline > 1:
        # PyTorch's stages have a buffer for what comes in, forward and backward, of each micro-batch (torch 2.x,
        # distributed/pipelining/stage.py); others one of each direction on its way and one in use.
        kept["messages"] = stream * (2 * layout.micro_batches if layout.zero_stage == 3 else 4)
    if head:
        whole = recipe.whole_logits and layout.tensor > 1
        logits = layout.tokens * model.vocabulary / (1 if whole else layout.tensor) * 4
        copies = constants.loss_copies
        if layout.tensor > 1 and layout.zero_stage == 3:  # DTensor's parallel loss
            copies = constants.parallel_loss_copies
        copies = recipe.loss_copies or copies
        copies = 1.5 if layout.fused_loss else copies
        in_flight = kept["activations"]
        if layout.pipeline > 1 and layout.schedule == "1f1b":
            in_flight = min(in_flight, chunk * per_layer)
        phases["loss"] = {"logits and loss": copies * logits, "activations": in_flight}
    phases["optimizer step"] = in_step(layout, dense, experts)
    if accumulates and layout.shards > 1:  # reduced by then
        phases["optimizer step"] |= {"unsharded gradients": message * (dense + experts) / layout.shards}
    if layout.recipe == "mixed, float32 gradients" and layout.zero_stage < 2:
        copied = recipe.gradient_copy + (recipe.buckets if layout.readers > 1 else 0)
        kept["gradients in 16 bit"] = copied * (dense + experts)
    peaks = {name: sum((kept | parts).values()) for name, parts in phases.items()}
    phase = max(peaks, key=peaks.__getitem__)
    parts = {name: size for name, size in (kept | phases[phase]).items() if size}
    needed = sum(parts.values())
    expected = needed * constants.allocator + recipe.constant
    low, high = (expected * end / constants.allocator for end in (constants.allocator_low, constants.allocator_high))
    return Memory(
        parts, phase, rank, needed, low, expected, high, host, framework=frameworks.name_of(layout),
        outside=recipe.constant,
    )  # fmt: skip


__all__ = ["STATE_KINDS", "Memory", "estimate", "layer_memory", "on_rank", "parameters_of", "state", "trained_of"]
