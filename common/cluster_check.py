"""Is this cluster ready for a long run? Start it as you will start the training, on the same nodes:

    torchrun --nproc_per_node=gpu --nnodes=2 ... -m common.cluster_check

Rank 0 prints a page, and what to look at stands at its end. The exit code is 0 if there is nothing to look at, 1 if
there is, 2 where the ranks could not even meet. It compares ranks with each other, hosts with each other and links
with links of their kind, so it needs no figures of what the hardware should reach.
"""

import argparse
import contextlib
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import installed
from common.errors import Parser, UserError, into_report, one_line_errors

# ruff: noqa: E402  wrong options are refused before PyTorch is imported, which takes seconds


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m common.cluster_check", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--megabytes", type=int, default=8, help="size of a large message (default: 8)")
    options = parser.parse_args(argv)
    if options.megabytes < 1:
        raise UserError(f"--megabytes must be at least 1, got {options.megabytes}")
    return options


if __name__ == "__main__":
    installed.at_start()  # first: without the packages, one line and not a traceback
    with one_line_errors():
        options_of(None)

import torch
import torch.distributed as dist

from common.meter import BUSY, busy
from common.ranks import Ranks, process_group

SLOW = 2.0  # a link that takes this many times as long as the median link of its kind is slow
STRAGGLER = 1.25  # the same of a rank's matrix products
CLOCK = 0.5  # seconds between two clocks from which on logs of two hosts are hard to compare
PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "UCX_", "FI_", "PYTORCH_", "MASTER_")
OWN = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")  # may be set below


@dataclass(frozen=True)
class Rank:
    """What a rank knows of itself.

    clock:  seconds by which its clock is ahead of rank 0's, and half of the time that asking took: no more is known
    flops:  floating-point operations per second of its matrix products
    busy:   share of its host's processor time that others took while all ranks waited
    """

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    variables: dict[str, str]
    clock: tuple[float, float] = (0.0, 0.0)
    flops: float = 0.0
    busy: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Link:
    """Two ranks that exchanged messages: seconds that a small one is under way, and bytes per second of a large one."""

    a: int
    b: int
    latency: float
    bandwidth: float


def check(ranks: Ranks, megabytes: int = 8) -> tuple[list[str], list[str]] | None:
    """Measure, and compare on rank 0: the lines of the page, and what there is to look at. None on other ranks."""
    device = ranks.device
    clock = compare_clocks(ranks)
    dist.barrier()
    others = busy()  # every rank is here, and waits
    dist.barrier()
    about = hostname(), device_name(device), versions(), variables()
    mine = Rank(ranks.rank, *about, clock, multiply(ranks), others)
    links = measure_links(ranks, megabytes * 2**20)
    bus = all_reduce(ranks, megabytes * 2**20)
    everybody: list = [None] * ranks.size
    dist.all_gather_object(everybody, (mine, links))
    if ranks.rank != 0:
        return None
    found = [rank for rank, _ in everybody]
    return report(found, [link for _, its in everybody for link in its], bus, megabytes, dist.get_backend())


# --- measuring ------------------------------------------------------------------------------------------------


def hostname() -> str:
    return socket.gethostname()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def variables() -> dict[str, str]:
    """The variables of the environment that change what PyTorch and its libraries do."""
    return {key: value for key, value in os.environ.items() if key.startswith(PREFIXES) and key not in OWN}


def compare_clocks(ranks: Ranks, rounds: int = 10) -> tuple[float, float]:
    """How far this rank's clock is ahead of rank 0's, and the uncertainty, in seconds: as NTP does it (RFC 5905,
    section 8), the answer that took the shortest way is the one that counts."""
    stamp, best = torch.zeros((), dtype=torch.float64), (0.0, float("inf"))
    for other in range(1, ranks.size):
        for _ in range(rounds):
            if ranks.rank == other:
                begin = time.time()
                dist.send(stamp, 0)
                dist.recv(stamp, 0)
                half = (time.time() - begin) / 2
                if half < best[1]:
                    best = begin + half - stamp.item(), half
            elif ranks.rank == 0:
                dist.recv(stamp, other)
                dist.send(torch.tensor(time.time(), dtype=torch.float64), other)
    return (0.0, 0.0) if ranks.rank == 0 else best


