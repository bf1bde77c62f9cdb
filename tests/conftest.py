"""Fixtures of several test files, and which tests run when and where."""

import functools
import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("accelerate", "lightning", "deepspeed", "transformers", "datasets", "peft", "bitsandbytes")
LACKING = [name for name in ENGINES if importlib.util.find_spec(name) is None]
collect_ignore = ["strategies/test_engines.py"] if LACKING else []  # not even skipped: a skip looks like a pass

# Examples are the same in every run, and no clock has a say: by itself, hypothesis gives each of them 0.2 seconds.
settings.register_profile("course", deadline=None, derandomize=True, database=None, suppress_health_check=[
    HealthCheck.too_slow, HealthCheck.function_scoped_fixture
])  # fmt: skip
settings.load_profile("course")


def pytest_report_header():
    if LACKING:
        return f"without test_engines.py: there is no {', '.join(LACKING)} (make test-engines installs them)"


def pytest_collection_modifyitems(config, items):
    """Without FULL=1 a weekly test is not there, and counted as such: a skip looks like a pass."""
    weekly = [] if os.environ.get("FULL") else [item for item in items if item.get_closest_marker("weekly")]
    config.hook.pytest_deselected(items=weekly)
    items[:] = [item for item in items if item not in weekly]


@functools.cache
def makes_something_once(file: str) -> bool:
    return 'scope="module"' in (ROOT / file).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file that makes a fixture once for all of them run on one worker. (xdist_group says so too, but is
    nothing to pytest-xdist 3.8 with pytest 9.2, whose tests don't take the names that it gives them.)"""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if makes_something_once(file) else nodeid

    return ByFile(config, log)


@pytest.fixture
def no_launcher(monkeypatch):
    """No variables of a launcher, and none that choose GPUs or a network."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*launchers, "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test does
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def garbage_is_a_tests_own():
    """A run collects garbage at its end: in what it has made, and not among all the modules of this process."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A run that ends by an error leaves its process group to the end of the process, which is that of other tests."""
    yield
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
