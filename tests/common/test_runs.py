"""python -m common.runs: what it says of runs, and what it refuses."""

import contextlib
import io
import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SMALL, configure, metrics, refused, saved, train
from hypothesis import given, settings
from hypothesis import strategies as some
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from safetensors import safe_open
from safetensors.torch import load_file

from common import manifest, runs
from common.errors import UserError
from common.lab.launch import launch

# --- every number, against one that is worked out here, of runs that are drawn -------------------------------------

few = settings(max_examples=30)
losses, seconds = some.floats(0.25, 9), some.sampled_from([0.125, 0.25, 0.5, 1.0, 3.0, 7.0])


@some.composite
def histories(draw, name: str = "a") -> SimpleNamespace:
    """What a run leaves: facts and settings, the lines of its metrics, the steps of its checkpoints."""
    lines = []
    for step in range(first := draw(some.integers(1, 4)), first + draw(some.integers(0, 6))):
        line = {"step": step, "loss": draw(losses), "step_seconds": draw(seconds)}
        line["grad_norm"] = draw(some.none() | losses)
        if draw(some.booleans()):
            line["validation_loss"] = draw(losses)
        if draw(some.booleans()):
            line["ranks"] = [{"host": f"node{n}", "use": draw(seconds)} for n in range(draw(some.integers(1, 3)))]
        lines.append(line)
    mesh = {"data": draw(some.integers(1, 4)), "tensor": draw(some.integers(1, 2))}
    task, lr = draw(some.sampled_from(["text", "images"])), draw(some.sampled_from([1, 2]))
    batch, context = draw(some.integers(1, 9)), draw(some.integers(2, 9))
    return history(lines, name, mesh, task=task, lr=lr, batch_size=batch, context=context)


def history(lines: list[dict], name: str = "a", mesh={"data": 1}, **more) -> SimpleNamespace:  # noqa: B006
    config = {"task": "text", "batch_size": 4, "context": 8, "steps": 10, "lr": 1, "layers": 1, "width": 8, "heads": 1}
    config |= {"run_dir": name, **more}
    ranks = math.prod(mesh.values())
    facts = {"strategy": "ddp", "implementation": "pytorch", "mesh": mesh, "world_size": ranks, "config": config}
    return SimpleNamespace(name=name, facts=facts, config=config, lines=lines, ranks=ranks)


def write(folder: Path, history: SimpleNamespace) -> str:
    """Its folder; a line is being written there."""
    (folder / history.name).mkdir(parents=True, exist_ok=True)
    (folder / history.name / "config.json").write_text(json.dumps(history.facts))
    lines = [*map(json.dumps, history.lines), '{"step": 9, "lo']
    (folder / history.name / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder / history.name)


def line(step: int, loss: float = 4.0) -> dict:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "step_seconds": 0.5}


def found_by(*argv) -> list | dict:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runs.main([*map(str, argv), "--json"])
    return json.loads(out.getvalue())


def amount(history) -> int:
    """Tokens, or pictures, of a step."""
    return history.config["batch_size"] * (history.config["context"] if history.config["task"] == "text" else 1)


