"""`--task FILE.py`: a model and data of the user's train as on one process, and what cannot be gets one line."""

import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import configure, metrics, numbers, refused, train

from common import ROOT
from common.lab.launch import launch
from common.task import make_task

FILE = """
import torch
from torch.utils.data import IterableDataset, TensorDataset

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

inputs = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
whole = TensorDataset(inputs, inputs[:, :3].argmax(1))
held_out = TensorDataset(inputs[:6], inputs[:6, :3].argmin(1))

class Stream(IterableDataset):
    def set_epoch(self, epoch):
        self.first = 7 * epoch
    def __iter__(self):
        return (whole[(self.first + n) % 30] for n in range(30))

def data():
    return whole, held_out

def stream():
    return Stream(), None
"""
SETTINGS = {"steps": 8, "batch_size": 6, "strategy": "ddp", "checkpoint_every": 2, "optimizer": "sgd", "lr": 0.1}


@pytest.mark.parametrize("data", ["", ":stream"])
def test_it_trains_and_goes_on_in_mid_epoch_on_any_number_of_ranks(tmp_path, data):
    """30 examples in batches of 6: step 3 lies in the first pass, and step 6 in the second."""
    (tmp_path / "mine.py").write_text(FILE)
    how = SETTINGS | {"task": f"{tmp_path / 'mine.py'}{data}"} | ({} if data else {"validate_every": 4})
    launch(train, 1, ([configure(size=1, run_dir=tmp_path / "one", **how)],))
    launch(train, 2, ([configure(size=2, run_dir=tmp_path / "two", **how | {"steps": 3})],))
    for ranks, steps in ((2, 6), (1, 8)):
        launch(train, ranks, ([configure(f"--resume --steps {steps}", ranks, run_dir=tmp_path / "two")],))
    found, expected = numbers(tmp_path / "two"), numbers(tmp_path / "one")
    assert len(expected) == 16 and found == pytest.approx(expected, rel=1e-5)
    assert len({*expected}) == 16, "each step reads something else"
    if not data:
        held_out = [[line.get("validation_loss") for line in metrics(tmp_path / run)] for run in ("one", "two")]
        assert held_out[0][7] is not None and held_out[1][7] == pytest.approx(held_out[0][7], rel=1e-5)


def test_a_file_may_import_torchvision_by_itself(tmp_path):
    """As Transformers does for most of its models. In a process that has not imported it yet."""
    (tmp_path / "mine.py").write_text("import torchvision\n\ndef model():\n    return torchvision.models.VGG")
    ask = f"from common import own; print(own.named({str(tmp_path / 'mine.py:model')!r})().__name__)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("VGG\n", "")


@pytest.mark.parametrize("text, data, says", [
    ("", "", ("has no function 'data'",)),
    ("def data():\n    return [1]", "", ("data()", "pair")),
    ("def data():\n    raise OSError('no such folder')", "", ("data()", "OSError: no such folder")),
    ("def data():\n    return 5, None", "", ("int",)),
    ("def data():\n    return [], None\ndef model():\n    pass", "", ("0 examples",)),
    ("raise ValueError('no')", "", ("cannot be imported", "ValueError: no")),
    (FILE + "def rows():\n    return [{'text': 'a'}] * 9, None", ":rows", ("pair", "a dict with text")),
    (FILE + "def none():\n    return iter([]), None", ":none", ("no example",)),
    (FILE.replace("def model", "def other"), "", ("has no function 'model'",)),
    (FILE + "def model():\n    return 3", "", ("model()", "int")),
    (FILE + "def model():\n    return torch.nn.Linear(1, 1).requires_grad_(False)", "", ("nothing", "trained")),
])  # fmt: skip
def test_what_cannot_be_trained_gets_one_line(tmp_path, text, data, says):
    file = tmp_path / f"mine{abs(hash(text))}.py"
    file.write_text(textwrap.dedent(text))
    config = configure(size=1, run_dir=tmp_path / "run", **SETTINGS | {"task": f"{file}{data}"})
    with refused(*says) as error:
        task = make_task(config)
        assert isinstance(task.make_model(), torch.nn.Module)
        next(iter(task.dataset)) if data == ":none" else task.dataset.batch(torch.arange(2))
    assert str(error.value).count(str(file)) < 2, "no message within a message"


def test_a_stream_has_no_numbers_and_a_file_has_to_be_there(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    task = make_task(configure(strategy="ddp", batch_size=6, task=str(tmp_path / "mine.py"), run_dir=tmp_path / "run"))
    assert (task.dataset.size, task.validation_data().size) == (30, 6), "what is trained on, and what is not"
    with refused("stream", "--loading shard"):
        make_task(configure(epochs=2, strategy="ddp", task=f"{tmp_path / 'mine.py'}:stream", run_dir=tmp_path / "a"))
    for task in ("nowhere.py", "image"):
        with refused("--task", task):
            configure(task=task, run_dir=tmp_path / "b")
    with refused("tensor", "GPT"):
        configure(strategy="tensor", task=str(tmp_path / "mine.py"), run_dir=tmp_path / "b")
