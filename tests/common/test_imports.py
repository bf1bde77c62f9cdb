"""Arrows go from chapters to common/, and every file of the course is one module under one name."""

import ast
import cProfile
import functools
import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import jedi
import pytest
from forks import Fork, forget_the_course
from helpers import FULL, SMALL, as_options

from common import ROOT, declared
from course import CHAPTERS as CHAPTER_FOLDERS
from course.ddp.by_hand import DDPByHand
from course.ddp.distributed_training import DDP
from course.fsdp.distributed_training import FSDP
from course.fsdp.torch_zero import Zero2
from course.start import read_command
from course.strategies import STRATEGIES, load

CHAPTERS = sorted(folder.name for folder in ROOT.glob("[0-9][0-9]_*"))
PATTERNS = ("common/**/*.py", "0*/**/*.py", "course/*.py", "tests/**/*.py", "tools/*.py", "*.py")
FILES = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]
OWN = {path.stem for folder in CHAPTERS for path in (ROOT / folder).rglob("*.py")} | {"classroom"}


def code_of(path: Path) -> list[str]:
    """A file's program, or the code cells of a notebook."""
    if path.suffix == ".py":
        return [path.read_text()]
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


@functools.cache
def imported(code: str) -> set[str]:
    """The full names of the modules that a program imports."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith(("%", "!"))]
    names = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def by_string(code: str) -> list[str]:
    """Ways to import a chapter by a string, or from a path."""
    return re.findall(r"spec_from_file_location|__import__\(|sys\.path\.(?:insert|append)|[\"']0\d_[a-z_]+[.\"']", code)


def test_no_chapter_imports_the_planner():
    """The planner computes with the chapters' formulas, never the other way round. Graders may ask it, and pages."""
    for folder in CHAPTERS:
        for path in (ROOT / folder).rglob("*.py"):
            if "classroom" not in path.parts:
                (code,) = code_of(path)
                assert not {name for name in imported(code) if name.split(".")[0] == "planner"}, path


def test_common_imports_no_chapter():
    for path in (ROOT / "common").rglob("*.py"):
        (code,) = code_of(path)
        assert not {name for name in imported(code) if name.split(".")[0] == "course"}, path
        # common/check.py imports the grader of the chapter that the user names; submissions, and own.py's, are files.
        if path.name not in ("check.py", "engine.py", "own.py"):
            assert by_string(code) == [] and "import_module" not in code, path


@pytest.mark.parametrize("number, folder", list(enumerate(CHAPTERS)))
def test_a_chapter_imports_earlier_chapters_only(number, folder):
    later = {f"course.{name[3:]}" for name in CHAPTERS[number + 1 :]}
    for path in (ROOT / folder).glob("*.py"):  # what compares methods, in notebooks and classroom, may look ahead
        (code,) = code_of(path)
        ahead = {name for name in imported(code) for other in later if f"{name}.".startswith(f"{other}.")}
        assert not ahead, f"{path}: {ahead}"


def test_nothing_imports_a_chapters_file_by_its_bare_name():
    for path in [*FILES, *ROOT.glob("*.ipynb"), *ROOT.glob("0*/*.ipynb")]:
        for code in code_of(path):
            bare = {name for name in imported(code) if name.split(".")[0] in OWN - {"helpers"}}
            assert not bare, f"{path} imports {bare}; say `from course.CHAPTER import ...`"


def test_the_checks_bite():
    assert imported("from course.ddp import by_hand\nimport by_hand") >= {"course.ddp.by_hand", "by_hand"}
    assert len(by_string("x = load('03_ddp.by_hand')\nsys.path.append(folder)")) == 2


def files_of(names: set[str]) -> set[Path]:
    """The course's own files among modules that are imported."""
    found = set()
    for name in names:
        top, *rest = name.split(".")
        if top == "course" and rest and rest[0] in CHAPTER_FOLDERS:
            top, *rest = CHAPTER_FOLDERS[rest[0]].name, *rest[1:]
        path = ROOT.joinpath(top, *rest)
        found |= {file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()}
    return found


