"""Thirty changes that make nothing wrong: which of them makes a test fail?

    python -m tools.harmless                  all of them at once, with the tests that are near a changed file
    python -m tools.harmless --only words     those whose name has this word
    python -m tools.harmless --list           what they are

A message, a hint, a help text, a printed line or a label in other words; another name for what is private or local;
lines that do not depend on each other in another order; a comprehension as a loop; a set in place of a tuple; one more
GPU and one more model. A test that fails then has pinned how the code says or does something, and no reader or user
would miss that. The changed file stands in a copy of the working tree; the tests are those that `tools.mutate` chooses,
and those in which words of the old text stand. Since no change should matter, all are made together, and each test runs
once; for one that fails, halves of the changes are tried until it is known which of them it minds.
"""

import ast
import functools
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import Parser
from tools.mutate import ROOT, copy_of_the_tree, files_of, run_tests, tests_of, warm_up


@dataclass(frozen=True)
class Change:
    """`apply(text of the file)` gives the changed text, or None where there is no such place any more."""

    kind: str
    file: str
    what: str
    apply: Callable[[str], str | None]
    words: str = ""  # of the text that goes: tests that have them are run as well


def reword(kind: str, file: str, old: str, new: str) -> Change:
    """The first such words in the file, whatever stands between the lines of a text."""
    pattern = re.compile(r'(?:\s+|"\s*\n\s*f?")'.join(map(re.escape, old.split())))

    def apply(text: str) -> str | None:
        return pattern.sub(lambda found: new + "".join(re.findall(r'"\s*\n\s*f?"', found[0])), text, count=1) if (
            pattern.search(text)) else None  # fmt: skip

    return Change(kind, file, f"{old!r} → {new!r}", apply, old)


def rename_private(file: str) -> Change:
    """The first function with a leading underscore whose name no other file has."""

    def apply(text: str) -> str | None:
        names = [node.name for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.FunctionDef) and re.fullmatch("_[a-z]\\w*", node.name)]  # fmt: skip
        others = [(ROOT / other).read_text() for other in files_of(["*.py"]) if other != file]
        for name in names:
            if not any(re.search(rf"\b{name}\b", other) for other in others):
                return re.sub(rf"\b{name}\b", f"{name}_renamed", text)
        return None

    return Change("rename something private", file, "a private function", apply)


def rename_local(file: str) -> Change:
    """The first local variable that is assigned once in a function, and is no argument of anything by name."""

    def apply(text: str) -> str | None:
        lines = text.splitlines(keepends=True)
        for function in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]:
            taken = {node.arg for node in ast.walk(function) if isinstance(node, (ast.arg, ast.keyword))}
            segment = "".join(lines[function.lineno - 1 : function.end_lineno])
            for statement in function.body:
                target = statement.targets[0] if isinstance(statement, ast.Assign) else None
                name = target.id if isinstance(target, ast.Name) else ""
                if len(name) > 2 and name not in taken and not re.search(rf"[\"'.]{name}\b|\b{name}=", segment):
                    changed = re.sub(rf"\b{name}\b", f"{name}_here", segment)
                    before, after = lines[: function.lineno - 1], lines[function.end_lineno :]
                    return "".join([*before, changed, *after])
        return None

    return Change("rename something local", file, "a local variable", apply)


def reorder(file: str) -> Change:
    """The first two neighbouring assignments of one line each, without calls, that do not use each other's names."""

    def free_of_calls(node) -> bool:
        return isinstance(node, ast.Assign) and node.lineno == node.end_lineno and not any(
            isinstance(part, (ast.Call, ast.Await, ast.Yield)) for part in ast.walk(node))  # fmt: skip

    def names(node, context) -> set[str]:
        return {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, context)}

    def apply(text: str) -> str | None:
        lines = text.splitlines(keepends=True)
        for block in [getattr(node, "body", []) for node in ast.walk(ast.parse(text))]:
            for one, two in zip(block, block[1:], strict=False) if isinstance(block, list) else ():
                if free_of_calls(one) and free_of_calls(two) and two.lineno == one.lineno + 1:
                    stored = names(one, ast.Store), names(two, ast.Store)
                    read = names(one, ast.Load), names(two, ast.Load)
                    if not (stored[0] & (read[1] | stored[1])) and not stored[1] & read[0]:
                        a = one.lineno - 1
                        return "".join([*lines[:a], lines[a + 1], lines[a], *lines[a + 2 :]])
        return None

    return Change("reorder independent lines", file, "two neighbouring lines", apply)


