"""One trace of all ranks: every lane is there, times are on one clock, and Perfetto can read the file."""

import contextlib
import copy
import gzip
import io
import json
import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from common.lab.launch import launch
from common.lab.profiling import chrome_trace, clock_error, events, merge, save

RANKS, LATE = 3, 0.05  # seconds


def each_is_late_once():
    """All-reduces to which one rank after the other comes late, then a backward pass inside of two ranges."""
    value, weight = torch.ones(1000), torch.ones(1000, requires_grad=True)
    dist.all_reduce(value)
    with profile() as profiler:
        for late in range(RANKS):
            if dist.get_rank() == late:
                with record_function("asleep"):
                    time.sleep(LATE)
            dist.all_reduce(value)
        with record_function("step"), record_function("backward"):
            weight.square().sum().backward()
    return chrome_trace(profiler)


@pytest.fixture(scope="module")
def traces():
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = launch(each_is_late_once, nproc=RANKS)
    assert said.getvalue() == "", "what the profiler says of itself, with a time, would be another in every run"
    return found


@pytest.fixture(scope="module")
def merged(traces):
    return merge(traces)


def shifted(traces, rank, seconds):
    """The same traces, had this rank's clock been fast by so much."""
    traces = copy.deepcopy(traces)
    traces[rank]["baseTimeNanoseconds"] += round(seconds * 1e9)
    return traces


def names(trace):
    return {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}


