"""Two torchruns, as on two nodes, here both on this one: a rank is killed, and a whole node is lost.

Training waits at step 12 until that has happened, so a busy machine cannot come to its end before. (With FULL=1 ranks
are processes of their own, and don't.)"""

import json
import os
import signal
import socket
from contextlib import suppress

import pytest
from forks import hold_after, ranks_of, torchrun, wait_for_step
from helpers import FULL, SMALL, as_options, configure, metrics, numbers, train, wait_until

from common import ROOT
from common.lab.launch import free_port, launch

STEPS = 100 if FULL else 20
SETTINGS = SMALL | {"steps": STEPS, "checkpoint_every": 10, "optimizer": "sgd", "lr": 0.1, "strategy": "ddp"}
# Seconds after which a node that says nothing is given up: many, since a busy machine may be silent for some.
QUICK = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=30"


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """To be touched when the rank or the node is gone."""
    return hold_after(monkeypatch, 12, tmp_path / "lost")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    launch(train, 2, ([configure(size=2, **SETTINGS, run_dir=folder)],))
    return folder


def agents(nodes: str, folder) -> list:
    """Two torchruns with one rank each; the first has the store at which they meet."""
    port, started = free_port(), []
    for _ in range(2):
        process = torchrun(
            *(f"--nnodes={nodes}", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=job"),
            *(f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1", f"--rdzv_conf={QUICK}"),
            *("--monitor_interval=0.2", ROOT / "distributed_training.py", "--distributed", "--run-dir=run"),
            *as_options(SETTINGS),
            cwd=folder,
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # pytorch#135712: see docs/cluster.md
        )
        started.append(process)
        wait_until(lambda: listens(port), "store")
    return started


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.weekly  # two programs; one torchrun whose rank is killed: test_loading.py
def test_a_rank_of_another_node_is_killed_and_both_go_on(tmp_path, undisturbed, lost):
    one, other = agents("2", tmp_path)
    wait_for_step(tmp_path / "run", 12)
    ranks_of(other)[0].kill()
    lost.touch()
    said = [process.communicate(timeout=180)[1] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), "\n".join(said)
    assert sum("restarted by torchrun: going on after step" in text for text in said) == 1, "\n".join(said)
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert numbers(tmp_path / "run") == numbers(undisturbed), "bit for bit"


@pytest.mark.weekly
def test_a_node_is_lost_and_the_other_goes_on_alone(tmp_path, undisturbed, lost):
    one, other = agents("1:2", tmp_path)
    wait_for_step(tmp_path / "run", 12)
    before = json.loads((tmp_path / "run" / "config.json").read_text())
    rank = ranks_of(other)[0]
    os.kill(other.pid, signal.SIGKILL)
    rank.kill()
    lost.touch()
    _, errors = one.communicate(timeout=180)
    assert one.returncode == 0, errors
    after = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (before["world_size"], after["world_size"]) == (2, 1)
    assert [record["step"] for record in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert numbers(tmp_path / "run") == pytest.approx(numbers(undisturbed), rel=3e-5)


SAVES = """
import signal, sys, time
from pathlib import Path


def save(*_):
    Path("saving").touch()
    while not Path("may end").exists():
        time.sleep(0.05)
    Path("saved").touch()
    sys.exit()


signal.signal(signal.SIGTERM, save)
Path("trains").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("seconds, saved", [(1, False), (600, True)])
def test_a_rank_may_save_for_as_long_as_torchrun_is_told(seconds, saved, tmp_path):
    """--shutdown-timeout, in launch/ and on the page on checkpoints: without it a rank has 30 seconds after SIGTERM."""
    (tmp_path / "saves.py").write_text(SAVES)
    process = torchrun(f"--shutdown-timeout={seconds}", "--standalone", tmp_path / "saves.py", cwd=tmp_path)
    wait_until((tmp_path / "trains").exists, "training")
    (rank,) = ranks_of(process)
    os.kill(process.pid, signal.SIGTERM)
    with suppress(AssertionError):
        wait_until((tmp_path / "saving").exists, "saving", 20)
    if not (tmp_path / "saving").exists():  # seen once: torchrun's handler raises, which whoever catches it may drop
        os.kill(process.pid, signal.SIGTERM)
    wait_until((tmp_path / "saving").exists, "saving")
    if saved:
        (tmp_path / "may end").touch()
    output = process.communicate(timeout=120)
    assert (tmp_path / "saved").exists() == saved, output
    assert not rank.is_running()