def really_imported(path: Path) -> set[Path]:
    """What runs when a file is imported or when its functions are called imports: functions included, and the places
    that the table of strategies names. What stands below `if __name__ == "__main__"` is for the program alone."""
    tree = ast.parse(path.read_text())
    left_out = ("__main__", "TYPE_CHECKING")  # for the program alone, and for those who read types
    tree.body = [
        n for n in tree.body if not (isinstance(n, ast.If) and any(w in ast.unparse(n.test) for w in left_out))
    ]
    names = imported(ast.unparse(tree))
    if path == ROOT / "course" / "strategies.py":
        entries = STRATEGIES.values()
        places = [place for one in entries for place in (one.main_place, *one.places.values())]
        places += [engine.place for one in entries for engine in one.engines.values()]
        names |= {place.partition(":")[0] for place in places}
    return files_of(names) - {path}


def test_no_circle_of_imports():
    patterns = ("common/**/*.py", "course/*.py", "planner/*.py", "0*/**/*.py", "tools/*.py")
    graph = {path: really_imported(path) for pattern in patterns for path in ROOT.glob(pattern)}
    scripts = {ROOT / folder / "distributed_training.py" for folder in CHAPTERS}
    assert scripts < graph[ROOT / "course" / "strategies.py"] and len(graph) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError, with the files of a circle


def test_classes_are_those_of_the_table():
    assert load("ddp") is DDP and load("ddp", True) is DDPByHand
    assert issubclass(Zero2, FSDP) and load("zero2") is Zero2 and load("fsdp") is FSDP


ENGINES = sorted({f"{entry.chapter}/{engine.place.split(':')[0].split('.')[-1]}.py"
                  for entry in STRATEGIES.values() for engine in entry.engines.values()})  # fmt: skip
OPTIONS = as_options(SMALL | {"steps": 1})


def alone(function, *arguments, cwd: Path = ROOT) -> str:
    """What a function writes that is called with the arguments in a process that has imported nothing of the course."""
    process = Fork(function, *arguments, cwd=cwd, preexec_fn=forget_the_course)
    written, errors = process.communicate(timeout=300)
    assert process.returncode == 0, written + errors
    return written


def run_and_tell(arguments):
    """Run a program as Python does; print where its class's step was, which files are there twice or by a link's name,
    and how many are there."""
    how, place, class_name, *options = arguments
    sys.argv, files = [place, *options], defaultdict(set)
    if how == "module":
        program = runpy.run_module(place, run_name="__main__", alter_sys=True)
    elif how == "profiled":
        cProfile.runctx("program = runpy.run_path(place, run_name='__main__')", globals(), local := {"place": place})
        program = local["program"]
    else:
        program = runpy.run_path(place, run_name="__main__")
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        ours = Path(file).is_relative_to(ROOT) and not Path(file).is_relative_to(ROOT / "tests")
        if ours and "site-packages" not in file:
            files[os.path.realpath(file)].add((file, id(module)))
    (importable,) = pickle.loads(pickle.dumps([program[class_name]]))  # raises, if it is not the one that is imported
    ours = {node.name for node in ast.parse(Path(program["__file__"]).read_text()).body if hasattr(node, "name")}
    told = {
        "others": [
            name
            for name, thing in program.items()
            if name not in ours and getattr(thing, "__module__", None) == importable.__module__
        ],
        "class": (importable.__module__, importable.step.__code__.co_filename),
        "twice": [file for file, names in files.items() if len(names) > 1],
        "links": [name for file, names in files.items() for name, _ in names if name != file],
        "files": len(files),
    }
    print(f"TOLD {json.dumps(told)}")


