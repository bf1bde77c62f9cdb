"""Traces of several ranks, recorded by torch.profiler, on one time axis: for Perfetto and for `plotting.timeline`.

    with torch.profiler.profile() as profiler:  # on every rank
        step()
    trace = chrome_trace(profiler)

    merged = merge(traces)  # those of all ranks, in rank order
    save(merged, "trace.json.gz")  # open it in https://ui.perfetto.dev
    timeline(events(merged, {"forward": "forward", "gloo:all_reduce": "all-reduce"}))

In each rank's file a time is microseconds since `baseTimeNanoseconds`, and both together are the system's clock.
So the ranks of one node share one clock, and the traces need no alignment but that of their bases. Ranks of
several nodes are as far apart as the nodes' clocks are, a millisecond or so under NTP: `clock_error` says whether
the collectives in a trace contradict its clocks.
"""

import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path


def chrome_trace(profiler) -> dict:
    """What this rank's torch.profiler.profile recorded, in Chrome's JSON trace format."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def merge(traces: list[dict]) -> dict:
    """One trace from one of each rank, in rank order: for each rank a process "rank r" with its threads, and one
    "rank r, GPU n" for each GPU that it used.

    Times are microseconds since the first event of any rank; `baseTimeNanoseconds` says when that was. Each
    event's `args` have its `rank`.
    """
    base = traces[0]["baseTimeNanoseconds"]
    lanes: dict[tuple[int, int], int] = {}  # (rank, process or GPU in that rank's trace) -> process in the merged trace
    metadata, timed = [], []
    for rank, trace in enumerate(traces):
        shift = (trace["baseTimeNanoseconds"] - base) / 1e3
        for event in trace["traceEvents"]:
            # The profiler's notes about itself stand in processes that have names for numbers.
            if event["ph"] == "M" or not isinstance(event["pid"], int):
                continue
            # Perfetto treats process 0 as Linux's idle process (google/perfetto#394), so count from 1.
            lane = lanes.setdefault((rank, event["pid"]), len(lanes) + 1)
            event = event | {"pid": lane, "ts": event["ts"] + shift, "args": event.get("args", {}) | {"rank": rank}}
            if "id" in event:  # of an arrow from one event to another: unique in its own trace
                event["id"] = event["id"] * len(traces) + rank
            timed.append(event)
        for event in trace["traceEvents"]:
            if event["ph"] != "M" or (rank, event["pid"]) not in lanes:
                continue
            lane = lanes[rank, event["pid"]]
            if event["name"] == "process_labels":
                label = event["args"]["labels"]
                name = f"rank {rank}" if label == "CPU" else f"rank {rank}, {label}"
                metadata.append(event | {"name": "process_name", "pid": lane, "ts": 0, "args": {"name": name}})
            elif event["name"] == "process_sort_index":
                metadata.append(event | {"pid": lane, "ts": 0, "args": {"sort_index": lane}})
            elif event["name"].startswith("thread_"):
                metadata.append(event | {"pid": lane, "ts": 0})
    origin = min(event["ts"] for event in timed)
    for event in timed:
        event["ts"] = round(event["ts"] - origin, 3)
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base + round(origin * 1e3),
        "traceEvents": metadata + sorted(timed, key=lambda event: event["ts"]),
    }


def save(trace: dict, path) -> Path:
    """Write a trace as gzip-compressed JSON, which Perfetto reads as it is; `path` should end in .json.gz."""
    path = Path(path)
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def events(trace: dict, names: dict[str, str], category: str = "user_annotation") -> list[tuple]:
    """Tuples (rank, name, start, end) from a merged trace for `plotting.timeline`; seconds from its first event.

    names:    name in the trace -> name to show. record_function gives ranges their name; collectives have
              "gloo:all_reduce", "nccl:all_reduce" and so on. The events come in the order of this dictionary,
              so what is drawn later lies on top.
    category: "user_annotation" is when the CPU did it; "gpu_user_annotation" is when a GPU did it
    """
    return [
        (event["args"]["rank"], shown, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for name, shown in names.items()
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["name"] == name and event.get("cat") == category
    ]


def clock_error(collectives: list[tuple]) -> float:
    """By how many seconds the clocks of some ranks must differ at least, judged by all-reduces or barriers.

    No rank can end such a collective before every rank has begun it. Where a trace says that one did, its clocks
    are wrong by that much; zero or less is no contradiction. `collectives` are events of one kind, as from
    `events`, that follow one another on each rank: the n-th of every rank are taken for the same call.
    """
    by_rank = defaultdict(list)
    for rank, _, start, end in sorted(collectives, key=lambda event: event[2]):
        by_rank[rank].append((start, end))
    calls = zip(*by_rank.values(), strict=True)
    return max(max(start for start, _ in call) - min(end for _, end in call) for call in calls)
