"""A SLURM cluster of two nodes on this machine, and launch/slurm.sbatch on it: trained, killed, requeued, resumed.

    python tools/cluster_slurm.py

Needs Linux, root, and Debian's slurm-wlm and munge (apt-get install slurm-wlm munge); says so where they are missing,
with exit code 2. Exit code 0: the job that was killed and went on has the losses of one process.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from common import ROOT
from common.errors import Parser
from common.lab.launch import free_port

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "unshare")
STEPS, EVERY = 60, 5
SIZE = ["--layers=2", "--width=32", "--heads=4", "--context=32", "--batch-size=8", f"--steps={STEPS}"]
CONFIGURATION = """\
ClusterName=course
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SwitchType=switch/none
ReturnToService=2
KillWait=5
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def main() -> int:
    Parser(description=__doc__.splitlines()[0]).asked()  # it has no options
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        print(
            f"error: needs Linux, root and slurm-wlm, munge; missing: {', '.join(missing) or 'root'}", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        alone = train_alone(folder)
        start_cluster(folder, stack)
        job, run = submit(folder), ROOT / "runs" / folder.name
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        kill_a_rank(folder, job, run)
        wait(lambda: state(job) == "FAILED", 120, lambda: f"job {job} does not end: {state(job)}\n{output(folder)}")
        at = newest(run)
        print(f"job {job}: rank 1 was killed, and the job FAILED, as it should; its newest checkpoint is of step {at}")
        scontrol("requeue", job)
        scontrol("update", f"JobId={job}", "StartTime=now")  # SLURM would wait for two minutes
        wait(lambda: state(job) == "COMPLETED", 300, lambda: f"requeued: {state(job)}\n{output(folder)}")
        losses = read(run)
        if f"going on after step {at}" not in (folder / "job.out").read_text(errors="replace"):
            raise SystemExit(f"error: the job did not go on after step {at}:\n{output(folder)}")
        worst = max(abs(mine / its - 1) for mine, its in zip(losses, alone, strict=True))
        print(
            f"requeued and resumed: {len(losses)} steps, each once; largest relative difference {worst:.1e} from one "
            f"process (allowed 1e-05)"
        )
        return 0 if worst <= 1e-5 else 1


def train_alone(folder: Path) -> list[float]:
    command = [sys.executable, "distributed_training.py", *SIZE, f"--run-dir={folder}/alone", "--checkpoint-every=0"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return read(folder / "alone")


def read(run: Path) -> list[float]:
    """The losses of steps 1, 2, ...; an AssertionError where one is missing or there twice."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1)), "a step is missing, or there twice"
    return [record["loss"] for record in records]


def start_cluster(folder: Path, stack: ExitStack) -> None:
    """munge, the controller and two nodes, each of which finds the other by name."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports))
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost node1 node2 {socket.gethostname()}\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "node1", "node2"):
        (folder / name).mkdir()
    munge = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-i"],
    ]
    hosts = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N"  # a mount that only this node sees
    daemons += [["unshare", "--mount", "sh", "-c", f"{hosts} {node}"] for node in ("node1", "node2")]
    for command in daemons:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(end, process)
        if command[0] == "munged":
            wait((folder / "munge.socket").exists, 20, lambda: "munged does not start")
    wait(lambda: nodes().count("idle") == 2, 60, lambda: f"nodes: {nodes()}")
    print("a SLURM cluster of two nodes is up")


def nodes() -> str:
    return subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t %E"], capture_output=True, text=True).stdout


def submit(folder: Path) -> str:
    fewer = ["--cpus-per-task=1", "--gpus-per-node=1", f"--job-name={folder.name}", f"--output={folder}/job.out"]
    environment = os.environ | {"RANKS_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["sbatch", "--parsable", *fewer, "launch/slurm.sbatch", *SIZE, f"--checkpoint-every={EVERY}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def newest(run: Path) -> int:
    return max(int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*"))


def kill_a_rank(folder: Path, job: str, run: Path) -> None:
    """Kill rank 1, which runs on one of the two nodes, once there is a checkpoint."""
    wait(lambda: list(run.glob("checkpoint-*")), 120, lambda: f"no checkpoint: {state(job)}\n{output(folder)}")
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if environment.get("SLURM_JOB_ID") == job and environment.get("RANK") == "1":
            process.kill()
            return
    raise SystemExit(f"error: no process is rank 1 of job {job}\n{output(folder)}")


def state(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout
    return shown.partition("JobState=")[2].partition(" ")[0]


def scontrol(*arguments: str) -> None:
    subprocess.run(["scontrol", *arguments], capture_output=True, text=True)


def output(folder: Path) -> str:
    file = folder / "job.out"
    return file.read_text(errors="replace")[-3000:] if file.exists() else "(the job has written nothing)"


def wait(condition, seconds: float, why) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"error: {why()}")
        time.sleep(0.2)


def end(process: subprocess.Popen) -> None:
    """End a daemon and what it has started."""
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    except psutil.Error:
        pass
    process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
