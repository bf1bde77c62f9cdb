"""How long a step takes: a sum of named terms, each with how often it is in a step and how long it takes once.

Work of the layers, what the host adds that launches their kernels, messages that nothing hides, waiting in the
pipeline, and the optimizer.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from common.axes import AXES
from planner import adapters, frameworks, stages, traffic
from planner.constants import Constants
from planner.hardware import GPU, Cluster
from planner.layer_time import Work, again, of_layer, product
from planner.layout import Layout
from planner.memory import gathered_of, largest, trained_of
from planner.models import Model
from planner.network import group, neighbour_seconds

WORK, INSIDE, BUBBLE, STATE, OPTIMIZER = PARTS = (
    "work", "messages in layers", "bubble", "messages of state", "optimizer")  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A summand of a step. part: one of PARTS; name: what it is; count: how often; each: seconds of one."""

    part: str
    name: str
    count: float
    each: float

    @property
    def seconds(self) -> float:
        return self.count * self.each


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on the rank of the pipeline that has most to do.

    terms:   their sum is `seconds`
    links:   bytes that a GPU sends in a step, by axis
    """

    terms: tuple[Term, ...]
    links: dict[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they go into: the sums of the terms of each part."""
        found = dict.fromkeys(PARTS, 0.0)
        for term in self.terms:
            found[term.part] += term.seconds
        return found

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank waits for other stages."""
        return self.parts[BUBBLE] / self.seconds

    @property
    def exposed(self) -> float:
        """Seconds of messages that no work hides."""
        return self.parts[INSIDE] + self.parts[STATE]


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and micro-batch, a mean over dense layers and mixtures."""

    forward: float
    backward: float
    repeated: float
    core: float
    host_forward: float
    host_backward: float


def left_over(message: float, work: float, constants: Constants) -> float:
    """Seconds that a message adds to the work that it overlaps with."""
    return max(0.0, message - work) + (1 - constants.kept) * min(message, work)


def launching(model: Model, gpu: GPU, layout: Layout, moe: bool, constants: Constants) -> float:
    """Seconds that the host needs to start the kernels of a layer's forward pass. The GPU waits where it is faster."""
    if gpu.processor:
        return 0.0
    share = frameworks.of(layout).host * (adapters.host(model, layout.lora_on, layout.nf4) if layout.lora else 1)
    return share * (constants.host + (constants.host_moe if moe else 0.0))


NORM = 8  # by which a layer's time on the host and on the device are put together; infinite: the larger of both


def waiting(host: float, device: float) -> float:
    """Seconds that a GPU waits for its host in a layer, whose kernels take `host` to launch and `device` to run.

    Were kernels alike, the slower of both would decide. They are not, and each message waits for the slowest rank. So
    where both take about as long, a layer takes a little longer than either; and of layouts that wait for their hosts
    alike, the one with less work is the faster one.
    """
    return (host**NORM + device**NORM) ** (1 / NORM) - device


def of_layers(model: Model, gpu: GPU, layout: Layout, constants: Constants) -> tuple[Layer, Work]:
    """What a layer takes without messages; and the work of a dense one."""
    dense = of_layer(model, gpu, layout, False, constants)
    kinds = [(False, dense, (model.layers - model.moe_layers) / model.layers)]
    if model.moe_layers:
        kinds.append((True, of_layer(model, gpu, layout, True, constants), model.moe_layers / model.layers))
    sums = [0.0] * 6
    for moe, one, share in kinds:
        host = launching(model, gpu, layout, moe, constants)
        repeated = again(layout, one)
        relaunched = host * min(1.0, repeated / one.forward) if one.forward else 0.0
        values = (one.forward, one.backward, repeated, one.core, host, host * constants.host_backward + relaunched)
        sums = [total + share * value for total, value in zip(sums, values, strict=True)]
    return Layer(*sums), dense


def messages_in_layer(
    model: Model, cluster: Cluster, layout: Layout, one: Layer, dense: Work, constants: Constants
) -> list[tuple[str, float, float]]:
    """(axis, seconds of its messages in a layer's forward pass that no work hides, of those in its backward pass)."""
    found = []
    itemsize = layout.itemsize
    stream = layout.tokens * model.width * itemsize
    passes = traffic.forward_passes(layout)
    if layout.tensor > 1:
        along = group(cluster, layout, constants, "tensor")
        each = along.seconds("all_reduce", stream)
        if layout.overlaps_tensor:
            each -= constants.async_kept * min(each, dense.products / 2)
        # With the sum that PyTorch's checkpoints leave out (traffic.repeated_sums): so the constants have been fitted.
        sums = traffic.sums(model, layout)
        found.append(("tensor", sums * each, sums * each * passes))
    if layout.context > 1:
        along = group(cluster, layout, constants, "context")
        kv = 2 * layout.tokens * model.key * itemsize / layout.tensor * layout.context
        each = along.seconds("all_gather", kv)
        once = left_over(each, one.core, constants)
        found.append(("context", once, left_over(2 * each, 2.5 * one.core, constants) + (passes - 1) * once))
    if model.moe_layers:
        share = model.moe_layers / model.layers
        routed = traffic.routed(model, layout) * model.top_k
        # Tokens are copied into the order of the experts and back, which goes through the memory.
        dispatch = constants.dispatch * routed / (cluster.gpu.hbm * constants.memory_rate) * share
        found.append(("experts' order", dispatch, dispatch * passes))
        if layout.expert_ranks > 1:
            axes = ("expert", "tensor") if layout.whole_experts else ("expert",)
            among = group(cluster, layout, constants, *axes)
            each = among.seconds("all_to_all", routed)
            if frameworks.of(layout).node_dispatch:
                each = among.dispatch(routed / model.top_k, model.top_k)
            found.append(("expert", 2 * each * share, 2 * each * passes * share))
    return found


