"""Memory and time of one layout together, as `estimate` prints them and `plan` ranks them."""

from dataclasses import dataclass, replace

from common.errors import UserError
from planner import memory, time
from planner.constants import Constants, load
from planner.hardware import Cluster
from planner.layout import Layout
from planner.models import Model

GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """What is predicted for a layout."""

    model: Model
    cluster: Cluster
    layout: Layout
    memory: memory.Memory
    step: time.StepTime
    constants: Constants

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch_size * self.layout.sequence / self.seconds

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of each GPU: without recomputation, whatever was recomputed."""
        return self.model.flops(self.layout.sequence) * self.tokens_per_second / self.cluster.gpus

    @property
    def mfu(self) -> float:
        """Share of the 16-bit peak, in 8 bit as well."""
        return self.flops_per_gpu / self.cluster.gpu.peak

    @property
    def fits(self) -> str:
        """yes; tight: only if the allocator reserves less than expected; no."""
        return self.fits_in(self.cluster.gpu.memory)

    def fits_in(self, limit: float) -> str:
        return "yes" if self.memory.high <= limit else "tight" if self.memory.low <= limit else "no"

    @property
    def binding(self) -> str:
        """What limits the layout: memory where it does not fit, else what the step spends most on besides work."""
        if self.fits == "no":
            return f"memory: {max(self.memory.parts, key=self.memory.parts.__getitem__)}"
        others = {name: seconds for name, seconds in self.step.parts.items() if name != "work"}
        largest = max(others, key=others.__getitem__)
        return largest if others[largest] > 0.15 * self.seconds else "work"

    def as_dict(self) -> dict:
        layout, c = self.layout, self.constants
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "gpu": self.cluster.gpu.name,
            "gpus": self.cluster.gpus,
            "mesh": dict(layout.mesh),
            "zero_stage": layout.zero_stage,
            "micro_batch": layout.micro_batch,
            "micro_batches": layout.micro_batches,
            "schedule": layout.schedule if layout.pipeline > 1 else None,
            "stages_per_rank": layout.stages_per_rank,
            "recompute": layout.recompute,
            "precision": layout.precision,
            "offload": layout.offload,
            "memory_gib": self.memory.expected / GIB,
            "memory_gib_low": self.memory.low / GIB,
            "memory_gib_high": self.memory.high / GIB,
            "memory_limit_gib": self.cluster.gpu.memory / GIB,
            "fits": self.fits,
            "step_seconds": self.seconds,
            "step_seconds_low": self.seconds * c.step_low,
            "step_seconds_high": self.seconds * c.step_high,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.cluster.gpus,
            "model_tflops_per_gpu": self.flops_per_gpu / 1e12,
            "mfu": self.mfu,
            "bubble": self.step.bubble,
            "exposed_communication_seconds": self.step.exposed,
            "binding": self.binding,
            "memory_parts_gib": {name: size / GIB for name, size in self.memory.parts.items()},
            "memory_phase": self.memory.phase,
            "step_parts_seconds": dict(self.step.parts),
            "sent_bytes_per_gpu": self.step.links,
            "notes": [*layout.notes, *outside(self)],
        }


def outside(found: Estimate) -> list[str]:
    """In what the layout is unlike all that the planner was compared with (planner/published)."""
    model, layout, cluster = found.model, found.layout, found.cluster
    billions = float(f"{model.parameters / 1e9:.2g}")  # two digits, and no exponent
    says = {
        "mixtures of experts": bool(model.experts),
        "offload": layout.offload,
        f"GPU {cluster.gpu.name}": cluster.gpu.name not in ("a100-80gb", "h100-80gb", "h100-96gb", "h200"),
        "more than 3,072 GPUs": cluster.gpus > 3072,
        "ZeRO stages 1 and 2": layout.zero_stage in (1, 2),
        f"schedule {layout.schedule}": layout.pipeline > 1 and layout.schedule not in ("1f1b", "interleaved"),
        "sequences of more than 262,144 tokens": layout.sequence > 262_144,
        f"precision {layout.precision}": layout.precision not in ("bf16-mixed", "fp16-mixed", "fp8-mixed"),
        f"models of {billions:,g} billion parameters": not 1e9 < model.parameters < 1.1e12,
        "several nodes over a slow network": cluster.nodes > 1 and cluster.node_network / cluster.gpus_per_node < 20e9,
    }
    return [f"not checked against any published run: {what}" for what, is_so in says.items() if is_so]


def limited(cluster: Cluster, gib: float | None) -> Cluster:
    """The cluster, of whose GPUs no more than so many GiB may be used. Raises UserError."""
    if gib is None:
        return cluster
    if gib <= 0:
        raise UserError(f"--max-memory-gb must be more than 0, not {gib:g}")
    return replace(cluster, gpu=replace(cluster.gpu, memory=gib * GIB))


def estimate(
    model: Model, cluster: Cluster, layout: Layout, constants: Constants | None = None, max_memory_gib=None
) -> Estimate:
    """Predict a layout that `planner.layout.make_layout` has checked."""
    constants, cluster = constants or load(), limited(cluster, max_memory_gib)
    found = memory.estimate(model, layout, constants)
    return Estimate(model, cluster, layout, found, time.estimate(model, cluster, layout, constants), constants)
