"""From a notebook's cell into exercises.py and back."""

import io
from contextlib import redirect_stdout

import pytest
from hostile import SHIFT
from IPython.core.interactiveshell import InteractiveShell

from common import check
from common.errors import UserError
from common.grading import cells

FILE = '''"""Exercises."""

import torch


def first(x):
    """What to do."""
    raise NotImplementedError


@torch.no_grad()
def second(x):
    return 2 * x  # as it was
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "exercises.py").write_text(FILE)
    return tmp_path / "exercises.py"


def run(file) -> dict:
    names: dict = {}
    exec(file.read_text(), names)
    return names


def test_a_cell_takes_the_place_of_its_function_and_of_nothing_else(file):
    cells.put_into(file, "first", "def first(x):\n    return x + 1\n")
    assert (run(file)["first"](1), run(file)["second"](3)) == (2, 6)
    cells.put_into(file, "second", "def second(x):\n    return -x\n\n\n# the end")
    assert (run(file)["first"](1), run(file)["second"](3)) == (2, -3)


def test_there_and_back_changes_nothing(file):
    for name in ("first", "second"):
        cells.put_into(file, name, cells.function_in(file, name))
    assert file.read_text() == FILE


def test_helpers_and_imports_come_along_once(file):
    cell = "import math\n\ndef half(x):\n    return math.floor(x / 2)\n\ndef first(x):\n    return half(x)\n"
    for _ in range(2):
        cells.put_into(file, "first", cell)
        assert (
            run(file)["first"](7) == 3 and file.read_text().count("def half") == file.read_text().count("math\n") == 1
        )
    cells.put_into(file, "first", cell.replace("x / 2", "x / 3"))
    assert run(file)["first"](7) == 2


@pytest.mark.parametrize(
    "cell", ["def other(x):\n    return x", "def first(x:\n", "print(1)\n\ndef first(x):\n    return x", "", "\0"]
)
def test_what_is_no_answer_is_refused_and_nothing_is_written(file, cell):
    with pytest.raises(UserError):
        cells.put_into(file, "first", cell)
    assert file.read_text() == FILE


def test_a_damaged_file_is_not_written(file):
    file.write_text(FILE + "\ndef (:\n")
    with pytest.raises(UserError, match="exercises.py"):
        cells.put_into(file, "first", "def first(x):\n    return x\n")
    assert file.read_text().endswith("def (:\n")


def test_a_stub_is_known(file):
    assert cells.is_stub(file, "first") and not cells.is_stub(file, "second") and not cells.is_stub(file, "third")
    cells.put_into(file, "first", "def first(x):\n    if x:\n        return 1\n    raise NotImplementedError\n")
    assert not cells.is_stub(file, "first"), "begun"


def test_from_the_page_to_the_check_in_one_step_and_back(tmp_path, monkeypatch):
    shipped = check.ROOT / "01_intro" / "exercises.py"
    mine = tmp_path / "exercises.py"
    mine.write_bytes(shipped.read_bytes())
    monkeypatch.setattr(check, "exercises_file", lambda chapter: mine)
    shell = InteractiveShell.instance()
    try:
        assert check.with_magic()
        said = io.StringIO()
        with redirect_stdout(said):
            shell.run_cell_magic("exercise", "ring_shift", SHIFT)
        assert "1 of 1 right" in said.getvalue() and "%exercise global_mean" in said.getvalue(), said.getvalue()
        assert SHIFT.strip().splitlines()[-1] in mine.read_text()
        shell.run_line_magic("exercise", "ring_shift")
        brought = shell.rl_next_input
        assert brought.startswith("%%exercise ring_shift\n") and brought.endswith(SHIFT.strip().splitlines()[-1] + "\n")
        before = mine.read_text()
        for magic, name, cell in (("exercise", "ring_shift", "x = 1"), ("exercise", "nowhere", SHIFT)):
            said = io.StringIO()
            with redirect_stdout(said):
                shell.run_cell_magic(magic, name, cell)
            assert said.getvalue().startswith("error: ") and said.getvalue().count("\n") == 1
        assert mine.read_text() == before
    finally:
        InteractiveShell.clear_instance()
