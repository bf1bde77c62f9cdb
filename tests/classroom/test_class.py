"""A class, some of it hostile: nobody else's grade changes, nobody gets points that are not earned, nobody is lost."""

import contextlib
import csv
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from helpers import FULL, refused
from hostile import ALL, GENERATED, HOSTILE

from common import ROOT, check
from common.grading import classes, engine, exports, fresh, inside, network, sandbox
from common.grading.classes import Graded, Grading, Submission, safe
from common.grading.engine import SIZES, CallOutcome, Exercise, ExerciseCase, Verdict
from common.grading.values import Description, difference, plain

THREE = ("ring_shift", "global_mean", "ring_bytes")  # of 1, 1 and 2 points, which the submissions of hostile.py answer
# Each starts Python and PyTorch in a sandbox of its own, which takes four seconds of a processor: one that changes what
# judges, and one that ends other processes; the walls below show the rest of the sandbox, and FULL=1 every way out.
FEW = ["replaces_the_ledger", "kills_all_when_called"]
TABLE = HOSTILE | {name: (text, None, "") for name, text in GENERATED.items()}
HERE = list(TABLE) if FULL else FEW
walled = pytest.mark.skipif(bool(sandbox.available()), reason=f"no sandbox: {sandbox.available()}")


@functools.cache
def first_three() -> list[Exercise]:
    """Of chapter 01, with cases that no submission has seen."""
    three = [exercise for exercise in check.exercises_of("01_intro") if exercise.name in THREE]
    return fresh.with_fresh_cases(three, ROOT / "01_intro" / "classroom" / "solutions.py", seed=1)


def grade(found: list[Submission], capfd, **more) -> dict[str, dict]:
    Grading(first_three(), check.minutes_of("01_intro"), **{"time_limit": 600.0} | more).all(found)
    output = capfd.readouterr()
    return {row["submission"]: row for row in csv.DictReader(output.out.splitlines())} | {"stderr": output.err}


@pytest.fixture
def marks(monkeypatch) -> list[str]:
    """Of the processes of all submissions of a test."""
    seen, enter = [], sandbox.Runner.__enter__
    monkeypatch.setattr(sandbox.Runner, "__enter__", lambda runner: seen.append(runner.mark) or enter(runner))
    return seen


def left(marks: list[str]) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(sandbox.MARK) in marks:
                found.append(process.pid)
    return found


# Of an honest submission too, for which a wall that is missing is no points. What a rank has open are its own pipes.
LOOKS = """
import stat
assert os.path.exists("{SHOWN}/open.txt"), "nothing is shown"
seen = [name for folder in ("class", "pages", "exports") for name in os.listdir("{SHOWN}/" + folder)]
kinds = []
for descriptor in range(3, 256):
    try:
        kinds.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
    except OSError:
        pass
for folder in ("class", "pages", "exports"):
    try:
        open("{SHOWN}/" + folder + "/for another rank", "w")
    except OSError:
        continue
    raise AssertionError(folder + " carries messages")
assert seen == [] and stat.S_IFSOCK not in kinds and kinds.count(stat.S_IFIFO) <= 2, (seen, kinds)
"""


@walled
def test_nobody_harms_another_or_gains_by_it(tmp_path, capfd, marks, monkeypatch):
    monkeypatch.setattr(engine, "CALL_LIMIT", 20.0)  # of processor time, which a busy machine does not lengthen
    shown, secret = tmp_path / "shown", tmp_path / "secret.txt"
    folder, more = shown / "class", shown / "exports"
    for path in (folder, more):
        path.mkdir(parents=True)
    for path in (shown / "open.txt", more / "canvas.csv", secret):
        path.write_text("secret")
    of_the_course = sandbox.course()
    monkeypatch.setattr(sandbox, "course", lambda: [*of_the_course, shown])  # the class lies in what is shown
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        for one in (server, unix):
            threading.Thread(target=lambda one=one: heard.append(one.accept()), daemon=True).start()
        about = {"FOLDER": folder, "ROOT": ROOT, "PORT": server.getsockname()[1], "SOCKET": tmp_path / "socket"}
        for name in HERE:
            text = TABLE[name][0]
            for word, value in (about | {"TMP": sandbox.TEMPORARY}).items():
                text = text.replace("{" + word + "}", str(value))
            (folder / f"{name}.py").write_text(text)
        honest = ["ann", "zoe"] if FULL else ["zoe"]  # the first and the last
        for name in honest:
            (folder / f"{name}.py").write_text(f"# {name}\n{ALL}{LOOKS.format(SHOWN=str(shown))}")
        before = {path: path.read_bytes() for path in (*folder.iterdir(), secret, ROOT / "01_intro" / "exercises.py")}
        rows = grade(classes.submissions(folder), capfd, pages=shown / "pages", hidden=(more,))
    assert {path: path.read_bytes() for path in before} == before and len(list(folder.iterdir())) == len(before) - 2
    assert heard == [] and rows.pop("stderr") == "" and left(marks) == []
    assert list(rows) == sorted([*HERE, *honest])
    mistaken = []
    for name, row in rows.items():
        _, points, note = TABLE.get(name, ("", 4, "^$"))
        earned = int(row["points"]) in ((0, 1, 4) if points is None else (points,))
        if name in GENERATED:  # its first exercise alone is right
            earned = int(row["points"]) in (0, 1) and "right" not in (row["global_mean"], row["ring_bytes"])
        if not earned or row["maximum"] != "4" or not re.search(note, row["note"]):
            mistaken.append(f"{name}: {row['points']}, {row['note']}")
    assert not mistaken, "\n".join(mistaken)
    assert len(TABLE) >= 100, "submissions that are run with FULL=1"


