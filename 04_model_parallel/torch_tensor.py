"""Tensor parallelism with DTensor: which weight is cut how, and what a GPT needs beside that plan."""

from fnmatch import fnmatch

import torch.distributed.tensor.parallel as tp
from torch.distributed.tensor import Replicate, distribute_module

from course.model_parallel.division import require_divisible

PLAN = {
    "embedding.tokens": tp.RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "embedding.positions": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "blocks.*.attention.query": tp.ColwiseParallel(),
    "blocks.*.attention.key": tp.ColwiseParallel(),
    "blocks.*.attention.value": tp.ColwiseParallel(),
    "blocks.*.attention.out": tp.RowwiseParallel(use_local_output=False),
    "blocks.*.mlp.up": tp.ColwiseParallel(),
    "blocks.*.mlp.down": tp.RowwiseParallel(use_local_output=False),
    "head.out": tp.ColwiseParallel(use_local_output=False),
}


def apply_tensor_parallel(model, mesh) -> None:
    """Cut the weights of a GPT over the ranks of a mesh of one dimension, in place, starting from the weights of the
    first of them. Each weight is moved to the mesh's device by itself, when it is cut; on the other ranks it may have
    been on the meta device until then. Raises UserError for a GPT that cannot be cut into equal parts."""
    require_divisible(model, mesh.size())
    tied = model.head.out.weight is model.embedding.tokens.weight
    for name, module in list(model.named_modules()):
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
        for pattern, style in PLAN.items():
            if fnmatch(name, pattern):
                tp.parallelize_module(module, mesh, style)
    if tied:
        model.head.out.weight = model.embedding.tokens.weight
    for block in model.blocks:
        block.attention.heads //= mesh.size()
    distribute_module(model, mesh)  # norms, biases, positions: whole on every rank
    words = model.embedding.tokens.weight
    if words.requires_grad:  # DTensor gives the gradient of an embedding whole: keep the words that this rank has
        words.register_hook(lambda gradient: gradient.redistribute(placements=words.placements))
