"""A layout as the launch command and the configuration file of a tool that trains: `python -m planner emit`.

What a tool cannot express is refused. Fields are those of Accelerate 1.15, DeepSpeed 0.19, Transformers 5.23, of
torchtitan's JobConfig in TOML (0.2.2: torchtitan/config/job_config.py), Megatron-LM's arguments (megatron/training/
arguments.py at d98e8a64) and nanotron's YAML (examples/config_tiny_llama.yaml at 2411b022). Each is read back by the
tool's own parser in tools/read_back.py, and the last three by `python -m planner explain` (planner/read_config.py).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from common.constants import GIB
from common.errors import UserError
from planner import as_course, train_file
from planner.estimate import Estimate
from planner.hardware import Cluster
from planner.layout import Layout
from planner.stages import layers_of_stages

COURSE = "distributed_training.py"  # the script of this repository
SCRIPT = "train.py"  # planner/train_file.py
JOB = "job.sbatch"


@dataclass(frozen=True)
class Emitted:
    """command: what starts the training, on each node; files: their texts by name; notes: what neither can say."""

    command: str
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)


def emit(found: Estimate, tool: str) -> Emitted:
    """The configuration of `tool`, one of FORMATS, for a layout that was estimated. Raises UserError for what it cannot
    express."""
    if found.layout.recompute_share < 1 and tool != "megatron":
        raise UserError(f"--format {tool}: it recomputes all layers or none; leave --recompute-layers out")
    if found.layout.whole_experts and found.layout.tensor > 1 and tool != "megatron":
        raise UserError(f"--format {tool}: it cuts experts along 'tensor'; leave --whole-experts out")
    if found.layout.ends and tool not in ("megatron", "torchtitan"):
        raise UserError(f"--format {tool}: it does not count embedding and head as layers; leave --ends out")
    if found.fits == "no":
        raise UserError(
            f"the layout needs {found.memory.expected / GIB:.1f} GiB per GPU, of {found.cluster.gpu.memory / GIB:.1f}; "
            "`python -m planner plan` finds one that fits"
        )
    try:
        return FORMATS[tool](found)
    except UserError as error:
        raise UserError(f"--format {tool}: {error}") from None


# --- what several have in common ------------------------------------------------------------------------------------


def predicted(found: Estimate) -> str:
    """A line for the head of a file."""
    c = found.constants
    return (
        f"{found.model.name} on {found.cluster.gpus} x {found.cluster.gpu.name}: {found.layout.describe()}; predicted "
        f"{found.memory.expected / GIB:.1f} GiB per GPU, {found.seconds:.3g} s a step ({found.seconds * c.step_low:.3g}"
        f" to {found.seconds * c.step_high:.3g})"
    )


def sizes(layout: Layout) -> dict[str, int]:
    """The sizes of the axes that are larger than one."""
    return {axis: size for axis, size in layout.mesh if size > 1}


def only(layout: Layout, tool: str, *axes: str) -> dict[str, int]:
    """The same, all of which the tool has."""
    found = sizes(layout)
    other = next((axis for axis in found if axis not in axes), None)
    if other:
        raise UserError(f"{tool} has no axis '{other}'={found[other]}; give another --mesh, or --format torchtitan")
    return found


def among(value: str, table: dict, what: str):
    if value not in table:
        raise UserError(f"it has no {what} '{value}'; take one of {', '.join(table)}")
    return table[value]


def ranks_per_node(cluster: Cluster) -> int:
    return min(cluster.gpus, cluster.gpus_per_node)


def torchrun_words(cluster: Cluster) -> str:
    nodes = f"--nnodes={cluster.nodes} --node_rank=$NODE --master_addr=$HOST --master_port=29500 "
    return f"torchrun {nodes if cluster.nodes > 1 else ''}--nproc_per_node={ranks_per_node(cluster)}"


def trained(found: Estimate, tool: str, command: str) -> tuple[dict[str, str], list[str]]:
    """The training file, and what a reader should know of it."""
    notes = [f"{SCRIPT} reads bytes of text; put your own tokens there, or a checkpoint's weights"]
    if found.cluster.gpu.processor:
        notes.append("should Transformers not find its model: PyPI's torchvision doesn't load beside a CPU-only torch, "
                     f"and {SCRIPT} needs none; uninstall it")  # fmt: skip
    if unlike := train_file.differences(found.model):
        notes.append(f"{SCRIPT} makes a model of this depth and width; {found.model.name} has {', '.join(unlike)}")
    return {SCRIPT: train_file.written(found, tool, command)}, notes


def in_yaml(settings: dict) -> str:
    import yaml  # not at the top: only who emits needs it

    return yaml.safe_dump(settings, sort_keys=False, width=math.inf)


def in_toml(tables: dict[str, dict]) -> str:
    import msgspec  # by tomli-w

    return msgspec.toml.encode(tables).decode()


# --- the tools ------------------------------------------------------------------------------------------------------


def torchrun(found: Estimate) -> Emitted:
    """This course's own script, whose command line reads the file here already."""
    settings = as_course.settings(found.model, found.layout) | as_course.shape(found.model, found.layout)
    text = f"# {predicted(found)}\n{in_yaml(settings)}"
    check(text)
    notes = []
    if unlike := as_course.differences(found.model):
        notes = [f"trains the course's GPT of this depth and width; {found.model.name} has {', '.join(unlike)}"]
    words = torchrun_words(found.cluster)
    return Emitted(f"{words} {COURSE} --distributed --config course.yaml", {"course.yaml": text}, notes)


