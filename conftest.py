"""When a cell of a notebook fails, so do most that follow: report the first, and leave the rest of them out. Measured
numbers are masked before outputs are compared. The kernels of notebooks are forked from one process that has imported
PyTorch, and so are the programs that their cells start. A test that fails says how to run it again. And what the tests
start on few cores runs as ranks of the course do."""

import faulthandler
import io
import multiprocessing
import os
import runpy
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

# pytest has tracebacks of fatal errors written past what it captures. A rank that is forked, and may be meant to die,
# does not: ranks that are started otherwise have no such handler either.
os.register_at_fork(after_in_child=faulthandler.disable)


PRELOADED = ["pytest", "ipykernel.kernelapp", "matplotlib.pyplot", "torch._dynamo", "torch.distributed.checkpoint",
             "torch.distributed.pipelining", "sklearn.datasets"]  # fmt: skip


def pytest_configure(config):
    """From whichever folder nbval is started."""
    masks = Path(__file__).parent / "tests" / "sanitize.cfg"
    if config.pluginmanager.hasplugin("nbval"):
        config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(masks)
        if config.option.nbval and sys.platform == "linux" and not os.environ.get("FULL"):
            from jupyter_client import launcher

            launcher.Popen = ForkedKernel


class ForkedKernel:
    """A notebook's kernel, used as subprocess.Popen is, but forked from a process that has imported what takes long,
    which is three seconds of processor time for each notebook. With FULL=1 kernels start as JupyterLab starts them."""

    stdin, stdout, stderr, commands = io.BytesIO(), None, None, None

    def __init__(self, command: list[str], cwd: str, env: dict[str, str], **_):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        if not ForkedKernel.commands:
            ForkedKernel.commands = tempfile.TemporaryDirectory(prefix="commands-")
            context.Process(target=_serve, args=(ForkedKernel.commands.name,), daemon=True).start()
        self.process = context.Process(target=_run_kernel, args=(command, cwd, env, ForkedKernel.commands.name))
        self.process.start()
        self.pid = self.process.pid
        while self.process.is_alive() and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # until it leads a process group, for that is what will be ended
        self.poll, self.wait = lambda: self.process.exitcode, self.process.join
        self.kill, self.terminate = self.process.kill, self.process.terminate
        self.send_signal = lambda number: os.kill(self.pid, number)


def _serve(folder: str) -> None:
    multiprocessing.current_process().daemon = False  # so that what it starts may start processes
    multiprocessing.set_start_method(None, force=True)
    sys.path.append(str(Path(__file__).parent / "tests"))
    from forked_programs import serve

    serve(Path(folder))


def _run_kernel(command: list[str], cwd: str, env: dict[str, str], commands: str) -> None:
    """`python -m ipykernel_launcher -f FILE` in the process that was forked for it. Its `python` and `torchrun` are
    those of forked_programs.py."""
    os.setsid()
    sys.executable = f"{commands}/python"
    env = env | {"PATH": commands + os.pathsep + env.get("PATH", os.defpath)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)  # of what the kernel starts: Python's own
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = command[command.index("-m") + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


@pytest.fixture(scope="session", autouse=True)
def threads_finish():
    """For programs that are started by tests and know nothing of the course: processes inherit it."""
    from common.ranks import let_threads_finish

    let_threads_finish()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and hasattr(report.longrepr, "addsection"):
        full = "FULL=1 " if os.environ.get("FULL") else ""
        report.longrepr.addsection("run this case again", f"{full}python -m pytest {shlex.quote(item.nodeid)}")
    if item.path.suffix == ".ipynb" and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.parent.failed = item.name
    return report


def pytest_runtest_setup(item):
    if hasattr(item.parent, "failed"):
        pytest.skip(f"{item.parent.failed} failed before")
