"""All layouts of a cluster that could work, the memory and time of each, and the best of them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from common.constants import GIB, RECOMPUTE
from common.errors import UserError
from planner import memory, scope, time
from planner.adapters import require
from planner.constants import Constants, load
from planner.estimate import Estimate, estimate, limited
from planner.hardware import Cluster
from planner.layout import FRAMEWORK, Layout, computes, cut_by_tensor
from planner.layout import RECOMPUTE as LEAST_AGAIN_FIRST
from planner.models import Model

LONGEST_PIPELINE = 64  # stages in all, of a pipeline that is looked at
KEPT_TOKENS = 2048  # at least so many of a sequence stay on a rank along "context"


@dataclass(frozen=True)
class Choice:
    """A layout that was found, and the nearest one that lost: what it changes, and why it lost. why: what was preferred
    in it, if it is not the fastest."""

    estimate: Estimate
    loser: str
    why: str = ""

    def as_dict(self) -> dict:
        return self.estimate.as_dict() | {"nearest_alternative": self.loser, "preferred": self.why}


@lru_cache
def divisors(number: int, most: int) -> tuple[int, ...]:
    """Those up to `most`."""
    return tuple(n for n in range(1, min(number, most) + 1) if number % n == 0)


def layouts(model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str,
            offload: bool = False, framework: str = FRAMEWORK,
            adapted: dict | None = None) -> Iterator[Layout]:  # fmt: skip
    """Every layout that divides what it must divide. offload: those whose optimizer is in the host's memory.
    framework: of all of them, since layouts are compared here, and not frameworks; adapted: `lora`, `lora_on` and `nf4`
    of all of them."""
    adapted = adapted or {}
    gpus = cluster.gpus
    if cluster.gpu.processor:
        framework = "torch"  # as make_layout has it
    for tensor in divisors(gpus, 1 if adapted.get("nf4") else cluster.gpus_per_node):
        if any(number % tensor for number in cut_by_tensor(model).values()):
            continue
        for pipeline in divisors(gpus // tensor, min(model.layers, LONGEST_PIPELINE)):
            for context in divisors(gpus // tensor // pipeline, max(1, sequence // KEPT_TOKENS)):
                if context > 1 and sequence % (context * tensor):
                    continue
                rest = gpus // tensor // pipeline // context
                for expert in divisors(rest, max(1, model.experts)):
                    if expert > 1 and model.experts % expert:
                        continue
                    readers = rest
                    if batch_size % readers:
                        continue
                    axes = {"pipeline": pipeline, "context": context, "expert": expert, "tensor": tensor}
                    base = {
                        "batch_size": batch_size,
                        "sequence": sequence,
                        "precision": precision,
                        "framework": framework,
                        **adapted,
                    }
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
    worst: float

    def recommended(self, limit: float) -> bool:
        """With the default reserve, whatever the framework's recipe is."""
        return scope.recommended(self.expected, self.worst, limit)


def candidates(model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str, constants: Constants,
               offload: bool = False, framework: str = FRAMEWORK,
               adapted: dict | None = None) -> list[Candidate]:  # fmt: skip
    """Each layout with its memory, and with its time where it could fit. Of those that differ in recomputation alone,
    what recomputes more is left out where less of it fits, and what recomputes less where more of it is far too much.
    """
    found = []
    room = cluster.gpu.memory
    every = layouts(model, cluster, batch_size, sequence, precision, offload, framework, adapted)
    for alike in zip(*[every] * len(RECOMPUTE), strict=True):
        least = memory.estimate(model, alike[-1], constants)
        host = least.host * cluster.gpus_per_node > cluster.host_memory
        if least.low > 1.5 * room or host:
            found.append(Candidate(alike[-1], float("inf"), *[float("inf") if host else least.expected] * 2))
            continue
        for layout in alike:
            needed = least if layout is alike[-1] else memory.estimate(model, layout, constants)
            seconds = time.estimate(model, cluster, layout, constants, quick=True).seconds
            found.append(Candidate(layout, seconds, needed.expected, needed.worst))
            if found[-1].recommended(room):
                break
    return found


def simplicity(layout: Layout) -> tuple[int, ...]:
    """Less is simpler: ranks along "tensor", for which layers have to be written, then axes beside copies and shards,
    then how much of the state is divided, how much is computed again, and how many micro-batches a step has. Ranks
    along "tensor" stand first for another reason as well: in each published source that compares layouts, these cost
    more against the others than the planner says. So do small micro-batches, in two sources of three.
    """
    beside = sum(layout.size(axis) > 1 for axis in ("pipeline", "context", "expert", "tensor"))
    again = LEAST_AGAIN_FIRST.index(layout.recompute)
    return layout.tensor, beside + layout.offload, layout.zero_stage, again, -layout.micro_batch


def tied(one: float, fastest: float, error: float) -> bool:
    """Whether the planner can't tell the seconds of one layout from those of the fastest. error: how far off it is for
    one of them; a ratio of two is off by sqrt(2) times as much where their errors have nothing to do with each other.
    """
    return one <= (1 + math.sqrt(2) * error) * fastest