def check(text: str) -> None:
    """Let the course's own command line read a configuration. Raises UserError for what it does not take."""
    import tempfile
    from pathlib import Path

    from common.command_line import parse
    from course.strategies import BY_AXES, STRATEGIES

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "course.yaml")
        path.write_text(text)
        try:
            parse(STRATEGIES, None, ["--dry-run", "--config", str(path)], BY_AXES)
        except UserError as error:
            raise UserError(str(error).replace(f"--config {path}: ", "")) from None


def slurm(found: Estimate) -> Emitted:
    """A job of sbatch that starts what `torchrun` starts, once on each node. launch/slurm.sbatch explains the lines,
    and can resume besides."""
    cluster, inner = found.cluster, torchrun(found)
    gpus = "" if cluster.gpu.processor else f"#SBATCH --gpus-per-node={ranks_per_node(cluster)}\n"
    job = (
        f"#!/bin/bash\n# {predicted(found)}\n#SBATCH --job-name={found.model.name}\n#SBATCH --nodes={cluster.nodes}\n"
        f"#SBATCH --ntasks-per-node=1\n{gpus}#SBATCH --time=01:00:00\n\n"
        'set -euo pipefail\nfirst=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)\n'
        "export OMP_NUM_THREADS=1\n"
        f'srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc_per_node={ranks_per_node(cluster)} \\\n'
        '    --rdzv_backend=c10d --rdzv_endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))" '
        '--rdzv_id="$SLURM_JOB_ID" \\\n    distributed_training.py --distributed --config course.yaml\n'
    )
    return Emitted(f"sbatch {JOB}", {JOB: job, **inner.files}, inner.notes)


def accelerate(found: Estimate) -> Emitted:
    """`accelerate launch --config_file`: DistributedDataParallel, or fully_shard and what it goes together with."""
    layout, cluster = found.layout, found.cluster
    # Transformers cuts a model along "tensor" only where it loads its weights, and train.py makes a new one.
    axes = only(layout, "Accelerate", "data", "shard", "context")
    mixed = among(layout.precision, {"float32": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}, "precision")
    settings: dict = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU" if cluster.gpus > 1 else "NO",
        "mixed_precision": mixed, "num_machines": cluster.nodes, "num_processes": cluster.gpus, "machine_rank": 0,
        "main_training_function": "main", "rdzv_backend": "static", "same_network": True,
        "use_cpu": cluster.gpu.processor,
    }  # fmt: skip
    if layout.zero_stage:
        if layout.zero_stage == 1:
            raise UserError("fully_shard divides gradients too; take --zero-stage 2 or 3, or --format deepspeed")
        recompute = among(layout.recompute, {"none": False, "full": True}, "recomputation")
        settings |= {"distributed_type": "FSDP", "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.zero_stage == 3, "fsdp_offload_params": layout.offload,
            "fsdp_activation_checkpointing": recompute, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }}  # fmt: skip
        if set(axes) - {"shard"}:
            if axes.get("shard", 1) == 1 and "data" in axes:
                raise UserError("beside other axes, 'data' needs an axis 'shard' larger than 1; give another --mesh")
            names = {"data": "dp_replicate", "shard": "dp_shard", "context": "cp"}
            settings["parallelism_config"] = {
                f"parallelism_config_{names[axis]}_size": axes.get(axis, 1) for axis in names
            }
    elif set(axes) - {"data", "shard"} or layout.offload:
        raise UserError("without fully_shard it has no axis but 'data', and no offload; take --zero-stage 3")
    else:
        among(layout.recompute, {"none": False, "full": True}, "recomputation")
    where = "--machine_rank $NODE --main_process_ip $HOST --main_process_port 29500 " if cluster.nodes > 1 else ""
    command = f"accelerate launch --config_file accelerate.yaml {where}{SCRIPT}"
    if cluster.gpu.processor:  # where `accelerate launch` starts one process, and `prepare` divides nothing
        if layout.zero_stage:
            raise UserError("on CPUs it replicates; take --zero-stage 0")
        command = f"{torchrun_words(cluster)} {SCRIPT}"
    files, notes = trained(found, "accelerate", command)
    return Emitted(command, {"accelerate.yaml": f"# {predicted(found)}\n{in_yaml(settings)}"} | files, notes)


