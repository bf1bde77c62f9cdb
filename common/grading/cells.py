"""From a notebook's cell into a file of exercises, and back: functions by their names."""

import ast
import os
from pathlib import Path

from common.errors import UserError


def functions(text: str, where: str) -> dict[str, tuple[int, int]]:
    """The functions at a text's top level: name -> its first line, decorators included, and the line after its last,
    from 0. Raises UserError for text that is no Python."""
    try:
        found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None
    lines = [(node, [one.lineno for one in node.decorator_list]) for node in found]
    return {node.name: (min([node.lineno, *first]) - 1, node.end_lineno or node.lineno) for node, first in lines}


def function_in(file: Path, name: str) -> str:
    """The text of a function. Raises UserError where the file has none of that name."""
    text = file.read_text()
    places = functions(text, file.name)
    if name not in places:
        raise UserError(f"{file.name} has no function {name}")
    first, end = places[name]
    return "\n".join(text.splitlines()[first:end]) + "\n"


def is_stub(file: Path, name: str) -> bool:
    """Whether a function is still as it was handed out: a docstring, and that nothing is implemented."""
    try:
        body = ast.parse(function_in(file, name)).body[0]
    except (UserError, OSError):
        return False
    assert isinstance(body, ast.FunctionDef)
    rest = [one for one in body.body if not isinstance(one, ast.Expr) or not isinstance(one.value, ast.Constant)]
    raised = rest[0].exc if len(rest) == 1 and isinstance(rest[0], ast.Raise) else None
    return isinstance(raised, ast.Name) and raised.id == NotImplementedError.__name__


def is_begun(file: Path) -> bool:
    """Whether somebody has written something into a file of exercises: not all its functions are stubs."""
    try:
        return not all(is_stub(file, name) for name in functions(file.read_text(errors="replace"), file.name))
    except UserError:  # it is broken, as no file that was handed out
        return True


def asked_for(file: Path, name: str) -> tuple[int, str] | None:
    """The line in which a function stands, and the first line of its docstring; None where it isn't there."""
    try:
        text = file.read_text()
        first = functions(text, file.name)[name][0]
        body = ast.parse(function_in(file, name)).body[0]
    except (UserError, OSError, KeyError, ValueError):
        return None
    assert isinstance(body, ast.FunctionDef)
    return first + 1, (ast.get_docstring(body) or "").partition("\n")[0]


def put_into(file: Path, name: str, cell: str) -> None:
    """Write a cell's function `name` into a file, in the place of the one that it has; all else stays as it is.

    Other functions of the cell take the place of those of the same name, or stand before it; imports that the file
    has not stand before those that it has. Raises UserError, and writes nothing, for a cell without that function, with
    anything else, or that is no Python.
    """
    new = functions(cell, "this cell")
    if name not in new:
        raise UserError(f"this cell defines no function {name}")
    statements = [node for node in ast.parse(cell).body if not isinstance(node, ast.FunctionDef)]
    if strange := [node for node in statements if not isinstance(node, (ast.Import, ast.ImportFrom))]:
        raise UserError(f"line {strange[0].lineno} of this cell is neither a function nor an import; take it out")
    own, lines = cell.splitlines(), file.read_text().splitlines()
    for one, (first, end) in sorted(new.items(), key=lambda item: item[0] != name):  # the exercise is there first
        places = functions("\n".join(lines), file.name)
        if one in places:
            start, stop = places[one]
        elif one == name:
            raise UserError(f"{file.name} has no function {name}")
        else:
            start = stop = places[name][0]
        between = ["", ""] if start == stop else []  # it is new
        lines[start:stop] = [*own[first:end], *between]
    imports = [line for node in statements for line in own[node.lineno - 1 : node.end_lineno]]
    there = [node.lineno for node in ast.parse("\n".join(lines)).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    at = there[0] - 1 if there else 0
    lines[at:at] = [line for line in imports if line not in lines]
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text("\n".join(lines) + "\n")
    os.replace(partial, file)