def multiply(ranks: Ranks, rounds: int = 20) -> float:
    """Operations per second of this rank's best matrix product of `rounds`; all ranks compute at the same time."""
    size, dtype = (8192, torch.bfloat16) if ranks.device.type == "cuda" else (384, torch.float32)
    matrix, best = torch.ones(size, size, device=ranks.device, dtype=dtype), float("inf")
    for _ in range(rounds):
        synchronize(ranks.device)
        begin = time.perf_counter()
        matrix @ matrix
        synchronize(ranks.device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounds_of(size: int) -> list[list[tuple[int, int]]]:
    """All pairs of `size` ranks in rounds in which nobody plays twice: the circle method of tournaments."""
    players = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if None not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def measure_links(ranks: Ranks, size: int) -> list[Link]:
    """The links that this rank is the lower end of. The pairs of a round measure at the same time, and those of a node
    share its adapters, as they do in training."""
    small, large = (torch.zeros(count, dtype=torch.uint8, device=ranks.device) for count in (1, size))
    links = []
    for pairs in rounds_of(ranks.size):
        dist.barrier()
        for a, b in pairs:
            if ranks.rank in (a, b):
                other = a + b - ranks.rank
                latency, seconds = trip(small, other, ranks.rank == a, 200), trip(large, other, ranks.rank == a, 4)
                seconds -= min(latency, seconds / 2)  # where it's mostly latency, little is known of the bandwidth
                if ranks.rank == a:
                    links.append(Link(a, b, latency, size / seconds))
    return links


def trip(message: torch.Tensor, other: int, begins: bool, times: int) -> float:
    """Seconds that `message` is under way: half of the quickest of `times` ways there and back, of which one of the two
    ranks begins each.

    gloo sends a message when it knows that the other rank waits for it, and that, too, is told over the link. So each
    is waited for before the other rank can send it. NCCL needs no such notice, and on its stream this would hang.
    """
    early, best = message.device.type == "cpu", float("inf")
    received = torch.empty_like(message)
    coming = dist.irecv(received, other) if early and not begins else None
    for number in range(times):
        if early and begins:
            coming = dist.irecv(received, other)
        synchronize(message.device)
        begin = time.perf_counter()
        if begins:
            dist.send(message, other)
        coming.wait() if coming else dist.recv(received, other)
        synchronize(message.device)
        best = min(best, time.perf_counter() - begin)
        if not begins:
            coming = dist.irecv(received, other) if early and number + 1 < times else None
            dist.send(message, other)
    return best / 2


def all_reduce(ranks: Ranks, size: int) -> float:
    """Bus bandwidth in bytes per second of an all-reduce of `size` bytes over all ranks: what each link would carry in
    a ring (NCCL tests, doc/PERFORMANCE.md)."""
    data, best = torch.zeros(size // 4, device=ranks.device), float("inf")
    for _ in range(5):
        dist.barrier()
        synchronize(ranks.device)
        begin = time.perf_counter()
        dist.all_reduce(data)
        synchronize(ranks.device)
        best = min(best, time.perf_counter() - begin)
    return 2 * (ranks.size - 1) / ranks.size * size / best


# --- comparing ------------------------------------------------------------------------------------------------


def counted(things: list, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def report(
    ranks: list[Rank], links: list[Link], bus: float, megabytes: int, backend: str
) -> tuple[list[str], list[str]]:
    """The lines of the page, and what there is to look at."""
    hosts = sorted({rank.host for rank in ranks})
    devices = ", ".join(sorted({rank.device for rank in ranks}))
    lines = [f"{counted(ranks, 'rank')} on {counted(hosts, 'host')}, {backend}, {devices}"]
    wrong = []

    for title, pick in (("versions", lambda r: r.versions), ("environment", lambda r: r.variables)):
        differ = differences(ranks, pick)
        first = pick(ranks[0])
        named = ", ".join(f"{key} {value}" for key, value in first.items())
        same = named if title == "versions" else f"{len(first)} variables"
        lines.append(f"{title:16}" + (f"the same on all ranks: {same}" if not differ else "different"))
        wrong += differ

    far = max(ranks, key=lambda rank: abs(rank.clock[0]) - rank.clock[1])
    lines.append(f"{'clocks':16}at most {max(abs(r.clock[0]) for r in ranks) * 1000:.1f} ms from rank 0's")
    if abs(far.clock[0]) - far.clock[1] > CLOCK:
        wrong.append(f"the clock of {far} is {far.clock[0]:+.1f} s from rank 0's: logs cannot be compared; run NTP")

    usual = statistics.median(rank.flops for rank in ranks)
    least, most = (f(rank.flops for rank in ranks) for f in (min, max))
    lines.append(f"{'matrix products':16}{least / 1e9:,.0f} to {most / 1e9:,.0f} GFLOP/s per rank")
    for rank in ranks:
        if rank.flops * STRAGGLER < usual:
            share = f"{rank.flops / 1e9:,.0f} GFLOP/s, and the median is {usual / 1e9:,.0f}"
            wrong.append(f"{rank} is a straggler: {share}; is something else running there, or is it throttled?")

    for kind, apart in (("within a host", False), ("between hosts", True)):
        its = [link for link in links if (ranks[link.a].host != ranks[link.b].host) == apart]
        if its:
            lines.append(f"{'links':16}{kind}: {summary(its)}")
            wrong += slow_links(ranks, its)
    loads = {rank.host: rank.busy for rank in ranks if rank.busy > BUSY}
    if loads:
        who = ", ".join(f"{host} ({share:.0%} of its cores)" for host, share in sorted(loads.items()))
        lines.append(f"{'note':16}something else is running on {who}: what is measured here is slower than it is")
    if len(ranks) > 1:
        lines.append(f"{'all-reduce':16}of {megabytes} MiB over all ranks: {rate(bus)} bus bandwidth")
    return lines, wrong


def differences(ranks: list[Rank], pick) -> list[str]:
    """A line for each version or variable that some ranks have otherwise than most."""
    lines = []
    for key in sorted({key for rank in ranks for key in pick(rank)}):
        values = [pick(rank).get(key, "(not set)") for rank in ranks]
        usual = statistics.mode(values)
        others = [f"{value} on {rank}" for rank, value in zip(ranks, values, strict=True) if value != usual]
        if others:
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            lines.append(f"{key} is {usual} on most ranks, but {', '.join(others[:4])}{more}: make them equal")
    return lines


def summary(links: list[Link]) -> str:
    worst, best = (f(link.bandwidth for link in links) for f in (min, max))
    latencies = [1e6 * link.latency for link in links]
    took = f"{min(latencies):,.0f} to {max(latencies):,.0f} µs"
    return f"{len(links)} pairs, {took} one way, {rate(worst)} to {rate(best)}"


def slow_links(ranks: list[Rank], links: list[Link]) -> list[str]:
    """Whose links are slow, against the median of `links`: a host, a rank, or two ranks."""
    bandwidth, latency = (statistics.median(map(pick, links)) for pick in (speed, delay))
    slow = {link for link in links if link.bandwidth * SLOW < bandwidth or link.latency > SLOW * latency + 1e-4}
    lines = []
    for what, name in (("all links of host", lambda rank: rank.host), ("all links of", str)):
        for end in sorted({name(rank) for rank in ranks}):
            its = [link for link in links if end in (name(ranks[link.a]), name(ranks[link.b]))]
            # With fewer than three links, the fault may as well be at their other ends.
            if len(its) >= 3 and len(its) < len(links) and slow.issuperset(its):
                lines.append(f"{what} {end} are slow: {summary(its)}; {usually(bandwidth, latency)}")
                slow -= set(its)
    for link in sorted(slow, key=speed):
        ends = f"{ranks[link.a]} and {ranks[link.b]}"
        lines.append(f"the link between {ends} is slow: {summary([link])}; {usually(bandwidth, latency)}")
    return lines


def rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.2f} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.0f} MB/s"


def speed(link: Link) -> float:
    return link.bandwidth


def delay(link: Link) -> float:
    return link.latency


def usually(bandwidth: float, latency: float) -> str:
    return f"the median of such links is {1e6 * latency:,.0f} µs and {rate(bandwidth)}"


def network_of(log: str) -> tuple[list[str], list[str]]:
    """What NCCL's own log says of the network that it uses: lines for the page, and what there is to look at."""
    found = sorted(set(re.findall(r"NCCL INFO (NET/\S+ : Using .*|Using network .*)", log)))
    wrong = []
    if any(line.startswith("Using network Socket") for line in found):
        wrong.append("NCCL goes through TCP sockets; if there is InfiniBand, see NCCL_IB_HCA in docs/cluster.md")
    return [f"{'NCCL':16}{line.strip()}" for line in found], wrong


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if "NCCL_DEBUG" not in os.environ:  # else NCCL tells whoever asked
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": f"{folder}/%h-%p"}
        ranks = stack.enter_context(process_group(options.device))
        result = check(ranks, options.megabytes)
        verdict = torch.tensor(0)
        if result:
            lines, wrong = result
            more = network_of("".join(path.read_text(errors="replace") for path in Path(folder).iterdir()))
            wrong += more[1] if any("between hosts" in line for line in lines) else []
            found = [f"LOOK AT: {line}" for line in wrong] or ["all is well: nothing to look at"]
            print(*lines, *more[0], *found, sep="\n", flush=True)
            if wrong:  # torchrun has much to say about an exit code
                into_report("\n".join(found))
            verdict += bool(wrong)
        dist.broadcast(verdict, src=0)
        return int(verdict)


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
