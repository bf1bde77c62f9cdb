"""Change one thing in the code, and see whether a test that imports the file fails: a sample of such mutants, and the
share that the tests refuse, folder by folder.

    python -m tools.mutate                            40 mutants of common/, course/, planner/ and the by-hand files
    python -m tools.mutate common/pieces.py           of one file or folder
    python -m tools.mutate --sample 200 --write       and write the scores into docs/mutation.md

A mutant swaps an operator, a comparison, `and` and `or`, two arguments of a call; adds one to a number; turns True into
False; drops a `not` or a statement. Texts, annotations and what a `raise` says stay as they are. It is written into a
copy of the working tree, where the tests run that import the changed file (and, while there are few, those that import
an importer of it), until the first fails. A failure counts only if the same test passes without the mutant.

The tests run in a process that is forked from this one, which has imported what takes long and nothing of the course.
mutmut 3 does this as well, but it first runs the whole suite in one process, and it puts a trampoline in the place of
each function: the chapters' planted bugs look for text in these files and would find another. cosmic-ray starts Python
anew for each mutant, which is 5 s for PyTorch alone, and each time runs one and the same command: all tests.
"""

import ast
import collections
import contextlib
import datetime
import functools
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import Parser

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("common", "course", "planner", "0*/by_hand*.py")
PAGE = ROOT / "docs" / "mutation.md"
# These are larger than an operator, and of all functions, so that they say more of what a colleague would get past.
BY_HAND = (
    "By hand, larger mistakes were planted on 2026-11-28: a forgotten case, a wrong group or unit, a wrong number "
    "of shards, an option that is ignored, an error path that is gone. In functions *drawn at random*, each "
    "weighted by its lines, the tests of that morning refused 107 of 228 (47%), most that got past being in what "
    "pictures draw, in rare refusals and in the planner's numbers. Of those *chosen* from the code by two people "
    "who had read no test, for what they do to a user, 58 of 80 (72%). Then properties were held over whole "
    "tables (every strategy, program, picture, format, option), and **of 70 that a third had chosen before, and "
    "that nobody who wrote a test had seen, 64 were refused (91%)**; five of the 70 are near examples that the "
    "writers had been given. **Of 60 that a fourth chose a day later, 55 (92%)**, one of the five by no weekly test "
    "either; these have a test now. Lists that the writers of tests drew up for themselves at other places fared "
    "worse: 44 to 79%."
)
FILES = 8  # at most so many test files for a mutant, the nearest first
SWAPPED: dict[type, type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """In `file`, the text from byte `begin` to `end` becomes `new`."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self):
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: `{old[:60]}` → `{new[:60]}`"


# --- mutants ----------------------------------------------------------------------------------------------------


def variants(node: ast.AST):
    """Other nodes that may stand where this one does."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED and not _has_text(node):
        yield ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    elif isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in SWAPPED:
                ops = [*node.ops[:place], SWAPPED[type(operator)](), *node.ops[place + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(SWAPPED[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        first, second, *rest = node.args
        if ast.dump(first) != ast.dump(second):
            yield ast.Call(node.func, [second, first, *rest], node.keywords)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def _has_text(node: ast.AST) -> bool:
    return any(isinstance(part, (ast.JoinedStr, ast.List)) or isinstance(getattr(part, "value", 0), str)
               for part in ast.walk(node))  # fmt: skip


def mutated_parts(node: ast.AST):
    """The nodes below that are run and are no text for a reader."""
    skipped = (ast.JoinedStr, ast.Raise, ast.Assert)
    named = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UserError", "print", "option"):
        return
    if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
        return
    yield node
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if name not in named and isinstance(child, ast.AST) and not isinstance(child, skipped):
                yield from mutated_parts(child)


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file, which keep the number of its lines."""
    text = (ROOT / file).read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in mutated_parts(ast.parse(text)):
        for other in variants(node):
            begin, end = (starts[row - 1] + column for row, column in (
                (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))  # fmt: skip
            old, new = text.encode()[begin:end].decode(), ast.unparse(ast.fix_missing_locations(other))
            new = f"({new}{chr(10) * old.count(chr(10))})" if isinstance(other, ast.expr) else new
            if isinstance(other, ast.Pass) and "\n" in old:
                new += "\n" * old.count("\n")
            found.append(Mutant(file, node.lineno, begin, end, old, new))
    return found


def files_of(places: list[str]) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = listed.split()
    return [file for file in known for place in places
            if Path(file).match(place) or file == place or file.startswith(f"{place.rstrip('/')}/")]  # fmt: skip


# --- tests ------------------------------------------------------------------------------------------------------


def module_name(file: str) -> str:
    """common/lab/guard.py -> common.lab.guard; 03_ddp/by_hand.py -> course.ddp.by_hand."""
    top, *rest = Path(file).with_suffix("").parts
    return ".".join([*(["course", top[3:]] if top[:1].isdigit() else [top]), *rest]).removesuffix(".__init__")


@functools.cache
def imports() -> dict[str, set[str]]:
    """file -> the modules, and the names in modules, that it imports anywhere."""
    found = {}
    for file in files_of(["*.py"]):
        names = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[file] = names
    return found


@functools.cache
def tests_of(file: str) -> list[str]:
    """The test files that import it, those with its name first and then the smallest; after them, as long as there are
    few, those that import what imports it."""
    near, seen = [file], {file}
    tests: list[str] = []
    for _ in range(3):
        names = {module_name(one) for one in near}
        near = sorted(other for other, has in imports().items() if names & has and other not in seen)
        seen |= {*near}
        stem = Path(file).stem.removeprefix("by_hand_")
        found = [other for other in near if Path(other).name.startswith("test_") and Path(other).parts[0] == "tests"]
        tests += sorted(found, key=lambda one: (stem not in one, (ROOT / one).stat().st_size))
        if len(tests) >= FILES // 2:
            break
    return [one for one in tests if "engines" not in one][:FILES]


def copy_of_the_tree(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in listed.split("\0"):
        source = ROOT / name
        if name and source.exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    for command in (["init", "-q"], ["add", "-A"]):  # tests ask git which files there are
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def run_tests(tree: Path, tests: list[str], seconds: float, *more: str) -> tuple[int | None, str]:
    """pytest's exit code, None after so many seconds, and the tests that failed. more: options of pytest's."""
    report = tree.parent / "report"
    report.write_text("")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            code = _in_the_fork(tree, [*more, *tests], report)
        finally:
            os._exit(code)
    deadline, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < deadline:
        ended, raw = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if ended else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # and what a test has left
    if status is None:
        os.waitpid(pid, 0)
    return status, report.read_text()


def _in_the_fork(tree: Path, words: list[str], report: Path) -> int:
    import pytest

    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1",
                   "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tree.parent)}  # fmt: skip
    sys.path[:] = [str(tree), str(tree / "tests"), *(place for place in sys.path if Path(place or ".") != ROOT)]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    with contextlib.redirect_stdout(io.StringIO()) as written:
        code = int(pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", "--confcutdir=tests",
                                f"--basetemp={tree.parent / 'tests'}", *words]))  # fmt: skip
    lines = written.getvalue().splitlines()
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    report.write_text("\n".join(line.split(" - ")[0] for line in failed))
    return code


def warm_up() -> None:
    """Import what takes long. Nothing here may start a thread: the tests run in forks."""
    import IPython.display  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pytest  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import torch.profiler  # noqa: F401


def verdict(tree: Path, mutant: Mutant, seconds: float) -> dict:
    """killed, survived, no test (nothing imports it) or too slow; with the test that failed."""
    tests = tests_of(mutant.file)
    if not tests:
        return {"verdict": "no test"}
    file = tree / mutant.file
    right = file.read_bytes()
    try:
        file.write_bytes(right[: mutant.begin] + mutant.new.encode() + right[mutant.end :])
        begun = time.monotonic()
        code, failed = run_tests(tree, tests, seconds, "-x")
        took = time.monotonic() - begun
    finally:
        file.write_bytes(right)
    if code is None:
        return {"verdict": "too slow", "seconds": took}
    if code == 0:
        return {"verdict": "survived", "seconds": took}
    again = failed.splitlines()[:1] or tests  # no test is named where pytest itself ended: its files can't be imported
    verdict = "killed" if run_tests(tree, again, seconds)[0] == 0 else "no verdict"  # it fails without the mutant, too
    return {"verdict": verdict, "test": ", ".join(again), "seconds": took}


# --- scores -----------------------------------------------------------------------------------------------------


def folder_of(file: str) -> str:
    return Path(file).parts[0]


def table(rows: list[dict]) -> list[str]:
    lines = ["| folder | mutants | refused | survived | no verdict | score |", "| --- | --- | --- | --- | --- | --- |"]
    by_folder: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row in rows:
        for folder in (folder_of(row["file"]), "**all**"):
            by_folder[folder][row["verdict"]] += 1
    for folder in sorted(by_folder, key=lambda name: (name == "**all**", name)):
        count = by_folder[folder]
        survived = count["survived"] + count["no test"]
        judged = count["killed"] + survived
        score = f"{count['killed'] / judged:.0%}" if judged else ""
        cells = [folder, count.total(), count["killed"], survived, count.total() - judged, score]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def page(rows: list[dict], seed: int, cheap: bool) -> str:
    survivors = [row["mutant"].replace("`", "") for row in rows if row["verdict"] in ("survived", "no test")]
    drawn = f"drawn with seed {seed}" + ", from files whose tests are small" * cheap
    return "\n".join([
        "# How many mistakes the tests refuse",
        "",
        f"Written by `make mutate` on {datetime.date.today()}: {len(rows)} mutants, {drawn}, of the "
        "code under `common/`, `course/`, `planner/` and the by-hand files. A mutant is one small change, such as `<=` "
        "in place of `<`. It is refused if a test that imports the changed file fails. Without a verdict are those "
        "whose tests took too long, or fail without it too. A survivor may be a change that makes no difference; the "
        "list is there to be read.",
        "",
        BY_HAND,
        "",
        *table(rows),
        "",
        "## Survivors",
        "",
        *(["```", *survivors, "```"] if survivors else ["None."]),
        "",
    ])  # fmt: skip


def main() -> int:
    parser = Parser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("places", nargs="*", default=list(FOLDERS), metavar="FILE or FOLDER")
    parser.add_argument("--sample", type=int, default=40, help="mutants (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a mutant's tests (default: 180)")
    parser.add_argument("--cheap", action="store_true", help="of files whose tests are small, first")
    parser.add_argument("--results", type=Path, help="a JSON line for each mutant; those in it are not run again")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.asked()
    every = [mutant for file in files_of(args.places) for mutant in mutants(file)]
    sample = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    if args.cheap:
        sample.sort(key=lambda mutant: sum((ROOT / test).stat().st_size for test in tests_of(mutant.file)))
    rows = []
    if args.results and args.results.exists():
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]
    done = {row["mutant"] for row in rows}
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_of_the_tree(tree)
        for mutant in sample:
            if str(mutant) in done:
                continue
            row = {"mutant": str(mutant), **asdict(mutant), **verdict(tree, mutant, args.timeout)}
            rows.append(row)
            print(f"{row['verdict']:10} {row.get('seconds', 0):6.1f} s  {mutant}  {row.get('test', '')}", flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print("\n".join(["", *table(rows)]))
    judged = sum(row["verdict"] in ("killed", "survived", "no test") for row in rows)
    if 2 * judged < len(rows):
        print(f"{len(rows) - judged} of {len(rows)} mutants got no verdict: do the tests pass without one?")
        return 1
    if args.write:
        PAGE.write_text(page(rows, args.seed, args.cheap))
    return 0


if __name__ == "__main__":
    sys.exit(main())
