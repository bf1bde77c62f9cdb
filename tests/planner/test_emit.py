"""`python -m planner emit`: a setting for each choice of the layout, for one machine and several; what a tool cannot
express gets one line; and the course's own file trains. The tools' own parsers read the files in tools/read_back.py.
"""

import ast
import json
import re
import shlex
import subprocess
from dataclasses import replace

import pytest
import yaml
from forks import torchrun
from helpers import configure, metrics, refused

from common import ROOT
from common.constants import GIB
from planner import emit, models, search
from planner.__main__ import main
from planner.emit import Emitted
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
    return emit.emit(estimated(gpus, mesh, **fields), tool)


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
        emit.emit(found, tool)
    said = str(error.value)
    of_options = ("--zero-stage", "--sequence-parallel", "--mesh", "--offload", "--dropout", "--async", "'shard'")
    there = (*mesh, *fields.values(), *of_options)
    assert any(str(value) in said for value in there), said


def test_what_does_not_fit_is_not_emitted():
    found = estimated(8, {"data": 8})
    small = replace(found.cluster, gpu=replace(found.cluster.gpu, memory=10 * GIB))
    found = replace(found, cluster=small, memory=replace(found.memory, low=10.5 * GIB, expected=12.25 * GIB))
    with refused("12.2 GiB", "10.0", "`python -m planner plan`"):
        emit.emit(found, "torchrun")
    assert emit.emit(replace(found, memory=replace(found.memory, low=9 * GIB)), "torchrun").files, "it may fit"


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
        found = emitted(tool, gpus, {"data": gpus}).command
        assert sorted(found.split()) == sorted(command.split()), f"{tool} on {gpus} GPUs"


def test_a_job_has_one_task_a_node_which_starts_the_others():
    one = emitted("slurm", 16, {"data": 2, "shard": 8}, zero_stage=3, recompute="selective")
    job, course = one.files["job.sbatch"], yaml.safe_load(one.files["course.yaml"])
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job, re.MULTILINE))
    assert asked | {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8"} == asked
    by_hand = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert re.findall(r"^srun (.*) torchrun", job, re.M) == re.findall(r"^srun (.*) torchrun", by_hand, re.M)
    assert "--nproc_per_node=8" in job and course["mesh"] == "data=2,shard=8"
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    assert "128,256" in one.notes[0], "a vocabulary that the course's GPT has not"
    found = estimated(2, {"data": 2}, gpu="cpu", precision="float32")
    for name in ("cpu", "here"):  # the latter was measured by calibrate
        one = replace(found, cluster=replace(found.cluster, gpu=replace(found.cluster.gpu, name=name)))
        assert "--gpus-per-node" not in emit.emit(one, "slurm").files["job.sbatch"], f"{name}: no GPUs are asked for"
        assert yaml.safe_load(emit.emit(one, "accelerate").files["accelerate.yaml"])["use_cpu"], f"{name}: use_cpu"


@pytest.mark.parametrize("mesh, stage, ordered, checkpoint", [
    ({"data": 8}, 0, False, False), ({"shard": 4, "tensor": 2}, 1, True, False), ({"shard": 8}, 3, False, True),
    ({"data": 4, "context": 2}, 0, True, False), ({"shard": 4, "tensor": 2}, 2, False, True),
])  # fmt: skip
def test_megatrons_own_checks_let_the_script_start(mesh, stage, ordered, checkpoint):
    """Megatron-LM's validate_args at d98e8a64 refuses tensor and context ranks on Hopper without the variable, and its
    FSDP with the variable, or with another format of checkpoints; tools/read_back.py lets it validate."""
    text = emitted("megatron", 8, mesh, zero_stage=stage, sequence=4096).files["megatron.sh"]
    assert ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in text) is ordered
    assert ("--ckpt-format fsdp_dtensor" in text) is checkpoint


def test_a_job_in_another_folder_starts_the_courses_own_script(tmp_path):
    main(["emit", "--format", "slurm", *TOY.split(), "--gpus", "2", "--batch-size", "8", "--out", str(tmp_path)])
    job = shlex.split((tmp_path / "job.sbatch").read_text(), comments=True)
    assert str(ROOT / "distributed_training.py") in job and "distributed_training.py" not in job


