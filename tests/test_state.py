"""Which elements of a whole tensor a rank has: boxes, and intervals of a box's elements."""

from types import SimpleNamespace

import torch

from common import state
from common.state import Part, Where, chunk, interval, whole

FULL = torch.arange(24.0).reshape(4, 6)


def test_chunks_lie_in_the_order_of_the_ranks():
    for dim, parts in ((0, FULL.chunk(2)), (1, FULL.chunk(2, dim=1))):
        for rank, part in enumerate(parts):
            where = chunk(part, dim, SimpleNamespace(rank=rank, size=2))
            assert torch.equal(where.take(FULL), part.flatten()), f"chunk {rank} of 2 along dimension {dim}"
            assert (where.shape, where.size) == ((4, 6), tuple(part.shape))


def test_an_interval_of_a_boxs_elements():
    right = chunk(FULL[:, 3:], 1, SimpleNamespace(rank=1, size=2))
    some = interval(right, 2, 5)
    assert some.take(FULL).tolist() == [5.0, 9.0, 10.0], "of 3, 4, 5, 9, 10, 11, ... those from 2 to 5"
    assert interval(some, 1, 2).take(FULL).tolist() == [9.0], "an interval of an interval"
    assert interval(whole(FULL), 0, 24) == Where((4, 6), (0, 0), (4, 6), 0, 24)


def test_what_is_put_stands_there_and_nothing_else_is_changed():
    full = FULL.clone()
    interval(chunk(FULL[:, 3:], 1, SimpleNamespace(rank=1, size=2)), 2, 5).put(full, -torch.ones(3))
    changed = (full != FULL).nonzero().tolist()
    assert changed == [[0, 5], [1, 3], [1, 4]], "the places that were written"
    assert full[0, 5] == full[1, 3] == full[1, 4] == -1


def test_what_is_gathered_keeps_its_type(monkeypatch):
    """BatchNorm counts its batches in int64, and a model may have parameters of 16 or 64 bits."""
    monkeypatch.setattr(state.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(state.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(state.dist, "all_gather_object", lambda everybody, mine: everybody.__setitem__(0, mine))
    kinds = (torch.int64, torch.bfloat16, torch.float64)
    tensors = {str(dtype): torch.ones(2, dtype=dtype) for dtype in kinds}
    found = state.gather([Part(name, tensor, whole(tensor)) for name, tensor in tensors.items()], {})["model"]
    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {name: name for name in tensors}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
