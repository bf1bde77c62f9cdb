"""Accelerators and the links between them: common/gpus.csv and planner/networks.csv, each line with its source.

What can be reached of a peak is not here: planner/constants.py has that, fitted on published runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import gpus as table
from common.constants import GIB, MOST_RANKS
from common.errors import UserError
from planner.names import lookup

GB = 1e9


@dataclass(frozen=True)
class GPU:
    """An accelerator.

    peak:       FLOP/s of dense products in 16 bit; peak_fp8: in 8 bit, 0 where there is none; peak_fp4: in 4 bit, with
                scales for blocks, as MXFP8 has them too
    achievable: the share of it that the best of many sizes of products reached (planner/published/
                hardware_mamf_bf16.csv); where it was not measured, that of the nearest relative
    memory:     bytes that a process can have; hbm: bytes per second
    link:       bytes per second that a GPU sends to others of its node at most, in one direction
    pcie:       bytes per second to the host in one direction
    attention:  share of the peak that fused attention reaches, forward and backward together
    network:    the usual one between its nodes; adapters: how many of them a node has, 0: one for each GPU
    bf16:       it has instructions for bfloat16; watts: thermal design power of the data sheet, 0 where it is unknown
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
    peak_fp4: float = 0.0
    gpus_per_node: int = 8
    network: str = "infiniband-400"
    adapters: int = 0
    bf16: bool = True
    watts: float = 0.0
    cores: int = 0
    crowding: float = 1.0

    @property
    def processor(self) -> bool:
        """A CPU: it launches no kernels, and has no memory of its own."""
        return self.name in ("cpu", "here")

    def low_peak(self, precision: str) -> float:
        """FLOP/s of dense products of fewer than 16 bits; 0 where it has none of that kind."""
        if precision == "nvfp4-mixed":
            return self.peak_fp4
        return self.peak_fp8 if precision == "fp8-mixed" or self.peak_fp4 else 0.0


def _gpu(row: dict[str, str]) -> GPU:
    """A line of common/gpus.csv."""
    units = {
        "peak": ("peak_tflops", 1e12), "peak_fp8": ("peak_fp8_tflops", 1e12),
        "peak_fp4": ("peak_fp4_tflops", 1e12), "memory": ("memory_gib", GIB),
        "hbm": ("hbm_gb_per_s", GB), "link": ("link_gb_per_s", GB), "pcie": ("pcie_gb_per_s", GB),
        "achievable": ("achievable", 1), "attention": ("attention", 1),
    }  # fmt: skip
    rates = {field: float(row[column] or 0) * unit for field, (column, unit) in units.items()}
    counts = {name: int(row[name] or 0) for name in ("gpus_per_node", "adapters")}
    given: dict[str, Any] = {**rates, **counts, "watts": float(row["watts"] or 0)}
    return GPU(row["name"], source=row["source"], network=row["network"], bf16=row["bf16"] != "no", **given)


GPUS: dict[str, GPU] = {row["name"]: _gpu(row) for row in table.rows()}
ALIASES = {alias: row["name"] for row in table.rows() for alias in row["aliases"].split()}


@dataclass(frozen=True)
class Network:
    """Between nodes.

    rate:  bytes per second of an adapter in one direction
    alpha: seconds that each rank of a ring over several nodes adds
    """

    rate: float
    alpha: float
    source: str


NETWORKS: dict[str, Network] = {
    row["name"]: Network(float(row["gb_per_s"]) * GB, float(row["ring_us"]) * 1e-6, row["source"])
    for row in table.rows(Path(__file__).with_name("networks.csv"))
}


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. network: bytes per second of an adapter in one direction; adapters: of a node; host: bytes per
    second of a node's own memory; host_memory: its bytes; alpha: seconds that each rank of a ring over nodes adds."""

    gpu: GPU
    gpus: int
    gpus_per_node: int
    network: float
    adapters: int
    host: float = 300 * GB
    host_memory: float = 1000 * GIB
    name: str = ""
    alpha: float = 8e-6

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def node_network(self) -> float:
        return self.network * self.adapters


def read_here(path: Path | str) -> GPU | None:
    """This machine's processor, as `calibrate` wrote it to a file; None where the file has none."""
    from planner.measured import numbers_of  # a schema of a stranger's file, which who only predicts does not need

    found = numbers_of(Path(path))
    return here(found) if found else None


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


def require_gpus(gpus: int) -> None:
    """Raises UserError for a number of GPUs that no cluster has."""
    if not 1 <= gpus <= MOST_RANKS:
        raise UserError(f"--gpus must be at least 1 and at most {MOST_RANKS}, not {gpus}")


def cluster(
    gpu: str | GPU, gpus: int, gpus_per_node: int | None = None, network: str | None = None, adapters: int | None = None
) -> Cluster:
    """The cluster of these names, or of a GPU that is in no table, such as this machine's. Raises UserError."""
    one = gpu if isinstance(gpu, GPU) else find_gpu(gpu)
    require_gpus(gpus)
    per_node = one.gpus_per_node if gpus_per_node is None else gpus_per_node
    if per_node < 1:
        raise UserError(f"--gpus-per-node must be at least 1, not {per_node}")
    if gpus > per_node and gpus % per_node:
        raise UserError(f"--gpus {gpus} are no whole number of nodes of {per_node}; change --gpus or --gpus-per-node")
    if 0 < one.cores < gpus:
        share = one.cores / gpus / one.crowding
        one = replace(one, peak=one.peak * share, hbm=one.hbm * share)
    if adapters is not None and adapters < 1:
        raise UserError(f"--adapters must be at least 1, not {adapters}")
    between = lookup(network or one.network, NETWORKS, "network")
    number = adapters or one.adapters or per_node
    return Cluster(one, gpus, min(per_node, gpus), between.rate, number, name=network or one.network,
                   alpha=between.alpha)  # fmt: skip
