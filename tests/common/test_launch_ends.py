"""Whatever ranks do, launch ends in time, says what they did, and leaves no process behind."""

import os
import resource
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from forks import Fork
from helpers import arrive, running, time_is_up_when_all_have_arrived, when_inside

from common.lab import launch as launching
from common.lab.launch import RankFailed, launch


def all_exit():
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < 2:  # no collective, that could notice the other's end
        time.sleep(0.01)
    os._exit(0)


def one_exits():
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(2))


def one_stops_itself(arrived):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    when_inside("all_reduce", arrived)
    dist.all_reduce(torch.ones(2))


def all_stop_themselves(arrived):
    os.kill(os.getpid(), signal.SIGSTOP)


def ignore_sigterm(arrived):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    arrived()
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
        when_inside("barrier", lambda: store.set("waits", "yes"))
        dist.barrier()
    store.get("waits")
    limit = psutil.Process().memory_info().vms + 60 * 2**20  # of this rank only: the tests' machine is shared
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hoard = []
    while True:
        hoard.append(bytearray(20 * 2**20))


def thread_that_goes_on(arrived):
    threading.Thread(target=time.sleep, args=(600,)).start()
    when_inside("_shutdown", arrived)


def fork_and_wait(arrived):
    """The child of rank 0 stays, that of rank 1 returns: its rank has not returned for that."""
    child = os.fork()
    if child == 0 and dist.get_rank() == 1:
        return
    if child and dist.get_rank() == 1:
        os.waitpid(child, 0)
    if child:
        arrived()
    time.sleep(600)


# What ranks do -> which rank the failure names, and what is told of each: a signal, an exit code, an error, a
# collective, or the function at whose lines it was.
FAIL = {
    all_exit: (0, "exit code 0", "exit code 0"),
    one_exits: (1, "all_reduce", "exit code 0"),
    one_closes_its_files: (1, "all_reduce", "SIGABRT"),
    one_hoards: (1, "barrier", "MemoryError"),
}
GO_ON = {
    one_stops_itself: (1, "all_reduce", "stopped"),
    all_stop_themselves: (0, "stopped", "stopped"),
    ignore_sigterm: (0, "ignore_sigterm", "ignore_sigterm"),
    thread_that_goes_on: (0, "returned", "returned"),
    fork_and_wait: (0, "fork_and_wait", "fork_and_wait"),
}


def check_end(first: int, told: list[str], fn, **options):
    before, begin = running(), time.monotonic()
    with pytest.raises(RankFailed) as failure:
        launch(fn, 2, **options)
    took = time.monotonic() - begin
    assert failure.value.rank == first and str(failure.value).startswith(f"rank {first} of 2: ")
    for rank, (word, where) in enumerate(zip(told, failure.value.where, strict=True)):
        assert word in where and word in str(failure.value), (rank, where)
    assert took < 300  # nearly all of it for a busy machine; ranks that are not ended sleep for ten minutes
    assert running() <= before


@pytest.mark.parametrize("fn", FAIL, ids=lambda fn: fn.__name__)
def test_launch_ends_with_a_rank_that_fails(fn):
    first, *told = FAIL[fn]
    check_end(first, told, fn, timeout=100)


@pytest.mark.parametrize("fn", GO_ON, ids=lambda fn: fn.__name__)
def test_launch_ends_when_time_is_up_whatever_ranks_do(fn, monkeypatch, tmp_path):
    time_is_up_when_all_have_arrived(monkeypatch, tmp_path)
    first, *told = GO_ON[fn]
    check_end(first, told, fn, args=(lambda: arrive(tmp_path),), timeout=100)


def test_launch_ends_when_time_is_up_though_ranks_block_every_signal(monkeypatch):
    """Each writes its stack by its own clock, a second after the timeout and LEEWAY."""
    monkeypatch.setattr(launching, "LEEWAY", 0.0)
    monkeypatch.setattr(launching, "TO_WRITE_DOWN", 60.0)
    check_end(0, ["block_every_signal"] * 2, block_every_signal, timeout=3)


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


def test_ranks_end_with_their_caller(tmp_path):
    """As when a notebook's kernel is restarted while a cell runs."""
    before, (read, write) = running(), os.pipe()

    def stay():
        os.write(write, f"{os.getpid()}\n".encode())
        time.sleep(600)

    caller = Fork(lambda _: launch(stay, 2), cwd=tmp_path)
    os.close(write)
    with open(read) as pipe:
        ranks = [int(pipe.readline()) for _ in range(2)]
        assert all(psutil.pid_exists(rank) for rank in ranks)
        os.kill(caller.pid, signal.SIGKILL)
        assert caller.wait(timeout=300) == -signal.SIGKILL
        begin = time.monotonic()
        assert pipe.read() == ""  # its end: nobody holds the pipe any more
        assert time.monotonic() - begin < 300  # ranks that stay sleep for ten minutes
    while any(psutil.pid_exists(rank) for rank in ranks):  # which have closed their files, and not ended yet
        time.sleep(0.01)
    assert running() <= before
