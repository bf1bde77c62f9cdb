"""The last line on the screen says what is wrong and what to do: errors of use, alone and under torchrun."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forks import Fork, torchrun
from helpers import LAUNCHER, configure, refused

from common import ROOT, errors
from common.errors import UserError, one_line_errors, out_of_memory
from common.lab.launch import free_port

SCRIPT = ROOT / "distributed_training.py"
SMALL = ["--layers=1", "--width=16", "--heads=2", "--context=16", "--batch-size=12"]


def ended(process: Fork, code: int = 2) -> str:
    """What it said on stderr."""
    out, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    assert out == ""
    return said


def reported(file: Path) -> dict:
    return json.loads(file.read_text())["message"]


# --- under torchrun -------------------------------------------------------------------------------------------


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    for name in (*LAUNCHER, "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def fails_with(error: Exception) -> int:
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise error
    return end.value.code


def test_torchruns_report_carries_the_line(error_file, capfd):
    assert fails_with(UserError("too many")) == 2
    about = reported(error_file)["extraInfo"]
    assert about["py_callstack"] == "error: too many"
    assert int(about["timestamp"]) < int(time.time()), "before any failure that torchrun may see: it puts that one last"
    assert capfd.readouterr().err == ""  # once: torchrun will say it


def test_without_torchrun_and_between_its_attempts_it_stands_on_stderr(error_file, capfd, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fails_with(UserError("not yet")) == 2
    assert capfd.readouterr().err == "error: not yet\n" and error_file.exists()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/nowhere/error.json")
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS")
    assert fails_with(UserError("no file")) == 2
    assert capfd.readouterr().err == "error: no file\n"
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert fails_with(UserError("alone")) == 2
    assert capfd.readouterr().err == "error: alone\n"


def test_torchrun_ends_with_the_line(tmp_path):
    """A batch of 7 on two ranks."""
    line = ["--standalone", "--nproc_per_node=2", SCRIPT, "--distributed", *SMALL, "--batch-size=7", "--run-dir=run"]
    done = torchrun(*line, cwd=tmp_path)
    _, errors = done.communicate(timeout=300)
    assert done.returncode == 1
    *_, last, border = errors.splitlines()
    assert set(border) == {"="}
    assert last.strip().startswith("traceback : error: --batch-size 7 ") and last.endswith("8")
    # torchrun ends rank 1 before it speaks, or not, if the machine is busy.
    reported, said = (errors.count(f"{where}error: --batch-size 7 ") for where in ("traceback : ", ""))
    assert said == reported, f"in torchrun's report, and nowhere else:\n{errors}"


ON_RANK_0 = """
import time
from pathlib import Path
import torch

def model():
    if torch.get_default_device().type != "meta":
        while not Path("waits").exists():
            time.sleep(0.01)
        raise OSError("no weights in this folder")
    Path("waits").touch()
    return torch.nn.Sequential(torch.nn.Linear(2, 2))

def data():
    return [(torch.ones(2), torch.tensor(0))] * 8, None
