"""Two hosts on one machine: network namespaces with addresses of their own, and between them a link of any latency,
bandwidth and loss, which can be cut.

The link is a process of this module that carries packets between two TUN devices. (Linux has `tc netem` for this; many
kernels of virtual machines are built without it.) Needs Linux, root and iproute2.
"""

import contextlib
import fcntl
import heapq
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
DEVICE = "course0"  # on both hosts
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def missing() -> str:
    """What keeps this machine from it; "" where nothing does."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "root"
    tools = [tool for tool in ("ip", "unshare") if not shutil.which(tool)]
    return ", ".join(tools) or ("" if os.path.exists("/dev/net/tun") else "/dev/net/tun")


class Link:
    """The two hosts, "node0" and "node1", and what is between them.

    latency:   seconds that a packet is under way, each way
    bandwidth: bytes per second, each way
    loss:      share of packets that do not arrive
    """

    def __init__(self, latency: float = 0.0, bandwidth: float = 1e9, loss: float = 0.0):
        self.latency, self.bandwidth, self.loss, self.cut = latency, bandwidth, loss, False
        self.tag = f"{os.getpid() % 10000}"
        self.spaces = [f"course{self.tag}-{node}" for node in (0, 1)]
        self.devices = [f"course{self.tag}n{node}" for node in (0, 1)]
        self.over = False
        self.ends: list[int] = []  # file descriptors

    def __enter__(self) -> "Link":
        try:
            for space, device, address in zip(self.spaces, self.devices, ADDRESSES, strict=True):
                ip("netns", "add", space)
                files = Path("/etc/netns", space)  # `ip netns exec` puts these in place of those in /etc
                files.mkdir(parents=True, exist_ok=True)
                (files / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} node0\n{ADDRESSES[1]} node1\n")
                self.ends.append(tun(device))
                ip("link", "set", device, "netns", space)
                for command in (
                    f"link set {device} name {DEVICE}",
                    f"addr add {address}/24 dev {DEVICE}",
                    f"link set {DEVICE} mtu 9000 up",
                    "link set lo up",
                ):
                    ip("-n", space, *command.split())
        except BaseException:
            self.__exit__()
            raise
        for here, there in (self.ends, self.ends[::-1]):
            threading.Thread(target=self._carry, args=(here, there), daemon=True).start()
        return self

    def _carry(self, here: int, there: int) -> None:
        """Packets from one device to the other: they queue for the link, which sends one after the other, and arrive
        when the latency has passed."""
        free, number = 0.0, 0
        queue: list[tuple] = []
        changed = threading.Condition()

        def deliver():
            while not self.over:
                with changed:
                    while not queue and not self.over:
                        changed.wait(0.5)
                    if self.over:
                        return
                    due, _, packet = queue[0]
                    now = time.monotonic()
                    if due > now:
                        changed.wait(due - now)
                        continue
                    heapq.heappop(queue)
                with contextlib.suppress(OSError):
                    os.write(there, packet)

        threading.Thread(target=deliver, daemon=True).start()
        while not self.over:
            try:
                packet = os.read(here, 65536)
            except OSError:
                return
            now = time.monotonic()
            free = max(free, now) + len(packet) / self.bandwidth
            # A router's queue is finite: more than a fifth of a second of packets are dropped.
            if self.cut or random.random() < self.loss or free - now > 0.2:
                free -= len(packet) / self.bandwidth
                continue
            with changed:
                heapq.heappush(queue, (free + self.latency, number, packet))
                number += 1
                changed.notify()

    def on(self, node: int, command: list[str], **options) -> subprocess.Popen:
        """Start a command on a node. It has the node's name and its network."""
        run = ["ip", "netns", "exec", self.spaces[node], "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        return subprocess.Popen(
            [*run, f"node{node}", *command], env=os.environ | {"GLOO_SOCKET_IFNAME": DEVICE}, **options
        )

    def __exit__(self, *error) -> None:
        self.over = True
        for space in self.spaces:
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        for end in self.ends:
            with contextlib.suppress(OSError):
                os.close(end)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def tun(name: str) -> int:
    """A file that reads and writes the packets of a new network device."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file
