"""Some faults of `make soak-faults`, and that it notices mistakes."""

import pytest

from common import manifest
from common.lab.launch import launch
from common.run_dir import RunDirectory
from tools.soak_faults import Fault, attempt, compare, endure, soak

LINE = "--strategy ddp"


def test_runs_end_as_if_nothing_had_happened():
    hits, wrong = soak(5, seed=3, runs=[LINE])
    assert not wrong, wrong
    assert hits.total() == 5 and len(hits) > 2


@pytest.mark.parametrize(
    ("fault", "owner", "name", "mistake", "noticed"),
    [
        # metrics of steps that are done again stay
        (
            Fault("SIGKILL", 0, "step", 4),
            RunDirectory,
            "drop_after",
            lambda run, step: None,
            r"steps \[1, 2, 3, 3, 4",
        ),
        # a checkpoint is written in its place
        (Fault("SIGKILL", 1, "after writing", 2), manifest, "partial", lambda folder: folder, "has no manifest.json"),
    ],
)
def test_mistakes_are_noticed(fault, owner, name, mistake, noticed, tmp_path, monkeypatch):
    launch(attempt, 2, (LINE, tmp_path / "undisturbed" / "run", 2, None, 0))
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError, match=noticed):
        endure(LINE, tmp_path / "disturbed" / "run", [fault])
        differs = compare(tmp_path / "disturbed" / "run", tmp_path / "undisturbed" / "run")
        assert not differs, "\n".join(differs)
