"""What `planner emit` writes for each tool: a setting for each choice of the layout, for one machine and several."""

import json
from dataclasses import replace

import pytest
import yaml
from helpers import refused

from common.constants import GIB
from planner import models
from planner.emit import Emitted, emit
from planner.estimate import Estimate, estimate
from planner.hardware import cluster
from planner.layout import Layout, make_layout

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

READ = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}


def estimated(gpus: int, mesh: dict[str, int], gpu: str = "h100-80gb", model: str = "llama-3-8b", **fields) -> Estimate:
    nodes, shape = cluster(gpu, gpus, min(gpus, 8)), models.find(model)
    fields = {"batch_size": 64, "sequence": 2048} | fields
    return estimate(shape, nodes, make_layout(shape, nodes, mesh, **fields), max_memory_gib=2000)


def emitted(tool: str, gpus: int, mesh: dict[str, int], **fields) -> Emitted:
    return emit(estimated(gpus, mesh, **fields), tool)


def flat(settings: dict, before: str = "") -> dict:
    """Tables in tables as one: {"zero_optimization.stage": 3}."""
    found = {}
    for name, value in settings.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


FULL = {"recompute": "full", "sequence_parallel": False}
SETTINGS = [  # tool, GPUs, mesh, fields of the layout, and what the tool is told
    ("accelerate", 1, {}, {"precision": "float32"}, {
        "distributed_type": "NO", "mixed_precision": "no", "num_machines": 1, "use_cpu": False}),
    ("accelerate", 8, {"data": 8}, {"precision": "fp16"}, {
        "distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 8}),
    ("accelerate", 2, {"data": 2}, {"gpu": "cpu", "precision": "float32"}, {"use_cpu": True}),
    ("accelerate", 16, {"shard": 16}, {"zero_stage": 2, "offload": True}, {
        "num_machines": 2, "fsdp_config.fsdp_reshard_after_forward": False, "fsdp_config.fsdp_offload_params": True,
        "fsdp_config.fsdp_activation_checkpointing": False}),
    ("accelerate", 16, {"data": 2, "shard": 2, "context": 4}, {"zero_stage": 3} | FULL, {
        "fsdp_config.fsdp_reshard_after_forward": True, "fsdp_config.fsdp_activation_checkpointing": True,
        "fsdp_config.fsdp_offload_params": False, "parallelism_config.parallelism_config_dp_replicate_size": 2,
        "parallelism_config.parallelism_config_dp_shard_size": 2, "parallelism_config.parallelism_config_cp_size": 4}),
    ("deepspeed", 8, {"shard": 8}, {"zero_stage": 2, "precision": "fp16-mixed"} | FULL, {
        "fp16.enabled": True, "zero_optimization.overlap_comm": True, "gradient_accumulation_steps": 8,
        "train_micro_batch_size_per_gpu": 1}),
    ("deepspeed", 8, {"shard": 8}, {"zero_stage": 1, "overlap_gradients": False}, {
        "zero_optimization.overlap_comm": False, "bf16.enabled": True}),
    ("hf-trainer", 8, {"data": 8}, {"micro_batch": 2, "recompute": "full"}, {
        "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "bf16": True, "use_cpu": False,
        "gradient_checkpointing": True}),
    ("hf-trainer", 8, {"shard": 8}, {"zero_stage": 3, "offload": True, "precision": "fp16"}, {
        "deepspeed": "deepspeed.json", "fp16": True, "gradient_checkpointing": False}),
    ("torchtitan", 8, {"shard": 8}, {"zero_stage": 2, "offload": True, "fused": False, "recompute": "operators"}, {
        "parallelism.fsdp_reshard_after_forward": "never", "training.enable_cpu_offload": True,
        "compile.enable": False, "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op", "training.local_batch_size": 1}),
    ("torchtitan", 8, {"shard": 4, "tensor": 2}, {"zero_stage": 3, "precision": "fp8", "async_tensor": True,
                                                  "recompute": "every-second"}, {
        "parallelism.fsdp_reshard_after_forward": "always", "training.enable_cpu_offload": False,
        "compile.enable": True, "model.converters": ["float8"], "parallelism.enable_async_tensor_parallel": True,
        "training.mixed_precision_param": "bfloat16", "activation_checkpoint.selective_ac_option": "2"}),
    ("torchtitan", 384, {"data": 2, "shard": 4, "pipeline": 3, "context": 8, "tensor": 2}, {
        "zero_stage": 3, "micro_batch": 2, "sequence": 4096, "recompute": "full"}, {
        "parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 4,
        "parallelism.pipeline_parallel_degree": 3, "parallelism.context_parallel_degree": 8,
        "parallelism.tensor_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.pipeline_parallel_microbatch_size": 2, "training.local_batch_size": 8,
        "training.global_batch_size": 64, "activation_checkpoint.mode": "full", "model.flavor": "8B"}),
    *[("deepspeed", 16, {"shard": 16}, {"zero_stage": stage, "micro_batch": 2, "offload": True}, {
        "zero_optimization.stage": stage, "zero_optimization.offload_optimizer.device": "cpu",
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 64})
      for stage in (1, 2, 3)],
    ("hf-trainer", 8, {"shard": 8}, {"zero_stage": 3, "recompute": "full"}, {
        "fsdp": True, "fsdp_config.activation_checkpointing": True}),
    ("torchtitan", 8, {"data": 2, "shard": 2, "pipeline": 2}, {"schedule": "looped-bfs", "stages_per_rank": 2}, {
        "parallelism.data_parallel_replicate_degree": 4, "parallelism.data_parallel_shard_degree": 1,
        "parallelism.pipeline_parallel_schedule": "LoopedBFS", "training.local_batch_size": 16}),
]  # fmt: skip


@pytest.mark.parametrize("tool, gpus, mesh, fields, told", SETTINGS)
def test_each_choice_of_the_layout_is_a_setting(tool, gpus, mesh, fields, told):
    found = emitted(tool, gpus, mesh, **fields)
    name, text = list(found.files.items())[-1 if tool == "hf-trainer" else 0]
    settings = flat(READ[name.split(".")[-1]](text))
    assert {name: settings.get(name, "not there") for name in told} == told, f"what {tool} reads in {name}"


PLAIN, THREE = {"sequence_parallel": False}, {"zero_stage": 3}
REFUSED = [  # tool, GPUs, mesh, fields of the layout
    ("accelerate", 8, {"pipeline": 8}, {}),
    ("accelerate", 8, {"shard": 8}, {"zero_stage": 1}),
    ("accelerate", 8, {"tensor": 8}, {}),
    ("accelerate", 8, {"shard": 8}, {"recompute": "selective"} | THREE),
    ("accelerate", 8, {"data": 8}, {"precision": "fp8"}),
    ("accelerate", 16, {"data": 2, "context": 8}, THREE),
    ("accelerate", 8, {"data": 8}, {"offload": True}),
    ("accelerate", 8, {"data": 2, "tensor": 4}, PLAIN),
    ("deepspeed", 8, {"data": 8}, {"offload": True}),
    ("deepspeed", 8, {"data": 2, "shard": 4}, THREE),
    ("deepspeed", 8, {"shard": 4, "tensor": 2}, PLAIN),
    ("deepspeed", 8, {"context": 8}, {}),
    ("deepspeed", 8, {"data": 8}, {"recompute": "products"}),
    ("deepspeed", 8, {"data": 8}, {"precision": "bf16"}),
    ("hf-trainer", 8, {"tensor": 8}, PLAIN),
    ("hf-trainer", 8, {"data": 2, "shard": 4}, THREE),
    ("hf-trainer", 8, {"data": 8}, {"recompute": "selective"}),
    ("hf-trainer", 8, {"data": 8}, {"precision": "fp8"}),
    ("torchtitan", 8, {"data": 4, "pipeline": 2}, THREE),
    ("torchtitan", 8, {"data": 2, "tensor": 4}, {}),
    ("torchtitan", 8, {"shard": 4, "tensor": 2}, PLAIN | THREE),
    ("torchtitan", 8, {"shard": 8}, {"zero_stage": 1}),
    ("torchtitan", 8, {"pipeline": 2, "shard": 4}, {"zero_stage": 2}),
    ("torchtitan", 8, {"shard": 8}, {"precision": "fp16"} | THREE),
    ("torchtitan", 8, {"shard": 8}, {"model": "gpt2"} | THREE),
    ("torchtitan", 8, {"shard": 8}, {"recompute": "products"} | THREE),
    ("torchtitan", 8, {"pipeline": 8}, {"schedule": "zb-h1"}),
    ("torchrun", 8, {"shard": 2, "context": 4}, THREE),
    ("torchrun", 8, {"shard": 4, "tensor": 2}, {"zero_stage": 1}),
    ("torchrun", 8, {"shard": 4, "tensor": 2}, THREE),
    ("torchrun", 8, {"data": 8}, {"recompute": "every-second"}),
    ("torchrun", 8, {"data": 8}, {"precision": "fp8"}),
    ("slurm", 8, {"data": 8}, {"dropout": True}),
    ("torchrun", 8, {"tensor": 8}, {"async_tensor": True}),
    ("torchrun", 8, {"data": 8}, {"offload": True}),
]


@pytest.mark.parametrize("tool, gpus, mesh, fields", REFUSED)
def test_what_a_tool_has_not_is_refused(tool, gpus, mesh, fields):
    """In one line that names the tool, and the field or the axis or what to take instead."""
    found = estimated(gpus, mesh, **fields)
    if tool == "torchtitan" and fields == THREE:  # the command line takes such a mesh for one along "shard"
        found = replace(found, layout=Layout((*mesh.items(),), 64, zero_stage=3))
    with refused(f"--format {tool}") as error:
        emit(found, tool)
    said = str(error.value)
    there = (
        *mesh,
        *fields.values(),
        "--zero-stage",
        "--sequence-parallel",
        "--mesh",
        "--offload",
        "--dropout",
        "--async",
        "'shard'",
    )
    assert any(str(value) in said for value in there), said


def test_what_does_not_fit_is_not_emitted():
    found = estimated(8, {"data": 8})
    small = replace(found.cluster, gpu=replace(found.cluster.gpu, memory=10 * GIB))
    found = replace(found, cluster=small, memory=replace(found.memory, low=10.5 * GIB, expected=12.25 * GIB))
    with refused("12.2 GiB", "10.0", "`python -m planner plan`"):
        emit(found, "torchrun")
    assert emit(replace(found, memory=replace(found.memory, low=9 * GIB)), "torchrun").files, "it may fit"


def test_commands_name_nodes_where_there_are_several():
    where = "--machine_rank $NODE --main_process_ip $HOST --main_process_port 29500"
    several = "--nnodes=2 --node_rank=$NODE --master_addr=$HOST --master_port=29500"
    for tool, gpus, command in (
        ("accelerate", 8, "accelerate launch --config_file accelerate.yaml train.py"),
        ("accelerate", 16, f"accelerate launch --config_file accelerate.yaml {where} train.py"),
        ("hf-trainer", 8, "torchrun --nproc_per_node=8 train.py"),
        ("hf-trainer", 16, f"torchrun {several} --nproc_per_node=8 train.py"),
        ("deepspeed", 8, "deepspeed --num_gpus 8 train.py --deepspeed_config deepspeed.json"),
    ):
        assert emitted(tool, gpus, {"data": gpus}).command == command, f"{tool} on {gpus} GPUs"


def test_a_job_has_one_task_a_node_which_starts_the_others():
    job = emitted("slurm", 16, {"data": 16}).files["job.sbatch"].splitlines()
    asked = [line for line in job if line.startswith("#SBATCH") and "=0" not in line]
    assert asked[1:] == ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"]
    found = estimated(2, {"data": 2}, gpu="cpu", precision="float32")
    for name in ("cpu", "here"):  # the latter was measured by calibrate
        one = replace(found, cluster=replace(found.cluster, gpu=replace(found.cluster.gpu, name=name)))
        assert "--gpus-per-node" not in emit(one, "slurm").files["job.sbatch"], f"{name}: no GPUs are asked for"
        assert yaml.safe_load(emit(one, "accelerate").files["accelerate.yaml"])["use_cpu"], f"{name}: use_cpu"


def test_the_head_of_a_file_says_what_was_predicted():
    found = estimated(8, {"data": 8})
    c, (first, _) = found.constants, emit(found, "accelerate").files["accelerate.yaml"].split("\n", 1)
    words = "llama-3-8b", "8 x h100-80gb", found.layout.describe(), f"{found.memory.expected / GIB:.1f} GiB"
    times = (f"{found.seconds * factor:.3g}" for factor in (1.0, c.step_low, c.step_high))
    assert first.startswith("# ") and not [word for word in (*words, *times) if word not in first], first
    assert f"{found.memory.expected / GIB:.1f}" != f"{found.memory.needed / GIB:.1f}", "what the allocator adds shows"


# --- the course's own file ------------------------------------------------------------------------------------------
