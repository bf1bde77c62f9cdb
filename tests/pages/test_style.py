"""What ruff does not know about this repository's style."""

import ast
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import FULL

ROOT = Path(__file__).resolve().parents[2]


def names_no_machine(path, text):
    """A path of somebody's machine, or the host of a package registry, works for nobody else."""
    found = re.findall(r"(?<![\w.])/(?:root|work|tmp|home/\w+|Users/\w+)(?:/\w+|\b)", text)
    found += re.findall(r"\b(?:pypi|pythonhosted|anaconda|npmjs)\.(?:org|com)\b|\bdownload\.pytorch\b", text)
    return [f"names {place}" for place in found]


def has_no_stub(path, text):
    """Stubs are for exercises.py, and for the tests of what becomes of them."""
    if path.suffix != ".py" or path.name == "exercises.py" or path.parts[0] == "tests":
        return []
    return ["has a stub"] if re.search(r"\braise NotImplemented", text) else []


def is_finished(path, text):
    text = re.sub(r"[\w+/]{200,}", "", text)  # pictures, in which all letters occur
    words = re.findall(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b|^<{7} |^>{7} ", text, re.MULTILINE)
    return [f"has a {word}" for word in words]


def says_how_to_run_it(path, text):
    if path.suffix != ".py" or not re.search(r"^if __name__ ==", text, re.MULTILINE):
        return []
    doc = ast.get_docstring(ast.parse(text), clean=False) or ""
    module = path.parent.name if path.stem == "__main__" else path.stem
    command = rf"^ *(?:python|torchrun) .*(?:-m [\w.]*{module}\b|{path.name})"
    wrong = [] if re.search(command, doc, re.MULTILINE) else ["is run, and its docstring has no command"]
    if path.name == "distributed_training.py" and "torchrun " not in doc:
        wrong.append("has no torchrun command in its docstring")
    return wrong


RULES = [names_no_machine, has_no_stub, is_finished, says_how_to_run_it]


def committed():
    """(path from the root, text) of every text file that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            # A picture in a notebook is random letters.
            yield path.relative_to(ROOT), re.sub(r'"image/\w+": "[^"]*"', "", content.decode())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_committed_files(rule):
    files = list(committed())
    assert {"Makefile", "requirements.txt", "common/lab/launch.py"} <= {str(path) for path, _ in files}
    wrong = [f"{path} {problem}" for path, text in files for problem in rule(path, text)]
    assert not wrong, "\n".join(wrong)


def test_tests_for_which_something_is_made_once_run_on_one_worker(request):
    """And others wherever there is room: by pytest_xdist_make_scheduler of tests/conftest.py."""
    options = SimpleNamespace(getvalue={"dist": "loadgroup", "tx": ["2*popen"]}.get)
    scheduler = request.config.hook.pytest_xdist_make_scheduler(config=options, log=None)
    made_once, others = "tests/strategies/test_from_meta.py", "tests/strategies/test_options.py"
    places = [{scheduler._split_scope(f"{file}::{name}") for name in "ab"} for file in (made_once, others)]
    assert [*map(len, places)] == [1, 2]


def test_what_is_weekly_is_no_part_of_make_test(request):
    assert FULL or not [item for item in request.session.items if item.get_closest_marker("weekly")]
