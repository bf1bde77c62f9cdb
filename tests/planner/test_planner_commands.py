"""What the planner's commands print, by their options, and where they write it."""

import json

import pytest
from planner_cases import refusal, say, say_json

from planner import __main__ as commands
from planner import benchmark, constants
from planner.__main__ import cluster_of, main, read

ESTIMATE = "estimate --gpus 2 --batch-size 64"


def test_a_machine_that_was_measured_is_the_gpu_here(monkeypatch, tmp_path):
    monkeypatch.setattr(commands.hardware, "GPUS", dict(commands.hardware.GPUS))
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"constants": {}, "here": {"peak": 1e11, "hbm": 2e10, "link": 3e9}}))
    found = cluster_of(read(f"{ESTIMATE} --gpu here --constants {file}".split()))
    assert (found.gpu.name, found.gpu.peak, found.gpus) == ("here", 1e11, 2), "the GPU of --constants"
    file.write_text(json.dumps({"constants": {}}))
    constants.load.cache_clear()
    assert commands.hardware.read_here(file) is None, "a file of scoreboard --refit has no machine"
    assert cluster_of(read(f"{ESTIMATE} --gpu h100 --constants {file}".split())).gpu.name == "h100-80gb"


def test_measured_steps_scale_what_is_predicted(tmp_path):
    """By the median of their ratios, whatever layouts they were of; the interval moves with them."""
    file, model = tmp_path / "probe.json", "--model gpt2 --gpu h100 --gpus 8 --batch-size 64"

    def step(line):
        found = say_json(f"estimate {model} {line}")
        return found["step_seconds"], found["step_seconds_high"]

    for ratio, mesh in ((1.2, "data=8"), (9.0, "shard=8"), (1.5, "data=4,tensor=2")):
        line = f"probe {model} --mesh {mesh} --seconds {ratio * step(f'--mesh {mesh}')[0]} --out {file}"
        if file.exists():  # predicted by what was probed before, too
            before = tmp_path / f"{mesh}.json"
            before.write_text(file.read_text())
            line += f" --constants {before}"
        say(line)
    plain, scaled = step("--mesh shard=8"), step(f"--mesh shard=8 --constants {file}")
    assert scaled == (pytest.approx(1.5 * plain[0], rel=1e-3), pytest.approx(1.5 * plain[1], rel=1e-3))
    (tmp_path / "other.json").write_text('{"constants": {}}')
    assert "other.json" in refusal(f"probe {model} --seconds 1 --out {tmp_path / 'other.json'}")


def test_a_grid_of_batches_and_precisions_is_written_to_a_file(tmp_path):
    """The work of each is compared with that of its own batch and precision on one process."""
    file = tmp_path / "grid.json"
    say(f"benchmark --max-gpus 2 --batch-size 8,16 --precision fp32,bf16 --output {file}")
    runs = json.loads(file.read_text())
    alone = [run for run in runs if run["processes"] == 1]
    assert [(run["batch_size"], run["precision"]) for run in alone] == [
        (8, "float32"), (8, "bf16-mixed"), (16, "float32"), (16, "bf16-mixed")]  # fmt: skip
    measured = [8.0 * run["batch_size"] + (run["precision"] == "float32") for run in runs]
    per_rank = benchmark.works(runs, measured, cores=4)
    expected = [seconds / run["processes"] for run, seconds in zip(runs, measured, strict=True)]
    assert per_rank == expected and len(runs) > 8


@pytest.mark.parametrize("line", [
    "benchmark --max-gpus 1 --output", "calibrate --out",
    "plan --model gpt2 --gpus 2 --gpu h100 --batch-size 64 --plot",
    "probe --model gpt2 --gpus 2 --gpu h100 --batch-size 64 --seconds 1 --out",
    "emit --format deepspeed --model gpt2 --gpus 2 --gpu h100 --batch-size 64 --out",
])  # fmt: skip
def test_what_cannot_be_written_is_said_before_anything_is_measured(line, tmp_path, monkeypatch):
    monkeypatch.setattr("planner.calibrate.measure", lambda ranks: pytest.fail("measured first"))
    (tmp_path / "file").write_text("kept")
    assert f"{line.split()[-1]} {tmp_path / 'file' / 'x.json'}" in refusal(f"{line} {tmp_path / 'file' / 'x.json'}")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_has_the_model_as_well_as_a_name_has(tmp_path):
    """What is on Hugging Face beside the weights; and a name as it is written there."""
    file, job = tmp_path / "config.json", "--gpus 8 --gpu h100 --batch-size 64"
    shape = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
             "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
    file.write_text(json.dumps(shape))
    for command in ("plan", "estimate", "emit --format deepspeed --mesh shard=8 --zero-stage 2"):
        by_name, by_file, by_owner = (say_json(f"{command} --model {model} {job}")
                                      for model in ("llama-3-8b", file, "meta-llama/Llama-3.1-8B"))  # fmt: skip
        assert by_owner == by_name
        if not command.startswith("emit"):  # whose train.py names the model
            name = {"model": "llama-3-8b"}
            one = [found | name for found in by_file] if command == "plan" else by_file | name
            assert one == by_name, command
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 8}))
    assert "config.json" in refusal(f"plan --model {file} {job}")


def test_a_command_that_is_missing_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert set(commands.COMMANDS) <= set(capsys.readouterr().err.replace(",", " ").split())


def test_head_may_stop_reading(monkeypatch):
    def closed(args):
        raise BrokenPipeError

    monkeypatch.setitem(commands.RUN, "models", closed)
    assert main(["models"]) is None, "the pipe of `| head` is closed"
