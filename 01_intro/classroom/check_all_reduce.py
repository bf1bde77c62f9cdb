"""Is this an all-reduce, and does it cost what it should? One check for right and wrong ones alike.

`prove` runs an algorithm on real ranks and compares it with torch.distributed.all_reduce, its messages with the
formula, message by message. What fails is refused, with the name of the check that refused it.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger

# Fewer elements than ranks, more, a multiple, no multiple, none at all; and not only vectors.
SHAPES = [(), (2,), (3,), (5,), (2, 5), (10, 10, 10), (0,)]


class Refused(AssertionError):
    """What `prove` found wrong. `check` is one of "error", "timeout", "result", "messages", "bytes", "pattern"."""

    def __init__(self, check: str, message: str):
        super().__init__(f"{check}: {message}")
        self.check = check


def prove(algorithm, cost, size: int, shapes=SHAPES, timeout: float = 60.0) -> float:
    """Run `algorithm(tensor, group)` on `size` ranks, int64 and float32, and return the largest difference.

    `cost(rank, size, numel, itemsize)` is what each rank should send and receive. The difference is that to
    torch.distributed.all_reduce, relative to the sum. Runs on all ranks, and on a group that leaves out rank 0.
    `timeout` is in seconds, for one message and for the whole.

    Raises Refused.
    """
    groups = [list(range(size))] + ([list(range(1, size))] if size > 2 else [])
    try:
        cases = launch(trial, size, (algorithm, groups, shapes, timeout), timeout=timeout)
    except RankFailed as failed:
        late = "Timed out" in str(failed) or "not finished in time" in str(failed)
        raise Refused("timeout" if late else "error", str(failed)) from None
    differences = [0.0]
    for members in groups:
        for _ in range(2 * len(shapes)):
            of_ranks = [cases[rank].pop(0) for rank in members]
            differences.append(judge(of_ranks, members, cost))
    return max(differences)


def trial(algorithm, groups: list[list[int]], shapes, timeout: float) -> list[dict]:
    """On each rank: run every case under a ledger, and PyTorch's all-reduce beside it."""
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)  # as on nodes of two processes: of no use to find a neighbour
    generator = torch.Generator().manual_seed(rank)
    cases = []
    for members in groups:
        group = dist.new_group(members, timeout=timedelta(seconds=timeout))
        if rank not in members:
            continue
        for dtype in (torch.int64, torch.float32):
            for shape in shapes:
                mine = torch.randint(1, 1000, shape, generator=generator).to(dtype)
                mine = mine / 7 if dtype.is_floating_point else mine  # so that sums are rounded
                got, want = mine.clone(), mine.clone()
                with Ledger() as ledger:
                    algorithm(got, group)
                dist.all_reduce(want, group=group)
                cases.append({"mine": mine, "got": got, "want": want, "ledger": ledger})
    return cases


def judge(of_ranks: list[dict], members: list[int], cost) -> float:
    """Compare one case, as all ranks saw it, with what it should be.

    Returns the largest relative difference. Raises Refused.
    """
    size, largest = len(members), 0.0
    for rank, case in enumerate(of_ranks):
        mine, got, want, ledger = case["mine"], case["got"], case["want"], case["ledger"]
        where = f"rank {rank} of {size}, {mine.dtype} {list(mine.shape)}"
        if size > 1 and mine.numel() and torch.equal(mine, want):
            raise AssertionError(f"this case cannot tell a sum from nothing: {where}")
        # N positive numbers added in any order are within (N - 1) * eps / 2 of their sum (Higham,
        # "Accuracy and Stability of Numerical Algorithms", 4.2), and here are two orders.
        tolerance = size * torch.finfo(mine.dtype).eps if mine.dtype.is_floating_point else 0
        close = (got - want).abs() <= tolerance * want
        if not close.all():
            first = int(close.view(-1).logical_not().nonzero()[0])
            values = f"{got.view(-1)[first]:.6g}, should be {want.view(-1)[first]:.6g}"
            raise Refused("result", f"{where}: element {first} is {values}")
        if not torch.equal(got, of_ranks[0]["got"]):
            raise Refused("result", f"{where}: not the same bits as on rank 0")
        expected = cost(rank, size, mine.numel(), mine.element_size())
        count = len(ledger.messages)
        if count != expected.messages:
            raise Refused("messages", f"{where}: {count} sent, expected {expected.messages}")
        peers = sorted({peer for peer, _ in ledger.messages})
        neighbours = sorted(members[peer] for peer in expected.peers)
        if peers != neighbours:
            raise Refused("pattern", f"{where}: sent to ranks {peers}, not {neighbours}")
        counted = ledger.sent, ledger.received
        if counted != (expected.sent, expected.received):
            raise Refused("bytes", f"{where}: sent, received {counted}, expected {expected[1:3]}")
        if mine.numel():
            largest = max(largest, float(((got - want).abs() / want).max()))
    return largest