@walled
@pytest.mark.parametrize("chapter", check.chapters() if FULL else ["04_model_parallel"])
def test_right_answers_are_right_in_the_sandbox_too(chapter, tmp_path, marks):
    """Where the one who judges carries their messages."""
    solutions = ROOT / chapter / "classroom" / "solutions.py"
    (tmp_path / "x.py").write_text(solutions.read_text())
    tmp_path.chmod(0o755)
    exercises = check.for_a_class(chapter, seed=4)
    results = Grading(exercises, {}, 900.0).one(tmp_path / "x.py")
    assert [(r.exercise.name, r.text) for r in results if r.status != "right"] == []
    assert left(marks) == []


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine may keep a rank from its turn for longer than a learner would wait."""
    monkeypatch.setattr(engine, "PATIENCE", 60.0)  # of gloo
    monkeypatch.setattr(engine, "CALL_LIMIT", 120.0)


EVERY_WAY = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

def collectives(mine):
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for how in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        found.append(mine.clone())
        dist.all_reduce(found[-1], how)
    for to_all in (lambda t: dist.broadcast(t, size - 1), lambda t: dist.reduce(t, 1)):
        found.append(mine.clone())
        to_all(found[-1])
    found[-1] = found[-1] if rank == 1 else None
    parts = [mine + n for n in range(size)]
    empty = lambda: [torch.empty_like(mine) for _ in range(size)]
    there, gathered = empty(), empty() if rank == size - 1 else None
    dist.all_gather(there, mine)
    dist.gather(mine, gathered, size - 1)
    one, whole, half = torch.empty_like(mine), torch.empty(size * len(mine)), torch.empty_like(mine)
    dist.scatter(one, parts if rank == 1 else None, 1)
    dist.all_gather_into_tensor(whole, mine)
    dist.reduce_scatter_tensor(half, whole * rank)
    uneven = torch.empty(sum(r + 1 for r in range(size)) if rank == 0 else 0)
    dist.all_to_all_single(uneven, mine[: rank + 1], [r + 1 for r in range(size)] if rank == 0 else [0] * size,
                           [rank + 1] + [0] * (size - 1))
    texts = [None] * size
    dist.all_gather_object(texts, f"rank {rank}")
    dist.barrier()
    return [*found, there, gathered, one, whole, half, uneven, texts]

def messages(mine):
    rank, size = dist.get_rank(), dist.get_world_size()
    one, other = torch.empty_like(mine), torch.empty_like(mine)
    for tag in (1, 0):
        waits = [dist.isend(mine + tag, (rank + 1) % size, tag=tag)]
        waits += [dist.irecv(other if tag else one, (rank - 1) % size, tag=tag)]
        [w.wait() for w in reversed(waits)]
    both = [dist.P2POp(dist.irecv, batch := torch.empty_like(mine), (rank + 1) % size)]
    both += [dist.P2POp(dist.isend, mine.double().float(), (rank - 1) % size)]
    [w.wait() for w in dist.batch_isend_irecv(both)]
    any_rank = torch.empty_like(mine)
    dist.send(mine, 0) if rank == 1 else rank == 0 and dist.recv(any_rank)
    return [one, other, batch, any_rank if rank == 0 else None]

def groups(mine):
    mine = mine.clone()
    rank, size = dist.get_rank(), dist.get_world_size()
    pair, last = dist.new_group([0, 1]), dist.new_group([size - 1])
    if rank < 2:
        dist.all_reduce(mine, group=pair)
        dist.broadcast(mine, 1, group=pair)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    mine.neg_()
    work.wait()  # anew, which writes nothing
    mesh = init_device_mesh("cpu", (size,))
    sharded = distribute_tensor(torch.arange(2.0 * size), mesh, [Shard(0)])
    total = (sharded * mine.sum()).sum().full_tensor()
    return [mine, sharded.to_local(), total, sharded.redistribute(placements=[Replicate()]).to_local()]

def two_sends(mine):
    rank = dist.get_rank()
    if rank < 2:
        dist.send(mine, 1 - rank)
        dist.recv(mine, 1 - rank)

def one_is_missing(mine):
    dist.get_rank() and dist.all_reduce(mine)

def unwaited(mine):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.irecv(torch.empty_like(mine), (rank - 1) % size)
    dist.isend(mine, (rank + 1) % size).wait()
    return rank
"""
IN_VAIN = ("two_sends", "one_is_missing")  # there a rank waits for what never comes


