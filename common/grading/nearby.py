"""Whether a wrong answer does what the right one would with one change in it: without a line, with `sum` for `mean`.

The chapter's solution is changed in one place after the other, and what returns the same as the learner's answer on
every rank names its mistake. Nobody has to have made that mistake before; and where many changes explain the answer
as well as each other, nothing is said.
"""

import ast
import contextlib
import copy
import functools
import io
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from common.grading import engine
from common.grading.engine import CallOutcome, DoesNotLoad
from common.grading.values import difference
from common.lab.launch import LINUX, RankFailed

MOST = 150  # changes that are tried; the solutions of the course have 20 to 100
DEATHS = 4  # changes that end a process, after which the rest is left out
FEW = 2  # more explanations than that are none
PATIENCE, CALL_LIMIT = 1.0, 1.0  # seconds: a change that makes ranks wait is only not found
# At the end of the module that the ranks load: a change may take the end from a loop in C, which no alarm stops.
LIMITED = """
import os, resource
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), now + (256 << 20)))
"""
MODULES = ("torch", "dist", "math")
OPPOSITE = {"sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax", "ceil": "floor"}
NEXT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
         ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}  # fmt: skip
TURNED = {ast.Add: ast.Sub, ast.Sub: ast.Add}


def changed(source: str, name: str) -> list[tuple[str, str]]:
    """(what is changed, in words; the text of a function that is so changed) of the function `name` in a module's
    text, and of the functions of the module that it calls. Each text is a function of the name `name`."""
    functions = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    if name not in functions:
        return []
    called = [one.id for one in ast.walk(functions[name]) if isinstance(one, ast.Name) and one.id in functions]
    own = [functions[name], *(functions[other] for other in dict.fromkeys(called) if other != name)]
    found = []
    for function in own:
        for words in _each_change(function):
            body = [ast.unparse(one) for one in own if one is function or one is own[0]]
            inside = "\n".join([*body, f"return {name}(*arguments)"])
            found.append((words, f"def {name}(*arguments):\n    {inside.replace(chr(10), chr(10) + '    ')}\n"))
    return found[:MOST]


def _each_change(function: ast.FunctionDef) -> Iterator[str]:
    """Changes the function's tree in place, says how, and undoes it."""
    for parent in list(ast.walk(function)):
        if isinstance(parent, ast.arguments):
            continue
        for field, value in list(ast.iter_fields(parent)):
            for place, node in enumerate(value if isinstance(value, list) else [value]):
                for other, words in _others(node) if isinstance(node, ast.AST) else ():
                    if isinstance(parent, ast.Expr) and not isinstance(other, ast.Call):
                        continue  # without the line, it is that already
                    for put in (other, node):
                        if isinstance(value, list):
                            value[place] = put
                        else:
                            setattr(parent, field, put)
                        if put is other:
                            yield words


