"""The tests of the notebooks' tests: nothing in a notebook escapes being run and compared, and each keeps the
standard. The rules stand in notebook_rules.py; each is shown to bite.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import notebook_rules
import pytest
from links import dead_links
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns
from notebook_rules import (
    alt_text_is_that_of_the_source,
    code,
    explains_between_code,
    has_links_that_lead_somewhere,
    has_no_unmeant_error,
    has_prose,
    hides_gpus_from_what_it_starts,
    is_compared,
    is_valid,
    keeps_its_asserts,
    keeps_the_solutions_to_itself,
    pictures_have_alt_text,
    promises_its_time,
    says_nothing_of_its_machine,
    shows_numbers_not_verdicts,
    shows_what_it_announces,
    stores_no_warnings,
    was_run_in_order,
)
from number_rules import numbers_of_the_prose_are_computed_or_cited

RULES = [*notebook_rules.RULES, numbers_of_the_prose_are_computed_or_cited]
ROOT = Path(__file__).resolve().parents[2]

# A chapter's notebooks in reading order. The run fails when one is missing, and when there is one that is not here.
NOTEBOOKS = [
    "01_intro/01_why_distribute.ipynb",
    "01_intro/02_collectives.ipynb",
    "01_intro/03_collectives_in_practice.ipynb",
    "01_intro/04_cost.ipynb",
    "01_intro/05_mistakes.ipynb",
    "02_data_parallel/01_data_parallel.ipynb",
    "03_ddp/01_ddp.ipynb",
    "03_ddp/02_feeding.ipynb",
    "03_ddp/03_scaling.ipynb",
    "03_ddp/04_training_well.ipynb",
    "03_ddp/05_checkpoints_and_failures.ipynb",
    "03_ddp/06_when_it_hangs.ipynb",
    "04_model_parallel/01_splitting_layers.ipynb",
    "04_model_parallel/02_tensor_parallel.ipynb",
    "04_model_parallel/03_long_contexts.ipynb",
    "04_model_parallel/04_experts.ipynb",
    "04_model_parallel/05_inside_a_node.ipynb",
    "04_model_parallel/06_contexts_in_practice.ipynb",
    "05_pipeline/01_pipelines.ipynb",
    "05_pipeline/02_schedule_lab.ipynb",
    "05_pipeline/03_pytorch_and_hybrids.ipynb",
    "06_fsdp/01_zero.ipynb",
    "06_fsdp/02_fully_shard.ipynb",
    "06_fsdp/03_fitting_in.ipynb",
    "06_fsdp/04_choosing.ipynb",
    "06_fsdp/05_engines.ipynb",
    "06_fsdp/06_many_axes.ipynb",
]
SANITIZE = ROOT / "tests" / "sanitize.cfg"
FOUND = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[0-9]*/*.ipynb"))


def test_the_notebooks_are_those_declared():
    missing, undeclared = set(NOTEBOOKS) - set(FOUND), set(FOUND) - set(NOTEBOOKS)
    assert not missing, f"declared in NOTEBOOKS, but not there: {sorted(missing)}"
    assert not undeclared, f"there, but not declared in NOTEBOOKS: {sorted(undeclared)}"


@functools.cache
def notebook_at(path):
    return nbformat.read(ROOT / path, as_version=4)


@pytest.mark.parametrize("path", FOUND)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_notebook(path, rule):
    wrong = list(rule(notebook_at(path), ROOT / path))
    assert not wrong, "\n".join([path, *wrong])


def test_what_is_owed_is_owed_by_notebooks():
    for owed in ("UNCOMPARED", "VERDICTS", "ASSERTS"):
        debts = getattr(notebook_rules, owed)
        assert {*debts} <= {*NOTEBOOKS} and all(debts.values()), owed


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
    cells = {path: len(code(notebook_at(path))) for path in FOUND}
    assert {path: sum(line.startswith(path + "::") for line in collected) for path in NOTEBOOKS} == cells


# Planted mistakes: each turns a notebook without fault into one that exactly the named rule refuses.


def picture(**metadata):
    return new_output("display_data", data={"image/png": "iVBORw0KGgo="}, metadata={"image/png": metadata})


def flipped(alt):
    return new_output("display_data", data={"text/html": f'<img src="data:image/png;base64,A" alt="{alt}">'})


def begin(words=2000, minutes=15):
    return f"# Title\n\n**Time:** {minutes} minutes. **You need:** nothing.\n\n{'word ' * words}"


PROSE = """The model has 3,363,840 parameters, 3.4 million; 42% of the time is lost, and in section 12 another 0.42.