@walled
def test_messages_in_the_sandbox_are_those_of_gloo(tmp_path, monkeypatch):
    """Results, what waits in vain, and the count: gloo's with a ledger, against those of the process that judges."""
    (tmp_path / "every_way.py").write_text(EVERY_WAY)
    tmp_path.chmod(0o755)
    names = re.findall(r"^def (\w+)", EVERY_WAY, re.M)
    arguments = [(torch.arange(1.0, 7) + 10 * rank,) for rank in range(3)]
    jobs = {name: (name, [arguments, arguments]) for name in names}
    ends = {name: job for name, job in jobs.items() if name not in IN_VAIN}
    by_gloo = engine.run_jobs(tmp_path / "every_way.py", ends, 3)
    monkeypatch.setattr(engine, "PATIENCE", 5.0)  # for what no patience would help: two calls, one after the other
    by_gloo |= engine.run_jobs(tmp_path / "every_way.py", {name: jobs[name] for name in IN_VAIN}, 3)
    with sandbox.Runner(tmp_path, 900.0) as runner:
        found = runner(tmp_path / "every_way.py", jobs, 3)
    for name in names:
        for theirs, ours in zip(by_gloo[name], found[name], strict=True):
            said = [[(o.status, o.entries, o.changed_input) for o in own] for own in (theirs, ours)]
            assert said[0] == said[1], f"{name}: {[o.text for o in ours]}"
            assert not [1 for a, b in zip(theirs, ours, strict=True) if difference(a.value, b.value)], name
    assert (
        {own[0].status for own in found["two_sends"]}
        == {"waited", "returned"}
        == {own[0].status for own in found["one_is_missing"]}
    )


@pytest.mark.parametrize(
    "calls, says",
    [
        ({0: ("all_reduce", [b"1234"], "sum"), 1: ("all_reduce", [b"12341234"], "sum")}, "4 8"),
        ({0: ("all_reduce", [b"1234"], "sum"), 1: ("all_reduce", [b"1234"], "max")}, "rank all_reduce"),
        ({0: ("all_reduce", [b"1234"], "sum"), 1: ("barrier", [], "")}, "rank 1 barrier"),
        ({0: ("all_reduce", [b"1234"], "avg"), 1: ("all_reduce", [b"1234"], "avg")}, "avg"),
        ({0: ("all_to_all", [b"1234"], ""), 1: ("all_to_all", [b"1234", b""], "")}, "all_to_all"),
        ({0: ("reduce_scatter", [b"1234"], "sum"), 1: ("reduce_scatter", [b"1234"], "sum")}, "reduce_scatter"),
    ],
)
def test_calls_that_are_no_collective_are_an_error_of_all_ranks(calls, says):
    requests = {
        rank: network.Request(0, operation, [0, 1], None, 0, reduction, "torch.float32", parts, 0)
        for rank, (operation, parts, reduction) in calls.items()
    }
    with pytest.raises(ValueError) as wrong:
        network.together(requests, (0, 1))
    assert not [word for word in says.split() if word not in str(wrong.value)], wrong.value