"""


def test_an_error_of_rank_0_before_the_first_step_is_one_line_on_the_others(tmp_path):
    """Only rank 0 asks for weights, which the others wait for."""
    (tmp_path / "own.py").write_text(ON_RANK_0)
    line = ["--distributed", "--strategy=fsdp", "--by-hand", "--task=own.py", "--batch-size=2", "--run-dir=run"]
    port = free_port()
    ranks = [Fork(SCRIPT, *line, rank=(rank, 2, port), cwd=tmp_path) for rank in range(2)]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said[0].endswith("model() failed: OSError: no weights in this folder\n"), said[0]
    assert said[1].splitlines()[-1].startswith("error: another rank has died") and "Traceback" not in said[1], said[1]


# --- memory, data, packages -----------------------------------------------------------------------------------

ALLOCATORS = {  # what they say
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 6553600000 bytes. Error code 12": "6553600000 b",
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB": "20.00 MiB",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.": "64 bytes",
}


@pytest.mark.parametrize("said", ALLOCATORS)
def test_memory_that_is_used_up(said, capfd, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert fails_with(RuntimeError(said)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: out of memory") and ALLOCATORS[said] in line and "--batch-size" in line


def test_what_is_no_lack_of_memory_keeps_its_traceback():
    assert out_of_memory(MemoryError()).startswith("out of memory; try")
    assert out_of_memory(RuntimeError("shapes do not fit")) is None
    with pytest.raises(RuntimeError, match="shapes do not fit"), one_line_errors():
        raise RuntimeError("shapes do not fit")


def test_torch_still_says_so():
    """The words of its allocator, which out_of_memory knows them by."""
    with pytest.raises(UserError, match="^out of memory"):
        try:
            torch.empty(2**60)
        except RuntimeError as error:
            raise UserError(out_of_memory(error)) from None


def without(*names: str):
    """Called in a process: its Python lacks these packages from now on."""
    find = importlib.util.find_spec

    def hide():
        importlib.util.find_spec = lambda name, *more: None if name in names else find(name, *more)
        for module in ("common.installed", "course.start"):  # as if nothing had been imported
            sys.modules.pop(module, None)

    return hide


@pytest.mark.parametrize("program, package", [
    *itertools.product(("distributed_training.py", "common/check.py"), ("torch", "matplotlib")),
    *((f"common/{name}.py", "torch") for name in ("generate", "runs", "cluster_check")),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_before_anything_starts(program, package, tmp_path):
    process = Fork(ROOT / program, "--steps=1", "--run-dir=run", cwd=tmp_path, preexec_fn=without(package))
    (line,) = ended(process).splitlines()
    assert line.startswith(f"error: {sys.executable} has no package {package}; ")
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_packages_are_imported(tmp_path):
    """One line; where a program is past its imports, a traceback as always."""
    (tmp_path / "slow.py").write_text("def f():\n    raise KeyboardInterrupt\nf()\n")
    told_by = {"import slow": "stopped before it began", "raise KeyboardInterrupt": "Keyboard", "1 / 0": "Zero"}
    for line, last in told_by.items():
        command = [sys.executable, "-c", f"from common import installed\ninstalled.at_start()\n{line}"]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, stderr=subprocess.PIPE)
        told = done.stderr.decode().splitlines()
        assert told[-1].startswith(last) and (len(told) == 1) == (line == "import slow"), told
        assert done.returncode in (1, -2)


def test_pictures_need_torchvision(tmp_path):
    process = Fork(SCRIPT, "--task=images", "--run-dir=run", cwd=tmp_path, preexec_fn=without("torchvision"))
    (line,) = ended(process).splitlines()
    assert line.startswith("error: --task images: ") and "has no package torchvision; " in line
    process = Fork(SCRIPT, *SMALL, "--steps=1", cwd=tmp_path, preexec_fn=without("torchvision"))
    assert process.wait(timeout=300) == 0


# --- resume, interrupt ----------------------------------------------------------------------------------------


def test_a_resumed_run_that_has_nothing_to_do(tmp_path):
    assert Fork(SCRIPT, *SMALL, "--steps=2", "--run-dir=run", cwd=tmp_path).wait(timeout=300) == 0
    said = ended(Fork(SCRIPT, "--resume", "--run-dir=run", cwd=tmp_path))
    assert said.splitlines()[-1].startswith("error: --resume") and "--steps 4" in said


def test_ctrl_c_before_the_first_step(monkeypatch, capfd):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise KeyboardInterrupt
    assert end.value.code == errors.INTERRUPTED and capfd.readouterr().err == "stopped before the first step\n"


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [("learning-rate", "lr"), ("max_steps", "steps"), ("num_train_epochs", "epochs"),
     ("gradient_accumulation_steps", "accumulation-steps"),
     ("d_model", "width"), ("batchsize", "batch-size"), ("output-dir", "run-dir"), ("Hidden_Size", "width"),
     ("block_size", "context")],
)  # fmt: skip
def test_names_of_other_programs_are_understood(given, meant, tmp_path):
    with refused(f"--{given}", f"--{meant}"):
        configure(f"--{given}=1")
    file = tmp_path / "x.yaml"
    file.write_text(f"{given}: 1")
    with refused(given, meant):
        configure(f"--config={file}")
