"""What the planner says of an estimate: its numbers in their units, what binds it, and each as a formula."""

import re
from dataclasses import replace

import pytest

from planner import explain, hardware, memory, models, output, search
from planner.constants import PRIOR
from planner.estimate import GIB, Estimate, estimate, outside
from planner.layout import Layout, make_layout
from planner.time import StepTime

MEMORY = memory.Memory({"parameters": 5.0, "activations": 7.0}, "backward", 0, 12.0, 10 * GIB, 20 * GIB, 40 * GIB)
PARTS = {"work": 8.0, "messages in layers": 0.5, "bubble": 1.0, "messages of state": 0.25, "optimizer": 0.25}
STEP = StepTime(PARTS, 10.0, 0.1, 0.75, {"shard": 3e9})


def made(room: float = 80, gpus: int = 16, step=STEP, **fields) -> Estimate:
    cluster = hardware.cluster("h100-80gb", gpus, min(gpus, 8))
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory=room * GIB))
    layout = Layout((("shard", gpus),), **{"batch_size": 32, "sequence": 1000, "zero_stage": 3} | fields)
    return Estimate(models.find("llama-7b"), cluster, layout, MEMORY, step, replace(PRIOR, step_low=0.5, step_high=3.0))


def test_numbers_of_an_estimate():
    said = made(recompute="full", zero_stage=2).as_dict()
    flops = models.find("llama-7b").flops(1000) * 200
    shares = said.pop("model_tflops_per_gpu"), said.pop("mfu")
    assert shares == pytest.approx((flops / 1e12, flops / 989e12)), "TFLOP/s of a GPU, and MFU"
    told = {
        "model": "llama-7b", "parameters": 6_738_415_616, "gpu": "h100-80gb", "gpus": 16, "mesh": {"shard": 16},
        "zero_stage": 2, "micro_batch": 1, "micro_batches": 2, "schedule": None, "stages_per_rank": 1,
        "recompute": "full", "precision": "bf16-mixed", "offload": False,
        "memory_gib_low": 10, "memory_gib": 20, "memory_gib_high": 40, "memory_limit_gib": 80, "fits": "yes",
        "step_seconds_low": 5.0, "step_seconds": 10.0, "step_seconds_high": 30.0, "tokens_per_second": 3200.0,
        "tokens_per_second_per_gpu": 200.0, "bubble": 0.1, "exposed_communication_seconds": 0.75, "binding": "work",
        "memory_parts_gib": {"parameters": 5 / GIB, "activations": 7 / GIB}, "memory_phase": "backward",
        "step_parts_seconds": PARTS, "sent_bytes_per_gpu": STEP.links, "notes": [NOTE.removeprefix("note: ")],
    }  # fmt: skip
    assert said == told, "what --json prints"
    stages = replace(made(), layout=Layout((("pipeline", 16),), 32, 2, schedule="interleaved", stages_per_rank=3,
                                           recompute="selective", offload=True, notes=("first",)))  # fmt: skip
    found, names = stages.as_dict(), ("micro_batch", "micro_batches", "schedule", "stages_per_rank", "offload")
    assert [found[name] for name in names] == [2, 16, "interleaved", 3, True], names
    assert found["notes"] == ["first", "not checked against any published run: offload"], "the layout's notes first"
    assert [made(room).fits for room in (41, 39, 11, 9)] == ["yes", "tight", "tight", "no"]


def test_what_binds_a_layout():
    assert made(room=9).binding == "memory: activations", "the largest part of what does not fit"
    assert made().binding == "work", "a bubble of a tenth is not what counts"
    waiting = PARTS | {"bubble": 2.0, "work": 7.0}
    assert made(step=replace(STEP, parts=waiting)).binding == "bubble", "a fifth is"


GPUS = "16 x h100-80gb (80.0 GiB)"
HEADING = f"llama-7b: 6.74 billion parameters; {GPUS}; 32 sequences of 1,000 tokens a step; bf16-mixed"
NOTE = "note: not checked against any published run: ZeRO stages 1 and 2"


def test_estimates_in_lines():
    """Each token costs 6 x (6.738 - 0.131) + 12 x 32 x 4096 x 1000 / 1e9 = 41.2 GFLOP, 200 times a second."""
    lines = output.one_layout(made(zero_stage=2)).splitlines()
    expected = [
        HEADING,
        "layout                 shard 16, ZeRO-2, micro-batch 1, recompute none",
        "memory per GPU         20.0 GiB (10.0 to 40.0): fits: yes",
        "step                   10.0 s (5.00 s to 30.0 s)",
        "tokens per second      3,200 (200 per GPU)",
        "model FLOP/s per GPU   8.2 TFLOP/s, MFU 0.8%",
        "bubble                 10.0%",
        "exposed messages       0.75 s",
        "bound by               work",
        "sent along shard       3.00 GB per GPU and step",
        NOTE,
    ]
    differ = [line for line in lines if line not in expected]
    assert lines == expected, f"lines of an estimate that should be others: {differ}"
    assert [output.seconds(value) for value in (12.34, 0.5, 0.0123)] == ["12.3 s", "0.50 s", "12.3 ms"]
    assert [output.seconds(value) for value in (10, 0.1, 1234)] == ["10.0 s", "0.10 s", "1,234.0 s"], "at the borders"