def test_a_network_refuses_what_is_no_request():
    """Of a rank that can say anything: it costs no memory, and ends nothing but its own submission."""
    good = [0, "all_reduce", [0, 1], None, 0, "sum", "torch.float32", [b"1234"], 0]
    for bad in (b"", b"x", {}, [], ["wait"], good[:-1], [*good[:2], [1], *good[3:]], [*good[:2], [0, 7], *good[3:]],
                [*good[:6], "torch.float99", *good[7:]], [*good[:8], -1], [0, "tells", *good[2:]],
                [*good[:5], "15.25", *good[6:]]):  # fmt: skip
        with pytest.raises((ValueError, TypeError, KeyError, IndexError, msgspec.MsgspecError)):
            network.Switch(2).take(0, bad if isinstance(bad, bytes) else msgspec.msgpack.encode(bad))
    switch = network.Switch(2)
    with pytest.raises(ValueError):
        for number in range(network.MOST_EMPTY + 1):
            switch.take(0, msgspec.msgpack.encode([number, "send", [0, 1], 1, number, "", "", [], 0]))
    switch = network.Switch(2)
    with pytest.raises(OverflowError):
        for _ in range(network.MOST_CARRIED // 2**24 + 1):
            switch.take(0, msgspec.msgpack.encode([*good[:7], [bytes(2**24)], 0]))


# Each of their ranks draws, and answers twice. Chapter 04 is answered in the sandbox above, by a class's cases too.
@pytest.mark.parametrize("chapter", check.chapters() if FULL else ["01_intro", "02_data_parallel"])
def test_every_exercise_of_a_class_has_inputs_that_nobody_has_seen(chapter):
    """And the solution, by which they are judged, is right there, as it is for the inputs that everybody knows."""
    known, unknown = check.exercises_of(chapter), check.for_a_class(chapter, seed=2)
    for before, after in zip(known, unknown, strict=True):
        calls = [[case.arguments for size in SIZES for case in of.check(size)] for of in (before, after)]
        same = repr(calls[0]) == repr(calls[1])
        assert not same or not any(own for call in calls[0] for own in call), f"{before.name} needs a draw in its row"
    solutions = ROOT / chapter / "classroom" / "solutions.py"
    others = getattr(engine.load(solutions), "RIGHT", {})  # answers that are right in another way
    attempts = [(e, name) for e in unknown for name in (e.name, *(f.__name__ for f in others.get(e.name, ())))]
    verdicts = engine.grade(attempts, solutions)
    pairs = zip(attempts, verdicts, strict=True)
    refused = [(name, v.where, v.expected, v.got) for (_, name), v in pairs if v.status != "right"]
    assert refused == [], "right answers that are refused"
    assert others.keys() <= {e.name for e in known}


def test_only_numbers_with_a_point_are_multiplied():
    """Each by its own factor, those of equal tensors by equal ones; those without a point are places and tokens."""
    x = torch.linspace(1, 2, 50)
    first, (again, places), name = fresh.multiplied([x, (x.clone(), torch.tensor([3, 4])), "sum"], 7)
    assert len(set((first / x).tolist())) > 3 and torch.equal(first, again), "not all by one number"
    assert places.tolist() == [3, 4] and name == "sum", "what would lie outside"
    assert not torch.equal(first, fresh.multiplied(x, 8)), "another seed, other numbers"


def test_a_seed_draws_the_same_cases_again_after_the_known_ones(monkeypatch):
    """And another one others: a teacher who grades a class in two parts asks both the same. What is expected of a rank
    is what the solution answers there."""

    def run_jobs(file, jobs, size):
        answer = lambda rank: SimpleNamespace(status="returned", value=rank, text="")  # noqa: E731
        return {key: [[answer(rank)] * len(calls) for rank in range(size)] for key, (_, calls) in jobs.items()}

    monkeypatch.setattr(fresh, "run_jobs", run_jobs)
    known = check.exercises_of("01_intro")
    arguments = []
    for seed in (1, 1, 2):
        new = []
        for before, after in zip(known, fresh.with_fresh_cases(known, Path("unused"), seed), strict=True):
            for size in SIZES:
                there, cases = ([*of.check(size)] for of in (before, after))
                assert [case.what for case in there] == [case.what for case in cases[: len(there)]]
                assert all(case.expected == [*range(size)] for case in cases[len(there) :])
                new += [repr(case.arguments) for case in cases[len(there) :]]
        arguments.append(new)
    once, again, other = arguments
    assert once == again and len(once) == len(other)
    assert sum(a != b for a, b in zip(once, other, strict=True)) > 0.5 * len(once)


def test_a_solution_that_fails_is_no_expectation(monkeypatch):
    good = SimpleNamespace(status="returned", value=1, text="")
    bad = SimpleNamespace(status="raised", value=None, text="ZeroDivisionError")
    asked = {"ring": [ExerciseCase("a case", [(), ()], [], None)] * 2}
    for answers, says in (
        ([[good, good], [good, bad]], "ring on 2 ranks, rank 1: ZeroDivisionError"),
        ([[], [good, good]], "ring on 2 ranks, rank 0: no answer"),
        ("rank 0 died", "ring on 2 ranks: rank 0 died"),
    ):
        monkeypatch.setattr(fresh, "run_jobs", lambda *args, answers=answers: {"ring": answers})
        with pytest.raises(fresh.NoSolution, match=says):
            list(fresh.answered(asked, Path("solutions.py"), 2))


WALLS = """
import json, os, pathlib, socket
root, status = pathlib.Path(ROOT), dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
room = lambda folder: os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize // 2**20
secrets = [root / ".git", root / "01_intro" / "classroom", root / "01_intro" / "exercises.py", root / "runs",
           *map(pathlib.Path, (HOME, OUTSIDE, "/run", "/var", "/etc/passwd"))]
places = [str(root / "common/x"), "/x", INSIDE + "/x", "/usr/x", "/dev/x"]
if pathlib.Path(INSIDE).parent not in root.parents:  # else it is a folder in memory, which ranks can't write either
    places += [str(root / "x")]
def writes(path):
    try:
        with open(path, "w"): return True
    except OSError:
        return False
print(json.dumps({
    "variables": sorted(os.environ), "network": [name for _, name in socket.if_nameindex()],
    "capabilities": int(status["CapEff"], 16) + int(status["CapBnd"], 16),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")), "session": os.getsid(0) > 0,
    "MiB": [room(os.getcwd()), room("/dev/shm")], "here": os.getcwd(), "seen": [str(p) for p in secrets if p.exists()],
    "code": (root / "common" / "check.py").exists() and (root / "01_intro" / "by_hand.py").exists(),
    "files": os.listdir(INSIDE),
    "written": [place for place in places if writes(place)],
}))
"""


@walled
def test_the_walls_of_the_sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "of the one who grades")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "exercises.py").touch()
    names = {"ROOT": ROOT, "HOME": Path.home(), "OUTSIDE": tmp_path, "INSIDE": sandbox.INSIDE}
    code = "".join(f"{name} = {str(value)!r}\n" for name, value in names.items()) + WALLS
    command = [*sandbox._bwrap(folder), sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout or done.stderr)
    seen = found.pop("seen")
    assert set(seen) <= {str(Path.home())} and (
        seen == [] or any(Path.home() in p.parents for p in python_and_course())
    )
    assert found.pop("processes") <= 4
    assert found == {
        "variables": ["LC_CTYPE", "PWD"], "network": ["lo"], "capabilities": 0, "session": True, "MiB": [256, 256],
        "here": str(sandbox.TEMPORARY), "code": True, "files": ["exercises.py"], "written": [],
    }  # fmt: skip
    assert "--die-with-parent" in command[:4], "the sandbox ends with the process that judges"