def estimate(model: Model, cluster: Cluster, layout: Layout, constants: Constants, quick: bool = False) -> StepTime:
    """The time of a step. quick: stages of a pipeline count as equal, which a search does for most layouts."""
    gpu = cluster.gpu
    itemsize = layout.itemsize
    one, dense = of_layers(model, gpu, layout, constants)
    inside = messages_in_layer(model, cluster, layout, one, dense, constants)
    inside_forward, inside_backward = sum(forward for _, forward, _ in inside), sum(back for *_, back in inside)
    m, p = layout.micro_batches, layout.pipeline
    stream = layout.tokens * model.width * itemsize
    # The GPU waits for the host where the kernels of a layer take less time than to start them.
    waits_forward = waiting(one.host_forward, one.forward + inside_forward)
    waits_backward = waiting(one.host_backward, one.backward + one.repeated + inside_backward)

    # --- the head, which the last stage has
    products = "bf16" if layout.precision != "float32" else "float32"
    vocabulary = model.vocabulary / (layout.tensor if not frameworks.of(layout).whole_logits else 1)
    head = product(layout.tokens, model.width, model.vocabulary / layout.tensor, gpu, products, constants)
    loss = 4 * layout.tokens * vocabulary * 4 / (gpu.hbm * constants.memory_rate)

    # --- stages: what each does forward and backward with one micro-batch
    counts = stages.layers_of_stages(model.layers, layout.stages, layout.ends)
    last = layout.stages - 1
    forward, backward = one.forward + waits_forward, one.backward + one.repeated + waits_backward
    times_f = [n * (forward + inside_forward) + (k == last) * (head + loss / 2) for k, n in enumerate(counts)]
    times_b = [
        n * (backward + inside_backward) + (k == last) * ((1 if layout.lora else 2) * head + loss / 2)
        for k, n in enumerate(counts)
    ]
    sends = 0.0
    if p > 1:
        rest = layout.tensor if layout.sequence_parallel else 1
        sends = neighbour_seconds(cluster, layout, constants, stream / rest)
    ends, busy = stages.makespan(layout, times_f, times_b, sends, quick)
    owned = [stages.stages_of(layout, rank) for rank in range(p)]
    busiest = max(owned, key=lambda own: sum(times_f[stage] + times_b[stage] for stage in own))
    layers = m * sum(counts[stage] for stage in busiest)
    terms = [
        Term(WORK, "a layer's forward pass", layers, one.forward),
        Term(WORK, "a layer's backward pass", layers, one.backward),
        Term(WORK, "a layer's recomputation", layers, one.repeated),
        Term(WORK, "waiting for the host that launches a layer's kernels", layers, waits_forward + waits_backward),
        Term(WORK, "the head and the loss", m * (last in busiest), (2 if layout.lora else 3) * head + loss),
    ]
    terms += [Term(INSIDE, f"along {axis}, of a layer", layers, there + back) for axis, there, back in inside]
    terms.append(Term(BUBBLE, "waiting for other stages", 1, max(0.0, ends - busy)))
    terms += of_state(model, cluster, layout, constants, (sum(times_f) / p, sum(times_b) / p, forward + inside_forward,
                                                        backward + inside_backward))  # fmt: skip
    terms.append(optimizer(model, cluster, layout, constants))
    kept = tuple(replace(term, each=term.each * constants.step) for term in terms if term.seconds)
    return StepTime(kept, {} if quick else traffic.sent(model, layout))


