"""LoRA, QLoRA and products of few bits: against bytes that bitsandbytes and peft have (06_fsdp/engines.json), published
runs, and what has to hold of any model.
"""

import json
from dataclasses import replace
from statistics import mean

import pytest

from common import ROOT
from common.lab.wire_bytes import wire_bytes
from planner import models, published
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout

MEASURED = json.loads((ROOT / "06_fsdp/engines.json").read_text())["qlora, 7B"]
SMALL = models.find("llama-2-7b")


def layout(gpus, **fields):
    return make_layout(SMALL, cluster("h100-80gb", gpus), **({"batch_size": gpus, "recompute": "full"} | fields))


@pytest.mark.parametrize("ranks", [int(ranks) for ranks in MEASURED])
def test_qlora_holds_what_bitsandbytes_and_peft_hold(ranks):
    """Of Llama's 7B, under fully_shard, but for the 64 bytes of the table of 16 numbers in each weight's scales."""
    one = layout(ranks, mesh={"shard": ranks}, zero_stage=3, lora=16, nf4=True)
    parts, there = estimate(SMALL, cluster("h100-80gb", ranks), one).memory.parts, MEASURED[str(ranks)]
    trained = [parts[kind] for kind in ("parameters", "gradients", "optimizer")]
    assert trained == [there["adapters"], there["their gradients"], there["their AdamW state"]]
    frozen = sum(there.values()) - sum(trained)
    assert parts["frozen parameters"] == pytest.approx(frozen, rel=2e-6)


def errors(found, of):
    return [value for run in found if (value := of(estimate(run.model, run.cluster, run.layout), run)) is not None]


def test_adapters_against_published_runs():
    """Nothing was fitted on them: memory of Qwen on A100s, time there and of NVIDIA's recipes on three GPUs."""
    qwen = [run for run in published.runs() if "Qwen" in run.source]
    lora = [run for run in qwen if not run.layout.nf4]
    assert len(lora) >= 24 and len(qwen) >= 48
    assert mean(errors(lora, lambda e, run: abs(e.memory.expected / 2**30 / run.gib - 1))) < 0.1
    assert mean(errors(lora, lambda e, run: abs(e.seconds / run.seconds - 1))) < 0.2
    nvidia = [run for run in published.runs() if run.layout.lora_on == "qkv"]
    assert len(nvidia) >= 8
    assert mean(errors(nvidia, lambda e, run: abs(e.seconds / run.seconds - 1))) < 0.2


def test_products_of_four_bits_against_published_runs():
    """With the peaks of data sheets, and conversions that take as long as those to 8 bits."""
    found = [run for run in published.runs() if run.layout.precision == "nvfp4-mixed"]
    assert len(found) >= 14 and mean(errors(found, lambda e, run: abs(e.seconds / run.seconds - 1))) < 0.12
    same = [estimate(run.model, run.cluster, replace(run.layout, precision="mxfp8-mixed")).seconds for run in found]
    assert all(seconds > run.seconds for seconds, run in zip(same, found, strict=True)), "8 bits would take longer"


def test_only_adapters_are_reduced_and_kept_in_the_optimizer():
    one = layout(8, mesh={"data": 8}, lora=8, lora_on="qv")
    found, whole = (estimate(SMALL, cluster("h100-80gb", 8), x) for x in (one, replace(one, lora=0)))
    trained = 32 * 8 * 2 * (4096 + 4096)  # layers, rank, queries and values: [4096, 8] and [8, 4096] each
    assert found.step.links["data"] == wire_bytes("all_reduce", 4 * trained, 8)
    assert found.memory.parts["optimizer"] == 8 * trained
    sharded = estimate(SMALL, cluster("h100-80gb", 8), layout(8, mesh={"shard": 8}, zero_stage=3, lora=8, lora_on="qv"))
    assert sharded.memory.parts["unsharded gradients"] == (2 + 4) * trained / 32, "those of a layer"
    assert found.seconds < whole.seconds and found.memory.expected < whole.memory.expected
    cut = estimate(SMALL, cluster("h100-80gb", 8), layout(8, mesh={"tensor": 8}, lora=8)).memory.parts
    eighths = 4 * (4096 + 4096 / 8) + 3 * (4096 + 11008 / 8)  # of attention's four adapters, and the MLP's three
    assert cut["parameters"] == 4 * 32 * 8 * eighths, "of each adapter one matrix is cut, the other is whole"