def deepspeed_settings(found: Estimate) -> dict:
    layout = found.layout
    axes = only(layout, "DeepSpeed's configuration", "data", "shard")
    if layout.zero_stage and {"data", "shard"} <= set(axes):
        raise UserError("it divides state over all ranks; take data or shard alone, or --format accelerate")
    precision = among(layout.precision, {"float32": "", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}, "precision")
    zero: dict = {"stage": layout.zero_stage}
    if layout.zero_stage:
        zero |= {"overlap_comm": layout.overlap_gradients, "contiguous_gradients": True}
    if layout.offload:
        if not layout.zero_stage:
            raise UserError("it offloads the optimizer with ZeRO only; take --zero-stage 1, 2 or 3")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict = {
        "train_batch_size": layout.batch_size, "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches, "gradient_clipping": 1.0, "zero_optimization": zero,
    }  # fmt: skip
    if precision:
        settings[precision] = {"enabled": True}
    return settings


def deepspeed(found: Estimate) -> Emitted:
    """`deepspeed`, and the JSON that deepspeed.initialize reads."""
    settings, cluster = deepspeed_settings(found), found.cluster
    among(found.layout.recompute, {"none": False, "full": True}, "recomputation")
    nodes = f"--hostfile hostfile --num_nodes {cluster.nodes} " if cluster.nodes > 1 else ""
    command = f"deepspeed {nodes}--num_gpus {ranks_per_node(cluster)} {SCRIPT} --deepspeed_config deepspeed.json"
    files = {"deepspeed.json": json.dumps(settings, indent=2) + "\n"}
    if nodes:
        lines = (f"node{number} slots={ranks_per_node(cluster)}\n" for number in range(cluster.nodes))
        files["hostfile"] = "".join(lines)
    more, notes = trained(found, "deepspeed", command)
    return Emitted(command, files | more, notes)


def hf_trainer(found: Estimate) -> Emitted:
    """A JSON of TrainingArguments, which HfArgumentParser.parse_json_file reads."""
    layout = found.layout
    axes = only(layout, "the Trainer's file", "data", "shard")
    precision = among(layout.precision, {"float32": "", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}, "precision")
    recompute = among(layout.recompute, {"none": False, "full": True}, "recomputation")
    settings: dict = {
        "output_dir": "out", "per_device_train_batch_size": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches, "max_grad_norm": 1.0,
        "use_cpu": found.cluster.gpu.processor,
    }  # fmt: skip
    if precision:
        settings[precision] = True
    files = {}
    # "gradient_checkpointing" is the name that Transformers 4 has as well; 5.23 calls it "activation_checkpointing".
    if layout.zero_stage in (1, 2) or layout.offload:
        settings |= {"deepspeed": "deepspeed.json", "gradient_checkpointing": recompute}
        files["deepspeed.json"] = json.dumps(deepspeed_settings(found), indent=2) + "\n"
    elif layout.zero_stage == 3 and "shard" in axes:
        if "data" in axes:
            raise UserError("its file cannot replicate what it shards; take shard alone, or --format accelerate")
        # activation checkpointing by FSDP, not by the model, which would gather parameters once more
        more = {"version": 2, "reshard_after_forward": True, "activation_checkpointing": recompute}
        settings |= {"fsdp": True, "fsdp_config": more}
    else:
        settings["gradient_checkpointing"] = recompute
    command = f"{torchrun_words(found.cluster)} {SCRIPT}"
    more, notes = trained(found, "hf-trainer", command)
    return Emitted(command, files | more | {"training.json": json.dumps(settings, indent=2) + "\n"}, notes)