def test_the_file_has_what_perfetto_reads(merged, tmp_path):
    file = save(merged, tmp_path / "trace.json.gz")
    read = json.loads(gzip.decompress(file.read_bytes()))
    assert read == merged
    # https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "Trace Event Format"
    assert {event["ph"] for event in read["traceEvents"]} == {"M", "X", "s", "f"}
    for event in read["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["tid"], int)
        assert isinstance(event["pid"], int) and event["pid"] > 0
        if event["ph"] != "M":
            assert event["args"]["rank"] in range(RANKS)
            assert event["ts"] >= 0, "microseconds since the first event of any rank"
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert min(event["ts"] for event in read["traceEvents"] if event["ph"] == "X") == 0


def test_every_rank_has_its_lane_with_all_that_it_recorded(traces, merged):
    lanes = names(merged)
    assert sorted(lanes.values()) == ["rank 0", "rank 1", "rank 2"]
    threads = {(event["pid"], event["tid"]) for event in merged["traceEvents"] if event["name"] == "thread_name"}
    for lane, name in lanes.items():
        here = [event for event in merged["traceEvents"] if event["pid"] == lane and event["ph"] == "X"]
        rank = int(name.removeprefix("rank "))
        recorded = [
            (event["name"], event["dur"])
            for event in traces[rank]["traceEvents"]
            if event["ph"] == "X" and event["cat"] != "Trace"
        ]
        assert sorted(recorded) == sorted((event["name"], event["dur"]) for event in here) and len(recorded) > 10
        assert {event["args"]["rank"] for event in here} == {rank}
        assert {(lane, event["tid"]) for event in here} <= threads
        assert any("gloo" in event["name"] for event in here)


def test_arrows_stay_within_their_rank(merged):
    ends = [(event["id"], event["pid"]) for event in merged["traceEvents"] if event["ph"] in "sf"]
    lanes = dict(ends)
    assert len(set(lanes.values())) == RANKS, "arrows of several ranks have one number"
    apart = sorted({arrow for arrow, lane in ends if lanes[arrow] != lane})
    assert not apart, f"arrows with one id on several ranks: {apart[:5]}"


def test_events_are_the_ranges_nested_as_they_were(merged):
    found = events(merged, {"step": "whole step", "backward": "backward"})
    assert [name for _, name, _, _ in found] == ["whole step"] * RANKS + ["backward"] * RANKS
    for rank in range(RANKS):
        outer, inner = [(start, end) for r, _, start, end in found if r == rank]
        assert outer[0] <= inner[0] < inner[1] <= outer[1]


def test_each_all_reduce_waits_for_the_late_rank_on_the_common_clock(merged):
    calls = {rank: [] for rank in range(RANKS)}
    for rank, _, start, end in sorted(events(merged, {"gloo:all_reduce": "all-reduce"}), key=lambda event: event[2]):
        calls[rank].append((start, end))
    for late in range(RANKS):
        begun = calls[late][late][0]
        for rank in set(range(RANKS)) - {late}:
            assert begun < calls[rank][late][1], "an all-reduce ended on one rank before another had begun it"
    asleep = events(merged, {"asleep": "asleep"})
    assert sorted(rank for rank, *_ in asleep) == list(range(RANKS))
    assert all(end - start >= LATE for *_, start, end in asleep)


def all_reduces(traces):
    return events(merge(traces), {"gloo:all_reduce": "all-reduce"})


def test_clocks_that_are_apart_are_noticed(traces):
    assert clock_error(all_reduces(traces)) <= 0
    for rank in range(RANKS):
        for seconds in (1.0, -1.0):  # more than an all-reduce takes, however busy the machine
            error = clock_error(all_reduces(shifted(traces, rank, seconds)))
            assert 0 < error <= 1.0, "each rank was late once, so a clock that is fast or slow contradicts"


def test_one_call_in_which_clocks_contradict_each_other_is_enough():
    calls = {
        0: [(0.0, 1.0), (5.0, 6.0)],
        1: [(0.5, 1.0), (6.5, 7.0)],
    }  # the second ends on rank 0 before it begins on 1
    told = [(rank, "all-reduce", *times) for rank, both in calls.items() for times in both]
    for order in (told, [*told[:2], *told[:1:-1]]):
        assert clock_error(order) == 0.5, "seconds by which the clocks differ at least"


def test_a_base_of_its_own_is_no_error_of_the_clock(traces):
    other = copy.deepcopy(traces)
    other[1]["baseTimeNanoseconds"] -= 10**9
    for event in other[1]["traceEvents"]:
        if "ts" in event:
            event["ts"] += 1e6
    for moved, here in zip(all_reduces(other), all_reduces(traces), strict=True):
        shifted = "the ranks' clocks are shifted against each other"
        assert moved[:2] == here[:2], shifted
        assert moved[2:] == pytest.approx(here[2:], abs=1e-6), shifted
    assert clock_error(all_reduces(other)) <= 0


def test_an_all_reduce_that_a_rank_lacks_is_refused(traces):
    with pytest.raises(ValueError):
        clock_error(all_reduces(traces)[1:])


def test_gpus_are_lanes_beside_their_rank():
    """As CUDA's traces have it: process 0 for GPU 0, and names for GPUs that did nothing."""
    labels = [(77, "CPU"), (0, "GPU 0"), (1, "GPU 1")]
    recorded = [
        {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 5.0, "args": {"labels": label}}
        for pid, label in labels
    ]
    recorded += [
        {"ph": "X", "cat": "user_annotation", "name": "forward", "pid": 77, "tid": 77, "ts": 6.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "forward", "pid": 0, "tid": 7, "ts": 8.0, "dur": 2.0},
    ]
    trace = {"baseTimeNanoseconds": 10**18, "traceEvents": recorded}
    merged = merge([trace, trace])
    assert sorted(names(merged).values()) == ["rank 0", "rank 0, GPU 0", "rank 1", "rank 1, GPU 0"]
    assert len(names(merged)) == 4
    assert merged["baseTimeNanoseconds"] == 10**18 + 6000, "when the first event was"
    assert events(merged, {"forward": "f"}) == [(0, "f", 0.0, 1e-6), (1, "f", 0.0, 1e-6)]
    assert events(merged, {"forward": "f"}, "gpu_user_annotation") == [(0, "f", 2e-6, 4e-6), (1, "f", 2e-6, 4e-6)]
