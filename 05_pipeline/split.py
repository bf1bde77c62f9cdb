"""Where a model is cut into stages: at places that are named, or balanced by parameters or by measured time."""

import difflib
import time

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from course.model_parallel import by_hand_layers


def stages_of(model, stages: int, spec: str = "auto") -> list[list[str]]:
    """The names of the layers in each stage, in order.

    spec: "auto" (the largest stage has as few parameters as can be), "auto-time" (the slowest is as fast as can be, as
          rank 0 measures it; collective), or places as `named` reads them

    Raises UserError.
    """
    layers = by_hand_layers.layers_of(model)
    if spec not in ("auto", "auto-time"):
        ends = named(spec, list(layers), stages)
    else:
        require_layers(len(layers), stages)
        costs = [by_hand_layers.count(layer) for layer in layers.values()] if spec == "auto" else measured(model)
        ends = by_hand_layers.cut(costs, stages)
    return [list(layers)[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]


def check(spec: str, blocks: int, stages: int) -> None:
    """Raise UserError where a GPT of so many blocks is not cut into so many stages by `spec`."""
    names = ["embedding", *(f"blocks.{number}" for number in range(blocks)), "head"]
    if spec not in ("auto", "auto-time"):
        named(spec, names, stages)
    require_layers(len(names), stages)


def require_layers(layers: int, stages: int) -> None:
    if stages > layers:
        raise UserError(
            f"{stages} stages are more than {layers} layers (embedding, {layers - 2} blocks, head), and each needs "
            f"one; make --layers {stages - 2}, or have fewer stages"
        )


def named(spec: str, layers: list[str], stages: int) -> tuple[int, ...]:
    """Read places such as "blocks.3: end" or "blocks.1: beginning, head: beginning": for each stage, the number of its
    last layer plus one. Raises UserError for what is no place, and where they do not make so many stages."""
    cuts = set()
    for place in spec.split(","):
        name, _, side = (part.strip() for part in place.partition(":"))
        if name not in layers:
            nearest = difflib.get_close_matches(name, layers, n=1, cutoff=0.0)[0]
            raise UserError(f"--split-spec: the model has no layer '{name}'; did you mean '{nearest}'?")
        if side not in ("beginning", "end"):
            raise UserError(f"--split-spec: '{place.strip()}': write '{name}: beginning' or '{name}: end'")
        cuts.add(layers.index(name) + (side == "end"))
    if cuts & {0, len(layers)}:
        raise UserError(f"--split-spec: there is nothing to cut off before {layers[0]} or after {layers[-1]}")
    if len(cuts) + 1 != stages:
        raise UserError(
            f"--split-spec: {len(cuts)} cut(s) make {len(cuts) + 1} stages, but ranks x stages per rank are {stages}; "
            f"name {stages - 1} place(s)"
        )
    return (*sorted(cuts), len(layers))


def measured(model: nn.Module, rounds: int = 3) -> list[float]:
    """Seconds of each layer's forward and backward for 4 examples: the shortest of some rounds, on rank 0."""
    layers = list(by_hand_layers.layers_of(model).values())
    x = torch.zeros(4, model.embedding.positions.num_embeddings, dtype=torch.long)
    seconds = torch.full((len(layers),), float("inf"))
    for _ in range(rounds if dist.get_rank() == 0 else 0):
        y = x
        for number, layer in enumerate(layers):
            y = y.detach().requires_grad_() if number else y
            begin = time.perf_counter()
            out = layer(y)
            if out.requires_grad:
                leaves = [p for p in layer.parameters() if p.requires_grad] + [y] * (number > 0)
                torch.autograd.grad(out.sum(), leaves)
            seconds[number] = min(seconds[number], time.perf_counter() - begin)
            y = out
    dist.broadcast(seconds, src=0)
    return seconds.tolist()
