"""Bytes of a step worked out by hand, part by part: what is on a GPU at the peak, and what it sends along each axis.
(Sizes of the models: tests/planner_cases.py.)
"""

import math
from dataclasses import replace

import pytest
from planner_cases import GPT, MIXED, TIED, layout

from planner import frameworks, memory, models, traffic
from planner.constants import PRIOR

WIDE = replace(GPT, vocabulary=100_000)  # ends of a hundred million each, and logits of 400 MB
GATED = replace(GPT, mlp="swiglu")
NARROW = replace(GPT, mlp_width=500, vocabulary=10)
THIRD, FULL = {"zero_stage": 3}, {"recompute": "full"}


def named(value) -> str:
    """Of a case: its mesh, and not all that it is compared with."""
    return value if isinstance(value, str) else ""


SENT = [  # mesh, fields of the layout, and MB along each axis
    ("data=1", {}, {}),
    ("data=2", {}, {"data": 200.036}),
    ("data=4", {}, {"data": 1.5 * 200.036}),
    ("data=2", {"precision": "bf16"}, {"data": 100.018}),
    ("data=2", {"precision": "fp16-mixed"}, {"data": 100.018}),
    ("data=2 tensor=2", {"precision": "fp8-mixed"}, {"tensor": 2 * (4 * 4 + 2) + 0.012, "data": 2 * 25.009}),
    # Two all-reduces forward and two backward in each layer, one at each end, and three numbers of each token.
    ("tensor=2", {}, {"tensor": 2 * (4 * 4 + 2) + 0.012}),
    ("tensor=2", {"many": 3}, {"tensor": 3 * (2 * (4 * 4 + 2) + 0.012)}),
    ("tensor=2", FULL, {"tensor": 2 * (6 * 4 + 2) + 0.012}),
    # PyTorch's checkpoints leave out the last sum of a layer, and with sequence parallelism its reduce-scatter.
    ("tensor=2", {"framework": "course", "sequence_parallel": False} | FULL, {"tensor": 2 * (5 * 4 + 2) + 0.012}),
    ("tensor=2", {"framework": "torch"} | FULL, {"tensor": 2 * (5.5 * 4 + 2) + 0.012}),
    ("tensor=2", {"recompute": "every-second"}, {"tensor": 2 * (5 * 4 + 2) + 0.012}),
    ("tensor=2", {"precision": "float32"}, {"tensor": 4 * (4 * 4 + 2) + 0.012}),
    ("pipeline=2 tensor=2", {}, {"tensor": 2 * (4 * 2 + 1) + 0.006, "pipeline": 1}),
    # Keys and values of all tokens, 4 MB, of which each of two ranks sends a half.
    ("context=2", {}, {"context": 2 * 3 * 4, "data": 200.036}),
    ("context=2", FULL, {"context": 2 * 4 * 4, "data": 200.036}),
    ("context=2", {"model": replace(GPT, kv_heads=5)}, {"context": 1 * 3 * 4, "data": 4 * 46.009}),
    ("context=2", {"shard_context": False} | THIRD, {"context": 2 * 3 * 4 + 200.036}),
    # A message forward and one backward of each micro-batch from stage to stage: on average over the ranks.
    ("pipeline=2", {"many": 3}, {"pipeline": 3 * 2 * 2 / 2}),
    ("pipeline=4", {"many": 3}, {"pipeline": 3 * 2 * 3 * 2 / 4}),
    ("pipeline=2", {"stages_per_rank": 2, "schedule": "interleaved"}, {"pipeline": 2 * 3 * 2 / 2}),
    ("pipeline=2 tensor=2", {"sequence_parallel": False}, {"tensor": 2 * (4 * 2 + 1) + 0.006, "pipeline": 2}),
    ("pipeline=2", {"model": TIED}, {"pipeline": 2 + 4}),  # of the two ends, one all-reduce of 4 MB
    ("pipeline=4", {"model": TIED}, {"pipeline": 3 + 4 / 2}),
    ("pipeline=2", {"model": TIED, "stages_per_rank": 2, "schedule": "zbv"}, {"pipeline": 6}),  # both on one rank
    # Half of all parameters in 16 bit, and half of their gradients in 32.
    ("shard=2", {"zero_stage": 1, "many": 2}, {"shard": 50.009 + 100.018}),
    ("shard=2", {"zero_stage": 2, "many": 2}, {"shard": 50.009 + 2 * 100.018}),
    ("shard=2", THIRD, {"shard": 50.009 + 48.008 + 100.018}),  # layers are gathered for the backward pass too
    ("shard=2", {"many": 2} | THIRD, {"shard": 2 * (50.009 + 48.008 + 100.018)}),
    ("shard=2", {"model": TIED} | THIRD, {"shard": 49.009 + 48.008 + 98.018}),
    ("pipeline=2 shard=2", {"many": 2} | THIRD, {"shard": (50.009 + 100.018) / 2, "pipeline": 2 * 2 * 2 / 2}),
    ("pipeline=2 shard=2", {"many": 2, "zero_stage": 2}, {"shard": (50.009 + 100.018) / 2, "pipeline": 4}),
    ("data=2 shard=2", THIRD, {"shard": 50.009 + 48.008 + 100.018, "data": 100.018}),
    ("data=2 shard=2", {"zero_stage": 1}, {"shard": 150.027, "data": 100.018}),
    ("data=2 shard=2", {}, {"data": 1.5 * 200.036}),
    ("shard=2 context=2", THIRD, {"shard": 1.5 * (50.009 + 48.008 + 100.018), "context": 2 * 3 * 4}),
    # Half of four experts of 8 million parameters is on each of two ranks along "expert", which sum the rest only.
    ("expert=2", {"model": MIXED}, {"expert": 2 * 8, "data": 4 * 34.013}),
    ("expert=2", {"model": MIXED} | FULL, {"expert": 3 * 8, "data": 4 * 34.013}),  # tokens go there and back again
    ("data=2 expert=2", {"model": MIXED}, {"expert": 2 * 8, "data": 1.5 * 4 * 34.013 + 4 * 16}),
    ("expert=2", {"model": MIXED} | THIRD, {"expert": 2 * 8, "shard": 34.013 + 32.012 + 2 * 34.013}),
    ("shard=2 expert=2", {"model": MIXED} | THIRD, {
        "expert": 2 * 8, "shard": 1.5 * (34.013 + 32.012 + 2 * 34.013) + 16 + 16 + 2 * 16}),
    ("data=2 expert=2", {"model": MIXED} | THIRD, {
        "expert": 2 * 8, "shard": 34.013 + 32.012 + 2 * 34.013, "data": 4 * (34.013 / 2 + 16)}),
    ("shard=2 expert=2", {"model": MIXED, "offload": True, "zero_stage": 2}, {
        "expert": 2 * 8, "shard": 1.5 * (34.013 + 2 * 34.013) + 16 + 2 * 16, "host": 6 * (34.013 / 4 + 16 / 2)}),
    ("data=1", {"offload": True}, {"host": 6 * 50.009}),
    ("shard=2", {"offload": True, "many": 2} | THIRD, {
        "shard": 2 * (50.009 + 48.008 + 100.018), "host": (6 + 2 * 3) * 50.009 / 2}),
    ("pipeline=2 shard=2", {"offload": True} | THIRD, {
        "shard": (50.009 + 100.018) / 2, "pipeline": 2, "host": 6 * 50.009 / 4}),
]  # fmt: skip


