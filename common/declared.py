"""What a strategy's class declares for the command line, as its chapter's file has it: read there and not imported,
since with the class would come PyTorch, whose import takes most of the time of a refusal.

Declarations are literals, or names of literals in the course's files. What is none is left out here, and refused by the
class itself.
"""

import ast
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT
from common.options import StrategyOptions, option

OPTION_TYPES = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Declared:
    """Options: a dataclass with the fields of the strategy's own, and without its methods; preset and axes as those."""

    Options: type
    preset: dict[str, int]
    axes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The options' names."""
        return [item.name for item in fields(self.Options)]


class ParsedFile(NamedTuple):
    """A file. imported: name here -> (module, name there, or "" for the module itself); assigned: name -> value."""

    classes: dict[str, ast.ClassDef]
    imported: dict[str, tuple[str, str]]
    assigned: dict[str, ast.expr]


@functools.cache
def _module(name: str) -> ParsedFile:
    tree = ast.parse(Path(ROOT, *name.split(".")).with_suffix(".py").read_text())
    imported: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
    return ParsedFile(
        {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, imported, _assigned(tree)
    )


def _assigned(node: ast.Module | ast.ClassDef) -> dict[str, ast.expr]:
    """The values of names that are assigned in a module or a class."""
    found = {}
    for line in node.body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value and isinstance(target, ast.Name):
            found[target.id] = line.value
    return found


def _where(module: str, expression: ast.expr) -> tuple[str, str] | None:
    """Where the class or value that an expression names stands; None where that is no file of the course."""
    own = _module(module)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        of, name = own.imported.get(expression.value.id, ("", "")), expression.attr
        found = (".".join(filter(None, of)), name)
    elif isinstance(expression, ast.Name):
        here = expression.id in own.classes or expression.id in own.assigned
        found = (module, expression.id) if here else own.imported.get(expression.id, ("", ""))
    else:
        return None
    return found if found[0].split(".")[0] in ("common", "course") else None


def _value(module: str, expression: ast.expr) -> Any:
    """A literal, or what a name means. Of a dict, only the keys have to be literals. Raises ValueError."""
    if isinstance(expression, ast.Dict):
        found: dict[Any, Any] = {}
        for key, value in zip(expression.keys, expression.values, strict=True):
            found[ast.literal_eval(key or value)] = None
            with contextlib.suppress(ValueError):
                found[ast.literal_eval(key or value)] = _value(module, value)
        return found
    if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "tuple" and len(expression.args) == 1:
        return tuple(_value(module, expression.args[0]))
    if there := _where(module, expression):
        assigned = _module(there[0]).assigned
        if there[1] not in assigned:
            raise ValueError(there)
        return _value(there[0], assigned[there[1]])
    return ast.literal_eval(expression)


def _bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and those that it inherits from, as far as they are the course's."""
    yield module, node
    for base in node.bases:
        there = _where(module, base)
        if there and there[1] in _module(there[0]).classes:
            yield from _bases(there[0], _module(there[0]).classes[there[1]])


def _option(module: str, call: ast.Call) -> Any:
    """The field that a call of `option` makes."""
    given = dict(zip(("default", "help", "choices"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    found: dict[str, Any] = {"default": "", "help": ""}
    for name, value in given.items():
        with contextlib.suppress(ValueError):
            found[name] = _value(module, value)
    return option(**found)


def _fields(module: str, node: ast.ClassDef) -> dict[str, tuple[str, type, Any]]:
    """Those of a class of options: name -> what make_dataclass wants."""
    found = {}
    for where, one in reversed(list(_bases(module, node))):
        for line in one.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                kind = OPTION_TYPES.get(ast.unparse(line.annotation), str)
                made = _option(where, line.value) if isinstance(line.value, ast.Call) else ""
                found[line.target.id] = (line.target.id, kind, made)
    return found


def _options(module: str, node: ast.ClassDef) -> type:
    """The class `Options` that stands in a strategy's class."""
    for where, one in _bases(module, node):
        inside = next((n for n in one.body if isinstance(n, ast.ClassDef) and n.name == "Options"), None)
        named = _assigned(one).get("Options")
        if inside is None and named is not None and (there := _where(where, named)):
            where, inside = there[0], _module(there[0]).classes.get(there[1])
        if inside is not None:
            return make_dataclass("Options", _fields(where, inside).values(), bases=(StrategyOptions,))
    return StrategyOptions


@functools.cache
def declared(place: str) -> Declared:
    """What the class at a place, "module:class", declares."""
    module, _, name = place.partition(":")
    node = _module(module).classes[name]
    found: dict[str, Any] = {"preset": {"data": -1}, "axes": ()}
    for where, one in reversed(list(_bases(module, node))):
        for what, value in _assigned(one).items():
            if what in found:
                found[what] = _value(where, value)
    return Declared(_options(module, node), **found)
