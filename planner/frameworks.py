"""What frameworks do differently where a layout is the same: what they hold besides, and how fast they launch kernels.

Each line says on which published runs or which source it rests. `Layout.framework` names one; where it names none, its
time is that of `name_of`, and its memory the middle one of those that are `possible`.
"""

from dataclasses import dataclass
from typing import Protocol

from common.constants import GIB


class Named(Protocol):
    """What of a layout says which framework it is (planner.layout, which imports this file)."""

    @property
    def framework(self) -> str: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def precision(self) -> str: ...


@dataclass(frozen=True)
class Framework:
    """A recipe.

    host:          of Constants.host, the time that its host needs to launch a layer's kernels
    whole_logits:  each tensor rank holds the logits of the whole vocabulary at the loss, which ranks divide elsewhere
    loss_copies:   float32 tensors as large as the logits that it holds there; 0: as many as planner/constants.py says
    accumulates:   while micro-batches are added up, gradients stay whole and in float32 (fully_shard with
                   set_requires_gradient_sync(False))
    gradient_copy: bytes per parameter of 16-bit gradients that are there, whole, beside those in float32 which they are
                   added to, up to stage 1
    buckets:       bytes per parameter of DistributedDataParallel's buckets, where there are several ranks
    step_gradient: bytes per parameter of the rank's share of the gradients that the optimizer's step has besides
    constant:      bytes outside of the allocator: the CUDA context, NCCL's buffers, what libraries keep
    foreach:       its optimizer is PyTorch's default on CUDA, which takes a temporary of the parameters' size
    fused_attention: attention by Transformer Engine (cuDNN) where the GPU has it
    fp8_overlaps:  where products have 8 bit or fewer, messages along "tensor" overlap with them
    expert_tensors: of a token at each of its experts, those of the model's width that it keeps: what goes in, and what
                   comes out where the router's weights are multiplied after the experts (or what goes in before them)
    node_dispatch: a token goes to each node of its experts once, where an all-to-all sends it to each of them
    stops_early:   it recomputes by torch.utils.checkpoint, not reentrant, which ends where nothing more is needed
    fp8_gradients: bytes per value of the gradients that it keeps and sends where products have 8 bit, up to stage 2
    """

    host: float = 1.0
    whole_logits: bool = False
    loss_copies: float = 0.0
    accumulates: bool = False
    gradient_copy: int = 0
    buckets: int = 0
    step_gradient: int = 0
    constant: float = 0.0
    foreach: bool = False
    fused_attention: bool = False
    fp8_overlaps: bool = False
    expert_tensors: int = 2
    node_dispatch: bool = False
    stops_early: bool = False
    fp8_gradients: int = 4
    source: str = ""


