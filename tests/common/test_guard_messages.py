"""The guard compares a send with its receive: whichever rank comes second sees the difference."""

import re

import torch
import torch.distributed as dist

from common.lab.guard import CheckCollectives, CollectiveMismatch
from common.lab.launch import launch

F = torch.ops._c10d_functional


def one_after_the_other():
    """Rank `first` starts its half of a message, then the other rank its half: what do they say?"""
    rank, store, said = dist.get_rank(), dist.distributed_c10d._get_default_store(), []
    for first in (0, 1):
        try:
            with CheckCollectives():
                if rank != first:
                    store.wait([f"{first} has started"])
                x = torch.ones(2 + rank, dtype=torch.int64)
                dist.isend(x, 1, tag=first) if rank == 0 else dist.irecv(x, 0, tag=first)
                store.set(f"{first} has started", "")
            said.append("nothing")
        except CollectiveMismatch as error:
            said.append(str(error))
    return said


def test_the_second_of_a_send_and_its_receive_sees_the_difference():
    texts = launch(one_after_the_other, 2, timeout=10)
    line = one_after_the_other.__code__.co_firstlineno + 9
    halves = [f"calls {what} at test_guard_messages.py:{line}" for what in ("send int64 [2]", "recv int64 [3]")]
    for first, second in ((0, 1), (1, 0)):
        assert texts[first][first] == "nothing"
        expected = f"rank {first} {halves[first]}; rank {second} {halves[second]}"
        told = f"message 1 from rank 0 to rank 1 of group 0: {expected}"
        assert texts[second][first] == told, "what the second of a send and its receive is told"


def functional_messages():
    """Rank 0 starts its half first: one message that is too short, then a batch of two of which one is."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    store, said = dist.distributed_c10d._get_default_store(), []
    for batch in (False, True):
        try:
            with CheckCollectives():
                if rank == 1:
                    store.wait([f"{batch} has started"])
                if batch:
                    kinds = [["isend", "irecv"], ["irecv", "isend"]][rank]
                    F.batch_p2p_ops(kinds, [1 - rank] * 2, [7, 8], [torch.ones(2), torch.ones(4 + rank)], name)
                elif rank == 0:
                    F.isend(torch.ones(2), 1, 5, name)
                else:
                    F.irecv(torch.ones(3), 0, 5, name)
                store.set(f"{batch} has started", "")
            said.append("nothing")
        except CollectiveMismatch as error:
            said.append(re.sub(r"test_guard_messages.py:\d+", "a line", str(error)))
    return said


def test_functional_messages_are_compared_too():
    assert launch(functional_messages, 2, timeout=10) == [
        ["nothing", "nothing"],
        [
            "message 1 from rank 0 to rank 1 of group 0: rank 0 calls send float32 [2] at a line; "
            "rank 1 calls recv float32 [3] at a line",
            "message 1 from rank 1 to rank 0 of group 0: rank 0 calls recv float32 [4] at a line; "
            "rank 1 calls send float32 [5] at a line",
        ],
    ]
