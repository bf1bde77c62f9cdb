"""The post-mortem of a launch names the failure that the others follow from."""

import json
import os
import re
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from helpers import arrive, time_is_up_when_all_have_arrived, wait_until, when_inside

from common import ranks
from common.lab import launch as launching
from common.lab import postmortem
from common.lab.launch import RankFailed, launch
from common.lab.postmortem import explain


@pytest.fixture
def heard(monkeypatch):
    """However busy the machine is, `launch` waits until it has heard from each rank."""
    monkeypatch.setattr(launching, "SETTLE", 100.0)


def store():
    return dist.distributed_c10d._get_default_store()


def folder() -> Path:
    """That of the launch: what ranks write there is the only trace of what they have done that takes no message."""
    inner = store()
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    return Path(inner.path).parent


def raise_one_after_the_other(first: int):
    if dist.get_rank() == first:
        raise ValueError("the cause")
    wait_until(Path(folder(), f"error-{first}").exists, "error of the first")
    time.sleep(2 * postmortem.AT_ONCE)
    raise KeyError("its consequence")


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_two_errors_is_named(first, heard):
    with pytest.raises(RankFailed) as failure:
        launch(raise_one_after_the_other, 2, (first,), timeout=100)
    text = re.sub(r"line \d+", "line N", str(failure.value))
    assert failure.value.rank == first
    assert text.startswith(f"rank {first} of 2: ValueError: the cause\n")
    later = f"  rank {1 - first} later raised KeyError: 'its consequence', line N of raise_one_after_the_other"
    assert text.endswith(later), "the error that came later is not told as such"


def test_of_errors_at_the_same_time_the_lowest_ranks_is_named(heard, monkeypatch):
    """So that a notebook's text is the same in every run."""

    def work():
        raise ValueError(f"that of rank {dist.get_rank()}")

    monkeypatch.setattr(postmortem, "AT_ONCE", 100.0)
    with pytest.raises(RankFailed, match="rank 0 of 2: ValueError: that of rank 0\n") as failure:
        launch(work, 2, timeout=100)
    assert failure.value.where[1].startswith("raised ValueError: that of rank 1, line ")


C10D, LOGGER = "/x/torch/distributed/distributed_c10d.py", "/x/torch/distributed/c10d_logger.py"
RUN = ("/course/common/lab/launch.py", 280, "_run_rank")
STACKS = [  # innermost frame first
    ([("/notes/mine.py", 7, "work"), RUN], "line 7 of work"),
    ([("/usr/lib/python3.11/queue.py", 171, "get"), ("/notes/mine.py", 7, "work"), RUN], "line 7 of work"),
    ([(C10D, 3000, "all_reduce"), (LOGGER, 81, "wrapper"), ("/notes/mine.py", 7, "work"), RUN],
     "all_reduce, line 7 of work"),
    ([(C10D, 10, "_wait"), (C10D, 3000, "barrier"), ("/notes/mine.py", 7, "work"), ("/notes/mine.py", 9, "all")],
     "barrier, line 7 of work"),
    ([(LOGGER, 90, "wrapper"), ("MINE", 2, "work"), RUN], "all_gather, line 2 of work"),
    ([(LOGGER, 90, "wrapper"), ("MINE", 1, "work"), RUN], "collective, line 1 of work"),
    ([("/x/torch/nn/modules/module.py", 3, "forward"), ("MINE", 2, "work"), RUN], "line 2 of work"),
    ([(C10D, 1, "init_process_group"), ("<frozen importlib>", 2, "find"), RUN, ("/notes/mine.py", 7, "main")],
     ""),
]  # fmt: skip


