"""Configurations of other tools as what the planner asks for: model, mesh, batch, what is kept. `planner explain FILE`.

Read are Hugging Face's config.json, torchtitan's TOML, Megatron-LM's arguments (also in a shell script), nanotron's
YAML, DeepSpeed's and Accelerate's configuration, this course's YAML, and TrainingArguments as JSON. What a file
doesn't say is left out, and comes from the command line.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.axes import parse_axes
from common.config import shared
from common.errors import UserError
from planner import models
from planner.emit import TITAN_SCHEDULES
from planner.models import Model

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None  # type: ignore[assignment]  # said where a TOML is given


@dataclass
class Config:
    """What a file says.

    mesh:   sizes of axes; -1 for what is left of the GPUs; "reading" is data or shard, whatever the stage says
    layout: fields of planner.layout.Layout
    local:  sequences of a rank and step that the file gives in place of the batch of all ranks
    many:   micro-batches of a step, where it gives these in place of their size
    notes:  what could not be read, or is a risk as it stands
    """

    kind: str
    model: Model | None = None
    mesh: dict[str, int] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    gpus: int | None = None
    local: int | None = None
    many: int | None = None
    notes: list[str] = field(default_factory=list)


def number(table: dict, name: str, otherwise: int | None = None, least: int = 1) -> int | None:
    """A whole number of a table. Raises UserError that names the field."""
    value = table.get(name)
    if value is None or value == "auto":
        return otherwise
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)) or int(value) < least:
        raise UserError(f"{name}: expected a whole number of at least {least}, not {value!r}")
    return int(value)


def refuse_too_large(table: Any, name: str = "") -> None:
    """Raise UserError, which names the field, for a number that no memory and no time can be computed of."""
    inside = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in inside:
        refuse_too_large(value, f"{name}.{key}".strip("."))
    if re.fullmatch(r"-?\d{16,}", str(table) if isinstance(table, str) or type(table) is int else ""):
        raise UserError(f"{name}: {str(table)[:20]}... is too large")


def inner(table: dict, name: str) -> dict:
    """A table in a table; empty where it is not there."""
    found = table.get(name) or {}
    if not isinstance(found, dict):
        raise UserError(f"{name}: expected a table, not {found!r}")
    return found


def known(**fields) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# --- the tools --------------------------------------------------------------------------------------------------------


# Kinds whose output layer is the embedding where the file does not say (the defaults of transformers 5.23).
TIED = {"bert", "bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2",
        "gpt_bigcode", "mpt", "opt", "smollm3", "starcoder2"}  # fmt: skip


def hugging_face(table: dict) -> Config:
    """A model's config.json. GPT-2's, OPT's and DBRX's own names are read too, and nanotron's for mixtures."""
    for name in ("text_config", "attn_config", "ffn_config", "moe_config"):  # what stands outside wins
        table = inner(table, name) | table

    def one(*names, **more):
        return next((found for name in names if (found := number(table, name)) is not None), more.get("otherwise"))

    kind = str(table.get("model_type", "")).lower()
    width, heads = one("hidden_size", "n_embd", "d_model"), one("num_attention_heads", "n_head", "n_heads")
    layers, vocabulary = one("num_hidden_layers", "n_layer", "n_layers"), one("vocab_size")
    needed = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": vocabulary}
    if missing := [name for name, value in needed.items() if value is None]:
        raise UserError(f"{', '.join(missing)} missing; needed is the config.json that lies beside a model's weights")
    gelu = kind in ("gpt2", "opt", "gpt_neox", "bloom", "gpt_bigcode", "bert", "falcon", "phi", "starcoder2")
    experts = one("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", otherwise=0)
    fields = known(
        kv_heads=one("num_key_value_heads", "kv_n_heads"), head_width=one("head_dim"),
        mlp_width=one("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
        positions=one("n_positions", "max_position_embeddings") if kind in ("gpt2", "opt", "bert") else None,
        context=one("n_positions", "max_position_embeddings", "max_seq_len"),
    )  # fmt: skip
    if experts:
        shared = one("n_shared_experts", otherwise=1 if table.get("enable_shared_expert") else None)
        fields |= known(experts=experts, top_k=one("num_experts_per_tok", "moe_top_k", "top_k", otherwise=1),
                        expert_width=one("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
                        shared_experts=shared, dense_layers=one("first_k_dense_replace"))  # fmt: skip
    tied = bool(table.get("tie_word_embeddings", kind in TIED))
    model = Model(kind or "config.json", layers, width, heads, vocabulary, mlp="gelu" if gelu else "swiglu", tied=tied,
                  bias="all" if gelu else "none", source="config.json", **fields)  # fmt: skip
    parallel = table.get(
        "use_parallel_residual", table.get("parallel_attn", kind in ("gpt_neox", "gptj", "cohere", "phi"))
    )
    model = replace(model, parallel=bool(parallel))
    notes = [] if table.get("kv_lora_rank") is None else ["attention with latent keys is counted as plain attention"]
    return Config("Hugging Face config.json", model, notes=notes)


TITAN_SCHEDULE = {theirs.lower(): ours for ours, theirs in TITAN_SCHEDULES.items()}


def torchtitan(table: dict) -> Config:
    shape, training, parallel = inner(table, "model"), inner(table, "training"), inner(table, "parallelism")
    name = f"{shape.get('name', '')}-{shape.get('flavor', '')}".lower().replace("llama3", "llama-3")
    name = name.replace("deepseek_v3-671b", "deepseek-v3")
    notes, model = [], None
    if name in models.MODELS or name in models.ALIASES:
        model = models.find(name)
    else:
        notes.append(f"model '{name}' is none of the planner's; give --model")
    degree = {axis: number(parallel, f"{axis}_parallel_degree", 1, least=-1) or 1
              for axis in ("tensor", "pipeline", "context")}  # fmt: skip
    degree["data"] = number(parallel, "data_parallel_replicate_degree", 1) or 1
    degree["shard"] = number(parallel, "data_parallel_shard_degree", -1, least=-1) or 1
    expert = number(parallel, "expert_parallel_degree", 1) or 1
    again = inner(table, "activation_checkpoint")
    mode, how = again.get("mode", "selective"), str(again.get("selective_ac_option", "2"))
    recompute = {"none": "none", "full": "full"}.get(mode, "operators" if how == "op" else "every-second")
    whole = degree["shard"] == 1 and degree["context"] == 1
    compiled = inner(table, "compile")
    compiles = bool(compiled.get("enable", compiled.get("compile", False)))
    what = compiled.get("components", ["model", "loss"])
    local = number(training, "local_batch_size", number(training, "batch_size", 1)) or 1
    micro = number(parallel, "pipeline_parallel_microbatch_size", 1) if degree["pipeline"] != 1 else local
    stage = 0 if whole else 2 if parallel.get("fsdp_reshard_after_forward") == "never" else 3
    layout = known(
        zero_stage=stage, recompute=recompute, micro_batch=micro, sequence=number(training, "seq_len", 2048),
        batch_size=number(training, "global_batch_size", None, least=-1), offload=training.get("enable_cpu_offload"),
        precision="fp8-mixed" if "float8" in str(shape.get("converters", "")) else
        {"float32": "float32"}.get(str(training.get("mixed_precision_param")), "bf16-mixed"),
        fused=compiles and "model" in what, fused_loss=compiles and "loss" in what,
        async_tensor=parallel.get("enable_async_tensor_parallel"), framework="torch",
    )  # fmt: skip
    if layout.get("batch_size", 1) < 1:
        del layout["batch_size"]
    if degree["pipeline"] > 1:
        schedule = str(parallel.get("pipeline_parallel_schedule", "1F1B"))
        layout["schedule"] = TITAN_SCHEDULE.get(schedule.lower(), schedule.lower())
        each = number(parallel, "pipeline_parallel_layers_per_stage")
        names = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
        ends = sum(number(parallel, name, 1, least=0) or 0 for name in names)  # layers for which both ends count
        layout["ends"] = ends > 0
        if each and model:
            layout["stages_per_rank"] = max(1, -(-(model.layers + ends) // each) // degree["pipeline"])
        elif layout["schedule"] not in ("1f1b", "gpipe"):
            layout["stages_per_rank"] = 2
    if expert > 1:  # ranks of "shard" are those of "expert" too; -1 is what these leave
        degree["shard"], degree["expert"] = max(1, degree["shard"] // expert) if degree["shard"] > 0 else -1, expert
    return Config("torchtitan", model, degree, layout, local=local, notes=notes)


def words_of(text: str) -> dict[str, str]:
    """--name value pairs of a command, a shell script, or a file of arguments; an option without a value is ""."""
    found: dict[str, str] = {}
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", "", text))
    variables = dict(re.findall(r"(?m)^\s*(?:export\s+)?(\w+)=(\d+)\s*$", text))
    for name, value in re.findall(r"(--[a-z][\w-]+)(?:[= \t]+(?!--)([^\s()]+))?", text):
        value = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), value.strip("\"'"))
        found[name[2:].replace("_", "-")] = value
    return found


def megatron_precision(table: dict) -> str:
    """Its name here. 16-bit gradients beside 16-bit products are a precision of their own."""
    if "fp4-format" in table:
        return "nvfp4-mixed"
    if "fp8-format" in table or "fp8-hybrid" in table:
        return "mxfp8-mixed" if table.get("fp8-recipe") == "mxfp8" else "fp8-mixed"
    if "bf16" in table:
        return "bf16-mixed-16" if "grad-reduce-in-bf16" in table else "bf16-mixed"
    return "fp16-mixed" if "fp16" in table else "float32"


def whole_experts(table: dict, mesh: dict, one: Callable) -> bool:
    """Whether ranks along "tensor" have different experts, which are among its expert ranks then. mesh: its sizes, of
    which "expert" is made what the planner calls so."""
    tensor, expert = mesh["tensor"] or 1, mesh["expert"] or 1
    if tensor == 1 or one("expert-tensor-parallel-size", tensor) != 1 or "num-experts" not in table:
        return False
    if expert % tensor:
        raise UserError(f"expert-model-parallel-size: {expert} is no multiple of tensor-model-parallel-size {tensor}; "
                        "the planner counts experts that all tensor ranks share, or none")  # fmt: skip
    mesh["expert"] = expert // tensor
    return True


def megatron_stage(table: dict) -> int:
    if table.keys() & {"use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp"}:
        divided = {"no_shard": 0, "optim": 1, "optim_grads": 2}
        return divided.get(str(table.get("data-parallel-sharding-strategy")), 3)
    return 1 if "use-distributed-optimizer" in table else 0


def megatron_stages(table: dict, layers: int, pipeline: int, each: int | None) -> dict:
    """How layers are dealt out to the stages of a pipeline, as fields of a layout. each: so many to each stage, where a
    rank has several. One end that counts as a layer for itself is taken for both."""
    ends = any(f"account-for-{end}-in-pipeline-split" in table for end in ("embedding", "loss"))
    found: dict = {"ends": True} if ends else {}
    if each:
        found |= {"schedule": "interleaved", "stages_per_rank": max(1, (layers + 2 * ends) // pipeline // each)}
    return found


def megatron(table: dict) -> Config:
    """table: arguments without their dashes."""

    def one(name, otherwise=None):
        if str(table.get(name, "")).startswith("$"):
            return otherwise
        return number(table, name, otherwise)

    layers, width, heads = one("num-layers"), one("hidden-size"), one("num-attention-heads")
    model = None
    gated = "swiglu" in table
    if layers and width and heads:
        experts = one("num-experts", 0)
        fields = known(kv_heads=one("num-query-groups") if "group-query-attention" in table else None,
                       mlp_width=one("ffn-hidden-size"), head_width=one("kv-channels"))  # fmt: skip
        if experts:
            fields |= known(experts=experts, top_k=one("moe-router-topk", 2),
                            expert_width=one("moe-ffn-hidden-size", one("ffn-hidden-size", 4 * width)))  # fmt: skip
            shared = one("moe-shared-expert-intermediate-size", 0)
            fields |= {"shared_experts": -(-shared // fields["expert_width"])} if shared else {}
        rotary = table.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in table
        model = Model(
            "Megatron's", layers, width, heads, one("vocab-size", 51200), mlp="swiglu" if gated else "gelu",
            positions=0 if rotary else one("max-position-embeddings", 0),
            tied="untie-embeddings-and-output-weights" not in table,
            bias="none" if "disable-bias-linear" in table else "all", source="Megatron-LM's arguments", **fields,
        )  # fmt: skip
    names = {"tensor": "tensor-model", "pipeline": "pipeline-model", "context": "context", "expert": "expert-model"}
    mesh = {axis: one(f"{name}-parallel-size", 1) for axis, name in names.items()}
    whole = whole_experts(table, mesh, one)
    stage = megatron_stage(table)
    if (copies := one("num-distributed-optimizer-instances", 1)) > 1:
        mesh["data"] = copies
    granular = table.get("recompute-granularity", "full" if "recompute-activations" not in table else "selective")
    recompute = {"full": "full", "selective": "attention"}.get(granular, "none")
    if not table.keys() & {"recompute-granularity", "recompute-activations"}:
        recompute = "none"
    layout = known(
        zero_stage=stage, recompute=recompute, micro_batch=one("micro-batch-size", 1),
        batch_size=one("global-batch-size"), sequence=one("seq-length"),
        precision=megatron_precision(table),
        sequence_parallel="sequence-parallel" in table,
        dropout=str(table.get("hidden-dropout", "0.1")) not in ("0", "0.0"),
        flash=str(table.get("attention-backend")) not in ("unfused", "local")
        and bool(table.keys() & {"use-flash-attn", "attention-backend", "transformer-impl"}),
        async_tensor="tp-comm-overlap" in table, whole_experts=whole,
        overlap_gradients="overlap-grad-reduce" in table, framework="megatron",
    )  # fmt: skip
    if table.get("recompute-method") == "block" and recompute == "full":
        layout |= known(recompute_layers=one("recompute-num-layers"))
    if layers and (mesh["pipeline"] or 1) > 1:
        layout |= megatron_stages(table, layers, mesh["pipeline"] or 1, one("num-layers-per-virtual-pipeline-stage"))
        if (chunks := one("num-virtual-stages-per-pipeline-rank", 1)) > 1:
            layout |= {"schedule": "interleaved", "stages_per_rank": chunks}
    nodes, local = one("nnodes", 1), one("nproc-per-node")
    notes = []
    if schedule := re.findall(r":(\d+)", str(table.get("step-batch-size-schedule", ""))):
        layout.setdefault("batch_size", int(schedule[-1]))
        notes.append("--step-batch-size-schedule: the last size is taken")
    if model and "vocab-size" not in table:
        notes.append("--vocab-size is missing, since the tokenizer says it: 51,200 is taken, which is GPT-2's, padded")
    if layout["precision"] == "float32":
        notes.append("neither --bf16 nor --fp16: Megatron-LM trains in float32")
    if (mesh["tensor"] or 1) > 1 and not layout["sequence_parallel"]:
        notes.append("--sequence-parallel is missing: each tensor rank keeps whole activations of norms and dropout")
    sizes = {axis: size or 1 for axis, size in mesh.items()}
    return Config("Megatron-LM", model, sizes | {"reading": -1}, layout, (nodes or 1) * local if local else None,
                  notes=notes)  # fmt: skip


def nanotron(table: dict) -> Config:
    shape, parallel, tokens = (
        inner(inner(table, "model"), "model_config"),
        inner(table, "parallelism"),
        inner(table, "tokens"),
    )
    optimizer = inner(table, "optimizer")
    stage = number(optimizer, "zero_stage", 0, least=0) or 0
    mesh = {"reading": number(parallel, "dp", 1) or 1, "pipeline": number(parallel, "pp", 1) or 1,
            "tensor": number(parallel, "tp", 1) or 1, "context": number(parallel, "context_parallel_size", 1) or 1,
            "expert": number(parallel, "expert_parallel_size", 1) or 1}  # fmt: skip
    mesh["reading"] = max(1, mesh["reading"] // mesh["expert"])
    micro, many = number(tokens, "micro_batch_size", 1) or 1, number(tokens, "batch_accumulation_per_replica", 1) or 1
    readers = mesh["reading"] * mesh["expert"]
    dtype = str(inner(table, "model").get("dtype", "bfloat16"))
    layout = known(
        zero_stage=stage, micro_batch=micro, batch_size=readers * micro * many,
        sequence=number(tokens, "sequence_length", 2048), sequence_parallel=parallel.get("tp_mode") == "REDUCE_SCATTER",
        precision={"float32": "float32", "float16": "fp16-mixed"}.get(
            dtype, "bf16-mixed" if optimizer.get("accumulate_grad_in_fp32", True) else "bf16"),
        schedule={"afab": "gpipe"}.get(str(parallel.get("pp_engine", "1f1b")).lower(), "1f1b"),
        recompute="full" if parallel.get("recompute_layer") else "none", framework="nanotron",
    )  # fmt: skip
    gpus = readers * mesh["pipeline"] * mesh["tensor"] * mesh["context"]
    return Config("nanotron", hugging_face(shape).model if shape else None, mesh, layout, gpus)


def deepspeed(table: dict) -> Config:
    zero = inner(table, "zero_optimization")
    stage = number(zero, "stage", 0, least=0) or 0
    if stage > 3:
        raise UserError(f"zero_optimization.stage: expected 0 to 3, not {stage}")
    on = [kind for kind in ("bf16", "fp16") if inner(table, kind).get("enabled") in (True, "auto")]
    offload = inner(zero, "offload_optimizer").get("device", "none") != "none"
    notes = []
    if inner(zero, "offload_param").get("device", "none") != "none" and not offload:
        notes.append("parameters offloaded without the optimizer: the planner has no such layout, and ignores it")
    if offload and inner(zero, "offload_optimizer").get("device") == "nvme":
        notes.append("offload to NVMe is counted as offload to the host's memory, which is faster")
    if len(on) > 1 and "auto" not in (inner(table, "bf16").get("enabled"), inner(table, "fp16").get("enabled")):
        raise UserError("bf16 and fp16 are both enabled; take one")
    layout = known(
        zero_stage=stage, batch_size=number(table, "train_batch_size"), offload=offload or None,
        micro_batch=number(table, "train_micro_batch_size_per_gpu"),
        precision={"bf16": "bf16-mixed", "fp16": "fp16-mixed"}[on[0]] if on else "float32",
        overlap_gradients=zero.get("overlap_comm"),
    )  # fmt: skip
    many = number(table, "gradient_accumulation_steps", 1) or 1
    local = layout["micro_batch"] * many if "micro_batch" in layout else None
    tensor = number(inner(table, "tensor_parallel"), "autotp_size", 1) or 1
    mesh = {"reading": -1} | ({"tensor": tensor} if tensor > 1 else {})
    if '"auto"' in json.dumps(table):
        notes.append("'auto' is filled in by the Trainer; give those values as options")
    return Config("DeepSpeed", None, mesh, layout, local=local, many=many, notes=notes)


FILE = "what deepspeed_config_file says"


def with_file(file: Path, table: dict) -> dict:
    """Accelerate's table, with what stands in a DeepSpeed JSON that it names. Raises UserError if that isn't there."""
    found = table.get("deepspeed_config")
    if not isinstance(found, dict) or "deepspeed_config_file" not in found:
        return table
    name = str(found["deepspeed_config_file"])
    there = next((path for path in (file.parent / name, Path(name)) if path.is_file()), None)
    if there is None:
        raise UserError(f"deepspeed_config.deepspeed_config_file: {name} is not there, and it says the stage")
    from common import stored

    within = parsed(there, stored.read(there))
    if not isinstance(within, dict):
        raise UserError(f"{name} has no names and values")
    return table | {"deepspeed_config": found | {FILE: within}}


def accelerate(table: dict) -> Config:
    gpus, kind = number(table, "num_processes", 1), str(table.get("distributed_type", "NO"))
    mixed = str(table.get("mixed_precision", "no"))
    layout: dict[str, Any] = {"precision": {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp8": "fp8-mixed"}.get(
        mixed, "float32"), "zero_stage": 0}  # fmt: skip
    notes, mesh = [], {"reading": -1}
    if kind == "FSDP":
        fsdp, axes = inner(table, "fsdp_config"), inner(table, "parallelism_config")
        strategy = str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
        keeps = fsdp.get("fsdp_reshard_after_forward") is False or strategy in ("SHARD_GRAD_OP", "2")
        layout["zero_stage"] = 0 if strategy in ("NO_SHARD", "3") else 2 if keeps else 3
        layout["offload"] = fsdp.get("fsdp_offload_params") is True
        layout["recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") is True else "none"
        sizes = {axis: number(axes, f"parallelism_config_{name}_size", 1) or 1 for axis, name in (
            ("data", "dp_replicate"), ("context", "cp"), ("tensor", "tp"))}  # fmt: skip
        mesh |= {axis: size for axis, size in sizes.items() if size > 1}
        if strategy.startswith("HYBRID"):
            notes.append(f"{strategy} copies the model in each node; counted as sharded over all ranks")
    elif kind == "DEEPSPEED":
        found = inner(table, "deepspeed_config")
        if FILE in found:  # which says the rest, precision too
            return replace(deepspeed(found[FILE]), kind="Accelerate", gpus=gpus)
        layout["zero_stage"] = number(found, "zero_stage", 2, least=0) or 0
        layout["offload"] = found.get("offload_optimizer_device", "none") not in ("none", None)
        notes.append("gradient accumulation is the script's") if "gradient_accumulation_steps" not in found else None
    elif kind not in ("MULTI_GPU", "NO", "MULTI_CPU"):
        raise UserError(
            f"distributed_type: '{kind}' is none that the planner reads; it has NO, MULTI_GPU, FSDP, DEEPSPEED"
        )
    return Config("Accelerate", None, mesh, layout, gpus, notes=notes)


def trainer(table: dict) -> Config:
    words, more = str(table.get("fsdp") or ""), inner(table, "fsdp_config")  # a list of words, or yes (since 5)
    keeps = more.get("reshard_after_forward") is False or "shard_grad_op" in words
    layout = {
        "zero_stage": 0 if not words or "no_shard" in words else 2 if keeps else 3, "offload": "offload" in words,
        "micro_batch": number(table, "per_device_train_batch_size", 8),
        "precision": "bf16-mixed" if table.get("bf16") else "fp16-mixed" if table.get("fp16") else "float32",
        "recompute": "full" if table.get("gradient_checkpointing") or more.get("activation_checkpointing") else "none",
    }  # fmt: skip
    many = number(table, "gradient_accumulation_steps", 1) or 1
    local = many * (number(table, "per_device_train_batch_size", 8) or 8)
    notes = ["its DeepSpeed JSON says the rest: explain that one"] if table.get("deepspeed") else []
    return Config("TrainingArguments", None, {"reading": -1}, layout, local=local, notes=notes)


def course(table: dict) -> Config:
    """What the file leaves out is what the command line takes where it is left out there."""
    chosen: dict[str, Any] = {name: str(table.get(name) or "") for name in ("strategy", "implementation", "mesh")}
    chosen["by_hand"] = table.get("by-hand")
    # Here, since in a browser, which has no msgspec and no PyTorch, only what others wrote is read.
    from common.command_line import by_mesh, find, implementation_of, with_preset
    from course.pipeline import schedules
    from course.strategies import BY_AXES, STRATEGIES

    name = chosen["strategy"] or by_mesh(chosen, STRATEGIES, BY_AXES, None) or "ddp"
    entry = find(STRATEGIES, name)
    kind = entry.declared(implementation_of(name, entry, chosen))
    table = {item.name.replace("_", "-"): item.default for item in (*shared(), *fields(kind.Options))} | table
    axes = with_preset(parse_axes(chosen["mesh"]) if chosen["mesh"] else {}, kind.preset)
    precisions = {"fp32": "float32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
    if str(table["precision"]) not in precisions:
        raise UserError(f"precision: expected one of {', '.join(precisions)}, got {table['precision']!r}")
    schedule, needed = str(table.get("schedule", "")), None
    if schedule in schedules.SCHEDULES:  # stages on each of, say, two ranks
        needed = len({action.stage for own in schedules.build(schedule, 2, 4) for action in own}) // 2
    kept, again = str(table.get("recompute", "none")), {"selective": "products"}  # as common/recompute.py has it
    layout = known(
        zero_stage={"zero1": 1, "zero2": 2}.get(name, 3 if axes.get("shard", 1) != 1 else 0),
        batch_size=number(table, "batch-size"), sequence=number(table, "context"), recompute=again.get(kept, kept),
        schedule=schedule or None, offload=table.get("offload"),
        stages_per_rank=number(table, "stages-per-rank", least=0) or needed,
        precision=precisions[str(table["precision"])],
        sequence_parallel=name == "sequence", framework="course", shard_context=False,
    )  # fmt: skip
    model = models.course_gpt(*(number(table, what) or 1 for what in ("layers", "width", "heads", "context")))
    if "experts" in table:
        experts, top_k = (number(table, what) or 1 for what in ("experts", "top-k"))
        model = replace(model, experts=experts, top_k=top_k, expert_width=model.hidden)
    many = number(table, "microbatches" if "pipeline" in axes else "accumulation-steps")
    return Config("this course", model if table["task"] == "text" else None, axes, layout, many=many)


KINDS: tuple[tuple[Callable[[dict], bool], Callable[[dict], Config]], ...] = (
    (lambda t: "zero_optimization" in t or "train_micro_batch_size_per_gpu" in t or "train_batch_size" in t, deepspeed),
    (lambda t: "distributed_type" in t or "compute_environment" in t, accelerate),
    (lambda t: "per_device_train_batch_size" in t, trainer),
    (lambda t: "tokens" in t and "parallelism" in t, nanotron),
    (lambda t: "parallelism" in t or "activation_checkpoint" in t or isinstance(t.get("training"), dict), torchtitan),
    (lambda t: "hidden_size" in t or "n_embd" in t or "d_model" in t, hugging_face),
    (lambda t: "batch-size" in t or "mesh" in t or "strategy" in t, course),
    (lambda t: bool({"num-layers", "tensor-model-parallel-size", "micro-batch-size"} & set(t)), megatron),
)


def read(path: str) -> Config:
    """What the file says. Raises UserError that names the file, and the field."""
    from common import stored  # and packages that a browser lacks, where a config.json is read as a table

    file = Path(path)
    data = stored.read(file)
    is_yaml = file.suffix in (".yaml", ".yml")
    table = stored.yaml_of(file, data) if is_yaml else None
    try:
        table = megatron_arguments(table) if is_yaml else parsed(file, data)
        if not isinstance(table, dict):
            raise UserError("has no names and values")
        table = with_file(file, table)
        refuse_too_large(table)
        kind = next((reader for fits, reader in KINDS if fits(table)), None)
        if kind is None:
            raise UserError("no configuration that the planner knows: config.json, torchtitan, Megatron-LM, nanotron, "
                            "DeepSpeed, Accelerate, TrainingArguments, or this course's")  # fmt: skip
        return kind(table)
    except UserError as error:
        raise UserError(f"{path}: {stored.printable(str(error)[:500])}") from error


def megatron_arguments(table: Any) -> Any:
    """Those of one of Megatron-LM's functional tests; of another YAML, what it says."""
    if isinstance(table, dict) and isinstance(table.get("MODEL_ARGS"), dict):
        return {str(name).lstrip("-"): value for name, value in table["MODEL_ARGS"].items() if value is not False}
    return table


def parsed(file: Path, data: bytes) -> Any:
    try:
        text = data.decode()
        if file.suffix == ".json":
            return json.loads(text)
        if file.suffix == ".toml":
            if tomllib is None:
                raise UserError("TOML is read by Python 3.11 and later")
            return tomllib.loads(text)
        return words_of(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is no valid {file.suffix[1:].upper()}: {str(error).splitlines()[0]}") from error


__all__ = ["Config", "read"]
