"""The tests of the notebooks' tests: nothing in a notebook escapes being run and compared, and each keeps the
standard. Every rule is a function from a notebook and its folder to what is wrong; each is shown to bite.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parent.parent

# A chapter's notebooks in reading order. The run fails when one is missing, and when there is one that is not here.
NOTEBOOKS = [
    "01_intro/01_why_distribute.ipynb",
    "01_intro/02_collectives.ipynb",
    "01_intro/03_cost_and_mistakes.ipynb",
    "02_data_parallel/01_data_parallel.ipynb",
    "03_ddp/01_ddp.ipynb",
    "03_ddp/02_feeding.ipynb",
    "03_ddp/03_scaling.ipynb",
    "04_model_parallel/01_splitting_layers.ipynb",
    "04_model_parallel/02_tensor_parallel.ipynb",
    "04_model_parallel/03_long_contexts.ipynb",
    "04_model_parallel/04_experts.ipynb",
    "05_pipeline/01_pipelines.ipynb",
    "05_pipeline/02_schedule_lab.ipynb",
    "05_pipeline/03_pytorch_and_hybrids.ipynb",
    "06_fsdp/01_zero.ipynb",
    "06_fsdp/02_fully_shard.ipynb",
    "06_fsdp/03_fitting_in.ipynb",
]
FOUND = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[0-9]*/*.ipynb"))


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def name(cell):
    return f"cell {cell.id}"


def tags(cell):
    return cell.metadata.get("tags", [])


def is_valid(notebook, folder):
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield str(error).splitlines()[0]
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        yield f"the kernel is {kernel}, not python3"


def was_run_in_order(notebook, folder):
    # nbval runs a cell without a count, and compares nothing.
    counts = [cell.execution_count for cell in code(notebook)]
    if counts != list(range(1, len(counts) + 1)) or not counts:
        yield f"execution counts are {counts}: run it top to bottom (make notebooks)"


def has_no_unmeant_error(notebook, folder):
    for cell in code(notebook):
        meant = "raises-exception" in tags(cell)
        # nbval lets such a cell pass when it does not raise; so must nothing that expects a rank to fail.
        if (meant or "except RankFailed" in cell.source) and "raise AssertionError" not in cell.source:
            yield f"{name(cell)} expects a failure, and has no `else: raise AssertionError` for when there is none"
        if not meant and any(output.output_type == "error" for output in cell.outputs):
            yield f"{name(cell)} stores an error"


def is_compared(notebook, folder):
    cells = code(notebook)
    ignored = [cell for cell in cells if "nbval-ignore-output" in tags(cell)]
    if len(ignored) * 6 > len(cells):
        yield f"{len(ignored)} of {len(cells)} code cells escape comparison; at most one in six may"
    for cell in cells:
        others = [tag for tag in tags(cell) if "nbval" in tag.lower() and tag != "nbval-ignore-output"]
        others += re.findall(r"#\s*((?:NBVAL|PYTEST_VALIDATE)_\w+)", cell.source)
        if others:
            yield f"{name(cell)} has {others[0]}; the tag nbval-ignore-output is the only way out, and for timings"


def stores_no_warnings(notebook, folder):
    for cell in code(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"{name(cell)} stores text on stderr: {output.text[:80]!r}"


def says_nothing_of_its_machine(notebook, folder):
    for cell in code(notebook):
        for text in output_texts(cell):
            path = re.search(r"(?<![\w.:/])(?:/[\w.+-]+){2,}|\b[A-Z]:\\\w+|\bfile://", text)
            if path:
                yield f"{name(cell)} stores the path {path[0]}"


def output_texts(cell):
    for output in cell.outputs:
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        yield from (data for kind, data in output.get("data", {}).items() if kind.startswith("text/"))


def pictures_have_alt_text(notebook, folder):
    for cell in code(notebook):
        for output in cell.outputs:
            for kind in output.get("data", {}):
                alt = output.metadata.get(kind, {}).get("alt", "")
                if kind.startswith("image/") and len(alt.split()) < 5:
                    yield f"{name(cell)} shows a picture with {alt!r} for alt text: say what it shows"
    for alt, target in re.findall(r"!\[(.*?)\]\((.*?)\)", prose(notebook)):
        if len(alt.split()) < 5:
            yield f"the picture {target} has {alt!r} for alt text: say what it shows"


def is_as_long_as_agreed(notebook, folder):
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\]\(.*?\)|<.*?>", " ", prose(notebook), flags=re.DOTALL)
    words = sum(any(letter.isalnum() for letter in word) for word in text.split())
    if not 2000 <= words <= 4500:
        yield f"{words} words; agreed are 2,000 to 4,500"
    for cell in code(notebook):
        lines = len(cell.source.splitlines())
        if lines > 40:
            yield f"{name(cell)} has {lines} lines; agreed are 40"


def explains_between_code(notebook, folder):
    for first, second in zip(notebook.cells, notebook.cells[1:], strict=False):
        if first.cell_type == second.cell_type == "code":
            yield f"nothing is said between {name(first)} and {name(second)}"


def has_links_that_lead_somewhere(notebook, folder):
    yield from dead_links(prose(notebook), folder)


def dead_links(text, folder):
    """Relative links of some Markdown that lead to no file, or to no heading of one."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)|\b(?:href|src)=\"([^\"]+)\"", text)
    for target in filter(None, (a or b for a, b in targets)):
        file, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        if file and not (folder / file).exists():
            yield f"the link {target} leads to no file"
        elif anchor and (not file or file.endswith(".md")):
            page = (folder / file).read_text() if file else text
            if anchor.lower() not in {slug(heading) for heading in re.findall(r"^#+ +(.*?) *$", page, re.MULTILINE)}:
                yield f"the link {target} leads to no heading"


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def keeps_the_solutions_to_itself(notebook, folder):
    for cell in code(notebook):
        if re.search(r"\bsolutions\b", cell.source):
            yield f"{name(cell)} uses the solutions, which an instructor may leave out"