@pytest.mark.parametrize("text, fields, expected", SENT, ids=named)
def test_bytes_that_are_sent(text, fields, expected):
    fields = dict(fields)
    found = traffic.sent(fields.pop("model", GPT), layout(text, **fields))
    shown = {axis: size / 1e6 for axis, size in found.items()}
    assert shown == pytest.approx(expected), f"MB along each axis of {text}, {fields}"


# --- memory -----------------------------------------------------------------------------------------------------------


MIXED_PRECISION = {"parameters": 2 * 50.009, "gradients": 4 * 50.009, "optimizer": 12 * 50.009}
FLOAT32 = {"parameters": 4 * 50.009, "gradients": 4 * 50.009, "optimizer": 8 * 50.009}  # shards of stage 3
STAGE = {"parameters": 2 * 25.004, "gradients": 4 * 25.004, "optimizer": 12 * 25.004}  # two layers and the embedding
KEPT = {"activations": 4 * 32, "gradients of activations": 2 * 8 + 2 * 2}  # 16 numbers of each token and width
OF_GATED = KEPT | {"parameters": 2 * 66.009, "gradients": 4 * 66.009, "optimizer": 12 * 66.009}  # three matrices
LOSS, ENDS = {"logits and loss": 3.5 * 400}, {"parameters": 2 * 248.009, "gradients": 4 * 248.009}
LAST = {"parameters": 2 * 112.003, "gradients": 4 * 112.003, "optimizer": 12 * 112.003, "messages": 4 * 2}


