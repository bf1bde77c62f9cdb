"""Every option of the planner's commands reaches what it is an option of; files of constants are checked."""

import inspect
from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
from helpers import refused

from planner import __main__ as commands
from planner import constants, search
from planner.__main__ import cluster_of, model_of, named, read
from planner.constants import PRIOR

ESTIMATE = "estimate --model llama-2-7b --gpus 8 --gpu h100-80gb --batch-size 64"
SHAPE = "estimate --gpus 1 --gpu h100-80gb --batch-size 1 --layers 2 --width 64 --heads 4 --vocabulary 256"


@pytest.mark.parametrize(
    "more, parameters",
    [
        ("", 2 * (12 * 64**2 + 13 * 64) + 256 * 64 + 2048 * 64 + 2 * 64),  # as GPT-2: positions, biases, a tied head
        ("--sequence 128", 2 * (12 * 64**2 + 13 * 64) + 256 * 64 + 128 * 64 + 2 * 64),
        ("--mlp swiglu", 2 * (16 * 64**2 + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --head-width 32 --kv-heads 2 --mlp-width 100",
         2 * (2 * 64 * (128 + 64) + 3 * 64 * 100 + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --experts 4 --top-k 2 --expert-width 10 --shared-experts 1",
         2 * (4 * 64**2 + 64 * (4 + 3 * 5 * 10) + 2 * 64) + 2 * 256 * 64 + 64),
        ("--mlp swiglu --experts 4 --top-k 2", 2 * (4 * 64**2 + 64 * (4 + 3 * 4 * 256) + 2 * 64) + 2 * 256 * 64 + 64),
    ],
)  # fmt: skip
def test_each_option_of_a_shape_reaches_the_model(more, parameters):
    assert model_of(read(f"{SHAPE} {more}".split())).parameters == parameters, f"parameters with {more}"


def test_each_option_of_a_plan_reaches_the_search(monkeypatch, tmp_path):
    slow = tmp_path / "slow.json"
    slow.write_text('{"constants": {"alpha_link": 1.0}}')
    asked, parameters = [], inspect.signature(search.plan)
    monkeypatch.setattr(search, "plan", lambda *args, **more: asked.append(parameters.bind(*args, **more)) or [])
    line = (
        f"plan {ESTIMATE[9:]} --sequence 512 --precision fp32 --max-memory-gb 9 --constants {slow} "
        "--framework megatron --lora 8 --lora-on qv"
    )
    commands.planned(read(line.split()), 7)
    found = asked[0].arguments
    assert (found["model"].name, found["cluster"].gpus) == ("llama-2-7b", 8)
    told = {"batch_size": 64, "sequence": 512, "precision": "float32", "max_memory_gib": 9.0, "count": 7,
            "framework": "megatron", "constants": replace(PRIOR, alpha_link=1.0),
            "adapted": {"lora": 8, "lora_on": "qv", "nf4": False}}  # fmt: skip
    assert {name: found[name] for name in told} == told, "what the search is asked"
    assert named(read(f"{ESTIMATE} --constants {slow}".split())).constants.alpha_link == 1.0, "constants of the file"


# --- files of constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, says", [('{"constants": {"matmull": 1.0}}', "matmull"), ('{"here": {}}', ""), ("[1, 2]", ""), ("matmul", "")]
)
def test_a_file_of_something_else_gets_one_line(text, says, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with refused("c.json", says):
        constants.load(tmp_path / "c.json")


@pytest.mark.parametrize("gpus, nodes", [(1, 1), (2, 1), (8, 1), (16, 2)])
def test_fewer_gpus_than_a_node_has_are_a_node(gpus, nodes):
    """They alone use its host's memory, and what each keeps there is updated by all of its cores."""
    found = cluster_of(read(ESTIMATE.replace("--gpus 8", f"--gpus {gpus}").split()))
    assert (found.gpus_per_node, found.nodes) == (gpus / nodes, nodes)


def test_no_number_of_any_command_is_nan():
    types = {(name, action.dest): action.type for name, one in commands.parser()[1].items() for action in one._actions}
    for option, read_text in types.items():
        if read_text not in (None, str):
            with pytest.raises((ValueError, ArgumentTypeError)):
                pytest.fail(f"{option}: {read_text('nan')}")


def test_each_option_of_a_cluster_reaches_it():
    with refused("--adapters", "0"):
        cluster_of(read(f"{ESTIMATE} --adapters 0".split()))
    line = f"{ESTIMATE} --gpus-per-node 4 --network ethernet-100 --adapters 2"
    found = cluster_of(read(line.split()))
    assert (found.gpus, found.gpus_per_node, found.nodes, found.network, found.adapters) == (8, 4, 2, 12.5e9, 2), (
        "cluster"
    )
