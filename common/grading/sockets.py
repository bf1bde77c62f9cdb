"""What crosses the loopback interface, told by the kernel: bytes of every TCP connection, and of the interface.

A program can't forge these numbers, because it doesn't keep them. Linux hands them out through a socket of the family
NETLINK (include/uapi/linux/inet_diag.h, sock_diag(7)), with a `struct tcp_info` for each connection
(include/uapi/linux/tcp.h), of which we read `tcpi_bytes_received`.
"""

import os
import socket
import struct
from pathlib import Path

SOCK_DIAG, DUMP, TCP_INFO = 20, 0x301, 2  # SOCK_DIAG_BY_FAMILY; NLM_F_REQUEST | NLM_F_DUMP; INET_DIAG_INFO
RECEIVED = 128  # offset of tcpi_bytes_received: 8 bytes, 24 numbers of 4 bytes, 3 numbers of 8
HEADERS = 66  # bytes of a TCP segment that are none of its contents: Ethernet 14, IP 20, TCP 20 with 12 of options


def connections() -> dict[tuple, tuple[int, int]]:
    """(own address and port, the other's) -> (number of the socket, bytes received), of all TCP connections of this
    network namespace. Raises OSError where the system does not tell."""
    found: dict[tuple, tuple[int, int]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        request = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (TCP_INFO - 1), 0, 0xFFFFFFFF)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as diag:  # NETLINK_SOCK_DIAG
            diag.send(struct.pack("=IHHII", 16 + len(request), SOCK_DIAG, DUMP, 1, 0) + request)
            done = False
            while not done:
                data = diag.recv(1 << 16)
                while data:
                    length, kind = struct.unpack_from("=IH", data)
                    done = done or kind == 3  # NLMSG_DONE
                    if kind == 2:  # NLMSG_ERROR
                        raise OSError(-struct.unpack_from("=i", data, 16)[0], "sock_diag")
                    if kind == SOCK_DIAG:
                        _entry(data[16:length], found)
                    data = data[(length + 3) & ~3 :]
    return found


def _entry(message: bytes, found: dict) -> None:
    ports, own, other = message[4:8], message[8:24], message[24:40]
    (inode,) = struct.unpack_from("=I", message, 68)
    at = 72
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == TCP_INFO and length >= 4 + RECEIVED + 8:
            (received,) = struct.unpack_from("=Q", message, at + 4 + RECEIVED)
            found[(own, ports[:2]), (other, ports[2:])] = inode, received
        at += max(4, (length + 3) & ~3)


def sockets_of(pid: int) -> set[int]:
    """The numbers of a process's sockets; none where the process is gone or doesn't let itself be looked at."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        pass
    return found


def loopback() -> int:
    """Bytes that the loopback interface of this namespace has carried, without the headers of its segments."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            octets, packets = map(int, numbers.split()[:2])
            return octets - HEADERS * packets
    return 0


def between(pids: list[int]) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> bytes so far, of the connections between these processes, which are known by their place in
    the list."""
    owner = {inode: rank for rank, pid in enumerate(pids) for inode in sockets_of(pid)}
    there = connections()
    counts: dict[tuple[int, int], int] = {}
    for (own, other), (inode, received) in there.items():
        sender, receiver = owner.get(there.get((other, own), (0, 0))[0]), owner.get(inode)
        if sender is not None and receiver is not None:
            counts[sender, receiver] = counts.get((sender, receiver), 0) + received
    return counts
