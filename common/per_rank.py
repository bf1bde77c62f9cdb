"""What each rank of a run makes of its machine, and which rank the others wait for.

Now and then all ranks tell rank 0. Of the collectives in between, PyTorch's Flight Recorder knows when each rank has
launched which, whoever called it, Python or C++. The rank that is regularly the last one holds up the others. Messages
from one rank to another, as between stages of a pipeline, are not looked at: there it is normal to wait.
"""

import json
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from common.constants import GIB
from common.meter import peak_memory

MOST, ALL = 1000, 16_000  # collectives of which a rank reports, the newest ones; and all ranks together (20 or more)
OFTEN = 10  # after the first --log-every steps, and every so many times as many: to ask the recorder takes 40 ms
SHARE, LEAST, TIMES = 0.25, 0.02, 3  # what makes a straggler: see `straggler`
MEMORY = 1.5  # a rank that has so many times as much memory as the others is named


@dataclass
class Report:
    """What a rank tells of the steps since its last report.

    memory_bytes: the most that it has held so far (common/meter.py)
    use:          of its processor: on the CPU the cores that its process kept busy, on a GPU the share of time in which
                  it computed (None without the package pynvml)
    waiting:      the share of time in which it waited: on the CPU, that its main thread neither computed nor waited for
                  a core; that is for messages mostly, and for data and disks. On a GPU, in collectives of NCCL, if
                  TORCH_NCCL_ENABLE_TIMING=1 is set; else None
    launches:     (step, group, number of the collective in the group) -> when it was launched, in seconds since all
                  ranks left the report before together
    """

    host: str
    memory_bytes: int
    use: float | None
    waiting: float | None
    step_seconds: float
    launches: dict[tuple, float] = field(repr=False, default_factory=dict)


class PerRank:
    """Measures one rank of a run between two reports. Making it is collective, as is `report`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.warned: set[tuple] = set()  # which warnings have been given
        self.begin()

    def begin(self) -> None:
        """A window begins on all ranks at the same moment, whatever their clocks say."""
        if dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1))  # nobody leaves it before all have come
        self.began, self.wall = time.time_ns(), time.perf_counter()
        self.ends: list[int] = []  # of steps, in nanoseconds
        self.cpu, self.idle = time.process_time(), blocked()

    def step_ended(self) -> None:
        self.ends.append(time.time_ns())

    def due(self, steps: int, log_every: int) -> bool:
        """Is it time for a report, after so many steps?"""
        return steps == log_every or steps % (OFTEN * log_every) == 0

    def measure(self) -> Report:
        """What this rank tells."""
        wall = time.perf_counter() - self.wall
        trace = flight_record(self.device)
        use: float | None
        waiting: float | None
        if self.device.type == "cpu":
            use, waiting = (time.process_time() - self.cpu) / wall, (blocked() - self.idle) / wall
        else:
            use, waiting = utilization(self.device), in_collectives(trace, self.began, time.time_ns())
        steps = max(1, len(self.ends))
        host, memory = socket.gethostname(), peak_memory(self.device)
        return Report(host, memory, use, waiting, wall / steps, launches(trace, self.began, self.ends))

    def report(self) -> tuple[list[dict], list[str]]:
        """On rank 0: a row for each rank, and warnings that have not been given before; elsewhere nothing."""
        main_rank, size = dist.get_rank() == 0, dist.get_world_size()
        mine = self.measure()
        everybody = [mine] * size
        if size > 1:
            dist.gather_object(mine, everybody if main_rank else None)
        self.begin()
        if not main_rank:
            return [], []
        found = {**straggler(everybody), **memory_outliers(everybody)}
        warnings = [text for who, text in found.items() if who not in self.warned]
        self.warned |= {*found}
        return [row(report) for report in everybody], warnings


def row(report: Report) -> dict:
    """Return the line of a rank as the metrics have it."""
    waiting, use = (None if value is None else round(value, 4) for value in (report.waiting, report.use))
    return {"host": report.host, "memory_bytes": report.memory_bytes, "use": use, "waiting": waiting}


def blocked() -> float:
    """Seconds for which the main thread has neither computed nor waited for a core, counted from some moment."""
    queued = 0.0
    try:
        with open(f"/proc/self/task/{threading.main_thread().native_id}/schedstat") as file:
            queued = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # not Linux, or a kernel without it: then a core that was taken counts as waiting
        pass
    return time.perf_counter() - time.thread_time() - queued


def utilization(device: torch.device) -> float | None:
    """The share of the last second or so in which a GPU computed."""
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):
        return None


def flight_record(device: torch.device) -> dict:
    """What the Flight Recorder has: {"entries": [...], "pg_config": {...}}."""
    module = torch._C._distributed_c10d
    name = "_dump_fr_trace_json" if device.type == "cpu" else "_dump_nccl_trace_json"
    dump = getattr(module, name, None)  # there is no public way to ask, and other builds of torch may lack this one
    return json.loads(dump(True, False)) if dump else {}


def in_collectives(trace: dict, began: int, now: int) -> float | None:
    """The share of time that NCCL's collectives took since `began`, or since the oldest one that is still known."""
    entries = [entry for entry in recent(trace, began) if "duration_ms" in entry]
    if not entries:
        return None
    return sum(entry["duration_ms"] for entry in entries) * 1e6 / (now - entries[0]["time_created_ns"])


