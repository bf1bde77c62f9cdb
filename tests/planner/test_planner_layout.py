"""What follows from a layout's numbers, and what is said of those that cannot work."""

from dataclasses import replace

import pytest
from helpers import refused
from planner_cases import mesh_of

from common.lab.wire_bytes import wire_bytes
from planner import models, stages
from planner.estimate import estimate
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


def test_numbers_that_follow_from_a_layout():
    one = Layout(tuple(mesh_of("pipeline=2 data=3 shard=5 context=7 expert=11 tensor=13").items()), 3 * 5 * 11 * 8,
                 micro_batch=4, sequence=700, stages_per_rank=2)  # fmt: skip
    assert (one.readers, one.micro_batches, one.stages, one.tokens) == (3 * 5 * 11, 2, 4, 4 * 100), (
        "ranks that read other sequences, micro-batches, stages, tokens of a micro-batch on a rank"
    )
    assert (one.tensor, one.pipeline, one.context, one.size("nothing")) == (13, 2, 7, 1), "sizes of axes"
    told = {  # ZeRO stage, and whether ranks along "context" divide the state: shards, and copies that are summed
        (0, True): (1, {"data": 3 * 5 * 11 * 7}),
        (0, False): (1, {"data": 3 * 5 * 11 * 7}),
        (1, True): (5 * 7 * 11, {"data": 3}),
        (3, True): (5 * 7 * 11, {"data": 3}),
        (3, False): (5 * 11, {"data": 3, "context": 7}),
    }
    for (stage, shard_context), expected in told.items():
        other = Layout(one.mesh, one.batch_size, zero_stage=stage, shard_context=shard_context)
        assert (other.shards, other.copies) == expected, f"ZeRO-{stage}, shard_context={shard_context}"
    assert Layout((("data", 1),), 8).copies == {}, "one rank sums with no other"


def test_layers_and_ends_of_each_rank():
    """(layers, embedding, head) of ten layers: the inner stages have those that are left."""
    for schedule, chunks, pipeline, expected in (
        ("1f1b", 1, 4, [(2, True, False), (3, False, False), (3, False, False), (2, False, True)]),
        ("1f1b", 1, 3, [(3, True, False), (4, False, False), (3, False, True)]),
        ("interleaved", 2, 2, [(5, True, False), (5, False, True)]),
        ("interleaved", 2, 3, [(3, True, False), (4, False, False), (3, False, True)]),
        ("zbv", 2, 2, [(4, True, True), (6, False, False)]),
        ("zbv", 2, 3, [(2, True, True), (4, False, False), (4, False, False)]),
    ):
        one = Layout((("pipeline", pipeline),), 12, schedule=schedule, stages_per_rank=chunks)
        assert list(stages.shares(SMALL, one)) == expected, f"{schedule} on {pipeline} ranks"
    alone = Layout((("pipeline", 6),), 12, schedule="interleaved", stages_per_rank=2, ends=True)
    assert [share[0] for share in stages.shares(SMALL, alone)] == [1, 2, 2, 2, 2, 1], "ten layers and two ends"
    assert stages.layers_of_stages(10, 4, True) == (2, 3, 3, 2) and stages.layers_of_stages(8, 4, True) == (1, 3, 3, 1)
    assert stages.layers_of_stages(10, 4) == (2, 3, 3, 2) and stages.layers_of_stages(11, 4) == (3, 3, 3, 2)
    more = made("pipeline=12", 12, batch_size=12)
    assert stages.shares(SMALL, more)[0] == (0, True, False) and stages.shares(SMALL, more)[-1] == (0, False, True)
    three = Layout((("pipeline", 3),), 12, stages_per_rank=2)
    v, ring = (replace(three, schedule=name) for name in ("dualpipev", "interleaved"))
    assert [stages.stages_of(v, rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)], "down and up again"
    assert [stages.stages_of(ring, rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


def test_some_layers_of_each_stage_are_computed_again():
    """Four of eight in each of four stages are every second layer."""
    model, nodes = models.find("llama-7b"), cluster("h100-80gb", 4)
    given = {"batch_size": 16, "mesh": {"pipeline": 4}}
    half, second, full = (
        estimate(model, nodes, make_layout(model, nodes, **given, recompute=how, recompute_layers=some))
        for how, some in (("full", 4), ("every-second", None), ("full", 8))
    )
    assert half.seconds == second.seconds and half.memory == second.memory
    assert half.layout.recompute_share == 0.5 and full.layout.recompute_share == 1
    assert half.seconds < full.seconds and half.memory.expected > full.memory.expected
    for pipeline, chunks in ((2, 2), (4, 2), (2, 4)):  # and so it is where a rank has several stages
        one = make_layout(model, cluster("h100-80gb", pipeline), {"pipeline": pipeline}, batch_size=16,
                          stages_per_rank=chunks, recompute="full", recompute_layers=2)  # fmt: skip
        assert one.recompute_share * 32 == pipeline * chunks * 2, "layers of all stages"


def test_parallel_halves_of_a_layer_share_a_sum():
    """GPT-NeoX's: half of the bytes of a layer's messages."""
    pythia, nodes = models.find("pythia-12b"), cluster("h100-80gb", 8)
    one = make_layout(pythia, nodes, {"tensor": 8}, batch_size=64, micro_batch=8)  # the host keeps up
    found, usual = (estimate(model, nodes, one) for model in (pythia, replace(pythia, parallel=False)))
    layer = 36 * wire_bytes("all_reduce", 8 * 2048 * 5120 * 2, 8) * one.micro_batches
    assert usual.step.links["tensor"] - found.step.links["tensor"] == pytest.approx(2 * layer)
    assert found.seconds < usual.seconds and found.memory == usual.memory
