"""launch: results in rank order, printing in rank order, and failures that name rank, place and cause."""

import contextlib
import os
import re
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

from common.lab import launch as launching
from common.lab.launch import RankFailed, launch


def running() -> set[int]:
    """Processes that descend from this one, or that have lost their parent and are at work in this folder."""
    found = {process.pid for process in psutil.Process().children(recursive=True)}
    for orphan in psutil.Process(1).children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is somebody else's
            found |= {orphan.pid} if orphan.cwd() == os.getcwd() else set()
    return found


def whoami(greeting: str) -> tuple[int, int, int]:
    print(greeting, "from", dist.get_rank())
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_results_and_output_come_in_rank_order(start_method, capfd):
    assert launch(whoami, 3, ("hello",), start_method=start_method) == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert capfd.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n[rank 2] hello from 2\n"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_functions_of_a_notebook(start_method):
    """What a cell defines belongs to no file: closures, lambdas, and results whose class only the cell knows."""

    class Answer:
        def __init__(self, value):
            self.value = value

    factor = 3
    answers = launch(lambda: Answer(factor * dist.get_rank()), 2, start_method=start_method)
    assert [answer.value for answer in answers] == [0, 3]


def test_tensors_come_back_and_cross_the_ranks():
    def total():
        tensor = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(tensor)
        return tensor

    for tensor in launch(total, 4):
        assert torch.equal(tensor, torch.full((1000,), 10.0))


def test_after_heavy_work_on_many_threads():
    """The parent has computed and differentiated with a pool of threads, which forked ranks do not have."""

    def work():
        weight = torch.randn(300, 300, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad.shape

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    work()
    assert launch(work, 2, timeout=30) == [(300, 300)] * 2
    torch.set_num_threads(threads)


def store_of_the_group():
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return type(store)


def test_ranks_meet_in_a_file_and_ask_no_name_server():
    assert launch(store_of_the_group, 2) == [dist.FileStore] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux's schedulers")
def test_ranks_do_not_interrupt_each_other():
    """See let_threads_finish in common/ranks.py. One rank alone is left as it is."""
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        assert launch(os.sched_getscheduler, 2, (0,)) == [os.SCHED_BATCH] * 2
        assert launch(os.sched_getscheduler, 1, (0,)) == [os.SCHED_OTHER]
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def fail_with_value_error():
    if dist.get_rank() == 1:
        raise ValueError("a reason")
    dist.all_reduce(torch.ones(2))


def stay_away():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def sleep_instead():
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(2), src=1)
    else:
        time.sleep(60)


def be_killed():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


def exit_without_a_word():
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(2))


def never_end():
    while True:
        pass


FAILURES = {
    fail_with_value_error: (
        1,
        r"rank 1 of 2: ValueError: a reason\n  test_launch.py, line \d+, in fail_with_value_error\n"
        r'    raise ValueError\("a reason"\)\nmeanwhile\n'
        r"  rank 0 was waiting in all_reduce, line \d+ of fail_with_value_error",
    ),
    stay_away: (
        0,
        r"rank 0 of 2: RuntimeError: Timed out waiting 2000ms for \w+ operation to complete \(in all_reduce\)\n"
        r"(.*\n)*meanwhile\n  rank 1 had returned already",
    ),
    sleep_instead: (
        0,
        r"rank 0 of 2: RuntimeError: Timed out waiting 2000ms for \w+ operation to complete \(in broadcast\)\n"
        r"(.*\n)*meanwhile\n  rank 1 was at line \d+ of sleep_instead",
    ),
    be_killed: (1, r"rank 1 of 2: died with SIGKILL\nmeanwhile\n  rank 0 was waiting in all_reduce, line \d+ of"),
    exit_without_a_word: (1, r"rank 1 of 2: died with exit code 3\nmeanwhile\n  rank 0 was waiting in all_reduce"),
    never_end: (None, r"rank \d of 2: not finished in time: was at line \d+ of never_end\nmeanwhile\n"),
}


