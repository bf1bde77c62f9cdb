"""When a cell of a notebook fails, so do most that follow: report the first, and leave the rest of them out."""

import pytest


def pytest_runtest_makereport(item, call):
    if item.path.suffix == ".ipynb" and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.parent.failed = item.name


def pytest_runtest_setup(item):
    if hasattr(item.parent, "failed"):
        pytest.skip(f"{item.parent.failed} failed before")
