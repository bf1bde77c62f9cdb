"""The post-mortem of a launch names the failure that the others follow from."""

import json
import os
import re
import time

import pytest
import torch.distributed as dist

from common.lab import launch as launching
from common.lab.launch import RankFailed, launch
from common.lab.postmortem import explain


def raise_one_after_the_other(first: int, seconds: float):
    """The ranks meet before and note the time, so that a busy machine does not change their order."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == first:
        store.set("raised at", str(time.time()))
        raise ValueError("the cause")
    time.sleep(max(0.0, float(store.get("raised at")) + seconds - time.time()))
    raise KeyError("its consequence")


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_two_errors_is_named(first):
    with pytest.raises(RankFailed) as failure:
        launch(raise_one_after_the_other, 2, (first, 0.3), timeout=10)
    text = re.sub(r"line \d+", "line N", str(failure.value))
    assert failure.value.rank == first
    assert text.startswith(f"rank {first} of 2: ValueError: the cause\n")
    later = f"  rank {1 - first} later raised KeyError: 'its consequence', line N of raise_one_after_the_other"
    assert text.endswith(later), "the error that came later is not told as such"


def test_of_errors_at_the_same_time_the_lowest_ranks_is_named():
    """So that a notebook's text is the same in every run."""
    with pytest.raises(RankFailed, match="rank 0 of 2: KeyError: 'its consequence'\n") as failure:
        launch(raise_one_after_the_other, 2, (1, 0.0), timeout=10)
    assert failure.value.where[1].startswith("raised ValueError: the cause, line ")


def test_a_lost_connection_is_a_consequence(tmp_path):
    """Even where it is noticed first: the rank at the other end is slower to say why it has gone."""
    for rank, (error, when) in enumerate(
        [("RuntimeError: Connection closed by peer [::1]:1", 100.0), ("E: why", 100.9)]
    ):
        report = {"time": when, "error": error, "frames": [], "operation": "", "place": "line 7 of work"}
        (tmp_path / f"error-{rank}").write_text(json.dumps(report))
    text, first, where, _ = explain(tmp_path, 2, {}, set())
    assert (text.splitlines()[0], first) == ("rank 1 of 2: E: why", 1), "the cause is on rank 1"
    assert where[0] == "raised RuntimeError: Connection closed by peer [::1]:1, line 7 of work"


def test_who_had_returned_and_waited_in_vain_is_no_cause(tmp_path):
    """The others were to return too, and a rank that is still at work has kept them from ending."""
    report = {"time": 100.0, "error": "DistStoreError: wait timeout after 3000ms", "frames": [], "operation": ""}
    (tmp_path / "error-0").write_text(json.dumps(report | {"place": ""}))
    (tmp_path / "returned-0").touch()
    text, first, where, _ = explain(tmp_path, 2, {}, set())
    assert (first, where[0]) == (1, "had returned already"), "the rank at work is the cause"
    assert text.startswith("rank 1 of 2: not finished in time: was at work, and did not say where")


def die_and_raise(seconds: float):
    """Rank 1 dies; rank 0, which does not talk to it, raises later."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("died at", str(time.time()))
        os._exit(7)
    time.sleep(max(0.0, float(store.get("died at")) + seconds - time.time()))
    raise ValueError("a consequence")


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_death_comes_before_the_errors_it_causes(seconds):
    with pytest.raises(RankFailed, match="rank 1 of 2: died with exit code 7\n"):
        launch(die_and_raise, 2, (seconds,), timeout=10)


def test_an_error_comes_before_a_later_death():
    def work():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.set("raised at", str(time.time()))
            raise ValueError("the cause")
        time.sleep(max(0.0, float(store.get("raised at")) + 0.3 - time.time()))
        os._exit(7)

    with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: the cause\n") as failure:
        launch(work, 2, timeout=10)
    assert failure.value.where[0] == "died with exit code 7"


@pytest.mark.parametrize("leeway", [1.0, 3.0])
def test_a_rank_at_work_is_named_before_those_that_wait_for_it(leeway, monkeypatch):
    """Whether launch or a rank that had returned, after the timeout and 2 seconds, is the first to lose patience."""
    monkeypatch.setattr(launching, "LEEWAY", leeway)

    def work():
        if dist.get_rank() == 2:
            while True:
                time.sleep(0.01)
        if dist.get_rank() == 1:
            time.sleep(leeway + 0.5)  # its barrier does not time out within the launch's time
            dist.barrier()

    with pytest.raises(RankFailed, match="rank 2 of 3: not finished in time: was at line ") as failure:
        launch(work, 3, timeout=1)
    assert failure.value.where[0] == "had returned already"
    assert failure.value.where[1].startswith("was waiting in barrier, line ")
