"""`python -m planner emit`: what it says beside its files, and that the course's own trains. What files mean:
test_there_and_back.py; the tools' own parsers read them in tools/read_back.py.
"""

import json
import re
import shlex
from dataclasses import replace

import pytest
import yaml
from emitted_files import READERS, options
from forks import torchrun
from helpers import metrics, refused
from planner_cases import say, say_json

from common import ROOT
from common.constants import GIB
from planner import emit, models, search
from planner.emit import Emitted
from planner.estimate import Estimate, estimate
from planner.hardware import cluster
from planner.layout import make_layout


def estimated(gpus: int, mesh: dict[str, int], gpu: str = "h100-80gb", model: str = "llama-3-8b", **fields) -> Estimate:
    nodes, shape = cluster(gpu, gpus, min(gpus, 8)), models.find(model)
    fields = {"batch_size": 64, "sequence": 2048} | fields
    return estimate(shape, nodes, make_layout(shape, nodes, mesh, **fields), max_memory_gib=2000)


def emitted(tool: str, gpus: int, mesh: dict[str, int], **fields) -> Emitted:
    return emit.emit(estimated(gpus, mesh, **fields), tool)


def test_what_does_not_fit_is_not_emitted():
    found = estimated(8, {"data": 8})
    small = replace(found.cluster, gpu=replace(found.cluster.gpu, memory=10 * GIB))
    found = replace(found, cluster=small, memory=replace(found.memory, low=10.5 * GIB, expected=12.25 * GIB))
    with refused("12.2 GiB", "10.0", "`python -m planner plan`"):
        emit.emit(found, "torchrun")
    assert emit.emit(replace(found, memory=replace(found.memory, low=9 * GIB)), "torchrun").files, "it may fit"


def test_a_job_has_one_task_a_node_which_starts_the_others(tmp_path):
    one = emitted("slurm", 32, {"data": 4, "shard": 8}, zero_stage=3)
    assert "#SBATCH --nodes=4\n" in one.files["job.sbatch"]
    by_hand = (ROOT / "launch" / "slurm.sbatch").read_text()
    srun = re.findall(r"^srun (.*) torchrun", one.files["job.sbatch"], re.M)
    assert srun == re.findall(r"^srun (.*) torchrun", by_hand, re.M) != []
    assert "128,256" in one.notes[0], "a vocabulary that the course's GPT has not"
    found = estimated(2, {"data": 2}, gpu="cpu", precision="float32")
    for name in ("cpu", "here"):  # the latter was measured by calibrate
        one = replace(found, cluster=replace(found.cluster, gpu=replace(found.cluster.gpu, name=name)))
        assert "--gpus-per-node" not in emit.emit(one, "slurm").files["job.sbatch"], f"{name}: no GPUs are asked for"
        other = emit.emit(one, "accelerate")
        for file, text in other.files.items():
            (tmp_path / file).write_text(text)
        assert yaml.safe_load(other.files["accelerate.yaml"])["use_cpu"], f"{name}: use_cpu"
        assert READERS["accelerate"](other.command, other.files, tmp_path)["world"] == 2, f"{name}: its ranks"


def test_a_job_in_another_folder_starts_the_courses_own_script(tmp_path):
    folder = tmp_path / "new" / "folder"
    for _ in range(2):  # the second time it is there
        out = say(f"emit --format slurm {TOY} --gpus 2 --batch-size 8 --out {folder}")
        assert {file.name for file in folder.iterdir()} == {"job.sbatch", "course.yaml"}
        assert str(folder / "course.yaml") in out and f"cd {folder} && " in out
    job = shlex.split((folder / "job.sbatch").read_text(), comments=True)
    assert str(ROOT / "distributed_training.py") in job and "distributed_training.py" not in job


def test_layers_that_are_computed_again_are_those_of_each_of_a_ranks_stages():
    one = emitted("megatron", 2, {"pipeline": 2}, stages_per_rank=2, recompute="full", recompute_layers=3)
    assert options(one.files["megatron.sh"])["recompute-num-layers"] == "3"


def test_the_head_of_a_file_says_what_was_predicted():
    found = estimated(8, {"data": 8})
    c, (first, _) = found.constants, emit.emit(found, "accelerate").files["accelerate.yaml"].split("\n", 1)
    words = "llama-3-8b", "8 x h100-80gb", found.layout.describe(), f"{found.memory.expected / GIB:.1f} GiB"
    times = (f"{found.seconds * factor:.3g}" for factor in (1.0, c.step_low, c.step_high))
    assert first.startswith("# ") and not [word for word in (*words, *times) if word not in first], first
    assert f"{found.memory.expected / GIB:.1f}" != f"{found.memory.needed / GIB:.1f}", "what the allocator adds shows"


def test_by_hand_where_pytorchs_schedule_would_compute_a_stage_many_times():
    for schedule, by_hand in (("zb-h1", True), ("1f1b", None)):
        found = estimated(2, {"pipeline": 2}, schedule=schedule, recompute="full")
        assert yaml.safe_load(emit.emit(found, "torchrun").files["course.yaml"]).get("by-hand") is by_hand


# --- the command ----------------------------------------------------------------------------------------------------

LLAMA = "--model llama-3-8b --gpu h100-80gb --batch-size 64 --sequence 4096 --recompute full --gpus-per-node 8"
TOY = "--layers 2 --width 32 --heads 4 --vocabulary 256 --sequence 16 --precision float32 --gpu cpu --gpus-per-node 2"


def test_the_best_layout_is_taken_and_trains(tmp_path):
    """What the command line starts, started: torchrun, two ranks, gloo."""
    *_, command = say(f"emit --format torchrun --out {tmp_path} {TOY} --gpus 2 --batch-size 8").splitlines()
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


def test_what_is_emitted_is_what_is_planned():
    """Where the tool can express it; else it is said what is taken instead. A V100 computes in fp16."""
    base = "--model opt-1.3b --gpus 4 --batch-size 16 --sequence 512"
    (first, *_) = say_json(f"plan {base} --gpu v100")
    assert first["precision"] == "fp16-mixed"
    settings = json.loads(say_json(f"emit --format deepspeed {base} --gpu v100")["files"]["deepspeed.json"])
    assert settings["zero_optimization"]["stage"] == first["zero_stage"] and settings["fp16"] == {"enabled": True}
    assert settings["train_micro_batch_size_per_gpu"] == first["micro_batch"]
    said = say(f"emit --format accelerate {base} --gpu v100 --max-memory-gb 7")
    (note,) = [line for line in said.splitlines() if "--format" in line]
    best = search.plan(models.find("opt-1.3b"), cluster("v100", 4), 16, 512, "fp16-mixed", 7.0)[0].estimate.layout
    assert best.describe() in note, "what is planned, and not emitted"


@pytest.mark.parametrize("tool", ["megatron", "nanotron"])
def test_what_is_emitted_for_a_framework_is_predicted_for_it(tool):
    line = f"{LLAMA} --gpus 8 --mesh data=4,tensor=2 --max-memory-gb 900"
    ours, other = (
        f"{say_json(f'estimate {line} --framework {name}')['memory_gib']:.1f} GiB" for name in (tool, "torch")
    )
    assert ours in say(f"emit --format {tool} {line}").partition("---")[0] and ours != other
