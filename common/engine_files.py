"""Settings of engines in files that somebody else may have written, as far as the course acts on them: DeepSpeed's
JSON, and the YAML of 06_fsdp/with_qlora.py. What else stands in them the engine itself judges.

Free of the engines, which take seconds to import, so that a file is refused before.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from common import stored
from common.errors import UserError

Count = Annotated[int, Meta(ge=0, le=10**9)]
Positive = Annotated[int, Meta(ge=1, le=10**9)]
Number = Annotated[float, Meta(ge=0, le=1e9)]


class Zero(Struct):
    stage: Annotated[int, Meta(ge=0, le=3)] = 0
    offload_optimizer: dict[str, Any] | UnsetType = UNSET


class Enabled(Struct):
    enabled: bool = False


class DeepSpeed(Struct):
    zero_optimization: Zero | UnsetType = UNSET
    bf16: Enabled | UnsetType = UNSET
    fp16: Enabled | UnsetType = UNSET
    train_batch_size: Positive | UnsetType = UNSET
    train_micro_batch_size_per_gpu: Positive | UnsetType = UNSET
    gradient_accumulation_steps: Positive | UnsetType = UNSET
    gradient_clipping: Number | UnsetType = UNSET
    optimizer: Any = UNSET
    scheduler: Any = UNSET


def deepspeed(path: str) -> dict[str, Any]:
    """DeepSpeed's settings in a JSON file. Raises UserError."""
    like = "DeepSpeed's are like those in configs/engines/zero3.json"
    try:
        file = Path(path)
        settings = stored.parsed(file, stored.read(file))
        if not isinstance(settings, dict) or not {*DeepSpeed.__struct_fields__} & {*settings}:
            raise UserError(f"{path}: these are no settings of DeepSpeed")
        stored.converted(file, settings, DeepSpeed, "")
    except UserError as error:
        raise UserError(f"--deepspeed-config {error}; {like}") from error
    return settings


class Training(Struct, forbid_unknown_fields=True):
    """accumulation_steps, warmup_steps and evaluate_every are numbers of steps or micro-batches; weight_decay and
    max_norm as PyTorch has them; at 0, evaluate_every is at the end alone."""

    lr: Number
    batch_size: Positive
    context: Positive
    steps: Positive
    seed: Count
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    accumulation_steps: Positive = 1
    warmup_steps: Count = 0
    lr_schedule: Literal["constant", "cosine"] = "constant"
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    weight_decay: Number = 0.0
    max_norm: Annotated[float, Meta(gt=0)] = float("inf")
    evaluate_every: Count = 0
    evaluation_batches: Positive = 4


class Qlora(Struct):
    """model: of transformers' LlamaConfig; lora: of peft's LoraConfig; fsdp: of Accelerate's plugin; quantization: of
    bitsandbytes' 4-bit layers, or nothing."""

    model: dict[str, Any]
    quantization: dict[str, Any] | None
    lora: dict[str, Any]
    fsdp: dict[str, Any]
    training: Training


def qlora(path: str) -> dict[str, Any]:
    """The settings in a YAML file, with `training` whole. Raises UserError."""
    try:
        file = Path(path)
        settings = stored.yaml_of(file, stored.read(file))
        found = stored.converted(file, settings, Qlora, "")
    except UserError as error:
        raise UserError(f"--config {error}; see configs/engines/fsdp_qlora.yaml") from error
    return settings | {"training": {name: getattr(found.training, name) for name in Training.__struct_fields__}}