RULES = [
    is_valid,
    was_run_in_order,
    has_no_unmeant_error,
    is_compared,
    stores_no_warnings,
    says_nothing_of_its_machine,
    pictures_have_alt_text,
    is_as_long_as_agreed,
    explains_between_code,
    has_links_that_lead_somewhere,
    keeps_the_solutions_to_itself,
]


def test_the_notebooks_are_those_declared():
    missing, undeclared = set(NOTEBOOKS) - set(FOUND), set(FOUND) - set(NOTEBOOKS)
    assert not missing, f"declared in NOTEBOOKS, but not there: {sorted(missing)}"
    assert not undeclared, f"there, but not declared in NOTEBOOKS: {sorted(undeclared)}"


@pytest.mark.parametrize("path", FOUND)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_notebook(path, rule):
    wrong = list(rule(nbformat.read(ROOT / path, as_version=4), (ROOT / path).parent))
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
    cells = {path: len(code(nbformat.read(ROOT / path, as_version=4))) for path in FOUND}
    assert {path: sum(line.startswith(path + "::") for line in collected) for path in NOTEBOOKS} == cells


# Planted mistakes: each turns a notebook without fault into one that exactly the named rule refuses.


def picture(**metadata):
    return new_output("display_data", data={"image/png": "iVBORw0KGgo="}, metadata={"image/png": metadata})


def a_good_notebook():
    texts = ["# Title\n\n" + "word " * 1990, "[term](page.md#all-reduce) and [page](page.md)", *["More words."] * 5]
    cells = []
    for count, text in enumerate(texts, start=1):
        output = new_output("stream", name="stdout", text="1/2 done, 3 MB/s, https://example.com/a/b\n")
        cells += [new_markdown_cell(text), new_code_cell("print(1)", execution_count=count, outputs=[output])]
    cells[-1].metadata["tags"] = ["nbval-ignore-output"]
    cells[1].outputs.append(picture(alt="Four ranks that hold the same sum"))
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def tagged(*tags, source="1 / 0"):
    def change(notebook):
        notebook.cells[3].metadata["tags"], notebook.cells[3].source = list(tags), source

    return change


