"""The lines of a page that its sliders need, so that they can run where the rest of the page can't.

A cell that shows sliders names functions and classes of earlier cells, and imports. What it needs is found in the
syntax tree: the statement that calls `.show(alt=...)` on a widget, what changes the widget before, and whatever these
name.
"""

import ast
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import ROOT

STAND_INS = ROOT / "docs/site/python"
WIDGET = "application/vnd.jupyter.widget-view+json"


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def defined_by(statement: ast.stmt) -> set[str]:
    """The names that a statement of the top level gives a meaning."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).split(".")[0] for one in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {name for target in targets for name in names_in(target)}
    return set()


def shows(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "show"


def needed(cells: list[str]) -> str:
    """The program of the last of the cells' sliders. Raises ValueError where it shows none."""
    before = [statement for cell in cells[:-1] for statement in parsed(cell)]
    last = parsed(cells[-1])
    place = next((number for number, statement in enumerate(last) if shows(statement)), None)
    if place is None:
        raise ValueError("no statement of the cell shows sliders")
    own = names_in(last[place])
    # a loop or a call before it that names the widget changes it
    keep = [s for s in last[:place] if not defined_by(s) and names_in(s) & own & set().union(*map(defined_by, last))]
    keep = [statement for statement in keep if not calls_print(statement)]
    keep.append(last[place])
    wanted = set().union(*map(names_in, keep))
    found: list[ast.stmt] = []
    for statement in reversed([*before, *last[:place]]):
        if statement in keep:
            found.append(statement)
        elif defined_by(statement) & wanted:
            wanted = (wanted - defined_by(statement)) | names_in(statement)
            found.append(statement)
    return "\n".join(map(ast.unparse, [*reversed(found), last[place]])) + "\n"


def calls_print(statement: ast.stmt) -> bool:
    return "print" in names_in(statement)


def parsed(cell: str) -> list[ast.stmt]:
    lines = [line for line in cell.splitlines() if not line.lstrip().startswith(("!", "%"))]
    return ast.parse("\n".join(lines)).body


def of_notebook(notebook: dict) -> Iterator[tuple[str, str]]:
    """(id of a cell, its program) for each cell of a page that shows sliders."""
    sources = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if source.startswith("%%"):
            continue
        sources.append(source)
        if any(WIDGET in output.get("data", {}) for output in cell["outputs"]):
            yield cell["id"], needed(sources)


def all_cells() -> dict[str, str]:
    """Name of each cell of the course with sliders, as pages and files have it -> its program."""
    found = {}
    for path in sorted(ROOT.glob("0*/*.ipynb")):
        for cell, program in of_notebook(json.loads(path.read_text())):
            found[name_of(str(path.relative_to(ROOT).with_suffix("")), cell)] = program
    return found


def name_of(page: str, cell: str) -> str:
    return f"{page.replace('/', '-')}-{cell}"


def laid_out(folder: Path) -> None:
    """Write what stands in for packages in a browser, and the cells, into a folder."""
    shutil.copytree(STAND_INS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "live_cells").mkdir(exist_ok=True)
    for name, program in all_cells().items():
        (folder / "live_cells" / f"{name}.py").write_text(program)


def alone(program: str, *folders: Path) -> str:
    """What a Python prints that has the standard library, the course's files and these folders, and nothing else."""
    paths = f"import sys; sys.path[:0] = {[str(ROOT), *map(str, folders)][::-1]!r}\n"
    command = [sys.executable, "-S", "-B", "-c", paths + program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@functools.cache
def forms() -> dict[str, str]:
    """Name of each cell with sliders -> its controls as HTML."""
    with tempfile.TemporaryDirectory() as folder:
        laid_out(Path(folder))
        names = list(all_cells())
        program = f"import json, page_sliders\nprint(json.dumps({{n: page_sliders.form(n) for n in {names!r}}}))"
        return json.loads(alone(program, Path(folder)))