@walled
@pytest.mark.parametrize(
    "act, code", [("None", 0), ("os._exit(3)", 3), *[(f"os.kill(os.getpid(), {n})", 128 + n) for n in (9, 15)]]
)
def test_who_is_alone_ends_as_its_function_ends(act, code):
    """By a signal too, which bwrap tells as a shell does."""
    program = f"import os, sys; sys.path[:0] = [{str(ROOT / 'common/grading')!r}]; from alone import alone\n"
    program += f"alone({str(sandbox.OWN)!r}, 4096, lambda: {act})"
    done = subprocess.run([*sandbox._bwrap(), sys.executable, "-S", "-c", program])
    assert done.returncode == code


def python_and_course() -> list[Path]:
    return [ROOT, Path(sys.prefix), Path(sys.base_prefix)]


@walled
def test_a_class_within_the_course_is_hidden(monkeypatch, tmp_path):
    """As is whatever else is not to be seen in what is shown."""
    shown = tmp_path / "common"
    for path in (shown / "class", tmp_path / "course", tmp_path / "planner"):
        path.mkdir(parents=True)
    (shown / "class" / "jane.py").touch()
    monkeypatch.setattr(sandbox, "ROOT", tmp_path)
    code = f"import os; print(os.listdir({str(shown / 'class')!r}))"
    for hidden, says in (((), "['jane.py']"), ((shown / "class",), "[]"), ((shown,), "")):
        command = [*sandbox._bwrap(None, hidden), sys.executable, "-S", "-c", code]
        assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == says


@walled
def test_limits(tmp_path, monkeypatch, marks):
    """Processes, memory and time of a whole submission, each with a limit that an honest one would break."""
    (tmp_path / "ann.py").write_text(ALL)
    tmp_path.chmod(0o755)
    exercise = check.exercises_of("01_intro")[0]
    for name, limit, reason in (("MOST_PROCESSES", 1, "processes; 1 are allowed"), ("MOST_MEMORY", 2**24, "of memory")):
        with monkeypatch.context() as context:
            context.setattr(sandbox, name, limit)
            said = Grading([exercise], {}, 600.0).one(tmp_path / "ann.py")
            assert isinstance(said, str) and (reason in said or "exit code" in said), said  # a cgroup may be quicker
    assert Grading([exercise], {}, 0.2).one(tmp_path / "ann.py") == "not finished after 0.2 s"
    assert left(marks) == []


@walled
def test_a_cgroup_that_takes_no_limits_is_not_used(tmp_path, monkeypatch):
    """On made-up mounts of both versions: each limit is written down, or the group is left out, and removed."""
    monkeypatch.setattr(sandbox, "CGROUPS", tmp_path)
    for mount in (tmp_path, tmp_path / "memory", tmp_path / "pids"):
        mount.mkdir(exist_ok=True)
        (mount / "cgroup.procs").touch()
    for taken in (True, False):
        with monkeypatch.context() as context:
            if not taken:
                context.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError("Invalid argument")))
            folders = sandbox.Group().folders
        numbers = {int(path.read_text()) for folder in folders for path in folder.iterdir()}
        assert {*tmp_path.rglob("submission-*")} == {*folders} and bool(folders) is taken
        assert numbers == ({sandbox.MOST_MEMORY, sandbox.MOST_TASKS} if taken else set())
        for folder in folders:
            shutil.rmtree(folder)


def test_the_time_of_a_submission_is_not_that_of_a_busy_machine():
    """But neither is what it computes free, nor does a submission gain by many processes that wait for each other."""
    waiting, sleeping, computing, crowd = (sandbox.Allowance(10.0, 0.0) for _ in range(4))
    for now in range(1, 11):
        assert not waiting.is_used(now, {1: 0.9 * now}, [0.1 * now]) and not sleeping.is_used(now, {1: 0.0}, [0.0])
        assert not crowd.is_used(now, {pid: 0.9 * now for pid in range(50)}, [0.1]), "which wait, all of them"
    assert sleeping.is_used(10.1, {1: 0.0}, [0.0]) and not waiting.is_used(60, {1: 54.0}, [6.0])
    assert computing.is_used(6, {1: 0.0, 2: 0.0}, [5.5, 5.5]) and crowd.is_used(61, {1: 60.0}, [0.1])


