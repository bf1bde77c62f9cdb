"""Tensor parallelism with DTensor: which weight is cut how, and what a GPT needs beside that plan."""

from fnmatch import fnmatch

import torch.distributed.tensor.parallel as tp
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from common.model import Attention
from course.model_parallel import by_hand_tensor

PLAN = {
    "embedding.tokens": tp.RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "embedding.positions": tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "blocks.*.attention.[qkv]*": tp.ColwiseParallel(),  # query, key, value
    "blocks.*.attention.out": tp.RowwiseParallel(use_local_output=False),
    "blocks.*.mlp.up": tp.ColwiseParallel(),
    "blocks.*.mlp.down": tp.RowwiseParallel(use_local_output=False),
    "head.out": tp.ColwiseParallel(use_local_output=False),
}


def apply_tensor_parallel(model, mesh, unit=None) -> None:
    """Cut the weights of a GPT over the ranks of a mesh of one dimension, in place, starting from the weights of the
    first of them. Each weight is moved to the mesh's device by itself, when it is cut. Raises UserError for a GPT that
    cannot be cut into equal parts.

    unit: a module of the model, outside of which nothing is cut or moved: for somebody who shards one unit before the
          next one is moved. What has been cut with another unit stays as it is
    """
    if unit is None:
        by_hand_tensor.require_divisible(model, mesh.size())
    unit = unit or model
    todo = {module for module in unit.modules() if not any(isinstance(p, DTensor) for p in module.parameters())}
    names = [name for name, module in model.named_modules() if module in todo]
    plan = {name: style for name in names for pattern, style in PLAN.items() if fnmatch(name, pattern)}
    ends = [model.get_submodule(name) for name in ("embedding.tokens", "head.out") if name in plan]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    tp.parallelize_module(model, mesh, plan)
    if tied:
        ends[1].weight = ends[0].weight
    for module in todo:
        if isinstance(module, Attention):
            module.heads //= mesh.size()
    distribute_module(unit, mesh)  # norms, biases, positions: whole on every rank
    if "embedding.tokens" in plan and ends[0].weight.requires_grad:
        words = ends[0].weight  # DTensor gives its gradient whole: keep the words that this rank has
        words.register_hook(lambda gradient: gradient.redistribute(placements=words.placements))