FRAMEWORKS: dict[str, Framework] = {
    "torch": Framework(
        host=0.5, stops_early=True,
        source="torchtitan's reports, whose memory is what the allocator reserved, and whose AdamW is fused",
    ),
    "course": Framework(
        host=0.5, foreach=True, stops_early=True,
        source="this course's own strategies, with torch.optim.AdamW as it is",
    ),
    "transformers": Framework(
        foreach=True, stops_early=True, accumulates=True, whole_logits=True,
        source="Hugging Face's models with PyTorch's AdamW; the adapters of Qwen and fsdp_qlora are predicted with it; "
        "Accelerate's accelerator.py at 16cb6eb8, no_sync: gradients stay whole while they accumulate",
    ),
    "torch-accumulating": Framework(
        host=0.5, whole_logits=True, loss_copies=2.0, accumulates=True, stops_early=True,
        source="loops by hand like KempnerForge's (at 5666d0d1 training/grad.py, training/loss.py, which computes the "
        "loss in 16 bit, and distributed/tensor_parallel.py): whole gradients and logits are a quarter of its memory",
    ),
    "megatron": Framework(
        loss_copies=1.5, fused_attention=True, constant=4 * GIB, fp8_gradients=2, fp8_overlaps=True, node_dispatch=True,
        expert_tensors=1,
        source="Narayanan et al. 2021, Korthikanti et al. 2022, vTrain and NeMo for the time; for the constant "
        "nothing: between torchtitan's and Megatron-DeepSpeed's; 16-bit gradients beside 8-bit products are those of "
        "NVIDIA's performance recipes (Megatron-Bridge, scripts/performance/configs: ddp.grad_reduce_in_fp32 = False), "
        "and so are messages along 'tensor' that overlap, and DeepEP and HybridEP for tokens (at 067f987d, "
        "src/megatron/bridge/recipes: tp_comm_overlap of llama and gpt, moe_flex_dispatcher_backend of qwen, gpt_oss "
        "and deepseek); its loss works in place on one float32 copy beside the 16-bit logits (at d98e8a64, "
        "tensor_parallel/cross_entropy.py; Korthikanti et al. 2022 count 4sbv); there, too, the router's weights are "
        "multiplied in the experts' activation (transformer/moe/experts.py), so that what comes out is not kept",
    ),
    "nanotron": Framework(
        gradient_copy=2, buckets=2, loss_copies=2.0,
        source="nanotron's optim/gradient_accumulator.py at 2411b022 (16-bit gradients are added to those in float32 "
        "after the whole backward pass) and trainer.py (DistributedDataParallel without gradient_as_bucket_view); its "
        "loss makes one float32 copy of the float32 logits (parallel/tensor_parallel/functional.py); what it prints is "
        "the allocator's",
    ),
    "internevo": Framework(
        constant=14 * GIB, foreach=True, step_gradient=4,
        source="InternEvo's hybrid_zero_optim.py at c628a8c8: 16-bit gradients stay while the step has its share "
        "in float32; its AdamW is PyTorch's; the constant is deepspeed's",
    ),
    "deepspeed": Framework(
        constant=14 * GIB, step_gradient=4, gradient_copy=2,
        source="BLOOM's prequel on Megatron-DeepSpeed, whose memory is nvidia-smi's; of the step, DeepSpeed's "
        "stage_1_and_2.py at edaa7221, lines 2361 to 2372; bf16_optimizer.py at 0acdb021 keeps 16-bit gradients, "
        "which it adds to those in float32 after the backward pass",
    ),
    "deepspeed-whole-logits": Framework(
        constant=14 * GIB, step_gradient=4, gradient_copy=2, whole_logits=True,
        source="Hagemann et al. 2023: of their 563 runs that were out of memory it foresees more than deepspeed does, "
        "with no more false alarms; BLOOM's runs, which divide the logits, refute it for Megatron-DeepSpeed",
    ),
}  # fmt: skip


def name_of(layout: Named) -> str:
    """The framework of a layout: DeepSpeed's where gradients have 16 bits beside a float32 copy of the parameters,
    under stage 3 as well (what fully_shard divides is float32, and so are its gradients); else fully_shard's
    for stage 3, and Megatron-LM's for the others."""
    if layout.framework:
        return layout.framework
    if layout.precision == "bf16-mixed-16":
        return "deepspeed"
    return "torch" if layout.zero_stage == 3 else "megatron"


# What a layout may run on where nobody says: of each kind of layout, frameworks whose sources or published memory are
# known. An odd number, so that one is in the middle.
HALF_GRADIENTS = ("deepspeed", "internevo", "deepspeed-whole-logits")
FLOAT_GRADIENTS = ("megatron", "nanotron", "deepspeed")
DIVIDED = ("torch", "torch-accumulating", "deepspeed")


def possible(layout: Named) -> tuple[str, ...]:
    """The frameworks that a layout may run on: the one that it names, or those of its kind."""
    name = name_of(layout)
    if layout.framework:
        return (name,)
    if name == "megatron":
        return FLOAT_GRADIENTS if layout.precision == "bf16-mixed" else (name,)
    return HALF_GRADIENTS if name == "deepspeed" else DIVIDED


def of(layout: Named) -> Framework:
    """The recipe of a layout."""
    return FRAMEWORKS[name_of(layout)]
