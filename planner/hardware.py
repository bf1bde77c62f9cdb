"""Accelerators and the links between them, with sources.

What can be reached of a peak is not here: planner/constants.py has that, fitted on published runs.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UserError
from planner.names import lookup

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """An accelerator.

    peak:       FLOP/s of dense products in 16 bit; peak_fp8: in 8 bit, 0 where there is none
    achievable: the share of it that the best of many sizes of products reached (planner/published/
                hardware_mamf_bf16.csv); where it was not measured, that of the nearest relative
    memory:     bytes that a process can have; hbm: bytes per second
    link:       bytes per second that a GPU sends to others of its node at most, in one direction
    pcie:       bytes per second to the host in one direction
    attention:  share of the peak that fused attention reaches, forward and backward together
    cores:      of a processor: how many processes compute at once; more take turns, which makes all of
                them slower by a factor (crowding). 0: each has a device of its own
    """

    name: str
    peak: float
    achievable: float
    memory: float
    hbm: float
    link: float
    pcie: float
    attention: float
    source: str
    peak_fp8: float = 0.0
    gpus_per_node: int = 8
    cores: int = 0
    crowding: float = 1.0


GIB = 2**30
A100 = "NVIDIA A100 data sheet; FlashAttention-2 (Dao 2023, figures 5 to 7)"
H100 = "NVIDIA H100 data sheet; attention of FlashAttention-2 on it (Shah et al. 2024, figure 5)"
GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 312e12, 0.869, 39.4 * GIB, 1.555e12, 300 * GB, 32 * GB, 0.55, A100),
        GPU("a100-80gb", 312e12, 0.869, 79.2 * GIB, 2.039e12, 300 * GB, 32 * GB, 0.55, A100),
        GPU("h100-80gb", 989e12, 0.803, 79.1 * GIB, 3.35e12, 450 * GB, 64 * GB, 0.35, H100, 1979e12),
        GPU(
            "h100-96gb", 989e12, 0.74, 94.9 * GIB, 2.4e12, 450 * GB, 64 * GB, 0.32,
            "H100 with HBM2e and 500 W: torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, whose footnote puts "
            "its peak between those of SXM and NVL (835e12): taken in the middle", 1979e12,
        ),
        GPU("h200", 989e12, 0.803, 139.8 * GIB, 4.8e12, 450 * GB, 64 * GB, 0.35, "NVIDIA H200 data sheet", 1979e12),
        GPU(
            "b200", 2250e12, 0.776, 178 * GIB, 8e12, 900 * GB, 64 * GB, 0.35,
            "NVIDIA Blackwell data sheet; attention as on H100", 4500e12,
        ),
        GPU(
            "gb200-nvl72", 2500e12, 0.729, 185 * GIB, 8e12, 900 * GB, 64 * GB, 0.35,
            "NVIDIA GB200 NVL72 data sheet: 72 GPUs in one NVLink domain", 5000e12, 72,
        ),
        GPU("v100-32gb", 125e12, 0.8, 31.7 * GIB, 0.9e12, 150 * GB, 16 * GB, 0.3, "NVIDIA V100 data sheet"),
        GPU("l4", 121e12, 0.7, 22.2 * GIB, 0.3e12, 16 * GB, 16 * GB, 0.4, "NVIDIA L4 data sheet: no NVLink", 242e12),
        GPU(
            "rtx-4090", 165e12, 0.85, 23.5 * GIB, 1.008e12, 20 * GB, 32 * GB, 0.5,
            "NVIDIA Ada whitepaper: 165 TFLOP/s with float32 sums, no NVLink, no peer-to-peer", 330e12,
        ),
        GPU("cpu", 60e9, 0.6, 8 * GIB, 10e9, 2 * GB, 10 * GB, 0.2, "a core of a laptop; `calibrate` replaces it", 0, 1),
    )
}  # fmt: skip
ALIASES = {
    "a100": "a100-80gb", "a100-sxm": "a100-80gb", "h100": "h100-80gb", "h100-sxm": "h100-80gb", "h200-141gb": "h200",
    "b200-192gb": "b200", "b200-180gb": "b200", "gb200": "gb200-nvl72", "4090": "rtx-4090", "rtx4090": "rtx-4090",
    "l4-24gb": "l4", "v100": "v100-32gb", "h100-94gb": "h100-96gb", "h100-95gb": "h100-96gb",
    "rtx-4090-24gb": "rtx-4090",
}  # fmt: skip

# Bytes per second and adapter, in one direction.
NETWORKS: dict[str, tuple[float, str]] = {
    "infiniband-400": (50 * GB, "NDR InfiniBand, 400 Gb/s"),
    "infiniband-200": (25 * GB, "HDR InfiniBand, 200 Gb/s"),
    "infiniband-100": (12.5 * GB, "EDR InfiniBand, 100 Gb/s"),
    "infiniband-800": (100 * GB, "XDR InfiniBand, 800 Gb/s"),
    "efa-400": (50 * GB, "AWS EFA, 400 Gb/s per GPU"),
    "ethernet-400": (50 * GB, "RoCE, 400 Gb/s"),
    "ethernet-100": (12.5 * GB, "100 Gb/s Ethernet"),
    "ethernet-25": (3.125 * GB, "25 Gb/s Ethernet"),
    "ethernet-10": (1.25 * GB, "10 Gb/s Ethernet"),
}
USUAL = {  # which network, and how many adapters per node, where none is named
    "a100-40gb": ("infiniband-200", 8), "a100-80gb": ("infiniband-200", 8), "v100-32gb": ("infiniband-100", 4),
    "l4": ("ethernet-100", 1), "rtx-4090": ("ethernet-25", 1), "cpu": ("ethernet-10", 1),
    "gb200-nvl72": ("infiniband-400", 72),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. network: bytes per second of an adapter in one direction; adapters: of a node; host: bytes per
    second of a node's own memory; host_memory: its bytes."""

    gpu: GPU
    gpus: int
    gpus_per_node: int
    network: float
    adapters: int
    host: float = 300 * GB
    host_memory: float = 1000 * GIB
    name: str = ""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def node_network(self) -> float:
        return self.network * self.adapters


