"""launch: results in rank order, printing in rank order, and failures that name rank, place and cause."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, impatient, running

from common.lab import launch as launching
from common.lab.launch import RankFailed, launch, setenv


def whoami(greeting: str) -> tuple:
    print("a warning", file=sys.stderr)
    print(greeting, "from", dist.get_rank())
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), type(store)


@pytest.mark.parametrize("start_method, nproc", [("fork", 3), *[("spawn", 2)] * FULL])  # of spawned ones: below
def test_results_and_output_come_in_rank_order(start_method, nproc, capfd):
    results = launch(whoami, nproc, ("hello",), start_method=start_method)
    expected = [(rank, nproc, 1, dist.FileStore) for rank in range(nproc)]
    assert results == expected, "rank, size, threads, and where ranks meet, in rank order; no name server is asked"
    lines = [f"[rank {rank}] hello from {rank}\n[rank {rank}] a warning\n" for rank in range(nproc)]
    assert capfd.readouterr().out == "".join(lines), "each line headed by its rank, what went to stderr after the rest"


def about_a_rank() -> dict:
    return {
        "threads of a rank alone": torch.get_num_threads(),
        "a process group of the system's, of its own": os.getpgrp() == os.getpid() != int(os.environ["CALLER"]),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "killed first where memory runs out": Path("/proc/self/oom_score_adj").read_text().strip(),
        "what PyTorch tells of collectives": dist.get_debug_level().name,
        "seconds until a collective times out": dist.distributed_c10d._get_default_timeout(torch.device("cpu"))
        and dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "variables": {name: os.environ[name] for name in launching.rank_variables(0, 1, 1) if name != "MASTER_PORT"},
    }


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's /proc")
def test_what_a_rank_finds(monkeypatch):
    """One alone computes with one thread as several do: so its numbers are bit by bit those of each of them."""
    monkeypatch.setenv("CALLER", str(os.getpid()))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        (found,) = launch(about_a_rank, 1, timeout=33.0)
    finally:
        torch.set_num_threads(threads)
    assert found == {
        "threads of a rank alone": 1,
        "a process group of the system's, of its own": True,
        "signals": [signal.SIG_DFL] * 2,
        "killed first where memory runs out": "500",
        "what PyTorch tells of collectives": "INFO",
        "seconds until a collective times out": 33.0,
        "variables": {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
        },
    }  # fmt: skip


@pytest.mark.parametrize("start_method, nproc", [("fork", 2), ("spawn", 1)])
def test_functions_of_a_notebook(start_method, nproc):
    """What a cell defines belongs to no file: closures, lambdas, and results whose class only the cell knows."""

    class Answer:
        def __init__(self, value):
            self.value = value

    factor = 3
    answers = launch(lambda: Answer(factor * (dist.get_rank() + 1)), nproc, start_method=start_method)
    assert [answer.value for answer in answers] == [3, 6][:nproc]


def test_after_heavy_work_on_many_threads():
    """The parent has computed and differentiated with a pool of threads, which forked ranks do not have."""

    def work():
        weight = torch.randn(300, 300, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad.shape

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    work()
    assert launch(work, 2, timeout=100) == [(300, 300)] * 2
    torch.set_num_threads(threads)


def test_no_rank_begins_before_all_have_met(monkeypatch, tmp_path):
    """One that fails at once would otherwise keep the others in init_process_group, and the report would say so."""
    init_process_group = dist.init_process_group

    def late(*args, **options):
        init_process_group(*args, **options)
        if options["rank"] == 1:
            time.sleep(0.4)
            (tmp_path / "met").write_text(str(time.monotonic()))

    monkeypatch.setattr(dist, "init_process_group", late)
    assert min(launch(time.monotonic, nproc=3)) >= float((tmp_path / "met").read_text())


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
        impatient(2.0)
        dist.all_reduce(torch.ones(2))


def sleep_instead():
    if dist.get_rank() == 0:
        impatient(2.0)
        dist.broadcast(torch.ones(2), src=1)
    else:
        time.sleep(600)


def be_killed():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))


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
}


@pytest.mark.parametrize("fn", FAILURES, ids=lambda fn: fn.__name__)
def test_failures_name_rank_place_and_cause(fn):
    rank, pattern = FAILURES[fn]
    before = running()
    with pytest.raises(RankFailed) as failure:
        launch(fn, 2, timeout=100)
    assert re.match(pattern, str(failure.value)), str(failure.value)
    assert rank == failure.value.rank
    assert len(failure.value.where) == len(failure.value.output) == 2
    assert running() <= before


def test_output_of_a_failed_launch_is_kept():
    def speak_and_die():
        print("last words of", dist.get_rank())
        if dist.get_rank() == 1:
            os._exit(7)
        raise ValueError("over")

    with pytest.raises(RankFailed) as failure:
        launch(speak_and_die, 2)
    assert failure.value.output == ["last words of 0\n", "last words of 1\n"], "what was printed before the end"


def test_the_callers_signals_environment_and_processes_are_left_alone():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleep, start_new_session=True) as had:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)
        launch(dist.get_rank, 2)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), dict(os.environ)) == before
        assert had.poll() is None
        had.kill()


def test_variables_are_set_inside_of_the_block_only(monkeypatch):
    monkeypatch.setenv("OLD", "before")
    with setenv(OLD="inside", NEW="inside"):
        assert (os.environ["OLD"], os.environ["NEW"]) == ("inside", "inside")
        os.environ["ANOTHER"] = "inside"
    found = os.environ["OLD"], os.environ.get("NEW"), os.environ.get("ANOTHER")
    assert found == ("before", None, None), "after the block"


def launch_within():
    launch(dist.get_rank, 2)


def test_ranks_do_not_launch():
    with pytest.raises(RankFailed, match="rank 0 of 2: UserError: "):
        launch(launch_within, 2, timeout=100)


def test_launches_of_several_threads_take_turns():
    results = []
    threads = [threading.Thread(target=lambda: results.append(launch(dist.get_rank, 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert launch(dist.get_rank, 2) == [0, 1]
    for thread in threads:
        thread.join()
    assert results == [[0, 1]] * 3
