"""What the pages say is true of the code. The rules stand in page_rules.py."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_rules import commands
from helpers import LAUNCHER
from page_rules import (
    IN_NOTEBOOKS,
    RULES,
    options_are_the_programs_own,
)
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous, static_tcp_rendezvous
from torch.distributed.run import config_from_args, get_args_parser

from common import ROOT
from tools.facts import EVERY_NOTEBOOK, NOTEBOOKS, PAGES


@pytest.fixture(autouse=True)
def without_a_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_page(page, rule):
    wrong = list(rule(page, page.read_text()))
    assert not wrong, "\n".join([str(page), *wrong])


@pytest.mark.parametrize("path", EVERY_NOTEBOOK)
def test_what_a_notebook_says(path):
    cells = json.loads((ROOT / path).read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = text.partition("\n## References")[0]  # files and names of others
    wrong = [problem for rule in IN_NOTEBOOKS for problem in rule(ROOT / path, text)]
    assert not wrong, "\n".join([path, *wrong])


@pytest.mark.parametrize("file", sorted((ROOT / "launch").iterdir()), ids=lambda path: path.name)
def test_what_is_submitted_to_a_cluster(file):
    """Its torchrun lines have options that torchrun and the scripts have."""
    text = f"```\n{file.read_text().replace('exec torchrun', 'torchrun')}\n```"
    started = [words for words in commands(text) if {"torchrun", "distributed_training.py"} <= {*words}]
    assert len(started) == 1, f"{file.name} starts {len(started)} trainings"
    wrong = list(options_are_the_programs_own(file, text))
    assert not wrong, wrong


def test_the_kubernetes_job_asks_for_as_many_gpus_as_processes():
    trainer = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_jupyterlab_is_started_in_the_root_with_the_first_page():
    """A notebook that is given as an argument makes its folder the server's root: no other chapter is seen there."""
    (options,) = re.findall(r"^\tjupyter lab (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    opened = re.fullmatch(r"--LabApp\.default_url=/lab/tree/(\S+)", options)
    assert opened and opened[1] == NOTEBOOKS[0], options


def test_the_slurm_job_is_what_its_page_explains():
    """Options of sbatch and srun that the page explains one by one stand in the file as the page writes them."""
    job = (ROOT / "launch/slurm.sbatch").read_text()
    section = (ROOT / "docs/cluster.md").read_text().partition("## SLURM")[2].partition("\n## ")[0]
    explained = re.findall(r"^\* `(--[^`]+)`", section, re.MULTILINE)
    assert len(explained) >= 2
    for option in explained:
        assert f" {option}" in job or f"#SBATCH {option}\n" in job, f"the page explains {option}"
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", job, re.MULTILINE))
    assert asked["signal"].startswith("TERM@"), "to the job's steps, whose ranks save; with B: to the shell alone"
    (seconds,) = re.findall(r"--shutdown-timeout=(\d+)", job)
    assert 30 < int(seconds) < int(asked["signal"].removeprefix("TERM@")), "torchrun's ranks may save as long as that"


def test_the_slurm_job_meets_anew_after_each_start_and_resumes(tmp_path):
    """Its own lines, with other programs of SLURM: no two starts have one name, or ranks would meet those of before. A
    list of nodes that is longer than a pipe holds ends no job."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for name, line in (("scontrol", "echo one; seq 100000"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def started(job: str, again: str = "") -> dict[str, str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]",
                       "SLURM_JOB_NAME": "course", "SLURM_NNODES": "2", "SLURM_RESTART_COUNT": again}  # fmt: skip
        command = ["bash", ROOT / "launch/slurm.sbatch", "--strategy", "fsdp"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.rstrip().endswith("--strategy fsdp"), "what follows the file's name"
        return dict(word.partition("=")[::2] for word in done.stdout.split() if word.startswith("--"))

    first, requeued, other = started("7"), started("7", "1"), started("8")
    assert len({found["--rdzv_id"] for found in (first, requeued, other)}) == 3
    assert first["--nnodes"] == "2" and first["--rdzv_endpoint"].startswith("one:"), "all ranks ask the first node"
    assert "--resume" not in first
    (tmp_path / "runs/course/checkpoint-000001").mkdir(parents=True)
    assert "--resume" in started("7", "1")


def test_the_kubernetes_job_writes_to_its_volume():
    spec = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())["spec"]
    (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    command = spec["trainer"]["command"][-1]
    for path in re.search(r"--run-dir (\S+)", command)[1], re.search(r'compgen -G "(\S+)"', command)[1]:
        assert path.startswith(f"{mount['mountPath']}/"), f"{path} is not on the volume at {mount['mountPath']}"
    assert mount["name"] == pod["volumes"][0]["name"]


def test_a_restarted_kubernetes_job_resumes(tmp_path):
    """The job's own shell, with another torchrun, in a folder without and with a checkpoint."""
    spec = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())["spec"]
    shell, option, text = spec["trainer"]["command"]
    text = text.replace("/course\n", f"{tmp_path}\n").replace("/runs/", f"{tmp_path}/runs/")
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def started() -> list[str]:
        done = subprocess.run([shell, option, text], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "--run-dir" in started() and "--resume" not in started()
    run = Path(started()[started().index("--run-dir") + 1])
    (run / ".checkpoint-000001.partial").mkdir(parents=True)
    assert "--resume" not in started(), "what was being written is no checkpoint"
    (run / "checkpoint-000001").mkdir()
    assert "--resume" in started()


ADVICE = re.findall(r"`--rdzv_conf (\w+)=(\d+)`\s*\((\w+)\)", (ROOT / "docs/cluster.md").read_text())


@pytest.mark.parametrize("name, seconds, kind", ADVICE)
def test_advice_on_how_long_nodes_wait_reaches_the_rendezvous(name, seconds, kind, monkeypatch):
    """As torchrun's own code reads the option."""
    line = f"--rdzv_backend={kind} --rdzv_endpoint=localhost:1 --rdzv_conf {name}={seconds} --nnodes=2 x.py"
    config, *_ = config_from_args(get_args_parser().parse_args(line.split()))
    settings = RendezvousParameters(kind, "localhost:1", "a", 2, 2, **{"rank": 0} | config.rdzv_configs)
    waits = []
    if kind == "static":
        monkeypatch.setattr(static_tcp_rendezvous, "StaticTCPRendezvous", lambda *about: waits.extend(about))
        static_tcp_rendezvous.create_rdzv_handler(settings)
        assert int(seconds) in waits, f"it waits for something of {waits}"
    else:
        joining = dynamic_rendezvous.create_handler(HashStore(), SimpleNamespace(name=kind), settings)
        assert joining.settings.timeout.join.total_seconds() == int(seconds)


def test_there_is_advice_for_both_kinds_of_rendezvous():
    assert {kind for *_, kind in ADVICE} == {"static", "c10d"}
