"""Published runs as layouts: of each kind of row, what the paper or report says of it."""

import pytest
from planner_cases import mesh_of

from planner import published

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
    ("Megatron-LM 2021", "Megatron 39.1B", "pipeline=2 data=32 tensor=8", MEGATRON | {
        "schedule": "1f1b", "stages_per_rank": 1, "micro_batch": 4, "recompute": "full", "batch_size": 1536},
     14.453, None),
    ("Korthikanti 2022", "Megatron 175B", "pipeline=8 tensor=8", MEGATRON | {
        "schedule": "interleaved", "stages_per_rank": 3, "micro_batch": 1, "recompute": "full", "batch_size": 64},
     18.13, None),
    ("Korthikanti 2022", "Megatron 530B", "pipeline=35 data=8 tensor=8", MEGATRON | {
        "schedule": "interleaved", "stages_per_rank": 3, "micro_batch": 1, "recompute": "attention",
        "batch_size": 2240, "sequence_parallel": True}, 39.15, None),
    ("torchtitan 2024-12", "llama-3-8b", "shard=8", SMALL, 2 * 8192 / 5762, 82.4),
    ("torchtitan 2024-12", "llama-3-405b", "pipeline=8 shard=4 context=2 tensor=8", FP8 | {
        "schedule": "1f1b", "micro_batch": 1, "batch_size": 32, "sequence": 65536}, 32 * 65536 / 512 / 47, 75.9),
    ("torchtitan H200", "llama-3-8b", "shard=64", SMALL | {
        "gpu": "h200", "precision": "fp8-mixed", "batch_size": 128, "fused": True, "fused_loss": True},
     1.5236678, 46.97),
    ("torchtitan 2024-04", "llama-2-70b", "shard=64", SMALL | A100 | {
        "recompute": "every-second", "batch_size": 128, "sequence": 4096, "fused": True}, None, None),  # out of memory
    ("torchtitan 2024-08", "llama-3-405b", "shard=16 tensor=8", FP8 | {
        "micro_batch": 2, "batch_size": 32, "sequence": 8192}, 11.0702703, None),
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