def test_the_head_of_a_file_says_what_was_predicted():
    found = estimated(8, {"data": 8})
    c, (first, _) = found.constants, emit.emit(found, "accelerate").files["accelerate.yaml"].split("\n", 1)
    words = "llama-3-8b", "8 x h100-80gb", found.layout.describe(), f"{found.memory.expected / GIB:.1f} GiB"
    times = (f"{found.seconds * factor:.3g}" for factor in (1.0, c.step_low, c.step_high))
    assert first.startswith("# ") and not [word for word in (*words, *times) if word not in first], first
    assert f"{found.memory.expected / GIB:.1f}" != f"{found.memory.needed / GIB:.1f}", "what the allocator adds shows"


# --- the command ----------------------------------------------------------------------------------------------------

LLAMA = "--model llama-3-8b --gpu h100-80gb --batch-size 64 --sequence 4096 --recompute full --gpus-per-node 8"
TOY = "--layers 2 --width 32 --heads 4 --vocabulary 256 --sequence 16 --precision float32 --gpu cpu --gpus-per-node 2"


def say(capsys, tool: str, line: str) -> dict:
    main(["emit", "--json", "--format", tool, *line.split()])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line, strategy, implementation, options",
    [
        ("--gpus 4 --mesh data=4 --micro-batch 2", "ddp", "pytorch", {"accumulation_steps": 2}),
        ("--gpus 4 --mesh shard=4 --zero-stage 1", "zero1", "pytorch", {"accumulation_steps": 4}),
        ("--gpus 4 --mesh shard=4 --zero-stage 2 --offload", "zero2", "pytorch", {"offload": True}),
        ("--gpus 4 --mesh data=2,shard=2 --zero-stage 3 --recompute full", "hsdp", "pytorch", {"recompute": "full"}),
        ("--gpus 4 --mesh tensor=4", "sequence", "by-hand", {"axes": {"tensor": 4}}),
        ("--gpus 4 --mesh context=4", "context", "by-hand", {"axes": {"context": 4}}),
        ("--gpus 2 --mesh pipeline=2 --schedule zbv --stages-per-rank 2", "pipeline", "pytorch",
         {"schedule": "zbv", "microbatches": 16}),
        ("--gpus 8 --mesh pipeline=2,data=2,tensor=2 --sequence-parallel no", "mesh", "pytorch", {"microbatches": 8}),
        ("--gpus 4 --mesh data=2,expert=2 --experts 4 --top-k 2", "expert", "by-hand", {"experts": 4, "top_k": 2}),
    ],
)  # fmt: skip
def test_the_course_reads_its_own(capsys, tmp_path, line, strategy, implementation, options):
    toy = TOY.replace("--layers 2", "--layers 4").replace("--gpus-per-node 2", "--gpus-per-node 8")
    found = say(capsys, "torchrun", f"{toy} --batch-size 16 {line}")
    file = tmp_path / "course.yaml"
    file.write_text(found["files"]["course.yaml"])
    config = configure(f"--dry-run --config {file}")
    assert (config.strategy, config.implementation, config.batch_size) == (strategy, implementation, 16), "strategy"
    assert (config.layers, config.width, config.heads, config.context) == (4, 32, 4, 16), "the model's shape"
    for name, value in options.items():
        assert getattr(config, name, None) == value or getattr(config.options, name, None) == value, name