def plan(
    model: Model, cluster: Cluster, batch_size: int, sequence: int, precision: str = "bf16-mixed",
    max_memory_gib: float | None = None, count: int = 5, constants: Constants | None = None,
    accept: Callable[[Estimate], bool] = lambda _: True, framework: str = FRAMEWORK, adapted: dict | None = None,
) -> list[Choice]:  # fmt: skip
    """What can be trusted comes first: layouts in scope that leave the reserve of memory. Of these, first the simplest
    that the planner cannot tell from the fastest, since its own error is larger; then the fastest. If
    a layout out of scope is predicted to be faster still, it has the last place. Raises UserError where none fits, with
    the least memory that would do.

    max_memory_gib: of a GPU, if not all of what it has
    adapted:        `lora`, `lora_on` and `nf4`, as in Layout
    accept:         whether a layout comes into question, for instance for a tool that has to express it
    """
    constants = constants or load()
    computes(cluster.gpu, precision)
    require(model, **adapted or {})
    cluster = limited(cluster, max_memory_gib)
    room = cluster.gpu.memory
    found = candidates(model, cluster, batch_size, sequence, precision, constants, framework=framework, adapted=adapted)

    def fit_in(found):
        return [one for one in found if one.expected <= room]

    fitting = fit_in(found)
    if not fitting:
        found += candidates(model, cluster, batch_size, sequence, precision, constants, True, framework, adapted)
        fitting = fit_in(found)
    if not found:
        sizes = (
            size
            for size in divisors(cluster.gpus, cluster.gpus)
            if any(layouts(model, cluster, size, sequence, precision))
        )
        raise UserError(
            f"--batch-size {batch_size} does not divide over {cluster.gpus} GPUs in any layout; take a multiple of "
            f"{next(sizes)}"
        )
    if not fitting:
        least = min(found, key=lambda one: one.expected)
        raise UserError(
            f"{model.name} does not fit {cluster.gpus} x {room / GIB:.1f} GiB: the smallest layout needs "
            f"{least.expected / GIB:.1f} GiB ({least.layout.describe()}); use more or larger GPUs, or a "
            "shorter sequence"
        )
    fitting.sort(key=by_time)

    def inside(layout: Layout) -> bool:
        return not scope.reasons(model, cluster, layout)

    groups = [
        [one for one in fitting if one.recommended(room) is roomy and inside(one.layout) is trusted]
        for roomy in (True, False)
        for trusted in (True, False)
    ]
    kept = int(count > 1 and bool(groups[0] and groups[1]) and by_time(groups[1][0]) < by_time(groups[0][0]))
    chosen: list[Choice] = []
    for number, group in enumerate(groups):
        most = count - len(chosen) - (kept if number == 0 else 0)
        chosen += preferred(model, cluster, group, found, most, constants, accept, inside) if most else []
    if not chosen:
        raise UserError(f"none of the {len(fitting)} layouts that fit can be expressed; name one with --mesh")
    return chosen


def by_time(one: "Estimate | Candidate") -> float:
    """To sort by: seconds to nine digits, so that two layouts that take equally long stand in the same order wherever
    the last digit is rounded otherwise, as it is in a browser."""
    return float(f"{one.seconds:.9g}")


def preferred(model, cluster, fitting, found, count, constants, accept, inside) -> list[Choice]:
    """The choices of a plan among some of the layouts that fit, which are sorted by their time. inside: whether a
    layout is in scope."""
    room = cluster.gpu.memory
    best: list[Estimate] = []
    simple: dict = {}  # by simplicity, the fastest
    for one in fitting:
        near = best and tied(one.seconds, best[0].seconds, constants.error)
        if len(best) >= max(20, 4 * count) and (not near or simplicity(one.layout) in simple):
            if not near:
                break
            continue  # a faster one of its kind is there already
        exact = estimate(model, cluster, one.layout, constants)
        if accept(exact):
            best.append(exact)
            simple.setdefault(simplicity(one.layout), exact)
    if not best:
        return []
    best.sort(key=by_time)
    fastest = best[0]
    same = [one for one in best if tied(one.seconds, fastest.seconds, constants.error)]
    first = min(same, key=lambda one: (simplicity(one.layout), by_time(one)))
    why = ""
    if first is not fastest:
        why = (
            f"the simplest of those that it can't tell from the fastest, being off by {constants.error:.0%} for each: "
            f"{first.seconds / fastest.seconds - 1:+.1%} to {fastest.layout.describe()}"
        )
    chosen = [first, *(one for one in best if one is not first)][:count]
    return [Choice(one, loser(one, found, room, inside), why if one is first else "") for one in chosen]


FIELDS = {"mesh": "mesh", "zero_stage": "ZeRO stage", "micro_batch": "micro-batch", "recompute": "recomputation",
          "stages_per_rank": "stages per rank"}  # fmt: skip


def loser(chosen: Estimate, found: list[Candidate], room: float, inside: Callable[[Layout], bool]) -> str:
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
    one, changed = min(faster or fits or near, key=lambda pair: by_time(pair[0]))
    what = one.layout.describe()
    if one.expected > room:
        faster_by = f", {1 - one.seconds / chosen.seconds:.0%} faster" if one.seconds < chosen.seconds else ""
        return f"{what}{faster_by}: needs {one.expected / GIB:.1f} GiB"
    but = ""
    if one.seconds < chosen.seconds:
        but = ", but nearly full" if not one.recommended(room) else "" if inside(one.layout) else ", but out of scope"
    return f"{what}: {one.seconds / chosen.seconds - 1:+.0%} time{but}"