def over(ranks: int, parts: dict, *names: str) -> dict:
    """The parts, of which those named, by default all, are divided."""
    return {name: size / ranks if name in names or not names else size for name, size in parts.items()}


MEMORY = [  # mesh, fields of the layout, rank that needs most, the phase of its peak, and MB of each part
    ("data=1", {}, 0, "backward", MIXED_PRECISION | KEPT),
    ("data=1", FULL, 0, "backward", MIXED_PRECISION | KEPT | {"activations": 4 * 2, "a layer computed again": 30}),
    ("data=1", {"recompute": "every-second"}, 0, "backward",
     MIXED_PRECISION | KEPT | {"activations": 2 * 32 + 2 * 2, "a layer computed again": 32 - 17}),
    ("data=1", {"dropout": True}, 0, "backward", MIXED_PRECISION | KEPT | {"activations": 4 * 34}),  # masks of a byte
    ("data=1", {"flash": False}, 0, "backward", MIXED_PRECISION | KEPT | {"activations": 4 * 52}),  # ten heads' scores
    ("data=1", {"flash": False, "dropout": True}, 0, "backward",
     MIXED_PRECISION | KEPT | {"activations": 4 * (34 + 50)}),
    ("data=1", {"flash": False, "recompute": "attention"}, 0, "backward",
     MIXED_PRECISION | KEPT | {"a layer computed again": 20}),
    ("data=1", {"precision": "float32"}, 0, "backward",
     FLOAT32 | {"activations": 4 * 64, "gradients of activations": 4 * 8 + 2 * 4}),
    ("data=1", {"model": GATED}, 0, "backward", OF_GATED | {"activations": 4 * (16 + 24)}),
    ("data=1", {"model": GATED, "fused": False}, 0, "backward", OF_GATED | {"activations": 4 * (16 + 32)}),
    ("context=2", {}, 0, "backward", MIXED_PRECISION | over(2, KEPT)),
    ("tensor=2", {}, 0, "backward", {
        "parameters": 2 * 25.009, "gradients": 4 * 25.009, "optimizer": 12 * 25.009, "activations": 4 * 16,
        "gradients of activations": 8 + 2, "gathered activations": 3 * 2}),
    ("tensor=2", {"sequence_parallel": False}, 0, "backward", {
        "parameters": 2 * 25.009, "gradients": 4 * 25.009, "optimizer": 12 * 25.009, "activations": 4 * 20,
        "gradients of activations": 8 + 4}),
    ("shard=2", {"zero_stage": 1}, 0, "backward", over(2, MIXED_PRECISION, "optimizer") | KEPT),
    ("shard=2", {"zero_stage": 2}, 0, "backward",
     over(2, MIXED_PRECISION, "optimizer", "gradients") | KEPT | {"buckets of gradients": 2 * 4 * 12.002}),
    ("shard=2", THIRD, 0, "backward", over(2, FLOAT32) | KEPT | {
        "gathered": 2 * 2 * 12.002, "unsharded gradients": (2 + 4) * 12.002}),
    ("data=1", THIRD, 0, "backward", FLOAT32 | KEPT | {"16-bit copies": 2 * 50.009}),
    ("data=2", {"offload": True}, 0, "backward", {"parameters": 2 * 50.009, "host": 16 * 50.009} | KEPT),
    ("shard=2", {"offload": True} | THIRD, 0, "backward", {
        "gathered": 2 * 2 * 12.002, "unsharded gradients": (2 + 4) * 12.002, "host": 16 * 50.009 / 2} | KEPT),
    ("shard=2", {"offload": True, "zero_stage": 2}, 0, "backward", {
        "parameters": 2 * 50.009, "buckets of gradients": 2 * 4 * 12.002, "host": 16 * 50.009 / 2} | KEPT),
    # The first of two stages holds two micro-batches of two layers; PyTorch's have a buffer for each of four.
    ("pipeline=2", {"many": 4}, 0, "backward", STAGE | KEPT | {"messages": 4 * 2}),
    ("pipeline=2 shard=2", {"many": 4, "zero_stage": 1}, 0, "backward",
     over(2, STAGE, "optimizer") | KEPT | {"messages": 4 * 2}),
    ("pipeline=2 shard=2", {"many": 4} | THIRD, 0, "backward", {
        "parameters": 2 * 25.004, "gradients": 2 * 25.004, "optimizer": 4 * 25.004, "messages": 2 * 4 * 2,
        "gathered": 2 * 25.004, "unsharded gradients": 4 * 25.004} | KEPT),
    ("pipeline=2", {"many": 2, "stages_per_rank": 2, "schedule": "interleaved"}, 0, "backward",
     STAGE | KEPT | {"messages": 4 * 2}),  # it holds four, of one layer each
    ("pipeline=2 shard=2", {"model": MIXED} | THIRD, 1, "backward", {  # two layers of 8.003 and 8, and the head
        "parameters": 2 * 33.007, "gradients": 2 * 33.007, "optimizer": 4 * 33.007, "messages": 2 * 2,
        "activations": 32 + 56, "gradients of activations": 2 * 16 + 4,
        "gathered": 2 * 33.007, "unsharded gradients": 4 * 33.007}),
    ("data=1", {"model": NARROW}, 0, "backward", {  # queries, keys and values are wider than the MLP
        "parameters": 2 * 20.029, "gradients": 4 * 20.029, "optimizer": 12 * 20.029, "activations": 4 * 18,
        "gradients of activations": 2 * 4 + 4}),
    ("data=1", {"model": WIDE}, 0, "loss", ENDS | {"optimizer": 12 * 248.009, "activations": 128} | LOSS),
    ("data=1", {"model": WIDE, "fused_loss": True}, 0, "loss",
     ENDS | {"optimizer": 12 * 248.009, "activations": 128, "logits and loss": 1.5 * 400}),
    ("shard=2", {"model": WIDE} | THIRD, 0, "loss", {  # the largest unit is the head, with a norm
        "parameters": 2 * 248.009, "gradients": 2 * 248.009, "optimizer": 4 * 248.009, "activations": 128,
        "gathered": 4 * 100.001, "unsharded gradients": 6 * 100.001} | LOSS),
    ("shard=2 tensor=2", {"model": WIDE} | THIRD, 0, "loss", {
        "parameters": 2 * 124.009, "gradients": 2 * 124.009, "optimizer": 4 * 124.009, "activations": 64,
        "gathered": 4 * 50.001, "unsharded gradients": 6 * 50.001, "logits and loss": 5 * 200}),
    ("tensor=2", {"model": WIDE}, 0, "loss", {  # without stage 3, not DTensor's loss
        "parameters": 2 * 124.009, "gradients": 4 * 124.009, "optimizer": 12 * 124.009, "activations": 64,
        "logits and loss": 3.5 * 200}),
    ("pipeline=4", {"model": WIDE, "many": 4}, 3, "loss", LAST | {"activations": 32} | LOSS),
    ("pipeline=4", {"model": WIDE, "many": 4, "schedule": "gpipe"}, 3, "loss", LAST | {"activations": 4 * 32} | LOSS),
    # Layers of a mixture keep 8,000 numbers more of two experts, before and after GELU, and what goes there and back.
    ("data=1", {"model": MIXED}, 0, "backward", {
        "parameters": 2 * 66.013, "gradients": 4 * 66.013, "optimizer": 12 * 66.013,
        "activations": 2 * 32 + 2 * (32 + 16 + 8), "gradients of activations": 2 * 16 + 4}),
    ("data=1", {"model": MIXED} | FULL, 0, "backward", {
        "parameters": 2 * 66.013, "gradients": 4 * 66.013, "optimizer": 12 * 66.013, "activations": 4 * 2,
        "a layer computed again": (2 * 32 + 2 * 56) / 4 - 2, "gradients of activations": 2 * 16 + 4}),
    ("shard=2 expert=2", {"model": MIXED} | THIRD, 0, "backward", {
        "parameters": 34.013 + 2 * 16, "gradients": 34.013 + 2 * 16, "optimizer": 2 * 34.013 + 4 * 16,
        "activations": 2 * 32 + 2 * (32 + 16 + 8), "gradients of activations": 2 * 16 + 4,
        "gathered": 2 * 2 * 8.003, "unsharded gradients": 6 * 8.003}),
]  # fmt: skip


