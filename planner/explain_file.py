"""`python -m planner explain FILE`: a configuration of another tool as mesh, memory, messages and risks."""

import math
from dataclasses import replace
from typing import Any

from common.axes import AXES
from common.constants import GIB
from common.errors import UserError
from planner import explain, published, stages
from planner.estimate import Estimate, estimate
from planner.hardware import Cluster
from planner.layout import Layout, make_layout, usual_precision
from planner.models import Model
from planner.output import one_layout
from planner.published import Run
from planner.read_config import Config

SHOWN = 12  # ranks of a group that are listed, and ranks of a pipeline


def layout_of(config: Config, model: Model, cluster: Cluster, given: dict) -> Layout:
    """The layout on this cluster. given: fields of the layout that the command line says, which win.

    Raises UserError where the file and the command line together don't say enough, or what can't be.
    """
    fields: dict[str, Any] = {
        "precision": usual_precision(cluster.gpu),
        "sequence": 2048,
        "micro_batch": 1,
    } | config.layout
    fields |= {name: value for name, value in given.items() if value is not None}
    mesh = dict(config.mesh) or {"reading": -1}
    taken = math.prod(size for size in mesh.values() if size > 0)
    if cluster.gpus % taken:
        text = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
        raise UserError(f"{config.kind}: {text} do not divide {cluster.gpus} GPUs; give --gpus a multiple of {taken}")
    mesh = {axis: size if size > 0 else cluster.gpus // taken for axis, size in mesh.items()}
    if "reading" in mesh:
        axis = "shard" if fields.get("zero_stage", 0) else "data"
        mesh[axis] = mesh.get(axis, 1) * mesh.pop("reading")
    readers = math.prod(mesh.get(axis, 1) for axis in ("data", "shard", "expert"))
    if "batch_size" not in fields:
        fields["batch_size"] = readers * (config.local or fields["micro_batch"])
    if config.many and "micro_batch" not in {**config.layout, **given}:
        fields["micro_batch"] = max(1, fields["batch_size"] // readers // config.many)
    return make_layout(model, cluster, mesh, **fields)


def groups(layout: Layout, cluster: Cluster) -> list[str]:
    """For each axis the ranks that rank 0 shares it with: the last axis is the innermost."""
    found = []
    for place, axis in enumerate(AXES):
        size = layout.size(axis)
        if size == 1:
            continue
        stride = math.prod(layout.size(inner) for inner in AXES[place + 1 :])
        ranks = [str(number * stride) for number in range(min(size, SHOWN))]
        if size > SHOWN:
            ranks.append("...")
        where = "in a node" if size * stride <= cluster.gpus_per_node else "between nodes"
        found.append(f"  {axis:9} {size:5}   rank 0 with {' '.join(ranks)}: {where}")
    return found or ["  one GPU"]


def picture(layout: Layout, cluster: Cluster) -> list[str]:
    """A line for each rank of the pipeline: its layers, and the nodes that it is on."""
    held = stages.held(layout)
    model_ranks = cluster.gpus // layout.pipeline
    found = []
    for rank in range(min(layout.pipeline, SHOWN)):
        first, last = rank * model_ranks, (rank + 1) * model_ranks - 1
        nodes = sorted({first // cluster.gpus_per_node, last // cluster.gpus_per_node})
        where = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {nodes[0]} to {nodes[-1]}"
        boxes = "[]" * min(8, layout.tensor)
        found.append(f"  stage rank {rank:3}: ranks {first} to {last} ({where}), each {boxes} of tensor, "
                     f"{held[rank]} micro-batches held")  # fmt: skip
    if layout.pipeline > SHOWN:
        found.append("  ...")
    return found


def holds(found: Estimate) -> list[str]:
    """Who holds what."""
    layout, out = found.layout, []
    for rank, (layers, embedding, head) in enumerate(stages.shares(found.model, layout)[:SHOWN]):
        ends = " and ".join(word for word, has in (("embedding", embedding), ("head", head)) if has)
        out.append(f"  pipeline rank {rank}: {layers} layers{', ' + ends if ends else ''}")
    if layout.pipeline == 1:
        out = [f"  every rank: all {found.model.layers} layers"]
    what = {0: "nothing", 1: "the optimizer's state", 2: "the optimizer's state and gradients",
            3: "parameters, gradients and the optimizer's state"}[layout.zero_stage]  # fmt: skip
    return [*out, f"  divided over {layout.shards} rank(s): {what}; weights cut in {layout.tensor} along tensor"]


def risks(found: Estimate, config: Config) -> list[str]:
    """What would fail or be slow, and why."""
    layout, cluster, out = found.layout, found.cluster, list(config.notes)
    gpu, memory = cluster.gpu, found.memory
    if found.fits == "no":
        largest = max(memory.parts, key=memory.parts.__getitem__)
        out.append(f"it runs out of memory: {memory.expected / GIB:.1f} GiB of {gpu.memory / GIB:.1f}, most of it "
                   f"'{largest}', in the phase '{memory.phase}'; `python -m planner plan` finds what fits")  # fmt: skip
    elif found.fits == "tight":
        out.append(f"it may run out of memory: {memory.high / GIB:.1f} GiB in the worst case of {gpu.memory / GIB:.1f}")
    if layout.tensor > cluster.gpus_per_node:
        out.append("tensor parallelism crosses nodes: its messages are in every layer, and nothing hides them")
    if layout.pipeline > 1 and layout.micro_batches < layout.pipeline:
        out.append(f"{layout.micro_batches} micro-batches for {layout.pipeline} ranks of the pipeline: a bubble of "
                   f"{found.step.bubble:.0%}")  # fmt: skip
    if found.step.exposed > 0.3 * found.seconds:
        out.append(f"{found.step.exposed / found.seconds:.0%} of the step waits for messages")
    if layout.precision == "float32" and not gpu.processor:
        out.append(f"float32: half of the memory, and a multiple of the time, is saved by {usual_precision(gpu)}")
    return [*out, *layout.notes, *found.warnings]


def far(found: Estimate, run: Run) -> float:
    """How unlike two layouts are: octaves of sizes, and what differs in kind; to nine places, so that runs that are
    equally far stand in the same order wherever a logarithm is rounded otherwise, as it is in a browser."""
    ours, theirs = found.layout, run.layout
    sizes = [
        (found.model.parameters, run.model.parameters), (found.cluster.gpus, run.cluster.gpus),
        (ours.tensor, theirs.tensor), (ours.pipeline, theirs.pipeline), (ours.context, theirs.context),
        (ours.sequence, theirs.sequence), (ours.micro_batch, theirs.micro_batch),
    ]  # fmt: skip
    kinds = (ours.zero_stage != theirs.zero_stage) + (ours.kept != theirs.kept) + (
        bool(found.model.experts) != bool(run.model.experts))  # fmt: skip
    kinds += 2 * (found.cluster.gpu.name != run.cluster.gpu.name)
    return round(kinds + sum(abs(math.log2(one / other)) for one, other in sizes), 9)


def alike(found: Estimate, count: int) -> list[Run]:
    """The published runs that are most alike, of different layouts, nearest first."""
    out: list[Run] = []
    seen = set()
    for run in sorted((run for run in published.runs() if run.seconds), key=lambda run: far(found, run)):
        what = run.source, run.model.name, run.cluster.gpus, run.layout.mesh
        if what not in seen:
            seen.add(what)
            out.append(run)
        if len(out) == count:
            break
    return out


def nearest(found: Estimate, count: int = 3) -> list[str]:
    """A line for each of the runs that are most alike, and how far the planner is off there."""
    out = []
    for run in alike(found, count):
        measured = run.seconds or math.nan
        predicted = estimate(run.model, run.cluster, run.layout, found.constants)
        out.append(f"  {run.source}, {run.model.name} on {run.cluster.gpus} x {run.cluster.gpu.name}, "
                   f"{run.layout.describe()}: {measured:.2f} s measured, {predicted.seconds / measured - 1:+.0%} "
                   "predicted")  # fmt: skip
    return out


def described(found: Estimate, config: Config, file: str) -> str:
    """All that `explain` prints."""
    out = [f"{file}: {config.kind}", "", one_layout(replace(found, out_of_scope=())).split("\nnote: ")[0], "", "mesh",
           *groups(found.layout, found.cluster)]  # fmt: skip
    if found.layout.pipeline > 1:
        out += picture(found.layout, found.cluster)
    parts = sorted(found.memory.parts.items(), key=lambda pair: -pair[1])
    out += ["", "who holds what", *holds(found), "", f"memory of the fullest rank, in '{found.memory.phase}'"]
    out += [f"  {explain.whose(found)}"]
    out += [f"  {size / GIB:8.2f} GiB  {name}" for name, size in parts if size > 0.005 * GIB]
    out += ["", "where a step goes", *(f"  {seconds:8.3f} s    {name}" for name, seconds in found.step.parts.items())]
    what = risks(found, config)
    out += ["", "risks", *(f"  {line}" for line in what)] if what else ["", "risks", "  none that the planner knows"]
    return "\n".join([*out, "", "the nearest published runs", *nearest(found)])
