"""All layouts of a cluster that could work, the memory and time of each, and the best of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from common.errors import UserError
from planner import memory, time
from planner.constants import Constants, load
from planner.estimate import GIB, Estimate, estimate, limited
from planner.hardware import Cluster
from planner.layout import Layout, cut_by_tensor
from planner.models import Model

LONGEST_PIPELINE = 64  # stages in all, of a pipeline that is looked at
RECOMPUTE = ("none", "selective", "full")  # less memory and more time from one to the next
KEPT_TOKENS = 2048  # at least so many of a sequence stay on a rank along "context"


@dataclass(frozen=True)
class Choice:
    """A layout that was found, and the nearest one that lost: what it changes, and why it lost."""

    estimate: Estimate
    loser: str

    def as_dict(self) -> dict:
        return self.estimate.as_dict() | {"nearest_alternative": self.loser}


@lru_cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def layouts(model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str,
            offload: bool = False) -> Iterator[Layout]:  # fmt: skip
    """Every layout that divides what it must divide. offload: those whose optimizer is in the host's memory."""
    gpus = cluster.gpus
    for tensor in divisors(gpus):
        if tensor > cluster.gpus_per_node or any(number % tensor for number in cut_by_tensor(model).values()):
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > min(model.layers, LONGEST_PIPELINE):
                continue
            for context in divisors(gpus // tensor // pipeline):
                if context > 1 and (sequence % (context * tensor) or sequence // context < KEPT_TOKENS):
                    continue
                rest = gpus // tensor // pipeline // context
                for expert in divisors(rest) if model.experts else (1,):
                    if model.experts % expert if expert > 1 else False:
                        continue
                    readers = rest
                    if batch_size % readers:
                        continue
                    axes = {"pipeline": pipeline, "context": context, "expert": expert, "tensor": tensor}
                    base = {"batch_size": batch_size, "sequence": sequence, "precision": precision}
                    yield from _with(model, cluster, axes, rest // expert, batch_size // readers, base, offload)


def _with(model, cluster, axes, copies, own, base, offload) -> Iterator[Layout]:
    """The layouts of these axes: how copies of the model are held, micro-batches, schedules, and recomputation."""
    pipeline, inner = axes["pipeline"], axes["context"] * axes["expert"] * axes["tensor"]
    divided = copies * axes["context"] * axes["expert"] > 1
    kinds = [(0, copies, 1)] if not offload else []  # (stage, data, shard)
    if divided:
        kinds += [(1, 1, copies)] + ([(2, 1, copies)] if pipeline == 1 else []) + [(3, 1, copies)]
        in_node = cluster.gpus_per_node // inner
        if cluster.nodes > 1 and 1 < in_node < copies and copies % in_node == 0:
            kinds.append((3, copies // in_node, in_node))
    elif offload:
        kinds.append((0, copies, 1))
    for stage, data, shard in kinds:
        mesh = tuple(
            (axis, size) for axis, size in (
                ("pipeline", pipeline), ("data", data), ("shard", shard), ("context", axes["context"]),
                ("expert", axes["expert"]), ("tensor", axes["tensor"]),
            )
        )  # fmt: skip
        micro = 1
        while own % micro == 0 and micro <= own and micro <= 32:
            many = own // micro
            for schedule, chunks in _schedules(model, pipeline, many):
                for recompute in RECOMPUTE:
                    yield Layout(
                        mesh=mesh, micro_batch=micro, zero_stage=stage, schedule=schedule, stages_per_rank=chunks,
                        recompute=recompute, offload=offload, **base,
                    )  # fmt: skip
            micro *= 2


def _schedules(model: Model, pipeline: int, many: int) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    found = [("1f1b", 1)] if many >= pipeline else [("gpipe", 1)] if many > 1 else []
    for chunks in (2, 4):
        stages = pipeline * chunks
        if stages <= min(model.layers, LONGEST_PIPELINE) and many >= pipeline and many % pipeline == 0:
            found.append(("interleaved", chunks))
    return found


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    seconds: float
    expected: float


def candidates(model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str, constants: Constants,
               offload: bool = False) -> list[Candidate]:  # fmt: skip
    """Each layout with its memory, and with its time where it could fit. Of those that differ in recomputation alone,
    what recomputes more is left out where less of it fits, and what recomputes less where more of it is far too much.
    """
    found = []
    room = cluster.gpu.memory
    every = layouts(model, cluster, batch_size, sequence, precision, offload)
    for alike in zip(*[every] * len(RECOMPUTE), strict=True):
        least = memory.estimate(model, alike[-1], constants)
        host = least.host * cluster.gpus_per_node > cluster.host_memory
        if least.low > 1.5 * room or host:
            found.append(Candidate(alike[-1], float("inf"), float("inf") if host else least.expected))
            continue
        for layout in alike:
            needed = least if layout is alike[-1] else memory.estimate(model, layout, constants)
            seconds = time.estimate(model, cluster, layout, constants, quick=True).seconds
            found.append(Candidate(layout, seconds, needed.expected))
            if needed.expected <= room:
                break
    return found


def plan(
    model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str = "bf16-mixed",
    max_memory_gib: float | None = None, count: int = 5, constants: Constants | None = None,
) -> list[Choice]:  # fmt: skip
    """The fastest layouts that fit, the best first. Raises UserError where none does, with the least memory that would
    do.

    max_memory_gib: of a GPU, if not all of what it has
    """
    constants = constants or load()
    cluster = limited(cluster, max_memory_gib)
    room = cluster.gpu.memory
    found = candidates(model, cluster, batch_size, sequence, precision, constants)
    fitting = [one for one in found if one.expected <= room]
    if not fitting:
        found += candidates(model, cluster, batch_size, sequence, precision, constants, offload=True)
        fitting = [one for one in found if one.expected <= room]
    if not found:
        sizes = (size for size in divisors(cluster.gpus) if any(layouts(model, cluster, size, sequence, precision)))
        raise UserError(
            f"--batch-size {batch_size} does not divide over {cluster.gpus} GPUs in any layout; take a multiple of "
            f"{next(sizes)}"
        )
    if not fitting:
        least = min(found, key=lambda one: one.expected)
        raise UserError(
            f"{model.name} does not fit {cluster.gpus} x {room / GIB:.1f} GiB: the smallest layout needs "
            f"{least.expected / GIB:.1f} GiB ({least.layout.describe()}); use more or larger GPUs, or a shorter "
            "--sequence"
        )
    fitting.sort(key=lambda one: one.seconds)
    best = [estimate(model, cluster, one.layout, constants) for one in fitting[: max(20, 4 * count)]]
    best.sort(key=lambda one: one.seconds)
    return [Choice(one, loser(one, found, room)) for one in best[:count]]


FIELDS = {"mesh": "mesh", "zero_stage": "ZeRO stage", "micro_batch": "micro-batch", "recompute": "recomputation",
          "stages_per_rank": "stages per rank"}  # fmt: skip


def loser(chosen: Estimate, found: list[Candidate], room: float) -> str:
    """The fastest layout that differs in one choice: what it changes, and why it is not better."""
    near = []
    for one in found:
        changed = [name for name in FIELDS if getattr(one.layout, name) != getattr(chosen.layout, name)]
        if len(changed) == 1 or (changed and set(changed) <= {"mesh", "zero_stage"}):
            near.append((one, changed))
    if not near:
        return "no layout differs in one choice only"
    faster = [(one, changed) for one, changed in near if one.expected > room and one.seconds < chosen.seconds]
    fits = [(one, changed) for one, changed in near if one.expected <= room]
    one, changed = min(faster or fits or near, key=lambda pair: pair[0].seconds)
    what = one.layout.describe()
    if one.expected > room:
        faster_by = f", {1 - one.seconds / chosen.seconds:.0%} faster" if one.seconds < chosen.seconds else ""
        return f"{what}{faster_by}: needs {one.expected / GIB:.1f} GiB"
    return f"{what}: {one.seconds / chosen.seconds - 1:+.0%} time"