def test_the_best_layout_is_taken_and_trains(capsys, tmp_path):
    """What the command line starts, started: torchrun, two ranks, gloo."""
    main(["emit", "--format", "torchrun", "--out", str(tmp_path), *TOY.split(), "--gpus", "2", "--batch-size", "8"])
    *_, command = capsys.readouterr().out.splitlines()
    words = shlex.split(command)
    assert words[:3] == ["cd", str(tmp_path), "&&"] and str(ROOT / "distributed_training.py") in words
    words = words[3:]
    assert words[:2] == ["torchrun", "--nproc_per_node=2"]
    more = ["--steps=2", "--checkpoint-every=0", f"--run-dir={tmp_path / 'run'}"]
    process = torchrun("--standalone", *words[1:], *more, cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    asked = yaml.safe_load((tmp_path / "course.yaml").read_text())
    kept = json.loads((tmp_path / "run/config.json").read_text())
    mesh = ",".join(f"{axis}={size}" for axis, size in kept["mesh"].items())
    assert mesh == asked["mesh"] and kept["config"]["width"] == 32 and kept["world_size"] == 2
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize("model", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("tool", ["accelerate", "deepspeed", "hf-trainer"])
def test_the_training_file_is_a_program_of_the_layouts_numbers(capsys, tool, model):
    """Its model, by Transformers' names; tools/read_back.py trains with it."""
    line = f"--model {model} --gpu b200 --gpus 8 --mesh data=8 --batch-size 64 --micro-batch 2 --recompute full"
    program = ast.parse(say(capsys, tool, f"{line} --max-memory-gb 9999")["files"][emit.SCRIPT])
    found = {ast.unparse(node.targets[0]): node.value for node in program.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(found["(SEQUENCE, MICRO_BATCH, ACCUMULATE)"]) == (2048, 2, 4)
    words = {word.arg: ast.literal_eval(word.value) for word in found["MODEL"].keywords}
    shape = models.find(model)
    shared = {"num_key_value_heads": shape.kv_heads, "num_local_experts": shape.experts}
    names = {"n_layer": shape.layers, "num_hidden_layers": shape.layers} | shared
    names |= {"n_embd": shape.width, "hidden_size": shape.width}
    assert {name: value for name, value in names.items() if name in words and words[name] != value} == {}
    assert len(set(names) & set(words)) >= 2 and words["vocab_size"] == shape.vocabulary
    assert "gradient_checkpointing_enable" in ast.unparse(program) or tool == "hf-trainer"


def test_what_is_emitted_is_what_is_planned(capsys):
    """Where the tool can express it; else it is said what is taken instead. A V100 computes in fp16."""
    base = "--model opt-1.3b --gpus 4 --batch-size 16 --sequence 512"
    main(["plan", *f"{base} --gpu v100 --json".split()])
    (first, *_) = json.loads(capsys.readouterr().out)
    assert first["precision"] == "fp16-mixed"
    settings = json.loads(say(capsys, "deepspeed", f"{base} --gpu v100")["files"]["deepspeed.json"])
    assert settings["zero_optimization"]["stage"] == first["zero_stage"] and settings["fp16"] == {"enabled": True}
    assert settings["train_micro_batch_size_per_gpu"] == first["micro_batch"]
    main(["emit", "--format", "accelerate", *base.split(), "--gpu", "v100", "--max-memory-gb", "7"])
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "--format" in line]
    best = search.plan(models.find("opt-1.3b"), cluster("v100", 4), 16, 512, "fp16-mixed", 7.0)[0].estimate.layout
    assert best.describe() in note, "what is planned, and not emitted"


@pytest.mark.parametrize("tool", ["megatron", "nanotron"])
def test_what_is_emitted_for_a_framework_is_predicted_for_it(tool, capsys):
    line, sizes = f"{LLAMA} --gpus 8 --mesh data=4,tensor=2 --max-memory-gb 900".split(), {}
    for framework in (tool, "torch"):
        main(["estimate", *line, "--framework", framework, "--json"])
        sizes[framework] = f"{json.loads(capsys.readouterr().out)['memory_gib']:.1f} GiB"
    main(["emit", "--format", tool, *line])
    assert sizes[tool] in capsys.readouterr().out.partition("---")[0] and sizes[tool] != sizes["torch"]


def test_torchtitan_counts_embedding_and_output_among_the_layers_of_a_stage(capsys):
    """32 layers and those two over 4 stages: 9 at most."""
    line = f"{LLAMA} --gpus 16 --mesh shard=8,pipeline=2 --zero-stage 3 --schedule interleaved --stages-per-rank 2"
    tables = tomllib.loads(say(capsys, "torchtitan", line)["files"]["torchtitan.toml"])
    assert tables["parallelism"]["pipeline_parallel_layers_per_stage"] == 9
