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
    """Messages forward and backward, and the shapes that the activations named in the picture have, of one block."""
    model = GPT(1, WIDTH, 2, TIME, 16)
    along = axis(make_mesh({"tensor": -1}), "tensor")
    apply_tensor_parallel(model, along, kind == "sequence")
    block, shapes = model.blocks[0], {}
    block.norm1.register_forward_hook(lambda module, args, output: shapes.update(norm=output.shape))
    block.attention.query.register_forward_hook(
        lambda module, args, output: shapes.update(input=args[0].shape, first=output.shape)
    )
    x = torch.ones(BATCH, TIME, WIDTH)
    x = (own(x, 1, along) if kind == "sequence" else x).requires_grad_()
    shapes["in"] = x.shape
    with Ledger() as forward:
        y = block(x)
    shapes["out"] = y.shape
    with Ledger() as backward:
        y.sum().backward()
    return {"forward": forward.entries, "backward": backward.entries}, shapes


@pytest.mark.parametrize("kind", ["tensor", "sequence"])
def test_what_is_drawn_is_what_two_ranks_do(kind):
    sent, shapes = launch(block_on_a_rank, 2, (kind,))[0]
    for direction, entries in sent.items():
        messages = [message for message in pictures.BLOCK_MESSAGES[kind, direction] if message != "nothing"]
        drawn = 2 * (messages if direction == "forward" else messages[::-1])  # attention and MLP
        assert [entry.operation.replace("_", "-") for entry in entries] == drawn
        assert all(message in pictures.WORDS[kind, direction] for message in messages)
    for place, shape in shapes.items():
        across, down, *_ = pictures.SPLITS[pictures.split(kind, "forward", place)]
        assert tuple(shape) == (BATCH, TIME * down, WIDTH * across), place
