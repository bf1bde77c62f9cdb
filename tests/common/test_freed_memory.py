"""keep_freed_memory: glibc keeps what the backward pass will ask for again, and other C libraries are left alone."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from common.ranks import keep_freed_memory


def test_no_c_library_or_another_one_is_no_harm(monkeypatch):
    calls = []

    def missing(name):
        calls.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: calls.append(name) or SimpleNamespace())
    keep_freed_memory()
    assert calls == ["libc.so.6"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's memory")
def test_memory_that_is_freed_is_kept():
    """Eight blocks of 8 MB, 16,384 pages of 4 KB, freed and asked for again: after a few times they are no new ones."""
    code = (
        "import resource, torch\n"
        "from common.ranks import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "for round in range(10):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    blocks = [torch.ones(2 * 2**20) for _ in range(8)]\n"
        "    del blocks\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 100