@pytest.mark.parametrize("fn", FAILURES, ids=lambda fn: fn.__name__)
def test_failures_name_rank_place_and_cause(fn):
    rank, pattern = FAILURES[fn]
    before = running()
    with pytest.raises(RankFailed) as failure:
        launch(fn, 2, timeout=2)
    assert re.match(pattern, str(failure.value)), str(failure.value)
    assert rank in (None, failure.value.rank)
    assert len(failure.value.where) == len(failure.value.output) == 2
    assert running() <= before


def test_output_of_a_failed_launch_is_kept():
    def speak_and_die():
        print("last words of", dist.get_rank())
        raise ValueError("over")

    with pytest.raises(RankFailed) as failure:
        launch(speak_and_die, 2)
    assert "last words of" in failure.value.output[failure.value.rank]


def test_the_callers_signals_and_environment_are_left_alone():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)
    launch(dist.get_rank, 2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)) == before


# --- whatever ranks do, launch ends in time, says what they did, and leaves no process behind -----------------------


def all_exit():
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
        pass


def block_every_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass


def one_closes_its_files():
    dist.barrier()
    if dist.get_rank() == 1:
        os.closerange(0, 4096)
    dist.all_reduce(torch.ones(2))


def fill_memory():
    limit = psutil.Process().memory_info().vms + 300 * 2**20  # of this rank only: the tests' machine is shared
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


WHATEVER = {
    all_exit: (
        1,
        "rank 0 of 2: died with exit code 0 before it returned\nmeanwhile\n"
        "  rank 1 died with exit code 0 before it returned",
    ),
    one_exits: (
        1,
        "rank 1 of 2: died with exit code 0 before it returned\nmeanwhile\n"
        "  rank 0 was waiting in all_reduce, line N of one_exits",
    ),
    one_stops_itself: (
        2,
        "rank 0 of 2: RuntimeError: Timed out waiting 1000ms for recv operation to complete (in all_reduce)\n"
        "  test_launch.py, line N, in one_stops_itself\n    dist.all_reduce(torch.ones(2))\nmeanwhile\n"
        "  rank 1 was stopped by a signal, and was at line N of one_stops_itself",
    ),
    all_stop_themselves: (
        2,
        "rank 0 of 2: not finished in time: was stopped by a signal, and was at line N of all_stop_themselves\n"
        "meanwhile\n  rank 1 was stopped by a signal, and was at line N of all_stop_themselves",
    ),
    ignore_sigterm: (
        2,
        "rank 0 of 2: not finished in time: was at line N of ignore_sigterm\nmeanwhile\n"
        "  rank 1 was at line N of ignore_sigterm",
    ),
    block_every_signal: (
        3,
        "rank 0 of 2: not finished in time: was at line N of block_every_signal\nmeanwhile\n"
        "  rank 1 was at line N of block_every_signal",
    ),
    one_closes_its_files: (
        1,
        "rank 1 of 2: died with SIGABRT\nmeanwhile\n  rank 0 was waiting in all_reduce, line N of one_closes_its_files",
    ),
    fill_memory: (
        1,
        "rank 0 of 2: MemoryError\n  test_launch.py, line N, in fill_memory\n"
        "    hoard.append(bytearray(20 * 2**20))\nmeanwhile\n  rank 1 raised MemoryError, line N of fill_memory",
    ),
    thread_that_goes_on: (
        2,
        "rank 0 of 2: not finished in time: had returned already, and its process did not end\nmeanwhile\n"
        "  rank 1 had returned already",
    ),
    fork_and_wait: (
        2,
        "rank 0 of 2: not finished in time: was at line N of fork_and_wait\nmeanwhile\n"
        "  rank 1 was at line N of fork_and_wait",
    ),
}