def put(attribute, value, index=3):
    return lambda notebook: notebook.cells[index].update({attribute: value})


def outputs(*values):
    return put("outputs", list(values))


MISTAKES = {
    "count missing": (was_run_in_order, put("execution_count", None)),
    "run twice": (was_run_in_order, put("execution_count", 9)),
    "bad id": (is_valid, put("id", "two words")),
    "other kernel": (is_valid, lambda notebook: notebook.metadata.kernelspec.update(name="venv")),
    "error": (has_no_unmeant_error, outputs(new_output("error", ename="E", evalue="no", traceback=["no"]))),
    "meant error that may stay away": (has_no_unmeant_error, tagged("raises-exception")),
    "failing rank that may not fail": (has_no_unmeant_error, put("source", "try:\n  f()\nexcept RankFailed:\n  0")),
    "two of seven escape": (is_compared, tagged("nbval-ignore-output")),
    "skipped": (is_compared, tagged("nbval-skip")),
    "skipped by a comment": (is_compared, put("source", "#NBVAL_SKIP\n1")),
    "warning": (stores_no_warnings, outputs(new_output("stream", name="stderr", text="[W] beware"))),
    "path": (says_nothing_of_its_machine, outputs(new_output("stream", name="stdout", text="saved /srv/x/run"))),
    "path in a result": (
        says_nothing_of_its_machine,
        outputs(new_output("display_data", data={"text/plain": "PosixPath('/srv/x/run')"})),
    ),
    "path on Windows": (says_nothing_of_its_machine, outputs(new_output("stream", name="stdout", text="C:\\x\\y"))),
    "picture without alt text": (pictures_have_alt_text, outputs(picture())),
    "picture with a name": (pictures_have_alt_text, outputs(picture(alt="figure 1"))),
    "linked picture without alt text": (pictures_have_alt_text, put("source", "![](page.md)", index=4)),
    "short": (is_as_long_as_agreed, put("source", "# Title", index=0)),
    "long": (is_as_long_as_agreed, put("source", "word " * 4500, index=0)),
    "long because of code": (is_as_long_as_agreed, put("source", f"```\n{'word ' * 1990}\n```", index=0)),
    "long cell": (is_as_long_as_agreed, put("source", "print(1)\n" * 41)),
    "code after code": (explains_between_code, lambda notebook: notebook.cells.pop(4)),
    "dead link": (has_links_that_lead_somewhere, put("source", "[x](../nowhere.md)", index=4)),
    "term that is not there": (has_links_that_lead_somewhere, put("source", "[x](page.md#reduce)", index=4)),
    "place that is not here": (has_links_that_lead_somewhere, put("source", "[x](#below)", index=4)),
    "solutions": (keeps_the_solutions_to_itself, put("source", "from solutions import *")),
}


@pytest.fixture
def folder(tmp_path):
    tmp_path.joinpath("page.md").write_text("# Page\n\n### All-reduce\n\nSums.\n")
    return tmp_path


def refused_by(notebook, folder):
    return {rule for rule in RULES if list(rule(notebook, folder))}


def test_a_good_notebook_passes(folder):
    assert refused_by(a_good_notebook(), folder) == set()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rule_bites(mistake, folder):
    rule, plant = MISTAKES[mistake]
    notebook = a_good_notebook()
    plant(notebook)
    assert refused_by(notebook, folder) == {rule}


def test_every_rule_is_shown_to_bite():
    assert {rule for rule, _ in MISTAKES.values()} == set(RULES)


def test_a_changed_output_fails_and_takes_the_rest_of_its_notebook_along(tmp_path):
    cells = [new_code_cell(f"print({i})", execution_count=i) for i in (1, 2, 3)]
    for cell, printed in zip(cells, ["1\n", "7\n", "3\n"], strict=True):
        cell.outputs = [new_output("stream", name="stdout", text=printed)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "changed.ipynb")
    tmp_path.joinpath("conftest.py").write_text((ROOT / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "-v"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert re.findall(r"Cell \d (\w+)", printed)[:3] == ["PASSED", "FAILED", "SKIPPED"], printed
