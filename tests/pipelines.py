"""What the tests of pipelines share, and of shards: small models, batches for them, a mesh, any lists of actions."""

import itertools

import torch
import torch.distributed as dist
from hypothesis import strategies as some
from torch import nn

from common.lab import equality
from common.mesh import in_order, make_mesh, resolve
from common.model import GPT
from course.pipeline import schedules


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


@some.composite
def lists(draw) -> schedules.Schedule:
    """Any lists that come to their end, of up to 3 ranks: stages anywhere, a backward whole or in two parts, and always
    some rank did something that was possible."""
    stages, m = draw(some.integers(1, 5)), draw(some.integers(1, 4))
    placed = draw(some.lists(some.integers(0, 2), min_size=stages, max_size=stages))
    work = [
        (s, k, n) for s, n in itertools.product(range(stages), range(m)) for k in draw(some.sampled_from(["FB", "FIW"]))
    ]
    made, left = [[] for _ in {*placed}], list(work)
    while left:
        ready = [action for action in left if not {*before(action, work)} & {*left}]
        left.remove(action := draw(some.sampled_from(ready)))
        made[sorted({*placed}).index(placed[action[0]])].append(schedules.Action(*action))
    return made


def before(action: tuple[int, str, int], work) -> list[tuple[int, str, int]]:
    """What of all the work has to be over before an action."""
    s, kind, n = action
    needs = {"F": [(s - 1, "F", n)], "W": [(s, "I", n)]}.get(kind, [(s, "F", n), (s + 1, "B", n), (s + 1, "I", n)])
    return [need for need in needs if need in work]


def apart(preset) -> dict[str, int]:
    """Two ranks along each axis; where there is one, that twice side by side: a rank's number in its group is not that
    in the world, and nobody's messages or norms are the others'."""
    beside = {} if len(preset) > 1 else {"tensor" if "pipeline" in preset else "pipeline": 2}
    return in_order({**dict.fromkeys(preset, 2), **beside})
