"""What follows from a layout's numbers, and what is said of those that cannot work."""

from dataclasses import replace

import pytest
from helpers import refused
from planner_cases import mesh_of

from planner import models
from planner.hardware import cluster
from planner.layout import Layout, make_layout

SMALL = models.Model("small", 10, 64, 4, 100)
MIXED = models.Model("mixed", 10, 64, 4, 100, experts=4, top_k=1, expert_width=64)


def made(text: str, gpus: int, model=SMALL, **fields) -> Layout:
    return make_layout(model, cluster("h100-80gb", gpus, gpus), mesh_of(text), **({"batch_size": 16} | fields))


REFUSED = [  # mesh, GPUs, fields of the layout, and what the message names
    ("data=8", 8, {"ends": True}, "--ends pipeline"),
    ("pipeline=13", 13, {"ends": True, "batch_size": 13}, "13 10 layers"),
    ("data=8", 8, {"zero_stage": -1}, "--zero-stage 0 3 -1"),
    ("", 8, {}, "--mesh --gpus 1 8"),
    ("tensor=4", 4, {"model": replace(SMALL, kv_heads=2)}, "tensor=4 --kv-heads 2"),
    ("tensor=4", 4, {"model": replace(SMALL, mlp_width=6)}, "tensor=4 --mlp-width 6"),
    ("tensor=4", 4, {"model": replace(SMALL, vocabulary=3)}, "tensor=4 --vocabulary 3"),
    ("tensor=4", 4, {"model": replace(MIXED, expert_width=6)}, "tensor=4 --expert-width 6"),
    ("expert=8", 8, {"model": MIXED}, "expert=8 4"),
    ("expert=2 tensor=4", 8, {"model": MIXED, "whole_experts": True}, "expert=2 tensor=4 4"),
    ("data=8", 8, {"whole_experts": True}, "--whole-experts"),
    ("data=2", 2, {"micro_batch": 0}, "--micro-batch 1 0"),
    ("data=2", 2, {"stages_per_rank": 0}, "--stages-per-rank 1 0"),
    ("data=2", 2, {"stages_per_rank": 2}, "--stages-per-rank 2 pipeline"),
    ("context=2 tensor=4", 8, {"sequence": 12}, "context=2 tensor=4 --sequence 12"),
    ("data=2 shard=2 expert=2", 8, {"model": MIXED, "micro_batch": 3}, "--batch-size 16 8 3 24"),
]


@pytest.mark.parametrize("text, gpus, fields, words", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(text, gpus, fields, words):
    """What a command line can say of it: test_planner.py."""
    with refused(*words.split()):
        made(text, gpus, **fields)


def test_what_nearly_cannot_work_does():
    made("tensor=4", 4)  # a vocabulary of 100 divides, one of 101 is padded
    made("tensor=4", 4, models.Model("m", 1, 64, 4, 101))
    made("context=2 tensor=4", 8, sequence=12 + 2, sequence_parallel=False)
    made("pipeline=5", 5, stages_per_rank=2, batch_size=10)
    made("expert=4", 4, MIXED)
    made("pipeline=4", 4, stages_per_rank=2, batch_size=8)


def test_what_is_taken_for_something_else_is_a_note():
    one = made("data=8", 8, zero_stage=2)
    assert one.mesh == (("pipeline", 1), ("data", 1), ("shard", 8), ("context", 1), ("expert", 1), ("tensor", 1))
    (note,) = one.notes
    assert "data=8" in note and "shard" in note
    assert made("data=2 shard=4", 8, zero_stage=3).notes == () == made("data=8", 8).notes
    assert made("data=4 context=2", 8, zero_stage=3, sequence=4096).size("data") == 4, "ranks along 'context' divide"
    one = made("pipeline=2", 2, stages_per_rank=3)
    (note,) = one.notes
    assert one.schedule == "interleaved" and not [word for word in ("1f1b", "3", "interleaved") if word not in note]
    assert made("pipeline=2", 2, schedule="looped-bfs", stages_per_rank=2).schedule == "looped-bfs"
    assert made("data=1", 1).precision == "bf16-mixed" and made("data=1", 1, precision="fp8").precision == "fp8-mixed"
