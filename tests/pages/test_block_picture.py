"""The picture of a transformer block shows the messages and splits of two ranks; bars of a layer follow sliders."""

import pytest
import torch

from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.model import GPT
from course.model_parallel import pictures
from course.model_parallel.by_hand_tensor import apply_tensor_parallel, own

BATCH, TIME, WIDTH = 2, 4, 8


def block_on_a_rank(kind):
    """Messages forward and backward of one block, and at the places of the picture (those of the MLP, inside) the
    activation and its gradient."""
    torch.manual_seed(0)
    model, seen = GPT(1, WIDTH, 2, TIME, 16), {}
    along = axis(make_mesh({"tensor": -1}), "tensor")
    x, weights = torch.randn(2, BATCH, TIME, WIDTH)
    if kind != "one":
        apply_tensor_parallel(model, along, kind == "sequence")
    if kind == "sequence":
        x, weights = own(x, 1, along), own(weights, 1, along)
    block = model.blocks[0]

    def keep(place, tensor):
        tensor.retain_grad()
        seen[place] = tensor
        return tensor

    block.norm2.register_forward_hook(lambda module, args, output: keep("norm", output))
    block.mlp.up.register_forward_pre_hook(lambda module, args: (keep("input", args[0]),))
    block.mlp.up.register_forward_hook(lambda module, args, output: keep("first", output))
    down = block.mlp.down
    down.register_forward_pre_hook(lambda module, args: (keep("middle", args[0]),))
    if kind == "one":
        bias, down.bias = down.bias, None  # as in RowParallel: what is summed over ranks is without it
        down.register_forward_hook(lambda module, args, output: keep("second", output) + bias)
    else:
        leave = down.leave
        down.leave = lambda y: leave(keep("second", y))
    with Ledger() as forward:
        y = keep("out", block(keep("in", x.requires_grad_())))
    with Ledger() as backward:
        (y * weights).sum().backward()
    messages = {"forward": forward.entries, "backward": backward.entries}
    return messages, {"forward": seen, "backward": {place: tensor.grad for place, tensor in seen.items()}}


TOGETHER = {  # of both ranks' parts
    "whole": lambda one, other: one if torch.allclose(one, other, atol=1e-6) else torch.full_like(one, torch.nan),
    "columns": lambda one, other: torch.cat([one, other], -1),
    "sequence": lambda one, other: torch.cat([one, other], 1),
    "summand": torch.add,
}


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_what_is_drawn_is_what_two_ranks_do(kind):
    ((_, whole),), ranks = launch(block_on_a_rank, 1, ("one",)), launch(block_on_a_rank, 2, (kind,))
    for direction, entries in ranks[0][0].items():
        messages = [message for message in pictures.BLOCK_MESSAGES[kind, direction] if message != "nothing"]
        drawn = 2 * (messages if direction == "forward" else messages[::-1])  # attention and MLP
        assert [entry.operation.replace("_", "-") for entry in entries] == drawn
        assert all(message in pictures.WORDS[kind, direction] for message in messages)
        for place, expected in whole[direction].items():
            parts = [seen[direction][place] for _, seen in ranks]
            name = pictures.split(kind, direction, place)
            torch.testing.assert_close(TOGETHER[name](*parts), expected, msg=f"{direction}, {place}: no {name}")
            across, down, *_ = pictures.SPLITS[name]
            assert tuple(parts[0].shape) == (BATCH, TIME * down, WIDTH * across * expected.shape[-1] // WIDTH), place
