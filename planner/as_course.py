"""A layout as options of this course's distributed_training.py, for those layouts that one of its strategies has."""

from common.constants import VOCABULARY
from common.errors import UserError
from course.pipeline import schedules
from planner.layout import Layout
from planner.models import Model

PRECISION = {"float32": "fp32", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
RECOMPUTE = {"none": "none", "selective": "selective", "products": "selective", "full": "full"}


def settings(model: Model, layout: Layout) -> dict:
    """Options by their names in a YAML file. Raises UserError for what no strategy of the course has, as far as
    the command line does not refuse it anyway."""
    axes = {axis: size for axis, size in layout.mesh if size > 1}
    found: dict[str, str | int | bool] = {}
    stage = layout.zero_stage
    if stage == 0 and "shard" in axes:  # whole copies along both
        axes["data"] = axes.get("data", 1) * axes.pop("shard")
    if stage and "context" in axes and layout.shard_context:
        raise UserError("the course's ranks along 'context' copy the state; give a --mesh with --zero-stage 0")
    if stage and "expert" in axes:
        raise UserError("the course's ranks along 'expert' copy what all of them use; take --zero-stage 0")
    if stage in (1, 2) and "shard" in axes:
        if set(axes) != {"shard"}:
            raise UserError(f"the course has ZeRO-{stage} along 'shard' alone; take --zero-stage 3 or another --mesh")
        found["strategy"] = f"zero{stage}"
    if "tensor" in axes and layout.sequence_parallel:
        if set(axes) != {"tensor"}:
            raise UserError("the course has sequence parallelism along 'tensor' alone; add --sequence-parallel no")
        found |= {"strategy": "sequence", "by-hand": True}
    if "context" in axes:
        found["by-hand"] = True
    if model.experts:
        axes = {"data": 1, "expert": 1} | axes
        found |= {"strategy": "expert", "by-hand": True, "experts": model.experts, "top-k": model.top_k}
    require_known(layout)
    inner = {axis: axes[axis] for axis, _ in layout.mesh if axis in axes} or {"data": 1}
    found["mesh"] = ",".join(f"{axis}={size}" for axis, size in inner.items())
    found |= {"batch-size": layout.batch_size, "precision": PRECISION[layout.precision]}
    if layout.pipeline > 1:
        found |= {"microbatches": layout.micro_batches, "schedule": layout.schedule}
        stages = layout.stages_per_rank if layout.stages_per_rank > 1 else None
        found |= {"stages-per-rank": stages} if stages else {}
        lists = schedules.build(layout.schedule, layout.pipeline, layout.micro_batches, stages)
        if layout.recompute == "full" and "shard" not in axes and schedules.in_halves(lists):
            found["by-hand"] = True  # PyTorch's would compute each stage many times
    elif layout.micro_batches > 1:
        found["accumulation-steps"] = layout.micro_batches
    if layout.recompute != "none":
        found["recompute"] = RECOMPUTE[layout.recompute]
    if layout.offload:
        found["offload"] = True
    return found


def require_known(layout: Layout) -> None:
    """Raise UserError for what the course has on no mesh."""
    if layout.dropout or layout.async_tensor:
        what = "--dropout" if layout.dropout else "--async-tensor"
        raise UserError(f"the course's strategies have nothing like {what} yes; leave it out")
    if layout.recompute not in RECOMPUTE:
        raise UserError(f"the course does not recompute '{layout.recompute}'; take one of {', '.join(RECOMPUTE)}")
    if layout.precision not in PRECISION:
        raise UserError(f"the course has no precision '{layout.precision}'; take one of {', '.join(PRECISION)}")


def shape(model: Model, layout: Layout) -> dict:
    """The options that give the course's GPT a model's depth and width."""
    return {"layers": model.layers, "width": model.width, "heads": model.heads, "context": layout.sequence}


def differences(model: Model) -> list[str]:
    """In what a model is unlike the course's GPT of the same depth and width."""
    unlike = {
        f"a vocabulary of {model.vocabulary:,}, where the course's has {VOCABULARY}": model.vocabulary != VOCABULARY,
        "an MLP of three matrices": model.mlp != "gelu",
        f"an MLP {model.hidden:,} wide": not model.experts and model.hidden != 4 * model.width,
        f"{model.kv_heads} heads of keys and values": model.kv_heads not in (None, model.heads),
        "other positions": model.positions == 0,
    }
    return [what for what, is_so in unlike.items() if is_so]
