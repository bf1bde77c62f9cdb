"""Where the planner's stated interval holds, and where it does not: what few published runs cover is out."""

from planner.hardware import Cluster
from planner.layout import LOW, Layout
from planner.models import Model

# More than this share of a GPU's memory is not recommended: runs that are nearly full wait for the allocator, and some
# are several times slower than the same layout with room (the notes of Hagemann et al. 2023's table; Megatron-Bridge).
RESERVED = 0.85
WIDE = 2.0  # the interval out of scope: half to twice what is predicted
SEEN = ("a100-80gb", "h100-80gb", "h100-96gb", "h200", "b200", "gb200-nvl72", "b300", "gb300-nvl72")


def recommended(expected: float, worst: float, limit: float) -> bool:
    """Whether bytes on a GPU leave the default reserve of what it has, and fit without one if its framework's recipe is
    the one that needs most. `planner scoreboard` says how many published runs that are not recommended ran out."""
    return expected <= RESERVED * limit and worst <= limit


def reasons(model: Model, cluster: Cluster, layout: Layout) -> list[str]:
    """In what the layout is unlike most of what the planner was compared with (planner/published); none: in scope."""
    between = cluster.node_network / cluster.gpus_per_node
    unlike = {
        f"GPU {cluster.gpu.name}": cluster.gpu.name not in SEEN,
        "tensor parallelism across nodes": layout.tensor > cluster.gpus_per_node,
        "several nodes over less than 5 GB/s per GPU": cluster.nodes > 1 and between < 5e9,
        f"{cluster.gpus:,} GPUs (published runs have at most 16,384)": cluster.gpus > 16384,
        "offload": layout.offload,
        f"ZeRO-2 on {cluster.gpus:,} GPUs (its published runs have 8,192 and 16,384)": layout.zero_stage == 2
        and cluster.gpus < 8192,
        "adapters, on whose runs nothing was fitted": bool(layout.lora),
        f"schedule {layout.schedule}": layout.pipeline > 1 and layout.schedule not in ("1f1b", "interleaved"),
        "sequences of more than 1,048,576 tokens": layout.sequence > 2**20,
        f"precision {layout.precision}": layout.precision in ("float32", "bf16-12"),
        "models of less than 0.2 billion parameters": model.parameters < 2e8,
        "models of more than 1,100 billion parameters": model.parameters > 1.1e12,
        "mixtures of experts on H100 or in 16 bit": bool(model.experts)
        and (layout.precision not in LOW or not cluster.gpu.peak_fp4),
    }
    return [what for what, is_so in unlike.items() if is_so]
