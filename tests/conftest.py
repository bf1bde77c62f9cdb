"""Fixtures of several test files."""

import importlib.util
import sys

import pytest

ENGINES = ("accelerate", "lightning", "deepspeed", "transformers", "datasets", "peft", "bitsandbytes")
LACKING = [name for name in ENGINES if importlib.util.find_spec(name) is None]
collect_ignore = ["strategies/test_engines.py"] if LACKING else []  # not even skipped: a skip looks like a pass


def pytest_report_header():
    if LACKING:
        return f"without test_engines.py: there is no {', '.join(LACKING)} (make test-engines installs them)"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that share a fixture of their module run on one worker (--dist loadgroup), which makes it once."""
    if not config.pluginmanager.hasplugin("xdist"):
        return  # the mark would be unknown
    for item in items:
        made = item._fixtureinfo.name2fixturedefs.values()
        if any(fixture[-1].scope == "module" for fixture in made):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture
def no_launcher(monkeypatch):
    """No variables of a launcher, and none that choose GPUs or a network."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*launchers, "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test does
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_group_is_left():
    """A run that ends by an error leaves its process group to the end of the process, which is that of other tests."""
    yield
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()
