"""The planner's commands: what they print, what they find, and one line for what cannot be."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from planner_cases import refusal, say, say_json

from common import ROOT
from planner import calibrate, hardware, memory, models, scope, search
from planner.constants import PRIOR
from planner.estimate import estimate
from planner.hardware import GPUS, NETWORKS, cluster
from planner.layer_time import of_layer
from planner.layout import Layout, make_layout


def test_the_layout_outside_of_what_was_checked_is_named():
    line = "estimate --model mixtral-8x7b --gpu b200 --gpus 8 --mesh expert=8 --zero-stage 0 --batch-size 64"
    (reason,) = say_json(f"{line} --sequence 4096")["out_of_scope"]
    assert "experts" in reason and reason in say(f"{line} --sequence 4096"), "in the table of text as well"
    line = "estimate --model llama-3-8b --gpu h100 --gpus 8 --mesh shard=8 --batch-size 64"
    assert say_json(line)["out_of_scope"] == []


PLAN = "plan --model llama-7b --gpus 8 --gpu h100-80gb --batch-size 512 --sequence 4096"


def test_a_plan_has_the_best_first_and_is_what_estimate_says(tmp_path):
    picture = tmp_path / "plan.png"
    out = say(f"{PLAN} --explain --count 3 --plot {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    best, *others = found = say_json(f"{PLAN} --count 3")
    shown = ["llama-7b", "6.74", "h100-80gb", *(one["nearest_alternative"] for one in found)]
    assert not [words for words in shown if words not in out], out
    assert "Rajbhandari et al. 2020" in out and f"{best['parameters']:,}" in out, "explained, with sources"
    seconds = [one["step_seconds"] for one in others if one["trusted"]]
    assert seconds == sorted(seconds) and (best["preferred"] or best["step_seconds"] <= seconds[0])
    mesh = ",".join(f"{axis}={size}" for axis, size in best["mesh"].items())
    line = f"estimate {PLAN[5:]} --mesh {mesh} --zero-stage {best['zero_stage']} --recompute {best['recompute']}"
    again = say_json(f"{line} --micro-batch {best['micro_batch']}")
    assert again == {key: value for key, value in best.items() if key not in ("nearest_alternative", "preferred")}


def test_less_memory_gives_a_layout_that_needs_less():
    at = {gib: say_json(f"{PLAN} --count 3 --max-memory-gb {gib}") for gib in (79, 40, 24)}
    fastest = [min(one["step_seconds"] for one in plan) for plan in at.values()]
    assert fastest == sorted(fastest) and fastest[0] < fastest[-1]
    assert all(one["memory_gib"] <= gib for gib, plan in at.items() for one in plan)


def test_a_plan_of_few_layouts_is_the_best_of_all():
    """Every layout of 4 GPUs estimated in full: none that fits with the reserve is faster than all of the plan's. What
    it recommends first is the simplest of those that it cannot tell from the fastest."""
    model, gpus = models.find("gpt2-xl"), cluster("a100-40gb", 4)
    every = [estimate(model, gpus, one) for one in search.layouts(model, gpus, 32, 1024, "bf16-mixed")]
    limit = gpus.gpu.memory
    fits = [one for one in every if scope.recommended(one.memory.expected, one.memory.worst, limit)]
    chosen = [choice.estimate for choice in search.plan(model, gpus, 32, 1024)]
    fastest = min(one.seconds for one in fits)
    assert len(every) > 100 and min(one.seconds for one in chosen) == pytest.approx(fastest, rel=1e-3)
    near = [one for one in fits if one.seconds <= (1 + 2**0.5 * chosen[0].constants.error) * fastest]
    assert search.simplicity(chosen[0].layout) == min(search.simplicity(one.layout) for one in near)
    sure = search.plan(model, gpus, 32, 1024, constants=replace(chosen[0].constants, error=0.0))[0].estimate
    assert sure.seconds == pytest.approx(fastest, rel=1e-3), "without errors it can tell all from the fastest"


def test_every_layout_of_a_search_is_one_that_estimate_takes():
    model, gpus = models.find("mixtral-8x7b"), cluster("h100-80gb", 16)
    for layout in list(search.layouts(model, gpus, 64, 4096, "bf16-mixed"))[::17]:
        fields = {name: value for name, value in vars(layout).items() if name not in ("mesh", "notes")}
        assert make_layout(model, gpus, dict(layout.mesh), **fields) == layout


def test_the_search_of_16384_gpus_is_narrow_enough():
    """Layouts that are estimated for Llama 3 405B. A thousand take a tenth to a fifth of a second."""
    model, gpus = models.find("llama-3-405b"), cluster("h100-80gb", 16384)
    number = sum(1 for _ in search.layouts(model, gpus, 2048, 8192, "bf16-mixed"))
    assert 1000 < number < 12_000, "layouts that are estimated"


ESTIMATE = "estimate --model llama-7b --gpus 8 --gpu a100-80gb --batch-size 64"
WRONG = {  # and words of the one line that is said of it: what is wrong, and what there is
    "pln --gpus 8": "pln plan",
    "zyzzyva": "zyzzyva plan estimate calibrate",
    "models --jsn": "--jsn '--json'",
    "estimate --gpus 2 --gpu zyzzyva --batch-size 64 --model llama-7b": " ".join(["zyzzyva", *GPUS]),
    "estimate --gpus 2 --gpu h100 --batch-size 64 --mod 3": "--mod '--model'",
    "plan --model lama-7b --gpus 8 --gpu h100 --batch-size 8": "lama-7b llama-7b",
    "plan --model llama-7b --gpus 8 --gpu h10 --batch-size 8": "h10 h100",
    PLAN + " --max-memory 10": "--max-memory --max-memory-gb",
    PLAN + " --zyzzyva 10": "--zyzzyva --help",
    PLAN + " --max-memory-gb 0": "--max-memory-gb 0",
    PLAN + " --max-memory-gb -1": "--max-memory-gb 0 1",
    PLAN + " --max-memory-gb 0.1": "8 0.1",
    ESTIMATE.replace("estimate", "emit") + " --format nosuch": "nosuch torchtitan deepspeed",
    "calibrate --ranks 100000": "--ranks 100000 cores",
    f"measure {ROOT}/README.md:f --gpu h100 --gpus 8": "README.md .py Python",
    PLAN + " --precision bf17": "bf17 float32 bf16-mixed fp16-mixed",
    PLAN + " --constants nowhere.json": "--constants",
    PLAN.replace("--gpus 8", "--gpus 12"): "--gpus 12 8",
    "plan --layers 1 --width 63 --heads 1 --vocabulary 99 --gpus 8 --gpu h100 --batch-size 7": "--batch-size 7 8",
    PLAN.replace("512", "many"): "--batch-size many",
    f"{ESTIMATE} --mesh tensor=3,data=2": "--mesh tensor=3 data=2 6",
    f"{ESTIMATE} --mesh tensr=8": "--mesh tensr=8 tensr tensor",
    f"{ESTIMATE.replace('8 --gpu', '6 --gpu')} --mesh tensor=6": "tensor=6 --heads 32",
    f"{ESTIMATE} --mesh expert=8": "expert=8 llama-7b",
    f"{ESTIMATE} --mesh pipeline=8 --stages-per-rank 5": "40 pipeline=8 5 32",
    f"{ESTIMATE} --mesh data=8 --micro-batch 3": "--batch-size 64 8",
    f"{ESTIMATE} --mesh data=8 --recompute ful": "ful full",
    f"{ESTIMATE} --mesh pipeline=8 --schedule 1f1c": "1f1c 1f1b",
    f"{ESTIMATE} --zero-stage 4": "--zero-stage 0 1 2",
    f"{ESTIMATE} --network infinband": "infinband",
    "estimate --layers 2 --gpus 1 --gpu cpu --batch-size 8": "--width --heads --vocabulary",
    f"{ESTIMATE} --width 100": "--width 100 --heads 32",
    f"{ESTIMATE} --kv-heads 5": "--kv-heads 5 --heads 32",
    f"{ESTIMATE} --flash true": "--flash true",
    f"{ESTIMATE} --kv-heads 0": "--kv-heads 0 --heads 32",
    f"{ESTIMATE} --experts 8 --top-k 9": "--top-k 9 1 --experts",
    f"{ESTIMATE} --experts 8 --top-k 0": "--top-k 0 1 --experts",
    "measure mine.py:f --gpu h101 --gpus 8": "h101 h100",
    "benchmark --models tinny": "'tinny' 'tiny'",
    **{
        f"{command} --{name} 0": f"--{name} 1 0"
        for command, names in (
            (PLAN, ("count", "batch-size", "sequence", "gpus")),
            (ESTIMATE, ("gpus-per-node", "layers", "mlp-width")),
            ("benchmark", ("max-gpus", "steps", "batch-size")),
            ("calibrate", ("ranks",)),
        )
        for name in names
    },
    f"{ESTIMATE} --mlp relu": "--mlp relu",
    f"{ESTIMATE.replace('estimate', 'probe')} --seconds 0": "--seconds 0",
    f"{ESTIMATE} --nf4": "--nf4 --lora 1 0",
    f"{ESTIMATE} --recompute-layers 2": "--recompute-layers 2 --recompute full",
    f"{ESTIMATE} --attention flash4": "flash4 flash3 cudnn",
    f"{ESTIMATE} --lora -1": "--lora 0 -1",
    f"{ESTIMATE} --lora 8 --lora-on qkw": "qkw qkv",
    f"{ESTIMATE} --lora 8 --nf4 --mesh tensor=8": "tensor=8 --nf4",
    f"{PLAN.replace('llama-7b', 'mixtral-8x7b')} --lora 8": "--lora mixtral-8x7b",
    f"{ESTIMATE.replace('estimate', 'emit')} --format accelerate --lora 8": "--lora with_qlora.py",
    f"{ESTIMATE} --precision nvfp4": "nvfp4 4-bit bf16-mixed",
    "goodput --gpus 8 --failures 0 --checkpoint-seconds 1": "--failures 0",
    "goodput --gpus 99999999999999999999992 --failures 1 --checkpoint-seconds 1": "--gpus 1000000",
    "plan --model gpt2 --gpu h100 --gpus 99999999999999999999992 --batch-size 8": "--gpus 1000000",
    "goodput --gpus 0 --failures 1 --checkpoint-seconds 1": "--gpus 1 0",
    "goodput --gpus 8 --failures 1 --checkpoint-seconds 1 --interval-minutes -1": "--interval-minutes -1",
    "goodput --gpus 8 --failures 1e-5 --checkpoint-seconds 1 --tokens 1e9": "--tokens --tokens-per-second",
    "goodput --gpus 8 --failures 100 --checkpoint-seconds 1 --interval-minutes 9999": "interval",
    "plan --model gpt2 --gpus 1 --batch-size 1 --price h100": "--price h100 NAME=DOLLARS",
    "plan --model gpt2 --gpus 1 --batch-size 1 --price h100=-1": "--price h100=-1 0",
    ESTIMATE.replace("estimate", "emit")
    + " --format torchtitan --mesh shard=8 --zero-stage 3 --layers 30": "--format torchtitan llama-7b",
    ESTIMATE.replace("estimate", "emit")
    + " --format torchrun --mesh data=8 --max-memory-gb 900 --offload": "--format torchrun --offload",
    ESTIMATE.replace("estimate", "emit") + " --format torchrn --mesh data=8": "torchrn torchrun",
    ESTIMATE.replace("estimate", "emit") + " --format torchrun --zero-stage 3": "--zero-stage --mesh",
    ESTIMATE.replace("estimate", "emit") + " --format torchrun --mesh data=8 --max-memory-gb 20": "20.0 plan",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_gets_one_line(line):
    said = refusal(line)
    assert [word for word in WRONG[line].split() if word not in said] == [], said


def test_the_planner_starts_without_torch():
    """It takes seconds to import, and nothing here needs it."""
    code = "import sys; from planner.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *PLAN.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_calibrate_measures_this_machine(tmp_path, monkeypatch):
    """What it writes is the GPU "here" of a later command, whose work takes as long as its products say."""
    monkeypatch.setattr("planner.calibrate.SIDE", 256)
    monkeypatch.setattr("planner.calibrate.SIZES", (2**12, 2**16, 2**20))
    file = tmp_path / "here.json"
    assert "written to" in say(f"calibrate --out {file} --ranks 2")
    measured = json.loads(file.read_text())["here"]
    assert min(measured["peak"] / 1e9, measured["hbm"] / 1e8, measured["link"] / 1e6) > 0.1
    line = f"estimate --layers 2 --width 64 --heads 4 --vocabulary 256 --gpus 2 --batch-size 8 --constants {file}"
    found = say_json(f"{line} --gpu here --mesh data=2 --sequence 64 --precision fp32")
    assert 0 < found["model_tflops_per_gpu"] * 1e12 < measured["peak"] and found["gpu"] == "here", "of this machine"


def test_a_calibrated_block_takes_as_long_as_it_took():
    """What products do not explain is element-wise work; of a block that took 50 ms the planner says 50 ms."""
    gpu = hardware.here({"peak": 100e9, "hbm": 10e9, "link": 1e9, "cores": 2})
    constants = replace(PRIOR, matmul=1.0, kernel=1e-5, memory_rate=1.0)
    constants = replace(constants, passes=calibrate.passes(gpu, constants, 0.05))
    layout = Layout((("data", 1),), 8, 8, 128, fused=False, precision="float32", sequence_parallel=False)
    one = of_layer(models.course_gpt(1, 128, 4, 128), gpu, layout, False, constants)
    assert one.forward + one.backward == pytest.approx(0.05), "seconds of the block that was measured, by the planner"


def test_calibrate_takes_what_is_usual_among_ranks(monkeypatch, tmp_path):
    """And four ranks on two cores take turns, which costs a fifth more than half of the speed."""
    ranks = [
        {"peak": 6e10, "kernel": 1e-5, "hbm": 1e10, "block": 0.02},
        {"peak": 5e10, "kernel": 2e-5, "hbm": 2e10, "block": 0.03},
    ]
    found = {calibrate.one_rank: ranks, calibrate.crowded_block: [0.05, 0.06, 0.06, 0.09]}
    monkeypatch.setattr("common.lab.launch.launch", lambda work, size, **_: found[work])
    monkeypatch.setattr(calibrate, "links", lambda ranks: (1e-4, 1e9))
    monkeypatch.setattr(calibrate.os, "sched_getaffinity", lambda process: {0, 1})
    calibrate.calibrate(tmp_path / "here.json", 4)
    written = json.loads((tmp_path / "here.json").read_text())
    usual = {"peak": 5.5e10, "hbm": 1.5e10, "kernel": 1.5e-5, "block": 0.025, "crowding": 0.06 / 0.05}
    assert written["here"] == pytest.approx(usual | {"alpha_link": 1e-4, "link": 1e9, "cores": 2}), "medians of ranks"
    assert written["constants"]["kept"] == 0, "a processor that copies a message does not compute meanwhile"
    hardware.GPUS["here"] = hardware.read_here(tmp_path / "here.json")
    try:
        one, two, four = (hardware.cluster("here", ranks, ranks).gpu for ranks in (1, 2, 4))
        assert (one.peak, one.hbm) == (two.peak, two.hbm) == (5.5e10, 1.5e10)
        assert (four.peak, four.hbm) == pytest.approx((5.5e10 / 2 / 1.2, 1.5e10 / 2 / 1.2)), "half a core, less a sixth"
    finally:
        del hardware.GPUS["here"]


def test_links_are_those_of_one_message(monkeypatch):
    """All-reduces in a ring of 4 ranks: 6 messages one after the other, of a quarter each; the slowest rank counts."""
    times = [6 * (1e-4 + size / 4 / 1e9) for size in calibrate.SIZES]
    monkeypatch.setattr("common.lab.launch.launch", lambda work, size, **_: [times, [0.5 * time for time in times]])
    assert calibrate.links(4) == pytest.approx((1e-4, 1e9)), "(seconds of a message, bytes per second)"


def test_the_optimizers_of_a_node_share_the_hosts_memory():
    """What a GPU keeps in the host's memory fits there, and what eight do does not."""
    model, node = models.find("llama-3.2-1b"), hardware.cluster("h100-80gb", 8)
    node = replace(node, host_memory=10 * 2**30)
    found = search.candidates(model, node, 8, 2048, "bf16-mixed", PRIOR, offload=True)
    host = {one.layout: memory.estimate(model, one.layout, PRIOR).host for one in found}
    assert any(node.host_memory / 8 < size < node.host_memory for size in host.values())
    for one in found:
        assert (one.expected == float("inf")) == (8 * host[one.layout] > node.host_memory), one.layout.describe()


def test_what_has_a_name_is_listed_with_its_source():
    out = say("models")
    assert all(name in out for name in models.MODELS) and all(one.source in out for one in models.MODELS.values())
    out = say("hardware")
    assert all(name in out for name in [*GPUS, *NETWORKS]) and all(gpu.source in out for gpu in GPUS.values())
    assert len(say_json("models")) == len(models.MODELS)