@pytest.mark.parametrize(
    "how, folder, class_name",
    [
        ("script", "05_pipeline", "PipelineParallel"),
        ("module", "03_ddp", "DDP"),
        *[("profiled", "03_ddp", "DDP")] * FULL,
    ],
)
def test_a_program_has_each_file_once_under_its_one_name(how, folder, class_name, tmp_path):
    script, module = ROOT / folder / "distributed_training.py", f"course.{folder[3:]}.distributed_training"
    place = module if how == "module" else script
    written = alone(run_and_tell, how, place, class_name, *OPTIONS, f"--run-dir={tmp_path / 'run'}", cwd=script.parent)
    told = json.loads(written.partition("TOLD ")[2].splitlines()[0])
    assert told.pop("files") > 15
    assert told == {"class": [module, str(script)], "twice": [], "links": [], "others": []}


def kinds(name):
    return list(STRATEGIES[name].implementations)


def unpickle(arguments):
    clone, file = arguments
    sys.path.insert(0, clone)
    classes = pickle.loads(Path(file).read_bytes())
    print(len(classes), {sys.modules[one.__module__].__file__.startswith(clone) for one in classes})


def test_classes_are_unpickled_where_nothing_is_imported_and_git_has_made_no_links(tmp_path):
    """In a checkout as git makes it on Windows, where each link is a file that holds its target's name."""
    clone = tmp_path / "clone"
    for folder in ("common", "course", "planner", *CHAPTERS):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("*.ipynb", "__pycache__", "runs"))
    for link in (ROOT / "course").iterdir():
        if link.is_symlink():
            shutil.rmtree(clone / "course" / link.name)
            (clone / "course" / link.name).write_text(os.readlink(link))
    assert (clone / "course" / "ddp").is_file()
    (tmp_path / "classes").write_bytes(pickle.dumps([load(name, kind) for name in STRATEGIES for kind in kinds(name)]))
    written = alone(unpickle, clone, tmp_path / "classes", cwd=tmp_path)
    assert written.split() == [str(sum(len(kinds(name)) for name in STRATEGIES)), "{True}"]


def test_an_editor_finds_definitions():
    """What JupyterLab and many editors ask, jedi, answers without running anything."""
    code = "from course.ddp.by_hand import Reducer\nReducer\n"
    script = jedi.Script(code, path=ROOT / "03_ddp" / "new.py", project=jedi.Project(ROOT))
    (found,) = script.goto(2, 3, follow_imports=True)
    assert Path(found.module_path).resolve() == ROOT / "03_ddp" / "by_hand.py"
    assert (ROOT / "03_ddp" / "by_hand.py").read_text().splitlines()[found.line - 1].startswith("class Reducer")


def test_pytorchs_versions_inherit_nothing_by_hand():
    for name, entry in STRATEGIES.items():
        for kind, cls in entry.implementations.items():
            by_hand = [base.__module__ for base in cls.__mro__ if ".by_hand" in base.__module__]
            assert kind == "by-hand" or not by_hand, f"{name}, {kind}: {by_hand}"


def test_each_public_class_and_constant_has_a_name_of_its_own():
    files = [*(ROOT / "common").rglob("*.py"), *ROOT.glob("0*/by_hand*.py"), *ROOT.glob("0*/[c-z]*.py")]
    files = [path for path in files if path.name not in ("exercises.py", "standalone.py", "doctor.py", "wire.py")]
    where: dict[str, list] = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Attribute | ast.Tuple):
                names = [t.id for t in node.targets if isinstance(t, ast.Name) and t.id.isupper()]
            for name in names:
                where[name].append(path.name)
    assert {name: places for name, places in where.items() if len(places) > 1 and name[0] != "_"} == {}
    assert {"Reducer", "DDPByHand", "ROOT"} <= where.keys(), "classes and constants are found"


