"""The ledger: every operation of torch.distributed is entered, with the bytes that a reader can count by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import data
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import LedgerEntry, Ledger, wire_bytes
from common.ranks import Ranks
from course.strategies import load


def every_operation() -> list[LedgerEntry]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, whole = torch.ones(6), torch.ones(6 * size)
    parts = list(torch.ones(size, 6).unbind())
    root = rank == 2
    with Ledger() as ledger:
        dist.all_reduce(x)
        dist.broadcast(x, src=2)
        dist.reduce(x, dst=2)
        dist.all_gather(parts, x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter(x, parts)
        dist.reduce_scatter_single(x, whole)
        dist.scatter(x, parts if root else None, src=2)
        dist.gather(x, parts if root else None, dst=2)
        dist.all_to_all(parts, [part.clone() for part in parts])
        dist.all_to_all_single(whole.clone(), whole)
        dist.barrier()
        if rank == 0:
            dist.send(x, dst=1)
        if rank == 1:
            dist.recv(x, src=0)
        torch.ones(3).sum()  # not a message
    dist.all_reduce(x)  # after the block
    return ledger.entries


SIZE, PART, WHOLE = 3, 6 * 4, 3 * 6 * 4  # ranks; bytes that one rank has; bytes that all have together

EXPECTED = [
    ("all_reduce", PART, None),
    ("broadcast", PART, 2),
    ("reduce", PART, 2),
    ("all_gather", WHOLE, None),
    ("all_gather", WHOLE, None),
    ("reduce_scatter", WHOLE, None),
    ("reduce_scatter", WHOLE, None),
    ("scatter", WHOLE, 2),
    ("gather", WHOLE, 2),
    ("all_to_all", WHOLE, None),
    ("all_to_all", WHOLE, None),
    ("barrier", 0, None),
]


def test_every_operation_is_entered():
    for rank, entries in enumerate(launch(every_operation, SIZE)):
        message = {0: [("send", PART, 1)], 1: [("recv", PART, 0)]}.get(rank, [])
        assert [(e.operation, e.payload, e.peer) for e in entries] == EXPECTED + message
        assert all(e.ranks == SIZE for e in entries)
        assert all(e.dtype == torch.float32 for e in entries if e.operation != "barrier")


def test_bytes_on_the_wire():
    """Three ranks, 72 bytes: a ring's share is two thirds, 48; an all-reduce needs two rounds of it."""
    assert wire_bytes("all_reduce", 72, 3) == 96
    assert wire_bytes("all_gather", 72, 3) == wire_bytes("reduce_scatter", 72, 3) == 48
    assert wire_bytes("all_to_all", 72, 3) == wire_bytes("broadcast", 72, 3) == 48
    assert wire_bytes("barrier", 72, 3) == 0
    assert (LedgerEntry("send", 72, 3).sent, LedgerEntry("send", 72, 3).received) == (72, 0)
    assert (LedgerEntry("recv", 72, 3).sent, LedgerEntry("recv", 72, 3).received) == (0, 72)
    for operation in ("all_reduce", "broadcast", "all_gather"):
        assert wire_bytes(operation, 72, 1) == 0


def ddp_step() -> tuple[dict, float, float, list]:
    model = DistributedDataParallel(torch.nn.Linear(10, 5))
    model(torch.ones(2, 10))  # the first forward pass broadcasts buffers, of which there are none
    with Ledger() as ledger:
        model(torch.ones(2, 10)).sum().backward()
    return ledger.calls, ledger.sent, ledger.received, ledger.messages


def test_calls_from_cpp_are_entered_too():
    """DistributedDataParallel's reducer is C++: 55 parameters of 4 bytes in one bucket, two ranks."""
    for calls, sent, received, messages in launch(ddp_step, 2):
        assert calls == {"all_reduce": 1}
        assert sent == received == pytest.approx(2 * 1 / 2 * 55 * 4)
        assert messages == []


def test_functional_collectives_and_subgroups():
    def work():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[dist.get_rank() // 2]
        with Ledger() as ledger:
            total = dist._functional_collectives.all_reduce(torch.ones(5), "sum", mine) + 0
            dist._functional_collectives.all_gather_tensor(torch.ones(5), 0, mine) + 0
            dist.broadcast(torch.ones(5), src=2 * (dist.get_rank() // 2) + 1, group=mine)
        return total[0].item(), [(e.operation, e.payload, e.ranks, e.peer) for e in ledger.entries]

    for rank, (total, entries) in enumerate(launch(work, 4)):
        assert total == 2.0
        root = 2 * (rank // 2) + 1
        assert entries == [("all_reduce", 20, 2, None), ("all_gather", 40, 2, None), ("broadcast", 20, 2, root)]


def steps_of_every_strategy(accumulate: int) -> tuple[dict, list[int]]:
    """Calls and bytes of the third step, by strategy; and the sizes of the trainable tensors."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    counted = {}
    for name, by_hand in [("single", False), ("ddp", False), ("ddp", True)]:
        model = equality.frozen()
        strategy = load(name, by_hand)(model, equality.sgd, ranks)
        for step in range(
            3
        ):  # in its second, DistributedDataParallel broadcasts in which order it rebuilds its buckets
            batch = data.global_batch(0, step, equality.BATCH, equality.Batches.size)
            mine = (strategy.data_rank, strategy.data_size, accumulate, "cpu")
            with Ledger() as ledger:
                strategy.step(data.micro_batches(equality.Batches(), batch, *mine))
        counted[name, by_hand] = (ledger.calls.get("all_reduce", 0), set(ledger.calls), ledger.sent)
    return counted, [p.numel() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("nproc", [2, 4])
def test_what_a_step_sends(nproc, accumulate):
    """Gradients once, whatever the accumulation, at 2(N-1)/N of their bytes; and the loss, one number of 4 bytes."""
    for counted, numels in launch(steps_of_every_strategy, nproc, (accumulate,)):
        share = 2 * (nproc - 1) / nproc
        assert counted["single", False] == (0, set(), 0.0)
        for by_hand in (True, False):  # one bucket holds all gradients
            assert counted["ddp", by_hand] == (1 + 1, {"all_reduce"}, share * 4 * (sum(numels) + 1))
