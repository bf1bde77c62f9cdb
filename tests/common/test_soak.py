"""The soak notices each kind of failure."""

import re
import sys

import psutil
import pytest
from command_rules import default_of
from helpers import configure

from course.strategies import STRATEGIES
from tools import soak

LEAVES_ONE = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True).pid)
"""


def attempt(source, timeout=30):
    return soak.attempt([sys.executable, "-c", source], soak.ROOT, timeout)


def test_nothing_wrong():
    assert attempt("print(1)") == ""


def test_exit_code():
    assert attempt("print('so far so good'); raise SystemExit(3)") == "exit code 3\nso far so good"


def test_process_left_behind(monkeypatch):
    monkeypatch.setattr(soak, "GRACE", 0.5)
    first, pid = attempt(LEAVES_ONE).splitlines()
    assert first == f"left process {pid} behind"
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_not_done_in_time():
    assert attempt("import time; time.sleep(60)", timeout=0.5) == "not done in 0.5 s"


def test_the_table_counts(capsys):
    assert soak.soak("three that fail", 3, lambda run_dir, number: [sys.executable, "-c", "1 / 0"], soak.ROOT) == 3
    assert soak.soak("two that pass", 2, lambda run_dir, number: [sys.executable, "-c", ""], soak.ROOT) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["3", "3"] and lines[-1].split()[-2:] == ["2", "0"]
    assert "ZeroDivisionError" in lines[-2]


def test_a_run_without_a_folder_is_in_one_of_its_own():
    here = "import os, sys; assert os.path.samefile('.', sys.argv[1]) and not os.listdir()"
    assert soak.soak("two", 2, lambda run_dir, number: [sys.executable, "-c", here, run_dir], None) == 0


@pytest.mark.weekly
def test_a_fork_is_watched_as_well(tmp_path):
    fork = soak.script("--strategy single", 1, str(tmp_path / "run"), fork=True)
    assert soak.attempt(fork, soak.ROOT) == "" and (tmp_path / "run" / "metrics.jsonl").exists()
    wrong = soak.attempt(soak.script("--steps 0", 1, str(tmp_path / "other"), fork=True), soak.ROOT)
    assert wrong.startswith("exit code 1") and "--steps" in wrong


@pytest.mark.weekly
def test_every_row_can_be_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = set()
    for folder, options, ranks in soak.rows():
        config = configure(f"{soak.SMALL} {options}", ranks, default=default_of(folder))
        started.add((config.strategy, config.implementation))
    table = {(name, kind) for name, entry in STRATEGIES.items() for kind in entry.implementations}
    assert table <= started, "implementations that the soak does not start"


def test_every_program_to_copy_is_in_the_table():
    texts = {f"{path.parent.name}/{path.name}": path.read_text() for path in soak.ROOT.glob("0*/*.py")}
    course = re.compile("^(from|import) (common|course)", re.MULTILINE)
    to_copy = {name for name, text in texts.items() if "\nif __name__ ==" in text and not course.search(text)}
    assert soak.PROGRAMS.keys() == to_copy, "programs of the soak, and those that readers copy"
