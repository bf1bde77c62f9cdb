"""What files of other tools mean, by these tools' own documentation, in the planner's words: of `planner emit`.

A reader gets (command, files, folder): how many ranks there are, what is divided among them, and how a step goes.
"""

import io
import json
import math
import re
import runpy
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml
from helpers import configure

from planner.read_config import hugging_face

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib


def options(command: str) -> dict[str, str]:
    """Of a command line, with dashes in their names; "" for one without a value."""
    found = re.findall(r"--([a-z][\w-]*)(?:[= ]+(?!--)([^\s\\]+))?", command)
    return {name.replace("_", "-"): value for name, value in found}


def started(command: str) -> dict:
    """How many ranks torchrun starts: the same on each of several nodes, which it tells each other."""
    said = options(command)
    nodes = int(said.get("nnodes", 1))
    if nodes > 1:
        assert (said["node-rank"], said["master-addr"]) == ("$NODE", "$HOST") and int(said["master-port"]) > 1023
    return {"nodes": nodes, "world": nodes * int(said["nproc-per-node"])}


# --- train.py, run with stand-ins of the engines that it imports ------------------------------------------------------


class Engine(torch.nn.Module):
    """A model, Accelerate's Accelerator, and what deepspeed.initialize gives: a step after `every` micro-batches."""

    device, global_rank, every, seen = "cpu", 0, 0, 0
    sync_gradients = property(lambda self: self.seen % self.every == 0)
    global_steps = property(lambda self: self.seen // self.every)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.told: dict = {"recompute": "none", "batches": [], "clipped": 0, "cut": 0}

    def accelerator(self, gradient_accumulation_steps: int, cpu: bool = False):
        self.every, self.told["cpu"] = gradient_accumulation_steps, cpu
        return self

    def initialize(self, args, model, optimizer):
        self.every = json.loads(Path(args.deepspeed_config).read_text())["gradient_accumulation_steps"]
        self.told["offload"] = type(optimizer).__name__ == "DeepSpeedCPUAdam"
        return self, None

    def trainer(self, model, arguments, train_dataset):
        self.told |= {"said": vars(arguments), "sequence": len(train_dataset[0]["input_ids"])}
        return SimpleNamespace(train=self.save_state)

    def gradient_checkpointing_enable(self):
        self.told["recompute"] = "full"

    def forward(self, input_ids, labels):
        assert torch.equal(input_ids, labels), "the model shifts them itself"
        self.told["batches"].append(tuple(input_ids.shape))
        return SimpleNamespace(loss=self.weight * 1.0)

    @contextmanager
    def accumulate(self, model):
        self.seen += 1
        yield

    @contextmanager
    def maybe_context_parallel(self, buffers, buffer_seq_dims, no_restore_buffers):
        self.told["cut"] = buffers[0].shape[buffer_seq_dims[0]]
        yield

    def clip_grad_norm_(self, parameters, norm):
        assert self.sync_gradients and norm == 1.0
        self.told["clipped"] += 1

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.seen += 1

    def prepare(self, *each):
        return each

    def save_state(self, *_):
        self.told["saved"] = True

    def nothing(self, *_):
        pass

    save_checkpoint = save_state
    print = end_training = destroy = nothing


def trained(folder: Path) -> dict:
    """What train.py does in two steps: its micro-batches, and the model that it makes."""
    engine = Engine()

    def shape(name):
        return lambda **words: engine.told.update(config={"model_type": name} | words) or SimpleNamespace(**words)

    groups = SimpleNamespace(_get_data_parallel_world_size=lambda: 1, _get_data_parallel_rank=lambda: 0)
    parser = SimpleNamespace(parse_json_file=lambda file: (SimpleNamespace(**json.loads((folder / file).read_text())),))
    has = {
        "transformers": {
            "AutoModelForCausalLM": SimpleNamespace(from_config=lambda config: engine), "Trainer": engine.trainer,
            "HfArgumentParser": lambda kind: parser, "TrainingArguments": None, "GPT2Config": shape("gpt2"),
            "LlamaConfig": shape("llama"), "MixtralConfig": shape("mixtral"),
        },
        "accelerate": {"Accelerator": engine.accelerator},
        "deepspeed": {"initialize": engine.initialize, "init_distributed": lambda: None, "add_config_arguments": lambda
                      parser: parser.add_argument("--deepspeed_config") and parser},
        "deepspeed.utils": {"groups": groups}, "deepspeed.ops": {},
        "deepspeed.ops.adam": {"DeepSpeedCPUAdam": type("DeepSpeedCPUAdam", (torch.optim.AdamW,), {})},
    }  # fmt: skip
    (folder / "text").write_bytes(b"0123456789" * 20_000)
    words = ["train.py", f"--data={folder / 'text'}", "--steps=2"]
    if "import deepspeed" in (folder / "train.py").read_text():
        words.append(f"--deepspeed_config={folder / 'deepspeed.json'}")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        for name, its in has.items():
            patch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(its)
        patch.setattr(sys, "argv", words)
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        runpy.run_path(str(folder / "train.py"))
    told = engine.told
    assert told.pop("saved"), "what was trained is kept"
    if batches := told.pop("batches"):
        ((told["micro_batch"], told["sequence"]),) = {*batches}  # they are alike
        told["micro_batches"] = len(batches) / 2
    return told | {"parameters": hugging_face(told.pop("config")).model.parameters}


# --- what the tools read ----------------------------------------------------------------------------------------------

PRECISION = {"no": "float32", "bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp32": "float32"}


def accelerate(command: str, files: dict[str, str], folder: Path) -> dict:
    said, told, where = yaml.safe_load(files["accelerate.yaml"]), trained(folder), options(command)
    nodes, world, fsdp = said["num_machines"], said["num_processes"], said.get("fsdp_config", {})
    assert said["use_cpu"] is told.pop("cpu") and (said["distributed_type"] == "NO") == (world == 1 and not fsdp)
    if said["use_cpu"]:
        assert started(command) == {"nodes": nodes, "world": world}
    elif nodes > 1:
        assert (where["machine-rank"], where["main-process-ip"]) == ("$NODE", "$HOST")
    stage = (3 if fsdp["fsdp_reshard_after_forward"] else 2) if fsdp else 0
    names = {"data": "dp_replicate", "shard": "dp_shard", "context": "cp"}
    axes = {axis: said.get("parallelism_config", {}).get(f"parallelism_config_{name}_size", 1) for axis, name in
            names.items()} if "parallelism_config" in said else {"shard" if fsdp else "data": world}  # fmt: skip
    assert told.pop("cut") == (told["sequence"] if axes.get("context", 1) > 1 else 0), "what is cut along 'context'"
    assert told.pop("clipped") == 2, "once a step"
    if fsdp:
        assert told["recompute"] == "none", "FSDP recomputes, and not the model besides"
        told["recompute"] = "full" if fsdp["fsdp_activation_checkpointing"] else "none"
    return told | {"nodes": nodes, "world": world, "mesh": axes, "zero_stage": stage, "offload": bool(
        fsdp and fsdp["fsdp_offload_params"]), "precision": PRECISION[said["mixed_precision"]]}  # fmt: skip


def deepspeed_json(text: str) -> dict:
    said = json.loads(text)
    on = [name for name in ("bf16", "fp16") if said.get(name, {}).get("enabled")] or ["no"]
    zero, (precision,) = said["zero_optimization"], on
    batch, micro = said["train_batch_size"], said["train_micro_batch_size_per_gpu"]
    world = batch // micro // said["gradient_accumulation_steps"]
    return {
        "precision": PRECISION[precision], "zero_stage": zero["stage"], "micro_batch": micro, "batch_size": batch,
        "offload": zero.get("offload_optimizer", {}).get("device") == "cpu", "world": world, "micro_batches":
        said["gradient_accumulation_steps"], "mesh": {"shard" if zero["stage"] else "data": world},
    } | ({"overlap_gradients": zero["overlap_comm"]} if zero["stage"] else {})  # fmt: skip


def deepspeed(command: str, files: dict[str, str], folder: Path) -> dict:
    told, said, where = trained(folder), deepspeed_json(files["deepspeed.json"]), options(command)
    assert not told.pop("clipped") and not told.pop("cut"), "which the engine does"
    nodes = int(where.get("num-nodes", 1))
    slots = re.findall(r"(?m)^(\w+) slots=(\d+)$", files.get("hostfile", ""))
    assert nodes == 1 or (len(dict(slots)), {n for _, n in slots}) == (nodes, {where["num-gpus"]})
    assert {name for name, value in told.items() if said.get(name, value) != value} == set()
    return told | said | {"nodes": nodes, "world": nodes * int(where["num-gpus"])}


def hf_trainer(command: str, files: dict[str, str], folder: Path) -> dict:
    told = trained(folder)
    said, *_ = told.pop("said"), told.pop("clipped"), told.pop("cut")
    on = [name for name in ("bf16", "fp16") if said.get(name)] or ["no"]
    (precision,), where = on, started(command)
    found = {"zero_stage": 0, "offload": False, "mesh": {"data": where["world"]}, "recompute": "none"}
    if fsdp := said.get("fsdp"):
        more = said["fsdp_config"]
        assert fsdp and more["reshard_after_forward"] and more["version"] == 2
        found |= {"zero_stage": 3, "mesh": {"shard": where["world"]}}
    if said.get("gradient_checkpointing") or said.get("fsdp_config", {}).get("activation_checkpointing"):
        found["recompute"] = "full"
    assert (said["max_steps"], said["learning_rate"], told.pop("recompute")) == (2, 3e-4, "none")
    found |= {"micro_batch": said["per_device_train_batch_size"], "precision": PRECISION[precision],
              "micro_batches": said["gradient_accumulation_steps"]}  # fmt: skip
    if "deepspeed" in said:
        other = deepspeed_json(files[said["deepspeed"]])
        assert not [name for name in ("micro_batch", "micro_batches", "precision") if found[name] != other[name]]
        found |= other
    return told | where | found


def torchtitan(command: str, files: dict[str, str], folder: Path) -> dict:
    said = tomllib.loads(files["torchtitan.toml"])
    training, parallel, again = said["training"], said["parallelism"], said["activation_checkpoint"]
    degree = {axis: parallel[f"{name}_degree"] for axis, name in (
        ("data", "data_parallel_replicate"), ("shard", "data_parallel_shard"), ("tensor", "tensor_parallel"),
        ("pipeline", "pipeline_parallel"), ("context", "context_parallel"))}  # fmt: skip
    expert = parallel.get("expert_parallel_degree", 1)  # of ranks along "shard"
    readers = degree["data"] * degree["shard"]
    assert degree["shard"] % expert == training["global_batch_size"] % (readers * training["local_batch_size"]) == 0
    whole = degree["shard"] * degree["context"] == 1
    kinds = {"op": "operators", "2": "every-second"}
    compiled = said["compile"]["components"] if said["compile"]["enable"] else []
    float8 = "float8" in said["model"]["converters"]
    found = {
        "mesh": degree | {"shard": degree["shard"] // expert, "expert": expert}, "batch_size":
        training["global_batch_size"], "zero_stage": 0 if whole else {"never": 2, "always": 3}[
            parallel["fsdp_reshard_after_forward"]], "sequence": training["seq_len"],
        "recompute": kinds[again["selective_ac_option"]] if again["mode"] == "selective" else again["mode"],
        "fused": "model" in compiled, "fused_loss": "loss" in compiled, "offload": training["enable_cpu_offload"],
        "async_tensor": parallel.get("enable_async_tensor_parallel", False), "micro_batch":
        training["local_batch_size"], "precision": "fp8-mixed" if float8 else {
            "bfloat16": "bf16-mixed", "float32": "float32"}[training["mixed_precision_param"]],
        "sequence_parallel": True,
    }  # fmt: skip
    if degree["pipeline"] > 1:
        schedule = parallel["pipeline_parallel_schedule"]
        each = parallel.get("pipeline_parallel_layers_per_stage")
        layers = {"8B": 32, "70B": 80, "405B": 126, "671B": 61, "32B": 64}[said["model"]["flavor"]]
        end = parallel["pipeline_parallel_first_stage_less_layers"]  # 1: embedding and output count as a layer each
        assert end in (0, 1) and end == parallel["pipeline_parallel_last_stage_less_layers"]
        stages = -(-(layers + 2 * end) // each) if each else degree["pipeline"]
        assert training["local_batch_size"] * readers == training["global_batch_size"]
        found |= {"micro_batch": parallel["pipeline_parallel_microbatch_size"], "stages": stages, "ends": end == 1,
                  "schedule": {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "ZBVZeroBubble":
                               "zbv"}[schedule]}  # fmt: skip
    return found | started(command)


def course(command: str, files: dict[str, str], folder: Path) -> dict:
    assert options(command)["config"] == "course.yaml"
    config = configure(f"--dry-run --config {folder / 'course.yaml'}")
    axes, again = dict(config.axes), getattr(config.options, "recompute", "none")  # "selective": all but products
    stage = {"zero1": 1, "zero2": 2}.get(config.strategy, 3 if "shard" in axes else 0)
    found = {
        "mesh": axes, "zero_stage": stage, "batch_size": config.batch_size, "precision": PRECISION[config.precision],
        "recompute": {"selective": "products"}.get(again, again), "offload": getattr(config.options, "offload", False),
        "sequence_parallel": config.strategy == "sequence", "layers": config.layers, "width": config.width,
        "sequence": config.context, "experts": getattr(config.options, "experts", 0),
        "micro_batches": config.accumulation_steps, "dropout": False, "async_tensor": False,
    }  # fmt: skip
    if axes.get("pipeline", 1) > 1:
        assert config.accumulation_steps == 1
        found |= {"schedule": config.options.schedule, "stages_per_rank": config.options.stages_per_rank or 1,
                  "micro_batches": config.options.microbatches}  # fmt: skip
    return found | started(command)


def slurm(command: str, files: dict[str, str], folder: Path) -> dict:
    job = files["job.sbatch"]
    asked = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)$", job))
    (line,) = re.findall(r"(?m)^srun .*torchrun ((?:.*\\\n)*.*)$", job)
    each = int(options(line)["nproc-per-node"])
    assert command == "sbatch job.sbatch" and asked["ntasks-per-node"] == "1" and "$SLURM_NNODES" in line
    assert int(asked["gpus-per-node"]) == each and subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    again = f"--nnodes=1 --nproc-per-node={each} --config {options(line)['config']}"
    return course(again, files, folder) | {"nodes": int(asked["nodes"]), "world": int(asked["nodes"]) * each}


def megatron(command: str, files: dict[str, str], folder: Path) -> dict:
    text = files["megatron.sh"]
    said, where = options(text), started(text)
    tensor, pipeline, context, expert = (int(said[f"{name}-parallel-size"]) for name in (
        "tensor-model", "pipeline-model", "context", "expert-model"))  # fmt: skip
    whole = said.get("expert-tensor-parallel-size") == "1"
    readers, copies = where["world"] // (tensor * pipeline * context), int(
        said.get("num-distributed-optimizer-instances", 1))  # fmt: skip
    expert //= tensor if whole else 1
    stage = {"optim_grads": 2, "optim_grads_params": 3}.get(
        said.get("data-parallel-sharding-strategy"), int("use-distributed-optimizer" in said))  # fmt: skip
    assert ("use-megatron-fsdp" in said) == (stage > 1) == (said.get("ckpt-format") == "fsdp_dtensor")
    # Megatron-LM's validate_args at d98e8a64 wants the variable before Blackwell, and its FSDP does not take it.
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in text) == (tensor * context > 1 and stage < 2)
    some = said.get("recompute-granularity"), said.get("recompute-method")
    layers, ends = int(said["num-layers"]), "account-for-embedding-in-pipeline-split" in said
    assert ends == ("account-for-loss-in-pipeline-split" in said)
    each = int(said.get("num-layers-per-virtual-pipeline-stage", 0))
    low = {"hybrid": "fp8-mixed", "e4m3": "mxfp8-mixed"}.get(said.get("fp8-format"))
    low, half = "nvfp4-mixed" if "fp4-format" in said else low, "grad-reduce-in-bf16" in said
    plain = ("bf16-mixed-16" if half else "bf16-mixed") if "bf16" in said else "fp16-mixed" if "fp16" in said else (
        "float32")  # fmt: skip
    assert not low or (half and "bf16" in said and said.get("fp8-recipe", "mxfp8" * (low == "mxfp8-mixed")) == (
        "mxfp8" * (low == "mxfp8-mixed")))  # fmt: skip
    divided = "data" if stage == 0 else "shard"
    return where | {
        "mesh": {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert, "data": copies} | {
            divided: readers // expert // (1 if divided == "data" else copies)},
        "zero_stage": stage, "micro_batch": int(said["micro-batch-size"]), "batch_size": int(said["global-batch-size"]),
        "sequence": int(said["seq-length"]), "precision": low or plain, "whole_experts": whole,
        "recompute": {None: "none", "selective": "attention", "full": "full"}[some[0]],
        "again": int(said["recompute-num-layers"]) if some[1] == "block" else None,
        "sequence_parallel": "sequence-parallel" in said, "overlap_gradients": "overlap-grad-reduce" in said,
        "dropout": float(said["hidden-dropout"]) > 0 and said["attention-dropout"] == said["hidden-dropout"],
        "flash": said["attention-backend"] == "flash", "async_tensor": "tp-comm-overlap" in said,
        "stages": (layers + 2 * ends) // each if each else pipeline, "offload": False,
    }  # fmt: skip


def nanotron(command: str, files: dict[str, str], folder: Path) -> dict:
    said = yaml.safe_load(files["nanotron.yaml"])
    parallel, tokens, optimizer = said["parallelism"], said["tokens"], said["optimizer"]
    stage, expert = optimizer["zero_stage"], parallel["expert_parallel_size"]
    where = started(command)
    assert where["world"] == math.prod(parallel[name] for name in ("dp", "pp", "tp", "context_parallel_size"))
    assert options(command)["config-file"] == "nanotron.yaml"
    assert command.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun") == (parallel["tp"] > 1)
    kind = said["model"]["dtype"], optimizer["accumulate_grad_in_fp32"]
    return where | {
        "mesh": {"shard" if stage else "data": parallel["dp"] // expert, "pipeline": parallel["pp"], "tensor":
                 parallel["tp"], "context": parallel["context_parallel_size"], "expert": expert},
        "zero_stage": stage, "micro_batch": tokens["micro_batch_size"], "offload": False,
        "micro_batches": tokens["batch_accumulation_per_replica"], "sequence": tokens["sequence_length"],
        "recompute": "full" if parallel["recompute_layer"] else "none", "schedule": {"1f1b": "1f1b", "afab": "gpipe"}[
            parallel["pp_engine"]], "sequence_parallel": parallel["tp_mode"] == "REDUCE_SCATTER",
        "precision": {("float32", True): "float32", ("bfloat16", True): "bf16-mixed", ("bfloat16", False): "bf16"}[
            kind],
    }  # fmt: skip


READERS = {"torchrun": course, "slurm": slurm, "accelerate": accelerate, "deepspeed": deepspeed,
           "hf-trainer": hf_trainer, "torchtitan": torchtitan, "megatron": megatron, "nanotron": nanotron}  # fmt: skip
