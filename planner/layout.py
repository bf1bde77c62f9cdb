"""A layout: which ranks divide what, in which order they work, and what they keep. With all checks of its numbers."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from common.axes import AXES
from common.errors import UserError
from course.pipeline import schedules
from planner import adapters, frameworks
from planner.hardware import GPU, Cluster
from planner.models import Model
from planner.names import lookup

FRAMEWORK = "torch"  # of planner/frameworks.py: whose layouts are compared, if nothing else is said
RECOMPUTE = ("none", "selective", "attention", "operators", "products", "every-second", "full")
ATTENTION = ("flash2", "flash3", "cudnn")
STAGES = ("ddp", "zero1", "zero2", "fsdp")  # as chapter 06's formula names them, by ZeRO's stage
# Name -> bytes of (the computed type, one value of a message of gradients); the state is `recipe`'s.
PRECISIONS = {"float32": (4, 4), "bf16-mixed": (2, 4), "fp16-mixed": (2, 2), "fp8-mixed": (2, 4), "mxfp8-mixed": (2, 4),
              "nvfp4-mixed": (2, 4), "bf16": (2, 2), "bf16-12": (2, 2), "bf16-mixed-16": (2, 2)}  # fmt: skip
PRECISION_ALIASES = {"fp32": "float32", "bfloat16": "bf16", "mixed": "bf16-mixed", "fp16": "fp16-mixed",
                     "fp8": "fp8-mixed", "mxfp8": "mxfp8-mixed", "nvfp4": "nvfp4-mixed",
                     "bf16_mixed": "bf16-mixed"}  # fmt: skip
LOW = ("fp8-mixed", "mxfp8-mixed", "nvfp4-mixed")  # products of fewer than 16 bits


def recipe_of(precision: str, zero_stage: int, message: int = 4) -> str:
    """The key in chapter 06's BYTES. fully_shard keeps float32 shards, and gathers them in 16 bit.

    message: bytes of one value of the gradients that are sent, which are those that are kept
    """
    if precision in ("bf16", "float32"):
        return precision
    if precision == "bf16-12":
        return "bf16, float32 moments"
    if zero_stage == 3:
        return "float32"
    named = {"fp16-mixed": "mixed, two gradients", "bf16-mixed-16": "mixed"}
    return named.get(precision, "mixed" if message == 2 else "mixed, float32 gradients")


@dataclass(frozen=True)
class Layout:
    """How a training is spread over GPUs.

    mesh:        size of each of the six axes of common/mesh.py
    zero_stage:  0 (DDP) to 3 (FSDP): what ranks along "shard" divide; ranks along "context" hold parts of it as well
    batch_size:  sequences of a step, of all ranks; micro_batch: sequences that a rank computes at once
    recompute:   "none"; "attention" (Korthikanti et al. 2022, section 5); "operators" (torchtitan's selective: all but
                 attention and every second product again); "products" (this course's: all but matrix products);
                 "every-second" (every second layer); "full". "selective" is "operators" under stage 3, else "attention"
    recompute_share: of the layers, with "full"; the others are kept
    sequence_parallel: ranks along "tensor" cut norms and the residual stream along the sequence
    flash:       attention's matrix of scores is not stored
    dropout:     after attention and MLP
    fused:       element-wise work between products runs in fused kernels (torch.compile, or by hand)
    fused_loss:  logits and their gradient share memory
    overlap_gradients: gradients are reduced during the backward pass
    async_tensor: messages of tensor parallelism overlap with its products
    offload:     optimizer state and gradients in the host's memory, updated there
    attention:   kernel of fused attention: "" (what the framework uses), "flash2", "flash3" or "cudnn"
    balanced:    ranks along "context" have equal shares of attention's work, as in a zigzag
    framework:   a name of planner/frameworks.py, or "": by the ZeRO stage
    shard_context: ranks along "context" divide the state as well, as under torchtitan and Megatron-LM; in this course
                 they copy it
    lora:        rank of the adapters that are trained in place of the model (planner/adapters.py); 0: all is trained
    lora_on:     which linear layers of a block have an adapter, a name of planner/adapters.py's ON
    whole_experts: ranks along "tensor" have different experts, each whole, where they otherwise cut each of them
                 (Megatron-LM's --expert-tensor-parallel-size 1)
    ends:        embedding and head count as a layer each where layers are dealt out to a pipeline's stages; where each
                 stage has one, they have a stage for themselves
    nf4:         with them, the linear layers that are frozen are in 4 bits (QLoRA)
    """

    mesh: tuple[tuple[str, int], ...]
    batch_size: int
    micro_batch: int = 1
    sequence: int = 2048
    zero_stage: int = 0
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: str = "none"
    recompute_share: float = 1.0
    precision: str = "bf16-mixed"
    offload: bool = False
    sequence_parallel: bool = True
    flash: bool = True
    dropout: bool = False
    fused: bool = True
    fused_loss: bool = False
    overlap_gradients: bool = True
    async_tensor: bool = False
    shard_context: bool = True
    attention: str = ""
    balanced: bool = True
    whole_experts: bool = False
    framework: str = ""
    lora: int = 0
    lora_on: str = "all"
    nf4: bool = False
    ends: bool = False
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of each axis that is named."""
        return dict(self.mesh)

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    @cached_property
    def tensor(self) -> int:
        return self.size("tensor")

    @cached_property
    def pipeline(self) -> int:
        return self.size("pipeline")

    @cached_property
    def context(self) -> int:
        return self.size("context")

    @cached_property
    def readers(self) -> int:
        """Ranks that read different sequences."""
        return self.size("data") * self.size("shard") * self.size("expert")

    @cached_property
    def micro_batches(self) -> int:
        return self.batch_size // (self.readers * self.micro_batch)

    @cached_property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank along "context"."""
        return self.micro_batch * self.sequence / self.context

    @cached_property
    def kept(self) -> str:
        """`recompute` with "selective" said exactly."""
        return {"selective": "operators" if self.zero_stage == 3 else "attention"}.get(self.recompute, self.recompute)

    @cached_property
    def whole_again(self) -> float:
        """The share of the layers that are computed again from their input alone."""
        return {"full": self.recompute_share, "every-second": 0.5}.get(self.kept, 0.0)

    @cached_property
    def shards(self) -> int:
        """Ranks over which the state of what all of them use is divided, experts aside."""
        context = self.context if self.shard_context else 1
        return self.size("shard") * context * self.size("expert") if self.zero_stage else 1

    @cached_property
    def expert_shards(self) -> int:
        """Ranks over which the state of an expert is divided: along "expert", ranks have different ones."""
        return self.shards // self.size("expert") if self.zero_stage else 1

    @cached_property
    def expert_ranks(self) -> int:
        """Ranks among which experts are dealt out."""
        return self.size("expert") * (self.tensor if self.whole_experts else 1)

    @cached_property
    def copies(self) -> dict[str, int]:
        """Axes along which gradients are summed by an all-reduce, and their sizes; several that are one group count as
        "data"."""
        if self.zero_stage:
            found = {"data": self.size("data"), "context": 1 if self.shard_context else self.context}
        else:
            found = {"data": self.readers * self.context}
        return {axis: size for axis, size in found.items() if size > 1}

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a value that is computed with; products in 8 bit read and write 16."""
        return PRECISIONS[self.precision][0]

    @cached_property
    def message(self) -> int:
        """Bytes of one value of a message of gradients."""
        eight = self.precision in LOW and self.zero_stage < 3
        return frameworks.of(self).fp8_gradients if eight else PRECISIONS[self.precision][1]

    @cached_property
    def overlaps_tensor(self) -> bool:
        """Messages along "tensor" overlap with products."""
        return self.async_tensor or (self.precision in LOW and frameworks.of(self).fp8_overlaps)

    @cached_property
    def recipe(self) -> str:
        """The key in chapter 06's BYTES of what is trained. Adapters beside 16 bits are in float32, as peft's."""
        if self.lora and self.precision != "bf16":
            return "float32"
        return recipe_of(self.precision, self.zero_stage, self.message)

    def describe(self) -> str:
        """A short line: axes larger than one, stage, what is computed again."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh if size > 1) or "one GPU"
        stage = f", ZeRO-{self.zero_stage}" if self.zero_stage else ""
        if self.offload:
            stage += " with offload"
        plan = f", {self.schedule}" + (f" x {self.stages_per_rank}" if self.stages_per_rank > 1 else "")
        plan = plan if self.pipeline > 1 else ""
        adapters = f", {'QLoRA' if self.nf4 else 'LoRA'} of rank {self.lora}" if self.lora else ""
        share = f" in {self.recompute_share:.0%} of the layers" if self.recompute_share < 1 else ""
        adapters += f" on {self.lora_on}" if self.lora and self.lora_on != "all" else ""
        adapters += ", whole experts" if self.whole_experts and self.tensor > 1 else ""
        adapters += ", ends counted as layers" if self.ends else ""
        return f"{axes}{stage}{plan}, micro-batch {self.micro_batch}, recompute {self.recompute}{share}{adapters}"


def make_layout(model: Model, cluster: Cluster, mesh: dict[str, int], **fields) -> Layout:
    """The layout, checked against the model and the cluster. Raises UserError for what cannot work.

    mesh: axes and sizes; axes that are not named have size 1
    fields: of Layout; or recompute_layers in place of recompute_share: so many of a stage's layers are computed again
    """
    notes = list(fields.pop("notes", ()))
    some = fields.pop("recompute_layers", None)
    mesh = {axis: mesh.get(axis, 1) for axis in AXES}
    stage = fields.get("zero_stage", 0)
    if not 0 <= stage <= 3:
        raise UserError(f"--zero-stage must be 0, 1, 2 or 3, not {stage}")
    if stage and mesh["shard"] == 1 and mesh["context"] == 1 and mesh["data"] > 1:
        mesh["shard"], mesh["data"] = mesh["data"], 1
        notes.append(f"ZeRO-{stage} divides state along 'shard': data={mesh['shard']} is taken for it")
    precision = fields.get("precision", "bf16-mixed")
    fields["precision"] = PRECISION_ALIASES.get(precision, precision)
    lookup(fields["precision"], PRECISIONS, "precision")
    if cluster.gpu.processor:  # no context of CUDA, no buffers of NCCL
        fields.setdefault("framework", "torch")
    if fields.get("framework"):
        lookup(fields["framework"], frameworks.FRAMEWORKS, "framework")
    if fields.get("attention"):
        lookup(fields["attention"], dict.fromkeys(ATTENTION), "kernel of attention")
    lookup(fields.get("recompute", "none"), dict.fromkeys(RECOMPUTE), "kind of recomputation")
    lookup(fields.get("schedule", "1f1b"), schedules.SCHEDULES, "schedule")
    if fields.get("schedule", "1f1b") == "1f1b" and fields.get("stages_per_rank", 1) > 1:
        fields["schedule"] = "interleaved"
        notes.append(f"1f1b with {fields['stages_per_rank']} stages per rank is the schedule 'interleaved'")
    stages = mesh["pipeline"] * fields.get("stages_per_rank", 1)
    if mesh["pipeline"] > 1 and model.layers < stages <= model.layers + 2 and not fields.get("ends"):
        fields["ends"] = True
        notes.append(f"{stages} stages for {model.layers} layers: embedding and head have a stage for themselves")
    layout = Layout(mesh=tuple(mesh.items()), **fields, notes=tuple(notes))
    if some is not None:
        if some < 1 or layout.kept != "full":
            raise UserError(f"--recompute-layers {some}: give a number of at least 1, and --recompute full")
        layout = replace(layout, recompute_share=min(1.0, some * layout.stages / model.layers))
    check(model, cluster, layout)
    return layout


def usual_precision(gpu: GPU) -> str:
    """Mixed precision in the 16-bit type that the GPU computes in; float32 on a processor."""
    return "float32" if gpu.processor else "bf16-mixed" if gpu.bf16 else "fp16-mixed"


def computes(gpu: GPU, precision: str) -> None:
    """Raise UserError where the GPU has no instructions for a precision. (BLOOM's "bf16-mixed-16" was fp16.)"""
    if precision.startswith("bf16") and not gpu.bf16:
        raise UserError(f"--precision {precision}: {gpu.name} has no bfloat16; take fp16-mixed")
    if precision in LOW and not (gpu.low_peak(precision) or gpu.processor):
        bits = "4-bit" if "4" in precision else "such 8-bit" if "mx" in precision else "8-bit"
        raise UserError(f"--precision {precision}: {gpu.name} has no {bits} products; take {usual_precision(gpu)}")


def cut_by_tensor(model: Model, whole_experts: bool = False) -> dict[str, int]:
    """What ranks along "tensor" divide among them. Heads of keys and values are not copied, as in torchtitan, and in
    Megatron-LM before its core 0.16."""
    found = {"heads": model.heads, "kv-heads": model.kv_heads or model.heads, "mlp-width": model.hidden}
    return found | ({"expert-width": model.expert_width} if model.experts and not whole_experts else {})


def check_experts(model: Model, layout: Layout) -> None:
    if layout.size("expert") > 1 and not model.experts:
        raise UserError(f"expert={layout.size('expert')}: model '{model.name}' has no experts; take data or shard")
    if model.experts and model.experts % layout.expert_ranks:
        along = f" x tensor={layout.tensor}" if layout.expert_ranks > layout.size("expert") else ""
        raise UserError(f"expert={layout.size('expert')}{along} does not divide the model's {model.experts} experts")
    if layout.whole_experts and not model.experts:
        raise UserError(f"--whole-experts: model '{model.name}' has no experts; leave it out")
    if layout.whole_experts and not layout.sequence_parallel:
        raise UserError("--whole-experts: each rank along 'tensor' sends its own tokens to experts; leave "
                        "--sequence-parallel no out")  # fmt: skip


def check(model: Model, cluster: Cluster, layout: Layout) -> None:
    text = ",".join(f"{axis}={size}" for axis, size in layout.mesh if size > 1) or "of one rank"
    computes(cluster.gpu, layout.precision)
    world = math.prod(size for _, size in layout.mesh)
    if world != cluster.gpus:
        raise UserError(f"--mesh {text} is {world} GPU(s), and --gpus is {cluster.gpus}; make them equal")
    for what, number in cut_by_tensor(model, layout.whole_experts).items():
        if number % layout.tensor:
            raise UserError(f"tensor={layout.tensor} does not divide --{what} {number}; take a divisor of it")
    adapters.require(model, layout.lora, layout.lora_on, layout.nf4)
    if layout.nf4 and layout.tensor > 1:
        raise UserError(
            f"tensor={layout.tensor}: weights in 4 bits are not cut along 'tensor'; take shard, or no --nf4"
        )
    if layout.tensor > model.vocabulary:  # which is padded otherwise
        raise UserError(f"tensor={layout.tensor} is more than --vocabulary {model.vocabulary}; take fewer")
    check_experts(model, layout)
    if layout.pipeline == 1 and (layout.ends or layout.stages_per_rank > 1):
        what = "--ends" if layout.ends else f"--stages-per-rank {layout.stages_per_rank}"
        raise UserError(f"{what}: without a pipeline there are no stages to deal layers out to; leave it out")
    if layout.stages > model.layers + 2 * layout.ends:
        raise UserError(
            f"{layout.stages} stages (pipeline={layout.pipeline}, {layout.stages_per_rank} per rank) are more than "
            f"{model.layers} layers{', embedding and head' if layout.ends else ''}; take fewer"
        )
    for what, number in (("batch-size", layout.batch_size), ("micro-batch", layout.micro_batch),
                         ("sequence", layout.sequence), ("stages-per-rank", layout.stages_per_rank)):  # fmt: skip
        if number < 1:
            raise UserError(f"--{what} must be at least 1, not {number}")
    if layout.sequence % (layout.context * (layout.tensor if layout.sequence_parallel else 1)):
        raise UserError(f"context={layout.context} and tensor={layout.tensor} do not divide --sequence "
                        f"{layout.sequence}")  # fmt: skip
    if layout.batch_size % (layout.readers * layout.micro_batch):
        least = layout.readers * layout.micro_batch
        raise UserError(
            f"--batch-size {layout.batch_size} does not divide into {layout.readers} readers (data, shard, expert) "
            f"with micro-batches of {layout.micro_batch}; take a multiple of {least}"
        )
    if layout.pipeline > 1:
        stages = (
            None
            if schedules.SCHEDULES[layout.schedule].stages_per_rank == layout.stages_per_rank
            else (layout.stages_per_rank)
        )
        schedules.build(layout.schedule, layout.pipeline, rounds(layout), stages)


def rounds(layout: Layout) -> int:
    """So many micro-batches are enough to see a schedule's steady state; all where there are fewer, or where a
    schedule deals them out in rounds that would not be equal."""
    enough = 3 * layout.pipeline
    if layout.micro_batches <= enough:
        return layout.micro_batches
    uneven = schedules.SCHEDULES[layout.schedule].rounds and layout.micro_batches % layout.pipeline
    return layout.micro_batches if uneven else enough
