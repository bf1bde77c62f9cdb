"""What each rank makes of its machine; which rank the others wait for, by name."""

import io
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, configure, metrics, train

from common import per_rank, runs
from common.lab.launch import launch
from common.per_rank import (
    PerRank,
    Report,
    blocked,
    in_collectives,
    lateness,
    launches,
    medians_of_others,
    memory_outliers,
    recent,
    row,
    straggler,
    utilization,
)

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
    assert lateness(reports(on_time, late)) == pytest.approx([0, 0.03]), "of two ranks: than the other one"
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

    said = found(0, 0.03, 0)
    assert {*said} == {("late", 1)}
    assert not [word for word in ("rank 1 on node1", "100 ms", "30 ms") if word not in said["late", 1]], said
    uneven = reports(*[{(s, "g", 1): s + seconds for s in range(4)} for seconds in (0, 0.03, 0)])
    uneven[0].step_seconds = 0.5
    assert "100 ms" in straggler(uneven)["late", 1], "a step of most ranks"
    assert not found(0, 0.03, 0, step_seconds=0.2), "less than a quarter of a step"
    assert not found(0, 0.01, 0, step_seconds=0.02), "a few milliseconds"
    assert not found(0, 0.03, 0.02, 0), "two ranks are late"
    assert not straggler(reports({})), "one rank alone"


def test_much_more_memory_than_the_others_is_named():
    ranks = reports({}, {}, {}, memory=GIB)
    assert not memory_outliers(ranks)
    ranks[2].memory_bytes = 2 * GIB
    said = memory_outliers(ranks)
    assert {*said} == {("memory", 2)}
    assert not [word for word in ("rank 2 on node2", "2.0 GiB", "1.0 GiB") if word not in said["memory", 2]], said
    assert not memory_outliers(ranks[2:])
    for megabytes in ((1024, 1024, 1400), (60, 60, 200)):  # not half as much again; little in any case
        for report, number in zip(ranks, megabytes, strict=True):
            report.memory_bytes = number * 2**20
        assert not memory_outliers(ranks), f"MiB of the ranks: {megabytes}"
    ranks[1].memory_bytes, ranks[2].memory_bytes = GIB, 2 * GIB
    assert {*memory_outliers(ranks[1:])} == {("memory", 1)}, "of two ranks too: 2 GiB beside 1 GiB of the other"


def test_time_in_collectives_of_nccl():
    """As its Flight Recorder says it with TORCH_NCCL_ENABLE_TIMING=1; without, nothing is known."""
    entries = [entry(1_000_000, 1, duration_ms=99.0), entry(2_000_000, 2, duration_ms=1.5), entry(3_000_000, 3)]
    timed = {"entries": entries}
    assert in_collectives(timed, 1_500_000, 5_000_000) == pytest.approx(0.5)
    assert in_collectives({"entries": [entry(3, 3)]}, 2, 5) is None and in_collectives({}, 2, 5) is None


def test_reports_are_made_now_and_then():
    assert [step for step in range(1, 61) if PerRank.due(None, step, 3)] == [3, 30, 60], "with --log-every 3"


def test_a_warning_is_given_once_and_a_report_is_of_all_ranks(monkeypatch):
    begun, everybody = [], reports({}, {}, {})
    monkeypatch.setattr(PerRank, "begin", lambda self: begun.append(self))
    monkeypatch.setattr(PerRank, "measure", lambda self: everybody[0])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "gather_object", lambda mine, found: found.__setitem__(slice(3), everybody))
    watch, told = PerRank(torch.device("cpu")), []
    for rank, gigabytes in ((2, 4), (2, 4), (2, 1), (2, 4), (1, 4)):
        everybody[rank].memory_bytes = gigabytes * GIB
        rows, warnings = watch.report()
        assert [one["host"] for one in rows] == ["node0", "node1", "node2"]
        told.append([word for text in warnings for word in ("rank 1", "rank 2") if word in text])
        everybody[2].memory_bytes = GIB
    assert told == [["rank 2"], [], [], [], ["rank 1"]], "each rank once"
    assert len(begun) == 6, "each report begins a window of time"


def test_what_a_rank_measures_is_for_a_step_and_for_a_second(monkeypatch):
    monkeypatch.setattr(per_rank, "flight_record", lambda device: {})
    watch = SimpleNamespace(device=torch.device("cpu"), began=0, ends=[])
    for _ in range(3):
        PerRank.step_ended(watch)
    watch.wall, watch.cpu, watch.idle = time.perf_counter() - 6000, time.process_time() - 3000, blocked() - 1500
    report = PerRank.measure(watch)
    assert report.step_seconds == pytest.approx(2000, rel=0.01), "6000 seconds for three steps"
    assert (report.use, report.waiting) == pytest.approx((0.5, 0.25), rel=0.05), "cores in use, and time waited"
    assert row(Report("node0", 7, 0.123456, None, 1.0)) == {
        "host": "node0", "memory_bytes": 7, "use": 0.1235, "waiting": None
    }  # fmt: skip


