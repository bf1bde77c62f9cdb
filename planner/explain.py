"""Each number of an estimate as a formula, with the values put in, and where it comes from."""

from common.constants import GIB
from planner import frameworks
from planner.estimate import Estimate
from planner.memory import layer_memory
from planner.stages import held, shares


def whose(found: Estimate) -> str:
    """Of which framework the memory is."""
    others = [name for name in frameworks.possible(found.layout) if name != found.memory.framework]
    among = f", which needs neither most nor least; the others are {' and '.join(others)}" if others else ""
    return f"as {found.memory.framework} has it{among}"


def lines(found: Estimate) -> list[str]:
    model, layout, cluster, c = found.model, found.layout, found.cluster, found.constants
    gpu = cluster.gpu
    layers, embedding, head = shares(model, layout)[found.memory.rank]
    stored = held(layout)[found.memory.rank]
    own = " and ".join(word for word, has in (("the embedding", embedding), ("the head", head)) if has)
    out = [
        f"parameters      {model.parameters:,}  ({model.name}: {model.source})",
        f"readers         data x shard x expert = {layout.size('data')} x {layout.size('shard')} x "
        f"{layout.size('expert')} = {layout.readers}",
        f"micro-batches   {layout.batch_size} / ({layout.readers} x {layout.micro_batch}) = {layout.micro_batches}",
        f"memory          largest on rank {found.memory.rank} of the pipeline, with {layers} layers"
        f"{' and ' + own if own else ''}, in the phase '{found.memory.phase}':",
    ]
    sources = {
        "parameters": f"recipe '{layout.recipe}', stage {layout.zero_stage} over {layout.shards} ranks: chapter 06's "
        "formula (Rajbhandari et al. 2020, section 5)",
        "gradients": "the same formula",
        "optimizer": "the same formula",
        "frozen parameters": "16 bits each"
        + (", linear layers 4 bits and 0.127 of scales (Dettmers et al. 2023, section 3)" if layout.nf4 else ""),
        "activations": f"{stored} micro-batches held (chapter 05's simulator) x {layers // layout.stages_per_rank} "
        f"layers x {layer_memory(model, layout) / GIB:.3f} GiB, recomputation '{layout.kept}' (Korthikanti et al. "
        "2022, table 2, by parts)",
        "gathered": "16-bit parameters that stage 3 has whole: two units, or a pipeline's whole stage",
        "unsharded gradients": "of one unit, or of a pipeline's stage until its last micro-batch",
        "gradients in 16 bit": "each is added to one in float32 after the backward pass (planner/frameworks.py)",
        "logits and loss": f"{layout.tokens:,.0f} tokens x {model.vocabulary:,} / {layout.tensor} x 4 bytes, several "
        "times (planner/constants.py, loss_copies)",
        "a layer computed again": f"{layer_memory(model, layout, 'none') / GIB:.2f} GiB without recomputation, less "
        "what was kept",
    }
    for name, size in found.memory.parts.items():
        out.append(f"  {size / GIB:9.2f} GiB  {name}{': ' + sources[name] if name in sources else ''}")
    out += [
        f"  {found.memory.needed / GIB:9.2f} GiB  needed; x {c.allocator:.2f} for the allocator + "
        f"{found.memory.outside / GIB:.2f} GiB outside of it = {found.memory.expected / GIB:.2f} GiB",
        f"  {'':9}      from {found.memory.low / GIB:.2f} to {found.memory.high / GIB:.2f} GiB ({c.source}); "
        f"{whose(found)}",
        f"step            {found.seconds:.3f} s, on the rank that has most to do:",
    ]
    rate = gpu.peak * gpu.achievable * c.matmul
    parts = {
        "work": f"products at {gpu.peak / 1e12:,.0f} TFLOP/s x {gpu.achievable:.2f} (best measured) x {c.matmul:.2f} "
        f"(fitted) = {rate / 1e12:,.0f} TFLOP/s, and bytes over {gpu.hbm / 1e12:.2f} TB/s x {c.memory_rate:.2f}",
        "messages in layers": "of tensor, context and expert parallelism, over the links that their groups cross "
        "(chapter 01: steps x alpha + bytes / bandwidth)",
        "bubble": f"{layout.schedule}, {layout.pipeline} ranks, {layout.micro_batches} micro-batches (chapter 05's "
        "simulator)",
        "messages of state": "gradients and parameters that no work hides",
        "optimizer": "bytes of AdamW's state through the memory"
        + (", here the host's, and gradients and parameters over PCIe" if layout.offload else ""),
    }
    out += [f"  {seconds:9.3f} s    {name}: {parts[name]}" for name, seconds in found.step.parts.items() if seconds]
    flops = model.flops(layout.sequence, layout.lora)
    out += [
        f"MFU             {flops / 1e9:,.1f} GFLOP per token ({4 if layout.lora else 6} per parameter of a product, "
        "12 layers x width x sequence for attention: Chowdhery et al. 2022, appendix B) x "
        f"{found.tokens_per_second:,.0f} tokens/s / {cluster.gpus} GPUs / {found.peak / 1e12:,.0f} TFLOP/s = "
        f"{found.mfu:.1%}",
        f"GPU             {gpu.name}: {gpu.source}",
        f"network         {cluster.name}: {cluster.adapters} x {cluster.network / 1e9:g} GB/s per node",
    ]
    return out