TITAN_MODELS = {
    "llama-3-8b": ("llama3", "8B"), "llama-3-70b": ("llama3", "70B"), "llama-3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"), "qwen3-32b": ("qwen3", "32B"),
}  # fmt: skip
TITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
    "interleaved-zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
TITAN_RECOMPUTE = {
    "none": {"mode": "none"}, "full": {"mode": "full"}, "operators": {"mode": "selective", "selective_ac_option": "op"},
    "every-second": {"mode": "selective", "selective_ac_option": "2"},
}  # fmt: skip


def torchtitan(found: Estimate) -> Emitted:
    """A TOML for its run_train.sh. Its ranks are numbered as the planner's are: pipeline, data, shard, context,
    tensor; experts are cut over ranks of "shard"."""
    model, layout, cluster = found.model, found.layout, found.cluster
    name, flavor = among(model.name, TITAN_MODELS, "model")
    precision = among(layout.precision, {"float32": "float32", "bf16-mixed": "bfloat16", "fp8-mixed": "bfloat16"},
                      "precision")  # fmt: skip
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise UserError("it has tensor parallelism together with sequence parallelism; leave --sequence-parallel out")
    if layout.zero_stage == 1 or (layout.zero_stage == 2 and layout.pipeline > 1):
        raise UserError(f"it has nothing like ZeRO-{layout.zero_stage} here; take --zero-stage 0 or 3")
    whole = layout.zero_stage == 0
    if whole and set(sizes(layout)) - {"data", "shard", "pipeline"}:
        raise UserError("it replicates over all ranks of a stage or shards; take --zero-stage 3")
    if not whole and layout.shards == 1 and layout.size("data") > 1:
        raise UserError("it shards along 'shard' or 'context'; give such an axis")
    replicas, shards = layout.size("data"), layout.size("shard") * layout.size("expert")
    parallelism: dict = {
        "data_parallel_replicate_degree": replicas * shards if whole else replicas,
        "data_parallel_shard_degree": 1 if whole else shards,
        "tensor_parallel_degree": layout.tensor,
        "pipeline_parallel_degree": layout.pipeline,
        "context_parallel_degree": layout.context,
    }
    if not whole:
        parallelism["fsdp_reshard_after_forward"] = "never" if layout.zero_stage == 2 else "always"
    if model.experts:
        parallelism["expert_parallel_degree"] = layout.size("expert")
    if layout.async_tensor:
        parallelism["enable_async_tensor_parallel"] = True
    local = layout.micro_batch
    if layout.pipeline > 1:
        local = layout.batch_size // layout.readers
        parallelism["pipeline_parallel_schedule"] = among(layout.schedule, TITAN_SCHEDULES, "schedule")
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
        for end in ("first", "last"):  # by default it counts the embedding and the output layer as a layer each
            parallelism[f"pipeline_parallel_{end}_stage_less_layers"] = int(layout.ends)
        if layout.stages_per_rank > 1:
            dealt = model.layers + 2 * layout.ends  # to one stage after the other
            each = -(-dealt // layout.stages)
            if -(-dealt // each) != layout.stages:
                ends = " and both ends" if layout.ends else ""
                raise UserError(f"{model.layers} layers{ends}, {each} to each stage, are fewer stages than "
                                f"{layout.stages}; take another --stages-per-rank")  # fmt: skip
            parallelism["pipeline_parallel_layers_per_stage"] = each
    compiled = ["model"] * layout.fused + ["loss"] * layout.fused_loss
    tables = {
        "model": {"name": name, "flavor": flavor, "converters": ["float8"] if "fp8" in layout.precision else []},
        "training": {
            "local_batch_size": local, "global_batch_size": layout.batch_size, "seq_len": layout.sequence,
            "mixed_precision_param": precision, "enable_cpu_offload": layout.offload,
        },
        "parallelism": parallelism,
        "activation_checkpoint": among(layout.kept, TITAN_RECOMPUTE, "recomputation"),
        "compile": {"enable": bool(compiled), "components": compiled or ["model", "loss"]},
    }  # fmt: skip
    command = f"{torchrun_words(cluster)} -m torchtitan.train --job.config_file torchtitan.toml"
    notes = ["torchtitan reads such a TOML up to 0.2.2; since 0.3 its configurations are Python"]
    return Emitted(command, {"torchtitan.toml": f"# {predicted(found)}\n{in_toml(tables)}"}, notes)


MEGATRON_PRECISION: dict[str, dict] = {
    "float32": {}, "bf16-mixed": {"bf16": ""}, "fp16-mixed": {"fp16": ""},
    "bf16-mixed-16": {"bf16": "", "grad-reduce-in-bf16": ""},
    "fp8-mixed": {"bf16": "", "fp8-format": "hybrid", "grad-reduce-in-bf16": ""},
    "mxfp8-mixed": {"bf16": "", "fp8-format": "e4m3", "fp8-recipe": "mxfp8", "grad-reduce-in-bf16": ""},
    "nvfp4-mixed": {"bf16": "", "fp4-format": "e2m1", "fp4-recipe": "nvfp4", "grad-reduce-in-bf16": ""},
}  # fmt: skip
MEGATRON_RECOMPUTE: dict[str, dict] = {
    "none": {}, "attention": {"recompute-granularity": "selective"},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}  # fmt: skip
MEGATRON_ZERO: dict[int, dict] = {
    0: {}, 1: {"use-distributed-optimizer": ""},
    2: {"use-megatron-fsdp": "", "data-parallel-sharding-strategy": "optim_grads", "use-distributed-optimizer": "",
        "ckpt-format": "fsdp_dtensor"},  # the one that it takes then
    3: {"use-megatron-fsdp": "", "data-parallel-sharding-strategy": "optim_grads_params",
        "use-distributed-optimizer": "", "ckpt-format": "fsdp_dtensor"},
}  # fmt: skip


def megatron_model(found: Estimate) -> dict:
    """Arguments for the shape of a model."""
    model, sequence = found.model, found.layout.sequence
    if model.attention is not None or model.parallel or model.dense_layers:
        raise UserError(f"its GPT has no attention or blocks like those of '{model.name}'; take another model")
    words = {
        "num-layers": model.layers, "hidden-size": model.width, "num-attention-heads": model.heads,
        "kv-channels": model.query // model.heads, "ffn-hidden-size": model.hidden, "seq-length": sequence,
        "max-position-embeddings": max(sequence, model.positions), "tokenizer-type": "NullTokenizer",
        "vocab-size": model.vocabulary, "make-vocab-size-divisible-by": 1,
    }  # fmt: skip
    if model.kv_heads:
        words |= {"group-query-attention": "", "num-query-groups": model.kv_heads}
    words |= {"position-embedding-type": "learned_absolute" if model.positions else "rope"}
    words |= {"swiglu": "", "normalization": "RMSNorm"} if model.mlp == "swiglu" else {}
    words |= {} if model.tied else {"untie-embeddings-and-output-weights": ""}
    words |= {"disable-bias-linear": ""} if model.bias == "none" else {}
    if model.experts:
        words |= {"num-experts": model.experts, "moe-router-topk": model.top_k, "moe-ffn-hidden-size":
                  model.expert_width, "moe-grouped-gemm": "", "moe-token-dispatcher-type": "alltoall"}  # fmt: skip
        if model.shared_experts:
            words["moe-shared-expert-intermediate-size"] = model.shared_experts * model.expert_width
    return words


def megatron(found: Estimate) -> Emitted:
    """Arguments of Megatron-LM's pretrain_gpt.py, with its own stand-in for data. Its ranks are numbered as the
    planner's are: tensor, context, expert, data, pipeline from the innermost on."""
    layout, cluster = found.layout, found.cluster
    axes = sizes(layout)
    stage = layout.zero_stage
    if stage >= 2 and layout.pipeline > 1:
        raise UserError(f"it has ZeRO-{stage} without a pipeline alone; take --zero-stage 0 or 1")
    if layout.offload:
        raise UserError("it has another way to offload than the planner counts; leave --offload out")
    if layout.pipeline > 1 and layout.schedule not in ("1f1b", "interleaved"):
        raise UserError(
            f"it has no schedule '{layout.schedule}'; take 1f1b, with --stages-per-rank where it has several"
        )
    dealt = layers_of_stages(found.model.layers, layout.stages, layout.ends)
    ends = len({*dealt}) > 1 or layout.ends
    if layout.pipeline > 1 and ends and len({dealt[0] + 1, *dealt[1:-1], dealt[-1] + 1}) > 1:
        raise UserError(
            f"it deals equally many layers to each stage, or counts embedding and head among them; {layout.stages} "
            f"divide neither {found.model.layers} nor {found.model.layers + 2}"
        )
    words: dict = megatron_model(found) | {
        "tensor-model-parallel-size": layout.tensor, "pipeline-model-parallel-size": layout.pipeline,
        "context-parallel-size": layout.context, "expert-model-parallel-size": layout.expert_ranks,
        "micro-batch-size": layout.micro_batch, "global-batch-size": layout.batch_size,
    }  # fmt: skip
    words |= {"expert-tensor-parallel-size": 1} if layout.whole_experts and layout.tensor > 1 else {}
    words |= MEGATRON_ZERO[stage] | among(layout.precision, MEGATRON_PRECISION, "precision")
    words |= among(layout.kept, MEGATRON_RECOMPUTE, "recomputation")
    if layout.recompute_share < 1:
        each = round(layout.recompute_share * found.model.layers / layout.stages)
        words |= {"recompute-method": "block", "recompute-num-layers": each}
    if layout.stages_per_rank > 1:
        words["num-layers-per-virtual-pipeline-stage"] = max(dealt[1:-1])
    if layout.pipeline > 1 and ends:
        words |= {"account-for-embedding-in-pipeline-split": "", "account-for-loss-in-pipeline-split": ""}
    if stage and axes.get("data", 1) > 1:
        words["num-distributed-optimizer-instances"] = axes["data"]
    if layout.tensor > 1 and layout.sequence_parallel:
        words["sequence-parallel"] = ""
    if layout.overlap_gradients:
        words |= {"overlap-grad-reduce": ""} | ({"overlap-param-gather": ""} if stage else {})
    words |= {"tp-comm-overlap": ""} if layout.async_tensor else {}
    words |= {"attention-backend": "flash" if layout.flash else "unfused"}
    rate = 0.1 if layout.dropout else 0.0
    words |= {"hidden-dropout": rate, "attention-dropout": rate, "clip-grad": 1.0, "lr": 3e-4, "train-iters": 100,
              "mock-data": "", "use-mcore-models": "", "transformer-impl": "transformer_engine"}  # fmt: skip
    start = torchrun_words(cluster).replace("_", "-")  # torchrun reads both
    lines = [f"    --{name}{f' {value}' if value != '' else ''}" for name, value in words.items()]
    # Which it asks for before Blackwell, so that messages start in the order of the kernels; beside Megatron-FSDP not.
    cut = (layout.tensor > 1 or layout.context > 1) and stage < 2
    head = f"#!/bin/bash\n# {predicted(found)}\n" + ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if cut else "")
    text = f"{head}{start} pretrain_gpt.py \\\n" + " \\\n".join(lines) + "\n"
    notes = ["megatron.sh starts in a checkout of NVIDIA/Megatron-LM; --mock-data is its stand-in for your tokens"]
    return Emitted("bash megatron.sh", {"megatron.sh": text}, notes)


def nanotron(found: Estimate) -> Emitted:
    """A YAML for nanotron's run_train.py."""
    model, layout, cluster = found.model, found.layout, found.cluster
    axes = only(layout, "nanotron", "pipeline", "data", "shard", "context", "expert", "tensor")
    own_heads = model.attention is not None or model.query != model.width
    if model.mlp != "swiglu" or model.bias != "none" or own_heads or model.dense_layers:
        raise UserError(
            f"it has the shapes of Llama and Qwen2 alone, and '{model.name}' is another; take another model"
        )
    stage = layout.zero_stage
    if stage > 1 or (stage and "data" in axes):
        raise UserError("it has ZeRO-1 over all its copies; take --zero-stage 0 or 1, and shard in place of data")
    if layout.offload or layout.schedule not in ("1f1b", "gpipe"):
        what = "offload" if layout.offload else f"schedule '{layout.schedule}'"
        raise UserError(f"it has no {what}; leave it out")
    precision = among(layout.precision, {"float32": ("float32", True), "bf16-mixed": ("bfloat16", True),
                                         "bf16": ("bfloat16", False)}, "precision")  # fmt: skip
    shape: dict = {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": model.width, "initializer_range":
        0.02, "intermediate_size": model.hidden, "is_llama_config" if not model.experts else "is_qwen2_config": True,
        "max_position_embeddings": layout.sequence, "num_attention_heads": model.heads, "num_hidden_layers":
        model.layers, "num_key_value_heads": model.kv_heads or model.heads, "pad_token_id": None, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": model.tied, "use_cache": True,
        "vocab_size": model.vocabulary,
    }  # fmt: skip
    if model.experts:
        shape["moe_config"] = {
            "num_experts": model.experts, "top_k": model.top_k, "moe_intermediate_size": model.expert_width,
            "enable_shared_expert": bool(model.shared_experts), "token_dispatcher_type": "alltoall",
        }  # fmt: skip
    settings: dict = {
        "checkpoints": {"checkpoint_interval": 1000, "checkpoints_path": "checkpoints",
                        "checkpoints_path_is_shared_file_system": False, "resume_checkpoint_path": None,
                        "save_initial_state": False},
        "general": {"ignore_sanity_checks": True, "project": "planner", "run": model.name, "seed": 42},
        "logging": {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"},
        "model": {"ddp_bucket_cap_mb": 25, "dtype": precision[0], "init_method": {"std": 0.02},
                  "make_vocab_size_divisible_by": 1, "model_config": shape},
        "optimizer": {
            "accumulate_grad_in_fp32": precision[1], "clip_grad": 1.0, "weight_decay": 0.01, "zero_stage": stage,
            "learning_rate_scheduler": {"learning_rate": 0.0003, "lr_decay_steps": 90, "lr_decay_style": "cosine",
                                        "lr_warmup_steps": 10, "lr_warmup_style": "linear", "min_decay_lr": 0.00003},
            "optimizer_factory": {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-08, "name": "adamW",
                                  "torch_adam_is_fused": True},
        },
        "parallelism": {
            "context_parallel_size": layout.context, "dp": layout.readers, "expert_parallel_size":
            layout.size("expert"), "pp": layout.pipeline, "pp_engine":
            {"1f1b": "1f1b", "gpipe": "afab"}[layout.schedule],
            "recompute_layer": among(layout.kept, {"none": False, "full": True}, "recomputation"), "tp": layout.tensor,
            "tp_linear_async_communication": layout.sequence_parallel,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        },
        "tokenizer": {"tokenizer_name_or_path": "gpt2", "tokenizer_max_length": None, "tokenizer_revision": None},
        "tokens": {"batch_accumulation_per_replica": layout.micro_batches, "micro_batch_size": layout.micro_batch,
                   "sequence_length": layout.sequence, "train_steps": 100, "val_check_interval": -1},
        "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": None, "seed": 42}}],
    }  # fmt: skip
    command = f"{torchrun_words(cluster)} run_train.py --config-file nanotron.yaml"
    if layout.tensor > 1:  # its messages overlap in the order in which they are started (tensor_parallel/functional.py)
        command = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {command}"
    notes = ["it trains on random tokens (dataset: null); run_train.py is that of a checkout of huggingface/nanotron"]
    return Emitted(command, {"nanotron.yaml": f"# {predicted(found)}\n{in_yaml(settings)}"}, notes)


FORMATS: dict[str, Callable[[Estimate], Emitted]] = {
    "torchrun": torchrun, "slurm": slurm, "accelerate": accelerate, "deepspeed": deepspeed, "hf-trainer": hf_trainer,
    "torchtitan": torchtitan, "megatron": megatron, "nanotron": nanotron,
}  # fmt: skip
# Of what a format's own framework holds and launches, where nobody names another with --framework.
FRAMEWORK_OF = {"megatron": "megatron", "nanotron": "nanotron"}
