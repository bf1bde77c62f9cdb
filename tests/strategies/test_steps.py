"""What a step does beside its numbers: it waits for each message that it started, buffers follow rank 0's, what is
gathered follows what was stepped. (All ranks skip a step together that overflowed on one: test_validation.py.)"""

import contextlib

import pytest
import torch
import torch.distributed as dist

from common.lab import equality
from common.lab.launch import launch
from common.mesh import in_order, make_mesh, resolve
from common.model import cross_entropy
from common.strategy import Setup
from course.ddp.by_hand import Reducer
from course.strategies import STRATEGIES as TABLE
from course.strategies import load

# By strategy, on four ranks: the mesh. All that is by hand, and of PyTorch's what takes no collectives of DTensor.
STRATEGIES = {
    (name, kind): in_order(resolve(cls.preset, 4) if len(cls.preset) == 1 else dict.fromkeys(cls.preset, 2))
    for name, entry in TABLE.items()
    for kind, cls in entry.implementations.items()
    if max(entry.sizes(kind)) > 1 and (kind == "by-hand" or name in ("ddp", "zero1"))
} | {("mesh", "by-hand"): {"shard": 2, "tensor": 2}}
# What divides a model's state alone, and so may have buffers and frozen parameters.
FLAT = [who for who in STRATEGIES if who[1] == "by-hand" and {*STRATEGIES[who]} & {"shard"}]
WHOLE = [who for who in STRATEGIES if "images" in load(*who).tasks and who[0] != "mesh"]


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


def look(name: str, kind: str) -> dict:
    cls = load(name, kind)
    model = equality.frozen(cls.model_class)  # untied, so that no group is made of some ranks alone
    if (name, kind) in WHOLE:
        model.register_buffer("place", torch.tensor([float(dist.get_rank())]))
    tokens = equality.Batches().tokens[:4]
    batch = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        alone = cross_entropy(model(batch[0]), batch[1]).item()
    strategy = cls(model, equality.sgd, Setup(make_mesh(STRATEGIES[name, kind]), precision="fp16"))
    buffers = list(strategy.model.buffers())
    found = {"begins with buffers": [buffer.item() for buffer in buffers]}
    for buffer in buffers:
        buffer.fill_(10.0 + dist.get_rank())
    found["evaluation"] = strategy.evaluate(*batch).item() / alone
    before = [flat.shard.detach().clone() for flat in getattr(strategy, "flats", ())]
    Handle.left.clear()
    strategy.step([batch])
    found["not waited for"] = list(Handle.left)
    found["buffers after a step"] = [buffer.item() for buffer in buffers]
    flats = list(zip(getattr(strategy, "flats", ()), before, strict=True))
    found["shards that move"] = [not torch.equal(flat.shard, was) for flat, was in flats]
    found["shards that are gathered as they were"] = [
        number for number, (flat, _) in enumerate(flats) if not torch.equal(flat.part, flat.shard.half())
    ]
    return found


def look_at_all() -> dict:
    Handle.left = []
    for name in STARTS:
        setattr(dist, name, noting(name))  # this process ends here
    return {who: look(*who) for who in STRATEGIES}


@pytest.fixture(scope="module")
def found():
    return launch(look_at_all, 4, timeout=60)


@pytest.mark.parametrize("who", STRATEGIES, ids="-".join)
def test_a_step_waits_for_what_it_has_started(who, found):
    assert [rank[who]["not waited for"] for rank in found] == [[]] * 4, "messages that are under way after a step"


@pytest.mark.parametrize("who", STRATEGIES, ids="-".join)
def test_every_rank_finds_the_loss_of_one_process(who, found):
    """In another order of tokens, say, it is off by more than numbers of 16 bits are."""
    assert [rank[who]["evaluation"] for rank in found] == pytest.approx([1] * 4, rel=5e-3)


@pytest.mark.parametrize("who", [who for who in WHOLE if who[1] == "by-hand"], ids="-".join)
def test_buffers_are_rank_0s_from_the_start_and_after_each_step(who, found):
    assert [rank[who]["begins with buffers"] for rank in found] == [[0.0]] * 4, "of rank 0, when training begins"
    assert [rank[who]["buffers after a step"] for rank in found] == [[10.0]] * 4, "of rank 0, after a step"


@pytest.mark.parametrize("who", FLAT, ids="-".join)
def test_in_half_precision_what_is_gathered_follows_what_was_stepped(who, found):
    for rank in found:
        assert any(rank[who]["shards that move"])
        assert rank[who]["shards that are gathered as they were"] == [], "flat vectors of an old value after a step"


def test_after_an_error_in_a_micro_batch_the_reducer_sends_again():
    reducer = object.__new__(Reducer)
    reducer.synchronise = True
    with contextlib.suppress(ZeroDivisionError), reducer.no_sync():
        assert not reducer.synchronise, "gradients add up locally"
        raise ZeroDivisionError
    assert reducer.synchronise, "the next step would send nothing"
