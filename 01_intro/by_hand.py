"""All-reduce three ways, built from sends and receives alone, and what each of them costs.

After an all-reduce every rank holds the sum of what all ranks held. `ALGORITHMS` names the three ways; each is
called like torch.distributed.all_reduce: f(tensor, group=None), with a contiguous tensor of any shape, which is
changed in place. `COSTS` names the formula of each.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005 (recursive doubling, for any size). P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", JPDC 69(2), 2009 (the ring; no algorithm can send fewer bytes).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist


def gather_and_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 receives all tensors, one by one, adds them up and sends the sum to everybody."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        buffer = torch.empty_like(tensor)
        for other in range(1, size):
            dist.recv(buffer, group=group, group_src=other)
            tensor += buffer
        for other in range(1, size):
            dist.send(tensor, group=group, group_dst=other)
    else:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)


def exchange(
    outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int, group: dist.ProcessGroup | None = None
) -> None:
    """Send to one rank and receive from another (or the same) at once.

    One after the other would not do: all ranks would send, and nobody would receive. To NCCL,
    whose sends and receives otherwise queue up behind each other, a batch is one operation.
    """
    operations = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def ring(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, exchange: Callable[..., None] = exchange
) -> None:
    """One chunk per rank; pass chunks to the right, once round to add, once more to share.

    tensor:   contiguous, of any shape; changed in place
    exchange: what sends and receives at once; another one can watch what moves
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = tensor.view(-1).tensor_split(size)  # the first numel % size are longer by one
    buffer = torch.empty_like(chunks[0])

    # Reduce-scatter: a sum over the ranks to the left arrives; add mine, pass it on next time.
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        part = buffer[: incoming.numel()]
        exchange(outgoing, right, part, left, group)
        incoming += part

    # All-gather: chunk rank + 1 is complete here; pass on complete chunks until all have all.
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        exchange(outgoing, right, incoming, left, group)


def recursive_doubling(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Swap whole tensors with a partner and add, at distance 1, then 2, then 4, ..."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    power = 1 << (size.bit_length() - 1)  # the largest power of two that is not above size
    extra = size - power
    buffer = torch.empty_like(tensor)

    # Ranks beyond the power of two hand their tensor to a helper, and get the sum from it later.
    if rank >= power:
        dist.send(tensor, group=group, group_dst=rank - power)
        dist.recv(tensor, group=group, group_src=rank - power)
        return
    if rank < extra:
        dist.recv(buffer, group=group, group_src=rank + power)
        tensor += buffer

    distance = 1
    while distance < power:
        partner = rank ^ distance
        exchange(tensor, partner, buffer, partner, group)
        tensor += buffer
        distance *= 2

    if rank < extra:
        dist.send(tensor, group=group, group_dst=rank + power)


ALGORITHMS = {
    "gather_and_broadcast": gather_and_broadcast,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
}


class Cost(NamedTuple):
    """What one rank sends and receives during one all-reduce.

    messages: how many it sends; in these algorithms it receives as many
    sent, received: bytes
    peers: the ranks it sends to
    """

    messages: int
    sent: int
    received: int
    peers: set[int]


def cost_of_gather_and_broadcast(rank: int, size: int, numel: int, itemsize: int) -> Cost:
    """One tensor to rank 0 and one back; so rank 0 receives and sends size - 1 of them."""
    peers = set(range(1, size)) if rank == 0 else {0}
    total = len(peers) * numel * itemsize
    return Cost(len(peers), total, total, peers)


def cost_of_ring(rank: int, size: int, numel: int, itemsize: int) -> Cost:
    """Every chunk but one, twice: 2 (size - 1) / size tensors if chunks are even (Patarasuk & Yuan).

    Uneven chunks: adding up, rank r never sends chunk r + 1 and never receives chunk r; sharing,
    it never sends chunk r + 2 and never receives chunk r + 1.
    """
    chunk = [numel // size + (index % size < numel % size) for index in range(rank, rank + 3)]
    sent, received = 2 * numel - chunk[1] - chunk[2], 2 * numel - chunk[0] - chunk[1]
    peers = {(rank + 1) % size} - {rank}
    return Cost(2 * (size - 1), sent * itemsize, received * itemsize, peers)


def cost_of_recursive_doubling(rank: int, size: int, numel: int, itemsize: int) -> Cost:
    """The whole tensor in each of log2(size) steps (Thakur et al.); helpers send one more."""
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        peers = {rank - power}
    else:
        peers = {rank ^ (1 << step) for step in range(power.bit_length() - 1)}
        peers |= {rank + power} if rank < size - power else set()
    total = len(peers) * numel * itemsize
    return Cost(len(peers), total, total, peers)


COSTS = {
    "gather_and_broadcast": cost_of_gather_and_broadcast,
    "ring": cost_of_ring,
    "recursive_doubling": cost_of_recursive_doubling,
}
