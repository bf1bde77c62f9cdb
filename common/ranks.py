"""Who am I: the process group of this process, from set-up to tear-down.

Scripts and `launch` both enter through `process_group`; nobody sets up or tears down by hand, because
tearing down wrongly makes correct programs abort at exit (pytorch#190489) or hang.
"""

import contextlib
import ctypes
import datetime
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier as store_barrier

from common.errors import UserError
from common.launcher import environment


@dataclass(frozen=True)
class Ranks:
    """The place of this process among all processes of a run.

    rank:        number of this process, 0 .. size-1, over all nodes
    size:        number of processes (the world size)
    local_rank:  number of this process on its own node; it picks the GPU and nothing else
    device:      where this process computes
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @classmethod
    def here(cls) -> "Ranks":
        """The ranks of the current process group, on one node: on the CPU, which is what `launch` starts, or where the
        group has NCCL on this process's GPU."""
        gpu = "nccl" in dist.get_backend_config()
        device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        return cls(dist.get_rank(), dist.get_world_size(), dist.get_rank(), device)

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on at least one. A collective: every rank must call it."""
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)


ANSWER = 10.0  # seconds within which the store of a host that is still there has answered
LOOPBACK = {"linux": "lo", "darwin": "lo0"}  # the network interface of a machine to itself


def choose(
    device: str = "auto", backend: str = "auto", processes: int = 1, own_gpu: bool | None = None
) -> tuple[str, str, str | None]:
    """Pick (device type, backend, remark) for `processes` processes on this node.

    `device` is "auto", "cpu" or "cuda"; `backend` is "auto", "gloo" or "nccl". NCCL wants a GPU for each process; where
    there are fewer, all compute on the CPU, unless "cuda" was asked for: then processes share GPUs, and gloo carries
    what messages it can (its sends and receives take a GPU's addresses for the CPU's). `own_gpu` says whether each
    process has a GPU of its own (`gpus_differ`). It may have one though it sees fewer GPUs than there are processes:
    Slurm can let each task see its own GPU alone. None: the ranks have not met yet, and nobody knows. Then it is
    believed if somebody has selected the GPUs that this process sees.
    Raises UserError where what was asked for cannot be had.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if own_gpu is None:
        own_gpu = gpus >= processes or (gpus > 0 and "CUDA_VISIBLE_DEVICES" in os.environ)
    if device == "cuda" and gpus == 0:
        raise UserError(
            "--device cuda: PyTorch sees no CUDA GPU here; use --device cpu, or install a CUDA build of torch"
        )
    if backend == "nccl":
        if device == "cpu" or not gpus:
            raise UserError("--backend nccl needs CUDA GPUs and there are none in use; use --backend gloo")
        if not own_gpu:
            raise UserError(
                f"--backend nccl needs one GPU per process: {processes} processes on this node, {gpus} GPU(s); "
                f"start --nproc_per_node={gpus}, or use --backend gloo"
            )
    remark = None
    if gpus and not own_gpu and device != "cpu":
        remark = f"{gpus} GPU(s) for {processes} processes, where NCCL wants one for each: "
        remark += "using the CPU, with gloo" if device == "auto" else "sharing GPUs, with gloo"
    if device == "auto":
        device = "cuda" if own_gpu else "cpu"
    if backend == "auto":
        backend = "nccl" if device == "cuda" and own_gpu else "gloo"
    return device, backend, remark


def on_one_node() -> bool:
    """Do all ranks run on this node, as far as the launcher says so?"""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"]) == size
    return size == 1 or os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1")