def test_an_answer_is_waited_for_while_its_rank_waits_for_a_core(tmp_path, monkeypatch):
    """By a clock that a look moves by a second: for ten seconds the rank has waited for a core."""
    runner, looks = sandbox.Runner(tmp_path, 1000.0), []
    (ask_there, ask), (tell, tell_there) = os.pipe(), os.pipe()
    runner.pipes = [(ask, tell)]
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: float(len(looks))))

    def look():
        looks.append(None)
        runner.allowance.late += len(looks) <= 10

    monkeypatch.setattr(runner, "_look", look)
    with pytest.raises(sandbox.RanksEnded, match="no answer of rank 0 after 2 s"):
        runner._ask(None, 2.0)
    assert len(looks) == 13
    for descriptor in (ask_there, ask, tell, tell_there):
        os.close(descriptor)


def test_memory_that_is_shared_counts():
    code = "import mmap; m = mmap.mmap(-1, 1 << 26); m.write(b'x' * (1 << 26)); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        assert sandbox.memory_of(process.pid) > 1 << 26
        process.communicate(b"\n")
    assert sandbox.memory_of(process.pid) == 0, "a process that is gone"


def test_a_rank_that_reads_nothing_is_not_waited_for(tmp_path):
    """Whatever is sent to it, and whatever comes from it in place of an answer."""
    runner = sandbox.Runner(tmp_path, 0.5)
    runner.process = SimpleNamespace(pid=os.getpid())
    (ask_there, ask), (tell, tell_there) = os.pipe(), os.pipe()
    os.set_blocking(ask, False)
    runner.pipes = [(ask, tell)]
    with pytest.raises(sandbox.GradingEnded, match="not finished"):
        runner._ask([b"x" * 10**7], 60.0)
    runner.allowance.limit += 600
    os.write(tell_there, (2**40).to_bytes(8, "little"))
    with pytest.raises(sandbox.RanksEnded, match="longer than 32 MiB"):
        runner._ask(None, 60.0)
    for descriptor in (ask_there, ask, tell, tell_there):
        os.close(descriptor)


def test_a_starter_that_says_nothing_is_not_waited_for(tmp_path, monkeypatch):
    runner, looks = sandbox.Runner(tmp_path, 600.0), []
    monkeypatch.setattr(runner, "_look", lambda: looks.append(None) or len(looks) < 50 or pytest.fail("waits on"))
    runner.control, silent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with runner.control, silent, pytest.raises(sandbox.GradingEnded):
        runner._reply(0.2)


# --- data -----------------------------------------------------------------------------------------------------


def test_outcomes_come_back_as_they_were():
    tensors = [torch.tensor([[1.0, 2.0]]), torch.tensor(True), torch.tensor([1 + 2j]).conj(), torch.ones(2).bfloat16()]
    value = [*tensors, torch.empty(0, 3), [3, 2.5, True, None, "text"], Description("dict {}")]
    sent = CallOutcome("returned", value, [], True, "why", "printed\n")
    back = inside.unpacked(inside.packed(sent))
    for before, after in zip(value[:5], back.value[:5], strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after) and before.shape == after.shape
    assert back.value[5:] == value[5:] and type(back.value[6]) is Description
    assert (back.status, back.changed_input, back.text, back.printed) == ("returned", True, "why", "printed\n")


ODD = [
    10**5000, {"a": 1}, "\ud800", [[[]]], float("nan"), object(), print, torch.empty(2, device="meta"),
    torch.ones(2).to_sparse(), type("Evil", (), {"__str__": lambda self: 1 / 0})(),
    functools.reduce(lambda inner, _: [inner], range(500), 1),
    torch.ones(1).as_subclass(type("T", (torch.Tensor,), {})),
]  # fmt: skip


@pytest.mark.parametrize("value", range(len(ODD)))
def test_whatever_a_function_returns_can_be_told(value):
    assert inside.unpacked(inside.packed(CallOutcome("returned", plain(ODD[value])))).status == "returned"


def test_what_is_no_outcome_is_refused():
    good = inside.packed(CallOutcome("returned", torch.ones(3)))
    bad = [b"", b"nonsense", good[:-1], good + b"x", good.replace(b"returned", b"is right")]
    bad += [good.replace(b"float32", b"float99"), good.replace(b"tensor", b"pickle"), b"\x91" * 10_000]
    bad += [forged({"tensor": ["torch.float32", [2**33]]}, [b""]), forged(list(range(2**20)), [])]
    bad += [forged({"list": [{"tensor": ["torch.uint8", [4]]}] * 2}, [b"once"])]  # each tensor has bytes of its own
    for data in bad:
        with pytest.raises((ValueError, KeyError, TypeError, RuntimeError, RecursionError, StopIteration)):
            inside.unpacked(data)


def forged(value, tensors: list[bytes]) -> bytes:
    value = msgspec.Raw(msgspec.msgpack.encode(value))
    return msgspec.msgpack.encode(inside.Answer("returned", value, False, "", "", tensors))


# --- who is in a class ----------------------------------------------------------------------------------------