@pytest.mark.parametrize("text, fields, rank, phase, expected", MEMORY, ids=named)
def test_bytes_at_the_peak(text, fields, rank, phase, expected):
    fields = dict(fields)
    model = fields.pop("model", GPT)
    found = memory.estimate(model, layout(text, framework="torch", **fields), PRIOR)
    shown = {part: size / 1e6 for part, size in found.parts.items()}
    expected = dict(expected)
    assert found.host / 1e6 == pytest.approx(expected.pop("host", 0)), f"MB in the host's memory, {text}, {fields}"
    assert shown == pytest.approx(expected), f"MB of each part of {text}, {fields}"
    assert (found.rank, found.phase) == (rank, phase), "(rank of the pipeline that needs most, phase of its peak)"
    needed = 1e6 * math.fsum(expected.values())
    assert (found.needed, found.low, found.expected, found.high) == pytest.approx(
        (needed, needed, 1.05 * needed, 1.15 * needed)
    ), "what the allocator adds"


def test_recipes_of_frameworks():
    """What a framework holds besides, on two ranks of FSDP with two micro-batches: gradients whole and in float32, of
    which there are no shards yet; temporaries of AdamW; and what is outside of the allocator."""
    fields = {"many": 2, "precision": "bf16-mixed"} | THIRD
    plain, added = (
        memory.estimate(GPT, layout("shard=2", framework=name, **fields), PRIOR)
        for name in ("torch", "torch-accumulating")
    )
    assert added.parts["unsharded gradients"] == pytest.approx(4 * 50.009e6) and not added.parts.get("gradients")
    assert plain.parts["gradients"] == pytest.approx(4 * 50.009e6 / 2), "reduced after each micro-batch"
    deep, inside = (memory.estimate(GPT, layout("data=2", framework=name), PRIOR) for name in ("deepspeed", "torch"))
    outside = deep.expected - deep.needed * PRIOR.allocator
    assert outside == pytest.approx(frameworks.FRAMEWORKS["deepspeed"].constant), "outside of the allocator"
    assert deep.low / deep.expected == pytest.approx(inside.low / inside.expected), "one interval for both"
    assert deep.high / deep.expected == pytest.approx(inside.high / inside.expected), "one interval for both"
    tiny = {"sequence": 10}  # so that the optimizer's step is the peak
    added = memory.estimate(GPT, layout("shard=2", framework="transformers", **fields, **tiny), PRIOR)
    assert added.phase == "backward", "in the step two ranks have as much again in temporaries as was reduced"
    lists = memory.estimate(GPT, layout("data=2", framework="course", **tiny), PRIOR)
    assert lists.phase == "optimizer step", "the phase of the peak"
    assert lists.parts["temporaries of the optimizer"] == pytest.approx(4 * 50.009e6), "in float32"