def as_loop(file: str) -> Change:
    """The first list comprehension over one thing that is assigned to a name: as a loop that appends."""

    def apply(text: str) -> str | None:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            value = getattr(node, "value", None)
            if not (isinstance(node, ast.Assign) and isinstance(value, ast.ListComp) and len(value.generators) == 1):
                continue
            target, generator = node.targets[0], value.generators[0]
            if not isinstance(target, ast.Name) or lines[node.lineno - 1][: node.col_offset].strip():
                continue
            if target.id in {part.id for part in ast.walk(value) if isinstance(part, ast.Name)} or node.col_offset == 0:
                continue
            indent, more = " " * node.col_offset, "    "
            tests = [ast.unparse(test) for test in generator.ifs]
            loop = [
                f"{indent}{target.id} = []\n",
                f"{indent}for {ast.unparse(generator.target)} in {ast.unparse(generator.iter)}:\n",
            ]
            if tests:
                loop, more = [*loop, f"{indent}    if {' and '.join(f'({test})' for test in tests)}:\n"], "        "
            loop.append(f"{indent}{more}{target.id}.append({ast.unparse(value.elt)})\n")
            return "".join([*lines[: node.lineno - 1], *loop, *lines[node.end_lineno :]])
        return None

    return Change("a comprehension as a loop", file, "the first list that is assigned", apply)


def as_set(file: str) -> Change:
    """The first `in (a, b)` with constants."""

    def apply(text: str) -> str | None:
        found = re.search(r"( in )\(((?:\"[^\"]*\"|\d+)(?:, (?:\"[^\"]*\"|\d+))+)\)(?=[:) ])", text)
        return text[: found.start()] + f"{found[1]}{{{found[2]}}}" + text[found.end() :] if found else None

    return Change("another data structure", file, "in (...) → in {...}", apply)


def one_more_line(file: str, like: str, name: str) -> Change:
    """A copy of a line of a table, under another name and without other names for it or a device that reports it."""

    def apply(text: str) -> str | None:
        line = next((line for line in text.splitlines() if line.startswith(f"{like},")), None)
        cells = line.split(",") if line else []
        if "gpus" in file:
            cells[2:3] = [""]
        return text.rstrip("\n") + "\n" + ",".join([name, "", *cells[2:]]) + "\n" if line else None

    return Change("one more line of a table", file, f"{name}, like {like}", apply)


CHANGES = [
    reword("message", "common/command_line.py", "; leave one out", "; drop one of the two"),
    reword("message", "common/command_line.py", "unknown option", "no such option:"),
    reword("message", "common/config.py", "must be at least", "has to be at least"),
    reword("message", "common/axes.py", "is given twice", "stands there twice"),
    reword("message", "05_pipeline/options.py", "cannot be cut into", "do not split into"),
    reword("message", "common/grading/command.py", "name an exercise, as in", "which exercise? Write"),
    reword("message", "planner/layout.py", "make them equal", "they have to be the same"),
    reword("message", "common/run_dir.py", "holds a run already", "has a run in it already"),
    reword("hint", "01_intro/classroom/grading.py", "as much as a rank with a thousand", "as much as one with 1000"),
    reword("hint", "04_model_parallel/classroom/grading.py", "the seconds of all add up", "all their seconds add up"),
    reword("help", "common/config.py", "optimizer steps", "steps of the optimizer"),
    reword("help", "common/runs.py", "drawn one below the other", "one picture below the other"),
    reword("help", "06_fsdp/options.py", "keep shards and optimizer in host memory", "leave shards in host memory"),
    reword("line of output", "common/doctor.py", "to fix", "to be fixed"),
    reword("line of output", "course/dry_run.py", "a dry run: nothing is trained", "nothing is trained: a dry run"),
    reword("line of output", "common/grading/feedback.py", "next: ", "go on with: "),
    reword("label", "01_intro/overview.py", "node rank", "node number"),
    reword("label", "planner/calculator.py", "one step (seconds)", "seconds of one step (s)"),
    reword("label", "planner/calculator.py", "hidden communication", "communication that is hidden"),
    rename_private("common/ranks.py"),
    rename_private("common/grading/engine.py"),
    rename_local("common/learning_rate.py"),
    rename_local("common/pieces.py"),
    rename_local("planner/search.py"),
    reorder("05_pipeline/schedules.py"),
    as_loop("03_ddp/loading.py"),
    as_loop("common/per_rank.py"),
    as_set("common/lab/ledger.py"),
    one_more_line("common/gpus.csv", "l4", "l4x"),
    one_more_line("planner/models.csv", "gpt2-xl", "gpt2-xxl"),
]
TABLES = {
    "common/gpus.csv": ["tests/planner/test_planner_fit.py", "tests/planner/test_planner_options.py",
                        "tests/planner/test_planner_commands.py", "tests/planner/test_auto.py"],
    "planner/models.csv": ["tests/planner/test_planner_options.py", "tests/planner/test_planner_commands.py",
                           "tests/planner/test_planner_search.py"],
}  # fmt: skip


