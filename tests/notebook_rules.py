"""What every notebook keeps to: rules from a notebook and its path to what is wrong.

test_notebooks.py applies them. The rule for numbers in the prose
stands in number_rules.py.
"""

import ast
import html
import itertools
import re

from links import dead_links

from tools.facts import reading_minutes

MOST_MINUTES = 40

# As ipykernel installs it, and JupyterLab stores it.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def prose(notebook):
    return "\n".join(cell.source for cell in markdown(notebook))


def name(cell):
    return f"cell {cell.id}"


def tags(cell):
    return cell.metadata.get("tags", [])


def output_texts(cell):
    for output in cell.outputs:
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        yield from (data for kind, data in output.get("data", {}).items() if kind == "text/plain")


# --- what it stores -------------------------------------------------------------------------------------------


def is_valid(notebook, path):
    import nbformat

    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield str(error).splitlines()[0]
    kernel = dict(notebook.metadata.get("kernelspec", {}))
    if kernel != KERNEL:
        yield f"the kernelspec is {kernel}, not {KERNEL}: JupyterLab would change it as soon as the page is opened"


def was_run_in_order(notebook, path):
    # nbval runs a cell without a count, and compares nothing.
    counts = [cell.execution_count for cell in code(notebook)]
    if counts != list(range(1, len(counts) + 1)) or not counts:
        yield f"execution counts are {counts}: run it top to bottom (make notebooks)"


def shows_why_a_program_failed(notebook, path):
    """A reader who changes the program that a cell starts should read its error, and not that its exit code is 1."""
    for cell in code(notebook):
        if re.search(r"capture_output=True[^)]*check=True", cell.source):
            yield f"{name(cell)} raises without what the program wrote: show stderr where there is a return code"


def has_no_unmeant_error(notebook, path):
    for cell in code(notebook):
        meant = "raises-exception" in tags(cell)
        # nbval lets such a cell pass when it does not raise; so must nothing that expects a rank to fail.
        if (meant or "except RankFailed" in cell.source) and "raise AssertionError" not in cell.source:
            yield f"{name(cell)} expects a failure, and has no `else: raise AssertionError` for when there is none"
        if not meant and any(output.output_type == "error" for output in cell.outputs):
            yield f"{name(cell)} stores an error"


def is_compared(notebook, path):
    for cell in code(notebook):
        ways_out = [tag for tag in tags(cell) if "nbval" in tag.lower()]
        ways_out += re.findall(r"#\s*((?:NBVAL|PYTEST_VALIDATE)_\w+)", cell.source)
        if ways_out:
            yield f"{name(cell)} has {ways_out[0]}: write ~ before what is measured (tests/sanitize.cfg), and compare"


def stores_no_warnings(notebook, path):
    for cell in code(notebook):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"{name(cell)} stores text on stderr: {output.text[:80]!r}"


def says_nothing_of_its_machine(notebook, path):
    for cell in code(notebook):
        if "execution" in cell.metadata:
            yield f"{name(cell)} stores when it was run (make notebooks does not)"
        for text in output_texts(cell):
            found = re.search(r"(?<![\w.:/])(?:/[\w.+-]+){2,}|\b[A-Z]:\\\w+|\bfile://", text)
            if found:
                yield f"{name(cell)} stores the path {found[0]}"


def shows_numbers_not_verdicts(notebook, path):
    """The result from which one learns is a number beside what was expected, not True; printed code, such as
    `async_op=True`, is none."""
    found = r"(?<![=\w.])(?<!= )(?<!_\()(?:True|False)\b"
    which = sorted({cell.id for cell in code(notebook) for text in output_texts(cell) if re.search(found, text)})
    if which:
        yield f"outputs of {which} are a bare True or False: print the number and what it should be"


def parsed(source):
    """A cell without IPython's own lines."""
    return ast.parse("\n".join(line for line in source.splitlines() if not re.match(r"\s*[%!]", line)))


# --- pictures -------------------------------------------------------------------------------------------------


def pictures_have_alt_text(notebook, path):
    for cell in code(notebook):
        for alt in stored_alts(cell):
            if len(alt.split()) < 5:
                yield f"{name(cell)} shows a picture with {alt!r} for alt text: say what it shows"
    for alt, target in re.findall(r"!\[(.*?)\]\((.*?)\)", prose(notebook)):
        if len(alt.split()) < 5:
            yield f"the picture {target} has {alt!r} for alt text: say what it shows"


def stored_alts(cell):
    """The alt texts of a cell's pictures, and of those in its HTML, such as the frames of a flipbook."""
    for output in cell.outputs:
        data = output.get("data", {})
        frames = re.findall(r"<img [^>]*>", data.get("text/html", ""))
        yield from (html.unescape((re.search(r' alt="([^"]*)"', frame) or ["", ""])[1]) for frame in frames)
        yield from (output.metadata.get(kind, {}).get("alt", "") for kind in data if kind.startswith("image/"))


