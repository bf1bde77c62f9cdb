"""What each rank makes of its machine; which rank the others wait for, by name."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, configure, metrics, train

from common import runs
from common.lab.launch import launch
from common.per_rank import Report, hoarders, in_collectives, lateness, launches, recent, straggler, utilization

GIB = 2**30


def reports(*ranks: dict, step_seconds=0.1, memory=GIB) -> list[Report]:
    return [Report(f"node{n}", memory, 1.0, 0.5, step_seconds, times) for n, times in enumerate(ranks)]


def entry(created: int, number: int, **more) -> dict:
    about = {"process_group": ["0", "x"], "is_p2p": False}
    return {"time_created_ns": created, "collective_seq_id": number, **about, **more}


def test_launches_are_counted_from_where_all_ranks_began():
    """Whatever a rank's clock says; messages to one rank, and what came before or after the steps, are left out."""
    for clock in (0, 10**18):
        trace = {"entries": [entry(clock + ns, ns // 10) for ns in (5, 20, 30, 50, 90)]}
        trace["entries"].append(entry(clock + 60, 7, is_p2p=True))
        found = launches(trace, clock + 10, [clock + 40, clock + 80])
        assert found == {
            (0, ("0", "x"), 2): pytest.approx(1e-8),
            (0, ("0", "x"), 3): pytest.approx(2e-8),
            (1, ("0", "x"), 5): pytest.approx(4e-8),
        }


def test_lateness_is_that_of_the_worst_collective_of_a_step_in_half_of_the_steps():
    steps = range(5)
    on_time = {(s, "g", n): s + 0.1 * n for s in steps for n in (1, 2)}
    late = {key: when + (0.03 if key[2] == 2 else 0.01) for key, when in on_time.items()}
    once = {key: when + (9.0 if key[0] == 3 else 0.0) for key, when in on_time.items()}
    assert lateness(reports(on_time, late, on_time)) == pytest.approx([0, 0.03, 0])
    assert lateness(reports(on_time, once, on_time)) == [0, 0, 0], "once is no habit"
    few = {key: when for key, when in late.items() if key[0] < 2}
    assert lateness(reports(on_time, few)) == [0, 0], "two steps are no habit"
    alone = {(s, f"group {n}", 1): float(s) for s, n in zip(steps, steps, strict=True)}
    assert lateness(reports(alone, on_time)) == [0, 0], "collectives that other ranks do not take part in"


def test_a_straggler_is_one_rank_by_much():
    def found(*late, step_seconds=0.1):
        ranks = [{(s, "g", 1): s + seconds for s in range(4)} for seconds in late]
        return straggler(reports(*ranks, step_seconds=step_seconds))

    assert found(0, 0.03, 0) == {
        ("late", 1): "warning: rank 1 on node1 is a straggler: in a step of 100 ms the others wait 30 ms for it; see "
        "what else runs there, and what it does that they don't"
    }
    assert not found(0, 0.03, 0, step_seconds=0.2), "less than a quarter of a step"
    assert not found(0, 0.01, 0, step_seconds=0.02), "a few milliseconds"
    assert not found(0, 0.03, 0.02, 0), "two ranks are late"
    assert not straggler(reports({})), "one rank alone"


def test_much_more_memory_than_the_others_is_named():
    ranks = reports({}, {}, {}, memory=GIB)
    assert not hoarders(ranks)
    ranks[2].memory_bytes = 2 * GIB
    assert hoarders(ranks) == {("memory", 2): "warning: rank 2 on node2 has held 2.0 GiB, and the others 1.0 GiB"}
    assert not hoarders(ranks[2:])
    assert {*hoarders(ranks[1:])} == {("memory", 1)}, "of two ranks too: 2 GiB beside 1 GiB of the other"


def test_time_in_collectives_of_nccl():
    """As its Flight Recorder says it with TORCH_NCCL_ENABLE_TIMING=1; without, nothing is known."""
    entries = [entry(1_000_000, 1, duration_ms=99.0), entry(2_000_000, 2, duration_ms=1.5), entry(3_000_000, 3)]
    timed = {"entries": entries}
    assert in_collectives(timed, 2_000_000, 5_000_000) == pytest.approx(0.5)
    assert in_collectives({"entries": [entry(3, 3)]}, 2, 5) is None and in_collectives({}, 2, 5) is None


def slowed(config) -> None:
    """Train, with rank 1 asleep for a while in each step."""
    step = config.strategy_class.step

    def late(strategy, micro_batches):
        time.sleep(0.12 * dist.get_rank())
        return step(strategy, micro_batches)

    config.strategy_class.step = late
    train([config])


def busy(config) -> None:
    """Train, with rank 1 computing something else in each step."""
    step = config.strategy_class.step

    def more(strategy, micro_batches):
        end = time.thread_time() + 0.05 * dist.get_rank()
        while time.thread_time() < end:
            torch.ones(1000).sum()
        return step(strategy, micro_batches)

    config.strategy_class.step = more
    train([config])


def test_a_slowed_rank_is_named_and_the_ranks_are_in_the_metrics(tmp_path, capfd):
    for work in (slowed, busy):
        config = configure("--log-every 6", 2, **SMALL, strategy="ddp", steps=7, run_dir=tmp_path / work.__name__)
        launch(work, 2, (config,), timeout=120)
        said = capfd.readouterr().out
        if work is slowed:
            assert "warning: rank 1 on " in said and "is a straggler: in a step of" in said
            assert "rank 0 on" not in said
    with_rows = [record for record in metrics(tmp_path / "busy") if "ranks" in record]
    assert [record["step"] for record in with_rows] == [6]
    one, other = with_rows[0]["ranks"]
    assert one["waiting"] > other["waiting"] and one["use"] < other["use"], "rank 0 waits while rank 1 computes"
    assert 0 < one["waiting"] < 1 and one["use"] > 0
    assert 50e6 < one["memory_bytes"] < 50e9
    runs.main(["ranks", str(tmp_path / "busy")])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "host", "memory_bytes", "use", "waiting"] and lines[2].startswith("1 ")


def test_of_many_collectives_the_newest_are_told():
    trace = {"entries": [entry(number, number) for number in range(1, 1503)]}
    found = [one["collective_seq_id"] for one in recent(trace, 0)]
    assert (found[0], found[-1], len(found)) == (503, 1502, 1000), "the newest thousand"


def test_use_of_a_gpu_is_a_share(monkeypatch):
    def without(device):
        raise ModuleNotFoundError("pynvml")

    for ask, expected in ((lambda device: 87, 0.87), (without, None)):
        monkeypatch.setattr(torch.cuda, "utilization", ask)
        assert utilization(torch.device("cuda", 0)) == expected, "a share of the time, and not a percentage"
