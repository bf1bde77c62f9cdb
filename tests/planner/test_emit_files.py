"""Whole files that `planner emit` writes: every setting of each tool, as the tool reads it."""

import json

import pytest
import yaml

from planner import models
from planner.emit import Emitted, emit
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

READ = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads, "hostfile": str.split}


def emitted(tool: str, gpus: int, mesh: dict[str, int], model: str = "llama-3-8b", **fields) -> Emitted:
    """Of a training with 64 sequences of 2,048 tokens a step, in nodes of eight GPUs."""
    nodes, shape = cluster("h100-80gb", gpus, min(gpus, 8)), models.find(model)
    layout = make_layout(shape, nodes, mesh, **({"batch_size": 64, "sequence": 2048} | fields))
    return emit(estimate(shape, nodes, layout, max_memory_gib=2000), tool)


ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 2,
    "num_processes": 16, "machine_rank": 0, "main_training_function": "main", "rdzv_backend": "static",
    "same_network": True, "use_cpu": False,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False, "fsdp_activation_checkpointing": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8,
        "parallelism_config_cp_size": 1, "parallelism_config_tp_size": 1,
    },
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
}  # fmt: skip
OFFLOADED = DEEPSPEED["zero_optimization"] | {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
TRAINER = {"output_dir": "out", "per_device_train_batch_size": 1, "max_grad_norm": 1.0, "use_cpu": False, "bf16": True}
TITAN = {
    "model": {"name": "deepseek_v3", "flavor": "671B", "converters": []},
    "training": {"local_batch_size": 1, "global_batch_size": 64, "seq_len": 2048, "mixed_precision_param": "bfloat16",
                 "enable_cpu_offload": False},
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 16, "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1, "context_parallel_degree": 1, "fsdp_reshard_after_forward": "always",
        "expert_parallel_degree": 4,
    },
    "activation_checkpoint": {"mode": "none"}, "compile": {"enable": True},
}  # fmt: skip
STAGES = TITAN | {
    "model": {"name": "llama3", "flavor": "8B", "converters": []},
    "training": TITAN["training"] | {"local_batch_size": 8},
    "parallelism": {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 8, "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 2, "context_parallel_degree": 1, "fsdp_reshard_after_forward": "always",
        "pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_layers_per_stage": 9,  # 32 and the two ends, over four stages
    },
}  # fmt: skip
COURSE = {"layers": 32, "width": 4096, "heads": 32, "context": 2048, "batch-size": 64, "precision": "bf16"}
THREE = {"zero_stage": 3}
FILES = [  # tool, GPUs, mesh, fields of the layout, and its files
    ("accelerate", 16, {"data": 2, "shard": 8}, THREE, {"accelerate.yaml": ACCELERATE}),
    ("accelerate", 16, {"shard": 16}, THREE, {
        "accelerate.yaml": {name: value for name, value in ACCELERATE.items() if name != "parallelism_config"}}),
    ("deepspeed", 16, {"shard": 16}, {"zero_stage": 2, "offload": True}, {
        "deepspeed.json": DEEPSPEED | {"zero_optimization": OFFLOADED},
        "hostfile": ["node0", "slots=8", "node1", "slots=8"]}),
    ("deepspeed", 8, {"data": 8}, {"precision": "float32"}, {
        "deepspeed.json": {
            "train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
            "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}}),
    ("hf-trainer", 8, {"shard": 8}, THREE, {
        "training.json": TRAINER | {"gradient_accumulation_steps": 8, "fsdp": True, "fsdp_config": {
            "version": 2, "reshard_after_forward": True, "activation_checkpointing": False}}}),
    ("hf-trainer", 16, {"shard": 16}, {"zero_stage": 2}, {
        "deepspeed.json": DEEPSPEED,
        "training.json": TRAINER | {"gradient_accumulation_steps": 4, "deepspeed": "deepspeed.json",
                                    "gradient_checkpointing": False}}),
    ("torchtitan", 16, {"shard": 4, "expert": 4}, {"model": "deepseek-v3"} | THREE, {"torchtitan.toml": TITAN}),
    ("torchtitan", 16, {"pipeline": 2, "shard": 8}, {
        "schedule": "interleaved", "stages_per_rank": 2, "micro_batch": 2} | THREE, {"torchtitan.toml": STAGES}),
    ("torchrun", 8, {"pipeline": 2, "data": 4}, {"recompute": "full"}, {
        "course.yaml": COURSE | {"mesh": "pipeline=2,data=4", "microbatches": 16, "schedule": "1f1b",
                                 "recompute": "full"}}),
    ("torchrun", 8, {"data": 8}, {"model": "llama-3.2-1b", "batch_size": 16}, {
        "course.yaml": {"layers": 16, "width": 2048, "heads": 32, "context": 2048, "batch-size": 16,
                        "precision": "bf16", "mesh": "data=8", "accumulation-steps": 2}}),
    ("torchrun", 8, {"shard": 8}, {"zero_stage": 1, "recompute": "selective"}, {
        "course.yaml": COURSE | {"strategy": "zero1", "mesh": "shard=8", "accumulation-steps": 8,
                                 "recompute": "selective"}}),
]  # fmt: skip


@pytest.mark.parametrize("tool, gpus, mesh, fields, files", FILES, ids=range(len(FILES)))
def test_files_are_whole(tool, gpus, mesh, fields, files):
    found = emitted(tool, gpus, mesh, **fields).files
    assert [*found] == [*files], f"files of {tool}"
    for name, expected in files.items():
        settings = READ[name.split(".")[-1]](found[name])
        assert settings == expected, f"what {tool} reads in {name} of {mesh}, {fields}"


JOB = """\
#SBATCH --job-name=llama-3-8b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 \\
    --rdzv_backend=c10d --rdzv_endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))" --rdzv_id="$SLURM_JOB_ID" \\
    distributed_training.py --distributed --config course.yaml
"""


def test_a_job_of_slurm_is_whole():
    found = emitted("slurm", 16, {"data": 16})
    first, _, rest = found.files["job.sbatch"].split("\n", 2)
    assert (first, rest) == ("#!/bin/bash", JOB), "job.sbatch"
    assert found.command == "sbatch job.sbatch" and [*found.files] == ["job.sbatch", "course.yaml"]


def test_commands_and_notes_are_whole():
    several = "torchrun --nnodes=2 --node_rank=$NODE --master_addr=$HOST --master_port=29500 --nproc_per_node=8"
    for tool, gpus, mesh, fields, command, notes in (
        ("torchtitan", 16, {"shard": 16}, THREE,
         f"{several} -m torchtitan.train --job.config_file torchtitan.toml", []),
        ("torchrun", 16, {"data": 16}, {}, f"{several} distributed_training.py --distributed --config course.yaml", [
            "trains the course's GPT of this depth and width; llama-3-8b has a vocabulary of 128,256, where the "
            "course's has 256, an MLP of three matrices, an MLP 14,336 wide, 8 heads of keys and values, other "
            "positions"]),
        ("deepspeed", 16, {"shard": 16}, {"zero_stage": 1, "recompute": "full"},
         "deepspeed --hostfile hostfile --num_nodes 2 --num_gpus 8 train.py --deepspeed_config deepspeed.json",
         ["in train.py: sequences of 2,048 tokens",
          "in train.py: model.gradient_checkpointing_enable(), for recomputation 'full'"]),
        ("hf-trainer", 16, {"shard": 16}, THREE, f"{several} train.py", [
            "in train.py: HfArgumentParser(TrainingArguments).parse_json_file('training.json'), and sequences of 2,048 "
            "tokens"]),
    ):  # fmt: skip
        found = emitted(tool, gpus, mesh, **fields)
        assert found.command == command, f"the command of {tool}"
        assert found.notes == notes, f"notes of {tool}"
