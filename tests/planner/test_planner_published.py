"""Published runs as layouts: of each kind of row, what the paper or report says of it."""

from dataclasses import fields

import pytest
from planner_cases import mesh_of

from common.axes import AXES
from planner import published
from planner.layout import Layout
from planner.models import Model

A100, H100 = {"gpu": "a100-80gb", "network": "infiniband-200"}, {"gpu": "h100-96gb", "network": "infiniband-400"}
OFF = dict.fromkeys(("fused_loss", "async_tensor", "dropout", "offload", "fused"), False)
MEGATRON = A100 | OFF | {
    "fused": True, "dropout": True, "flash": False, "sequence_parallel": False, "overlap_gradients": False,
    "sequence": 2048, "precision": "fp16-mixed", "zero_stage": 0,
}  # fmt: skip
TITAN = OFF | {"flash": True, "sequence_parallel": True, "overlap_gradients": True, "zero_stage": 3}
FP8 = H100 | TITAN | {"precision": "fp8-mixed", "fused": True, "async_tensor": True, "recompute": "full"}
SMALL = H100 | TITAN | {"sequence": 8192, "precision": "bf16-mixed", "batch_size": 16, "micro_batch": 2,
                        "recompute": "operators"}  # fmt: skip
SAID = [  # source, model, mesh, what is said of the run, seconds of a step, GiB at the peak
    ("Megatron-LM 2021", "Megatron 76.1B", "pipeline=4 data=32 tensor=8", MEGATRON | {
        "schedule": "interleaved", "stages_per_rank": 3, "micro_batch": 2, "recompute": "full", "batch_size": 1792},
     16.058, None),
    ("Korthikanti 2022", "Megatron 175B", "pipeline=8 tensor=8", MEGATRON | {
        "schedule": "interleaved", "stages_per_rank": 3, "micro_batch": 1, "recompute": "full", "batch_size": 64},
     18.13, None),
    ("Korthikanti 2022", "Megatron 530B", "pipeline=35 data=8 tensor=8", MEGATRON | {
        "schedule": "interleaved", "stages_per_rank": 3, "micro_batch": 1, "recompute": "attention",
        "batch_size": 2240, "sequence_parallel": True}, 39.15, None),
    ("torchtitan 2024-12", "llama-3-8b", "shard=8", SMALL, 2 * 8192 / 5762, 82.4),
    ("torchtitan 2024-12", "llama-3-405b", "pipeline=8 shard=4 context=2 tensor=8", FP8 | {
        "schedule": "1f1b", "micro_batch": 1, "batch_size": 32, "sequence": 65536}, 32 * 65536 / 512 / 47, 75.9),
    ("torchtitan 2024-04", "llama-2-70b", "shard=64", SMALL | A100 | {
        "recompute": "every-second", "batch_size": 128, "sequence": 4096, "fused": True}, None, None),  # out of memory
]  # fmt: skip


@pytest.mark.parametrize("source, model, mesh, said, seconds, gib", SAID, ids=range(len(SAID)))
def test_a_published_run_is_what_was_published(source, model, mesh, said, seconds, gib):
    """Of the runs of this source, model and mesh one is as it is said; the others differ in what is said."""
    found = []
    for run in published.runs():
        axes = {axis: size for axis, size in run.layout.mesh if size > 1}
        if (run.source, run.model.name, axes) == (source, model, mesh_of(mesh)):
            nodes = {"gpu": run.cluster.gpu.name, "network": run.cluster.name}
            assert (run.cluster.gpus_per_node, run.cluster.adapters) == (8, 8)
            assert run.out_of_memory is (run.seconds is None)
            about = {name: nodes.get(name, getattr(run.layout, name, None)) for name in said}
            found.append((about, pytest.approx(run.seconds, rel=1e-6) if run.seconds else None, run.gib))
    assert found.count((said, seconds, gib)) == 1, found


def test_each_row_of_runs_csv_is_a_run_with_all_that_its_columns_say():
    """A column has the name of what it says of a run, its model, GPU, nodes or layout; an empty one says the usual."""
    usual = vars(Layout((), 1)) | {field.name: field.default for field in fields(Model)} | dict.fromkeys(AXES, 1)
    other = {"framework", "where", "flags", "status", "model", "gpu", "per_node"}  # looked at below, or words
    for row, run in zip(published.rows("runs.csv"), published.table(), strict=True):
        has = vars(run.layout) | vars(run.cluster) | {"network": run.cluster.name} | vars(run.model) | run.layout.sizes
        has |= {name: getattr(run, name) for name in ("source", "seconds", "gib", "assumed")}
        for name in row.keys() - other:
            kind = type(has[name])
            said = kind(row[name]) if row[name] and kind is not bool else bool(row[name])
            assert has[name] == (said if row[name] else has[name] if name not in usual else usual[name]), (name, row)
        named = (run.model.name, run.cluster.gpu.name, run.cluster.gpus_per_node, run.layout.framework)
        assert named == (row["model"], row["gpu"], min(int(row["per_node"]), run.cluster.gpus), row["framework"])
        assert run.crashed is row["status"].startswith("crashed") and run.assumed is bool(row["assumed"])
        assert bool(run.seconds) == bool(row["seconds"]) and run.out_of_memory == (row["status"] == "out of memory")
        one = run.layout
        flags = {"offload": one.offload, "nf4": one.nf4, "dropout": one.dropout, "unfused": not one.fused,
                 "scores-stored": not one.flash, "whole-stream": not one.sequence_parallel,
                 "gradients-last": not one.overlap_gradients, "whole-experts": one.whole_experts,
                 "on-qkv": one.lora_on == "qkv",
                 f"lora-{one.lora}": one.lora}  # fmt: skip
        assert {*row["flags"].split()} == {word for word, is_so in flags.items() if is_so}
