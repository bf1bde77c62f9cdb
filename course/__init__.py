"""The chapters under names that Python can import: `course.ddp` is the folder 03_ddp, and so on.

A folder's name that begins with a digit cannot stand in an import statement. So this package tells Python's import
system in which folder each of these names is, and every file of a chapter has one name and one path: those under which
the reader has it open. Breakpoints, tracebacks and `__file__` show that path.

The links beside this file (`ddp -> ../03_ddp`) are for editors, which look for a definition without running anything.
Nothing reads them when a program runs, so where git could not make links, as on Windows, programs run all the same.
"""

import importlib.machinery
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).parent.parent
CHAPTERS = {folder.name[3:]: folder for folder in sorted(ROOT.glob("[0-9][0-9]_*"))}  # "ddp" -> .../03_ddp


class ChapterFinder(MetaPathFinder):
    """Finds `course.ddp` in the folder 03_ddp. What is below it, Python finds in that folder by itself."""

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002  it is called with these names
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name not in CHAPTERS:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)  # without a file, as any plain folder
        spec.submodule_search_locations = [str(CHAPTERS[name])]
        return spec


sys.meta_path.insert(0, ChapterFinder())  # before the one that would follow a link


def importable_name(file: str | None) -> str | None:
    """The name under which a file of a chapter is imported, "course.ddp.by_hand" for instance; None for other files."""
    path = Path(file).resolve() if file else None
    for name, folder in CHAPTERS.items():
        if path and folder.resolve() in path.parents:
            return ".".join((__name__, name, *path.relative_to(folder.resolve()).with_suffix("").parts))
    return None


def import_started_program() -> None:
    """Where a chapter's file was started as a program, have imports of it find this program.

    Python calls it `__main__`. Without this, the first import of it would run the file again, and each of its classes
    would exist twice, with the reader's breakpoints in those that nobody calls.
    """
    program = sys.modules["__main__"]
    name = importable_name(getattr(program, "__file__", None))
    if name and name not in sys.modules:
        sys.modules[name] = program


def name_what_was_started() -> None:
    """Give classes and functions of the started program the module name by which other processes can unpickle them."""
    import_started_program()  # again, if this package was imported before there was a program
    program = sys.modules["__main__"]
    name = importable_name(getattr(program, "__file__", None))
    if name and sys.modules[name] is program:
        package, _, stem = name.rpartition(".")
        setattr(importlib.import_module(package), stem, program)
        for thing in vars(program).values():
            if isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
                thing.__module__ = name


import_started_program()
