"""The ledger: every operation of torch.distributed is entered, with the bytes that a reader can count by hand."""

import itertools

import pytest
import torch
import torch.distributed as dist
from operators import every_operator

from common import data
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import BATCH, FUNCTIONAL, OPERATORS, SILENT, Ledger, LedgerEntry, group_of
from common.mesh import make_mesh
from common.strategy import Setup
from course.strategies import load


class Names(Ledger):
    """A ledger that notes by which operator each entry came."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.entries)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.names += [(func.namespace, func.overloadpacket.__name__)] * (len(self.entries) - before)
        return result


def entries_of_every_operator() -> dict[tuple[str, str], tuple[list, list[LedgerEntry]]]:
    """For each operator: by which operators this rank's entries came, and these."""
    found = {}
    for key, call in every_operator().items():
        with Names() as ledger:
            result = call()
            torch.ones(3).sum()  # not a message
            tensors = [result] if isinstance(result, torch.Tensor) else result if isinstance(result, list) else []
            for tensor in tensors:
                if tensor.numel():  # a send gives an empty one
                    torch.ops._c10d_functional.wait_tensor(tensor)
        dist.barrier()  # after the block
        found[key] = (ledger.names, ledger.entries)
    return found


# operation -> is its payload what all ranks together have; and what a rank sends on average, as a multiple of its own
COSTS = {
    "all_reduce": (False, lambda n: 2 * (n - 1) / n),
    "broadcast": (False, lambda n: (n - 1) / n),
    "reduce": (False, lambda n: (n - 1) / n),
    "all_gather": (True, lambda n: n - 1),
    "reduce_scatter": (True, lambda n: n - 1),
    "all_to_all": (True, lambda n: n - 1),
    "scatter": (True, lambda n: (n - 1) / n),  # n - 1 by the root, nothing by the others
    "gather": (True, lambda n: (n - 1) / n),  # one by each rank but the root
    "barrier": (False, lambda _: 0),
    "monitored_barrier": (False, lambda _: 0),
}
# operator -> what rank 0 enters and by which operator, and rank 1: (operator, operation, bytes, peer); others nothing
MESSAGES = {
    "send": ([("send", "send", 24, 1)], [("recv_", "recv", 24, 0)]),
    "recv_": ([("recv_", "recv", 24, 1)], [("send", "send", 24, 0)]),
    "recv_any_source_": ([("recv_any_source_", "recv", 24, None)], [("send", "send", 24, 0)]),
    "isend": ([("isend", "send", 24, 1)], [("irecv", "recv", 24, 0)]),
    "irecv": ([("irecv", "recv", 24, 1)], [("isend", "send", 24, 0)]),
    "batch_p2p_ops": (
        [("batch_p2p_ops", "send", 24, 1), ("batch_p2p_ops", "recv", 8, 1)],
        [("batch_p2p_ops", "send", 8, 0), ("batch_p2p_ops", "recv", 24, 0)],
    ),
}


@pytest.mark.parametrize("size", [2, 4])
def test_every_operator_is_entered_with_its_bytes(size):
    for rank, found in enumerate(launch(entries_of_every_operator, size)):
        for (space, name), (names, entries) in found.items():
            if name in MESSAGES:
                expected = MESSAGES[name][rank] if rank < 2 else []
                assert [called for _, called in names] == [called for called, *_ in expected]
                assert [(e.operation, e.payload, e.peer) for e in entries] == [tuple(rest) for _, *rest in expected]
                assert [(e.sent, e.received) for e in entries] == [
                    (payload, 0) if operation == "send" else (0, payload) for _, operation, payload, _ in expected
                ], f"bytes sent and received by {name}"
            else:
                assert names == [(space, name)]
                (entry,) = entries
                alike = [one for one in COSTS if one.replace("_", "") in name.replace("_", "")]
                operation = max(alike, key=len)
                whole, times = COSTS[operation]
                own = 0 if "barrier" in name else 4 * (6 + 2 * ("coalesced" in name))
                root = 1 if operation in ("broadcast", "reduce", "scatter", "gather") else None
                payload = own * (size if whole else 1)
                assert (entry.operation, entry.payload, entry.peer) == (operation, payload, root), name
                assert entry.sent == entry.received == pytest.approx(own * times(size)), name
            assert all(e.ranks == size for e in entries)
            assert all(e.dtype == (None if "barrier" in e.operation else torch.float32) for e in entries)


