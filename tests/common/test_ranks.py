"""The process group of a process: device and backend, who is who, set-up and tear-down, memory. GPUs are pretended."""

import ctypes
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import refused
from torch.distributed import debug

from common import ranks
from common.ranks import Ranks, choose, environment, gpus_differ, process_group

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def gpus(monkeypatch):
    """Pretend: gpus(2) makes torch see two GPUs; gpus(1, "B") one, with this number of its own."""

    def pretend(count: int, first: str = "A"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        properties = [SimpleNamespace(uuid=chr(ord(first) + number)) for number in range(count)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])

    pretend(0)
    return pretend


@pytest.fixture
def started(monkeypatch):
    """The arguments of init_process_group and of torch.cuda.set_device, which are not really called."""
    calls = SimpleNamespace(group=None, device=None)

    def init_process_group(backend, **rest):
        calls.group = {"backend": backend, **rest}

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    calls.barriers = []  # there is nobody else to wait for
    monkeypatch.setattr(ranks, "store_barrier", lambda store, *about, **more: calls.barriers.append((*about, more)))
    monkeypatch.setattr(ranks, "introduce", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(calls, "device", device))
    return calls


def launcher(monkeypatch, rank, size, local_rank=None, local_size=None, address="10.0.0.1"):
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    for name, value in {**values, "MASTER_ADDR": address, "MASTER_PORT": 29500}.items():
        if value is not None:
            monkeypatch.setenv(name, str(value))


