"""Published runs as layouts: of each kind of row, what the paper or report says of it."""

import pytest

from planner import published

MEGATRON = {"fused", "dropout"}  # and neither flash, sequence parallelism nor gradients that overlap
TITAN = {"flash", "sequence_parallel", "overlap_gradients"}
FLAGS = ("fused", "fused_loss", "async_tensor", "dropout", "flash", "sequence_parallel", "overlap_gradients", "offload")
SAID = [  # source, name; GPU, how many, network; layout; sequences of a step, tokens, precision; flags; seconds, GiB
    ("Megatron-LM 2021", "76.1B on 1024", ("a100-80gb", 1024, "infiniband-200"),
     "pipeline 4 x data 32 x tensor 8, interleaved x 3, micro-batch 2, recompute full",
     (1792, 2048, "fp16-mixed"), MEGATRON, 16.058, None),
    ("Megatron-LM 2021", "39.1B on 512", ("a100-80gb", 512, "infiniband-200"),
     "pipeline 2 x data 32 x tensor 8, 1f1b, micro-batch 4, recompute full",
     (1536, 2048, "fp16-mixed"), MEGATRON, 14.453, None),
    ("Korthikanti 2022", "175B on 64, full", ("a100-80gb", 64, "infiniband-200"),
     "pipeline 8 x tensor 8, interleaved x 3, micro-batch 1, recompute full",
     (64, 2048, "fp16-mixed"), MEGATRON, 18.13, None),
    ("Korthikanti 2022", "530B on 2240, selective", ("a100-80gb", 2240, "infiniband-200"),
     "pipeline 35 x data 8 x tensor 8, interleaved x 3, micro-batch 1, recompute attention",
     (2240, 2048, "fp16-mixed"), MEGATRON | {"sequence_parallel"}, 39.15, None),
    ("torchtitan 2024-12", "Llama3.1-8B shard 8, ZeRO-3, micro-batch 2, recompute operators, n",
     ("h100-96gb", 8, "infiniband-400"), "shard 8, ZeRO-3, micro-batch 2, recompute operators",
     (16, 8192, "bf16-mixed"), TITAN, 2 * 8192 / 5762, 82.4),
    ("torchtitan 2024-12", "Llama3.1-8B shard 8, ZeRO-3, micro-batch 2, recompute operators, n, compiled",
     ("h100-96gb", 8, "infiniband-400"), "shard 8, ZeRO-3, micro-batch 2, recompute operators",
     (16, 8192, "bf16-mixed"), TITAN | {"fused"}, 2 * 8192 / 6667, 77.0),
    ("torchtitan 2024-12",
     "Llama3.1-405B pipeline 8 x shard 4 x context 2 x tensor 8, ZeRO-3, 1f1b, micro-batch 1, recompute full, y, "
     "compiled", ("h100-96gb", 512, "infiniband-400"),
     "pipeline 8 x shard 4 x context 2 x tensor 8, ZeRO-3, 1f1b, micro-batch 1, recompute full",
     (32, 65536, "fp8-mixed"), TITAN | {"fused", "async_tensor"}, 32 * 65536 / 512 / 47, 75.9),
    ("torchtitan 2024-12",
     "Llama3.1-405B pipeline 8 x shard 8 x tensor 8, ZeRO-3, interleaved x 2, micro-batch 4, recompute full, y, "
     "compiled", ("h100-96gb", 512, "infiniband-400"),
     "pipeline 8 x shard 8 x tensor 8, ZeRO-3, interleaved x 2, micro-batch 4, recompute full",
     (256, 8192, "fp8-mixed"), TITAN | {"fused", "async_tensor"}, 32.0, 72.7),
    ("torchtitan H200",
     "Llama3.1-8B shard 64, ZeRO-3, micro-batch 2, recompute operators, y(fp8 all-gather), compiled",
     ("h200", 64, "infiniband-400"), "shard 64, ZeRO-3, micro-batch 2, recompute operators",
     (128, 8192, "fp8-mixed"), TITAN | {"fused", "fused_loss"}, 1.5236678, 46.97),
    ("torchtitan 2024-04", "Llama2-70B shard 64, ZeRO-3, micro-batch 2, recompute every-second, n",
     ("a100-80gb", 64, "infiniband-200"), "shard 64, ZeRO-3, micro-batch 2, recompute every-second",
     (128, 4096, "bf16-mixed"), TITAN | {"fused"}, None, None),  # it ran out of memory
    ("torchtitan 2024-08", "Llama3.1-405B shard 16 x tensor 8, ZeRO-3, micro-batch 2, recompute full, y+asyncTP",
     ("h100-96gb", 128, "infiniband-400"), "shard 16 x tensor 8, ZeRO-3, micro-batch 2, recompute full",
     (32, 8192, "fp8-mixed"), TITAN | {"fused", "async_tensor"}, 11.0702703, None),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, published.Run]:
    return {run.name: run for run in published.runs()}


@pytest.mark.parametrize("source, name, nodes, layout, numbers, flags, seconds, gib", SAID, ids=range(len(SAID)))
def test_a_published_run_is_what_was_published(runs, source, name, nodes, layout, numbers, flags, seconds, gib):
    assert name in runs, f"the run '{name}'"
    run = runs[name]
    assert run.source == source and run.layout.describe() == layout, f"source and layout of {name}"
    gpus = run.cluster
    assert (gpus.gpu.name, gpus.gpus, gpus.name, gpus.gpus_per_node, gpus.adapters) == (*nodes, 8, 8), name
    found = run.layout.batch_size, run.layout.sequence, run.layout.precision
    assert found == numbers, f"sequences of a step, tokens of each, and precision of {name}"
    assert {flag for flag in FLAGS if getattr(run.layout, flag)} == flags, f"what is so of {name}"
    assert (run.seconds is None) is (seconds is None) is run.out_of_memory, f"whether {name} ran"
    assert seconds is None or run.seconds == pytest.approx(seconds, rel=1e-6), f"seconds of a step, {name}"
    assert run.gib == gib, f"GiB at the peak, {name}"