def _others(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What may stand in place of a node, with the change in words."""
    shown = ast.unparse(node)
    if isinstance(node, ast.Call):
        yield from _other_calls(node)
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node)
    elif isinstance(node, (ast.If, ast.IfExp, ast.Compare, ast.comprehension)):
        yield from _other_conditions(node)
    elif isinstance(node, ast.BinOp):
        left, right, sign = ast.unparse(node.left), ast.unparse(node.right), SIGNS.get(type(node.op), "and")
        yield node.left, f"without `{sign} {right}`"
        if isinstance(node.op, (ast.Add, ast.Mult, ast.BitAnd)):
            yield node.right, f"without `{left} {sign}`"
        if type(node.op) in TURNED:
            yield ast.BinOp(node.left, TURNED[type(node.op)](), node.right), f"with the other sign in `{shown}`"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand, f"without the minus of `{shown}`"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        yield node.operand, f"with `{ast.unparse(node.operand)}` for `{shown}`"
    elif isinstance(node, ast.AugAssign) or isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield ast.Pass(), f"without the line `{shown}`"
        if isinstance(node, ast.AugAssign):
            yield (
                ast.Assign([node.target], node.value, lineno=node.lineno),
                f"with `=` for `{SIGNS.get(type(node.op), '')}=`",
            )
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield node.value, f"without `[{ast.unparse(node.slice)}]` behind `{ast.unparse(node.value)}`"
    elif isinstance(node, ast.Name) and node.id == "rank" and isinstance(node.ctx, ast.Load):
        yield ast.BinOp(node, ast.Add(), ast.Constant(1)), "with the next rank in place of this one"
        yield ast.BinOp(node, ast.Sub(), ast.Constant(1)), "with the rank before in place of this one"


def _other_constants(node: ast.Constant) -> Iterator[tuple[ast.AST, str]]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value), f"with `{not value}` for `{value}`"
    elif isinstance(value, int):
        yield ast.Constant(value + 1), f"with one more than a {value} that is in it"
        yield ast.Constant(value - 1), f"with one less than a {value} that is in it"


def _other_conditions(node: ast.If | ast.IfExp | ast.Compare | ast.comprehension) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Compare):
        if len(node.ops) == 1 and type(node.ops[0]) in NEXT:
            other = ast.Compare(node.left, [NEXT[type(node.ops[0])]()], node.comparators)
            yield other, f"with `{ast.unparse(other)}` for `{ast.unparse(node)}`"
    elif isinstance(node, ast.comprehension):
        if node.ifs:
            without = ast.comprehension(node.target, node.iter, [], 0)
            yield without, f"without the condition `{ast.unparse(node.ifs[0])}`"
    else:
        for always, often in ((True, "always"), (False, "never")):
            change = f"as if `{ast.unparse(node.test)}` were {often} so"
            if isinstance(node, ast.IfExp):
                yield node.body if always else node.orelse, change
            else:
                yield ast.If(ast.Constant(always), node.body, node.orelse), change


def _other_calls(node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    function, shown = node.func, ast.unparse(node)
    method = isinstance(function, ast.Attribute) and ast.unparse(function.value) not in MODULES
    last = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    if last in OPPOSITE:
        other: ast.expr = ast.Name(OPPOSITE[last])
        if isinstance(function, ast.Attribute):
            other = ast.Attribute(function.value, OPPOSITE[last])
        yield ast.Call(other, node.args, node.keywords), f"with `{OPPOSITE[last]}` for `{last}`"
    if last in ("all_reduce", "reduce", "reduce_scatter_single"):
        rest = [word for word in node.keywords if word.arg != "op"]
        now = next((ast.unparse(word.value) for word in node.keywords if word.arg == "op"), "dist.ReduceOp.SUM")
        for kind in ("SUM", "MAX", "MIN"):
            if not now.endswith(kind) and len(node.args) == 1:
                how = ast.keyword("op", ast.parse(f"dist.ReduceOp.{kind}", mode="eval").body)
                yield ast.Call(function, node.args, [*rest, how]), f"with ReduceOp.{kind} in `{shown}`"
    if last == "get_rank":
        yield ast.Constant(0), "with every rank taking itself for rank 0"
        following = ast.parse(f"({shown} + 1) % dist.get_world_size()", mode="eval").body
        yield following, "with the next rank in place of this one"
    if method and isinstance(function, ast.Attribute):
        yield function.value, f"without `{shown.removeprefix(ast.unparse(function.value))}`"
    elif node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0], f"without `{last}` around `{ast.unparse(node.args[0])}`"
    given = [*node.args, *node.keywords]
    if len(given) > (0 if method else 1):
        without = ast.Call(function, node.args if node.keywords else node.args[:-1], node.keywords[:-1])
        yield without, f"without `{ast.unparse(given[-1])}` in `{shown}`"


def in_words(solutions: Path, name: str, size: int, calls: list, outcomes: list[CallOutcome]) -> str:
    """Why an answer is wrong that did `outcomes`, one of each rank, in the last of these calls; empty if unknown."""
    source = solutions.read_text()
    changes = changed(source, name)
    if not changes or not LINUX or any(outcome.status != "returned" for outcome in outcomes):
        return ""
    numbered = [text.replace(f"def {name}(", f"def near_{n}(", 1) for n, (_, text) in enumerate(changes)]
    names = {-1: name} | {n: f"near_{n}" for n in range(len(changes))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "solutions.py")
        file.write_text("\n".join([source, *numbered, LIMITED]))
        found = _outcomes(file, {n: (each, calls) for n, each in names.items()}, size)
    if -1 not in found:
        return ""
    right = found.pop(-1)
    same_result = all(map(same_value, (rank[-1] for rank in right), outcomes))
    near = [n for n, ranks in found.items() if _same(ranks, right, outcomes, with_messages=same_result)]
    words = list(dict.fromkeys(changes[n][0] for n in near))
    return f"The solution would do the same {', or '.join(words)}." if 0 < len(words) <= FEW else ""


def _outcomes(file: Path, jobs: dict, size: int) -> dict[int, list]:
    """What each job did on each rank; without those that end a process, after which the next ones go on in others."""
    found: dict[int, list] = {}
    left = {
        n: copy.deepcopy(job) for n, job in jobs.items()
    }  # each with arguments of its own: a change may write into what it is given
    limits = mock.patch.multiple(engine, PATIENCE=PATIENCE, CALL_LIMIT=CALL_LIMIT)
    for _ in range(DEATHS + 1):
        silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with limits, silent[0], silent[1], contextlib.suppress(RankFailed, DoesNotLoad):
            engine._launch(file, left, size, False, functools.partial(_note, file.parent))
        for n in list(left):
            noted = [file.with_name(f"{n} of {rank}") for rank in range(size)]
            if not all(note.exists() for note in noted):
                break
            found[n] = [pickle.loads(note.read_bytes()) for note in noted]
            del left[n]
        left.pop(next(iter(left), None), None)  # the one that came next has ended a process
        if not left:
            break
    return found


def _note(folder: Path, rank: int, job: int, outcomes: list[CallOutcome]) -> None:
    (folder / f"{job} of {rank}.new").write_bytes(pickle.dumps(outcomes))
    (folder / f"{job} of {rank}.new").rename(folder / f"{job} of {rank}")


def _same(ranks: list, right: list, outcomes: list[CallOutcome], with_messages: bool) -> bool:
    """Whether a changed solution was right in the calls before the last one, and in that did what the learner's did."""
    for mine, good, theirs in zip(ranks, right, outcomes, strict=True):
        if len(mine) != len(good) or not all(map(same_value, mine[:-1], good[:-1])) or not same_value(mine[-1], theirs):
            return False
        if mine[-1].changed_input != theirs.changed_input or with_messages and messages(mine[-1]) != messages(theirs):
            return False
    return True


def same_value(a: CallOutcome, b: CallOutcome) -> bool:
    return a.status == b.status == "returned" and difference(a.value, b.value) is None


def messages(outcome: CallOutcome) -> list[tuple]:
    return [(entry.operation, entry.payload, entry.peer) for entry in outcome.entries]