GPT-2 has 1.5 billion (Radford et al. 2019), GPT-3 [175](https://example.com), and 540 [3]. Or `7777`, in code.
"""


def a_good_notebook():
    texts = [begin(), "[term](page.md#all-reduce), [page](page.md), [name](page.md#ddp)", PROSE, *["More words."] * 4]
    cells = []
    for count, text in enumerate(texts, start=1):
        output = new_output("stream", name="stdout", text="1/2 done, ~3 MB/s, https://example.com/a/b\n")
        cells += [new_markdown_cell(text), new_code_cell("print(1)", execution_count=count, outputs=[output])]
    cells[1].source = 'show(fig, alt=f"Four ranks that {verb} the same sum")'
    cells[1].outputs.append(picture(alt="Four ranks that hold the same sum"))
    cells[-1].source = "print(37)"
    cells[5].outputs[0].text = "3,363,840 parameters, async_op=True, share 0.4204\n"
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def tagged(*tags, source="1 / 0"):
    def change(notebook):
        notebook.cells[3].metadata["tags"], notebook.cells[3].source = list(tags), source

    return change


def put(attribute, value, index=3):
    return lambda notebook: notebook.cells[index].update({attribute: value})


def outputs(*values):
    return put("outputs", list(values))


def without(index, before="Some words.", after="More words."):
    """A code cell deleted, and the notebook run again."""

    def change(notebook):
        del notebook.cells[index]
        notebook.cells[index - 1].source, notebook.cells[index].source = before, after
        for count, cell in enumerate(code(notebook), start=1):
            cell.execution_count = count

    return change


def printed(text):
    return outputs(new_output("stream", name="stdout", text=text))


def code_of_another_section(notebook):
    notebook.cells[6].source, notebook.cells[8].source = "It is 37 MB.", "## 2. Two"


def says(text):
    return put("source", text, index=6)


MISTAKES = {
    "count missing": (was_run_in_order, put("execution_count", None)),
    "run twice": (was_run_in_order, put("execution_count", 9)),
    "bad id": (is_valid, put("id", "two words")),
    "other kernel": (is_valid, lambda notebook: notebook.metadata.kernelspec.update(name="venv")),
    "error": (has_no_unmeant_error, outputs(new_output("error", ename="E", evalue="no", traceback=["no"]))),
    "meant error that may stay away": (has_no_unmeant_error, tagged("raises-exception")),
    "failing rank that may not fail": (has_no_unmeant_error, put("source", "try:\n  f()\nexcept RankFailed:\n  0")),
    "not compared": (is_compared, tagged("nbval-ignore-output")),
    "not compared, by a comment": (is_compared, put("source", "# NBVAL_IGNORE_OUTPUT\n1")),
    "skipped": (is_compared, tagged("nbval-skip")),
    "skipped by a comment": (is_compared, put("source", "#NBVAL_SKIP\n1")),
    "verdict": (shows_numbers_not_verdicts, printed("equal: True")),
    "verdicts of ranks": (shows_numbers_not_verdicts, printed("(True, False)")),
    "one more assert": (keeps_its_asserts, put("source", "assert 1")),
    "warning": (stores_no_warnings, outputs(new_output("stream", name="stderr", text="[W] beware"))),
    "path": (says_nothing_of_its_machine, outputs(new_output("stream", name="stdout", text="saved /srv/x/run"))),
    "path in a result": (
        says_nothing_of_its_machine,
        outputs(new_output("display_data", data={"text/plain": "PosixPath('/srv/x/run')"})),
    ),
    "time": (says_nothing_of_its_machine, put("metadata", {"execution": {"iopub.status.busy": "2026"}})),
    "path on Windows": (says_nothing_of_its_machine, outputs(new_output("stream", name="stdout", text="C:\\x\\y"))),
    "picture without alt text": (pictures_have_alt_text, outputs(picture())),
    "picture with a name": (pictures_have_alt_text, outputs(picture(alt="figure 1"))),
    "linked picture without alt text": (pictures_have_alt_text, put("source", "![](page.md)", index=4)),
    "alt text of another picture": (
        alt_text_is_that_of_the_source,
        put("outputs", [picture(alt="Two ranks that hold the same sum")], index=1),
    ),
    "alt text of no source": (alt_text_is_that_of_the_source, outputs(picture(alt="Four ranks that hold the same"))),
    "alt text in a flipbook": (alt_text_is_that_of_the_source, outputs(flipped("Two ranks which hold the same sum"))),
    "flipbook without words": (pictures_have_alt_text, outputs(flipped("frame"))),
    "picture gone": (alt_text_is_that_of_the_source, put("outputs", [], index=1)),
    "short": (has_prose, put("source", begin(1900), index=0)),
    "short but for code": (has_prose, put("source", begin(10, 0) + f"\n```\n{'word ' * 1990}\n```", index=0)),
    "no promise": (promises_its_time, put("source", "# Title\n\n" + "word " * 2000, index=0)),
    "broken promise": (promises_its_time, put("source", begin(minutes=20), index=0)),
    "long": (promises_its_time, put("source", begin(15000, 100), index=0)),
    "long by a listing": (promises_its_time, put("source", begin() + "\n```\n" + "x = 1\n" * 50 + "```", index=0)),
    "number contradicted": (numbers_of_the_prose_are_computed_or_cited, says("It has 3,363,841 parameters.")),
    "rounded wrongly": (numbers_of_the_prose_are_computed_or_cited, says("It has 3.3 million parameters.")),
    "percentage": (numbers_of_the_prose_are_computed_or_cited, says("Half of it, 43%, is lost.")),
    "whole number": (numbers_of_the_prose_are_computed_or_cited, says("Rank 0 sends 38 MB.")),
    "cited elsewhere": (numbers_of_the_prose_are_computed_or_cited, says("It is 38 MB. GPT-2 is from 2019.")),
    "of another section's code": (numbers_of_the_prose_are_computed_or_cited, code_of_another_section),
    "of another page": (numbers_of_the_prose_are_computed_or_cited, says("[There](page.ipynb) we counted 39 MB.")),
    "long cell": (has_prose, put("source", "print(1)" + "\n" * 40 + "1")),
    "code after code": (explains_between_code, lambda notebook: notebook.cells.pop(4)),
    "cell deleted": (shows_what_it_announces, without(3)),
    "cell at the end of a section deleted": (shows_what_it_announces, without(3, "Here it is:", "## Next")),
    "dead link": (has_links_that_lead_somewhere, put("source", "[x](../nowhere.md)", index=4)),
    "term that is not there": (has_links_that_lead_somewhere, put("source", "[x](page.md#reduce)", index=4)),
    "place that is not here": (has_links_that_lead_somewhere, put("source", "[x](#below)", index=4)),
    "capitals": (has_links_that_lead_somewhere, put("source", "[x](page.md#All-reduce)", index=4)),
    "capitals in JupyterLab only": (has_links_that_lead_somewhere, put("source", "[x](page.md#page)", index=4)),
    "section of a notebook": (has_links_that_lead_somewhere, put("source", "[x](page.ipynb#two)", index=4)),
    "solutions": (keeps_the_solutions_to_itself, put("source", "from solutions import *")),
    "GPUs seen": (hides_gpus_from_what_it_starts, put("source", 'subprocess.run(["torchrun", "a.py"])')),
    "GPUs hidden too late": (
        hides_gpus_from_what_it_starts,
        put("source", 'subprocess.run(["torchrun", "a.py"])\nos.environ["CUDA_VISIBLE_DEVICES"] = ""'),
    ),
}


@pytest.fixture
def path(tmp_path):
    """Where the notebook lies: beside a page and another notebook."""
    tmp_path.joinpath("page.md").write_text('# Page\n\n### all-reduce\n\nSums.\n\n<a id="ddp"></a>\n\n### DDP\n')
    other = new_notebook(cells=[new_markdown_cell("## one"), new_code_cell("print(38e6)")])
    nbformat.write(other, tmp_path / "page.ipynb")
    return tmp_path / "good.ipynb"


def refused_by(notebook, path):
    return {rule for rule in RULES if list(rule(notebook, path))}


def test_a_good_notebook_passes(path):
    notebook = a_good_notebook()
    assert refused_by(notebook, path) == set()
    notebook.cells[6].source = "[There](page.ipynb) it is 38 MB, see [one](page.ipynb#one)."
    assert refused_by(notebook, path) == set()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rule_bites(mistake, path):
    rule, plant = MISTAKES[mistake]
    notebook = a_good_notebook()
    plant(notebook)
    assert refused_by(notebook, path) == {rule}


@pytest.mark.parametrize(
    "debts, owed, rule",
    [
        ("UNCOMPARED", {"a cell": "why"}, is_compared),
        ("VERDICTS", 1, shows_numbers_not_verdicts),
        ("ASSERTS", 1, keeps_its_asserts),
    ],
)
def test_a_page_that_has_paid_leaves_the_list(debts, owed, rule, path, monkeypatch):
    monkeypatch.setattr(notebook_rules, debts, {notebook_rules.key(path): owed})
    assert refused_by(a_good_notebook(), path) == {rule}


def test_alt_texts_may_come_from_a_function_of_an_earlier_cell(path):
    notebook = a_good_notebook()
    first, second = notebook.cells[1], notebook.cells[3]
    first.source = 'def draw(what):\n    show(fig, alt=f"Four ranks that {what} the same sum")\n\ndraw("hold")'
    second.source, second.outputs = 'draw("add")', [picture(alt="Four ranks that add the same sum")]
    assert refused_by(notebook, path) == set()
    second.source = "draw_nothing()"
    assert refused_by(notebook, path) == {alt_text_is_that_of_the_source}


def test_every_rule_is_shown_to_bite():
    assert {rule for rule, _ in MISTAKES.values()} == set(RULES)


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
    def masked(text):
        for pattern, replacement in get_sanitize_patterns(SANITIZE.read_text()):
            text = re.sub(pattern, replacement, text)
        return text

    assert (masked(stored) == masked(new)) == equal


def test_a_changed_output_fails_and_takes_the_rest_of_its_notebook_along(tmp_path):
    prints = {"took ~1.5 ms": "took ~27 ms\n", "~1.5 ms shorter": "~1.5 ms longer\n", "3": "3\n", "4": "4\n"}
    cells = [new_code_cell(f"print({text!r})", execution_count=count) for count, text in enumerate(prints, start=1)]
    for cell, stored in zip(cells, prints.values(), strict=True):
        cell.outputs = [new_output("stream", name="stdout", text=stored)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "changed.ipynb")
    tmp_path.joinpath("tests").mkdir()
    for file in (ROOT / "conftest.py", SANITIZE):
        tmp_path.joinpath(file.relative_to(ROOT)).write_text(file.read_text())
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-v", "-rs"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.findall(r"Cell \d ([A-Z]+)", printed)[:4] == ["PASSED", "FAILED", "SKIPPED", "SKIPPED"], printed
    assert {*re.findall(r"Cell \d failed before", printed)} == {"Cell 1 failed before"}, "the first that failed"
