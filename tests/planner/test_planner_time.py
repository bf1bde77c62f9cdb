"""What the planner says of time: the chapters' formulas, the simulator continued, and published runs it was not fitted
on."""

from dataclasses import replace

import pytest

from common.lab.wire_bytes import wire_bytes
from course.intro.classroom.solutions import all_reduce_seconds
from course.intro.costs import collective_seconds, fit
from course.pipeline import schedules, simulator
from planner import constants, layer_time, memory, models, published, stages, traffic
from planner.constants import PRIOR
from planner.hardware import cluster
from planner.layout import Layout, make_layout
from planner.network import group


def test_a_ring_is_the_exercises():
    for size in (2, 4, 8):
        ours = collective_seconds("all_reduce", 1e6, size, 2e-6, 1e9)
        assert ours == pytest.approx(all_reduce_seconds("ring", size, 1e6, 2e-6, 1e9))


def test_a_line_is_found_again():
    sizes = [4**n for n in range(5, 13)]
    alpha, beta = fit(sizes, [3e-5 + 2e-9 * size for size in sizes])
    assert alpha == pytest.approx(3e-5) and beta == pytest.approx(2e-9), "seconds of a message, and of a byte"
    alpha, beta = fit(sizes, [(3e-5 + 2e-9 * size) * (1.2 if size == sizes[-1] else 1) for size in sizes])
    assert alpha == pytest.approx(3e-5, rel=0.05), "a long message that took a fifth longer says little of a short one"


def test_collectives_between_nodes_are_bound_by_adapters():
    """Published bus bandwidths (planner/published): one node of H200 in a ring 363 to 368 GB/s, and four nodes of B200
    with 50 GB/s for each GPU 381: within 15%, where the adapters reach 0.95."""
    reached = constants.replace(PRIOR, network=0.95)
    for gpu, size, measured in (("h200", 8, 367.6e9), ("a100-80gb", 8, 234.9e9), ("b200", 32, 381.8e9)):
        one = group(cluster(gpu, size), Layout((("data", size),), size), reached, "data")
        payload = 2.0**34
        rate = wire_bytes("all_reduce", payload, size) / one.seconds("all_reduce", payload)
        assert rate == pytest.approx(measured, rel=0.15), gpu


LONG = [("1f1b", 4, 48, 1), ("gpipe", 4, 40, 1), ("interleaved", 4, 32, 2), ("interleaved", 3, 30, 4),
        ("zb-h1", 5, 45, 1), ("zbv", 4, 40, 2), ("looped-bfs", 2, 20, 2)]  # fmt: skip


@pytest.mark.parametrize("schedule, ranks, many, chunks", LONG)
def test_a_long_schedule_continues_a_short_one(schedule, ranks, many, chunks):
    layout = Layout((("pipeline", ranks),), many, schedule=schedule, stages_per_rank=chunks)
    n = ranks * chunks
    forward, backward = [1.0] * (n - 1) + [1.5], [2.0] * (n - 1) + [3.0]
    fixed = schedules.SCHEDULES[schedule].stages_per_rank == chunks
    whole = schedules.build(schedule, ranks, many, None if fixed else chunks)
    expected = simulator.simulate(
        whole, simulator.Times(forward, [b / 2 for b in backward], [b / 2 for b in backward], 0.1)
    )
    ends, busy = stages.makespan(layout, forward, backward, 0.1)
    assert ends == pytest.approx(expected.makespan, rel=0.012), "seconds of the whole schedule"
    work = max(sum(event.end - event.start for event in own) for own in expected.ranks)
    assert busy == pytest.approx(work, rel=0.012), "seconds of work of the busiest rank"
    assert stages.held(layout) == tuple(expected.peaks), "micro-batches that each rank holds"


