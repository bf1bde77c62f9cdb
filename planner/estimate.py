"""Memory and time of one layout together, as `estimate` prints them and `plan` ranks them."""

from dataclasses import dataclass, replace

from common.constants import GIB
from common.errors import UserError
from planner import memory, scope, time
from planner.constants import Constants, load
from planner.hardware import Cluster
from planner.layout import LOW, Layout
from planner.models import Model


@dataclass(frozen=True)
class Estimate:
    """What is predicted for a layout."""

    model: Model
    cluster: Cluster
    layout: Layout
    memory: memory.Memory
    step: time.StepTime
    constants: Constants
    out_of_scope: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def seconds_low(self) -> float:
        """With seconds_high, the interval that holds nine of ten steps; wider where the layout is out of scope."""
        return self.seconds * self.constants.step_low

    @property
    def seconds_high(self) -> float:
        return self.seconds * self.constants.step_high

    @property
    def warnings(self) -> list[str]:
        """What a reader should know before believing the numbers."""
        found = [f"out of scope, since hardly any published run is like it: {reason}" for reason in self.out_of_scope]
        share = self.memory.expected / self.cluster.gpu.memory
        if scope.RESERVED < share <= 1:
            found.append(
                f"{share:.0%} of the memory in use: not recommended beyond {scope.RESERVED:.0%}, it may run several "
                "times slower or not at all"
            )
        return found

    @property
    def tokens_per_second(self) -> float:
        return self.layout.batch_size * self.layout.sequence / self.seconds

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of each GPU: without recomputation, whatever was recomputed."""
        flops = self.model.flops(self.layout.sequence, self.layout.lora)
        return flops * self.tokens_per_second / self.cluster.gpus

    @property
    def mfu(self) -> float:
        """Share of the peak of the products' own precision: of the 8-bit peak where most of them have 8 bits."""
        return self.flops_per_gpu / self.peak

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU's dense products in this precision; the 16-bit peak, where that isn't known."""
        gpu = self.cluster.gpu
        return (self.layout.precision in LOW and gpu.low_peak(self.layout.precision)) or gpu.peak

    @property
    def trusted(self) -> bool:
        """In scope, and with the reserve of memory that is recommended."""
        limit = self.cluster.gpu.memory
        return not self.out_of_scope and scope.recommended(self.memory.expected, self.memory.worst, limit)

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
        layout = self.layout
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
            "recompute_share": layout.recompute_share,
            "precision": layout.precision,
            "offload": layout.offload,
            "whole_experts": layout.whole_experts,
            "ends": layout.ends,
            "lora": layout.lora,
            "lora_on": layout.lora_on if layout.lora else None,
            "nf4": layout.nf4,
            "memory_gib": self.memory.expected / GIB,
            "memory_gib_low": self.memory.low / GIB,
            "memory_gib_high": self.memory.high / GIB,
            "memory_limit_gib": self.cluster.gpu.memory / GIB,
            "fits": self.fits,
            "step_seconds": self.seconds,
            "step_seconds_low": self.seconds_low,
            "step_seconds_high": self.seconds_high,
            "out_of_scope": list(self.out_of_scope),
            "trusted": self.trusted,
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
            "notes": [*layout.notes, *self.warnings],
        }


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
    step = time.estimate(model, cluster, layout, constants)
    reasons = tuple(scope.reasons(model, cluster, layout))
    if reasons:
        low, high = min(constants.step_low, 1 / scope.WIDE), max(constants.step_high, scope.WIDE)
        constants = replace(constants, step_low=low, step_high=high)
    return Estimate(model, cluster, layout, found, step, constants, reasons)
