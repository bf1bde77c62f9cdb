"""What `python -m planner emit` writes, read back by the tools themselves: Accelerate, DeepSpeed and Transformers, and
two steps trained of each kind of layout that plans for ten models with three limits of memory lead to. The Python that
runs this needs them.

    python -m tools.read_back
"""

import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common.vision  # noqa: F401  first: transformers imports torchvision

# isort: split
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from deepspeed.launcher.runner import fetch_hostfile
from deepspeed.launcher.runner import parse_args as parse_deepspeed
from deepspeed.runtime import config as deepspeed_config
from transformers import HfArgumentParser, TrainingArguments

from common import ROOT
from common.errors import UserError
from planner import models, search
from planner.emit import Emitted, emit
from planner.estimate import Estimate, estimate
from planner.hardware import cluster
from planner.layout import Layout, make_layout
from planner.models import find


def written(folder: Path, tool: str, gpus: int, mesh: dict, gpu: str = "h100-80gb", **fields) -> Emitted:
    """Files of a Llama 3 8B on so many GPUs, in the folder, which becomes the current one."""
    os.chdir(folder)
    nodes = cluster(gpu, gpus, min(gpus, 8))
    model = find("llama-3-8b")
    fields = {"batch_size": 64, "sequence": 4096, "recompute": "full", "sequence_parallel": False} | fields
    found = emit(estimate(model, nodes, make_layout(model, nodes, mesh, **fields), max_memory_gib=1000), tool)
    for name, text in found.files.items():
        Path(name).write_text(text)
    return found


def same(what: str, found, expected) -> None:
    if found != expected:
        raise AssertionError(f"{what}: the tool reads {found!r}, and the layout has {expected!r}")
    print(f"{what}: {found}")