@few
@given(some.data())
def test_a_summary_is_of_what_the_runs_left(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs")
    these = [data.draw(histories(name)) for name in "abc"[: data.draw(some.integers(1, 3))]]
    rows = found_by("summary", *(write(folder, one) for one in these))
    speeds = []
    for one, row in zip(these, rows, strict=True):
        times = [line["step_seconds"] for line in one.lines]
        speeds.append(amount(one) / float(np.median(times[3:] or times)) if times else None)
        unit = "tokens" if one.config["task"] == "text" else "examples"
        held_out = [(line["validation_loss"], line["step"]) for line in one.lines if "validation_loss" in line]
        expected = {
            "run": one.name, "strategy": "ddp", "implementation": "pytorch", "ranks": one.ranks, "checkpoints": [],
            "mesh": ",".join(f"{axis}={size}" for axis, size in one.facts["mesh"].items()),
            "steps": f"{one.lines[-1]['step'] if one.lines else 0}/10", f"{unit}_per_second": speeds[-1],
            "first_loss": one.lines[0]["loss"] if one.lines else None,
            "last_loss": one.lines[-1]["loss"] if one.lines else None,
            "step_seconds": amount(one) / speeds[-1] if times else None,
        }  # fmt: skip
        if held_out:
            best, at = min(held_out)
            expected |= {"validation_loss": held_out[-1][0], "best_validation_loss": best, "at_step": at}
        if len(these) > 1 and speeds[0] and speeds[-1]:
            times_as_fast = speeds[-1] / speeds[0]
            expected |= {"speed_up": times_as_fast, "efficiency": times_as_fast / (one.ranks / these[0].ranks)}
        assert row == {key: pytest.approx(n) if isinstance(n, float) else n for key, n in expected.items()}


def apart(a: float | None, b: float | None) -> float:
    if a == b:
        return 0.0
    return math.inf if a is None or b is None else abs(a - b) / max(a, b)


@few
@given(some.data(), some.sampled_from([0.0, 1e-5, 0.01, 0.3]))
def test_a_comparison_finds_the_first_difference_and_the_largest(tmp_path_factory, data, tolerance):
    folder, one = tmp_path_factory.mktemp("runs"), data.draw(histories())
    other = SimpleNamespace(**vars(one) | {"name": "b", "lines": [], "config": one.config | {"run_dir": "b"}})
    other.config["lr"] = data.draw(some.sampled_from([1, 2]))
    other.facts = one.facts | {"config": other.config}
    for record in one.lines[data.draw(some.integers(0, 2)) :]:
        change = some.sampled_from([lambda n: n] * 3 + [lambda n: n and n * 1.00001, lambda n: n and n / 1.2])
        norm = data.draw(some.sampled_from([record["grad_norm"]] * 3 + [None, 1.5]))
        other.lines.append(record | {"loss": data.draw(change)(record["loss"]), "grad_norm": data.draw(change)(norm)})
    other.lines.append(line(30))
    argv = "compare", *(write(folder, each) for each in (one, other)), f"--tolerance={tolerance}"
    (found,) = found_by(*argv)
    theirs = {line["step"]: line for line in other.lines}
    both = [(line["step"], metric, line[metric], theirs[line["step"]][metric])
            for line in one.lines if line["step"] in theirs for metric in ("loss", "grad_norm")]  # fmt: skip
    far = [apart(a, b) for *_, a, b in both]
    first = next((row for row, distance in zip(both, far, strict=True) if distance > tolerance), None)
    largest = max(far, default=0.0)
    assert found == {
        "runs": ["a", "b"], "steps_compared": len(both) // 2,
        "first_difference": first and {"step": first[0], "metric": first[1], "a": first[2], "b": first[3]},
        "largest_difference": None if largest == math.inf else pytest.approx(largest),
        "at_step": both[far.index(largest)][0] if largest else None,
        "settings": {"lr": [one.config["lr"], other.config["lr"]]} if one.config["lr"] != other.config["lr"] else {},
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runs.main([*argv])
    assert not first or f"step {first[0]}: {first[1]} {first[2]} and {first[3]}\n" in told.getvalue()


@settings(few, max_examples=10)
@given(some.data(), some.sampled_from(["steps", "tokens", "seconds"]))
def test_a_picture_has_each_number_at_its_place(tmp_path_factory, data, over):
    """A validation loss stands in some steps only; a norm that is none is a gap."""
    folder, these = tmp_path_factory.mktemp("runs"), [data.draw(histories(name)) for name in "ab"]
    metrics = [metric for metric in ("loss", "grad_norm", "validation_loss")
               if all(not one.lines or any(line.get(metric) for line in one.lines) for one in these)]  # fmt: skip
    figure = runs.draw([runs.History(write(folder, one)) for one in these], metrics, over)
    for metric, ax in zip(metrics, figure.axes, strict=True):
        for one, line in zip(these, ax.lines, strict=True):
            points = []
            for n, record in enumerate(one.lines):
                passed = np.sum([before["step_seconds"] for before in one.lines[: n + 1]])
                place = {"steps": record["step"], "tokens": record["step"] * amount(one), "seconds": passed}[over]
                points += [[place, record[metric] or math.nan]] if metric in record else []
            assert line.get_label() == one.name
            assert line.get_xydata().tolist() == [pytest.approx(point, nan_ok=True) for point in points], (metric, over)
    plt.close(figure)


@few
@given(histories())
def test_of_the_ranks_the_last_report_is_shown(tmp_path_factory, history):
    folder = write(tmp_path_factory.mktemp("runs"), history)
    reports = [line["ranks"] for line in history.lines if "ranks" in line]
    with contextlib.nullcontext() if reports else refused("--log-every"):
        assert found_by("ranks", folder) == [{"rank": n, **row} for n, row in enumerate(reports[-1])]


@few
@given(some.dictionaries(some.integers(1, 12), some.booleans(), max_size=4), some.none() | some.integers(1, 12))
def test_the_checkpoint_that_is_taken_is_the_newest_that_is_whole_or_the_one_asked_for(tmp_path_factory, there, step):
    """`there`: steps, and whether the checkpoint is whole."""
    folder = Path(write(tmp_path_factory.mktemp("runs"), history([])))
    for at, whole in there.items():
        (folder / manifest.name_of(at)).mkdir()
        (folder / manifest.name_of(at) / "manifest.json").write_text(manifest.seal({"step": at}, {})[not whole :])
    (row,) = found_by("summary", folder)
    assert row["checkpoints"] == sorted(there)
    wanted = step if step in there or step else max((at for at, whole in there.items() if whole), default=None)
    if there.get(wanted):
        assert runs.checkpoint_of(runs.History(str(folder)), step).name == manifest.name_of(wanted)
    else:
        with refused(str(folder)):
            runs.checkpoint_of(runs.History(str(folder)), step)


def test_what_is_said_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, ranks in (("one", 1), ("four", 4)):
        write(Path("runs"), history([line(1), line(2)], name, {"data": ranks}))
    assert [row["run"] for row in found_by("list")] == ["four", "one"]
    write(Path("runs"), history([], "bad")), Path("runs/bad/config.json").write_text("{")
    runs.main(["list"])
    told = capsys.readouterr()
    (left_out,), (header, first, second) = told.err.splitlines(), told.out.splitlines()
    assert "runs/bad/config.json" in left_out, "one that is damaged, and why"
    assert header.split()[:3] == ["run", "strategy", "implementation"] and "data=4" in first and "2/10" in second
    with refused("two", "config.json", "python -m common.runs list"):
        runs.main(["summary", "two"])
    with refused("two"):
        runs.main(["compare", "one"])
    assert found_by("plot", "one", "--out", "a.png")["file"] == "a.png"
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    with refused("--metric los", "loss, grad_norm"):
        runs.main(["plot", "one", "--metric=los"])


@pytest.mark.parametrize("tolerance", ["nan", "-1"])
def test_a_tolerance_is_a_number_from_0_on(tolerance, tmp_path):
    with refused("--tolerance", tolerance):
        runs.main(["compare", str(tmp_path), str(tmp_path), "--tolerance", tolerance])


def test_a_cell_follows_a_run_until_it_has_ended(tmp_path, monkeypatch, capsys):
    run, drawn, waited = history([line(1, 4.0), line(2, 3.0)]), [], []
    write(tmp_path, run)
    written = [True, True, False]  # by whoever trains; it writes its third step and ends as it is asked whether it runs

    def is_written(_):
        if len(written) == 1:
            run.lines.append(line(3, 2.0))
            write(tmp_path, run)
        return written.pop(0)

    monkeypatch.setattr(runs, "is_written", is_written)
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, **how: drawn.append(y))
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda **_: SimpleNamespace(update=shown.append))
    monkeypatch.setattr(runs.time, "sleep", waited.append)
    runs.follow(str(tmp_path / "a"), "loss", "validation_loss", every=3)
    assert drawn == [[4.0, 3.0], [4.0, 3.0, 2.0]] and len(shown) == 2, "once for each time that it has got further"
    assert waited == [3, 3] and not written
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no validation_loss" in said and "grad_norm" in said, "nor a word that is wrong"


