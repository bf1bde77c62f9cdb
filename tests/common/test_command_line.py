"""The command line and the file together: who wins, which strategy and implementation is meant, what is said."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from helpers import begun, configure, refused, write_facts

from common.command_line import own_names
from common.command_line import parse as parse_table
from common.config import shared
from common.did_you_mean import ELSEWHERE, nearest_option
from course.strategies import BY_AXES, STRATEGIES

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changed(run: Path, **settings) -> None:
    """Other settings in its config.json; None: it has none by that name."""
    kept = json.loads((run / "config.json").read_text())["config"] | settings
    write_facts(run)
    facts = json.loads((run / "config.json").read_text())
    facts["config"] = {name: value for name, value in kept.items() if value is not None}
    (run / "config.json").write_text(json.dumps(facts))


def test_a_dry_run_asks_for_no_device_and_no_launcher():
    config = configure("--dry-run --distributed --device cuda --mesh data=3")
    assert (config.axes, config.device) == ({"data": 3}, "cuda")


def test_what_is_picked_goes_with_the_scripts_defaults():
    """The planner's command line is read as the script would have read it."""
    made = parse_table(STRATEGIES, "fsdp", ["--strategy", "auto"], BY_AXES, "by-hand", auto=lambda argv: [])
    assert (made.strategy, made.implementation) == ("fsdp", "by-hand")


# --- going on with a run ----------------------------------------------------------------------------------------


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


# --- small parts ------------------------------------------------------------------------------------------------


def test_what_others_call_an_option():
    """Names of other programs, end to end, are in test_errors.py."""
    known = {item.name for item in shared()} | {"microbatches", "recompute"}
    assert {*ELSEWHERE} <= known, "what they mean is an option here"
    assert nearest_option("dtype", {"lr", "steps"}) is None, "an option that there is not"
    assert nearest_option("stepz", {"lr", "steps"}) == "steps"