def tests_near(change: Change, most: int) -> list[str]:
    """Those in which three neighbouring words of an old text stand, and the nearest by imports."""
    words = change.words.split()
    phrases = [" ".join(three) for three in zip(words, words[1:], words[2:], strict=False)] or [change.words.strip()]
    phrases = [phrase for phrase in phrases if phrase]
    every = files_of(["tests/*/test_*.py"])
    saying = [test for test in every if any(phrase in (ROOT / test).read_text() for phrase in phrases)]
    near = TABLES.get(change.file) or tests_of(change.file)
    chosen = [*saying[:most], *near[:most]]
    # What pages repeat is generated: test_facts.py asks for `make facts`, and minds no words.
    return list(dict.fromkeys(test for test in chosen if "engines" not in test and "test_facts" not in test))


def changed(change: Change, text: str) -> str:
    """The file's text with the change, or as it was where there is no such place."""
    made = change.apply(text) or text
    if change.file.endswith(".py"):
        compile(made, change.file, "exec")
    return made


def make(tree: Path, changes: list[Change], files: set[str]) -> None:
    """Have these changes, and no others, in the files of the tree."""
    for file in files:
        text = (ROOT / file).read_text()
        for change in changes:
            text = changed(change, text) if change.file == file else text
        (tree / file).write_text(text)


def culprits(changes: list[Change], fails: Callable[[list[Change]], bool]) -> list[Change]:
    """Those of the changes with which a test fails, by halves: all of them together, if neither half makes it fail."""
    if len(changes) == 1:
        return changes
    middle = len(changes) // 2
    found = [one for half in (changes[:middle], changes[middle:]) if fails(half) for one in culprits(half, fails)]
    return found or changes


def verdicts(tree: Path, changes: list[Change], most: int, seconds: float) -> list[dict]:
    """All changes are made at once, and each test near any of them runs once. A test that fails then, and passes
    without them, is run again with half of them, until it is known which of them it minds."""
    there = [one for one in changes if (ROOT / one.file).exists() and one.apply((ROOT / one.file).read_text())]
    files = {change.file for change in there}
    near = {change: tests_near(change, most) for change in there}
    failed: dict[Change, list[str]] = {change: [] for change in there}
    late: set[str] = set()
    without: set[str] = set()

    def fails(test: str, some: list[Change]) -> bool:
        make(tree, some, files)
        return run_tests(tree, [test], seconds)[0] != 0

    for test in sorted({test for tests in near.values() for test in tests}):
        make(tree, there, files)
        begun = time.monotonic()
        code, report = run_tests(tree, [test], seconds)  # a file at a time, so that one that is slow hides no other
        print(f"{test}: {'too slow' if code is None else code}, {time.monotonic() - begun:.0f} s", flush=True)
        if code is None:
            late.add(test)
        if not code:
            continue
        make(tree, [], files)
        code, clean = run_tests(tree, [test], seconds)
        anyway = {*clean.splitlines()} or {*[test] * (code != 0)}
        without |= anyway
        for one in [one for one in report.splitlines() or [test] if one not in anyway]:
            for change in culprits(there, functools.partial(fails, one)):
                failed[change].append(one)
    rows = []
    for change in changes:
        row: dict[str, Any] = {"kind": change.kind, "file": change.file, "what": change.what, "tests": 0, "failed": []}
        if change in near:
            row |= {"tests": len(near[change]), "failed": failed[change]}
        unknown = [
            test for test in near.get(change, ()) if test in late or any(one.startswith(test) for one in without)
        ]
        if change not in near:
            row["verdict"] = "no longer applies"
        elif failed[change]:
            row["verdict"] = "changes a test's verdict"
        else:
            row["verdict"] = f"no verdict of {', '.join(unknown)}" if unknown else "harmless"
        rows.append(row)
    return rows


def main() -> int:
    parser = Parser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", default="", help="changes of a kind or a file with this in its name")
    parser.add_argument("--list", action="store_true", help="show the changes, and whether their places are there")
    parser.add_argument("--most", type=int, default=8, help="test files of each sort for a change (default: 8)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a test file (default: 300)")
    args = parser.asked()
    chosen = [change for change in CHANGES if args.only in f"{change.kind} {change.file}"]
    if args.list:
        for change in chosen:
            there = change.apply((ROOT / change.file).read_text()) if (ROOT / change.file).exists() else None
            near = ", ".join(Path(test).stem for test in tests_near(change, args.most))
            print(f"{'there' if there else 'GONE '}  {change.kind}: {change.file}: {change.what}  [{near}]")
        return 0
    warm_up()
    with tempfile.TemporaryDirectory(prefix="harmless-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_of_the_tree(tree)
        rows = verdicts(tree, chosen, args.most, args.timeout)
    print("\n| change | place | tests | verdict |\n| --- | --- | --- | --- |")
    for row in rows:
        minded = f": {', '.join(row['failed'])}" if row["failed"] else ""
        print(f"| {row['kind']} | `{row['file']}`: {row['what']} | {row['tests']} files | {row['verdict']}{minded} |")
    kept = sum(row["verdict"] == "harmless" for row in rows)
    print(f"\n{kept} of {len(rows)} change no test's verdict")
    return 0


if __name__ == "__main__":
    sys.exit(main())
