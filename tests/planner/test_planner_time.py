"""What the planner says of time: the chapters' formulas, the simulator continued, and published runs it was not fitted
on."""

import pytest

from common.lab.wire_bytes import wire_bytes
from course.intro.classroom.solutions import all_reduce_seconds
from course.intro.costs import collective_seconds, fit
from course.pipeline import schedules, simulator
from planner import constants, layer_time, models, published, stages, time
from planner.constants import PRIOR
from planner.hardware import cluster, find_gpu
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


def test_groups_are_where_the_mesh_puts_them():
    gpus = cluster("h100-80gb", 64)
    layout = Layout((("pipeline", 2), ("data", 2), ("shard", 4), ("tensor", 4)), 64)
    found = {axis: group(gpus, layout, PRIOR, axis) for axis in ("tensor", "shard", "data", "pipeline")}
    assert {axis: (one.local, one.nodes) for axis, one in found.items()} == {
        "tensor": (4, 1), "shard": (2, 2), "data": (1, 2), "pipeline": (1, 2),
    }  # fmt: skip


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
    assert ends == pytest.approx(expected.makespan, rel=0.012) and busy <= ends, "seconds of the whole schedule"
    assert stages.held(layout) == tuple(expected.peaks), "micro-batches that each rank holds"


def test_the_bubble_of_equal_stages_is_the_formulas():
    """(p - 1) / (v m + p - 1) of the step (Narayanan et al. 2021, section 2.2), by the simulator."""
    for chunks, schedule in ((1, "1f1b"), (2, "interleaved")):
        layout = Layout((("pipeline", 4),), 16, schedule=schedule, stages_per_rank=chunks)
        ends, busy = stages.makespan(layout, [1.0] * 4 * chunks, [2.0] * 4 * chunks, 0.0)
        assert 1 - busy / ends == pytest.approx(3 / (chunks * 16 + 3)), f"the bubble of {schedule}"


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


def test_products_are_less_efficient_the_smaller_they_are():
    gpu = find_gpu("h100-80gb")
    rates = [2 * n**3 / layer_time.product(n, n, n, gpu, "bf16", PRIOR) for n in (256, 1024, 4096, 16384)]
    assert rates == sorted(rates) and rates[0] < 0.4 * rates[-1] and rates[-1] < gpu.peak * gpu.achievable, (
        f"FLOP/s: {rates}"
    )


def test_model_flops_are_megatrons_formula():
    """96 B s l h^2 (1 + s/6h + V/16lh) with everything recomputed (Narayanan et al. 2021, equation 3), of which the
    layers' share is 4/3 of what the model needs."""
    for run in published.megatron():
        model, s = run.model, run.layout.sequence
        layers = 72 * s * model.layers * model.width**2 * (1 + s / (6 * model.width))
        logits = 6 * s * model.vocabulary * model.width
        assert model.flops(s) * s == pytest.approx(layers + logits, rel=1e-3), f"FLOPs of a sequence, {model.name}"


def test_more_of_a_resource_is_never_slower():
    """Twice the GPUs along "data", a faster network, less recomputation, more micro-batches per rank of a pipeline."""
    model = models.find("llama-2-13b")

    def seconds(gpus=64, network="infiniband-400", recompute="full", **mesh):
        machine = cluster("h100-80gb", gpus, network=network)
        layout = make_layout(model, machine, mesh, batch_size=512, recompute=recompute, zero_stage=3)
        return time.estimate(model, machine, layout, PRIOR).seconds

    base = seconds(shard=64)
    assert seconds(gpus=128, data=2, shard=64) < base < seconds(shard=64, network="ethernet-10"), "GPUs, network"
    assert seconds(shard=64, recompute="none") < seconds(shard=64, recompute="selective") < base, (
        "recomputation takes time"
    )


# --- the scoreboard -------------------------------------------------------------------------------------------


def test_a_published_throughput_is_of_the_tokens_of_a_whole_batch():
    """Ranks along "tensor", "pipeline" and "context" share theirs."""
    rows = [row for row in published.rows("torchtitan_published.csv") if row["float8"] != "rowwise"]
    for row, run in zip(rows, published.torchtitan(), strict=True):
        if run.seconds:
            rate = run.layout.batch_size * run.layout.sequence / run.seconds / run.cluster.gpus
            assert rate == pytest.approx(float(row["tokens_per_s_per_gpu"])), f"{run.name}: tokens per second and GPU"


