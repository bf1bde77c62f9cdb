"""What a strategy does beside its numbers, and leaves undone, on ranks in groups of two: see `look`. (All ranks skip a
step together that overflowed on one: test_validation.py.)"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from pipelines import apart

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.model import cross_entropy
from common.strategy import Setup
from course.ddp.by_hand import Reducer
from course.strategies import STRATEGIES as TABLE
from course.strategies import load

# By strategy, on four ranks: the mesh. All that is by hand, and of PyTorch's what takes no collectives of DTensor.
STRATEGIES = {
    (name, kind): apart(cls.preset)
    for name, entry in TABLE.items()
    for kind, cls in entry.implementations.items()
    if max(entry.sizes(kind)) > 1 and (kind == "by-hand" or name in ("ddp", "zero1"))
} | {("mesh", "by-hand"): {"shard": 2, "tensor": 2}}
STARTS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "batch_isend_irecv")


class Handle:
    """Of a message that a strategy has started; notes in `left` that nobody has waited for it."""

    left = []

    def __init__(self, work, name):
        self.work, self.name = work, name
        self.left.append(name)

    def wait(self):
        if self.name:
            self.left.remove(self.name)
            self.name = ""
        return self.work.wait()


def noting(name):
    start = getattr(dist, name)

    def call(*args, **more):
        work = start(*args, **more)
        if isinstance(work, list):  # of a batch of messages
            return [Handle(one, name) for one in work]
        return Handle(work, name) if work is not None else work

    return call


def make(cls, mesh, place: int):
    model = equality.frozen(cls.model_class)  # untied, so that no group is made of some ranks alone
    if "images" in cls.tasks and cls.preset:  # models of any kind, with buffers, too
        model.register_buffer("place", torch.tensor([float(place)]))
        model.register_buffer("count", torch.tensor([place]))
    return model, lambda: cls(model, equality.sgd, Setup(mesh, precision="fp16"))


def look(name: str, kind: str) -> dict:
    """What is wrong of a strategy, each by what it is."""
    cls, mesh = load(name, kind), make_mesh(STRATEGIES[name, kind])
    own = dist.get_process_group_ranks(axis(mesh, *(mesh.mesh_dim_names if name == "mesh" else cls.preset)).group)
    place, tokens = own.index(dist.get_rank()), equality.Batches().tokens[:4]
    batch, short = (tokens[:, :-1], tokens[:, 1:]), (tokens[:, :4], tokens[:, 1:5])  # sequences may be shorter
    model, construct = make(cls, mesh, place)
    with torch.no_grad():
        alone = [cross_entropy(model(inputs), targets).item() for inputs, targets in (batch, short)]
    with Ledger() as made:
        strategy = construct()
    buffers, wrong = list(strategy.model.buffers()), {}
    wrong["buffers that are not the first rank's, to begin with"] = [one for one in buffers if one.item() != 0]
    losses = [strategy.evaluate(*part).item() for part in (batch, short)]
    # in another order of tokens, say, they are off by more than 16 bits are
    off = [pair for pair in zip(losses, alone, strict=True) if abs(pair[0] / pair[1] - 1) > 5e-3]
    wrong["losses that are not those of one process"] = off
    for buffer in buffers:
        buffer.fill_(10 + place)
    flats = [(flat, flat.shard.detach().clone()) for flat in getattr(strategy, "flats", ())]
    Handle.left.clear()
    with Ledger() as stepped:
        strategy.step([batch])
    wrong["messages that are under way after a step"] = list(Handle.left)
    messages = [*made.entries, *stepped.entries]
    wrong["messages beyond its groups"] = [e for e in messages if not {*e.group} <= {*own}] if messages else ["none"]
    if kind == "by-hand":  # PyTorch's are made equal before the next forward pass
        off = [buffer for buffer in buffers if buffer.item() != 10]
        wrong["buffers that are not the first rank's, after a step"] = off
    still = [torch.equal(flat.shard, was) for flat, was in flats]
    wrong["flat vectors, of which none moves"] = still if all(still) else []
    old = [flat for flat, _ in flats if not torch.equal(flat.part, flat.shard.half())]
    wrong["flat vectors of an old value after a step"] = old
    strategy.scaler.update(512.0)
    other = make(cls, mesh, place)[1]()
    other.load_full_state(strategy.full_state())
    goes_on = [(one.step([batch])[0].item(), one.scaler.get_scale()) for one in (strategy, other)]
    pairs = zip(strategy.parts(), other.parts(), strict=True)
    off = [one.name for one, two in pairs if not torch.equal(one.tensor, two.tensor)]
    wrong["what goes on otherwise with the state handed on"] = off or (goes_on if len({*goes_on}) > 1 else [])
    return {what: str(values) for what, values in wrong.items() if values}


def look_at_all() -> dict:
    Handle.left = []
    for name in STARTS:
        setattr(dist, name, noting(name))  # this process ends here
    return {who: look(*who) for who in STRATEGIES}


@pytest.fixture(scope="module")
def found():
    return launch(look_at_all, 4, timeout=60)


@pytest.mark.parametrize("who", STRATEGIES, ids="-".join)
def test_nothing_is_wrong_of_a_strategy_beside_its_numbers(who, found):
    assert [rank[who] for rank in found] == [{}] * 4


def test_after_an_error_in_a_micro_batch_the_reducer_sends_again():
    reducer = object.__new__(Reducer)
    reducer.synchronise = True
    with contextlib.suppress(ZeroDivisionError), reducer.no_sync():
        assert not reducer.synchronise, "gradients add up locally"
        raise ZeroDivisionError
    assert reducer.synchronise, "the next step would send nothing"