def test_what_a_rank_on_a_gpu_measures(monkeypatch):
    """The share of time in which it computed, and that in NCCL's collectives since the window began."""
    trace = {"entries": [entry(1_000, 4, duration_ms=99.0), entry(2_000_000, 5, duration_ms=1.5)]}
    monkeypatch.setattr(per_rank, "flight_record", lambda device: trace if device.type == "cuda" else {})
    monkeypatch.setattr(per_rank, "utilization", lambda device: 0.75)
    monkeypatch.setattr(per_rank, "peak_memory", lambda device: 3 * GIB)
    monkeypatch.setattr(per_rank.socket, "gethostname", lambda: "node7")
    clock = SimpleNamespace(perf_counter=lambda: 16.0, time_ns=lambda: 8_000_000, perf_counter_ns=lambda: 16e9)
    monkeypatch.setattr(per_rank, "time", clock)
    watch = SimpleNamespace(device=torch.device("cuda"), wall=10.0, began=1_500_000, ends=[3_000_000, 6_000_000])
    assert PerRank.measure(watch) == Report(
        "node7", 3 * GIB, use=0.75, waiting=0.25, step_seconds=3.0, launches={(0, ("0", "x"), 5): 5e-4}
    ), "memory, use, share of time in collectives, seconds of a step, and launches of a rank on a GPU"


def test_waiting_is_what_is_neither_computing_nor_waiting_for_a_core(monkeypatch):
    """Of ten seconds the thread computed three and waited two for a core (the second number of schedstat, in ns)."""
    monkeypatch.setattr(per_rank, "time", SimpleNamespace(perf_counter=lambda: 10.0, thread_time=lambda: 3.0))
    monkeypatch.setattr(per_rank, "open", lambda path: io.StringIO("3000000000 2000000000 7\n"), raising=False)
    assert blocked() == 5.0
    monkeypatch.setattr(per_rank, "open", lambda path: io.StringIO(""), raising=False)
    assert blocked() == 7.0, "where the system does not say it"


def late(config) -> None:
    """Train; by their clocks, which are others than the machine's, rank 1 comes late to a collective of each step."""
    measure = PerRank.measure

    def measured(watch):
        report, behind = measure(watch), 0.4 * dist.get_rank()
        report.step_seconds, report.launches = 1.0, {(step, ("0", "x"), 1): step + behind for step in range(6)}
        return report

    PerRank.measure = measured
    train([config])


def test_a_late_rank_is_named_and_the_ranks_are_in_the_metrics(tmp_path, capfd):
    config = configure("--log-every 6", 2, **SMALL, strategy="ddp", steps=7, run_dir=tmp_path / "run")
    launch(late, 2, (config,), timeout=120)
    said = capfd.readouterr().out
    assert "straggler" in said and "rank 1 on " in said and "rank 0 on" not in said
    with_rows = [record for record in metrics(tmp_path / "run") if "ranks" in record]
    assert [record["step"] for record in with_rows] == [6]
    for row_of_rank in with_rows[0]["ranks"]:
        assert row_of_rank["use"] > 0 and 50e6 < row_of_rank["memory_bytes"] < 50e9
    runs.main(["ranks", str(tmp_path / "run")])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "host", "memory_bytes", "use", "waiting"] and lines[2].startswith("1 ")


def test_of_many_collectives_the_newest_are_told():
    trace = {"entries": [entry(number, number) for number in range(1, 1503)]}
    found = [one["collective_seq_id"] for one in recent(trace, 0)]
    assert (found[0], found[-1], len(found)) == (503, 1502, 1000), "the newest thousand"


def test_use_of_a_gpu_is_a_share(monkeypatch):
    def without(device):
        raise ModuleNotFoundError("pynvml")

    def no_driver(device):
        raise RuntimeError("Driver Not Loaded")

    for ask, expected in ((lambda device: 87, 0.87), (without, None), (no_driver, None)):
        monkeypatch.setattr(torch.cuda, "utilization", ask)
        assert utilization(torch.device("cuda", 0)) == expected, "a share of the time, and not a percentage"


def test_the_median_of_all_others():
    for values in ([3.0, 1.0], [1.0, 2.0, 2.0, 9.0], [5.0, 1.0, 4.0, 2.0, 3.0], [0.5] * 6):
        others = [statistics.median(values[:n] + values[n + 1 :]) for n in range(len(values))]
        assert medians_of_others(values) == pytest.approx(others)
    assert medians_of_others([7.0]) == [7.0]