def test_a_run_of_somebody_else_may_be_going_on(tmp_path, monkeypatch):
    assert not runs.is_written(tmp_path)
    for kind in (PermissionError, UserError):
        monkeypatch.setattr(runs, "Lock", lambda folder, kind=kind: (_ for _ in ()).throw(kind()))
        assert runs.is_written(tmp_path)


def test_following_a_run_needs_a_notebook(tmp_path):
    with refused("in a notebook's cell"):
        runs.follow(write(tmp_path, history([line(1)])))


class Board:
    """Stands for torch.utils.tensorboard.SummaryWriter, whose package is not among the requirements."""

    def __init__(self, folder, purge_step):
        self.file = open(folder.with_suffix(".txt"), "a")
        print("begin", folder.name, purge_step, file=self.file)

    def add_scalar(self, name, value, step):
        print(name, value, step, file=self.file)

    def close(self):
        print("end", file=self.file, flush=True)


def with_board(configs) -> None:
    sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=Board)
    train(configs)


def test_tensorboard_gets_the_metrics_and_goes_on_where_the_run_does(tmp_path, monkeypatch):
    line = f"--strategy ddp --tensorboard --run-dir {tmp_path / 'run'}"
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with refused("--tensorboard", "pip install tensorboard"):
        configure(line, 2, **SMALL)
    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace(__spec__=ModuleSpec("tensorboard", None)))
    for more in ("--steps 2", "--resume --steps 3"):
        launch(with_board, 2, ([configure(f"{line} {more}", 2, **SMALL)],))
    lines = (tmp_path / "run" / "tensorboard.txt").read_text().splitlines()
    assert [line for line in lines if "begin" in line or "end" in line] == [
        "begin tensorboard 1", "end", "begin tensorboard 3", "end"
    ]  # fmt: skip
    assert [line for line in lines if line.startswith("loss ")] == [
        f"loss {record['loss']} {record['step']}" for record in metrics(tmp_path / "run")
    ]
    assert {line.split()[0] for line in lines} > {"grad_norm", "step_seconds", "tokens_per_second"}


