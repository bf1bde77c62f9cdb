"""A process group from its beginning to its end: within another, with the guard, after an exit, after an error."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import Fork
from helpers import FULL, LAUNCHER

from common import ROOT
from common.errors import UserError
from common.lab.guard import CollectiveMismatch
from common.lab.launch import RankFailed, free_port, launch
from common.ranks import Ranks, introduce, process_group, silent

pytestmark = pytest.mark.usefixtures("no_launcher")


def nested() -> tuple:
    """A script's main, run inside of a launch: the launch's group has to outlive it, and it has the guard or not."""
    outer, found, said = dist.group.WORLD, [], []
    for check in (False, True):
        try:
            with process_group("auto", "auto", check=check) as group:
                assert dist.group.WORLD is outer
                found.append(group)
                dist.all_reduce(torch.ones(2, 3) if dist.get_rank() else torch.ones(3, 2))  # gloo says nothing
            said.append("nothing")
        except CollectiveMismatch:
            said.append("mismatch")
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return found, said, number.item(), dist.group.WORLD is outer, torch.get_num_threads()


def test_within_a_launch_it_is_the_launchs_group():
    for rank, (found, said, total, same, threads) in enumerate(launch(nested, 2)):
        assert found == [Ranks(rank, 2, rank, torch.device("cpu"))] * 2
        assert said == ["nothing", "mismatch"], "without and with check=True"
        assert total == 1.0 and same and threads == 1


def test_the_guard_is_on_in_a_group_of_its_own():
    def watched(check):
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return [type(mode).__name__ for mode in modes] == (["CheckCollectives"] if check else [])

    for check in (False, True):
        with process_group("cpu", check=check):
            assert watched(check), f"check={check}: is the guard there?"


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"backend": "nccl"}])
def test_within_a_launch_there_is_no_gpu(option):
    def work():
        with process_group(**option):
            pass

    ((name, value),) = option.items()
    with pytest.raises(RankFailed, match=f"UserError: --{name} {value}: .*CPU"):
        launch(work, 2, timeout=100)


def test_a_group_of_one_begins_and_ends_without_a_port(monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with process_group("cpu") as group:
            assert group == Ranks(0, 1, 0, torch.device("cpu")) == Ranks.here()
            assert group.any(True) is True and group.any(False) is False
            assert torch.get_num_threads() == 2
        assert not dist.is_initialized()
    finally:
        torch.set_num_threads(threads)


def test_the_group_ends_in_order_after_sys_exit_but_not_after_an_error():
    with pytest.raises(SystemExit) as leaving:
        with process_group("cpu"):
            sys.exit(130)
    assert leaving.value.code == 130 and not dist.is_initialized()
    with pytest.raises(ValueError, match="over"):
        with process_group("cpu"):
            raise ValueError("over")
    assert dist.is_initialized()  # other ranks might be waiting in a collective
    dist.destroy_process_group()


LATE = """
import os, time
from common import ranks

class Late:
    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys):
        time.sleep(0.5)
        self.store.wait(keys)

if os.environ["RANK"] == "1":
    barrier = ranks.store_barrier
    ranks.store_barrier = lambda store, *args, **options: barrier(Late(store), *args, **options)
with ranks.process_group("cpu"):
    pass
"""


def test_the_rank_that_keeps_the_store_leaves_last(tmp_path):
    """Without torchrun the store is in the process of rank 0. Gone too early, it takes along what the others read."""
    script, port = tmp_path / "late.py", free_port()
    script.write_text(LATE)
    processes = [Fork(script, cwd=tmp_path, rank=(rank, 2, port)) for rank in range(2)]
    written = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], written


def votes() -> tuple[list[bool], list[str]]:
    here = Ranks.here()
    return [here.any(dist.get_rank() == 1), here.any(False), here.any(True)], silent(patience=30)


def test_any_rank_and_everybody_answers():
    assert launch(votes, 3) == [([True, False, True], [])] * 3, "a vote of one, of none, of all; who is silent"


def test_here_is_the_gpu_where_the_group_has_nccl(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert Ranks.here().device == torch.device("cuda:1")


def test_nothing_imports_dtensor_that_does_not_use_it():
    """It takes most of a second, in each rank of every run. And common.ranks loads nothing of the lab."""
    modules = ["common.ranks", "common.run", "common.lab.ledger", "common.lab.guard", "common.lab.launch"]
    slow = ("torch.distributed.tensor", "torch._dynamo", "matplotlib")
    code = (
        "import common.ranks, sys\nassert not [name for name in sys.modules if name.startswith('common.lab')]\n"
        f"import importlib\nfor module in {[*modules, 'common.state']}:\n    importlib.import_module(module)\n"
        f"    print(module, [name for name in {slow} if name in sys.modules])\n"
        "import torch\nwith common.lab.ledger.Ledger():\n    torch.ones(1) + 1\n"
        "print('a ledger', [name for name in ['torch._dynamo'] if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*found.stdout.splitlines()} == {f"{module} []" for module in [*modules, "common.state", "a ledger"]}


def introduced(cases: dict[str, list]) -> dict[str, str]:
    """What each process is told: the case's list has the (rank, version) that it believes to have, or None."""
    said = {}
    for name, believed in cases.items():
        mine = believed[dist.get_rank()]
        if mine:
            torch.__version__ = mine[1]
            try:
                introduce(dist.PrefixStore(name, dist.distributed_c10d._get_default_store()), mine[0])
                said[name] = "welcome"
            except UserError as error:
                said[name] = str(error)
    return said


