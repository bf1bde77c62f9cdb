"""Bad input gets one clear line and a non-zero exit; good input arrives where it should."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import LAUNCHER, configure

from common import ROOT
from common.command_line import parse as parse_table
from common.config import shared
from common.errors import UserError
from common.ranks import environment
from common.strategy import require_precision
from course.strategies import BY_AXES, STRATEGIES

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def parse(default=None, argv=None):
    return parse_table(STRATEGIES, default, argv, BY_AXES)


@pytest.fixture(autouse=True)
def an_empty_folder_and_no_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def yaml(text: str) -> list[str]:
    Path("options.yaml").write_text(text)
    return ["--config", "options.yaml"]


BAD = {
    "--distributed": r"--distributed: no launcher .* torchrun --nproc_per_node=2",
    "--strategy dpp": r"unknown strategy 'dpp'; did you mean 'dp'\? known: single, dp, ddp, model",
    "--width 100 --heads 3": r"--width 100 does not divide by --heads 3",
    "--by-hand --strategy single": r"'single' has no version by hand",
    "--strategy ddp --implementation magic": r"strategy 'ddp' has no implementation 'magic'; it has pytorch, by-hand",
    "--strategy ddp --by-hand --implementation pytorch": r"--by-hand and --implementation pytorch exclude each other",
    "--strategy context": r"'context' has a version by hand only; add --by-hand",
    "--strategy context --by-hand --context 101": r"--context 101 does not divide into 2 chunks",
    "--strategy hsdp": r"--mesh data=2 leaves no whole number of ranks for axis 'shard': 1 rank\(s\) do not divide",
    "--strategy hsdp --mesh 2by2": r"--mesh 2by2: expected sizes of axes as in data=2,tensor=2",
    "--strategy hsdp --mesh 0x1": r"--mesh 0x1: expected sizes of axes as in data=2,tensor=2",
    "--strategy tensor+fsdp --mesh 1x1 --task images": r"'tensor\+fsdp' divides a GPT; use --task text",
    "--strategy ddp --mesh 1x1": r"--mesh 1x1: two numbers are for strategies with two axes, not for 'ddp'",
    "--mesh data=1,tenor=1": r"--mesh data=1,tenor=1: no axis 'tenor'; did you mean 'tensor'\?",
    "--mesh data=1,data=1": r"--mesh data=1,data=1: axis 'data' is given twice",
    "--mesh data=two": r"--mesh data=two: expected a number of ranks as in 'data=2', got 'data=two'",
    "--mesh data=2": r"--mesh data=2 is 2 rank\(s\), and 1 are started; start 2, or make the product 1",
    "--strategy ddp --mesh tensor=1": r"--mesh tensor=1: strategy 'ddp' has axis data only, not 'tensor'; leave",
    "--mesh-order data,rows": r"--mesh-order data,rows: no axis 'rows'; there are pipeline, data",
    "--mesh-order data,data": r"--mesh-order data,data: an axis is given twice",
    "--strategy ddp --replicas 2": r"--replicas is for strategies with two axes, not for 'ddp'; leave it out",
    "--strategy hsdp --replicas 0": r"--replicas must be at least 1, got 0",
    "--strategy fsdp --mesh data=1,shard=1": r"strategy 'fsdp' has axis shard only, not 'data'; add --by-hand$",
    "--strategy ddp --by-hand --mesh tensor=1": r"'ddp' by hand has axis data only, not 'tensor'; leave --strategy out",
    "--strategy fsdp --by-hand --offload": r"option of zero2 \(pytorch\), fsdp .*, not of 'fsdp' by hand; leave it out",
    "--strategy zero1 --offload": r"--offload is an option of .*, not of 'zero1'; leave it out",
    "--strategy fsdp --offload --width 65536": r"--offload: the shards of 1 rank\(s\), .* take \d+\.\d GiB",
    "--recompute full --task images": r"--recompute full is for the GPT's blocks",
    "--recompute full --strategy tensor": r"--recompute is an option of .*, not of 'tensor'; leave it out",
    "--schedule gpipe": r"--schedule is an option of pipeline, .*, not of 'single'; leave it out",
    "--find-batch-size": r"--find-batch-size is an option of .*, not of 'single'; leave it out",
    "--strategy fsdp --by-hand --find-batch-size": r"not of 'fsdp' by hand; leave it out$",
    "--strategy fsdp --find-batch-size": r"--memory-budget 0.0 should be the GiB of a rank",
    "--strategy fsdp --memory-budget 2": r"--memory-budget is what --find-batch-size stops at",
    "--strategy sequence": r"'sequence' has a version by hand only; add --by-hand",
    "--strategy pipeline --task images": r"--task images: strategy 'pipeline' divides a GPT; use --task text",
    "--strategy pipeline --schedule zigzag": r"--schedule: invalid choice: 'zigzag'|unknown schedule 'zigzag'",
    "--strategy pipeline --schedule dualpipev --microbatches 1": r"on 1 ranks needs 2 or more micro-batches, not 1",
    "--strategy pipeline --schedule zbv --stages-per-rank 3": r"schedule 'zbv' needs 2 stage\(s\) per rank, not 3",
    "--strategy pipeline --microbatches 5": r"--microbatches 5 = 5; the nearest that does is 30",
    "--strategy pipeline --recompute selective": r"--recompute selective: a pipeline's .* take full or none",
    "--strategy pipeline --microbatches 0": r"--microbatches must be at least 1, got 0",
    "--strategy pipeline --stages-per-rank -1": r"--stages-per-rank must be at least 0, got -1",
    "--strategy pipeline --schedule zbv --split-spec block.1:end": r"no layer 'block.1'; did you mean 'blocks.1'\?",
    "--strategy pipeline --schedule zbv --split-spec blocks.1:middle": r"write 'blocks.1: beginning' or 'blocks",
    "--strategy pipeline --schedule zbv --split-spec head:end": r"nothing to cut off before embedding or after head",
    "--strategy pipeline --split-spec blocks.1:end": r"1 cut\(s\) make 2 stages, but ranks x stages per rank are 1",
    "--strategy pipeline --schedule interleaved --stages-per-rank 9": r"9 stages are more than 6 layers .* --layers 7",
    "--strategy pipeline+ddp": r"--mesh data=2 leaves no whole number of ranks for axis 'pipeline'",
    "--strategy pipeline+ddp --replicas 1 --schedule zbv": r"--schedule zbv: .* with schedule 1f1b alone",
    "--strategy pipeline+fsdp --replicas 1 --schedule zbv": r"--schedule zbv puts the first and the last stage on one",
    "--device tpu": r"argument --device: invalid choice: 'tpu'",
    "--steps many": r"argument --steps: invalid int value: 'many'",
    "--steps 0": r"--steps must be at least 1, got 0",
    "--layers 0": r"--layers must be at least 1, got 0",
    "--batch-size -4": r"--batch-size must be at least 1, got -4",
    "--accumulation-steps 0": r"--accumulation-steps must be at least 1, got 0",
    "--seed -1": r"--seed must be at least 0",
    "--seed 2147483648": r"--seed must be at most 2147483647, got 2147483648",
    "--timeout 0": r"--timeout must be a positive number of seconds, got 0",
    "--lr inf": r"--lr must be a positive number",
    "--timeout inf": r"--timeout must be a positive number of seconds, got inf",
    "--lr 0": r"--lr must be a positive number",
    "--lr nan": r"--lr must be a positive number",
    "--max-norm 0": r"--max-norm must be a positive number, or inf for no clipping; got 0.0",
    "--max-norm nan": r"--max-norm must be a positive number, or inf for no clipping; got nan",
    "--beta1 1": r"--beta1 must be at least 0 and less than 1, got 1.0",
    "--optimizer sgd --beta1 0.8": r"--beta1 belongs to --optimizer adamw; leave one of them out",
    "--optimizer sgd --beta2 0.9": r"--beta2 belongs to --optimizer adamw; leave one of them out",
    "--beta2 1": r"--beta2 must be at least 0 and less than 1, got 1.0",
    "--weight-decay -1": r"--weight-decay must be at least 0, got -1.0",
    "--optimizer sgd --weight-decay 0.2": r"--weight-decay belongs to --optimizer adamw; leave one of them out",
    "--warmup-steps -1": r"--warmup-steps must be at least 0",
    "--lr-schedule linear": r"argument --lr-schedule: invalid choice: 'linear'",
    "--sample 9 --task images": r"--sample is for --task text; leave it out",
    "--text poems --task images": r"--text is for --task text; leave it out",
    "--task images --data-dir x": r"--data-dir is where fashion-mnist or cifar10 lie, and --dataset is digits$",
    "--dataset cifar10": r"--dataset cifar10 is for --task images; add that, or leave it out",
    "--data-dir mytext": r"--data-dir is where fashion-mnist or cifar10 lie; text of your own: --text FILE_OR_FOLDER",
    "--task images --download": r"--download is for fashion-mnist and cifar10, and --dataset is digits; leave it out",
    "--stride 3": r"unknown option --stride; --help lists the options",
    "--batch-sise 3": r"unknown option --batch-sise; did you mean --batch-size\?",
    "--confg x.yaml": r"unknown option --confg; did you mean --config\?",
    "--strategy pipeline --schedul gpipe": r"unknown option --schedul; did you mean --schedule\?",
    "ddp": r"unrecognized argument: ddp",
    "--resume": r"--resume: there is no run under runs/; name its folder with --run-dir",
    "--resume --run-dir nowhere": r"--resume: no checkpoint in nowhere",
    "--resume 3 --run-dir nowhere": r"--resume: no checkpoint in nowhere",
    "--resume nowhere": r"--resume nowhere: no such folder; give a step or the folder of a checkpoint",
    "--resume .": r"\. is no checkpoint of this course, or one that was cut: it has no manifest.json",
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
        pytest.fail(f"not refused: {line}")
    assert len(str(error.value).splitlines()) == 1


BAD_YAML = {
    "batch_sise: 3": r"unknown key 'batch_sise'; did you mean 'batch-size'\?",
    "learning-rate: 3": r"unknown key 'learning-rate'; did you mean 'lr'\?",
    "schedule: gpipe": r"--schedule is an option of pipeline, .*, not of 'single'; leave it out",
    "steps: true": r"steps: expected a whole number, got True",
    "steps: 2.5": r"steps: expected a whole number, got 2.5",
    "lr: fast": r"lr: expected a number, got 'fast'",
    "distributed: 1": r"distributed: expected true or false, got 1",
    "steps:": r"steps: expected a whole number, got None",
    "optimizer: adam": r"optimizer: expected one of sgd, adamw, got 'adam'",
    "model: 3": r"unknown key 'model'; --help lists the options",
    "- steps": r"expected lines like",
    "steps: [": r"not YAML",
}


@pytest.mark.parametrize("text", BAD_YAML)
def test_bad_yaml(text):
    with pytest.raises(UserError, match=BAD_YAML[text]) as error:
        parse(argv=yaml(text))
        pytest.fail(f"not refused: {text}")
    assert len(str(error.value).splitlines()) == 1


def test_the_least_that_is_taken_of_each_number():
    least = {
        "steps": 1, "checkpoint_every": 0, "keep": 1, "validate_every": 0, "log_every": 1, "sample": 0, "layers": 1,
        "width": 1, "heads": 1, "seed": 0, "warmup_steps": 0, "weight_decay": 0, "beta1": 0, "beta2": 0, "context": 1,
        "batch_size": 1, "accumulation_steps": 1,
    }  # fmt: skip
    assert {item.name: item.metadata["at_least"] for item in shared() if item.metadata["at_least"] is not None} == least


def test_yaml_has_forms_of_its_own(capsys):
    """Mappings, older names, --resume without a value; and a strategy that is picked by the planner."""
    config = parse(argv=yaml("strategy: hsdp\nmesh: {data: 1, shard: 1}\naccumulate: 3\nresume: false"))
    assert (config.axes, config.accumulation_steps, config.resume) == ({"data": 1, "shard": 1}, 3, "")
    (name,) = (line for line in BAD if "blocks.1:middle" in line)
    with pytest.raises(UserError, match=BAD[name]):
        parse(argv=yaml("strategy: pipeline\nschedule: zbv\nsplit-spec: {blocks.1: middle}"))
    argv = yaml("strategy: auto\nsteps: 7")
    picked = parse_table(STRATEGIES, None, argv, BY_AXES, auto=lambda argv: [*argv, "--strategy", "ddp"])
    assert (picked.strategy, picked.steps) == ("ddp", 7)


def test_processes_of_this_node_share_its_gpus(monkeypatch):
    """Four ranks, two on each node."""
    asked = []
    monkeypatch.setattr("common.config.choose", lambda *about: asked.append(about))
    for name, value in (TWO_RANKS | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    parse(argv=["--distributed"])
    assert asked == [("auto", "auto", 2)], "device, backend, processes on this node"


def test_packages_are_asked_for_where_they_are_needed(monkeypatch):
    monkeypatch.setattr("common.config.missing", lambda names: "no sklearn" if "sklearn" in names else None)
    assert parse(argv=["--task", "images", "--dataset", "cifar10"]).dataset == "cifar10"
    with pytest.raises(UserError, match="--task images: no sklearn"):
        parse(argv=["--task", "images"])


def test_yaml_is_read_and_the_command_line_wins():
    config = parse(argv=[*yaml("batch-size: 8\nlr: 1e-4\nby_hand: true\nsteps: 7\nstrategy: ddp"), "--steps", "9"])
    assert (config.batch_size, config.lr, config.by_hand) == (8, 1e-4, True)
    assert config.steps == 9, "the command line wins over the file's 7"


def test_defaults():
    assert parse(argv=[]).strategy == "single"
    assert parse("ddp", argv=[]).strategy == "ddp"
    assert parse(argv=yaml("")).steps == parse(argv=[]).steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_help_lists_the_options_of_a_strategy_in_groups(strategy, capsys):
    for implementation, kind in STRATEGIES[strategy].implementations.items():
        with pytest.raises(SystemExit) as end:
            parse(argv=["--strategy", strategy, "--implementation", implementation, "--help"])
        assert end.value.code == 0
        shown = capsys.readouterr().out
        own = list(kind.Options.__dataclass_fields__)
        for name in [item.name for item in shared()] + own:
            assert f"--{name.replace('_', '-')} " in shown or f"--{name.replace('_', '-')}\n" in shown, name
        titles = ["how training is spread over the ranks", "the run", "the model", "the optimizer", "the data"]
        for title in titles + ([f"strategy {strategy}"] if own else []):
            assert f"\n{title}:\n" in shown
        assert "strategies: single, dp, ddp" in " ".join(shown.split())


def test_help_shows_defaults_kinds_of_values_and_who_else_has_an_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse(argv=["--strategy", "zero2", "--help"])
    shown, _, others = capsys.readouterr().out.partition("options of other strategies")
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    for line in (
        "--steps INT optimizer steps (default: 250)",
        "--text WORD file or folder to learn the bytes of (default: Python's standard library)",
        "--lr FLOAT learning rate, reached after a linear warm-up (default: 0.002)",
    ):
        assert line in lines, f"not found: {line}\n{shown}"
    assert "--microbatches of pipeline, pipeline+ddp, pipeline+fsdp, mesh" in " ".join(others.split())
    assert "--offload" in shown and "--offload" not in others, "its own option is no other strategy's"


def test_no_strategy_has_an_option_by_the_name_of_one_of_the_run():
    for name, entry in STRATEGIES.items():
        for kind in entry.implementations.values():
            assert not set(kind.Options.__dataclass_fields__) & {item.name for item in shared()}, name


def test_a_mesh_for_other_ranks():
    with pytest.raises(UserError, match="^--mesh 2x3 is 6 ranks, and 4 are started; that could be 1x4, 2x2, 4x1$"):
        configure("--strategy hsdp --mesh 2x3", size=4)
    assert configure("--strategy hsdp", size=4).axes == {"data": 2, "shard": 2}
    assert configure("--strategy hsdp --mesh data=4", size=4).axes == {"data": 4, "shard": 1}
    with pytest.raises(UserError, match="heads 2 cannot be cut into 4 equal parts"):
        configure("--strategy tensor+fsdp --mesh 1x4 --heads 2", size=4)
    with pytest.raises(UserError, match="--mesh data=3 is 3 rank.s., and 4 are started; start 3, or make the"):
        configure("--strategy ddp --mesh data=3", size=4)


def test_the_older_forms_of_the_mesh(capsys):
    assert configure("--strategy pipeline+ddp --replicas 4", size=4).axes == {"pipeline": 1, "data": 4}
    assert "note: --replicas 4 is --mesh data=4 now" in capsys.readouterr().err
    assert configure("--accumulate 3").accumulation_steps == 3
    assert "note: --accumulate is called --accumulation-steps now" in capsys.readouterr().err


def test_the_mesh_picks_the_strategy_and_its_order_is_an_option():
    assert configure("--mesh data=2", size=2).strategy == "ddp"
    assert configure("--mesh shard=2", size=2).strategy == "fsdp"
    assert configure("--mesh tensor=2", size=2).strategy == "tensor"
    assert configure("--mesh data=2,shard=2", size=4).strategy == "hsdp"
    assert configure("--mesh shard=2,tensor=2", size=4).strategy == "tensor+fsdp"
    assert configure("--mesh shard=2,tensor=2 --by-hand", size=4).strategy == "mesh"
    assert configure("--mesh pipeline=2,data=2,tensor=2", size=8).strategy == "mesh"
    assert configure("--mesh data=2,shard=2 --by-hand", size=4, default="fsdp").strategy == "fsdp"
    assert configure("--mesh tensor=2", size=2, default="ddp").strategy == "tensor", "a chapter's own has no such axis"
    both = configure("--mesh data=2,pipeline=2", size=4)
    assert (both.strategy, list(both.axes)) == ("pipeline+ddp", ["pipeline", "data"])
    other = configure("--mesh data=2,pipeline=2 --mesh-order data,pipeline", size=4)
    assert list(other.axes) == ["data", "pipeline"]


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
    for name, value in (TWO_RANKS | {"RANK": "1", "LOCAL_WORLD_SIZE": "1"}).items():  # its node's first
        monkeypatch.setenv(name, value)
    parse(argv=["--distributed", "--run-dir", "mine"])
    assert not Path("mine").exists(), "rank 1 has made the run's folder"
    monkeypatch.setenv("RANK", "0")
    for line in ("--dry-run", "--strategy fsdp --find-batch-size --memory-budget 2"):
        parse(argv=["--distributed", "--run-dir", "mine", *line.split()])
        assert not Path("mine").exists(), f"{line} trains nothing, and has made the run's folder"


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
    refused(run("distributed_training.py", "--accumulation-steps", "5"), told)


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
    assert environment() == (0, 1, 0, 1)


def test_an_engine_that_is_not_installed_gets_the_line_that_installs_it(monkeypatch):
    """And whether it is installed is not asked of anybody who does not want it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for strategy, engine, package in [("ddp", "fabric", "lightning"), ("fsdp", "trainer", "transformers")]:
        with pytest.raises(UserError) as error:
            configure("", 2, strategy=strategy, implementation=engine)
        assert str(error.value) == (
            f"--implementation {engine}: this Python has no package {package}; pip install -r "
            f"requirements-engines.txt, in the repository's root"
        )
    assert configure("", 2, strategy="ddp").implementation == "pytorch"
