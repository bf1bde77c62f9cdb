"""What tests of the planner borrow: meshes in words, and three models whose bytes and times are worked out by hand.

Each has four layers, is 1,000 wide and takes a micro-batch of 1,000 tokens. So the stream of a micro-batch has 2 MB in
16 bit, and a layer 12,002,000 parameters: four million of attention, eight of its MLP, and two norms. The head and the
embedding have a million each, and the last norm a thousand: 50,009,000 in all.
"""

from dataclasses import replace

from planner import models
from planner.layout import Layout

GPT = models.Model("gpt", 4, 1000, 10, 1000)
TIED = replace(GPT, tied=True)
MIXED = replace(GPT, experts=2, top_k=2, expert_width=4000, mlp_width=4000, dense_layers=2)


def mesh_of(text: str) -> dict[str, int]:
    """Of "pipeline=2 data=2"."""
    return {axis: int(size) for axis, _, size in (word.partition("=") for word in text.split())}


def layout(text: str, many: int = 1, **fields) -> Layout:
    """Of a mesh such as "pipeline=2 data=2"; many: micro-batches of a reader."""
    one = Layout(tuple(mesh_of(text).items()), 1, **({"sequence": 1000} | fields))
    return replace(one, batch_size=one.readers * many)
