"""What the planner says of time: the chapters' formulas, the simulator continued, and published runs it was not fitted
on."""

import pytest

from common.lab.wire_bytes import wire_bytes
from course.intro.classroom.solutions import all_reduce_seconds
from course.intro.costs import collective_seconds, fit
from course.pipeline import schedules, simulator
from planner import constants, published, stages
from planner.constants import PRIOR
from planner.hardware import cluster
from planner.layout import Layout
from planner.network import group


def test_a_ring_is_the_exercises():
    for size in (2, 4, 8):
        ours = collective_seconds("all_reduce", 1e6, size, 2e-6, 1e9)
        assert ours == pytest.approx(all_reduce_seconds("ring", size, 1e6, 2e-6, 1e9))


def test_a_line_is_found_again():
    sizes = [4**n for n in range(5, 13)]
    alpha, beta = fit(sizes, [3e-5 + 2e-9 * size for size in sizes])
    assert alpha == pytest.approx(3e-5) and beta == pytest.approx(2e-9), "seconds of a message, and of a byte"


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
