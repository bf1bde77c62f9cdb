"""What `python -m planner emit` writes for ten models and three limits of memory, in each of its formats: written, read
by the tool's own parser, and two steps of each kind of layout trained on this machine's processor.

    python -m tools.read_back [--results FILE.json] [--formats deepspeed,accelerate] [--sources FOLDER]

The Python that runs this needs requirements-engines.txt. The parsers of torchtitan, Megatron-LM and nanotron are those
of checkouts, torchtitan, Megatron-LM and nanotron, in the folder that --sources names; they train on GPUs only.

A small model stands for each that has its kind of shape, and two ranks for each axis. Ranks are forked from this
process, which has imported the engines: to import them takes each rank ten times as long as to train two steps. What
has passed is kept in --results, by the text of its files, and is not done again.
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before DeepSpeed is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import installed

if __name__ == "__main__":
    installed.at_start(("accelerate", "deepspeed", "transformers"), "requirements-engines.txt")

import common.vision  # noqa: F401  first: transformers imports torchvision

# isort: split
import accelerate
import deepspeed
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from deepspeed.launcher.runner import fetch_hostfile
from deepspeed.launcher.runner import parse_args as parse_deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime import config as deepspeed_config
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import HfArgumentParser, TrainingArguments, training_args
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401  here once, and not in each rank
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.trainer import Trainer

from common import ROOT
from common.command_line import parse
from common.errors import Parser, UserError
from common.lab.launch import free_port, rank_variables, ready_to_fork
from common.text_table import aligned
from course.fsdp.with_accelerate import on_cpu
from course.strategies import BY_AXES, STRATEGIES
from planner import __main__ as command_line
from planner import models
from planner.emit import FORMATS, Emitted, emit
from planner.estimate import Estimate, estimate
from planner.hardware import cluster
from planner.layout import Layout, make_layout

MODELS = ("gpt2", "gpt2-xl", "opt-1.3b", "pythia-1.4b", "llama-3.2-1b", "llama-2-7b", "llama-3-8b", "mistral-7b",
          "qwen2.5-14b", "mixtral-8x7b")  # fmt: skip
LIMITS = (24, 60, 170)  # GiB of a GPU
TRAIN = ("torchrun", "slurm", "accelerate", "deepspeed", "hf-trainer")  # what trains on a processor
PATIENCE = 300  # seconds that the ranks of a small training may take

# Layouts of a Llama 3 8B that no plan for eight GPUs leads to: two nodes, copies of shards, a context, offload.
MORE: tuple[tuple[str, int, dict, dict], ...] = (
    ("accelerate", 16, {"data": 2, "shard": 8}, {"zero_stage": 3}),
    ("accelerate", 16, {"data": 2, "shard": 4, "context": 2}, {"zero_stage": 3}),
    ("accelerate", 8, {"shard": 8}, {"zero_stage": 2}),
    ("deepspeed", 8, {"data": 8}, {}),
    ("deepspeed", 8, {"shard": 8}, {"zero_stage": 1}),
    ("deepspeed", 8, {"shard": 8}, {"zero_stage": 2, "offload": True}),
    ("deepspeed", 16, {"shard": 16}, {"zero_stage": 3}),
    ("hf-trainer", 8, {"shard": 8}, {"zero_stage": 2, "offload": True}),
    ("torchtitan", 16, {"data": 2, "shard": 4, "tensor": 2}, {"zero_stage": 3, "sequence_parallel": True}),
    ("torchtitan", 16, {"shard": 8, "pipeline": 2}, {"zero_stage": 3}),
    ("megatron", 16, {"data": 4, "pipeline": 2, "tensor": 2}, {"sequence_parallel": True}),
    ("nanotron", 16, {"shard": 4, "pipeline": 2, "tensor": 2}, {"zero_stage": 1, "sequence_parallel": True}),
)  # fmt: skip


# --- what each tool's own parser reads in a folder, by the planner's names --------------------------------------------


class Ranks:
    """The ranks of a training that is not there."""

    def __init__(self, readers: int):
        self.readers = readers

    def get_data_parallel_world_size(self):
        return self.readers


@contextlib.contextmanager
def environment(values: dict):
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_course(folder: Path, _command: str, _found: Estimate) -> dict:
    read = parse(STRATEGIES, None, ["--dry-run", "--config", str(folder / "course.yaml")], BY_AXES)
    precision = {"fp32": "float32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}[read.precision]
    found: dict = {"batch_size": read.batch_size, "precision": precision, "layers": read.layers, "width": read.width,
                   "sequence": read.context}  # fmt: skip
    # Where it has a pipeline, the micro-batches are the pipeline's, and else the steps that gradients accumulate in.
    found["micro_batches"] = getattr(read.options, "microbatches", None) or read.accumulation_steps
    return found | {name: getattr(read.options, name) for name in ("stages_per_rank", "offload")
                    if getattr(read.options, name, None) is not None}  # fmt: skip


def read_slurm(folder: Path, command: str, found: Estimate) -> dict:
    """Slurm isn't asked here: the shell is, and the lines that sbatch reads."""
    job = (folder / "job.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=job, text=True, check=True)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job, re.MULTILINE))
    each = int(asked.get("gpus-per-node", found.cluster.gpus))
    return {"ranks": int(asked["nodes"]) * each} | read_course(folder, command, found)


def accelerate_arguments(folder: Path, command: str):
    """What `accelerate launch` makes of the command, started on the first node."""
    words = shlex.split(command.replace("$NODE", "0").replace("$HOST", "127.0.0.1").replace("29500", "0"))
    port = [] if "--main_process_port" in words else ["--main_process_port=0"]  # any that is free here
    words[words.index("accelerate.yaml")] = str(folder / "accelerate.yaml")
    return _validate_launch_command(launch_command_parser().parse_args([*port, *words[2:]]))[0]


def read_accelerate(folder: Path, command: str, _found: Estimate) -> dict:
    args = accelerate_arguments(folder, command)
    found: dict = {"ranks": args.num_processes, "nodes": args.num_machines, "precision": {
        "no": "float32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}[args.mixed_precision], "stage": 0}  # fmt: skip
    with environment(prepare_multi_gpu_env(args)):
        if args.use_fsdp:
            plugin = FullyShardedDataParallelPlugin()
            assert plugin.fsdp_version == 2
            found |= {"stage": 3 if plugin.reshard_after_forward else 2, "offload":
                      isinstance(plugin.cpu_offload, CPUOffloadPolicy),
                      "recompute": "full" if plugin.activation_checkpointing else "none"}  # fmt: skip
        if "PARALLELISM_CONFIG_DP_REPLICATE_SIZE" in os.environ:
            read = ParallelismConfig()
            found |= {"data": read.dp_replicate_size, "shard": read.dp_shard_size, "context": read.cp_size}
    return found


def read_deepspeed_json(file: Path, found: Estimate) -> dict:
    ranks: Any = Ranks(found.layout.readers)
    with patch.object(deepspeed_config.dist, "get_rank", lambda: 0):  # there is no group, before it asks for the ranks
        read = deepspeed_config.DeepSpeedConfig(str(file), mpu=ranks)
    on = [name for name, one in (("bf16", read.bfloat16_config), ("fp16", read.float16_config)) if one.enabled]
    return {
        "stage": read.zero_optimization_stage, "batch_size": read.train_batch_size,
        "micro_batch": read.train_micro_batch_size_per_gpu, "micro_batches": read.gradient_accumulation_steps,
        "precision": f"{on[0]}-mixed" if on else "float32",
        "offload": read.zero_config.offload_optimizer is not None,
    }  # fmt: skip


def read_deepspeed(folder: Path, command: str, found: Estimate) -> dict:
    args = parse_deepspeed(shlex.split(command)[1:])
    assert args.user_script == "train.py", args.user_script
    hosts = fetch_hostfile(str(folder / args.hostfile)) if "--hostfile" in command else {"here": args.num_gpus}
    return {"ranks": sum(hosts.values())} | read_deepspeed_json(folder / "deepspeed.json", found)


def read_trainer(folder: Path, _command: str, found: Estimate) -> dict:
    arguments: Any = TrainingArguments  # mypy knows no NewType of it, which this parser asks for
    before = Path.cwd()
    os.chdir(folder)  # where deepspeed.json is
    try:
        there_is_a_gpu = patch.object(training_args, "is_torch_bf16_gpu_available", lambda: True)
        with environment({"ACCELERATE_USE_FSDP": "false"}), there_is_a_gpu:
            (read,) = HfArgumentParser(arguments).parse_json_file("training.json")
    finally:
        os.chdir(before)
    said: dict = {"micro_batch": read.per_device_train_batch_size, "micro_batches": read.gradient_accumulation_steps,
                  "precision": "bf16-mixed" if read.bf16 else "fp16-mixed" if read.fp16 else "float32", "stage": 0,
                  "recompute": "full" if read.gradient_checkpointing else "none", "offload": False}  # fmt: skip
    if read.fsdp:
        assert read.fsdp_plugin_args["fsdp_version"] == 2
        recompute = "full" if read.fsdp_plugin_args["activation_checkpointing"] else "none"
        said |= {"stage": 3 if read.fsdp_plugin_args["reshard_after_forward"] else 2, "recompute": recompute}
    if read.deepspeed:
        own = read_deepspeed_json(folder / "deepspeed.json", found)
        said |= {name: own[name] for name in ("stage", "offload", "batch_size")}
    return said


READERS: dict[str, Callable[[Path, str, Estimate], dict]] = {
    "torchrun": read_course, "slurm": read_slurm, "accelerate": read_accelerate, "deepspeed": read_deepspeed,
    "hf-trainer": read_trainer,
}  # fmt: skip
# Each in a process of its own, whose current folder is a checkout: they print what they read as JSON. The packages' own
# __init__ are left out, since they import what needs a GPU, and packages of GPUs are stand-ins.
BARE = """
import importlib.machinery, importlib.util, json, os, sys, types
import torch._dynamo.testing  # before there is something like Triton
import typing, typing_extensions
typing.override = typing_extensions.override  # which Python has since 3.12
def bare(name, path):
    module = types.ModuleType(name)
    module.__path__ = [path]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
class OfGPUs:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        from unittest.mock import MagicMock
        return MagicMock(__name__=spec.name, __spec__=spec, __path__=[], __version__="2.0.0")
    def exec_module(self, module):
        pass
sys.meta_path.append(OfGPUs())
"""
FOREIGN = {
    "torchtitan": ("torchtitan", """
bare("torchtitan", "torchtitan")
from torchtitan.config import ConfigManager
read = ConfigManager().parse_args(["--job.config_file", sys.argv[1]])
p, t, a, local = read.parallelism, read.training, read.activation_checkpoint, read.training.local_batch_size
readers = p.data_parallel_replicate_degree * p.data_parallel_shard_degree
print(json.dumps({"copies": p.data_parallel_replicate_degree, "shards": p.data_parallel_shard_degree, "tensor":
    p.tensor_parallel_degree, "pipeline": p.pipeline_parallel_degree, "context": p.context_parallel_degree,
    "batch_size": t.global_batch_size, "sequence": t.seq_len, "offload": t.enable_cpu_offload,
    "micro_batch": p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else local,
    "kept": a.mode if a.mode != "selective" else {"op": "operators", "2": "every-second"}[a.selective_ac_option]}))
"""),
    "megatron": ("Megatron-LM", """
bare("megatron.training", "megatron/training")
import shlex
from megatron.training import global_vars
for name in dir(global_vars):
    setattr(sys.modules["megatron.training"], name, getattr(global_vars, name)) if name[0] != "_" else None
from megatron.training import arguments
arguments.get_device_arch_version = lambda: 9  # of an H100
arguments.torch.cuda.get_device_capability = lambda *_: (9, 0)
words = shlex.split(open(sys.argv[1]).read(), comments=True)
words = [word for word in words if word.strip()]
sys.argv = words[words.index("pretrain_gpt.py"):]
read = arguments.parse_args()
arguments.validate_args(read)
again = {"full": "full", "selective": "attention"}.get(read.recompute_granularity, "none")
print(json.dumps({"tensor": read.tensor_model_parallel_size, "pipeline": read.pipeline_model_parallel_size, "context":
    read.context_parallel_size, "batch_size": read.global_batch_size, "micro_batch": read.micro_batch_size, "sequence":
    read.seq_length, "layers": read.num_layers, "width": read.hidden_size, "kept": again, "readers":
    read.data_parallel_size, "stage": 1 if read.use_distributed_optimizer and not read.use_megatron_fsdp else
    {"optim_grads": 2, "optim_grads_params": 3}[read.data_parallel_sharding_strategy] if read.use_megatron_fsdp else 0,
    "precision": "bf16-mixed" if read.bf16 else "fp16-mixed" if read.fp16 else "float32"}))
"""),
    "nanotron": ("nanotron", """
bare("nanotron", "src/nanotron")
from nanotron.config.config import get_config_from_file
read = get_config_from_file(sys.argv[1])
p, t = read.parallelism, read.tokens
print(json.dumps({"tensor": p.tp, "pipeline": p.pp, "context": p.context_parallel_size, "readers": p.dp, "stage":
    read.optimizer.zero_stage, "micro_batch": t.micro_batch_size, "micro_batches": t.batch_accumulation_per_replica,
    "sequence": t.sequence_length, "layers": read.model.model_config.num_hidden_layers, "width":
    read.model.model_config.hidden_size, "recompute": "full" if p.recompute_layer else "none"}))
"""),
}  # fmt: skip


def has(found: Estimate) -> dict:
    """What a parser should read of a layout."""
    layout, model = found.layout, found.model
    axes = {axis: layout.size(axis) for axis in ("pipeline", "data", "shard", "context", "expert", "tensor")}
    return axes | {
        "ranks": found.cluster.gpus, "nodes": found.cluster.nodes, "stage": layout.zero_stage, "readers":
        layout.readers, "precision": layout.precision, "batch_size": layout.batch_size, "micro_batch":
        layout.micro_batch, "micro_batches": layout.micro_batches, "sequence": layout.sequence, "recompute":
        layout.recompute, "offload": layout.offload, "stages_per_rank": layout.stages_per_rank, "layers": model.layers,
        "width": model.width, "kept": layout.kept,
        "copies": layout.size("data") if layout.zero_stage else layout.readers,
        "shards": layout.size("shard") * layout.size("expert") if layout.zero_stage else 1,
    }  # fmt: skip


def read_by_tool(tool: str, folder: Path, command: str, found: Estimate, sources: Path | None) -> dict | None:
    """What the tool's parser reads; None where there is no checkout of it."""
    if tool in READERS:
        return READERS[tool](folder, command, found)
    name, program = FOREIGN[tool]
    if sources is None or not (sources / name).exists():
        return None
    (file,) = [path for path in folder.iterdir() if path.stem in FOREIGN]
    path = os.pathsep.join([str(sources / name), str(sources / name / "src"), os.environ.get("PYTHONPATH", "")])
    settings = dict(os.environ, PYTHONPATH=path, WORLD_SIZE=str(found.cluster.gpus))
    settings |= dict(re.findall(r"(?m)^export (\w+)=(\S+)$", file.read_text()))
    words = [sys.executable, "-c", BARE + program, str(file)]
    done = subprocess.run(
        words, cwd=sources / name, env=settings, capture_output=True, text=True, timeout=PATIENCE
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{tool}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def checked(tool: str, folder: Path, command: str, found: Estimate, sources: Path | None) -> bool:
    """Whether there is the tool's parser. Raises AssertionError where what it reads isn't the layout."""
    read, expected = read_by_tool(tool, folder, command, found, sources), has(found)
    wrong = [f"{name}: the tool reads {value!r}, and the layout has {expected[name]!r}" for name, value in
             (read or {}).items() if value != expected[name]]  # fmt: skip
    if wrong:
        raise AssertionError("; ".join(wrong))
    return read is not None


# --- a small model of the same kind of shape, trained -----------------------------------------------------------------


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
        zero_stage=layout.zero_stage, recompute=layout.recompute, schedule=layout.schedule, precision=layout.precision,
        stages_per_rank=layout.stages_per_rank, offload=layout.offload, sequence_parallel=layout.sequence_parallel,
    )  # fmt: skip


def shard_on_cpus() -> None:
    """On CPUs Accelerate leaves FSDP aside without a word, in the Trainer as well: it is told of it as
    06_fsdp/with_accelerate.py tells it."""
    before, trainers = accelerate.Accelerator.__init__, Trainer.create_accelerator_and_postprocess

    def tell(accelerator, **arguments):
        on_cpu(accelerator, FullyShardedDataParallelPlugin(**arguments))
        # Which each new state begins with.
        PartialState._shared_state["distributed_type"] = accelerator.distributed_type

    def started(self, *args, **words):
        before(self, *args, **words)
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and "fsdp_plugin" not in words:
            tell(self)

    def postprocessed(self):
        trainers(self)
        if self.args.fsdp_plugin_args:
            tell(self.accelerator, **self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    accelerate.Accelerator.__init__ = started
    Trainer.create_accelerator_and_postprocess = postprocessed


def rank(number: int, many: int, port: int, words: list[str], folder: Path, more: dict) -> int:
    """In a forked process: the program as torchrun would start it. Returns its exit code."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    out = os.open(folder / f"rank{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(out, stream)
        setattr(sys, name, open(stream, "w", buffering=1, closefd=False))
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(rank_variables(number, many, port) | more)
    shard_on_cpus()
    # As in 06_fsdp/with_deepspeed.py: on CPUs it would compile an all-reduce of its own.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if (folder / "training.json").exists() and (folder / "deepspeed.json").exists():
        deepspeed.init_distributed("gloo")  # as the Trainer does on GPUs, before it makes a model under stage 3
    sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    return code


def forked(words: list[str], many: int, folder: Path, more: dict) -> tuple[list[int], str]:
    """(exit codes of the ranks, negative for a signal; what they have printed). None of them is left behind."""
    codes: dict[int, int] = {}
    port, ranks = free_port(), []
    with ready_to_fork():
        for number in range(many):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = rank(number, many, port, words, folder, more)
                finally:
                    os._exit(code)
            ranks.append(pid)
    end = time.monotonic() + PATIENCE
    while len(codes) < many:
        for pid in set(ranks) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for pid in set(ranks) - set(codes):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.02)
    texts = [Path(folder, f"rank{number}.txt").read_text() for number in range(many)]
    return [codes[pid] for pid in ranks], "\n".join(texts)


STUBS = {  # of Slurm on one machine
    "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
    "srun": '#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n',
}


def in_slurm(folder: Path) -> tuple[list[int], str]:
    """The job as bash runs it, with stand-ins for Slurm's commands; torchrun and its ranks are real ones."""
    for name, text in STUBS.items():
        folder.joinpath(name).write_text(text)
        folder.joinpath(name).chmod(0o755)
    more = {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "here",
            "SLURM_NNODES": "1", "SLURM_JOB_ID": str(free_port())}  # fmt: skip
    course = folder / "course.yaml"
    course.write_text(course.read_text() + "steps: 2\n")
    job = (folder / "job.sbatch").read_text().replace("distributed_training.py", str(ROOT / "distributed_training.py"))
    done = subprocess.run(["bash", "-c", job], cwd=folder, env=dict(os.environ) | more, capture_output=True, text=True,
                          timeout=PATIENCE)  # fmt: skip
    return [done.returncode], done.stdout + done.stderr


def emitted_small(tool: str, model: models.Model, layout: Layout) -> Emitted:
    """As for a processor; Accelerate with shards as for GPUs, since it would leave them aside."""
    ranks = math.prod(size for _, size in layout.mesh)
    where = "h100-80gb" if tool == "accelerate" and layout.zero_stage else "cpu"
    return emit(estimate(model, cluster(where, ranks, ranks), layout), tool)


def losses_of(tool: str, text: str, folder: Path) -> list[float]:
    """Losses of the steps: of the course's, as its run has them; else what rank 0 has printed."""
    if tool in ("torchrun", "slurm"):
        (file,) = folder.rglob("metrics.jsonl")
        return [json.loads(line)["loss"] for line in file.read_text().splitlines()]
    pattern = r"'train_loss': '?([\d.]+)" if tool == "hf-trainer" else r"step +\d+.*?loss +([\d.]+)"
    return [float(loss) for loss in re.findall(pattern, text)]


def train(tool: str, written: Emitted, layout: Layout, folder: Path) -> list[float]:
    """Two steps of it. Returns the losses; raises AssertionError with what the ranks said."""
    for name, text in written.files.items():
        (folder / name).write_text(text)
    ranks = math.prod(size for _, size in layout.mesh)
    words, more = ["train.py", "--steps", "2"], {}
    if tool == "torchrun":
        words = [str(ROOT / "distributed_training.py"), "--distributed", "--config", "course.yaml", "--steps", "2"]
    elif tool == "deepspeed":
        words += ["--deepspeed_config", "deepspeed.json"]
    elif tool == "accelerate" and written.command.startswith("accelerate"):
        told = prepare_multi_gpu_env(accelerate_arguments(folder, written.command))
        own = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
        more = {name: str(value) for name, value in told.items() if name.startswith(own)}
        more["ACCELERATE_USE_CPU"] = "true"  # else it looks for GPUs, finds none, and each rank trains alone
    if layout.offload and tool in ("deepspeed", "hf-trainer"):
        CPUAdamBuilder().load()  # compiled here once, and not by each rank while the others wait
    codes, text = in_slurm(folder) if tool == "slurm" else forked(words, ranks, folder, more)
    losses = [] if any(codes) else losses_of(tool, text, folder)
    if layout.offload and tool == "accelerate" and "Cannot access accelerator device when none is available" in text:
        raise UserError("fully_shard's offload pins memory, which takes a GPU")
    good = not any(codes) and len(losses) == (1 if tool == "hf-trainer" else 2)
    if not good or not all(3 < loss < 9 for loss in losses):  # log of the vocabulary is 6.2
        raise AssertionError(f"exit {codes}, losses {losses}\n{text[-4000:]}")
    return losses


# --- all of them ------------------------------------------------------------------------------------------------------


class Results:
    """What has passed, by a digest of what it was; written after each."""

    def __init__(self, file: str | None):
        self.file = Path(file) if file else None
        self.passed: dict[str, Any] = json.loads(self.file.read_text()) if self.file and self.file.exists() else {}

    def of(self, what: Any, work: Callable[[], Any]) -> Any:
        key = hashlib.sha256(json.dumps([what, VERSIONS], sort_keys=True).encode()).hexdigest()[:24]
        if key not in self.passed:
            found = work()
            if not found:
                return found
            self.passed[key] = found
            if self.file:
                self.file.write_text(json.dumps(self.passed))
        return self.passed[key]


VERSIONS = [torch.__version__, accelerate.__version__, deepspeed.__version__, Path(__file__).read_text()]


def planned(tool: str, model: str, limit: int) -> tuple[Estimate, Emitted]:
    """What `python -m planner emit` writes. Raises UserError with what it says otherwise."""
    line = f"--model {model} --gpu b200 --gpus 8 --batch-size 64 --sequence 1024 --max-memory-gb {limit}"
    return command_line.emitted(command_line.read(["emit", "--format", tool, *line.split()]))


def named(tool: str, gpus: int, mesh: dict, fields: dict) -> tuple[Estimate, Emitted]:
    model, nodes = models.find("llama-3-8b"), cluster("h100-80gb", gpus, 8)
    fields = {"batch_size": 64, "sequence": 4096, "recompute": "full", "sequence_parallel": False} | fields
    found = estimate(model, nodes, make_layout(model, nodes, mesh, **fields), max_memory_gib=1000)
    return found, emit(found, tool)


Wanted = tuple[str, str, Callable[[], tuple[Estimate, Emitted]]]


def wanted(formats: list[str]) -> list[Wanted]:
    """(format, name, what makes its estimate and files) of everything that is written."""
    found: list[Wanted] = [(tool, f"{model} {limit}", partial(planned, tool, model, limit))
                           for tool in formats for model in MODELS for limit in LIMITS]  # fmt: skip
    found += [(tool, f"more: {gpus} GPUs, {mesh}, {fields}", partial(named, tool, gpus, mesh, fields))
              for tool, gpus, mesh, fields in MORE if tool in formats]  # fmt: skip
    return found


def quietly(work: Callable) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return work()


def read_all(
    formats: list[str], results: Results, sources: Path | None
) -> Iterator[tuple[str, str, str, Estimate | None]]:
    """(format, name, what came of it, what was written) of everything."""
    for tool, name, make in wanted(formats):
        try:
            found, written = make()
        except UserError as error:
            print(f"{tool}, {name}: refused: {error}", flush=True)
            yield tool, name, "refused", None
            continue
        about = f"{tool}, {name}: {found.layout.describe()}"
        with tempfile.TemporaryDirectory() as folder:
            for file, text in written.files.items():
                Path(folder, file).write_text(text)
            what = [tool, "read", written.command, written.files]
            work = partial(checked, tool, Path(folder), written.command, found, sources)
            try:
                how = "read" if results.of(what, partial(quietly, work)) else "no checkout"
                said = how
            except Exception as error:  # of any kind that a tool has
                how, said = "FAILED", f"FAILED: {type(error).__name__}: {error}"
        print(f"{about}: {said}", flush=True)
        yield tool, name, how, None if how == "FAILED" else found


def train_all(kinds: dict, results: Results) -> Iterator[tuple[str, list[str], str]]:
    """(format, names that it stands for, what came of it) of each kind of layout."""
    for (tool, model, layout), names in kinds.items():
        about = f"{tool}, a small {model.name}, {layout.describe()}, for {', '.join(names)}"
        begin = time.monotonic()
        try:
            written = emitted_small(tool, model, layout)
            with tempfile.TemporaryDirectory() as folder:
                work = partial(train, tool, written, layout, Path(folder))
                losses = results.of([tool, "train", written.files], work)
        except UserError as error:
            how, said = "not here", str(error)
        except (AssertionError, subprocess.SubprocessError) as error:
            how, said = "FAILED", str(error)
        else:
            how, said = "2 steps", f"losses {losses}, {time.monotonic() - begin:.0f} s"
        print(f"{about}: {how}: {said}", flush=True)
        yield tool, names, how


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="FILE.json")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--sources", metavar="FOLDER")
    args = parser.asked()
    results, formats = Results(args.results), args.formats.split(",")
    sources = Path(args.sources).resolve() if args.sources else None
    table: dict[tuple[str, str], str] = {}
    kinds: dict = {}
    for tool, name, how, found in read_all(formats, results, sources):
        table[name, tool] = how
        if found and tool in TRAIN and name.split()[0] in MODELS:
            kinds.setdefault((tool, *small(found.model, found.layout)), []).append(name)
    for tool, names, how in train_all(kinds, results):
        table |= {(name, tool): how for name in names}
    names = list(dict.fromkeys(name for name, _ in table if name.split()[0] in MODELS))
    rows = [[name, *(table.get((name, tool), "-") for tool in formats)] for name in names]
    print("\n".join(["", *aligned([["", *formats], *rows]), ""]))
    for tool in formats:
        many = Counter(how for (_, of), how in table.items() if of == tool)
        print(f"{tool}: {', '.join(f'{number} {how}' for how, number in sorted(many.items()))}")
    if "FAILED" in table.values():
        sys.exit(1)


if __name__ == "__main__":
    main()
