"""Some faults of `make soak-faults`, and that it notices a mistake."""

import pytest

from common import manifest
from tools.soak_faults import Fault, endure, soak

LINE = "--strategy ddp"


@pytest.mark.weekly  # as is what it is for; a rank that is killed: test_loading.py, at a certain moment: test_damage.py
def test_runs_end_as_if_nothing_had_happened():
    hits, wrong = soak(3, seed=3, runs=[LINE])
    assert not wrong, wrong
    assert hits.total() == 3 and len(hits) > 1


def test_a_mistake_is_noticed(tmp_path, monkeypatch):
    """A checkpoint that is written in its place, and a rank that is killed meanwhile."""
    monkeypatch.setattr(manifest, "partial", lambda folder: folder)
    with pytest.raises(AssertionError, match="has no manifest.json"):
        endure(LINE, tmp_path / "run", [Fault("SIGKILL", 1, "after writing", 2)])