def recent(trace: dict, began: int) -> list[dict]:
    """Collectives that were launched since `began`, in nanoseconds since the epoch."""
    entries = trace.get("entries", [])
    most = min(MOST, max(20, ALL // dist.get_world_size())) if dist.is_initialized() else MOST
    return [entry for entry in entries if not entry["is_p2p"] and entry["time_created_ns"] >= began][-most:]


def launches(trace: dict, began: int, ends: list[int]) -> dict[tuple, float]:
    """(step, group, number of the collective) -> seconds after `began`, of steps that ended at `ends`."""
    found = {}
    for entry in recent(trace, began):
        created = entry["time_created_ns"]
        step = sum(end < created for end in ends)
        if step < len(ends):
            found[step, tuple(entry["process_group"]), entry["collective_seq_id"]] = (created - began) / 1e9
    return found


def lateness(reports: list[Report]) -> list[float]:
    """For each rank by how many seconds it was behind the others at the worst collective of a step; of all steps the
    median. Behind the others: later than half of them."""
    by_step: list[dict[int, float]] = [{} for _ in reports]
    keys: dict[tuple, list[int]] = {}
    for rank, report in enumerate(reports):
        for key in report.launches:
            keys.setdefault(key, []).append(rank)
    for key, ranks in keys.items():
        times = [reports[rank].launches[key] for rank in ranks]
        for rank, when, others in zip(ranks, times, medians_of_others(times), strict=True):
            by_step[rank][key[0]] = max(by_step[rank].get(key[0], 0.0), when - others)
    return [statistics.median(steps.values()) if len(steps) >= 3 else 0.0 for steps in by_step]


def medians_of_others(values: list[float]) -> list[float]:
    """For each value the median of all others, by one sort, since there may be thousands; its own where it is alone."""
    if len(values) == 1:
        return list(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # the middle of what is left, which may be two
    for place, index in enumerate(order):
        middle = [values[order[k if k < place else k + 1]] for k in (low, high)]
        found[index] = sum(middle) / 2
    return found


def straggler(reports: list[Report]) -> dict[tuple, str]:
    """The rank for which the others wait in at least half of the steps: for a quarter of the step and 20 ms or more,
    and three times as long as for any other rank."""
    late = lateness(reports)
    worst = max(range(len(late)), key=late.__getitem__)
    others = [seconds for rank, seconds in enumerate(late) if rank != worst]
    step = statistics.median(report.step_seconds for report in reports)
    if not others or late[worst] < max(LEAST, SHARE * step, TIMES * max(others)):
        return {}
    host = reports[worst].host
    return {
        ("late", worst): f"warning: rank {worst} on {host} is a straggler: in a step of {1000 * step:.0f} ms the "
        f"others wait {1000 * late[worst]:.0f} ms for it; see what else runs there, and what it does that they don't"
    }


def memory_outliers(reports: list[Report]) -> dict[tuple, str]:
    """Ranks with much more memory than half of the others."""
    found = {}
    usual = medians_of_others([report.memory_bytes for report in reports])
    for rank, (report, others) in enumerate(zip(reports, usual, strict=True)):
        if report.memory_bytes > MEMORY * others + 2**28:
            found["memory", rank] = (
                f"warning: rank {rank} on {report.host} has held {report.memory_bytes / GIB:.1f} GiB, and the others "
                f"{others / GIB:.1f} GiB"
            )
    return found