def test_whatever_lies_in_the_folder_has_its_row(tmp_path, capfd, monkeypatch, request):
    folder = tmp_path / "class"
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", folder], check=True))  # deeper than Python can delete
    (folder / "both").mkdir(parents=True)
    os.mkfifo(folder / "pipe.py")
    for name in ("nobody", "__pycache__", "linked", "hard", "huge", "heavy", "deep/er"):
        (folder / name).mkdir(parents=True)
    (folder / "large.py").write_text("#" * (2**20 + 1))
    with open(folder / "sparse.py", "wb") as file:
        file.truncate(2**40)
    (tmp_path / "secret").write_text("secret")
    (folder / "link.py").symlink_to("ann.py")
    (folder / "linked" / "exercises.py").symlink_to(tmp_path / "secret")
    (folder / "hard" / "exercises.py").touch()
    os.link(tmp_path / "secret", folder / "hard" / "notes.txt")
    (folder / "huge" / "exercises.py").touch()
    for number in range(17):
        (folder / "heavy" / f"{number}.bin").write_bytes(b"x" * 2**20)
    (folder / "heavy" / "exercises.py").touch()
    (folder / "huge" / "data.bin").write_bytes(b"x" * (2**20 + 1))
    (folder / "deep" / "exercises.py").write_text("import er.x")
    (folder / "deep" / "er" / "x.py").write_text("raise ValueError('its own file\\n```\\n# all right')")
    bottom = os.open(folder, os.O_RDONLY)
    for name in ("bottomless", *["x"] * 1500):  # deeper than Python's functions may call each other
        os.mkdir(name, dir_fd=bottom)
        above, bottom = bottom, os.open(name, os.O_RDONLY, dir_fd=bottom)
        os.close(above)
    os.close(bottom)
    (folder / "bottomless" / "exercises.py").touch()
    for number in range(classes.MOST_FILES + 1):
        (folder / "many" / str(number)).mkdir(parents=True)
    (folder / "many" / "exercises.py").touch()
    utf16 = "def f(): pass".encode("utf-16")
    texts = {"=cmd": b"def f(:", "both": b"def f(:", "a\nb\x1b[31m": b"", "utf16": utf16, "_x": b"", "UPPER": b""}
    for name, text in (texts | {"exercises": b"from both import *"}).items():
        (folder / f"{name}{'.PY' if name == 'UPPER' else '.py'}").write_bytes(text)
    (folder / os.fsdecode(b"\xff.py")).touch()
    os.link(folder / "utf16.py", folder / "twin.py")  # of the class: its author is not to lose by it
    for name in ("notes.txt", "x.tar.gz", ".DS_Store"):
        (folder / name).touch()
    found, one = classes.submissions(folder), Grading.one
    runs = re.compile("from both|import er.x")  # two of them are run, the others have answered nothing

    def graded(self, copied, hidden=()):
        idle = isinstance(copied, Path) and not runs.search(copied.read_text(errors="replace"))
        return "" if idle else one(self, copied, hidden)

    monkeypatch.setattr(Grading, "one", graded)
    rows = grade(found, capfd, pages=tmp_path / "pages")
    notes = {name: row["note"] for name, row in rows.items() if name != "stderr"}
    expected = {
        "'=cmd": "", "UPPER": "", "_x": "", r"a\nb\x1b[31m": "", "both.py": "", r"\xff": "", "utf16": "", "twin": "",
        "both": "no exercises.py in this folder", "nobody": "no exercises.py", "deep": "its own file",
        "heavy": "more than 16 MiB",
        "huge": "data.bin is larger", "exercises": "No module named 'both'", "large": "larger than 1 MiB",
        "sparse": "larger than 1 MiB", "link": "a link", "linked": "exercises.py is a link", "pipe": "not a file",
        "hard": "notes.txt is a hard link", "notes.txt": "neither", "x.tar.gz": "archive",
        "bottomless": "more than 16 deep",
        "many": "more than 200 files and folders",
    }  # fmt: skip
    assert set(notes) == set(expected) and rows["stderr"] == ""
    assert [name for name in notes if not re.search(expected[name], notes[name])] == [], notes
    assert len(list((tmp_path / "pages").iterdir())) == len(expected), "a page for each"
    for page in (tmp_path / "pages").iterdir():
        lines = page.read_text().splitlines()[1:]
        assert "secret" not in lines and not [line for line in lines if line and line[:4] != "    "], page.name
    assert [s.name for s in classes.submissions(folder / "both.py")] == ["both"], "a file is one submission"
    with refused("both"):
        (folder / "both" / "notes.txt").touch()
        classes.submissions(folder / "both")


def test_names_that_look_the_same_are_told_apart(tmp_path):
    for name in ("\u00e9", "e\u0301", "zoe"):  # an accent, as one character or as two
        (tmp_path / f"{name}.py").touch()
    assert sorted(one.name for one in classes.submissions(tmp_path))[-1] == "\u00e9 (2)"


def test_without_a_sandbox_nothing_is_graded_unless_told(tmp_path, monkeypatch, capfd):
    """Told it is: test_check.py grades a class so."""
    monkeypatch.setattr(sandbox, "available", sandbox.available.__wrapped__)  # which asks anew
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ann.py").write_text(ALL)
    with refused("bwrap", "--unprotected"):
        check.main(["01_intro", "--submission", str(tmp_path), "--csv"])
    assert capfd.readouterr().out == ""