def store_with(*gpus: str) -> dist.Store:
    """Where the other ranks have met, and said which GPUs they have: "host A"; or "host no GPU"."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    place = dist.PrefixStore("default_pg", store)
    for rank, gpu in enumerate(gpus):
        me = f"other {rank}"
        first = place.compare_set(f"common.ranks/gpu/{gpu}", "", me).decode() == me
        place.add("common.ranks/gpu without one", int(gpu.endswith("no GPU") or not first))
        place.add("common.ranks/gpu said", 1)
    return store


# --- device and backend ----------------------------------------------------------------------------------------------

FEWER = "1 GPU(s) for 4 processes, where NCCL wants one for each: "
ON_CPU, SHARED = FEWER + "using the CPU, with gloo", FEWER + "sharing GPUs, with gloo"
CHOICES = [
    # GPUs seen, selected by somebody, device, backend, processes, each has its own -> device, backend, remark
    (0, False, "auto", "auto", 1, None, ("cpu", "gloo", None)),
    (0, False, "auto", "auto", 4, None, ("cpu", "gloo", None)),
    (0, False, "auto", "auto", 4, False, ("cpu", "gloo", None)),
    (1, False, "auto", "auto", 1, None, ("cuda", "nccl", None)),
    (4, False, "auto", "auto", 4, None, ("cuda", "nccl", None)),
    (4, False, "auto", "auto", 4, True, ("cuda", "nccl", None)),
    (4, False, "cpu", "auto", 4, None, ("cpu", "gloo", None)),
    (4, False, "cuda", "gloo", 4, True, ("cuda", "gloo", None)),
    (1, False, "auto", "auto", 4, None, ("cpu", "gloo", ON_CPU)),
    (1, False, "auto", "auto", 4, False, ("cpu", "gloo", ON_CPU)),
    (1, False, "auto", "gloo", 4, False, ("cpu", "gloo", ON_CPU)),
    (1, True, "auto", "auto", 4, False, ("cpu", "gloo", ON_CPU)),
    (1, True, "cuda", "auto", 4, False, ("cuda", "gloo", SHARED)),  # asked for
    (1, False, "cpu", "auto", 4, False, ("cpu", "gloo", None)),
    (1, True, "auto", "auto", 4, None, ("cuda", "nccl", None)),  # as Slurm binds them: each sees its own
    (1, True, "auto", "nccl", 4, None, ("cuda", "nccl", None)),
    (1, False, "auto", "auto", 4, True, ("cuda", "nccl", None)),
    (1, False, "cuda", "nccl", 4, True, ("cuda", "nccl", None)),
    (2, True, "auto", "nccl", 4, True, ("cuda", "nccl", None)),  # each sees two of eight
]
REFUSED = [  # and words of the refusal
    (0, False, "cuda", "auto", 1, None, "--device cuda cpu"),
    (0, True, "cuda", "auto", 1, None, "--device cuda cpu"),
    (0, False, "auto", "nccl", 2, None, "--backend nccl gloo"),
    (4, False, "cpu", "nccl", 2, None, "--backend nccl gloo"),
    (2, False, "auto", "nccl", 4, None, "--backend nccl 4 2 --nproc_per_node=2 gloo"),
    (1, True, "auto", "nccl", 4, False, "--backend nccl 4 1 --nproc_per_node=1 gloo"),
]


def case(gpus, monkeypatch, count, selected):
    gpus(count)
    if selected:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.parametrize(("count", "selected", "device", "backend", "processes", "own", "expected"), CHOICES)
def test_device_and_backend(gpus, monkeypatch, count, selected, device, backend, processes, own, expected):
    case(gpus, monkeypatch, count, selected)
    assert choose(device, backend, processes, own) == expected


@pytest.mark.parametrize(("count", "selected", "device", "backend", "processes", "own", "text"), REFUSED)
def test_what_cannot_be_had_is_refused(gpus, monkeypatch, count, selected, device, backend, processes, own, text):
    case(gpus, monkeypatch, count, selected)
    with refused(*text.split()):
        choose(device, backend, processes, own)


@pytest.mark.parametrize(
    ("others", "seen", "differ"),
    [
        (["node A", "node B"], (1, "C"), True),
        (["node A", "node C"], (1, "C"), False),
        (["node A", "node B"], (0, "C"), False),
        (["node A", "node no GPU"], (1, "C"), False),
        (["node A", "node B"], (4, "A"), True),  # all are seen: the third rank's own is the third of four
        (["node A", "node B"], (2, "C"), True),
        (["node A", "node B"], (2, "A"), False),  # two GPUs for three: the third rank takes the first again
        (["node A", "other C"], (1, "C"), True),
    ],
)
def test_gpus_differ(gpus, monkeypatch, others, seen, differ):
    gpus(*seen)
    monkeypatch.setattr(ranks.socket, "gethostname", lambda: "node")
    got = gpus_differ(dist.PrefixStore("default_pg", store_with(*others)), 2, 3, local_rank=2)
    assert got is differ, f"GPUs of the others: {others}; seen here: {seen}"


def test_gpus_differ_waits_for_everybody(gpus, monkeypatch):
    own = threading.local()
    gpus(1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: own.gpu)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    for answer, uuids in ((True, "ABC"), (False, "ABA")):

        def ask(rank, uuids=uuids, prefix=uuids):
            own.gpu = SimpleNamespace(uuid=uuids[rank])
            return gpus_differ(dist.PrefixStore(prefix, store), rank, 3, rank)

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(ask, range(3))) == [answer] * 3


# --- set-up ----------------------------------------------------------------------------------------------------------


def test_the_gpu_is_that_of_the_local_rank(gpus, monkeypatch, started):
    """The second process of the second of two nodes, which have four GPUs and use two: rank 3 takes GPU 1."""
    gpus(4)
    launcher(monkeypatch, rank=3, size=4, local_rank=1, local_size=2)
    with process_group(store=store_with("first A", "first B", "second A")) as group:
        assert group == Ranks(3, 4, 1, torch.device("cuda:1")), f"local rank 1 is on {group.device}"
    assert started.device == "cuda:1"
    assert started.group["backend"] == "cpu:gloo,cuda:nccl"
    assert started.group["device_id"] == torch.device("cuda:1")
    assert (started.group["rank"], started.group["world_size"]) == (3, 4)
    assert started.group["timeout"] == timedelta(seconds=300)
    assert started.barriers == [(4, "common.ranks/met", {"barrier_timeout": 300.0})], "all ranks have connections"


@pytest.mark.parametrize("backend", ["auto", "nccl"])
def test_a_gpu_bound_to_each_process(gpus, monkeypatch, started, backend, capsys):
    gpus(1, "D")
    launcher(monkeypatch, rank=3, size=4, local_rank=3, local_size=4)
    others = [f"{ranks.socket.gethostname()} {uuid}" for uuid in "ABC"]
    with process_group(backend=backend, store=store_with(*others)) as group:
        assert group.device == torch.device("cuda:0")
    assert started.group["backend"] == "cpu:gloo,cuda:nccl" and started.group["device_id"] == torch.device("cuda:0")
    assert capsys.readouterr().err == ""


def test_a_gpu_that_processes_share(gpus, monkeypatch, started, capsys):
    gpus(1, "A")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # selected for all: it says nothing about each
    launcher(monkeypatch, rank=0, size=2, local_rank=0, local_size=2)
    host = ranks.socket.gethostname()
    with process_group(store=store_with(f"{host} A")) as group:
        assert group.device == torch.device("cpu"), "gloo sends no GPU's tensors from rank to rank"
    assert started.group["backend"] == "gloo" and started.group.get("device_id") is started.device is None
    assert capsys.readouterr().err.count("\n") == 1
    with process_group("cuda", store=store_with(f"{host} A")) as group:
        assert group.device == torch.device("cuda:0")
    assert started.group["backend"] == "gloo" and started.group.get("device_id") is None
    assert "1 GPU(s) for 2 processes" in capsys.readouterr().err
    launcher(monkeypatch, rank=1, size=2, local_rank=1, local_size=2)
    with process_group(store=store_with(f"{host} A")):
        assert capsys.readouterr().err == "", "rank 0 has said it"
    with refused("--backend nccl", "2", "1 GPU"):
        with process_group(backend="nccl", store=store_with(f"{host} A")):
            pass


def test_on_the_cpu_no_device_is_bound(gpus, monkeypatch, started):
    gpus(2)
    with process_group("cpu") as group:
        assert group == Ranks(0, 1, 0, torch.device("cpu"))
    assert started.group["backend"] == "gloo" and started.group.get("device_id") is None and started.device is None


@pytest.mark.parametrize(
    ("settings", "interface"),
    [
        ({"rank": 0, "size": 2, "local_rank": 0, "local_size": 2}, "lo"),
        ({"rank": 1, "size": 4, "local_rank": 1, "local_size": 2}, None),
        ({"rank": 0, "size": 2, "address": "127.0.0.1"}, "lo"),  # started by hand
        ({"rank": 0, "size": 2, "address": "::1"}, "lo"),
        ({"rank": 0, "size": 2, "address": "node1"}, None),  # where the launcher says nothing about nodes
    ],
)
def test_loopback_on_one_node_only(gpus, monkeypatch, started, settings, interface):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    launcher(monkeypatch, **settings)
    with process_group("cpu", store=dist.HashStore()):
        chosen = os.environ.get("GLOO_SOCKET_IFNAME")
        assert chosen == interface, "loopback on one node, and no interface named on several"


def test_loopback_for_a_single_process_and_where_nobody_chose_another(gpus, monkeypatch, started):
    monkeypatch.setattr(sys, "platform", "linux")
    with process_group("cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    for platform, interface in (("darwin", "lo0"), ("win32", None)):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        monkeypatch.setattr(sys, "platform", platform)
        with process_group("cpu"):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == interface, f"loopback of {platform}"
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "any")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with process_group("cpu"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rank": 3, "size": 4, "local_rank": 1, "local_size": 2}, (3, 4, 1, 2)),
        ({"rank": 3, "size": 4}, (3, 4, 3, 4)),  # by hand, on one node
        (None, (0, 1, 0, 1)),
    ],
)
def test_environment(monkeypatch, settings, expected):
    if settings:
        launcher(monkeypatch, **settings)
    assert environment() == expected


def test_without_an_address_nobody_meets(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused("WORLD_SIZE", "2", "MASTER_ADDR", "MASTER_PORT"), process_group("cpu"):
        pass


def test_pages_about_ranks_need_the_launchers_store_and_what_draws_them(monkeypatch):
    with refused("--debug-server", "torchrun" if ranks.drawable() else "requirements-nets.txt"):
        ranks.show_ranks(0)
    started = []
    with monkeypatch.context() as patch:
        launcher(patch, rank=0, size=1)
        patch.setattr(ranks, "drawable", lambda: True)
        patch.setattr(debug, "start_debug_server", lambda port, start_method=None: started.append(start_method))
        for initialized in (False, True):
            patch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
            ranks.show_ranks(0)
    assert started[1] not in (None, "fork"), "a process that has initialised CUDA cannot be forked"
    monkeypatch.setattr(ranks, "drawable", lambda: False)
    with refused("--debug-server", "requirements-nets.txt"):
        ranks.show_ranks(0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_no_c_library_or_another_one_is_no_harm(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or SimpleNamespace())
    ranks.keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: open(asked.append(name) or "/no such file"))
    ranks.keep_freed_memory()
    assert asked == ["libc.so.6"] * 2


FREED = """
import resource, torch
from common.ranks import keep_freed_memory
keep_freed_memory()
for round in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2 * 2**20) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's memory")
def test_memory_that_is_freed_is_kept():
    """Eight blocks of 8 MB, 16,384 pages of 4 KB, freed and asked for again: after a few times they are no new ones."""
    found = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 100
