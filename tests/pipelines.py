"""What the tests of pipelines share, and of shards: small models, batches for them, a mesh."""

import torch
import torch.distributed as dist
from torch import nn

from common.lab import equality
from common.mesh import in_order, make_mesh, resolve
from common.model import GPT


def deep(model_class=GPT) -> nn.Module:
    """Eight layers, for eight stages. Weights are scaled less than the others': so many layers magnify rounding."""
    model = model_class(layers=6, width=16, heads=4, context=equality.CONTEXT, vocabulary=equality.VOCABULARY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 5
    return model


def first_layers_frozen(model_class=GPT) -> nn.Module:
    model = equality.frozen(model_class)
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def tied_frozen(model_class=GPT) -> nn.Module:
    """One weight at both ends, which is not trained."""
    model = equality.tied(model_class)
    model.embedding.requires_grad_(False)
    return model


def small(layers=2, **more) -> nn.Module:
    return GPT(layers=layers, width=16, heads=4, context=8, vocabulary=64, **more)


def batch(examples=8):
    tokens = torch.randint(64, (examples, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def micro_batches(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two sequences each, at random."""
    tokens = torch.randint(equality.VOCABULARY, (count, 2, equality.CONTEXT + 1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def mesh_of(strategy_class, **axes):
    return make_mesh(axes or in_order(resolve(strategy_class.preset, dist.get_world_size())))