@pytest.mark.parametrize(("frames", "doing"), STACKS)
def test_what_a_rank_was_doing_is_read_from_its_stack(frames, doing, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("first = second(1)\ndist.all_gather(list(parts), tensor)\n")
    lines = [f'  File "{file.replace("MINE", str(mine))}", line {line} in {name}' for file, line, name in frames]
    others = ["Thread 0x7f01 (most recent call first):", '  File "/notes/mine.py", line 1 in another', ""]
    everybody = ["Timeout (0:00:05)!", *others, "Thread 0x7f02 (most recent call first):", *lines]
    for text in (["Stack (most recent call first):", *lines], everybody):  # the main thread is the last
        (tmp_path / "stack-0").write_text("\n".join(text) + "\n")
        (told,) = explain(tmp_path, 1, {}, set())[2]
        assert told.endswith(doing) and ("line" in told) == bool(doing), "what the rank was doing"


def wrote(folder: Path, rank: int, error: str, when: float = 100.0, **more) -> None:
    """What a rank leaves that has raised an error."""
    about = {"time": when, "error": error, "dead": [], "operation": "", "frames": [], "place": "line 7 of work"} | more
    (folder / f"error-{rank}").write_text(json.dumps(about))


def at(line: int) -> str:
    return f'Stack (most recent call first):\n  File "/notes/mine.py", line {line} in work\n'


def test_a_report_tells_of_every_rank(tmp_path):
    """All that can become of a rank, at once: the first failure, and what the others were doing meanwhile."""
    frames = ["  mine.py, line 3, in work", "    broken()"]
    for rank, (error, when, operation) in {
        0: ("RuntimeError: Connection reset by peer", 99.0, "all_reduce"),
        1: ("ValueError: later", 100.21, ""),
        2: ("ValueError: why", 100.1, ""),
        3: ("RuntimeError: a timeout", 100.0, "broadcast"),
        10: ("RuntimeError: Timed out", 100.5, "gather"),
    }.items():
        wrote(tmp_path, rank, error, when, operation=operation, frames=frames, place=f"line {rank} of f")
    for rank in (5, 6):
        (tmp_path / f"stack-{rank}").write_text(at(rank))
    for name in ("returned-4", "returned-7", "result-7", "returned-9"):
        (tmp_path / name).touch()
    (tmp_path / "stdout-2").write_bytes(b"printed \xff\n")
    (tmp_path / "stderr-2").write_text("warned\n")
    ended = {2: (98.5, 1), 4: (100.5, -11), 7: (98.0, 0), 8: (101.0, 3), 11: (102.0, 0)}
    text, first, where, output = explain(tmp_path, 12, ended, {6})
    head, below = text.split("meanwhile")
    assert " ".join(head.split()) == "rank 2 of 12: ValueError: why mine.py, line 3, in work broken()"
    told = ["all_reduce line 0", "ValueError: later line 1", "broadcast line 3", "SIGSEGV returned", "line 5 of work"]
    told += ["stopped line 6 of work", "returned", "exit code 3", "returned", "gather line 10", "exit code 0"]
    others = [rank for rank in range(12) if rank != 2]
    for rank, words, line in zip(others, told, below.strip().splitlines(), strict=True):
        assert f"rank {rank} " in line and all(word in line for word in words.split()), line
    assert first == 2 and "ValueError: why" in where[2] and "exit code 3" in where[8]
    assert output == ["", "", "printed \ufffd\nwarned\n", *[""] * 9], "what each rank printed: stdout, then stderr"


def test_without_a_failure_a_rank_at_work_is_the_cause(tmp_path):
    def report(*stacks, nproc=3):
        for rank, stack in enumerate(stacks):
            (tmp_path / f"stack-{rank}").write_text(stack)
        return explain(tmp_path, nproc, {}, set())[0].splitlines()

    (tmp_path / "returned-0").touch()
    waiting = at(1).replace("  File", f'  File "{C10D}", line 3 in recv\n  File')
    first, _, returned, waits = report("", waiting, at(2))
    assert first.startswith("rank 2 of 3:") and "line 2 of work" in first, "a rank at work is the cause"
    assert "rank 0 " in returned and "rank 1 " in waits and "recv" in waits
    assert report("", waiting, waiting)[0].startswith("rank 1 of 3:")
    assert report(nproc=1)[0].startswith("rank 0 of 1:")


def test_an_error_is_told_without_what_gloo_says_of_itself(tmp_path):
    def work():
        raise RuntimeError(
            "[enforce fail at /x/pair.cc:1] [/x/gloo/transport/tcp/pair.cc:534] Connection closed by "
            "peer [::1]:5. This is typically caused by a crash."
        )

    try:
        work()
    except RuntimeError as error:
        postmortem.write_error(error, tmp_path, "3")
    report = json.loads((tmp_path / "error-3").read_text())
    assert report["error"] == "RuntimeError: Connection closed by peer [::1]:5.", "without places in C++"
    assert report["place"].endswith(" of work") and report["operation"] == ""
    assert [line.split(",")[0] for line in report["frames"][::2]] == ["  test_postmortem.py"] * 2, "the caller's frames"
    assert report["frames"][-2].endswith(", in work") and report["frames"][-1].startswith("    raise RuntimeError(")
    assert abs(report["time"] - time.time()) < 60, "when it was raised, in seconds since the epoch"


def test_an_error_in_a_cell_names_its_collective(tmp_path):
    """The one that was called, of several functions of PyTorch, and no name of a temporary file."""
    inside, names = "def barrier():\n    _wait()\ndef _wait():\n    raise ValueError\n", {}
    exec(compile(inside, C10D, "exec"), names)
    exec(compile("def step():\n    barrier()\n", "/somewhere/ipykernel_1/2.py", "exec"), names)
    try:
        names["step"]()
    except ValueError as error:
        postmortem.write_error(error, tmp_path, "0")
    report = json.loads((tmp_path / "error-0").read_text())
    assert (report["operation"], report["error"]) == ("barrier", "ValueError"), "the collective that was called"
    assert report["frames"][-2:] == ["  <notebook cell>, line 2, in step", "    "], "the frame of a cell"
    assert report["place"] == "line 2 of step"


def test_a_lost_connection_is_a_consequence(tmp_path):
    """Even where it is noticed first: the rank at the other end is slower to say why it has gone."""
    wrote(tmp_path, 0, "RuntimeError: Connection closed by peer [::1]:1", 100.0), wrote(tmp_path, 1, "E: why", 100.9)
    text, first, *_ = explain(tmp_path, 2, {}, set())
    assert (text.splitlines()[0], first) == ("rank 1 of 2: E: why", 1), "the cause is on rank 1"
    (tmp_path / "error-1").unlink()
    text = explain(tmp_path, 2, {}, set())[0]
    assert text.startswith("rank 0 of 2: RuntimeError: Connection closed by peer"), "nobody has said more than that"


def test_who_had_returned_and_waited_in_vain_is_no_cause(tmp_path):
    """The others were to return too, and a rank that is still at work has kept them from ending."""
    for error in ("DistStoreError: wait timeout after 3000ms", "RuntimeError: Timeout"):
        wrote(tmp_path, 0, error)
        (tmp_path / "returned-0").touch()
        text, first, where, _ = explain(tmp_path, 2, {}, set())
        assert first == 1 and "returned" in where[0] and text.startswith("rank 1 of 2: "), "the rank at work"


@pytest.mark.parametrize("late", [0, 1000])
def test_a_death_comes_before_the_errors_it_causes(late, heard, monkeypatch):
    """Also where `launch` notices it late, as on a busy machine."""
    wait = launching._wait
    noticed = lambda ended: {rank: (when + late, code) for rank, (when, code) in ended.items()}  # noqa: E731
    monkeypatch.setattr(launching, "_wait", lambda *args: noticed(wait(*args)))

    def work():
        if dist.get_rank() == 1:
            store().set("process", str(os.getpid()))
            os._exit(7)
        process = psutil.Process(int(store().get("process")))
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "death")
        raise ValueError("a consequence")

    with pytest.raises(RankFailed, match="rank 1 of 2: died with exit code 7\n"):
        launch(work, 2, timeout=100)


