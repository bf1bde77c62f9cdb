"""Every option of the planner's commands reaches what it is an option of; files of constants are checked."""

import json
from dataclasses import replace

import pytest

from common.errors import UserError
from planner import __main__ as commands
from planner import any_module, benchmark, constants, fit, models, scoreboard
from planner.__main__ import cluster_of, main, model_of, named, read
from planner.constants import PRIOR

ESTIMATE = "estimate --model llama-2-7b --gpus 8 --gpu h100-80gb --batch-size 64"
SHAPE = "estimate --gpus 1 --gpu h100-80gb --batch-size 1 --layers 2 --width 64 --heads 4 --vocabulary 256"


def test_each_option_of_a_layout_reaches_it():
    said = {
        "flash": "no", "fused": "no", "fused-loss": "yes", "dropout": "yes", "async-tensor": "yes",
        "overlap-gradients": "no", "sequence-parallel": "no", "recompute": "full", "micro-batch": 2, "sequence": 512,
        "precision": "fp16", "mesh": "shard=4,tensor=2",
    }  # fmt: skip
    line = f"{ESTIMATE} --offload " + " ".join(f"--{name} {value}" for name, value in said.items())
    told = {
        "flash": False, "fused": False, "fused_loss": True, "dropout": True, "async_tensor": True,
        "overlap_gradients": False, "sequence_parallel": False, "recompute": "full", "micro_batch": 2,
        "sequence": 512, "precision": "fp16-mixed", "offload": True, "batch_size": 64, "zero_stage": 3,
    }  # fmt: skip
    layout = named(read(line.split())).layout
    assert {name: getattr(layout, name) for name in told} == told
    assert (layout.size("shard"), layout.tensor) == (4, 2)
    assert named(read(f"{ESTIMATE} --mesh data=8".split())).layout.zero_stage == 0, "the stage without an axis 'shard'"


@pytest.mark.parametrize(
    "said, schedule, chunks",
    [("AFAB", "gpipe", 1), ("zero-bubble", "zb-h1", 1), ("ZB-V", "zbv", 2), ("DualPipe", "dualpipev", 2),
     ("interleaved-1f1b", "interleaved", 2), ("Interleaved1F1B", "interleaved", 2)],
)  # fmt: skip
def test_schedules_have_other_names_too(said, schedule, chunks):
    line = f"{ESTIMATE} --mesh pipeline=8 --schedule {said} --stages-per-rank {chunks}"
    assert named(read(line.split())).layout.schedule == schedule


