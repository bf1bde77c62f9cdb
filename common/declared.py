"""Which options a strategy has of its own, as its chapter's file declares them: read there and not imported, since with
the class would come PyTorch, whose import takes most of the time of a refusal."""

import ast
import functools
from pathlib import Path

from common import ROOT


@functools.cache
def _module(name: str) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]:
    """The classes of a module, and what it imports: name here -> (module, name there or "")."""
    tree = ast.parse(Path(ROOT, *name.split(".")).with_suffix(".py").read_text())
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, imported


def _where(module: str, expression: ast.expr) -> tuple[str, str] | None:
    """Where the class that an expression names is declared; None where that is no file of the course."""
    classes, imported = _module(module)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        of, name = imported.get(expression.value.id, ("", "")), expression.attr
        found = (".".join(filter(None, of)), name)
    elif isinstance(expression, ast.Name):
        found = (module, expression.id) if expression.id in classes else imported.get(expression.id, ("", ""))
    else:
        return None
    return found if found[0].split(".")[0] in ("common", "course") else None


def _fields(module: str, node: ast.ClassDef) -> list[str]:
    own = [
        line.target.id for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    of_bases = [_fields(base[0], _module(base[0])[0][base[1]]) for e in node.bases if (base := _where(module, e))]
    return [*(name for names in of_bases for name in names), *own]


@functools.cache
def options_of(place: str) -> tuple[str, ...]:
    """The names of the fields of a strategy's Options. place: "module:class"."""
    module, _, name = place.partition(":")
    node = _module(module)[0][name]
    for line in node.body:
        if isinstance(line, ast.ClassDef) and line.name == "Options":
            return tuple(_fields(module, line))
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value and getattr(target, "id", "") == "Options":
            there = _where(module, line.value)
            return tuple(_fields(there[0], _module(there[0])[0][there[1]])) if there else ()
    for base in node.bases:
        there = _where(module, base)
        found = options_of(":".join(there)) if there else ()
        if found:
            return found
    return ()