@pytest.mark.parametrize(
    "framework, mesh, fields, size",
    [
        ("megatron", "data=2", {}, 0),
        ("deepspeed", "data=2", {}, 2),
        ("deepspeed", "data=2", {"precision": "bf16-mixed-16"}, 0),  # those are all that it has
        ("deepspeed", "shard=2", {"zero_stage": 2}, 0),  # reduced in buckets, and divided
        ("nanotron", "data=1", {}, 2),
        ("nanotron", "shard=2", {"zero_stage": 1}, 4),  # and DistributedDataParallel's buckets
    ],
)
def test_16_bit_gradients_beside_those_in_float32(framework, mesh, fields, size):
    found = memory.estimate(GPT, layout(mesh, framework=framework, **fields), PRIOR)
    assert found.parts.get("gradients in 16 bit", 0) == pytest.approx(size * 50.009e6), "bytes of all parameters"


def test_a_frameworks_loss_has_its_own_copies_of_the_logits():
    """On one tensor rank as well. Of 1,000 x 1,000,000: four in 16 bit where the loss is in 16 bit, one in float32 and
    the 16-bit logits where it works in place, and two in float32 where it does not quite."""
    huge = replace(WIDE, vocabulary=1_000_000)
    copies = {"torch": 3.5, "torch-accumulating": 2, "megatron": 1.5, "nanotron": 2}
    found = {
        name: memory.estimate(huge, layout("shard=2", framework=name, **THIRD), PRIOR).parts["logits and loss"]
        for name in copies
    }
    assert found == pytest.approx({name: 4e9 * number for name, number in copies.items()})