def test_one_submission_that_cannot_be_graded_is_its_own_row(tmp_path, monkeypatch):
    exercise = Exercise("sum", 3, "easy", lambda size: [ExerciseCase("a", [()] * size, [1] * size, None)], "A hint.")
    for raised in (sandbox.GradingEnded("it ended"), ZeroDivisionError("it ended")):

        def runner(*_, raised=raised):
            raise raised

        monkeypatch.setattr(sandbox, "Runner", runner)
        assert "it ended" in Grading([exercise], {}, 7.0).one(tmp_path / "ann.py")


def test_no_cell_is_a_formula():
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", "  =1", "\t=1", "\r\n=HYPERLINK()"):
        assert safe(text).startswith("'")
    assert safe("a = 1\nb") == "a = 1 b" and safe(12) == "12"
    assert safe("naïve \ud800 €\x1b[2J").isprintable(), (
        "what cannot be written would end the grading of the whole class"
    )


# --- exports --------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path) -> Path:
    exercises = [Exercise(name, points, "", None, "") for name, points in (("first", 1), ("second", 3))]
    verdicts = [Verdict(exercises[0], "right"), Verdict(exercises[1], "wrong", "2 ranks", "1", "=cmd|'x'\x1b")]
    rows = [Graded("jane", verdicts), Graded('=Bob, "x"', "not finished"), Graded("../../Jane", verdicts)]
    rows.append(Graded("_.._Jane", verdicts))  # which has the same name without what is no letter
    exports.write_all(tmp_path / "out", "01_intro", exercises, rows)
    assert not (tmp_path.parent / "Jane").exists()
    return tmp_path / "out"


def test_what_canvas_takes(exported):
    """Its importer wants these columns, with the points that are possible in the row below."""
    header, possible, *rows = csv.reader((exported / "canvas.csv").open(encoding="utf-8", newline=""))
    assert header[:5] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"] and len(header) == 6
    assert possible[0].strip() == "Points Possible" and float(possible[5]) == 4
    assert [(row[3], float(row[5])) for row in rows] == [
        ("jane", 1),
        ('\'=Bob, "x"', 0),
        ("../../Jane", 1),
        ("_.._Jane", 1),
    ]


def test_what_moodle_takes(exported):
    """A column that says who, a grade, and feedback: without one of both, importing takes away the other."""
    header, *rows = csv.reader((exported / "moodle.csv").open(encoding="utf-8", newline=""))
    assert len(header) == len(set(header)) == 3 and header[0] == "username"
    assert [(row[0], float(row[1])) for row in rows][0] == ("jane", 1)
    assert all(row[2] and row[2].isprintable() and row[2][0] not in "=+-@" for row in rows)


def test_what_github_classroom_takes(exported):
    """As its reporter reads it: sums of scores, and a status of its own for what has not run."""
    found = {path.stem: json.loads(path.read_text()) for path in (exported / "github").iterdir()}
    assert len(found) == 4
    for name, result in found.items():
        assert result["version"] == 1 and result["max_score"] == 4
        assert {type(test["score"]) for test in result["tests"]} == {int}
        assert {"name", "status", "score", "message"} <= set(result["tests"][0]), name
    assert sum(test["score"] for test in found["jane"]["tests"]) == 1 and found["jane"]["status"] == "fail"
    assert sorted(result["status"] for result in found.values()) == ["error", "fail", "fail", "fail"]


def test_what_gradescope_takes(exported):
    """The fields that its specification of results.json knows, with the values that it knows."""
    fields = {"score", "max_score", "status", "name", "number", "output", "output_format", "visibility"}
    for path in (exported / "gradescope").glob("*/results.json"):
        result = json.loads(path.read_text())
        assert set(result) <= {"output", "stdout_visibility", "tests"} and len(result["tests"]) == 2
        for test in result["tests"]:
            assert (
                set(test) <= fields
                and test["status"] in ("passed", "failed")
                and 0 <= test["score"] <= test["max_score"]
            )
            assert test["visibility"] == "visible" and test["output"].isprintable()
    assert len(list((exported / "gradescope").iterdir())) == 4 + 2, "and setup.sh and run_autograder"


def test_what_gradescope_runs_hands_out_what_was_graded(tmp_path):
    """In its working directory, as its documentation lays it out; another's name in place of one's own gets nothing."""
    exercise = Exercise("first", 2, "", None, "")
    rows = [Graded(name, [Verdict(exercise, "right")]) for name in ("submission_41", "jane")]
    exports.write_all(tmp_path / "out", "01_intro", [exercise], rows)
    for number, name, points in ((41, "Ann", 2), (42, "jane", 0)):
        home = tmp_path / str(number)
        (home / "results").mkdir(parents=True)
        shutil.copytree(tmp_path / "out" / "gradescope", home / "source")
        users = [{"email": "jane", "id": 7, "name": name}]
        (home / "submission_metadata.json").write_text(json.dumps({"id": number, "users": users}))
        subprocess.run([home / "source" / "run_autograder"], cwd=home, check=True)
        result = json.loads((home / "results" / "results.json").read_text())
        assert sum(test["score"] for test in result.get("tests", [result])) == points
