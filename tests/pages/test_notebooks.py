"""The tests of the notebooks' tests: nothing in a notebook escapes being run and compared, and each keeps the
standard. The rules stand in notebook_rules.py.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import notebook_rules
import pytest
from links import dead_links
from notebook_rules import code
from number_rules import numbers_of_the_prose_are_computed_or_cited

from tools.facts import EVERY_NOTEBOOK, NOTEBOOKS, read

RULES = [*notebook_rules.RULES, numbers_of_the_prose_are_computed_or_cited]
ROOT = Path(__file__).resolve().parents[2]

SANITIZE = ROOT / "tests" / "sanitize.cfg"


def test_the_notebooks_of_each_chapter_are_numbered_without_a_gap():
    """So one that is missing is missed; README.md lists each (`make facts`)."""
    chapters = {folder.name for folder in ROOT.glob("0*_*")}
    numbers = {chapter: [Path(path).name[:2] for path in NOTEBOOKS if path.startswith(chapter)] for chapter in chapters}
    assert all(found == [f"{n:02}" for n in range(1, len(found) + 1)] and found for found in numbers.values()), numbers


@functools.cache
def notebook_at(path):
    return read(ROOT / path)


@pytest.mark.parametrize("path", EVERY_NOTEBOOK)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_notebook(path, rule):
    wrong = list(rule(notebook_at(path), ROOT / path))
    assert not wrong, "\n".join([path, *wrong])


@pytest.mark.parametrize("path", sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]), ids=lambda path: path.name)
def test_links_of_a_page(path):
    wrong = list(dead_links(path.read_text(), path.parent))
    assert not wrong, "\n".join([str(path), *wrong])


def test_make_runs_every_code_cell():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    make = ["make", "--dry-run", "test-notebooks", f"VENV={sys.prefix}"]
    printed = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    (command,) = [line.split() for line in printed.splitlines() if "--nbval " in line]
    collect = [sys.executable, *command[1:], "-n", "0", "--collect-only", "-q"]
    collected = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    cells = {path: len(code(notebook_at(path))) for path in EVERY_NOTEBOOK}
    assert {path: sum(line.startswith(path + "::") for line in collected) for path in cells} == cells


@pytest.mark.parametrize(
    "stored, new, equal",
    [
        ("took ~12.3 ms", "took   ~9 ms", True),
        ("~1,024.5 tokens/s on 2 ranks", "~998 tokens/s on 2 ranks", True),
        ("222  ~222/s  ~12.1/s", "222    ~45/s  ~3/s", True),
        ('"data:image/png;base64,iV+/0=" alt="one"', '"data:image/png;base64,A" alt="one"', True),
        ('"data:image/png;base64,iV+/0=" alt="one"', '"data:image/png;base64,A" alt="two"', False),
        ("~0.96 times as fast, ~42% idle, ~1.5 x", "~1.10 times as fast, ~7% idle, ~2 x", True),
        ("largest difference 3.1e-07 (allowed 3e-05)", "largest difference 0.0e+00 (allowed 3e-05)", True),
        ("took ~12.3 ms", "took ~12.3 s", False),
        ("~12.3 ms longer", "~12.3 ms shorter", False),
        ("~998 tokens/s on 2 ranks", "~998 tokens/s on 4 ranks", False),
        ("took 12.3 ms", "took 12.4 ms", False),
        ("sent ~12 bytes", "sent ~13 bytes", False),
        ("~nan ms", "~1 ms", False),
        ("difference 3.1e-07 (allowed 3e-05)", "difference 3.1e-07 (allowed 3e-02)", False),
        ("difference 3", "difference 4", False),
    ],
)
def test_only_marked_measurements_are_masked(stored, new, equal):
    from nbval.plugin import get_sanitize_patterns

    def masked(text):
        for pattern, replacement in get_sanitize_patterns(SANITIZE.read_text()):
            text = re.sub(pattern, replacement, text)
        return text

    assert (masked(stored) == masked(new)) == equal


def test_a_changed_output_fails_and_takes_the_rest_of_its_notebook_along(tmp_path):
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    prints = {"took ~1.5 ms": "took ~27 ms\n", "~1.5 ms shorter": "~1.5 ms longer\n", "3": "3\n", "4": "4\n"}
    cells = [new_code_cell(f"print({text!r})", execution_count=count) for count, text in enumerate(prints, start=1)]
    for cell, stored in zip(cells, prints.values(), strict=True):
        cell.outputs = [new_output("stream", name="stdout", text=stored)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "changed.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "conftest", "-v", "-rs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FULL": "1"}  # a kernel of its own: it imports no PyTorch
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert re.findall(r"Cell \d ([A-Z]+)", printed)[:4] == ["PASSED", "FAILED", "SKIPPED", "SKIPPED"], printed
    assert {*re.findall(r"Cell \d failed before", printed)} == {"Cell 1 failed before"}, "the first that failed"