def test_what_each_pass_sends_along_context():
    """If nothing is hidden: keys and values of the whole sequence forward; backward again, and their gradients."""
    bare, model, gpus = constants.replace(PRIOR, kept=0.0), models.find("llama-7b"), cluster("h100-80gb", 8)
    one = make_layout(model, gpus, {"context": 8}, batch_size=2, sequence=16384)
    step = time.estimate(model, gpus, one, bare)
    gathered = group(gpus, one, bare, "context").seconds("all_gather", 2 * 16384 * model.key * 2)
    assert step.parts["messages in layers"] == pytest.approx(2 * model.layers * 3 * gathered), (
        "three times in each layer"
    )


def test_the_head_computes_once_forward_and_twice_backward():
    """A vocabulary of 32,000 more costs three products, and its logits four times through the memory."""
    small, gpus = models.find("llama-7b"), cluster("h100-80gb", 1)
    large = models.custom(small, vocabulary=small.vocabulary + 32_000)
    works = [time.estimate(model, gpus, make_layout(model, gpus, {"data": 1}, batch_size=1, sequence=2048), PRIOR)
             .parts["work"] for model in (small, large)]  # fmt: skip
    gpu = gpus.gpu
    three = [
        3 * layer_time.product(2048, small.width, model.vocabulary, gpu, "bf16", PRIOR) for model in (small, large)
    ]
    logits = 4 * 4 * 2048 * 32_000 / (gpu.hbm * PRIOR.memory_rate)
    assert works[1] - works[0] == pytest.approx(three[1] - three[0] + logits), "three products, and logits four times"


def test_what_is_left_over_of_a_message_beside_work():
    """Of what goes on at the same time, nine tenths are hidden here."""
    nine = constants.replace(PRIOR, kept=0.9)
    assert time.left_over(3.0, 2.0, nine) == pytest.approx(1.2), "a second alone, and a tenth of two"
    assert time.left_over(1.0, 4.0, nine) == pytest.approx(0.1), "a tenth of one"


def test_gradients_that_wait_for_the_end_and_stages_that_reduce_each_micro_batch():
    """Nothing hides a message that begins when the work is done; ZeRO-2 reduces after each micro-batch."""
    whole = constants.replace(PRIOR, bucket=0.0)  # in one message
    model, gpus = models.find("llama-7b"), cluster("h100-80gb", 64)

    def step(**fields):
        mesh = {"shard": 64} if fields.get("zero_stage") else {"data": 64}
        fields = {"batch_size": 256, "sequence": 512, "overlap_gradients": False} | fields
        return time.estimate(model, gpus, make_layout(model, gpus, mesh, **fields), whole).parts

    one = group(gpus, Layout((("data", 64),), 64), whole, "data")
    reduced = one.seconds("all_reduce", 4 * model.parameters)
    assert step()["messages of state"] == pytest.approx(reduced), "all of an all-reduce of float32"
    assert step(overlap_gradients=True)["messages of state"] < 0.9 * reduced, "work hides a part of it"
    scattered = one.seconds("reduce_scatter", 4 * model.parameters)
    first, second = (step(zero_stage=stage)["messages of state"] for stage in (1, 2))
    assert second - first == pytest.approx(3 * scattered), "four micro-batches, and one"


def test_an_optimizer_goes_through_the_memory_or_over_pcie():
    """Bytes of a parameter, by precision; offloaded, those of a node share the host's memory."""
    model, gpus = models.find("llama-3.2-1b"), cluster("h100-80gb", 8)

    def seconds(**fields):
        layout = make_layout(model, gpus, {"data": 8}, batch_size=8, sequence=512, **fields)
        return time.estimate(model, gpus, layout, PRIOR).parts["optimizer"]

    rate = gpus.gpu.hbm * PRIOR.memory_rate
    for precision, size in (("bf16-mixed", 42), ("bf16", 20), ("bf16-12", 28)):
        assert seconds(precision=precision) == pytest.approx(model.parameters * size / rate, rel=1e-3), precision
    there = model.parameters * ((4 + 2) / gpus.gpu.pcie + 30 * 8 / gpus.host)
    assert seconds(offload=True) == pytest.approx(there, rel=1e-3), "gradients there, parameters back"
