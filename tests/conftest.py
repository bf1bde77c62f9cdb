"""Fixtures of several test files."""

import pytest


@pytest.fixture
def no_launcher(monkeypatch):
    """No variables of a launcher, and none that choose GPUs or a network."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*launchers, "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test does
        monkeypatch.delenv(name)