def gpus_differ(store: dist.Store, rank: int, size: int, local_rank: int) -> bool:
    """Does every process have a GPU that no other one has? Asked through the store, before there is a process group; so
    all ranks, of all nodes, know the same."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own = str(torch.cuda.get_device_properties(local_rank % gpus).uuid) if gpus else "no GPU"
    # Each rank asks for a few keys, however many ranks there are: all answers together would be size x size of them.
    first = store.compare_set(f"common.ranks/gpu/{socket.gethostname()} {own}", "", str(rank)).decode() == str(rank)
    store.add("common.ranks/gpu without one", int(not (gpus and first)))
    if store.add("common.ranks/gpu said", 1) == size:
        store.set("common.ranks/gpu all said", "")
    store.wait(["common.ranks/gpu all said"])
    return store.add("common.ranks/gpu without one", 0) == 0


def introduce(store: dist.Store, rank: int) -> None:
    """Tell the other nodes' ranks who is here, before there is a process group. Raises UserError where two processes
    are the same rank, and where ranks have different versions of PyTorch, whose messages may then not fit."""
    me = f"{socket.gethostname()}, process {os.getpid()}"
    there = store.compare_set(f"common.ranks/who/{rank}", "", me).decode()
    if there != me:
        raise UserError(
            f"two processes are rank {rank}: {there}, and {me}; do two nodes have the same --node_rank, or two "
            f"processes the same RANK?"
        )
    if rank == 0:
        store.set("common.ranks/torch", torch.__version__)
    version = store.get("common.ranks/torch").decode()  # waits for rank 0
    if torch.__version__ != version:
        raise UserError(
            f"rank {rank} on {socket.gethostname()} has torch {torch.__version__}, and rank 0 has {version}: "
            f"install the same on every node"
        )


def silent(patience: float = 5.0) -> list[str]:
    """The ranks that do not answer, asked when a collective has timed out: each that is still there says so in the
    store, and waits for the others for `patience` seconds."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _first_store()
    found: list[str] = []
    answered = threading.Event()

    def ask():
        keys = [f"common.ranks/alive/{other}" for other in range(size)]
        store.set(keys[rank], "")
        end = time.monotonic() + patience
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)
        for other in range(size):
            if not store.check([keys[other]]):
                who = f"common.ranks/who/{other}"
                host = f" on {store.get(who).decode().partition(',')[0]}" if store.check([who]) else ""
                found.append(f"rank {other}{host}")
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # of a host that is gone, the store waits for an answer too
    asking.start()
    asking.join(patience + ANSWER)
    if not answered.is_set():
        return [f"the host of rank 0 and of the store, {os.environ.get('MASTER_ADDR')},"]
    return found