def of_state(
    model: Model, cluster: Cluster, layout: Layout, constants: Constants, times: tuple[float, float, float, float]
) -> list[Term]:
    """Messages of gradients and parameters. times: seconds of a micro-batch's forward and backward pass on a rank, and
    of one layer's, which these messages overlap with."""
    all_forward, all_backward, forward, backward = times
    itemsize, message = layout.itemsize, layout.message
    m, p, found = layout.micro_batches, layout.pipeline, []
    divides = ("shard", "context", "expert") if layout.shard_context else ("shard", "expert")
    sharded = partial(state_seconds, cluster, layout, constants, divides)
    own, own_experts = largest(model, layout)
    last_backward = all_backward if layout.overlap_gradients else 0.0
    divided = layout.zero_stage and layout.shards > 1
    if divided and layout.zero_stage == 3:
        gather = sharded("all_gather", *gathered_of(model, layout, 1, False, False))
        scatter = sharded("reduce_scatter", *(message * size for size in trained_of(model, layout, 1, False, False)))
        if p > 1:  # a stage of a pipeline is gathered once for all of its micro-batches
            units = max(stages.layers_of_stages(model.layers, layout.stages, layout.ends)) * layout.stages_per_rank
            found += [
                Term(STATE, "gathering parameters along shard", 1, left_over(units * gather, all_forward, constants)),
                Term(STATE, "reducing gradients along shard", 1, left_over(units * scatter, last_backward, constants)),
            ]
        else:
            # The ends of the model are units too; the first gather and the last reduction have nothing beside them.
            ends = model.embedding_parameters * (1 if model.tied else 2) / layout.tensor
            both = sharded("all_gather", ends * itemsize)
            both += 0.0 if layout.lora else sharded("reduce_scatter", ends * message)
            exposed = left_over(gather, forward, constants) + left_over(gather + scatter, backward, constants)
            found += [
                Term(STATE, "embedding and head along shard", m, both),
                Term(STATE, "the first gathering and the last reduction along shard", 1, gather + scatter),
                Term(STATE, "gathering and reducing a layer along shard", m * model.layers, exposed),
            ]
    elif divided:
        # A stage's backward passes end one after the other: its gradients are reduced once a step, as in traffic.py.
        repeats = m if layout.zero_stage == 2 and p == 1 else 1
        reduce = sharded("reduce_scatter", own * message, own_experts * message)
        collect = sharded("all_gather", own * itemsize, own_experts * itemsize)
        beside = all_forward if layout.overlap_gradients else 0.0
        found += [
            Term(STATE, "reducing gradients along shard", repeats, left_over(reduce, last_backward, constants)),
            Term(STATE, "gathering parameters along shard", 1, left_over(collect, beside, constants)),
        ]
    if model.tied and p > 1 and not layout.lora:
        size = model.embedding_parameters / layout.tensor * message
        found.append(Term(STATE, "the tied embedding", 1, neighbour_seconds(cluster, layout, constants, size)))
    for axis in layout.copies:
        axes = (axis,) if layout.zero_stage else AXES[1:-1]
        summed = own, own_experts
        if layout.zero_stage:  # reduced and divided along "shard" first, whatever the stage: the rest is summed
            summed = own / layout.shards, own_experts / layout.expert_shards
        each = state_seconds(cluster, layout, constants, axes, "all_reduce", *(size * message for size in summed))
        found.append(Term(STATE, f"summing gradients along {axis}", 1, left_over(each, last_backward, constants)))
    return found


def optimizer(model: Model, cluster: Cluster, layout: Layout, constants: Constants) -> Term:
    """AdamW's step over what a rank keeps."""
    itemsize, message = layout.itemsize, layout.message
    own, own_experts = largest(model, layout)
    kept = own / layout.shards + own_experts / layout.expert_shards
    if not layout.offload:
        # AdamW reads parameter, gradient and two moments, and writes all but the gradient; clipping reads and writes
        # the gradient.
        state = {"bf16": 14 + 6, "bf16-12": 22 + 6}.get(layout.precision, 28 + 2 + 12)
        return Term(OPTIMIZER, "AdamW's state through the memory", 1,
                    kept * state / (cluster.gpu.hbm * constants.memory_rate))  # fmt: skip
    # Gradients to the host, parameters back; AdamW there reads and writes 28 bytes a parameter (and 2 of a copy) where
    # it is one fused kernel on all cores, and takes constants.host_adam times as long as torch.optim.AdamW's default.
    crossings = message + itemsize
    if layout.zero_stage == 3 and layout.shards > 1:  # shards come from the host for every gathering
        crossings += itemsize * (2 * layout.micro_batches - 1 if layout.pipeline == 1 else 0)
    there = 30 * cluster.gpus_per_node / cluster.host * constants.host_adam
    return Term(OPTIMIZER, "AdamW on the host", 1, kept * (crossings / cluster.gpu.pcie + there))


def state_seconds(
    cluster: Cluster, layout: Layout, constants: Constants, axes: tuple[str, ...], operation: str, dense: float,
    experts: float = 0.0,
) -> float:  # fmt: skip
    """Seconds of one collective along these axes over bytes of what all ranks use, and of experts, bucket by bucket.
    Along "expert", ranks have different experts: what is theirs is a message of its own then, to fewer ranks."""
    everybody = group(cluster, layout, constants, *axes)

    def in_buckets(ranks, payload):
        many = max(1, round(payload / constants.bucket)) if constants.bucket else 1
        return many * ranks.seconds(operation, payload / many)

    if not experts or "expert" not in axes or layout.size("expert") == 1:
        return in_buckets(everybody, dense + experts)
    fewer = group(cluster, layout, constants, *(axis for axis in axes if axis != "expert"))
    return in_buckets(everybody, dense) + in_buckets(fewer, experts)
