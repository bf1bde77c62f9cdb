"""python -m common.runs: what it says of runs, and what it refuses."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, configure, metrics, refused, saved, train
from matplotlib.axes import Axes
from safetensors import safe_open
from safetensors.torch import load_file

from common import runs
from common.errors import UserError
from common.lab.launch import launch


def made(folder: Path, losses: list, ranks: int = 1, seconds: float = 0.5, **settings) -> Path:
    """A run directory as a run with these losses leaves it."""
    folder.mkdir(parents=True)
    config = {"task": "text", "batch_size": 4, "context": 8, "steps": len(losses), "lr": 0.1, "run_dir": str(folder)}
    config |= {"layers": 1, "width": 8, "heads": 1}
    facts = {"strategy": "ddp", "implementation": "pytorch", "mesh": {"data": ranks}, "world_size": ranks}
    (folder / "config.json").write_text(json.dumps(facts | {"config": config | settings}))
    lines = [
        json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "step_seconds": seconds})
        for step, loss in enumerate(losses, start=1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']))  # a line that is being written
    return folder


def asked(capsys, *argv) -> list | dict:
    runs.main([*map(str, argv), "--json"])
    return json.loads(capsys.readouterr().out)


def noted(folder: Path, step: int, **values) -> None:
    """Write other values of a step into a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[step - 1] = json.dumps(json.loads(lines[step - 1]) | values)
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def said(capsys, *argv) -> list[str]:
    runs.main([*map(str, argv)])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("tolerance", ["nan", "-1"])
def test_a_tolerance_is_a_number_from_0_on(tolerance, tmp_path):
    with refused("--tolerance", tolerance):
        runs.main(["compare", str(tmp_path), str(tmp_path), "--tolerance", tolerance])


def test_a_run_of_pictures_and_one_that_has_just_begun(tmp_path, capsys):
    images, empty = made(tmp_path / "images", [4.0, 3.0], task="images"), made(tmp_path / "empty", [])
    history = runs.History(str(images))
    assert history.axis("tokens") == [4, 8], "4 examples a step, whatever the context is"
    one, other = asked(capsys, "summary", images, empty)
    assert one["examples_per_second"] == 8 and other["steps"] == "0/0"
    assert other["first_loss"] is other["last_loss"] is other["tokens_per_second"] is None
    assert asked(capsys, "plot", images, empty, "--out", tmp_path / "a.png")


def test_the_last_report_of_the_ranks_is_shown(tmp_path, capsys):
    a = made(tmp_path / "a", [4.0, 3.0])
    with refused("--log-every"):
        runs.main(["ranks", str(a)])
    for step in (1, 2):
        noted(a, step, ranks=[{"host": f"node{rank}", "use": step / 4} for rank in range(2)])
    assert said(capsys, "ranks", a) == ["rank  host   use", "0     node0  0.5", "1     node1  0.5"]


def test_compare_names_the_first_step_and_the_settings(tmp_path, capsys):
    a, b = made(tmp_path / "a", [4.0, 3.0, 2.0]), made(tmp_path / "b", [4.0, 3.00001, 2.2, 1.0], lr=0.2)
    (found,) = asked(capsys, "compare", a, b)
    assert found["first_difference"] == {"step": 3, "metric": "loss", "a": 2.0, "b": 2.2}
    assert found["steps_compared"] == 3 and found["at_step"] == 3
    assert found["settings"] == {"steps": [3, 4], "lr": [0.1, 0.2]}
    assert found["largest_difference"] == pytest.approx(0.2 / 2.2)
    (found,) = asked(capsys, "compare", a, b, "--tolerance=1e-6")
    assert found["first_difference"]["step"] == 2
    (found,) = asked(capsys, "compare", a, b, "--tolerance=0.1")
    assert found["first_difference"] is None
    runs.main(["compare", str(a), str(b)])
    assert "differ first at step 3: loss 2.0 and 2.2" in capsys.readouterr().out
    with refused("two"):
        runs.main(["compare", str(a)])