@pytest.mark.parametrize(
    "mesh, fields, names",
    [
        ("shard=2", {"many": 2} | THIRD, ("torch", "torch-accumulating", "deepspeed")),
        ("data=2", {}, ("megatron", "nanotron", "deepspeed")),
        ("tensor=2", {"precision": "bf16-mixed-16"}, ("deepspeed", "internevo", "deepspeed-whole-logits")),
        ("data=2", {"precision": "fp8-mixed"}, ("megatron",)),
    ],
)
def test_where_nobody_names_a_framework_it_is_the_middle_one_of_those_that_it_may_be(mesh, fields, names):
    each = [memory.estimate(WIDE, layout(mesh, framework=name, **fields), PRIOR) for name in names]
    unnamed = memory.estimate(WIDE, layout(mesh, **fields), PRIOR)
    sizes = sorted(one.expected for one in each)
    assert unnamed.expected == sizes[len(sizes) // 2] and unnamed.worst == sizes[-1], "the middle one, the largest one"
    assert unnamed.low <= sizes[0] and sizes[-1] <= unnamed.high, "all of them lie in the interval"
    assert len(names) == 1 or sizes[0] < sizes[-1], "they differ"


def test_parameters_of_the_ends():
    """GPT-2's embedding has positions, and its last norm a bias; a stage with both ends has the tied weight once."""
    model, layer, tokens, positions, norm = models.find("gpt2"), 7_087_872, 50257 * 768, 1024 * 768, 2 * 768
    for (layers, embedding, head), expected in (
        ((12, True, True), 12 * layer + tokens + positions + norm),
        ((6, True, False), 6 * layer + tokens + positions),
        ((6, False, True), 6 * layer + tokens + norm),
        ((0, False, False), 0),
    ):
        found = memory.parameters_of(model, layout("data=1"), layers, embedding, head)
        assert found == (expected, 0), f"{layers} layers, embedding: {embedding}, head: {head}"