def test_an_error_comes_before_a_later_death(heard):
    def work():
        if dist.get_rank() == 1:
            raise ValueError("the cause")
        wait_until(Path(folder(), "error-1").exists, "error of rank 1")
        time.sleep(2 * postmortem.AT_ONCE)
        os._exit(7)

    with pytest.raises(RankFailed, match="rank 1 of 2: ValueError: the cause\n") as failure:
        launch(work, 2, timeout=100)
    assert failure.value.where[0] == "died with exit code 7"


@pytest.mark.parametrize("impatient", ["launch", "the rank that has returned"])
def test_a_rank_at_work_is_named_before_those_that_wait_for_it(impatient, monkeypatch, tmp_path):
    time_is_up_when_all_have_arrived(monkeypatch, tmp_path)

    def leave(store, *args, **options):  # rank 0, once the others are where they stay
        wait_until(lambda: all((tmp_path / f"arrived-{rank}").exists() for rank in (1, 2)), "other ranks")
        if impatient == "launch":
            arrive(tmp_path)
            time.sleep(600)
        barrier(store, *args, barrier_timeout=0.1)

    def work():
        if dist.get_rank() == 0:
            monkeypatch.setattr(ranks, "store_barrier", leave)
        if dist.get_rank() == 1:
            when_inside("barrier", lambda: arrive(tmp_path))
            dist.barrier()
        if dist.get_rank() == 2:
            arrive(tmp_path)
            while True:
                time.sleep(0.01)

    barrier = ranks.store_barrier
    with pytest.raises(RankFailed, match="rank 2 of 3: ") as failure:
        launch(work, 3, timeout=100)
    assert "returned" in failure.value.where[0] and "barrier" in failure.value.where[1]