@pytest.mark.parametrize(
    "more, parameters",
    [
        ("", 2 * (12 * 64**2 + 13 * 64) + 256 * 64 + 2048 * 64 + 2 * 64),  # as GPT-2: positions, biases, a tied head
        ("--sequence 128", 2 * (12 * 64**2 + 13 * 64) + 256 * 64 + 128 * 64 + 2 * 64),
        ("--mlp swiglu", 2 * (16 * 64**2 + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --head-width 32 --kv-heads 2 --mlp-width 100",
         2 * (2 * 64 * (128 + 64) + 3 * 64 * 100 + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --experts 4 --top-k 2 --expert-width 10 --shared-experts 1",
         2 * (4 * 64**2 + 64 * (4 + 3 * 5 * 10) + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --experts 4 --top-k 2", 2 * (4 * 64**2 + 64 * (4 + 3 * 4 * 256) + 2 * 64) + 2 * 256 * 64 + 64),
    ],
)  # fmt: skip
def test_each_option_of_a_shape_reaches_the_model(more, parameters):
    assert model_of(read(f"{SHAPE} {more}".split())).parameters == parameters


def test_experts_that_are_added_to_a_model_are_as_wide_as_its_mlp():
    line = "estimate --gpus 8 --gpu h100-80gb --batch-size 8 --top-k 2 --experts 16 --model"
    found = {name: model_of(read(f"{line} {name}".split())) for name in ("mixtral-8x7b", "llama-7b", "gpt2")}
    widths = {name: (model.experts, model.expert_width) for name, model in found.items()}
    assert widths == {"mixtral-8x7b": (16, 14336), "llama-7b": (16, 11008), "gpt2": (16, 4 * 768)}


def test_each_option_of_a_cluster_reaches_it():
    line = f"{ESTIMATE} --gpus-per-node 4 --network ethernet-100 --adapters 2"
    found = cluster_of(read(line.split()))
    assert (found.gpus, found.gpus_per_node, found.nodes, found.network, found.adapters) == (8, 4, 2, 12.5e9, 2)


@pytest.fixture
def slow(tmp_path):
    """A file of constants by which messages take a second each."""
    file = tmp_path / "slow.json"
    file.write_text(json.dumps({"constants": {"alpha_link": 1.0}}))
    return file


def test_each_option_of_a_plan_reaches_the_search(monkeypatch, slow):
    asked = []
    monkeypatch.setattr("planner.search.plan", lambda *args: asked.append(args) or [])
    line = f"plan {ESTIMATE[9:]} --sequence 512 --precision fp32 --max-memory-gb 9 --constants {slow}"
    commands.planned(read(line.split()), 7)
    ((model, cluster, *rest),) = asked
    assert (model.name, cluster.gpus) == ("llama-2-7b", 8)
    assert rest == [64, 512, "float32", 9.0, 7, replace(PRIOR, alpha_link=1.0)]
    assert named(read(f"{ESTIMATE} --constants {slow}".split())).constants.alpha_link == 1.0


def test_a_plan_explains_its_best_layout_and_an_estimate_itself(capsys):
    main(f"plan {ESTIMATE[9:]} --explain --count 2".split())
    table, _, explained = capsys.readouterr().out.partition("\nparameters ")
    first = next(line for line in table.splitlines() if line.startswith(" 1 "))
    step = next(line for line in explained.splitlines() if line.startswith("step "))
    assert float(first.split()[1]) == pytest.approx(float(step.split()[1]), abs=0.01), "the step of the first layout"
    main(f"{ESTIMATE} --explain".split())
    assert "\nMFU             " in capsys.readouterr().out


def test_every_file_is_written(capsys, tmp_path):
    line = f"emit --format slurm --out {tmp_path} --mesh data=8 {ESTIMATE[9:]} --max-memory-gb 900"
    main(line.split())
    assert {file.name for file in tmp_path.iterdir()} == {"job.sbatch", "course.yaml"}
    assert f"written to {tmp_path / 'course.yaml'}" in capsys.readouterr().out


def test_the_scoreboard_stores_what_it_fits_and_shows_runs_when_asked(monkeypatch, capsys):
    fitted, left_out, saved = replace(PRIOR, matmul=0.8), {"a source": replace(PRIOR, matmul=0.7)}, []
    monkeypatch.setattr(scoreboard, "refit", lambda: (fitted, left_out))
    monkeypatch.setattr(constants, "save", lambda found, left_out=None: saved.append((found, left_out)))
    monkeypatch.setattr(scoreboard, "leave_one_out", lambda: ["a run"])
    monkeypatch.setattr(scoreboard, "scores", lambda lines: {})
    monkeypatch.setattr(scoreboard, "text", lambda found, lines=None: f"runs: {lines}")
    main(["scoreboard"])
    assert saved == [] and capsys.readouterr().out == "runs: None\n"
    main(["scoreboard", "--runs", "--refit"])
    assert saved == [(fitted, left_out)] and capsys.readouterr().out == "runs: ['a run']\n"


def test_each_option_of_a_benchmark_reaches_it(monkeypatch, capsys, slow):
    asked = {}
    monkeypatch.setattr(benchmark, "grid", lambda *args: asked.update(grid=args) or [])
    monkeypatch.setattr(benchmark, "compare", lambda runs, steps: asked.update(steps=steps) or runs)
    main(f"benchmark --models tiny,wide --max-gpus 4 --batch-size 8 --run --steps 3 --constants {slow}".split())
    assert asked == {"grid": (["tiny", "wide"], 4, "cpu", constants.load(slow), 8), "steps": 3}
    here = {"constants": {}, "here": {"peak": 1e11, "hbm": 1e10, "link": 1e9}}
    slow.with_name("here.json").write_text(json.dumps(here))
    monkeypatch.setattr(commands.hardware, "GPUS", dict(commands.hardware.GPUS))
    main(f"benchmark --constants {slow.with_name('here.json')}".split())
    assert asked["grid"][2] == "here", "the machine that was measured"


def test_each_option_of_measure_reaches_it(monkeypatch, slow):
    asked = []
    monkeypatch.setattr(any_module, "load", lambda what: what)
    monkeypatch.setattr(any_module, "report", lambda *args: asked.append(args) or {})
    main(f"measure mine.py:f --gpu a100 --gpus 4 --precision fp32 --json --constants {slow}".split())
    ((what, gpu, *rest),) = asked
    assert (what, gpu.name) == ("mine.py:f", "a100-80gb") and rest == [4, "float32", constants.load(slow)]


def test_lists_have_the_numbers(capsys):
    main(["models"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "46.70 billion (12.9 active)" in lines["mixtral-8x7b"] and "active" not in lines["llama-7b"]
    main(["hardware"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "989.0 TFLOP/s    79.1 GiB   3.35 TB/s   450 GB/s to 8 in a node" in lines["h100-80gb"]
    assert " 50.00 GB/s per adapter" in lines["infiniband-400"]


def test_lists_as_json_have_the_numbers(capsys):
    main(["hardware", "--json"])
    found = json.loads(capsys.readouterr().out)
    gpus = {gpu["name"]: gpu for gpu in found["gpus"]}
    h100 = {"peak": 989e12, "hbm": 3.35e12, "link": 450e9, "pcie": 64e9, "peak_fp8": 1979e12, "gpus_per_node": 8}
    assert {name: gpus["h100-80gb"][name] for name in h100} == h100
    assert found["networks"]["infiniband-400"] == {
        "bytes_per_second": 50e9, "source": "NDR InfiniBand, 400 Gb/s"}  # fmt: skip
    main(["models", "--json"])
    found = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    llama = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "parameters": 8_030_261_248}
    assert {name: found["llama-3-8b"][name] for name in llama} == llama


# --- files of constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"constants": {"matmull": 1.0}}', "unknown constant 'matmull'"),
        ('{"here": {}}', r"not a file that calibrate wrote \(KeyError\)"),
        ("[1, 2]", r"not a file that calibrate wrote \(TypeError\)"),
        ("matmul", r"not a file that calibrate wrote \(JSONDecodeError\)"),
    ],
)
def test_a_file_of_something_else_gets_one_line(text, says, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UserError, match=f"^--constants .*c.json: {says}$"):
        constants.load(tmp_path / "c.json")


def test_constants_are_stored_to_four_digits(tmp_path, monkeypatch):
    file = tmp_path / "c.json"
    found, other = replace(PRIOR, matmul=0.812349, source="x"), replace(PRIOR, network=0.31)
    constants.save(found, file, {"a source": other})
    assert constants.load(file) == replace(found, matmul=0.8123), "as it is read again"
    monkeypatch.setattr(constants, "STORED", file)
    assert constants.load_left_out() == {"a source": other}


def test_every_fitted_constant_has_bounds_and_a_prior_within():
    assert list(fit.BOUNDS) == list(constants.FITTED)
    for name, (low, high) in fit.BOUNDS.items():
        assert low < getattr(PRIOR, name) < high, name


def test_an_unknown_model_of_a_benchmark_is_named():
    with pytest.raises(UserError, match="^unknown model 'tinny'; did you mean 'tiny'"):
        benchmark.grid(["tinny"], 1, "cpu", PRIOR)
    assert models.find("GPT2").name == "gpt2"
