"""Bytes that a GPU sends in a step, by the axis of the mesh along which it sends them: an average over all GPUs.

Each collective counts by the ring formula, as in the ledger (common/lab/wire_bytes.py), so both can be compared on real
runs. Messages of a few numbers, such as those of the loss and of the gradient's norm, are not counted.
"""

from common.lab.wire_bytes import wire_bytes
from planner import frameworks, stages
from planner.layout import Layout
from planner.memory import gathered_of, trained_of
from planner.models import Model


def forward_passes(layout: Layout) -> float:
    """How often a layer's forward pass sends its messages: again where the layer is computed again."""
    return 1.0 + layout.whole_again


def sums(model: Model, layout: Layout) -> float:
    """Sums along "tensor" of a layer's forward pass: after attention, and after what is cut of its MLP. Of whole
    experts nothing is."""
    if model.parallel:
        return 1.0
    whole = layout.whole_experts and not model.shared_experts
    return 2.0 - (model.moe_layers / model.layers if whole else 0.0)


def repeated_sums(model: Model, layout: Layout) -> float:
    """How many of a layer's sums along "tensor" recomputation does again, in all-reduces. Megatron-LM computes the
    whole layer again. PyTorch's checkpoints end with the last tensor that the backward pass needs, so before the second
    sum, of which nothing is kept; with sequence parallelism that is a reduce-scatter, half an all-reduce."""
    last = 0.5 if layout.sequence_parallel else 1.0
    return (forward_passes(layout) - 1) * (sums(model, layout) - last * frameworks.of(layout).stops_early)


def routed(model: Model, layout: Layout) -> float:
    """Bytes of the tokens that a rank sends to experts, once for each expert of a token. With sequence parallelism each
    rank along "tensor" routes its own part of the sequence; without, each of them routes all of it."""
    tokens = layout.tokens / (layout.tensor if layout.sequence_parallel else 1)
    return tokens * model.width * layout.itemsize


def sent(model: Model, layout: Layout) -> dict[str, float]:
    """Axis -> bytes. "host": what offloading sends over PCIe, in both directions."""
    itemsize, message = layout.itemsize, layout.message
    m, p, t, c = layout.micro_batches, layout.pipeline, layout.tensor, layout.context
    stream = layout.tokens * model.width * itemsize
    layers, passes = model.layers / p * m, forward_passes(layout)  # layers that a rank computes in a step
    found = {}
    # Two sums in the forward pass of a layer (one where its halves are parallel), as many in its backward pass, and
    # those done again; one each for the embedding's output and the gradient of the head's input; and for the loss
    # over a divided vocabulary three numbers per token.
    count = 2 * sums(model, layout) + repeated_sums(model, layout)
    found["tensor"] = wire_bytes("all_reduce", stream, t) * (count * layers + 2 * m / p)
    found["tensor"] += wire_bytes("all_reduce", 3 * 4 * layout.tokens, t) * m / p
    # Keys and values go round the ring forward, again backward, and their gradients after them.
    kv = 2 * layout.tokens * model.key * itemsize / t * c
    found["context"] = wire_bytes("all_gather", kv, c) * (passes + 2) * layers
    share = model.moe_layers / model.layers
    found["expert"] = wire_bytes("all_to_all", routed(model, layout) * model.top_k, layout.expert_ranks)
    found["expert"] *= 2 * (passes + 1) * layers * share
    found["pipeline"] = 2 * m * (layout.stages - 1) / p * stream / (t if layout.sequence_parallel else 1)
    if model.tied and p > 1 and not layout.lora:  # the gradients of a weight that the first stage has and the last
        tied = wire_bytes("all_reduce", model.embedding_parameters / t * message, 2)
        found["pipeline"] += tied * 2 / p * (layout.stages - 1 not in stages.stages_of(layout, 0))

    def over_ranks(count):
        return (sum(part) / p for part in zip(*(count(model, layout, *r) for r in stages.shares(model, layout)),
                                              strict=True))  # fmt: skip

    own, own_experts = over_ranks(trained_of)
    whole, whole_experts = (
        over_ranks(gathered_of) if layout.zero_stage == 3 else (own * itemsize, own_experts * itemsize)
    )
    layers_own = gathered_of(model, layout, model.layers, False, False)[0] / p
    if layout.zero_stage and layout.shards > 1:
        gathered = {1: 1, 2: 1, 3: m if p == 1 else 1}[layout.zero_stage]
        reduced = m if layout.zero_stage >= 2 and p == 1 else 1
        again = layout.zero_stage == 3 and p == 1  # not the unit at the ends, which stays until it is used
        found["shard"] = 0.0
        both = (
            (own, whole, layers_own, layout.shards),
            (own_experts, whole_experts, whole_experts, layout.expert_shards),
        )
        for kept, there, in_layers, size in both:
            found["shard"] += wire_bytes("all_gather", there + again * in_layers, size) * gathered
            found["shard"] += wire_bytes("reduce_scatter", kept * message, size) * reduced
    divided = layout.zero_stage >= 1
    for axis, size in layout.copies.items():
        dense = own / layout.shards if divided else own
        experts = own_experts / layout.expert_shards if divided else own_experts
        fewer = size if layout.zero_stage else size // layout.size("expert")  # that have the same experts
        summed = wire_bytes("all_reduce", dense * message, size) + wire_bytes("all_reduce", experts * message, fewer)
        found[axis] = found.get(axis, 0.0) + summed
    if layout.offload:
        crossings = message + itemsize
        if layout.zero_stage == 3 and layout.shards > 1:  # shards come from the host for every gathering
            crossings += itemsize * (2 * m - 1 if p == 1 else 0)
        found["host"] = (own / layout.shards + own_experts / layout.expert_shards) * crossings
    return {axis: size for axis, size in found.items() if size}