def test_export_has_every_parameter_of_the_model(tmp_path):
    """Of a run on two ranks, in both formats; read again by what the format's documentation says."""
    folder = tmp_path / "run"
    config = configure(size=2, **SMALL, steps=2, checkpoint_every=1, strategy="fsdp", by_hand=True, run_dir=folder)
    launch(train, 2, ([config],))
    expected = {
        n.removeprefix("model."): t for n, t in saved(folder / "checkpoint-000002").items() if n[:6] == "model."
    }
    model = config.strategy_class.make_model(config)
    assert set(model.state_dict()) - set(expected) == {"head.out.weight"}  # tied
    found = found_by("export", folder)
    state = torch.load(found["file"], weights_only=True)
    assert Path(found["file"]).name == "model-000002.pt" and found["tensors"] == len(expected)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    file = Path(found_by("export", folder, "--safetensors")["file"])
    assert file == folder / "model-000002.safetensors", "beside the run's other files"
    with safe_open(file, "pt") as reader:
        assert reader.metadata() == {"format": "pt"}, "what transformers asks for"
    read = load_file(file)
    assert read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in read)
    (folder / "checkpoint-000002" / "__0_0.distcp").unlink()
    assert found_by("export", folder)["checkpoint"].endswith("checkpoint-000001")
    with refused("__0_0.distcp", "No such file"):
        runs.main(["export", str(folder), "--step=2"])
