"""Every option of the planner's commands reaches what it is an option of; files of constants are checked."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.errors import UserError
from planner import __main__ as commands
from planner import any_module, benchmark, constants, fit, hardware, models, search
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
    assert {name: getattr(layout, name) for name in told} == told, "what the layout is told"
    assert (layout.size("shard"), layout.tensor) == (4, 2), "the mesh"
    assert named(read(f"{ESTIMATE} --mesh data=8".split())).layout.zero_stage == 0, "the stage without an axis 'shard'"


@pytest.mark.parametrize(
    "said, schedule, chunks",
    [("AFAB", "gpipe", 1), ("zero-bubble", "zb-h1", 1), ("ZB-V", "zbv", 2), ("DualPipe", "dualpipev", 2),
     ("interleaved-1f1b", "interleaved", 2), ("Interleaved1F1B", "interleaved", 2)],
)  # fmt: skip
def test_schedules_have_other_names_too(said, schedule, chunks):
    line = f"{ESTIMATE} --mesh pipeline=8 --schedule {said} --stages-per-rank {chunks}"
    assert named(read(line.split())).layout.schedule == schedule, f"the schedule of --schedule {said}"


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
    assert model_of(read(f"{SHAPE} {more}".split())).parameters == parameters, f"parameters with {more}"


def test_experts_that_are_added_to_a_model_are_as_wide_as_its_mlp():
    line = "estimate --gpus 8 --gpu h100-80gb --batch-size 8 --top-k 2 --experts 16 --model"
    found = {name: model_of(read(f"{line} {name}".split())) for name in ("mixtral-8x7b", "llama-7b", "gpt2")}
    widths = {name: (model.experts, model.expert_width) for name, model in found.items()}
    assert widths == {"mixtral-8x7b": (16, 14336), "llama-7b": (16, 11008), "gpt2": (16, 4 * 768)}


def test_each_option_of_a_cluster_reaches_it():
    line = f"{ESTIMATE} --gpus-per-node 4 --network ethernet-100 --adapters 2"
    found = cluster_of(read(line.split()))
    assert (found.gpus, found.gpus_per_node, found.nodes, found.network, found.adapters) == (8, 4, 2, 12.5e9, 2), (
        "cluster"
    )


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
    assert rest == [64, 512, "float32", 9.0, 7, replace(PRIOR, alpha_link=1.0)], "what the search is asked"
    assert named(read(f"{ESTIMATE} --constants {slow}".split())).constants.alpha_link == 1.0, "constants of the file"


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


def test_what_emit_prints(monkeypatch, capsys):
    found = SimpleNamespace(files={"a.yaml": "x: 1\n", "b.json": "{}"}, notes=["one", "two"], command="run it")
    monkeypatch.setattr(commands, "emit", lambda estimate, tool: found)
    main(f"emit --format slurm --mesh data=8 {ESTIMATE[9:]}".split())
    said = "--- a.yaml\nx: 1\n\n--- b.json\n{}\nnote: one\nnote: two\nrun it\n"
    assert capsys.readouterr().out == said, "files, notes, and the command last"
    main(f"emit --format slurm --mesh data=8 {ESTIMATE[9:]} --json".split())
    assert json.loads(capsys.readouterr().out) == vars(found), "the same as JSON"


def test_this_machine_has_what_calibrate_measured():
    measured = {"peak": 1e11, "hbm": 2e10, "link": 3e9, "cores": 2.0, "crowding": 1.25, "processes": 4, "memory": 5e9}
    told = {
        "name": "here", "peak": 1e11, "achievable": 1.0, "memory": 5e9, "hbm": 2e10, "link": 3e9, "pcie": 2e10,
        "attention": 0.5, "source": "measured by calibrate", "peak_fp8": 0.0, "gpus_per_node": 4, "cores": 2,
        "crowding": 1.25,
    }  # fmt: skip
    found = vars(hardware.here(measured))
    assert {name: found[name] for name in told} == told
    old = hardware.here({"peak": 1e11, "hbm": 2e10, "link": 3e9})
    numbers = (old.memory, old.gpus_per_node, old.cores, old.crowding)
    assert numbers == (8 * 2**30, 8, 0, 1.0), "what an older file lacks"


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
    assert asked["grid"][2].name == "here", "the machine that was measured"


def test_each_option_of_measure_reaches_it(monkeypatch, slow):
    asked = []
    monkeypatch.setattr(any_module, "load", lambda what: what)
    monkeypatch.setattr(any_module, "report", lambda *args: asked.append(args) or {})
    main(f"measure mine.py:f --gpu a100 --gpus 4 --precision fp32 --json --constants {slow}".split())
    ((what, gpu, *rest),) = asked
    assert (what, gpu.name) == ("mine.py:f", "a100-80gb") and rest == [4, "float32", constants.load(slow)]


@pytest.mark.parametrize(
    "line, says",
    [
        (f"{SHAPE} --layers 0", "--layers must be at least 1, not 0"),
        (f"{SHAPE} --heads 0", "--heads must be at least 1, not 0"),
        (f"{SHAPE} --mlp-width 0", "--mlp-width must be at least 1, not 0"),
        (f"{SHAPE} --mlp relu", "--mlp 'relu' is unknown; take gelu (two matrices) or swiglu (three)"),
        (f"{SHAPE} --heads 5", "--width 64 does not divide into --heads 5; change one of them"),
        (f"{SHAPE} --kv-heads 3", "--kv-heads 3 does not divide --heads 4; take a divisor of it"),
        (f"{SHAPE} --experts 4 --top-k 5", "--top-k 5 is not between 1 and --experts 4"),
        (f"{SHAPE} --experts 4", "--top-k 0 is not between 1 and --experts 4"),
        (f"{SHAPE} --gpus 0", "--gpus must be at least 1, not 0"),
        (f"{SHAPE} --gpus-per-node 0", "--gpus-per-node must be at least 1, not 0"),
        (f"{SHAPE} --gpus 12", "--gpus 12 are no whole number of nodes of 8; change --gpus or --gpus-per-node"),
        (f"{SHAPE} --flash maybe", "argument --flash: expected yes or no, not 'maybe'"),
        (f"{SHAPE} --widht 3", "unknown option '--widht'; did you mean '--width'?"),
        ("estimat --gpus 1", "unknown command 'estimat'; did you mean 'estimate'?"),
        ("benchmark --max-gpus 0", "--max-gpus must be at least 1, not 0"),
        ("benchmark --batch-size 0", "--batch-size must be at least 1, not 0"),
        ("benchmark --steps 0", "--steps must be at least 1, not 0"),
        (f"plan {SHAPE[9:]} --count 0", "--count must be at least 1, not 0"),
        (f"emit {SHAPE[9:]} --format slurm --zero-stage 1",
         "--zero-stage is of a layout that you name: add --mesh, or leave it out"),
        ("estimate --gpus 1 --gpu h100 --batch-size 1 --layers 2 --heads 4",
         "the model lacks --width --vocabulary; give them, or a name with --model"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(line, says, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    assert capsys.readouterr().err.strip().removeprefix("error: ") == says


def test_help_says_what_is_so_by_default():
    _, subs = commands.parser()
    options = {option.option_strings[0]: option for option in subs["estimate"]._actions}
    for name in ("sequence-parallel", "flash", "fused", "fused-loss", "dropout", "async-tensor"):
        option = options[f"--{name}"]
        said = option.help.rpartition("; by default ")[2]
        assert said == ("yes" if option.default else "no"), f"help of --{name}: '{option.help}'"
    assert all(command in commands.__doc__ for command in ("plan", "estimate", "emit"))
    assert list(commands.RUN) == list(commands.COMMANDS) == list(subs), "commands"


@pytest.mark.parametrize(
    "line, names",
    [
        ("", "command"), ("plan", "--gpu, --gpus, --batch-size"), ("estimate", "--gpu, --gpus, --batch-size"),
        ("emit", "--gpu, --gpus, --batch-size, --format"), ("measure", "FILE.py:FUNCTION, --gpu, --gpus"),
    ],
)  # fmt: skip
def test_what_has_to_be_said(line, names):
    with pytest.raises(UserError, match=f"^the following arguments are required: {names}$"):
        read(line.split())


def test_each_option_of_calibrate_and_of_a_plans_lines_reaches_it(monkeypatch, capsys):
    asked, drawn = [], []
    monkeypatch.setattr("planner.calibrate.calibrate", lambda *args: asked.append(args) or "what was found")
    main(["calibrate", "--out", "mine.json", "--ranks", "3"])
    assert asked == [("mine.json", 3)] and capsys.readouterr().out == "what was found\n"
    best = [SimpleNamespace(as_dict=lambda name=name: {"best": name}) for name in "abc"]
    found = [search.Choice(one, "d") for one in best]
    monkeypatch.setattr(commands, "planned", lambda args, count: found[:count])
    monkeypatch.setattr("planner.plot.picture", lambda *args: drawn.append(args))
    main(f"plan {ESTIMATE[9:]} --count 2 --json --plot mine.png".split())
    assert json.loads(capsys.readouterr().out) == [
        {"best": name, "nearest_alternative": "d", "preferred": ""} for name in "ab"
    ], "--count 2"
    assert drawn == [(best[:2], "mine.png")], "the layouts of the picture, and its file"


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


def test_every_fitted_constant_has_bounds_and_a_prior_within():
    assert list(fit.BOUNDS) == list(constants.FITTED)
    for name, (low, high) in fit.BOUNDS.items():
        assert low < getattr(PRIOR, name) < high, name


def test_an_unknown_model_of_a_benchmark_is_named():
    with pytest.raises(UserError, match="^unknown model 'tinny'; did you mean 'tiny'"):
        benchmark.grid(["tinny"], 1, "cpu", PRIOR)
    assert models.find("GPT2").name == "gpt2"
