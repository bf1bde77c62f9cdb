"""Plant a mistake in a file of the course, and see which tests refuse it.

The tests run in a process that is forked from this one, which has imported what takes long (PyTorch, pytest). There,
everything that belongs to the course is imported anew, with the mistake in it: so it is wherever the file is used, in
default arguments, tables, classes and copies made by `from ... import`, and in ranks that are forked.
"""

import importlib
import io
import os
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

# What takes long to import is imported once, here.
import IPython.display  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pytest
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.profiler  # noqa: F401

from common import ROOT
from common.lab.launch import ready_to_fork
from common.vision import torchvision  # noqa: F401


@dataclass(frozen=True)
class Mistake:
    """What is right in a file, and what stands there instead.

    file:       below the root of the repository
    right:      text that the file has once
    wrong:      what stands there instead
    does:       what goes wrong then
    refused_by: a test that must fail, as pytest names it
    says:       what the failure must say, so that it tells the cause: text of the lines that pytest begins with "E" or
                with "FAILED"
    """

    file: str
    right: str
    wrong: str
    does: str
    refused_by: str
    says: str

    def source(self) -> str:
        """The file with the mistake. Raises ValueError where the right text is not there once."""
        text = (ROOT / self.file).read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"{self.file} has {self.right!r} {text.count(self.right)} times, and not once")
        return text.replace(self.right, self.wrong)


class Planted(SourceFileLoader):
    """Loads a module of the course from a text that is not its file's."""

    def __init__(self, name: str, file: Path, text: str):
        super().__init__(name, str(file))
        self.text = text

    def get_code(self, fullname):
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds one module of the course planted, and no other."""

    def __init__(self, name: str, file: Path, text: str):
        self.name, self.file, self.text = name, file, text

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return spec_from_file_location(name, self.file, loader=Planted(name, self.file, self.text))


def module_name(file: str) -> str:
    """common/lab/guard.py -> common.lab.guard; 03_ddp/by_hand.py -> course.ddp.by_hand."""
    top, *rest = Path(file).with_suffix("").parts
    return ".".join([*(["course", top[3:]] if top[:1].isdigit() else [top]), *rest])


def forget_the_course() -> None:
    """What is imported from now on is imported anew."""
    inside = f"{ROOT}{os.sep}"

    def own(module) -> bool:
        # A folder without __init__.py is a module without a file, and keeps the modules in it as attributes.
        places = [getattr(module, "__file__", None) or "", *vars(module).get("__path__", ())]
        return any(place.startswith(inside) and f"{os.sep}.venv{os.sep}" not in place for place in places)

    for name in [name for name, module in sys.modules.items() if name != "__main__" and own(module)]:
        del sys.modules[name]
    importlib.invalidate_caches()


def outcome(mistake: Mistake | None, tests: list[str], timeout: float = 90.0) -> tuple[int | None, str]:
    """Run tests with a mistake in the course, or without one: pytest's exit code and what it has written.

    The exit code is 0 where all tests pass, 1 where one fails, and None after `timeout` seconds.
    """
    text = mistake.source() if mistake else ""
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
        report = Path(folder, "report")
        with ready_to_fork():
            pid = os.fork()
            if pid == 0:
                code = 99
                try:
                    os.setsid()
                    code = _run_tests(mistake, text, tests, folder, report)
                finally:
                    os._exit(code)
        deadline, status = time.monotonic() + timeout, None
        while status is None and time.monotonic() < deadline:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if ended else None
            time.sleep(0.005)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return status, report.read_text() if report.exists() else ""


def _run_tests(mistake: Mistake | None, text: str, tests: list[str], folder: str, report: Path) -> int:
    """What the forked process does."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "COV_"))]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    forget_the_course()
    if mistake:
        sys.meta_path.insert(0, Finder(module_name(mistake.file), (ROOT / mistake.file).absolute(), text))
    written = io.StringIO()
    with redirect_stdout(written), redirect_stderr(written):
        # not the conftest.py of the root, which wants a plugin of notebooks
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "--confcutdir=tests"]
        options += [f"--basetemp={folder}/tests"]
        code = int(pytest.main([*options, *tests]))
    report.write_text(written.getvalue())
    return code


def said(report: str) -> str:
    """The lines of a report that say which test has failed, and why."""
    lines = [line for line in report.splitlines() if line.startswith(("E ", "FAILED "))]
    return "\n".join(line.removeprefix("E").strip() for line in lines)


def refusal(mistake: Mistake) -> str:
    """What the test that has to refuse a mistake says of it. Raises AssertionError where it does not refuse it, or for
    another reason."""
    code, report = outcome(mistake, [mistake.refused_by])
    assert code is not None, f"{mistake.refused_by} has not ended: {mistake.does}"
    assert code != 0, f"{mistake.refused_by} does not see it: {mistake.does}"
    assert code == 1, f"{mistake.refused_by} could not run (pytest's exit code {code}):\n{report}"
    assert mistake.says in said(report), f"{mistake.refused_by} fails, but does not say {mistake.says!r}:\n{report}"
    return said(report)
