"""The command line and the file together: what arrives where, who wins, which strategy and implementation is meant; and
what the machine or the launch does not allow is refused in one line."""

import json
import os
import socket
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from forks import Fork
from helpers import begun, configure, refused, write_facts

from common import ROOT
from common.command_line import own_names
from common.command_line import parse as parse_table
from common.config import shared
from common.did_you_mean import ELSEWHERE, nearest_option
from common.errors import one_line_errors
from common.ranks import process_group
from common.run_dir import claim
from common.strategy import require_precision
from course.strategies import BY_AXES, STRATEGIES

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def parse(default=None, argv=None, *more, **how):
    return parse_table(STRATEGIES, default, argv, BY_AXES, *more, **how)


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch, no_launcher):
    monkeypatch.chdir(tmp_path)


def yaml(text: str) -> list[str]:
    Path("options.yaml").write_text(text)
    return ["--config", "options.yaml"]


def test_yaml_has_forms_of_its_own(capsys):
    """Mappings, older names, --resume without a value, values that are far too long; and a strategy that is picked by
    the planner."""
    config = parse(argv=yaml("strategy: hsdp\nmesh: {data: 1, shard: 1}\naccumulation-steps: 3\nresume: false"))
    assert (config.axes, config.accumulation_steps, config.resume) == ({"data": 1, "shard": 1}, 3, "")
    with refused("blocks.1", "middle"):
        parse(argv=yaml("strategy: pipeline\nschedule: zbv\nsplit-spec: {blocks.1: middle}"))
    for name in ("lr-schedule", "steps"):
        with refused(name, "expected") as refusal:
            parse(argv=yaml(f"{name}: {'x' * 3000}"))
        assert len(str(refusal.value)) < 300, "a long value is not repeated whole"
    argv = yaml("strategy: auto\nsteps: 7")
    picked = parse(argv=argv, auto=lambda argv: [*argv, "--strategy", "ddp"])
    assert (picked.strategy, picked.steps) == ("ddp", 7)