@pytest.mark.parametrize("send", [0.0, 0.4, 1.7])
@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_a_search_is_nearly_as_exact_as_an_estimate(schedule, chunks, send):
    """The head makes the last stage longer: a small part of what a rank of several stages does. And messages between
    stages may take longer than the stages."""
    layout = Layout((("pipeline", 4),), 64, schedule=schedule, stages_per_rank=chunks)
    forward, backward = [1.0] * 4 * chunks, [2.0] * 4 * chunks
    forward[-1], backward[-1] = 1.1, 2.2
    quick, _ = stages.makespan(layout, forward, backward, send, quick=True)
    assert quick == pytest.approx(stages.makespan(layout, forward, backward, send)[0], rel=0.07), "quick, and in full"


def test_model_flops_are_megatrons_formula():
    """96 B s l h^2 (1 + s/6h + V/16lh) with everything recomputed (Narayanan et al. 2021, equation 3), of which the
    layers' share is 4/3 of what the model needs."""
    for run in published.megatron():
        model, s = run.model, run.layout.sequence
        layers = 72 * s * model.layers * model.width**2 * (1 + s / (6 * model.width))
        logits = 6 * s * model.vocabulary * model.width
        assert model.flops(s) * s == pytest.approx(layers + logits, rel=1e-3), f"FLOPs of a sequence, {model.name}"


# --- the scoreboard -------------------------------------------------------------------------------------------


def test_a_published_throughput_is_of_the_tokens_of_a_whole_batch():
    """Ranks along "tensor", "pipeline" and "context" share theirs."""
    rows = [row for row in published.rows("torchtitan_published.csv") if row["float8"] != "rowwise"]
    for row, run in zip(rows, published.torchtitan(), strict=True):
        if run.seconds:
            rate = run.layout.batch_size * run.layout.sequence / run.seconds / run.cluster.gpus
            assert rate == pytest.approx(float(row["tokens_per_s_per_gpu"])), f"{run.name}: tokens per second and GPU"


def test_experts_that_tensor_ranks_share_out_whole():
    """Equal arithmetic and equal parameters; no sum along "tensor" after them; an all-to-all of all ranks of both axes,
    which carries what each rank sends at most."""
    model = models.Model("m", 4, 4096, 32, 32000, experts=32, top_k=4, expert_width=2048, mlp="swiglu")
    nodes = cluster("h100-80gb", 16)
    cut, whole = (
        make_layout(model, nodes, {"expert": 4, "tensor": 4}, batch_size=16, zero_stage=1, whole_experts=how)
        for how in (False, True)
    )
    assert memory.parameters_of(model, cut, 4, True, True) == memory.parameters_of(model, whole, 4, True, True)
    ours, theirs = traffic.sent(model, whole), traffic.sent(model, cut)
    stream = whole.tokens * model.width * 2
    layers = model.layers * whole.micro_batches
    assert theirs["tensor"] - ours["tensor"] == pytest.approx(2 * layers * wire_bytes("all_reduce", stream, 4))
    assert ours["expert"] == pytest.approx(4 * layers * wire_bytes("all_to_all", stream / 4 * 4, 16))
    assert theirs["expert"] == pytest.approx(4 * layers * wire_bytes("all_to_all", stream / 4 * 4, 4))
    arithmetic = replace(PRIOR, kernel=0.0, memory_rate=1e9)  # and nothing else takes time
    for each in (model, replace(model, shared_experts=1)):  # which are cut along "tensor" all the same
        one, other = (layer_time.of_layer(each, nodes.gpu, layout, True, arithmetic) for layout in (whole, cut))
        assert one.products == pytest.approx(other.products)


def test_a_token_goes_to_each_node_once():
    """With one expert a token, that is an all-to-all; with many, it is one copy for each other node."""
    among = group(cluster("h100-80gb", 32), Layout((("expert", 32),), 32), PRIOR, "expert")
    latency = among.dispatch(0.0, 1)
    assert among.dispatch(1e9, 1) - latency == pytest.approx(0.75e9 / among.single)
    slow = replace(among, link=1e15)
    assert slow.dispatch(1e9, 500) - latency == pytest.approx(3e9 / among.single)
    assert among.dispatch(1e9, 8) < among.seconds("all_to_all", 8e9)
