"""When a cell of a notebook fails, so do most that follow: report the first, and leave the rest of them out. Measured
numbers are masked before outputs are compared. And what the tests start on few cores runs as ranks of the course do."""

from pathlib import Path

import pytest


def pytest_configure(config):
    """From whichever folder nbval is started."""
    masks = Path(__file__).parent / "tests" / "sanitize.cfg"
    config.option.nbval_sanitize_with = config.option.nbval_sanitize_with or str(masks)


@pytest.fixture(scope="session", autouse=True)
def threads_finish():
    """For programs that are started by tests and know nothing of the course: processes inherit it."""
    from common.ranks import let_threads_finish

    let_threads_finish()


def pytest_runtest_makereport(item, call):
    if item.path.suffix == ".ipynb" and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.parent.failed = item.name


def pytest_runtest_setup(item):
    if hasattr(item.parent, "failed"):
        pytest.skip(f"{item.parent.failed} failed before")
