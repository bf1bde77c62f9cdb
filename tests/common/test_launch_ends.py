"""Whatever ranks do, launch ends in time, says what they did, and leaves no process behind."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import running

from common.lab import launch as launching
from common.lab.launch import RankFailed, launch


def all_exit():
    dist.barrier()
    time.sleep(0.3)  # until the other one has left the barrier too
    os._exit(0)


def one_exits():
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(2))


def one_stops_itself():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


def all_stop_themselves():
    os.kill(os.getpid(), signal.SIGSTOP)


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def block_every_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(0.01)


def one_closes_its_files():
    dist.barrier()
    if dist.get_rank() == 1:
        os.closerange(0, 4096)
    dist.all_reduce(torch.ones(2))


def one_hoards():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("waits", "yes")
        dist.barrier()
    store.get("waits")  # on a busy machine rank 0 may come late
    limit = psutil.Process().memory_info().vms + 60 * 2**20  # of this rank only: the tests' machine is shared
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    while True:
        hoard.append(bytearray(20 * 2**20))


def thread_that_goes_on():
    threading.Thread(target=time.sleep, args=(600,)).start()


def fork_and_wait():
    """The child of rank 0 stays, that of rank 1 returns: its rank has not returned for that."""
    if os.fork() == 0 and dist.get_rank() == 1:
        return
    time.sleep(600)


# What ranks do -> which rank the failure names, and what is told of each: a signal, an exit code, an error, a
# collective, or the function at whose lines it was.
WHATEVER = {
    all_exit: (0, "exit code 0", "exit code 0"),
    one_exits: (1, "all_reduce", "exit code 0"),
    one_stops_itself: (0, "all_reduce", "stopped"),
    all_stop_themselves: (0, "stopped", "stopped"),
    ignore_sigterm: (0, "ignore_sigterm", "ignore_sigterm"),
    block_every_signal: (0, "block_every_signal", "block_every_signal"),
    one_closes_its_files: (1, "all_reduce", "SIGABRT"),
    one_hoards: (1, "barrier", "MemoryError"),
    thread_that_goes_on: (0, "returned", "returned"),
    fork_and_wait: (0, "fork_and_wait", "fork_and_wait"),
}


@pytest.mark.parametrize("fn", WHATEVER, ids=lambda fn: fn.__name__)
def test_launch_ends_in_time_whatever_ranks_do(fn, monkeypatch):
    monkeypatch.setattr(launching, "LEEWAY", 0.7)  # so that the tests take less time
    before, begin = running(), time.time()
    with pytest.raises(RankFailed) as failure:
        launch(fn, 2, timeout=1)
    took = time.time() - begin
    first, *told = WHATEVER[fn]
    assert failure.value.rank == first and str(failure.value).startswith(f"rank {first} of 2: ")
    for rank, (word, where) in enumerate(zip(told, failure.value.where, strict=True)):
        assert word in where and word in str(failure.value), (rank, where)
    assert took < 15  # most of it for a busy machine; ranks that are not ended sleep for ten minutes
    assert running() <= before


def start_daemon():
    """As daemons start: a process whose parent has ended, in a session of its own. Returns its number."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, f"{os.getpid()}\n".encode())
            time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


def fork_and_return():
    """The child of rank 0 stays, that of rank 1 raises: its error is not its rank's."""
    child = os.fork()
    if child == 0 and dist.get_rank() == 0:
        time.sleep(600)
    if child == 0:
        raise ValueError
    time.sleep(0.5)
    return child


def test_what_ranks_leave_behind_is_ended_after_a_success_too():
    before = running()
    daemons, children = launch(start_daemon, 2, timeout=20), launch(fork_and_return, 2, timeout=20)
    assert len(set(daemons + children)) == 4 and 0 not in children
    assert not [pid for pid in daemons + children if psutil.pid_exists(pid)]
    assert running() <= before


def test_ranks_end_with_their_caller():
    """As when a notebook's kernel is restarted while a cell runs."""
    code = (
        "import os, time\nfrom common.lab.launch import launch\n"
        "def f():\n    os.write(3, f'{os.getpid()}\\n'.encode())\n    time.sleep(600)\n"
        "launch(f, 2)\n"
    )
    before, (read, write) = running(), os.pipe()
    os.set_inheritable(write, True)
    caller = subprocess.Popen([sys.executable, "-c", f"import os; os.dup2({write}, 3)\n{code}"], pass_fds=[write])
    os.close(write)
    with open(read) as pipe:
        ranks = [int(pipe.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(rank) for rank in ranks)
        caller.kill()
        caller.wait()
        begin = time.monotonic()
        assert pipe.read() == ""  # its end: nobody holds the pipe any more
        assert time.monotonic() - begin < 20
    assert running() <= before