def read_here(path: Path | str) -> GPU | None:
    """This machine's processor, as `calibrate` wrote it to a file; None where the file has none."""
    found = json.loads(Path(path).read_text()).get("here")
    return found and here(found)


def here(found: dict) -> GPU:
    """This machine's processor, of the numbers that `calibrate` measured."""
    rates = {name: found[name] for name in ("peak", "hbm", "link")} | {"cores": int(found.get("cores", 0))}
    rates["crowding"] = found.get("crowding", 1.0)
    return GPU(
        "here", achievable=1.0, memory=found.get("memory", 8 * GIB), pcie=found["hbm"], attention=0.5,
        source="measured by calibrate", gpus_per_node=found.get("processes", 8), **rates,
    )  # fmt: skip


def find_gpu(name: str) -> GPU:
    return lookup(name.lower(), GPUS, "GPU", ALIASES)


def cluster(
    gpu: str, gpus: int, gpus_per_node: int | None = None, network: str | None = None, adapters: int | None = None
) -> Cluster:
    """The cluster of these names. Raises UserError."""
    one = find_gpu(gpu)
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, not {gpus}")
    per_node = one.gpus_per_node if gpus_per_node is None else gpus_per_node
    if per_node < 1:
        raise UserError(f"--gpus-per-node must be at least 1, not {per_node}")
    if gpus > per_node and gpus % per_node:
        raise UserError(f"--gpus {gpus} are no whole number of nodes of {per_node}; change --gpus or --gpus-per-node")
    if 0 < one.cores < gpus:
        share = one.cores / gpus / one.crowding
        one = replace(one, peak=one.peak * share, hbm=one.hbm * share)
    usual, number = USUAL.get(one.name, ("infiniband-400", 8))
    rate, _ = lookup(network or usual, NETWORKS, "network")
    number = adapters or (per_node if number in (8, 72) else number)
    return Cluster(one, gpus, min(per_node, gpus), rate, max(1, number), name=network or usual)
