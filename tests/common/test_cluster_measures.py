"""What the check of a cluster measures: in which order, from when to when, and of which device."""

import itertools
import platform
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common import cluster_check
from common.cluster_check import Link, Rank
from common.ranks import Ranks


@pytest.fixture
def events(monkeypatch):
    """What is done, one after the other: barriers, waits for the device, looks at a clock whose rounds take 2, 1 and 3
    seconds."""
    found = []
    ticks = itertools.accumulate(itertools.chain.from_iterable((0.0, took) for took in itertools.cycle((2, 1, 3))))

    def look() -> float:
        found.append("clock")
        return next(ticks)

    monkeypatch.setattr(cluster_check, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(cluster_check, "synchronize", lambda device: found.append("wait"))
    monkeypatch.setattr(dist, "barrier", lambda: found.append("barrier"))
    return found


class Matrix:
    def __init__(self, events):
        self.events = events

    def __matmul__(self, other):
        self.events.append("product")


def test_a_gpu_has_computed_before_the_clock_is_looked_at(events, monkeypatch):
    """Kernels run after the call that starts them has returned."""
    monkeypatch.setattr(cluster_check.torch, "ones", lambda *shape, **how: Matrix(events))
    found = cluster_check.multiply(Ranks(0, 1, 0, torch.device("cpu")), rounds=3)
    assert events == ["wait", "clock", "product", "wait", "clock"] * 3, "each product from when to when"
    assert found == 2 * 384**3, "operations per second of the quickest product"
    events.clear()
    monkeypatch.undo()
    for kind, waits in (("cuda", [torch.device("cuda", 1)]), ("cpu", [])):
        monkeypatch.setattr(torch.cuda, "synchronize", events.append)
        cluster_check.synchronize(torch.device(kind, 1 if kind == "cuda" else 0))
        assert events == waits, f"the device that is waited for: {kind}"
        events.clear()


def test_all_ranks_begin_an_all_reduce_together(events, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: events.append("all-reduce"))
    cluster_check.all_reduce(Ranks(0, 2, 0, torch.device("cpu")), 8)
    assert events == ["barrier", "wait", "clock", "all-reduce", "wait", "clock"] * 5, "from when to when"


def test_both_ends_of_a_link_send_and_receive_at_once(events, monkeypatch):
    message, asked = torch.arange(3, dtype=torch.uint8), []
    arrival = SimpleNamespace(wait=lambda: events.append("arrived"))
    monkeypatch.setattr(dist, "P2POp", lambda *about: about)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: asked.extend(operations) or [arrival] * 2)
    assert cluster_check.exchange(message, 5, 3) == 1.0, "seconds of the quickest of three, of 2, 1 and 3"
    assert events == ["wait", "clock", "arrived", "arrived", "wait", "clock"] * 3, "from when to when"
    (sends, sent, to), (receives, received, source) = asked[:2]
    assert (sends, receives, to, source) == (dist.isend, dist.irecv, 5, 5), "to the other end, and from it"
    assert sent is message and len(received) == 3, "as many bytes each way"
    assert received.data_ptr() != message.data_ptr(), "what arrives is written over what is being sent"


def test_what_a_rank_tells_and_in_which_order_it_is_measured(events, monkeypatch):
    about = {
        "compare_clocks": ("clocks", (0.5, 0.25)), "multiply": ("products", 7e9), "all_reduce": ("all-reduce", 3e9),
        "measure_links": ("links", [Link(0, 1, 1e-4, 1e9)]),
    }  # fmt: skip
    for name, (what, value) in about.items():
        monkeypatch.setattr(cluster_check, name, lambda *_, what=what, value=value: events.append(what) or value)
    for name, value in {"hostname": "n1", "versions": {"torch": "2"}, "variables": {"NCCL_ALGO": "ring"}}.items():
        monkeypatch.setattr(cluster_check, name, lambda value=value: value)
    monkeypatch.setattr(dist, "all_gather_object", lambda all, mine: all.__setitem__(slice(None), [mine] * len(all)))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(cluster_check, "report", lambda *told: told)
    mine = Rank(0, "n1", platform.machine(), {"torch": "2"}, {"NCCL_ALGO": "ring"}, (0.5, 0.25), 7e9)
    told = ([mine] * 2, [Link(0, 1, 1e-4, 1e9)] * 2, 3e9, 4, "gloo")
    assert cluster_check.check(Ranks(0, 2, 0, torch.device("cpu")), 4) == told, "what rank 0 compares"
    order = ["clocks", "barrier", "products", "links", "all-reduce"]
    assert events == order, "all ranks compute at the same time: they begin the products together"
    assert cluster_check.check(Ranks(1, 2, 1, torch.device("cpu")), 4) is None, "rank 0 alone compares"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: f"GPU {getattr(device, 'index', device)}")
    assert cluster_check.device_name(torch.device("cuda", 1)) == "GPU 1", "of the rank's own GPU"


def test_what_differs_is_not_called_the_same():
    ranks = [Rank(n, "n1", "cpu", {"torch": f"2.{n}"}, {"NCCL_ALGO": f"{n}"}, flops=1e9) for n in range(3)]
    lines, _ = cluster_check.report(ranks, [], 1e9, 8, "gloo")
    assert lines[1:3] == ["versions        different", "environment     different"]