def _first_store() -> dist.Store:
    """The one in which the ranks have introduced themselves: the process group's own names are below it."""
    store = dist.distributed_c10d._get_default_store()
    return store.underlying_store if isinstance(store, dist.PrefixStore) else store


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed instead of handing it back to the system in every step: autograd frees and
    asks for the same large blocks again and again, and each page is costly to get anew. Linux with glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, in bytes: its largest value
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def let_threads_finish() -> None:
    """Have this thread, and those that it starts from now on, not interrupt a thread that they share a core with.

    gloo's thread for messages asks again and again for a connection whose lock another thread holds (Pair::handleEvents
    in gloo's transport/tcp/pair.cc). With more threads than cores, that other thread has often been interrupted while
    it held the lock, by the very thread that now spins, for as long as the system lets it. On two cores that was nine
    tenths of the time of an all-reduce among four ranks: 8 ms, and 0.7 ms with this. Linux only.
    """
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def end_with_launcher() -> None:
    """Have the system send this process SIGTERM when torchrun dies: killed, as by a system without memory, it cannot
    end its ranks, and each is in a session of its own, so that they would train on unseen. Linux only."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def leave_last(store: dist.Store, rank: int, size: int) -> None:
    """Rank 0 returns when the others have come here. Without torchrun the store is in its process: gone too early, it
    would take along what the others are about to read, such as that everybody is done."""
    if store.add("common.ranks/left", 1) == size:
        store.set("common.ranks/all left", "")
    if rank == 0:
        with contextlib.suppress(dist.DistStoreError):  # whoever died after it was done is no longer waited for
            store.wait(["common.ranks/all left"], datetime.timedelta(seconds=10))


def checked() -> AbstractContextManager:
    """The guard, imported only where somebody asks for it: a process group needs nothing of common/lab."""
    from common.lab.guard import CheckCollectives

    return CheckCollectives()


def drawable() -> bool:
    """Is there what the debug server draws its pages with?"""
    return all(importlib.util.find_spec(name) for name in ("jinja2", "tabulate"))


def show_ranks(port: int) -> None:
    """Start PyTorch's debug server (torch.distributed.debug, experimental): on every rank what tells its stack, and on
    rank 0 the pages, at `port`, for everybody who can reach it. It ends with the process. Collective.

    Raises UserError where what draws its pages is not installed, or no launcher's store is there in which ranks meet.
    """
    if not drawable():
        raise UserError("--debug-server needs jinja2 and tabulate: pip install -r requirements-nets.txt")
    if not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise UserError("--debug-server needs the store of torchrun: start the program by torchrun, or leave it out")
    from torch.distributed.debug import start_debug_server

    start_debug_server(port, start_method="spawn" if torch.cuda.is_initialized() else None)


@contextmanager
def process_group(
    device: str = "auto",
    backend: str = "auto",
    timeout: float = 300.0,
    check: bool = False,
    store: dist.Store | None = None,
):
    """Join the process group that the launcher's environment describes and yield this process's `Ranks`.

    Without a launcher it is a group of one, with no port opened; inside of `launch` it is the group that is there.
    `timeout` is in seconds, for one collective.
    The ranks meet in `store`, by default at the launcher's address and port.
    With `check`, every collective in the block is compared across the ranks first (common/lab/guard.py).
    Raises UserError for bad devices, backends and ports.

    On the way out of a *successful* block (or of sys.exit): collect garbage (else gloo's threads can abort the
    interpreter at exit), wait until every rank is done, destroy. After an exception nothing is torn down: a rank
    that destroys the group while others wait in a collective can hang them, whereas a rank that just exits ends
    them.
    """
    if dist.is_initialized():  # by `launch`, or by a notebook: it is theirs to tear down
        ranks = Ranks.here()
        if ranks.device.type == "cpu" and (device == "cuda" or backend == "nccl"):
            asked = "--device cuda" if device == "cuda" else "--backend nccl"
            raise UserError(f"{asked}: there is a process group already, and it is on the CPU; leave the option out")
        with checked() if check else nullcontext():
            yield ranks
        return
    ranks = join(device, backend, timeout, store)
    orderly_exit = None
    with checked() if check else nullcontext():
        try:
            yield ranks
        except SystemExit as leaving:  # sys.exit() after Ctrl-C, which all ranks agreed on
            orderly_exit = leaving
    if dist.is_initialized():
        gc.collect()
        if ranks.size > 1:
            # Through the store, not a collective: a rank that still owes one must not be paired with this. And a
            # little longer than a collective waits, so that the rank that lacks its partner is the one to say so.
            store = dist.distributed_c10d._get_default_store()
            store_barrier(store, ranks.size, "common.ranks/done", barrier_timeout=timeout + 2)
            leave_last(store, ranks.rank, ranks.size)
        dist.destroy_process_group()
    if orderly_exit:
        raise orderly_exit


def join(device: str, backend: str, timeout: float, store: dist.Store | None) -> Ranks:
    """Meet the other ranks and make the process group, as `process_group` says. Raises UserError."""
    rank, size, local_rank, local_size = environment()
    end_with_launcher()
    wait = datetime.timedelta(seconds=timeout)
    if on_one_node() and sys.platform in LOOPBACK:  # some hosts cannot resolve their own name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK[sys.platform])
    if size == 1:
        store = dist.HashStore()  # a group of one needs no port
    if store is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UserError(f"WORLD_SIZE is {size}, and MASTER_ADDR and MASTER_PORT are not both set; start with torchrun")
    try:
        if store is None:
            store = next(iter(dist.rendezvous("env://", rank, size, timeout=wait)))[0]
        store = dist.PrefixStore("default_pg", store)
        if not on_one_node():
            introduce(store, rank)
        own_gpu = None if device == "cpu" or size == 1 else gpus_differ(store, rank, size, local_rank)
        device, backend, remark = choose(device, backend, local_size, own_gpu)
        if remark and rank == 0:
            print(f"note: {remark}", file=sys.stderr)
        if device == "cuda":
            device = f"cuda:{local_rank % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        else:
            keep_freed_memory()
            if local_size > 1:
                torch.set_num_threads(1)  # the ranks share these cores
                let_threads_finish()
        # NCCL has no CPU tensors, and the loop's own small messages are CPU tensors: carry them by gloo. With its
        # device known at once, NCCL connects here and not in the first collective, where an error is hard to place.
        bound = torch.device(device) if backend == "nccl" else None
        backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
        dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size, device_id=bound)
        if size > 1:
            # Gloo returns as soon as this rank has its connections. Leaving now, by an error of the program, it would
            # keep the others in init_process_group, where they wait for the rest of theirs.
            store_barrier(store, size, "common.ranks/met", barrier_timeout=timeout)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            advice = "the port is in use; give another: torchrun --master_port=PORT"
        else:
            advice = f"{str(error).splitlines()[0]}; are all nodes started, with the same address, port and --nnodes?"
        raise UserError(f"cannot meet the other ranks at {address}: {advice}") from error
    return Ranks(rank, size, local_rank, torch.device(device))
