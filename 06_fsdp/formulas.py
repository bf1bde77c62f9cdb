"""Formulas of memory: what the stages keep of a model's state, and what a transformer's layer keeps for its backward.

They need no torch, so the planner (planner/) asks them for thousands of layouts a second.
"""

# Of a parameter trained with AdamW: itself, its gradient, and what the optimizer keeps: two moments in float32 and, in
# mixed precision, the parameter in float32 (Rajbhandari et al. 2020, section 3.1). There, the gradient has 2 bytes; the
# stages by hand of this chapter add up ranks and micro-batches in float32, as Megatron-LM does and fully_shard here.
# With fp16 gradients Megatron-LM keeps those as well: 20 bytes in all (its README, "Distributed Optimizer"). bf16
# throughout has 8 bytes, and 12 with moments in float32.
BYTES = {
    "float32": (4, 4, 8),
    "mixed": (2, 2, 12),
    "mixed, float32 gradients": (2, 4, 12),
    "mixed, two gradients": (2, 6, 12),
    "bf16": (2, 2, 4),
    "bf16, float32 moments": (2, 2, 8),
}
STATE_KINDS = ("parameters", "gradients", "optimizer")
SHARDED = {"ddp": (), "zero1": ("optimizer",), "zero2": ("optimizer", "gradients"), "fsdp": STATE_KINDS}  # what is cut


def formula(strategy: str, parameters: float, ranks: int, precision: str = "float32") -> dict[str, float]:
    """Bytes that a rank keeps with AdamW, by kind. `precision` is one of BYTES.

    In mixed precision 16P in all with "ddp"; "zero1": 4P + 12P/N; "zero2": 2P + 14P/N; "fsdp": 16P/N (Rajbhandari et
    al. 2020, section 5). With gradients in float32 18P; 6P + 12P/N; 2P + 16P/N; 18P/N. In float32 throughout 16P;
    8P + 8P/N; 4P + 12P/N; 16P/N.
    """
    sizes = dict(zip(STATE_KINDS, BYTES[precision], strict=True))
    return {kind: size * parameters / (ranks if kind in SHARDED[strategy] else 1) for kind, size in sizes.items()}


# What a layer keeps, in numbers of `width` per token, with its size in bytes for 16-bit training: (cut by tensor
# parallelism always, or by sequence parallelism only). "scores" is what attention keeps for each token, head and key
# where its matrix is stored: softmax, its dropout mask, and what dropout gave (Korthikanti et al. 2022, section 4.1).
def layer_bytes(
    width: int,
    query: int,
    key: int,
    mlp_width: float,
    gated: int = 0,
    dropout: bool = False,
    recompute: str = "none",
    tensor: int = 1,
    sequence_parallel: bool = True,
    itemsize: int = 2,
) -> float:
    """Bytes per token that one transformer layer keeps from its forward to its backward pass, without stored scores.

    width:      of the residual stream
    query, key: width of all queries, and of all keys (equal without grouped-query attention)
    mlp_width:  between the two layers of the MLP, times the experts that a token goes to
    gated:      0: a GELU keeps its input and its output. Else SwiGLU: 4 tensors of mlp_width are kept (gate, its silu,
                up, and their product), or 3 where silu and product are one kernel
    dropout:    masks of one byte behind attention and MLP
    recompute:  "none"; "attention": the core of attention is computed again, for which all else is kept; "operators":
                kept are the layer's input, what attention gave, and every second matrix product (as torchtitan does);
                "products": its input and all matrix products; "full": its input only
    tensor:     ranks that cut the weights; sequence_parallel: they cut the rest of the layer along the sequence too

    For GPT with dropout these are Korthikanti et al. 2022's formulas without the term of the scores: equation 1, 34sbh;
    equation 2, sbh(10 + 24/t); equation 4, 34sbh/t; and 2sbh with full recomputation.
    """
    rest = tensor if sequence_parallel else 1
    parts = mlp_width * (gated or 2)  # of the MLP, cut by tensor parallelism
    if recompute == "full":
        return itemsize * width / rest
    if recompute == "products":
        outputs = query + 2 * key + mlp_width * (2 if gated else 1)
        return itemsize * (3 * width / rest + outputs / tensor)
    if recompute == "operators":
        return itemsize * ((2 if gated else 1) * width / rest + (2 * query + key + mlp_width) / tensor)
    whole = itemsize * 4 * width + (2 * width if dropout else 0)  # inputs of norms, of attention and of the MLP
    return whole / rest + itemsize * (2 * query + 2 * key + parts) / tensor


def score_bytes(heads: int, sequence: int, dropout: bool = True, tensor: int = 1, itemsize: int = 2) -> float:
    """Bytes per token that attention keeps in one layer where the matrix of scores is stored: 5as/t with dropout in 16
    bit, of `heads` = a and `sequence` = s (Korthikanti et al. 2022, section 4.1). Fused attention keeps none."""
    return (itemsize + (itemsize + 1 if dropout else 0)) * heads * sequence / tensor