def test_what_files_declare_is_what_strategies_have(tmp_path, monkeypatch):
    """Options with types, defaults and choices; axes, and those of which nothing is said."""
    for name, entry in STRATEGIES.items():
        for kind, strategy in entry.implementations.items():
            found = entry.declared(kind)
            assert list(map(repr, fields(found.Options))) == list(map(repr, fields(strategy.Options))), (name, kind)
            assert (found.preset, found.axes) == (strategy.preset, strategy.axes), (name, kind)
    assert "deepspeed_config" in STRATEGIES["fsdp"].declared("deepspeed").names, "of an engine that may not be there"
    (tmp_path / "course").mkdir()
    monkeypatch.setattr(declared, "ROOT", tmp_path)
    for name, text in {
        "named": "LATER = 3\nKINDS = {'x': 1, 'y': LATER}\nNAMES = tuple(KINDS)\n",
        "base": "class Base:\n    preset = {'x': 2}\n    axes = ('x',)\n",
        "made": "from course.named import NAMES\nfrom course.base import Base\nclass Made(Base):\n    axes = NAMES\n",
    }.items():
        (tmp_path / "course" / f"{name}.py").write_text(text)
    found = declared.declared("course.made:Made")
    assert (found.preset, found.axes) == ({"x": 2}, ("x", "y")), "a name of a name in another file; a base's own"


WRONG = [
    *(f"distributed_training.py {options}" for options in (
        "--lr -1", "--steps many", "--width 10 --heads 3", "--distributed", "--strategy nosuch", "--nosuch",
        "nosuch", "--implementation nosuch", "--config nosuch", "--resume nosuch", "--text nosuch",
        "--strategy ddp --schedule gpipe", "--strategy pipeline --schedule nosuch",
        "--strategy expert --by-hand --top-k x", "--strategy expert --by-hand --top-k 0",
        "--mesh data=3", "--mesh tensor=x", "--steps 9 --epochs 1",
    )),
    *(f"{folder}/distributed_training.py {options}" for options in ("--nosuch", "--steps x", "--mesh data=3")
      for folder in CHAPTERS),
    *(f"{script} --nosuch" for script in (*ENGINES, "06_fsdp/with_qlora.py", "05_pipeline/play.py")),
    *(f"-m common.check {words}" for words in ("--csv", "nosuch", "01_intro nosuch", "--hint")),
    "-m common.questions", "-m common.doctor --symptom=", "03_ddp/classroom/bugs.py too_larg",
    "common/doctor.py --nosuch", "-m common.runs nosuch", "-m common.cluster_check --megabytes 0",
]  # fmt: skip
HELP = ["distributed_training.py --help", "03_ddp/distributed_training.py --help"]
ONE_BY_ONE = """
import contextlib, io, json, runpy, sys
for command in json.loads(sys.argv[1]):
    words, told, wrong, code = command.split(), io.StringIO(), io.StringIO(), "no exit"
    run = runpy.run_module if words[0] == "-m" else runpy.run_path
    sys.argv = words = words[words[0] == "-m":]
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(wrong):
        try:
            run(words[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(json.dumps([command, code, "torch" in sys.modules, told.getvalue(), wrong.getvalue()]))
"""


def test_a_wrong_command_is_refused_before_torch_is_imported():
    """Its import takes most of the time of a refusal. And --help needs none. All are run in one process."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    line = [sys.executable, "-c", ONE_BY_ONE, json.dumps([*WRONG, *HELP])]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [command for command, *_ in found] == [*WRONG, *HELP], done.stderr
    for command, code, imported, told, errors in found:
        assert not imported, f"{command} imports torch"
        assert code == (0 if command in HELP else 2), f"{command}: {code} {errors}"
        if command in WRONG:
            assert told == "" and errors.startswith("error: ") and errors.count("\n") == 1, f"{command}: {errors}"


def test_a_terminal_hears_that_something_happens_before_torch_is_imported(monkeypatch, capsys):
    """Once: of the ranks that torchrun starts, the first says it."""
    monkeypatch.setattr("common.command_line.read", lambda *_: lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for rank, terminal, lines in ((0, True, 1), (1, True, 0), (0, False, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        read_command()
        assert capsys.readouterr().err.count("PyTorch") == lines, (rank, terminal)