def alt_text_is_that_of_the_source(notebook, path):
    """nbval does not compare metadata: a stored alt text may be that of another picture, or of an older cell."""
    helpers = {}  # function of an earlier cell -> patterns of alt texts in it
    for cell in code(notebook):
        stored = list(stored_alts(cell))
        inline, defined = alt_patterns(cell.source)
        helpers |= defined
        called = [
            pattern for function, patterns in helpers.items() if f"{function}(" in cell.source for pattern in patterns
        ]
        for alt in stored:
            if len(alt.split()) >= 5 and not any(re.fullmatch(pattern, alt, re.DOTALL) for pattern in inline + called):
                yield f"{name(cell)} stores the alt text {alt[:80]!r}, which is not that of its source: run it again"
        unused = [pattern for pattern in inline if not any(re.fullmatch(pattern, alt, re.DOTALL) for alt in stored)]
        yield from (f"{name(cell)} has no picture with the alt text {pattern[:80]!r}" for pattern in unused)


def alt_patterns(source):
    """Regular expressions for the values of `alt=` in a cell: those that it shows itself, and those of functions."""
    tree = parsed(source)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return (
        list(itertools.chain(*(alts(node) for node in tree.body if node not in functions))),
        {function.name: alts(function) for function in functions if alts(function)},
    )


def alts(tree):
    """Of show(figure, alt), Frame(picture, alt, caption) and anything(alt=...)."""
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "alt"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) >= 2]
    named = [call.args[1] for call in calls if called_name(call.func) in ("show", "Frame")]
    return [as_pattern(value) for value in found + named]


def called_name(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def as_pattern(node):
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts) or ".+"


# --- prose ----------------------------------------------------------------------------------------------------


def is_of_the_library(notebook) -> bool:
    """A page to look things up in: it has an index in place of a reading time."""
    return "A page of the library" in notebook.cells[0].source


def keeps_cells_short(notebook, path):
    for cell in code(notebook):
        lines = len(cell.source.splitlines())
        if lines > 40:
            yield f"{name(cell)} has {lines} lines; agreed are 40"


def promises_its_time(notebook, path):
    """`make facts` writes how many minutes; over 40 is two pages, or has parts that belong into the library."""
    if is_of_the_library(notebook):
        if "**Time:**" in notebook.cells[0].source:
            yield "a page of the library has an index, and no line with minutes: these put it on the trail"
        return
    line = r"^\*\*Time:\*\* \d+ minutes(?: to read, [^.]+)?\. \*\*You need:\*\* "
    if not re.search(line, notebook.cells[0].source, re.MULTILINE):
        yield 'the first cell has no line "**Time:** N minutes. **You need:** ..."; `make facts` writes the number'
    if reading_minutes(notebook) > MOST_MINUTES:
        yield f"reading it takes {reading_minutes(notebook):.0f} minutes; over {MOST_MINUTES} is two pages"


def explains_between_code(notebook, path):
    for first, second in zip(notebook.cells, notebook.cells[1:], strict=False):
        if first.cell_type == second.cell_type == "code":
            yield f"nothing is said between {name(first)} and {name(second)}"


def shows_what_it_announces(notebook, path):
    """Where a code cell was deleted, text follows on text: only a new section may, and not after a colon."""
    for first, second in zip(notebook.cells, notebook.cells[1:], strict=False):
        if first.cell_type == second.cell_type == "markdown":
            if first.source.rstrip().endswith(":"):
                yield f"{name(first)} ends with a colon, and no code follows"
            elif not second.source.startswith("#"):
                yield f"{name(second)} goes on from {name(first)}: is there a cell missing? Else make them one"


def has_links_that_lead_somewhere(notebook, path):
    yield from dead_links(prose(notebook), path.parent)


def keeps_the_solutions_to_itself(notebook, path):
    for cell in code(notebook):
        if re.search(r"\bsolutions\b", cell.source):
            yield f"{name(cell)} uses the solutions, which an instructor may leave out"


def hides_gpus_from_what_it_starts(notebook, path):
    """Where there is one GPU, two processes that torchrun starts would have to share it; and more compute other digits
    than those that are stored."""
    before = ""
    for cell in code(notebook):
        starts = re.search(r"""["']torchrun\b|torch\.distributed\.run""", cell.source)
        hidden = re.search(r'CUDA_VISIBLE_DEVICES"(\] =|:) ""', before + cell.source[: starts.start() if starts else 0])
        if starts and not hidden and "--device=cpu" not in cell.source:
            yield f'{name(cell)} starts torchrun; say os.environ["CUDA_VISIBLE_DEVICES"] = "" before'
        before += cell.source


RULES = [
    is_valid,
    shows_why_a_program_failed,
    was_run_in_order,
    has_no_unmeant_error,
    is_compared,
    stores_no_warnings,
    says_nothing_of_its_machine,
    shows_numbers_not_verdicts,
    pictures_have_alt_text,
    alt_text_is_that_of_the_source,
    keeps_cells_short,
    promises_its_time,
    explains_between_code,
    shows_what_it_announces,
    has_links_that_lead_somewhere,
    keeps_the_solutions_to_itself,
    hides_gpus_from_what_it_starts,
]
