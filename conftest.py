"""When a cell of a notebook fails, so do most that follow: report the first, and leave the rest of them out. Measured
numbers are masked before outputs are compared. A test that fails says how to run it again. And what the tests start on
few cores runs as ranks of the course do."""

import faulthandler
import os
import shlex
from pathlib import Path

import pytest

# pytest has tracebacks of fatal errors written past what it captures. A rank that is forked, and may be meant to die,
# does not: ranks that are started otherwise have no such handler either.
os.register_at_fork(after_in_child=faulthandler.disable)


def pytest_configure(config):
    """From whichever folder nbval is started."""
    masks = Path(__file__).parent / "tests" / "sanitize.cfg"
    if config.pluginmanager.hasplugin("nbval"):
        config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(masks)


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