def test_processes_of_this_node_share_its_gpus(monkeypatch):
    """Four ranks, two on each node."""
    asked = []
    monkeypatch.setattr("common.ranks.choose", lambda *about: asked.append(about))
    for name, value in (TWO_RANKS | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    parse(argv=["--distributed"])
    assert asked == [("auto", "auto", 2)], "device, backend, processes on this node"


def test_packages_are_asked_for_where_they_are_needed(monkeypatch):
    monkeypatch.setattr("common.config.missing", lambda names: "no sklearn" if "sklearn" in names else None)
    assert parse(argv=["--task", "images", "--dataset", "cifar10"]).dataset == "cifar10"
    with refused("--task images", "sklearn"):
        parse(argv=["--task", "images"])


def test_yaml_is_read_and_the_command_line_wins():
    config = parse(argv=[*yaml("batch-size: 8\nlr: 1e-4\nby_hand: true\nsteps: 7\nstrategy: ddp"), "--steps", "9"])
    assert (config.batch_size, config.lr, config.by_hand) == (8, 1e-4, True)
    assert config.steps == 9, "the command line wins over the file's 7"


def test_defaults():
    assert parse(argv=[]).strategy == "single"
    assert parse("ddp", argv=[]).strategy == "ddp"
    assert parse(argv=yaml("")).steps == parse(argv=[]).steps


def test_a_mesh_for_other_ranks():
    """(What is refused: test_chapter_messages.py.)"""
    assert configure("--strategy hsdp", size=4).axes == {"data": 2, "shard": 2}
    assert configure("--strategy hsdp --mesh data=4", size=4).axes == {"data": 4, "shard": 1}


def test_the_mesh_picks_the_strategy_and_its_order_is_an_option():
    assert configure("--mesh data=2", size=2).strategy == "ddp"
    assert configure("--mesh shard=2", size=2).strategy == "fsdp"
    assert configure("--mesh tensor=2", size=2).strategy == "tensor"
    assert configure("--mesh data=2,shard=2", size=4).strategy == "hsdp"
    assert configure("--mesh shard=2,tensor=2", size=4).strategy == "tensor+fsdp"
    assert configure("--mesh shard=2,tensor=2 --by-hand", size=4).strategy == "mesh"
    assert configure("--mesh shard=2,tensor=2 --implementation=by-hand", size=4).by_hand
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
    with refused("--precision fp16", "cpu", "fp32"):
        require_precision(torch.device("cpu"), "fp16")


def test_many_processes_without_distributed(monkeypatch):
    for name, value in TWO_RANKS.items():
        monkeypatch.setenv(name, value)
    with refused("2", "--distributed"):
        parse(argv=[])
    assert parse(argv=["--distributed"]).strategy == "ddp"


def test_only_rank_0_claims_the_run_directory(monkeypatch):
    for name, value in (TWO_RANKS | {"RANK": "1", "LOCAL_WORLD_SIZE": "1"}).items():  # its node's first
        monkeypatch.setenv(name, value)
    config = parse(argv=["--distributed", "--run-dir", "mine"])
    claim(config)
    assert not Path("mine").exists(), "rank 1 has made the run's folder"
    monkeypatch.setenv("RANK", "0")
    for line in ("--dry-run", "--strategy fsdp --find-batch-size --memory-budget 2"):
        idle = parse(argv=["--distributed", "--run-dir", "mine", *line.split()])
        assert not idle.trains, line
    assert parse(argv=["--distributed"]).run_dir == "" and not any(Path().iterdir()), "to read writes nothing"
    assert config.trains
    claim(config)
    assert Path("mine").is_dir()


def test_a_dry_run_asks_for_no_device_and_no_launcher():
    config = configure("--dry-run --distributed --device cuda --mesh data=3")
    assert (config.axes, config.device) == ({"data": 3}, "cuda")


def test_what_is_picked_goes_with_the_scripts_defaults():
    """The planner's command line is read as the script would have read it."""
    made = parse("fsdp", ["--strategy", "auto"], "by-hand", auto=lambda argv: [])
    assert (made.strategy, made.implementation) == ("fsdp", "by-hand")


def test_what_others_call_an_option():
    """Names of other programs, end to end, are in test_errors.py."""
    known = {item.name for item in shared()} | {"microbatches", "recompute"}
    assert {*ELSEWHERE} <= known, "what they mean is an option here"
    assert nearest_option("dtype", {"lr", "steps"}) is None, "an option that there is not"
    assert nearest_option("stepz", {"lr", "steps"}) == "steps"


# --- as a process -----------------------------------------------------------------------------------------------


def refusal_of(program, *arguments, **variables: str) -> str:
    """What a program, as a process with these variables, says on stderr before it ends with exit code 2."""
    process = Fork(program, *arguments, cwd=Path.cwd(), env=os.environ | TWO_RANKS | variables)
    said, errors = process.communicate(timeout=300)
    assert (process.returncode, said) == (2, ""), errors
    return errors


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        script = ROOT / "distributed_training.py"
        said = refusal_of(script, "--distributed", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert said.count("\n") == 1 and port in said and "--master_port" in said, said


def test_nobody_comes():
    """Rank 1 of 2, whose rank 0 was never started, on a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def meet(_arguments):
        with one_line_errors(), process_group("cpu", "gloo", timeout=2):
            pass

    last = refusal_of(meet, RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)).splitlines()[-1]
    assert last.startswith("error: ") and f"127.0.0.1:{port}" in last, last


def test_an_engine_that_is_not_installed_gets_the_line_that_installs_it(monkeypatch):
    """And whether it is installed is not asked of anybody who does not want it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for strategy, engine, package in [("ddp", "fabric", "lightning"), ("fsdp", "trainer", "transformers")]:
        with refused("--implementation", engine, package, "requirements-engines.txt"):
            configure("", 2, strategy=strategy, implementation=engine)
    assert configure("", 2, strategy="ddp").implementation == "pytorch"


# --- going on with a run ----------------------------------------------------------------------------------------


def changed(run: Path, **settings) -> None:
    """Other settings in its config.json; None: it has none by that name."""
    kept = json.loads((run / "config.json").read_text())["config"] | settings
    write_facts(run)
    facts = json.loads((run / "config.json").read_text())
    facts["config"] = {name: value for name, value in kept.items() if value is not None}
    (run / "config.json").write_text(json.dumps(facts))


def test_every_option_of_a_strategy_is_known_before_the_strategy_is_imported():
    kinds = [kind for entry in STRATEGIES.values() for kind in entry.implementations.values()]
    assert {item.name for kind in kinds for item in fields(kind.Options)} <= own_names()


def test_the_command_line_says_which_run_is_resumed():
    begun(Path("a"), strategy="ddp", seed=1), begun(Path("b"), strategy="ddp", seed=2)
    Path("run.yaml").write_text("run-dir: a\nresume: true\n")
    assert [configure(f"--config run.yaml {more}").seed for more in ("", "--run-dir b")] == [1, 2], "--run-dir's"
    Path("run.yaml").write_text("resume: false\n")
    assert configure("--config run.yaml --resume --run-dir b").seed == 2, "--resume of the command line wins"


def test_which_strategy_and_implementation_goes_on():
    run = begun(Path("run"), strategy="ddp", by_hand=True)
    Path("run.yaml").write_text("implementation: pytorch\n")
    for line, strategy, implementation in (
        ("", "ddp", "by-hand"),
        ("--strategy fsdp", "fsdp", "pytorch"),
        ("--config run.yaml", "ddp", "pytorch"),
        ("--mesh data=1", "ddp", "by-hand"),
        ("--mesh tensor=1", "tensor", "pytorch"),  # ddp has no such axis, so the mesh says it
    ):
        config = configure(f"--resume --run-dir run {line}")
        assert (config.strategy, config.implementation) == (strategy, implementation), f"--resume {line}"
    changed(run, implementation=None)  # as earlier versions wrote it
    assert configure("--resume --run-dir run").implementation == "by-hand", "of a run that says by_hand only"


def test_a_setting_that_this_version_does_not_have_is_refused():
    changed(begun(Path("run"), strategy="ddp"), precision="fp8")
    with refused("--precision", "fp8", "bf16"):
        configure("--resume --run-dir run")