def test_summary_has_speed_up_and_efficiency(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(Path("runs/one"), [4.0, 3.0]), made(Path("runs/four"), [4.0, 3.5], ranks=4, seconds=0.2)
    one, four = asked(capsys, "summary", "one", "runs/four")
    assert one["tokens_per_second"] == 64 and (one["first_loss"], one["last_loss"]) == (4.0, 3.0)
    assert four["speed_up"] == pytest.approx(2.5) and four["efficiency"] == pytest.approx(0.625)
    assert [row["run"] for row in asked(capsys, "list")] == ["four", "one"]
    runs.main(["list"])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["run", "strategy", "implementation"] and "data=4" in first and "2/2" in second
    with refused("two", "config.json", "python -m common.runs list"):
        runs.main(["summary", "two"])


def test_plot_over_steps_tokens_and_seconds(tmp_path, capsys):
    a = made(tmp_path / "a", [4.0, 3.0, 2.0])
    history = runs.History(str(a))
    assert history.axis("steps") == [1, 2, 3] and history.axis("tokens") == [32, 64, 96]
    assert history.axis("seconds") == [0.5, 1.0, 1.5]
    assert asked(capsys, "plot", a, "--out", tmp_path / "a.png")["file"] == str(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with refused("--metric los", "loss, grad_norm"):
        runs.main(["plot", str(a), "--metric=los"])


def test_a_validation_loss_stands_in_some_steps_only(tmp_path, capsys, monkeypatch):
    a, drawn = made(tmp_path / "a", [4.0, 3.0, 2.0, 1.0]), []
    lines = [json.loads(line) for line in (a / "metrics.jsonl").read_text().splitlines()[:4]]
    lines[1]["validation_loss"], lines[3]["validation_loss"] = 3.5, 1.5
    (a / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, **how: drawn.append((x, y)))
    asked(capsys, "plot", a, "--metric", "validation_loss", "--out", tmp_path / "a.png")
    assert drawn == [([2, 4], [3.5, 1.5])]
    (row,) = asked(capsys, "summary", a)
    assert (row["validation_loss"], row["best_validation_loss"], row["at_step"]) == (1.5, 1.5, 4)
    drawn.clear()
    asked(capsys, "plot", a, "--metric", "loss", "validation_loss", "--out", tmp_path / "a.png")
    assert drawn == [([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]), ([2, 4], [3.5, 1.5])]


def test_a_cell_follows_a_run_until_it_has_ended(tmp_path, monkeypatch, capsys):
    run, drawn, waited = made(tmp_path / "a", [4.0, 3.0], steps=9), [], []
    written = [True, True, False]  # by whoever trains; it writes its third step and ends as it is asked whether it runs

    def is_written(_):
        if len(written) == 1:
            text = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
            third = json.dumps({"step": 3, "loss": 2.0, "grad_norm": 1.0, "step_seconds": 0.5})
            (run / "metrics.jsonl").write_text(f"{text}\n{third}\n")
        return written.pop(0)

    monkeypatch.setattr(runs, "is_written", is_written)
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, **how: drawn.append(y))
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda **_: SimpleNamespace(update=shown.append))
    monkeypatch.setattr(runs.time, "sleep", waited.append)
    runs.follow(str(run), "loss", "validation_loss", every=3)
    assert drawn == [[4.0, 3.0], [4.0, 3.0, 2.0]] and len(shown) == 2, "once for each time that it has got further"
    assert waited == [3, 3] and not written
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no validation_loss" in said and "grad_norm" in said, "nor a word that is wrong"


def test_following_a_run_needs_a_notebook(tmp_path):
    with pytest.raises(UserError, match="in a notebook's cell"):
        runs.follow(str(made(tmp_path / "a", [4.0], steps=9)))


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


def test_export_has_every_parameter_of_the_model(tmp_path, capsys):
    """Of a run on two ranks, in both formats; read again by what the format's documentation says."""
    folder = tmp_path / "run"
    config = configure(size=2, **SMALL, steps=2, checkpoint_every=1, strategy="fsdp", by_hand=True, run_dir=folder)
    launch(train, 2, ([config],))
    expected = {
        n.removeprefix("model."): t for n, t in saved(folder / "checkpoint-000002").items() if n[:6] == "model."
    }
    model = config.strategy_class.make_model(config)
    assert set(model.state_dict()) - set(expected) == {"head.out.weight"}  # tied
    capsys.readouterr()
    found = asked(capsys, "export", folder)
    state = torch.load(found["file"], weights_only=True)
    assert Path(found["file"]).name == "model-000002.pt" and found["tensors"] == len(expected)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    file = Path(asked(capsys, "export", folder, "--safetensors")["file"])
    assert file == folder / "model-000002.safetensors", "beside the run's other files"
    with safe_open(file, "pt") as reader:
        assert reader.metadata() == {"format": "pt"}, "what transformers asks for"
    read = load_file(file)
    assert read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in read)
    (folder / "checkpoint-000002" / "__0_0.distcp").unlink()
    assert asked(capsys, "export", folder)["checkpoint"].endswith("checkpoint-000001")
    with refused("__0_0.distcp", "No such file"):
        runs.main(["export", str(folder), "--step=2"])


def test_the_first_three_steps_do_not_count_for_speed(tmp_path):
    a = made(tmp_path / "a", [4.0] * 6)
    for step, seconds in enumerate((9.0, 5.0, 3.0, 0.5, 0.7, 9.0), start=1):
        noted(a, step, step_seconds=seconds)
    assert runs.History(str(a)).seconds == 0.7, "the median of steps 4, 5 and 6"
