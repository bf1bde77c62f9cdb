"""Bytes of a step worked out by hand, part by part: what is on a GPU at the peak, and what it sends along each axis.
(Sizes of the models: tests/planner_cases.py.)
"""

import math
from dataclasses import replace

import pytest
from planner_cases import GPT, MIXED, TIED, layout

from planner import memory, traffic
from planner.constants import PRIOR

WIDE = replace(GPT, vocabulary=100_000)  # ends of a hundred million each, and logits of 400 MB
THIRD, FULL = {"zero_stage": 3}, {"recompute": "full"}


def named(value) -> str:
    """Of a case: its mesh, and not all that it is compared with."""
    return value if isinstance(value, str) else ""


SENT = [  # mesh, fields of the layout, and MB along each axis
    ("data=2 tensor=2", {"precision": "fp8-mixed"}, {"tensor": 2 * (4 * 4 + 2) + 0.012, "data": 2 * 25.009}),
    # PyTorch's checkpoints leave out the last sum of a layer, and with sequence parallelism its reduce-scatter.
    ("tensor=2", {"framework": "course", "sequence_parallel": False} | FULL, {"tensor": 2 * (5 * 4 + 2) + 0.012}),
    # Keys and values of all tokens, 4 MB, of which each of two ranks sends a half.
    ("context=2", {"shard_context": False} | THIRD, {"context": 2 * 3 * 4 + 200.036}),
    # A message forward and one backward of each micro-batch from stage to stage: on average over the ranks.
    ("pipeline=4", {"model": TIED}, {"pipeline": 3 + 4 / 2}),
    ("pipeline=2", {"model": TIED, "stages_per_rank": 2, "schedule": "zbv"}, {"pipeline": 6}),  # both on one rank
    # Half of all parameters in 16 bit, and half of their gradients in 32.
    ("shard=2", {"zero_stage": 2, "many": 2}, {"shard": 50.009 + 2 * 100.018}),
    ("pipeline=2 shard=2", {"many": 2} | THIRD, {"shard": (50.009 + 100.018) / 2, "pipeline": 2 * 2 * 2 / 2}),
    ("data=2 shard=2", THIRD, {"shard": 50.009 + 48.008 + 100.018, "data": 100.018}),
    ("shard=2 context=2", THIRD, {"shard": 1.5 * (50.009 + 48.008 + 100.018), "context": 2 * 3 * 4}),
    # Half of four experts of 8 million parameters is on each of two ranks along "expert", which sum the rest only.
    ("data=2 expert=2", {"model": MIXED} | THIRD, {
        "expert": 2 * 8, "shard": 34.013 + 32.012 + 2 * 34.013, "data": 4 * (34.013 / 2 + 16)}),
    ("shard=2 expert=2", {"model": MIXED, "offload": True, "zero_stage": 2}, {
        "expert": 2 * 8, "shard": 1.5 * (34.013 + 2 * 34.013) + 16 + 2 * 16, "host": 6 * (34.013 / 4 + 16 / 2)}),
    ("shard=2", {"offload": True, "many": 2} | THIRD, {
        "shard": 2 * (50.009 + 48.008 + 100.018), "host": (6 + 2 * 3) * 50.009 / 2}),
]  # fmt: skip


@pytest.mark.parametrize("text, fields, expected", SENT, ids=named)
def test_bytes_that_are_sent(text, fields, expected):
    fields = dict(fields)
    found = traffic.sent(fields.pop("model", GPT), layout(text, **fields))
    shown = {axis: size / 1e6 for axis, size in found.items()}
    assert shown == pytest.approx(expected), f"MB along each axis of {text}, {fields}"


# --- memory -----------------------------------------------------------------------------------------------------------


KEPT = {"activations": 4 * 32, "gradients of activations": 2 * 8 + 2 * 2}  # 16 numbers of each token and width
MEMORY = [  # mesh, fields of the layout, rank that needs most, the phase of its peak, and MB of each part
    ("data=1", {}, 0, "backward", {"parameters": 2 * 50.009, "gradients": 4 * 50.009, "optimizer": 12 * 50.009} | KEPT),
    ("tensor=2", {"sequence_parallel": False}, 0, "backward", {
        "parameters": 2 * 25.009, "gradients": 4 * 25.009, "optimizer": 12 * 25.009, "activations": 4 * 20,
        "gradients of activations": 8 + 4}),
    ("shard=2", {"zero_stage": 2}, 0, "backward",
     {"parameters": 2 * 50.009, "gradients": 2 * 50.009, "optimizer": 6 * 50.009, "buckets of gradients": 8 * 12.002}
     | KEPT),
    ("shard=2", {"offload": True} | THIRD, 0, "backward", {
        "gathered": 2 * 2 * 12.002, "unsharded gradients": (2 + 4) * 12.002, "host": 16 * 50.009 / 2} | KEPT),
    # The first of two stages holds two micro-batches of two layers; PyTorch's have a buffer for each of four.
    ("pipeline=2 shard=2", {"many": 4} | THIRD, 0, "backward", {
        "parameters": 2 * 25.004, "gradients": 2 * 25.004, "optimizer": 4 * 25.004, "messages": 2 * 4 * 2,
        "gathered": 2 * 25.004, "unsharded gradients": 4 * 25.004} | KEPT),
    ("shard=2 tensor=2", {"model": WIDE} | THIRD, 0, "loss", {
        "parameters": 2 * 124.009, "gradients": 2 * 124.009, "optimizer": 4 * 124.009, "activations": 64,
        "gathered": 4 * 50.001, "unsharded gradients": 6 * 50.001, "logits and loss": 5 * 200}),
    # Layers of a mixture keep 8,000 numbers more of two experts, before and after GELU, and what goes there and back.
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