def accelerate(folder: Path) -> None:
    for gpus, mesh, stage in (
        (8, {"data": 8}, 0), (8, {"shard": 8}, 3), (8, {"shard": 8}, 2), (16, {"data": 2, "shard": 8}, 3),
        (16, {"data": 2, "shard": 4, "context": 2}, 3),
    ):  # fmt: skip
        command = written(folder, "accelerate", gpus, mesh, zero_stage=stage).command
        words = shlex.split(command.replace("$NODE", "0").replace("$HOST", "127.0.0.1").replace("29500", "0"))
        port = [] if "--main_process_port" in words else ["--main_process_port=0"]  # any that is free here
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*port, *words[2:]]))
        about = f"accelerate, {mesh}, stage {stage}:"
        same(f"{about} processes, nodes", (args.num_processes, args.num_machines), (gpus, -(-gpus // 8)))
        same(f"{about} FSDP", bool(args.use_fsdp), stage > 0)
        same(f"{about} precision", args.mixed_precision, "bf16")
        before = dict(os.environ)
        os.environ.update(prepare_multi_gpu_env(args))
        if stage:
            plugin = FullyShardedDataParallelPlugin()
            same(f"{about} FSDP version", plugin.fsdp_version, 2)
            same(f"{about} parameters freed after forward", plugin.reshard_after_forward, stage == 3)
            same(f"{about} activation checkpointing", plugin.activation_checkpointing, True)
        if len(mesh) > 1:
            read = ParallelismConfig()
            found = read.dp_replicate_size, read.dp_shard_size, read.cp_size
            same(f"{about} axes", found, tuple(mesh.get(a, 1) for a in ("data", "shard", "context")))
        os.environ.clear()
        os.environ.update(before)


class Ranks:
    """The ranks of a training that is not there."""

    def __init__(self, readers: int):
        self.readers = readers

    def get_data_parallel_world_size(self):
        return self.readers


def deepspeed(folder: Path) -> None:
    deepspeed_config.dist.get_rank = lambda: 0  # it asks a process group, before it asks for the number of ranks
    for gpus, mesh, stage, offload in (
        (8, {"data": 8}, 0, False), (8, {"shard": 8}, 1, False), (8, {"shard": 8}, 2, True),
        (16, {"shard": 16}, 3, False),
    ):  # fmt: skip
        command = written(folder, "deepspeed", gpus, mesh, zero_stage=stage, offload=offload).command
        readers = mesh.get("data", 1) * mesh.get("shard", 1)
        read = deepspeed_config.DeepSpeedConfig("deepspeed.json", mpu=Ranks(readers))
        about = f"deepspeed, {mesh}, stage {stage}:"
        same(f"{about} stage", read.zero_optimization_stage, stage)
        found = read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps
        same(f"{about} batches", found, (64, 1, 64 // readers))
        same(f"{about} bf16", read.bfloat16_config.enabled, True)
        same(f"{about} offload", read.zero_config.offload_optimizer is not None, offload)
        args = parse_deepspeed(shlex.split(command)[1:])
        same(f"{about} GPUs of a node", (args.num_gpus, args.user_script), (8, "train.py"))
        if gpus > 8:
            same(f"{about} slots", sum(fetch_hostfile(args.hostfile).values()), gpus)


def hf_trainer(folder: Path) -> None:
    for mesh, stage, offload in (({"data": 8}, 0, False), ({"shard": 8}, 3, False), ({"shard": 8}, 2, True)):
        # as on CPUs, of which Transformers does not ask whether they have bf16; else it looks for a GPU
        written(folder, "hf-trainer", 8, mesh, "cpu", zero_stage=stage, offload=offload)
        arguments: Any = TrainingArguments  # mypy knows no NewType of it, which this parser asks for
        (read,) = HfArgumentParser(arguments).parse_json_file("training.json")
        about = f"hf-trainer, {mesh}, stage {stage}:"
        same(f"{about} batches", (read.per_device_train_batch_size, read.gradient_accumulation_steps), (1, 8))
        same(f"{about} bf16", read.bf16, True)
        if stage == 3:
            same(f"{about} FSDP", (bool(read.fsdp), read.fsdp_plugin_args["fsdp_version"]), (True, 2))
            same(f"{about} activation checkpointing", read.fsdp_plugin_args["activation_checkpointing"], True)
        else:
            same(f"{about} FSDP", bool(read.fsdp), False)
            same(f"{about} recomputation", read.gradient_checkpointing, True)
            same(f"{about} stage of DeepSpeed", read.hf_deepspeed_config.config["zero_optimization"]["stage"]
                 if read.deepspeed else 0, stage)  # fmt: skip


MODELS = ("gpt2", "gpt2-xl", "opt-1.3b", "pythia-1.4b", "llama-3.2-1b", "llama-2-7b", "llama-3-8b", "mistral-7b",
          "qwen2.5-14b", "mixtral-8x7b")  # fmt: skip
LIMITS = (24, 60, 170)  # GiB of a GPU
ENGINES = ("torchrun", "accelerate", "deepspeed", "hf-trainer")  # what trains on a processor


def small(model: models.Model, layout: Layout) -> tuple[models.Model, Layout]:
    """A model of the same kind of shape (what Transformers has as GPT-2, Llama and Mixtral), and the layout with two
    ranks along each of its axes, and two micro-batches, or as many as its pipeline has stages."""
    mesh = {axis: 2 for axis, size in layout.mesh if size > 1} or {"data": 2}
    sizes = 4, 64, 4, 512  # layers, width, heads, vocabulary
    if model.experts:
        found = models.Model("mixtral", *sizes, mlp="swiglu", experts=4, top_k=2, expert_width=64)
    elif model.mlp == "swiglu":
        found = models.Model("llama", *sizes, kv_heads=2, mlp_width=128, mlp="swiglu")
    else:
        found = models.Model("gpt", *sizes, positions=32, tied=True, bias="all")
    ranks = math.prod(mesh.values())
    readers = math.prod(size for axis, size in mesh.items() if axis in ("data", "shard", "expert"))
    micro = min(2, layout.micro_batch)
    return found, make_layout(
        found, cluster("cpu", ranks, ranks), mesh, batch_size=readers * micro * 4, sequence=32, micro_batch=micro,
        zero_stage=layout.zero_stage, recompute=layout.recompute, schedule=layout.schedule, precision="float32",
        stages_per_rank=layout.stages_per_rank, offload=layout.offload, sequence_parallel=layout.sequence_parallel,
    )  # fmt: skip


def expresses(tool: str) -> Callable[[Estimate], bool]:
    def accept(found: Estimate) -> bool:
        try:
            return bool(emit(found, tool))
        except UserError:
            return False

    return accept


def planned(tool: str) -> dict:
    """(small model, layout) -> the models and limits whose plan for eight GPUs it stands for."""
    found: dict = {}
    for name in MODELS:
        for limit in LIMITS:
            model, nodes = find(name), cluster("b200", 8)
            try:
                (one,) = search.plan(model, nodes, 64, 1024, max_memory_gib=limit, count=1, accept=expresses(tool))
            except UserError as error:
                print(f"{tool}, {name}, {limit} GiB: {error}")
                continue
            found.setdefault(small(model, one.estimate.layout), []).append(f"{name} at {limit}")
    return found


def trains(folder: Path) -> None:
    """Two steps of what is emitted for each plan, of a small model on two ranks along each axis, on this machine's
    processor. What an engine does on GPUs only is said."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    start = """import runpy, sys
import common.vision  # first: transformers imports torchvision
sys.argv = sys.argv[1:]
if "deepspeed.json" in sys.argv:
    import deepspeed  # as in 06_fsdp/with_deepspeed.py: on CPUs it would compile an all-reduce of its own
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    Path(folder, "start.py").write_text(start)
    for tool in ENGINES:
        for (model, layout), stands_for in planned(tool).items():
            about = f"{tool}, {model.name}, {layout.describe()} (for {', '.join(stands_for)})"
            ranks = math.prod(size for _, size in layout.mesh)
            try:
                written = emit(estimate(model, cluster("cpu", ranks, ranks), layout), tool)
            except UserError as error:
                print(f"{about}: not on a processor: {error}")
                continue
            for name, text in written.files.items():
                Path(folder, name).write_text(text)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command += [str(ROOT / "distributed_training.py"), "--distributed", "--config", "course.yaml"] if (
                tool == "torchrun") else ["start.py", "train.py"]  # fmt: skip
            command += ["--steps", "2", *(["--deepspeed_config", "deepspeed.json"] if tool == "deepspeed" else [])]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            output = done.stdout + done.stderr
            if done.returncode:
                print(output[-3000:])
            steps = output.count("step 2: loss") if tool in ("accelerate", "deepspeed") else int(
                ("train_runtime" if tool == "hf-trainer" else "step 2") in output)  # fmt: skip
            same(f"{about}: exit, second steps", (done.returncode, steps), (0, 1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for tool in (trains, accelerate, deepspeed, hf_trainer):
            tool(Path(folder))
        os.chdir(ROOT)
