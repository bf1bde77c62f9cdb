"""Bad input gets one clear line and a non-zero exit; good input arrives where it should."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from course.strategies import ROOT, STRATEGIES

from common import config as options
from common import ranks
from common.config import parse
from common.errors import UserError
from common.ranks import choose
from common.strategy import require_precision

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def an_empty_folder_and_no_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def yaml(text: str) -> list[str]:
    Path("options.yaml").write_text(text)
    return ["--config", "options.yaml"]


BAD = {
    "--distributed": r"--distributed: no launcher .* torchrun --nproc_per_node=2",
    "--strategy dpp": r"unknown strategy 'dpp'; known: single, dp, ddp, model",
    "--width 100 --heads 3": r"--width 100 does not divide by --heads 3",
    "--by-hand --strategy single": r"'single' has no version by hand",
    "--strategy context": r"'context' has a version by hand only; add --by-hand",
    "--strategy context --by-hand --context 101": r"--context 101 does not divide into 2 chunks",
    "--strategy hsdp": r"--mesh 2x2 is 4 ranks, and 1 are started; that could be 1x1$",
    "--strategy hsdp --mesh 2by2": r"--mesh 2by2: expected two numbers like 2x2",
    "--strategy hsdp --mesh 0x1": r"--mesh 0x1: expected two numbers like 2x2",
    "--strategy tensor+fsdp --mesh 1x1 --task images": r"'tensor\+fsdp' divides a GPT; use --task text",
    "--strategy ddp --mesh 1x1": r"--mesh is for strategies hsdp and tensor\+fsdp, not 'ddp'; leave it out",
    "--strategy fsdp --by-hand --offload": r"--offload is for PyTorch's fsdp, zero2 and hsdp, not for 'fsdp' by hand",
    "--strategy zero1 --offload": r"--offload is for PyTorch's fsdp, zero2 and hsdp, not for 'zero1'; leave it out",
    "--strategy fsdp --offload --width 65536": r"--offload: the shards of 1 rank\(s\), .* take \d+\.\d GiB",
    "--recompute full --task images": r"--recompute full is for the GPT's blocks",
    "--recompute full --strategy tensor": r"not for --task text with strategy 'tensor'",
    "--find-batch-size": r"--find-batch-size is for PyTorch's fsdp and zero2, not for 'single'$",
    "--strategy fsdp --by-hand --find-batch-size": r"not for 'fsdp' by hand$",
    "--strategy fsdp --find-batch-size": r"--memory-budget 0.0 should be the GiB of a rank",
    "--memory-budget 2": r"--memory-budget is what --find-batch-size stops at",
    "--strategy sequence": r"'sequence' has a version by hand only; add --by-hand",
    "--strategy pipeline --task images": r"--task images: strategy 'pipeline' divides a GPT; use --task text",
    "--strategy pipeline --schedule zigzag": r"unknown schedule 'zigzag'; known: gpipe, 1f1b",
    "--strategy pipeline --schedule zb-h1": r"PyTorch has no such class; add --by-hand, or take interleaved-zb",
    "--strategy pipeline --schedule dualpipev --microbatches 1": r"on 1 ranks needs 2 or more micro-batches, not 1",
    "--strategy pipeline --schedule zbv --stages-per-rank 3": r"schedule 'zbv' needs 2 stage\(s\) per rank, not 3",
    "--strategy pipeline --microbatches 5": r"--microbatches 5 = 5; the nearest that does is 30",
    "--strategy pipeline --recompute selective": r"--recompute selective: a pipeline's stages .* take full or none",
    "--strategy pipeline --microbatches 0": r"--microbatches must be at least 1, got 0",
    "--strategy pipeline --stages-per-rank -1": r"--stages-per-rank must be at least 0, got -1",
    "--strategy pipeline --schedule zbv --split-spec block.1:end": r"no layer 'block.1'; did you mean 'blocks.1'\?",
    "--strategy pipeline --schedule zbv --split-spec blocks.1:middle": r"write 'blocks.1: beginning' or 'blocks",
    "--strategy pipeline --schedule zbv --split-spec head:end": r"nothing to cut off before embedding or after head",
    "--strategy pipeline --split-spec blocks.1:end": r"1 cut\(s\) make 2 stages, but ranks x stages per rank are 1",
    "--strategy pipeline --schedule interleaved --stages-per-rank 9": r"9 stages are more than 6 layers .* --layers 7",
    "--strategy pipeline+ddp": r"1 rank\(s\) are not 2 equal pipelines; start a multiple of 2, or set --replicas",
    "--strategy pipeline+ddp --replicas 1 --schedule zbv": r"--schedule zbv: .* with schedule 1f1b alone",
    "--strategy pipeline+fsdp --replicas 1 --schedule zbv": r"--schedule zbv puts the first and the last stage on one",
    "--device tpu": r"argument --device: invalid choice: 'tpu'",
    "--steps many": r"argument --steps: invalid int value: 'many'",
    "--steps 0": r"--steps must be at least 1, got 0",
    "--batch-size -4": r"--batch-size must be at least 1, got -4",
    "--seed -1": r"--seed must be at least 0",
    "--lr 0": r"--lr must be a positive number",
    "--lr nan": r"--lr must be a positive number",
    "--stride 3": r"unrecognized arguments: --stride 3",
    "--resume": r"--resume: there is no run under runs/; name its folder with --run-dir",
    "--resume --run-dir nowhere": r"--resume: no checkpoint in nowhere",
    "--backend nccl": r"--backend nccl needs CUDA GPUs",
    "--device cuda": r"--device cuda: PyTorch sees no CUDA GPU here; use --device cpu",
    "--config missing.yaml": r"--config missing.yaml: No such file",
    "--run-dir /proc/nowhere": r"--run-dir /proc/nowhere cannot be written: .*; name another folder",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_line(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=BAD[line]) as error:
        parse(argv=line.split())
    assert len(str(error.value).splitlines()) == 1


BAD_YAML = {
    "batch_sise: 3": r"unknown key 'batch_sise'; did you mean 'batch-size'\?",
    "learning-rate: 3": r"unknown key 'learning-rate'; did you mean",
    "steps: 2.5": r"steps: expected a whole number, got 2.5",
    "lr: fast": r"lr: expected a number, got 'fast'",
    "resume: 1": r"resume: expected true or false, got 1",
    "steps:": r"steps: expected a whole number, got None",
    "optimizer: adam": r"optimizer: expected one of sgd, adamw, got 'adam'",
    "- steps": r"expected lines like",
    "steps: [": r"not YAML",
}


@pytest.mark.parametrize("text", BAD_YAML)
def test_bad_yaml(text):
    with pytest.raises(UserError, match=BAD_YAML[text]) as error:
        parse(argv=yaml(text))
    assert len(str(error.value).splitlines()) == 1


def test_yaml_is_read_and_the_command_line_wins():
    config = parse(argv=[*yaml("batch-size: 8\nlr: 1e-4\nby_hand: true\nsteps: 7\nstrategy: ddp"), "--steps", "9"])
    assert (config.batch_size, config.lr, config.by_hand, config.steps) == (8, 1e-4, True, 9)


def test_defaults():
    assert parse(argv=[]).strategy == "single"
    assert parse("ddp", argv=[]).strategy == "ddp"
    assert parse(argv=yaml("")).steps == parse(argv=[]).steps


def test_every_option_of_the_course_is_there(capsys):
    with pytest.raises(SystemExit) as end:
        parse(argv=["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name in options.Config.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


def test_a_mesh_for_other_ranks(monkeypatch):
    for name, value in (TWO_RANKS | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^--mesh 2x3 is 6 ranks, and 4 are started; that could be 1x4, 2x2, 4x1$"):
        parse(argv=["--distributed", "--strategy", "hsdp", "--mesh", "2x3"])
    assert parse(argv=["--distributed", "--strategy", "hsdp"]).mesh == ""
    with pytest.raises(UserError, match="^heads 2 cannot be cut into 4|--heads 2 cannot be cut into 4"):
        parse(argv=["--distributed", "--strategy", "tensor+fsdp", "--mesh", "1x4", "--heads", "2"])


def test_a_precision_that_the_device_does_not_have(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    require_precision(torch.device("cpu"), "fp16")
    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    with pytest.raises(UserError, match="^--precision fp16: cpu cannot multiply matrices in it; try another, or fp32$"):
        require_precision(torch.device("cpu"), "fp16")


def test_many_processes_without_distributed(monkeypatch):
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="2 processes were started without --distributed: each would train alone"):
        parse(argv=[])
    assert parse(argv=["--distributed"]).strategy == "ddp"


def test_only_rank_0_claims_the_run_directory(monkeypatch):
    for name, value in (TWO_RANKS | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    parse(argv=["--distributed", "--run-dir", "mine"])
    assert not Path("mine").exists()


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose("auto", "auto", processes=1) == ("cuda", "nccl", None)
    device, backend, remark = choose("auto", "auto", processes=2)
    assert (device, backend) == ("cuda", "gloo")
    assert remark == "2 processes share 1 GPU(s), which NCCL refuses: using gloo instead"
    with pytest.raises(UserError, match="needs one GPU per process: 2 processes on this node, 1 GPU"):
        choose("auto", "nccl", processes=2)
    assert choose("cpu", "auto", processes=1) == ("cpu", "gloo", None)
    with pytest.raises(UserError, match="--backend nccl needs CUDA GPUs"):
        choose("cpu", "nccl", processes=1)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script of the course in the current folder, in an environment of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in TWO_RANKS} | variables
    script, *arguments = command
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def refused(result: subprocess.CompletedProcess, line: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr == f"error: {line}\n"


def test_one_line_and_exit_code_2():
    known = f"unknown strategy 'x'; known: {', '.join(STRATEGIES)}"
    refused(run("distributed_training.py", "--strategy", "x"), known)


def test_a_chapters_script_sends_other_strategies_home():
    told = "--strategy single lives in 01_intro/: start it there, or from the repository's root"
    refused(run("03_ddp/distributed_training.py", "--strategy", "single"), told)


def test_a_batch_that_does_not_divide():
    told = (
        "--batch-size 32 does not divide by 1 data-parallel rank(s) x 5 micro-batch(es) = 5; "
        "the nearest that does is 30"
    )
    refused(run("distributed_training.py", "--accumulate", "5"), told)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run("distributed_training.py", "--distributed", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **TWO_RANKS)
    refused(
        result,
        f"cannot meet the other ranks at 127.0.0.1:{port}: "
        "the port is in use; give another: torchrun --master_port=PORT",
    )


def test_nobody_comes():
    """Rank 1 of 2, whose rank 0 was never started, on a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks_environment = TWO_RANKS | {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = (
        "from common.errors import one_line_errors\nfrom common.ranks import process_group\n"
        "with one_line_errors(), process_group('cpu', 'gloo', timeout=2): pass"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | ranks_environment, timeout=120
    )
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: cannot meet the other ranks at 127.0.0.1:{port}: "), result.stderr
    assert "are all nodes started" in last


def test_environment_without_a_launcher():
    assert ranks.environment() == (0, 1, 0, 1)
