"""Two hosts with a link between them that is slowed, and cut: rendezvous, the check of a cluster, the cost model, the
order of a mesh's axes, and a run whose network goes.

    python tools/cluster_network.py

Needs Linux, root and iproute2; says so where they are missing, with exit code 2.
"""

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from slow_link import ADDRESSES, Link, missing

from common import ROOT
from common.errors import Parser
from common.ranks import process_group

SIZE = ["--layers=2", "--width=64", "--heads=4", "--context=64", "--batch-size=8", "--checkpoint-every=0"]
MEGABYTES = (1, 2, 4)


def main() -> int:
    Parser(description=__doc__.splitlines()[0]).asked()  # it has no options
    lacking = missing()
    if lacking:
        print(f"error: needs Linux, root, iproute2 and /dev/net/tun; missing: {lacking}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in (both_rendezvous, cost_model, order_of_axes, the_network_goes):
            print(f"--- {(step.__doc__ or step.__name__).splitlines()[0]}")
            step(folder)
    return 0


def both_rendezvous(_folder: Path) -> None:
    """Static and c10d rendezvous, and the check of the cluster on a good link."""
    with Link() as link:
        for rendezvous in ("static", "c10d"):
            outputs = run(link, "-m", "common.cluster_check", "--megabytes=1", rendezvous=rendezvous)
            require("2 ranks on 2 host(s)" in outputs[0], f"{rendezvous} rendezvous:\n{outputs[0]}")
            print(f"{rendezvous}: two hosts have met")
    for milliseconds, megabytes in ((1, 20), (4, 20)):
        with Link(latency=milliseconds / 1e3, bandwidth=megabytes * 1e6) as link:
            expected = 1e6 * latency_of(link)
            page = run(link, "-m", "common.cluster_check")[0]
        (line,) = re.findall("links +between hosts.*", page)
        print(f"with {milliseconds} ms ({expected:,.0f} µs by a socket) and {megabytes} MB/s: {line}")
        columns = (re.findall(rf"([\d,]+) {unit}", line)[-1] for unit in ("µs", "MB"))
        latency, bandwidth = (float(number.replace(",", "")) for number in columns)
        off = abs(latency / expected - 1), abs(bandwidth / megabytes - 1)
        require(max(off) < 0.25, "that is off by a quarter or more")


ECHO = """
import socket, sys, time
if len(sys.argv) == 1:
    server = socket.create_server(("", 5555))
    print("listening", flush=True)
    peer = server.accept()[0]
else:
    peer = socket.create_connection((sys.argv[1], 5555))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
best = float("inf")
for _ in range(200):
    begin = time.perf_counter()
    if len(sys.argv) > 1:
        peer.sendall(b"x")
    peer.recv(1)
    best = min(best, time.perf_counter() - begin)
    if len(sys.argv) == 1:
        peer.sendall(b"x")
print(best / 2)
"""


def latency_of(link: Link) -> float:
    """Seconds that a byte is under way, by a plain socket: what `Link` was told, and what its own process takes."""
    server = link.on(0, [sys.executable, "-c", ECHO])
    assert server.stdout and server.stdout.readline()
    return float(link.on(1, [sys.executable, "-c", ECHO, ADDRESSES[0]]).communicate(timeout=60)[0])


def cost_model(_folder: Path) -> None:
    """An all-reduce over the slow link against alpha + n / bandwidth."""
    latency, bandwidth = 0.004, 20e6
    with Link(latency=latency, bandwidth=bandwidth) as link:
        output = run(link, "tools/cluster_network.py", "measure")[0]
    (measured,) = re.findall(r"^\[\[.*", output, re.MULTILINE)
    for megabytes, seconds in json.loads(measured):
        # A ring of two has two rounds, in which each rank sends n / 2; and gloo sends data only after the other side's
        # notice that it is ready to receive them.
        expected = 4 * latency + megabytes * 2**20 / bandwidth
        print(f"{megabytes} MiB: {1000 * seconds:.0f} ms measured, {1000 * expected:.0f} ms by the link's own numbers")
        require(0.8 < seconds / expected < 1.5, "they are more than that apart")


def measure() -> None:
    """On a rank: the seconds of an all-reduce of each size, the median of five."""
    with process_group("cpu") as ranks:
        found = []
        for megabytes in MEGABYTES:
            data, seconds = torch.zeros(megabytes * 2**18), []
            for _ in range(5):
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(data)
                seconds.append(time.perf_counter() - begin)
            found.append([megabytes, statistics.median(seconds)])
        if ranks.rank == 0:
            print(json.dumps(found), flush=True)


def order_of_axes(folder: Path) -> None:
    """Data between the hosts and tensor inside, and the other way round: the same losses, other times."""
    subprocess.run(
        [sys.executable, "distributed_training.py", *SIZE, "--steps=6", f"--run-dir={folder}/alone"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    alone, _ = read(folder / "alone")
    seconds = {}
    with Link(latency=0.01, bandwidth=20e6) as link:
        for inside, order in (("tensor", "data,tensor"), ("data", "tensor,data")):
            where = folder / inside
            options = [
                "--mesh=data=2,tensor=2",
                f"--mesh-order={order}",
                "--by-hand",
                "--steps=6",
                f"--run-dir={where}",
            ]
            run(link, "distributed_training.py", "--distributed", *SIZE, *options, ranks=2, rendezvous="c10d")
            losses, seconds[inside] = read(where)
            worst = max(abs(mine / its - 1) for mine, its in zip(losses, alone, strict=True))
            print(
                f"{inside} inside a host: {1000 * seconds[inside]:.0f} ms a step, losses {worst:.0e} from one process"
            )
            require(worst < 1e-5, "other losses than those of one process")
    print(f"tensor between the hosts takes {seconds['data'] / seconds['tensor']:.1f} times as long")
    require(seconds["data"] > 2 * seconds["tensor"], "the order of the axes makes no difference here")


def the_network_goes(folder: Path) -> None:
    """The link is cut in mid-run: the run ends within its timeout, and says which host does not answer."""
    with Link() as link:
        options = ["--steps=100000", "--timeout=5", f"--run-dir={folder}/cut", *SIZE]
        nodes = start(link, "distributed_training.py", "--distributed", *options)
        file = folder / "cut" / "metrics.jsonl"
        wait(lambda: file.exists() and file.read_text().count("\n") > 5, 60, "the run does not begin")
        link.cut, begin = True, time.monotonic()
        outputs = [node.communicate(timeout=180)[0] for node in nodes]
        took = time.monotonic() - begin
    for number, (node, output, silent) in enumerate(
        zip(nodes, outputs, ("rank 1 on node1", ADDRESSES[0]), strict=True)
    ):
        line = next(iter(re.findall("error: .*did not answer.*", output)), "(no such line)\n" + output[-2000:])
        print(f"node{number}: {line}")
        require(node.returncode != 0 and silent in line, f"node{number} ends with {node.returncode} and {line}")
    print(f"both launchers have ended {took:.0f} s after the cut")


def start(link: Link, *command: str, ranks: int = 1, rendezvous: str = "static") -> list[subprocess.Popen]:
    """torchrun on both hosts, with `ranks` processes on each."""
    nodes = []
    for node in (0, 1):
        place = {
            "static": [f"--node_rank={node}", f"--master_addr={ADDRESSES[0]}", "--master_port=29500"],
            "c10d": ["--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:29500", "--rdzv_id=course"],
        }[rendezvous]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={ranks}", *place]
        nodes.append(link.on(node, [*launcher, *command], cwd=ROOT))
    return nodes


def run(link: Link, *command: str, **how) -> list[str]:
    """Both hosts' outputs."""
    return [node.communicate(timeout=180)[0] for node in start(link, *command, **how)]


def read(folder: Path) -> tuple[list[float], float]:
    """Losses, and the median of a step's seconds but for the first two steps."""
    file = folder / "metrics.jsonl"
    require(file.exists(), f"{file.name} is missing: the run did not begin")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [record["loss"] for record in records], statistics.median(r["step_seconds"] for r in records[2:])


def wait(condition, seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        require(time.monotonic() < end, why)
        time.sleep(0.1)


def require(condition, why: str) -> None:
    if not condition:
        raise SystemExit(f"error: {why}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        if sys.argv[1:] == ["measure"]:
            measure()
        else:
            sys.exit(main())
