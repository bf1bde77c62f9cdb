"""`python -m planner emit`: files say what the layout is, what a tool cannot express gets one line, and the course's
own file trains. The tools' own parsers read the files in tools/read_back.py.
"""

import ast
import json
import shlex
import subprocess

import pytest
import yaml
from forks import torchrun
from helpers import configure, metrics

from common import ROOT
from planner import emit
from planner.__main__ import main
from planner.models import find

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

LLAMA = "--model llama-3-8b --gpu h100-80gb --batch-size 64 --sequence 4096 --recompute full --gpus-per-node 8"
TOY = "--layers 2 --width 32 --heads 4 --vocabulary 256 --sequence 16 --precision float32 --gpu cpu --gpus-per-node 2"


def say(capsys, tool: str, line: str) -> dict:
    main(["emit", "--json", "--format", tool, *line.split()])
    return json.loads(capsys.readouterr().out)


def read(found: dict) -> list:
    """The files of settings, each as its format has it; a shell script as its lines."""
    kinds = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}
    return [
        kinds.get(name.split(".")[-1], str.splitlines)(text)
        for name, text in found["files"].items()
        if name != emit.SCRIPT
    ]


def test_slurm_starts_torchrun_on_each_node(capsys):
    found = say(capsys, "slurm", f"{LLAMA.replace('full', 'selective')} --gpus 16 --mesh data=2,shard=8 --zero-stage 3")
    job, course = found["files"]["job.sbatch"], yaml.safe_load(found["files"]["course.yaml"])
    assert "#SBATCH --nodes=2\n" in job and "--nproc_per_node=8" in job and course["mesh"] == "data=2,shard=8"
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    assert "vocabulary of 128,256" in found["notes"][0]


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
    shape = find(model)
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
    (settings,) = read(say(capsys, "deepspeed", f"{base} --gpu v100"))
    assert settings["zero_optimization"]["stage"] == first["zero_stage"] and settings["fp16"] == {"enabled": True}
    assert settings["train_micro_batch_size_per_gpu"] == first["micro_batch"]
    main(["emit", "--format", "accelerate", *base.split(), "--gpu", "v100", "--max-memory-gb", "7"])
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "--format" in line]
    assert "shard 2 x tensor 2, ZeRO-3, micro-batch 1, recompute full" in note, "what is planned, and not emitted"


def test_torchtitan_counts_embedding_and_output_among_the_layers_of_a_stage(capsys):
    """32 layers and those two over 4 stages: 9 at most."""
    line = f"{LLAMA} --gpus 16 --mesh shard=8,pipeline=2 --zero-stage 3 --schedule interleaved --stages-per-rank 2"
    (tables,) = read(say(capsys, "torchtitan", line))
    assert tables["parallelism"]["pipeline_parallel_layers_per_stage"] == 9
