"""Wire: what gloo really sends, beside what the ledger charges."""

import math
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from common.errors import UserError
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from common.lab.wire import Wire

MB = 1_000_000
SIZE, BYTES = 4, 40 * MB


def measure() -> dict[str, tuple[int, float]]:
    """For each operation on a tensor of BYTES: bytes on the wire, and by the ledger, from all ranks together."""
    rank, found = dist.get_rank(), {}
    whole, mine = torch.ones(BYTES // 4), torch.ones(BYTES // 4 // SIZE)
    parts = list(whole.chunk(SIZE))
    calls = {
        "nothing": lambda: None,
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, mine),
        "reduce_scatter": lambda: dist.reduce_scatter_single(mine, whole),
        "reduce": lambda: dist.reduce(whole, dst=0),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "scatter": lambda: dist.scatter(mine, parts if rank == 0 else None, src=0),
        "gather": lambda: dist.gather(mine, parts if rank == 0 else None, dst=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send": lambda: {0: dist.send, 1: dist.recv}[rank](whole, 1 - rank) if rank < 2 else None,
    }
    for name, call in calls.items():
        wire = quietest(call, RING[name][1] * MB)
        with Ledger() as ledger:
            call()
        charged = torch.tensor(ledger.sent, dtype=torch.float64)
        dist.all_reduce(charged)
        found[name] = (wire, charged.item())
    return found


def most(expected: float) -> float:
    """With headers and acknowledgements, and a little of what others on this machine say meanwhile."""
    return expected * 1.02 + MB / 2


def quietest(call, expected: float) -> int:
    """The fewest bytes on the wire of at most ten calls: other programs on this machine can only add to them. Ends when
    there are few enough, which all ranks know alike."""
    fewest = math.inf
    for _ in range(10):
        with Wire() as wire:
            call()
        fewest = min(fewest, wire.sent)
        if fewest < most(expected):
            break
    return fewest


# By the formula and on the wire, in megabytes: the two differ in two rows.
RING = {
    "nothing": (0, 0),
    "all_reduce": (240, 240),
    "all_gather": (120, 120),
    "reduce_scatter": (120, 240),  # an all-reduce
    "reduce": (120, 182),  # 38 of 40 segments all the way round the ring, 4 x 38, and 3 x 10 to the root
    "broadcast": (120, 120),
    "scatter": (30, 30),
    "gather": (30, 30),
    "all_to_all": (120, 120),
    "send": (40, 40),
}


def test_formula_and_wire():
    everywhere = launch(measure, SIZE, timeout=60)
    assert all(found == everywhere[0] for found in everywhere)
    for name, (wire, charged) in everywhere[0].items():
        by_formula, on_the_wire = RING[name]
        assert charged == by_formula * MB, name
        assert on_the_wire * MB <= wire < most(on_the_wire * MB), name


def test_segments_of_a_reduce():
    """The explanation holds for other sizes too: gloo cuts a tensor into segments of at most 1 MiB, a multiple of
    twice the number of ranks, and all but two of them go all the way round."""

    def expected(size):
        segments = math.ceil(math.ceil(size / 2**20) / 4) * 4
        return 2 * size * (1 - 2 / segments) + size / 2

    def reduces(size):
        x = torch.ones(size // 4)
        return quietest(lambda: dist.reduce(x, dst=0), expected(size))

    sizes = [4 * MB, 16 * MB]
    for size, wire in zip(sizes, launch(lambda: list(map(reduces, sizes)), 2)[0], strict=True):
        assert expected(size) <= wire < most(expected(size))


def in_a_pair():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() < 2:
        return None
    with Wire(pairs[1]) as wire:
        dist.broadcast(torch.ones(2 * MB), src=3, group=pairs[1])
    return wire.sent


def test_a_group():
    _, _, *sent = launch(in_a_pair, 4)
    assert sent[0] == sent[1] >= 8 * MB, "bytes of a broadcast of 8 MB"


def test_the_counter_is_read_when_nothing_moves_any_more(monkeypatch):
    """By rank 0 of the group; and on a machine that is never at rest, after a second."""
    wire, counts, clock = Wire.__new__(Wire), [5, 9, 12, 12, 99], iter(range(100))
    wire.group, sleeps = "the group", []
    monkeypatch.setattr(dist, "barrier", lambda group: sleeps.append(group))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    time = SimpleNamespace(sleep=sleeps.append, monotonic=lambda: next(clock) / 8)
    monkeypatch.setattr("common.lab.wire.time", time)
    monkeypatch.setattr(Wire, "_counter", staticmethod(lambda: counts.pop(0)))
    assert wire._counter_at_rest() == 12, "the first count that is the same as the one before"
    assert sleeps == ["the group", 0.02, 0.02, 0.02], "after a barrier, and with pauses"
    counts[:] = range(1000)
    assert wire._counter_at_rest() == 7, "the count after a second"
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    assert wire._counter_at_rest() == 0, "other ranks count nothing"


def test_an_error_in_the_block_is_not_held_up():
    def work():
        with Wire():
            if dist.get_rank() == 1:
                raise ValueError("over")
            dist.all_reduce(torch.ones(2))

    with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: over"):
        launch(work, 2, timeout=100)


def test_other_systems_are_told(monkeypatch):
    group = object()  # there is no process group here
    for change in ({"name": "darwin"}, {"interfaces": {}}):
        with monkeypatch.context() as patch:
            patch.setattr("sys.platform", change.get("name", "linux"))
            counters = {"lo0": psutil.net_io_counters()} if "name" in change else {}
            patch.setattr(psutil, "net_io_counters", lambda pernic, counters=counters: counters)
            told = r"by Linux's loopback interface 'lo', and this machine \((darwin|linux)\) has none; use the ledger"
            with pytest.raises(UserError, match=told):
                Wire(group)
