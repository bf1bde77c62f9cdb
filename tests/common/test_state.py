"""Which elements of a whole tensor a rank has: boxes, and intervals of a box's elements."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common import state
from common.state import Part, Where, whole


@pytest.fixture
def alone(monkeypatch):
    """As in a process group of one."""
    monkeypatch.setattr(state.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(state.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(state.dist, "all_gather_object", lambda everybody, mine: everybody.__setitem__(0, mine))
    monkeypatch.setattr(state.dist, "gather_object", lambda mine, everybody: everybody.__setitem__(0, mine))
    monkeypatch.setattr(state.dist, "broadcast_object_list", lambda box, src: None)


def test_the_parts_of_a_model():
    """A tied weight once, by its first name; no owner for what is frozen and for buffers; no buffer that is not to be
    stored; and what is cut, in its place."""
    model = nn.Module()
    model.first, model.frozen = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3), requires_grad=False)
    model.rows, model.last = nn.Parameter(torch.ones(2, 4)), model.first
    model.register_buffer("count", torch.tensor(7))
    model.register_buffer("mask", torch.ones(5), persistent=False)
    found = state.parts_of(model, {model.rows: (0, SimpleNamespace(rank=1, size=2))})
    assert {part.name: (part.owner, part.aliases) for part in found} == {
        "first": (model.first, ("last",)), "frozen": (None, ()), "rows": (model.rows, ()), "count": (None, ())
    }, "owner and other names of each"  # fmt: skip
    assert [part.where for part in found] == [
        whole(model.first), whole(model.frozen), Where((4, 4), (2, 0), (2, 4), 0, 8), whole(model.count)
    ], "where each lies"  # fmt: skip
    for part in found:
        kept = getattr(model, part.name)
        assert part.tensor.data_ptr() == kept.data_ptr() and not part.tensor.requires_grad, f"memory of {part.name}"


def test_a_state_is_scattered_and_gathered_whole(alone):
    """A flat vector of two parameters, of which one is tied; a parameter of its own that has no optimizer state yet;
    and a buffer."""
    flat, own = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(2, 2))
    optimizer = collections.defaultdict(dict)
    box = Where((2, 3), (0, 0), (2, 3), 0, 6)
    parts = [
        Part("a", flat.detach()[:6], box, flat, slice(0, 6), aliases=("tied",)),
        Part("b", flat.detach()[6:], Where((2,), (0,), (2,), 0, 2), flat, slice(6, 8)),
        Part("own", own.detach(), whole(own), own),
        Part("count", torch.zeros((), dtype=torch.int64), Where((), (), (), 0, 1)),
    ]
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([6.0, 7.0]), "own": torch.full((2, 2), 8.0)}
    model = tensors | {"count": torch.tensor(9), "tied": tensors["a"]}
    kept = {
        name: {"step": torch.tensor(3.0), "exp_avg": (tensor / 2).to(torch.bfloat16)}
        for name, tensor in tensors.items()
    }
    state.scatter({"model": model, "state": kept}, parts, optimizer)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and own.tolist() == [[8, 8], [8, 8]], "parameters"
    assert optimizer[flat]["exp_avg"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5], "of the flat vector"
    assert {*map(len, optimizer.values())} == {2} and len(optimizer) == 2, "a buffer has no optimizer state"
    found = state.gather(parts, optimizer)
    for name, value in model.items():
        assert torch.equal(found["model"][name], value) and found["model"][name].dtype == value.dtype, f"model: {name}"
    for name, values in kept.items():
        for key, value in values.items():
            back = found["state"][name][key]
            assert torch.equal(back, value) and back.dtype == value.dtype, f"optimizer: {name}, {key}"
    for values in [flat.data, own.data, *(tensor for each in optimizer.values() for tensor in each.values())]:
        values.fill_(77)
    for part in (model, found["model"], *kept.values(), *found["state"].values()):
        assert all(77 not in value for value in part.values()), "training goes on in the memory of a state handed on"


def test_what_is_gathered_keeps_its_type(alone):
    """BatchNorm counts its batches in int64, and a model may have parameters of 16 or 64 bits."""
    kinds = (torch.int64, torch.bfloat16, torch.float64)
    tensors = {str(dtype): torch.ones(2, dtype=dtype) for dtype in kinds}
    found = state.gather([Part(name, tensor, whole(tensor)) for name, tensor in tensors.items()], {})["model"]
    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {name: name for name in tensors}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
