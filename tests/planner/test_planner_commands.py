"""What the planner's commands print, by their options, and where they write it."""

import json
from types import SimpleNamespace

import pytest

from planner import __main__ as commands
from planner import benchmark, constants
from planner.__main__ import cluster_of, main, read
from planner.hardware import GPUS

ESTIMATE = "estimate --gpus 2 --batch-size 64"


def said(capsys, line: str) -> str:
    main(line.split())
    return capsys.readouterr().out


def test_a_grid_is_printed_as_json_and_what_was_measured_as_a_table(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "grid", lambda *_: ["predicted"])
    monkeypatch.setattr(benchmark, "compare", lambda runs, steps: [*runs, "measured"])
    monkeypatch.setattr(benchmark, "table", lambda runs: f"a table of {', '.join(runs)}")
    assert said(capsys, "benchmark") == '[\n "predicted"\n]\n', "the grid"
    assert said(capsys, "benchmark --run") == "a table of predicted, measured\n", "--run"
    assert said(capsys, "benchmark --run --json") == '[\n "predicted",\n "measured"\n]\n', "--run --json"


def test_an_estimate_and_a_plan_explain_when_they_are_asked_to(monkeypatch, capsys):
    monkeypatch.setattr(commands, "named", lambda args: "it")
    monkeypatch.setattr(commands, "one_layout", lambda found: f"lines of {found}")
    monkeypatch.setattr(commands, "explain", lambda found: f"formulas of {found}")
    monkeypatch.setattr(commands, "planned", lambda args, count: [SimpleNamespace(estimate=n) for n in range(count)])
    monkeypatch.setattr(commands, "table", lambda chosen: f"a table of {len(chosen)}")
    line = f"{ESTIMATE} --gpu h100"
    assert said(capsys, line) == "lines of it\n", "without --explain"
    assert said(capsys, f"{line} --explain") == "lines of it\n\nformulas of it\n", "--explain"
    line = line.replace("estimate", "plan")
    assert said(capsys, line) == "a table of 5\n", "without --explain"
    assert said(capsys, f"{line} --explain --count 3") == "a table of 3\n\nformulas of 0\n", "of the best"


def test_files_are_written_into_folders_old_and_new(monkeypatch, capsys, tmp_path):
    found = SimpleNamespace(files={"a.yaml": "x: 1\n", "b.json": "{}"}, notes=["a note"], command="run it")
    monkeypatch.setattr(commands, "named", lambda args: "an estimate")
    monkeypatch.setattr(commands, "emit", lambda one, tool: found)
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        out = said(capsys, f"emit --format slurm --gpu h100 --mesh data=2 {ESTIMATE[9:]} --out {folder}")
        assert (
            out
            == f"written to {folder / 'a.yaml'}\nwritten to {folder / 'b.json'}\nnote: a note\ncd {folder} && run it\n"
        )
        assert {file.name: file.read_text() for file in folder.iterdir()} == found.files, "what is in the folder"


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


def test_head_may_stop_reading(monkeypatch):
    def closed(args):
        raise BrokenPipeError

    monkeypatch.setitem(commands.RUN, "models", closed)
    assert main(["models"]) is None, "the pipe of `| head` is closed"


@pytest.mark.parametrize(
    "line, words",
    [
        ("zyzzyva", "zyzzyva plan estimate calibrate"),
        (f"{ESTIMATE} --gpu h100 --model llama-7b --zyzzyva --xyz", "--zyzzyva --help"),
        (f"{ESTIMATE} --gpu h100 --model llama-7b --mod 3", "--mod '--model'"),
        (f"{ESTIMATE} --gpu zyzzyva --model llama-7b", " ".join(["zyzzyva", *GPUS])),
        ("models --jsn", "--jsn '--json'"),
        (f"{ESTIMATE} --gpu h100 --model llama-7b --precision int4", "int4 float32 bf16-mixed fp16-mixed"),
    ],
)
def test_a_typing_mistake_is_answered_in_one_line(line, words, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and [word for word in words.split() if word not in said] == [], said
