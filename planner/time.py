"""How long a step takes: work of the layers, messages that nothing hides, waiting in the pipeline, the optimizer."""

from dataclasses import dataclass, field
from functools import partial

from common.axes import AXES
from planner import stages, traffic
from planner.constants import Constants
from planner.hardware import Cluster
from planner.layer_time import again, of_layer, product
from planner.layout import PRECISIONS, Layout
from planner.memory import parameters_of
from planner.models import Model
from planner.network import group, neighbour_seconds


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go into, on the rank of the pipeline that has most to do.

    parts:   their sum is `seconds`
    bubble:  share of the step in which that rank waits for other stages
    exposed: seconds of messages that no work hides
    links:   bytes that a GPU sends in a step, by axis
    """

    parts: dict[str, float]
    seconds: float
    bubble: float
    exposed: float
    links: dict[str, float] = field(default_factory=dict)


def left_over(message: float, work: float, constants: Constants) -> float:
    """Seconds that a message adds to the work that it overlaps with."""
    return max(0.0, message - work) + (1 - constants.kept) * min(message, work)


def estimate(model: Model, cluster: Cluster, layout: Layout, constants: Constants, quick: bool = False) -> StepTime:
    """The time of a step. quick: stages of a pipeline count as equal, which a search does for most layouts."""
    gpu = cluster.gpu
    itemsize, message = PRECISIONS[layout.precision]
    dense = of_layer(model, gpu, layout, False, constants)
    kinds = [(dense, (model.layers - model.moe_layers) / model.layers)]
    if model.moe_layers:
        kinds.append((of_layer(model, gpu, layout, True, constants), model.moe_layers / model.layers))
    forward = sum(share * one.forward for one, share in kinds)
    backward = sum(share * one.backward for one, share in kinds)
    repeated = sum(share * again(layout, one) for one, share in kinds)
    core = sum(share * one.core for one, share in kinds)

    # --- messages inside of a layer, of one micro-batch
    m, p = layout.micro_batches, layout.pipeline
    inside_forward = inside_backward = 0.0
    stream = layout.tokens * model.width * itemsize
    passes = traffic.forward_passes(layout)
    if layout.tensor > 1:
        along = group(cluster, layout, constants, "tensor")
        one = along.seconds("all_reduce", stream)
        if layout.async_tensor:
            hidden = min(one, dense.products / 2)
            one -= constants.async_kept * hidden
        inside_forward += 2 * one
        inside_backward += 2 * one * passes
    if layout.context > 1:
        along = group(cluster, layout, constants, "context")
        kv = 2 * layout.tokens * model.key * itemsize / layout.tensor * layout.context
        one = along.seconds("all_gather", kv)
        inside_forward += left_over(one, core, constants)
        inside_backward += left_over(2 * one, 2.5 * core, constants) + (passes - 1) * left_over(one, core, constants)
    if layout.size("expert") > 1:
        along = group(cluster, layout, constants, "expert")
        share = model.moe_layers / model.layers
        one = along.seconds("all_to_all", traffic.routed(model, layout) * model.top_k)
        inside_forward += 2 * one * share
        inside_backward += 2 * one * passes * share

    # --- stages: what each does forward and backward with one micro-batch
    head_forward = product(layout.tokens, model.width, model.vocabulary / layout.tensor, gpu,
                           "bf16" if layout.precision != "float32" else "float32", constants)  # fmt: skip
    logits = layout.tokens * model.vocabulary / layout.tensor * 4
    loss = 4 * logits / (gpu.hbm * constants.memory_rate)
    counts = stages.layers_of_stages(model.layers, layout.stages)
    layer_unit, expert_unit = parameters_of(model, layout, 1, False, False)
    gather = scatter = 0.0
    divides = ("shard", "context", "expert") if layout.shard_context else ("shard", "expert")
    sharded = partial(state_seconds, cluster, layout, constants, divides)
    if layout.zero_stage == 3 and layout.shards > 1:
        gather = sharded("all_gather", layer_unit * itemsize, expert_unit * itemsize)
        scatter = sharded("reduce_scatter", layer_unit * message, expert_unit * message)
    per_micro_batch = gather and p == 1  # a stage of a pipeline is gathered once for all of its micro-batches
    exposed_layer = 0.0
    if per_micro_batch:
        exposed_layer = left_over(gather, forward + inside_forward, constants) + left_over(
            gather + scatter, backward + repeated + inside_backward, constants)  # fmt: skip
    work_f = [n * forward + (stage == layout.stages - 1) * (head_forward + loss / 2) for stage, n in enumerate(counts)]
    work_b = [
        n * (backward + repeated) + (stage == layout.stages - 1) * (2 * head_forward + loss / 2)
        for stage, n in enumerate(counts)
    ]
    times_f = [work + n * inside_forward for work, n in zip(work_f, counts, strict=True)]
    times_b = [work + n * inside_backward for work, n in zip(work_b, counts, strict=True)]
    sends = 0.0
    if p > 1:
        rest = layout.tensor if layout.sequence_parallel else 1
        sends = neighbour_seconds(cluster, layout, constants, stream / rest)
    ends, busy = stages.makespan(layout, times_f, times_b, sends, quick)
    waiting = max(0.0, ends - busy)

    # --- once a step: gradients and parameters, and the optimizer
    own, own_experts = max(parameters_of(model, layout, *share) for share in stages.shares(model, layout))
    once = 0.0
    last_backward = (sum(times_b) / p) if layout.overlap_gradients else 0.0
    if layout.zero_stage == 3 and layout.shards > 1:
        if p > 1:
            units = max(counts) * layout.stages_per_rank
            once += left_over(units * gather, sum(times_f) / p, constants)
            once += left_over(units * scatter, last_backward, constants)
        else:
            # The ends of the model are units too; the first gather and the last reduction have nothing beside them.
            ends_unit = model.embedding_parameters * (1 if model.tied else 2) / layout.tensor
            once += m * (sharded("all_gather", ends_unit * itemsize) + sharded(
                "reduce_scatter", ends_unit * message)) + gather + scatter  # fmt: skip
            once += m * model.layers * exposed_layer
    elif layout.zero_stage and layout.shards > 1:
        # A stage's backward passes end one after the other: its gradients are reduced once a step, as in traffic.py.
        repeats = m if layout.zero_stage == 2 and p == 1 else 1
        reduce = repeats * sharded("reduce_scatter", own * message, own_experts * message)
        collect = sharded("all_gather", own * itemsize, own_experts * itemsize)
        once += left_over(reduce, repeats * last_backward, constants) + left_over(
            collect, sum(times_f) / p if layout.overlap_gradients else 0.0, constants)  # fmt: skip
    if model.tied and p > 1:
        once += neighbour_seconds(cluster, layout, constants, model.embedding_parameters / layout.tensor * message)
    kept_here = own / layout.shards + own_experts / layout.expert_shards
    for axis in layout.copies:
        axes = (axis,) if layout.zero_stage else AXES[1:-1]
        summed = own, own_experts
        if layout.zero_stage:  # reduced and divided along "shard" first, whatever the stage: the rest is summed
            summed = own / layout.shards, own_experts / layout.expert_shards
        one = state_seconds(cluster, layout, constants, axes, "all_reduce", *(size * message for size in summed))
        once += left_over(one, last_backward, constants)
    if layout.offload:
        # Gradients to the host, parameters back; AdamW there reads and writes 28 bytes a parameter (and 2 of a copy).
        crossings = message + itemsize
        if layout.zero_stage == 3 and layout.shards > 1:  # shards come from the host for every gathering
            crossings += itemsize * (2 * m - 1 if p == 1 else 0)
        optimizer = kept_here * crossings / gpu.pcie
        optimizer += kept_here * 30 * cluster.gpus_per_node / cluster.host
    else:
        # AdamW reads parameter, gradient and two moments, and writes all but the gradient; clipping reads and writes
        # the gradient.
        state = {"bf16": 14 + 6, "bf16-12": 22 + 6}.get(layout.precision, 28 + 2 + 12)
        optimizer = kept_here * state / (gpu.hbm * constants.memory_rate)
    work = busy - m * max_inside(layout, counts, inside_forward + inside_backward)
    parts = {"work": work, "messages in layers": busy - work, "bubble": waiting, "messages of state": once,
             "optimizer": optimizer}  # fmt: skip
    seconds = sum(parts.values())
    return StepTime(parts, seconds, waiting / seconds, once + busy - work, {} if quick else traffic.sent(model, layout))


def state_seconds(
    cluster: Cluster, layout: Layout, constants: Constants, axes: tuple[str, ...], operation: str, dense: float,
    experts: float = 0.0,
) -> float:  # fmt: skip
    """Of one collective along these axes over bytes of what all ranks use, and of experts. Along "expert", ranks have
    different experts: what is theirs is a message of its own then, to fewer ranks."""
    everybody = group(cluster, layout, constants, *axes)
    if not experts or "expert" not in axes or layout.size("expert") == 1:
        return everybody.seconds(operation, dense + experts)
    fewer = group(cluster, layout, constants, *(axis for axis in axes if axis != "expert"))
    return everybody.seconds(operation, dense) + fewer.seconds(operation, experts)


def max_inside(layout: Layout, counts: tuple[int, ...], one: float) -> float:
    """Of the rank with most layers."""
    return max(sum(counts[stage] for stage in stages.stages_of(layout, rank)) for rank in range(layout.pipeline)) * one