def test_every_operator_that_pytorch_has_is_in_a_table():
    """A new one that is missing here would be counted as nothing."""
    there = {"c10d": set(), "_c10d_functional": set()}
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        there.get(space, set()).add(name)
    assert there["c10d"] - set(SILENT) == set(OPERATORS), "operators that would not be counted"
    assert there["_c10d_functional"] - set(SILENT) == {*FUNCTIONAL, BATCH}
    tested = {"c10d": set(), "_c10d_functional": set()}
    for space, name in launch(lambda: list(every_operator()), 1)[0]:
        tested[space].add(name)
    assert tested == {"c10d": set(OPERATORS), "_c10d_functional": {*FUNCTIONAL, BATCH}}


def nothing_entered() -> tuple:
    with Ledger() as ledger:
        torch.ones(3).sum()
    return ledger.sent, ledger.received, ledger.calls, ledger.messages


def test_an_empty_ledger_counts_in_floats_too():
    """A rank that sums it with other ranks' must not bring an integer."""
    sent, received, calls, messages = launch(nothing_entered, 1)[0]
    assert (sent, received, calls, messages) == (0.0, 0.0, {}, [])
    assert type(sent) is type(received) is float


def test_what_a_ledger_tells_of_its_entries():
    ledger, half = Ledger(), LedgerEntry("all_reduce", 24, 4)
    ledger.entries = [LedgerEntry("send", 8, 4, peer=1), LedgerEntry("recv", 4, 4, peer=3), half,
                      LedgerEntry("send", 2, 4, peer=3), LedgerEntry("barrier", 0, 4)]  # fmt: skip
    assert ledger.calls == {"send": 2, "recv": 1, "all_reduce": 1, "barrier": 1}, "how often each was called"
    assert (ledger.sent, ledger.received) == (8 + 2 + 36, 4 + 36), "bytes: an all-reduce's are 2 x 3/4 of its payload"
    assert ledger.messages == [(1, 8), (3, 2)], "receiver and bytes of what was sent"


def test_a_call_without_a_group_is_no_call():
    with pytest.raises(ValueError, match="process group"):
        group_of((torch.ones(1), [torch.ones(1)], 0))


def test_functional_collectives_and_subgroups():
    def work():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[dist.get_rank() // 2]
        with Ledger() as ledger:
            total = dist._functional_collectives.all_reduce(torch.ones(5), "sum", mine) + 0
            dist._functional_collectives.all_gather_tensor(torch.ones(5), 0, mine) + 0
            dist.broadcast(torch.ones(5), src=2 * (dist.get_rank() // 2) + 1, group=mine)
            torch.ops._c10d_functional.broadcast(torch.ones(5), 1, mine.group_name) + 0  # the group's rank 1
        pair = ((0, 1), (2, 3))[dist.get_rank() // 2]
        assert {e.group for e in ledger.entries} == {pair}, "global numbers of the group's ranks"
        return total[0].item(), [(e.operation, e.payload, e.ranks, e.peer) for e in ledger.entries]

    for rank, (total, entries) in enumerate(launch(work, 4)):
        assert total == 2.0
        root = 2 * (rank // 2) + 1
        assert entries == [("all_reduce", 20, 2, None), ("all_gather", 40, 2, None), *[("broadcast", 20, 2, root)] * 2]


def steps_of_every_strategy() -> tuple[dict, list[int]]:
    """Calls and bytes of the third step, by strategy and accumulation; and the sizes of the trainable tensors."""
    mesh, counted = make_mesh({"data": -1}), {}
    kinds = [("single", False), ("ddp", False), ("ddp", True)]
    for (name, by_hand), accumulate in itertools.product(kinds, (1, 3)):
        model = equality.frozen()
        strategy = load(name, by_hand)(model, equality.sgd, Setup(mesh))
        for step in range(3):  # in its second, DistributedDataParallel broadcasts the new order of its buckets
            batch = data.global_batch(0, step, equality.BATCH, equality.Batches.size)
            mine = (strategy.data_rank, strategy.data_size, accumulate, "cpu")
            with Ledger() as ledger:
                strategy.step(data.micro_batches(equality.Batches(), batch, *mine))
        counted[name, by_hand, accumulate] = (ledger.calls.get("all_reduce", 0), set(ledger.calls), ledger.sent)
    return counted, [p.numel() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("nproc", [2, 4])
def test_what_a_step_sends(nproc):
    """Gradients once, whatever the accumulation, at 2(N-1)/N of their bytes; and the loss, one number of 4 bytes. Those
    of DistributedDataParallel are sent by C++."""
    for counted, numels in launch(steps_of_every_strategy, nproc):
        assert len(counted) == 6
        for (name, *_), found in counted.items():  # one bucket holds all gradients
            sent = 2 * (nproc - 1) / nproc * 4 * (sum(numels) + 1)
            assert found == ((0, set(), 0.0) if name == "single" else (1 + 1, {"all_reduce"}, sent))