def test_a_plan_in_lines():
    two = [search.Choice(made(zero_stage=2), "the other"), search.Choice(made(35, micro_batch=2), "this one")]
    lines = output.table(two).splitlines()
    expected = [
        HEADING,
        "",
        "        step     tokens/s    MFU  bubble     memory  fits  layout",
        " 1    10.0 s        3,200   0.8%   10.0%   20.0 GiB   yes  shard 16, ZeRO-2, micro-batch 1, recompute none",
        "             bound by work; lost: the other",
        " 2    10.0 s        3,200   0.8%   10.0%   20.0 GiB tight  shard 16, ZeRO-3, micro-batch 2, recompute none",
        "             bound by work; lost: this one",
        "",
        "1 sends 3.00 GB per GPU and step along shard",
        NOTE,
    ]
    differ = [line for line in lines if line not in expected]
    assert lines == expected, f"lines of a plan that should be others: {differ}"


def test_what_was_not_checked_is_named():
    said = {
        "ZeRO stages 1 and 2": [{"zero_stage": 1}, {"zero_stage": 2}], "offload": [{"offload": True}],
        "sequences of more than 262,144 tokens": [{"sequence": 2**19}], "precision bf16": [{"precision": "bf16"}],
    }  # fmt: skip
    for what, cases in said.items():
        for fields in cases:
            assert outside(made(**fields)) == [f"not checked against any published run: {what}"]
    assert outside(made(gpus=3072)) == [] and "3,072 GPUs" in outside(made(gpus=3080))[0]
    one, schedule = made(), Layout((("pipeline", 2),), 8, schedule="gpipe")
    assert "schedule gpipe" in outside(replace(one, layout=schedule))[0]
    assert outside(replace(one, layout=replace(schedule, schedule="interleaved"))) == []
    slow = [replace(one, cluster=hardware.cluster("h100-80gb", 16, 8, "infiniband-200", n)) for n in (4, 8)]
    assert ["slow network" in "".join(outside(found)) for found in slow] == [True, False], "100 and 200 GB/s of a node"
    small = replace(one, model=models.find("gpt2"))
    assert outside(small) == ["not checked against any published run: models of 0.12 billion parameters"]
    many = replace(models.find("mixtral-8x7b"), experts=300)  # of which a token uses two
    assert outside(replace(one, model=many)) == [
        f"not checked against any published run: {what}"
        for what in ("mixtures of experts", "models of 1,700 billion parameters")
    ], "all parameters of a mixture count"


def value(line: str) -> float:
    return float(re.search(r"[\d.]+", line.replace(",", ""))[0])


def test_formulas_have_the_values_of_the_rank_that_they_are_of():
    """A pipeline of four whose last rank has two layers of eight, the head, and needs most: a large vocabulary."""
    model, gpus = models.custom(models.find("llama-7b"), layers=10, vocabulary=500_000), hardware.cluster("h100", 16)
    layout = make_layout(model, gpus, {"pipeline": 4, "data": 4}, batch_size=64, sequence=1024, recompute="full",
                         micro_batch=2)  # fmt: skip
    found = estimate(model, gpus, layout, PRIOR, 900)
    lines = {line.strip().split("  ")[0]: line for line in explain.lines(found)}
    parts = {line.split("GiB  ")[1].split(":")[0]: line for line in explain.lines(found) if "GiB  " in line}
    assert "= 4 x 1 x 1 = 4" in lines["readers"] and "64 / (4 x 2) = 8" in lines["micro-batches"]
    assert "largest on rank 3 of the pipeline, with 2 layers and the head, in the phase 'loss'" in lines["memory"]
    assert found.memory.rank == 3
    a_layer = memory.layer_memory(model, layout) / GIB
    assert f"1 micro-batches held (chapter 05's simulator) x 2 layers x {a_layer:.3f} GiB" in parts["activations"]
    for name, size in found.memory.parts.items():
        assert value(parts[name]) == pytest.approx(size / GIB, abs=0.006), f"GiB of {name}"
    rate = 989 * 0.803 * PRIOR.matmul
    (work,) = (line for line in explain.lines(found) if "s    work: " in line)
    assert f"989 TFLOP/s x 0.80 (best measured) x {PRIOR.matmul:.2f} (fitted) = {rate:.0f} TFLOP/s" in work
    for name, seconds in found.step.parts.items():
        shown = [line for line in explain.lines(found) if f"s    {name}: " in line]
        assert len(shown) == (seconds > 0) and all(value(line) == pytest.approx(seconds, abs=6e-4) for line in shown)