@pytest.mark.parametrize("fn", WHATEVER, ids=lambda fn: fn.__name__)
def test_launch_ends_in_time_whatever_ranks_do(fn, monkeypatch):
    monkeypatch.setattr(launching, "LEEWAY", 0.7)  # so that the tests take less time
    seconds, text = WHATEVER[fn]
    before, begin = running(), time.time()
    with pytest.raises(RankFailed) as failure:
        launch(fn, 2, timeout=1)
    took = time.time() - begin
    assert re.sub(r"line \d+", "line N", str(failure.value)) == text
    assert took < seconds + 3  # which is for a busy machine
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


def test_processes_of_the_caller_are_left_alone():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep, start_new_session=True) as had:
        launch(dist.get_rank, 2)
        assert had.poll() is None
        had.kill()


def launch_within():
    launch(dist.get_rank, 2)


def test_ranks_do_not_launch():
    with pytest.raises(RankFailed, match="rank 0 of 2: UserError: launch starts a process group of its own, and this"):
        launch(launch_within, 2, timeout=5)


def test_launches_of_several_threads_take_turns():
    results = []
    threads = [threading.Thread(target=lambda: results.append(launch(dist.get_rank, 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert launch(dist.get_rank, 2) == [0, 1]
    for thread in threads:
        thread.join()
    assert results == [[0, 1]] * 3


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


def raise_one_after_the_other(first: int, seconds: float):
    """The ranks meet before and note the time, so that a busy machine does not change their order."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == first:
        store.set("raised at", str(time.time()))
        raise ValueError("the cause")
    time.sleep(max(0.0, float(store.get("raised at")) + seconds - time.time()))
    raise KeyError("its consequence")


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_two_errors_is_named(first):
    with pytest.raises(RankFailed) as failure:
        launch(raise_one_after_the_other, 2, (first, 0.3), timeout=10)
    text = re.sub(r"line \d+", "line N", str(failure.value))
    assert failure.value.rank == first
    assert text.startswith(f"rank {first} of 2: ValueError: the cause\n")
    assert text.endswith(
        f"  rank {1 - first} later raised KeyError: 'its consequence', line N of raise_one_after_the_other"
    )


def test_of_errors_at_the_same_time_the_lowest_ranks_is_named():
    """So that a notebook's text is the same in every run."""
    with pytest.raises(RankFailed, match="rank 0 of 2: KeyError: 'its consequence'\n") as failure:
        launch(raise_one_after_the_other, 2, (1, 0.0), timeout=10)
    assert failure.value.where[1].startswith("raised ValueError: the cause, line ")


def die_and_raise(seconds: float):
    """Rank 1 dies; rank 0, which does not talk to it, raises later."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("died at", str(time.time()))
        os._exit(7)
    time.sleep(max(0.0, float(store.get("died at")) + seconds - time.time()))
    raise ValueError("a consequence")


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_death_comes_before_the_errors_it_causes(seconds):
    with pytest.raises(RankFailed, match="rank 1 of 2: died with exit code 7\n"):
        launch(die_and_raise, 2, (seconds,), timeout=10)


def test_an_error_comes_before_a_later_death():
    def work():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.set("raised at", str(time.time()))
            raise ValueError("the cause")
        time.sleep(max(0.0, float(store.get("raised at")) + 0.3 - time.time()))
        os._exit(7)

    with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: the cause\n") as failure:
        launch(work, 2, timeout=10)
    assert failure.value.where[0] == "died with exit code 7"


def test_a_rank_at_work_is_named_before_those_that_wait_for_it():
    def work():
        if dist.get_rank() == 2:
            while True:
                pass
        if dist.get_rank() == 1:
            time.sleep(3)  # its barrier does not time out within the launch's time
            dist.barrier()

    with pytest.raises(RankFailed, match="rank 2 of 3: not finished in time: was at line ") as failure:
        launch(work, 3, timeout=1)
    assert failure.value.where[0] == "had returned already"
    assert failure.value.where[1].startswith("was waiting in barrier, line ")
