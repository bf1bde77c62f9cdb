"""What holds of every layout, whatever the constants: asked of many by hypothesis."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import hardware, memory, network, stages
from planner.constants import PRIOR
from planner.layout import make_layout
from planner.models import Model

SIZES = st.sampled_from([1, 2, 4])
MODEL = Model("m", 8, 512, 8, 4096, kv_heads=4, experts=4, top_k=2, expert_width=64)


@st.composite
def layouts(draw):
    mesh = {axis: draw(SIZES) for axis in ("data", "shard", "expert", "tensor")}
    mesh["pipeline"] = draw(st.sampled_from([1, 2, 3, 4]))
    ranks = math.prod(mesh.values())
    nodes = [size for size in (1, 4, 8) if ranks <= size or ranks % size == 0]  # whole nodes
    machine = hardware.cluster("a100-80gb", ranks, min(ranks, draw(st.sampled_from(nodes))))
    readers = mesh["data"] * mesh["shard"] * mesh["expert"]
    fields = {"batch_size": 8 * readers, "sequence": 512, "zero_stage": draw(st.integers(0, 3)),
              "recompute": draw(st.sampled_from(["none", "selective", "full"]))}  # fmt: skip
    return machine, make_layout(MODEL, machine, mesh, **fields)


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_parameters_of_all_ranks_add_up(drawn):
    """Norms are whole on every tensor rank, and nothing else is twice."""
    _, layout = drawn
    shares = stages.shares(MODEL, layout)
    parts, experts = (sum(memory.parameters_of(MODEL, layout, *share)[kind] for share in shares) for kind in (0, 1))
    norms = (layout.tensor - 1) * (MODEL.layers * MODEL.uncut_parameters + MODEL.width)
    all_ = layout.tensor * (parts + layout.size("expert") * experts)
    assert all_ == pytest.approx(MODEL.parameters + norms)


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_what_leaves_a_node_is_counted_rank_by_rank(drawn):
    machine, layout = drawn
    sizes = [(axis, size) for axis, size in dict(layout.mesh).items() if size > 1]
    for number, (axis, size) in enumerate(sizes):
        if (axis == "data" and not layout.zero_stage) or (axis == "shard" and layout.zero_stage == 0):
            continue  # summed along all axes of data at once
        if axis == "shard" and layout.size("expert") > 1:
            continue  # together with those along "expert"
        stride = math.prod(other for _, other in sizes[number + 1 :])
        steps = [(k * stride, (k + 1) % size * stride) for k in range(size - (axis == "pipeline"))]
        if axis == "expert":  # from each to all others
            steps = [(k * stride, other * stride) for k in range(size) for other in range(size) if other != k]
        starts = [rank for rank in range(machine.gpus) if rank // stride % size == 0]
        pairs = [(first + one, first + other) for first in starts for one, other in steps]
        crossed = [one // machine.gpus_per_node != other // machine.gpus_per_node for one, other in pairs]
        spread, share = network.outside(machine, layout, PRIOR, axis)
        assert share == pytest.approx(sum(crossed) / len(crossed)) and (spread == 1) == (share == 0)