def test_the_ranks_of_several_nodes_are_introduced():
    cases = {
        "alike": [(0, "2.13.0"), (1, "2.13.0"), None],
        "versions": [(0, "2.13.0"), (1, "2.12.1"), None],
        "twice": [(0, "2.13.0"), (1, "2.13.0"), (1, "2.13.0")],
    }
    first, second, third = launch(introduced, 3, (cases,))
    assert first == {"alike": "welcome", "versions": "welcome", "twice": "welcome"}
    assert second["alike"] == "welcome"
    said = second["versions"]
    assert all(word in said for word in ("rank 1", socket.gethostname(), "2.12.1", "rank 0", "2.13.0")), said
    twice = sorted([second["twice"], third["twice"]])  # who of the two comes first is open
    assert twice[1] == "welcome" != twice[0], f"two processes are rank 1, and are told: {twice}"
    assert "rank 1" in twice[0] and "--node_rank" in twice[0], twice[0]
    assert len(re.findall(rf"{re.escape(socket.gethostname())}, process \d+", twice[0])) == 2, twice[0]


def test_a_group_over_several_nodes_begins_with_introductions(monkeypatch):
    asked = []
    monkeypatch.setattr("common.ranks.introduce", lambda store, rank: asked.append(rank))
    monkeypatch.setattr("common.ranks.dist.init_process_group", raises_network_error)
    for local_size, expected in ((2, []), (1, [0])):
        there = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_size, "MASTER_PORT": 29500}
        for name, value in {**there, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match="cannot meet"), process_group("cpu", store=dist.HashStore()):
            pass
        assert asked == expected, f"{local_size} of 2 ranks on this node"


def raises_network_error(*args, **kwargs):
    raise dist.DistNetworkError("nobody there")


def who_is_silent() -> list[str]:
    """Ranks 1 and 2 do not answer; rank 2 said earlier on which host it is."""
    if dist.get_rank() == 2:
        dist.distributed_c10d._get_default_store().underlying_store.set("common.ranks/who/2", "node2, process 7")
    dist.barrier()
    found = silent(patience=0.5) if dist.get_rank() in (0, 3) else []
    dist.barrier()
    return found


def test_ranks_that_do_not_answer_are_named():
    assert launch(who_is_silent, 4) == [["rank 1", "rank 2 on node2"], [], [], ["rank 1", "rank 2 on node2"]]


class Deaf:
    """A store on a host that is gone."""

    @staticmethod
    def set(key, value):
        time.sleep(60)


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    def work():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_get_default_store", Deaf)
            patch.setenv("MASTER_ADDR", "node0")
            return silent(patience=0.1)

    monkeypatch.setattr("common.ranks.ANSWER", 0.3)
    assert launch(work, 1) == [["the host of rank 0 and of the store, node0,"]]


THREADS = """
import runpy, sys
from pathlib import Path
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
print(sorted(task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")))
"""


# Programs to copy, and the files that the first two pages have a reader write. (DTensor, in 04 and 06, keeps the mesh.)
PAGES = ["01_intro/01_two_processes.ipynb", "distributed_training.ipynb"]
FILES = ["01_intro/standalone.py", "03_ddp/standalone.py", "03_ddp/speed.py", "03_ddp/feeding.py"]


def program_of(page: Path) -> str:
    """The first file that a page writes, with two steps in the place of twenty."""
    cells = ["".join(cell["source"]) for cell in json.loads(page.read_text())["cells"]]
    text = next(cell for cell in cells if cell.startswith("%%writefile")).partition("\n")[2]
    return re.sub(r"range\((20|1, 21)\)", "range(2)", text)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
@pytest.mark.parametrize("place", [*PAGES, *FILES] if FULL else PAGES[1:])  # which has DDP and an optimizer
def test_gloos_threads_end_with_the_group(place, tmp_path):
    """A thread that outlives the group can abort a process that ends, and DDP that does so can have it hang. In a
    process of its own, since it matters whether the group is there when DDP or an optimizer is first imported."""
    program = ROOT / place
    if place in PAGES:
        program = tmp_path / "train.py"
        program.write_text(program_of(ROOT / place))
    command = [sys.executable, "-c", THREADS, program, *(["8"] if program.stem == "speed" else [])]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | dict.fromkeys(LAUNCHER[:4], "1")
    places |= {"RANK": "0", "LOCAL_RANK": "0"}
    environment = os.environ | places | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1]
    assert "python" in names and "gloo" not in names, f"threads after destroy_process_group(): {names}"
