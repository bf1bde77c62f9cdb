"""Layers split over ranks and over devices: the cut, the messages, tied and frozen weights."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.strategy import Setup
from course.model_parallel import by_hand_layers as by_hand
from course.model_parallel import layers_on_devices

CPU = torch.device("cpu")


def make(model, make_optimizer=equality.sgd, strategy_class=by_hand.SplitLayers, **options) -> by_hand.SplitLayers:
    return strategy_class(model, make_optimizer, Setup(make_mesh({"pipeline": -1}), **options))


def batches(count: int, size: int = 4):
    tokens = torch.randint(equality.VOCABULARY, (count, size, equality.CONTEXT + 1), generator=torch.Generator())
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def one_step(make_model, micro_batches: int, precision="fp32"):
    """What a rank sends in a step, in order; and its tied weight, its own parameters' names, after three steps."""
    strategy = make(make_model(), equality.adamw, precision=precision, max_norm=0.3)
    for _ in range(2):
        strategy.step(batches(micro_batches))
    with Ledger() as ledger:
        strategy.step(batches(micro_batches))
    return (
        [(e.operation, e.payload, e.peer) for e in ledger.entries],
        strategy.tied,
        dict(strategy.model.named_parameters()),
    )


@pytest.mark.parametrize("nproc, precision, nbytes", [(2, "fp32", 4), (4, "fp32", 4), (2, "bf16", 2)])
def test_what_crosses_the_boundary_and_what_stays_equal(nproc, precision, nbytes):
    """4 x 8 x 16 activations of the type that is computed in, each way, for each micro-batch; and the tied gradient, in
    float32, between the ends."""
    boundary, tied = 4 * 8 * 16 * nbytes, 64 * 16 * 4
    results = launch(one_step, nproc, (equality.tied, 3, precision))
    for rank, (entries, _, _) in enumerate(results):
        before, after = rank - 1, rank + 1
        there = [("recv", boundary, before)] * (rank > 0) + [("send", boundary, after)] * (after < nproc)
        back = [("recv", boundary, after)] * (after < nproc) + [("send", boundary, before)] * (rank > 0)
        ends = [("all_reduce", tied, None)] * (rank in (0, nproc - 1))
        shared = [("broadcast", 4, nproc - 1), ("all_reduce", 4, None)]
        assert entries == (there + back) * 3 + ends + shared
    for (first, *_), (last, *_) in itertools.pairwise([results[0][1:], results[-1][1:]]):
        assert torch.equal(first, last)
    assert not torch.equal(results[0][1], equality.tied().embedding.tokens.weight)
    assert [list(names) for *_, names in results][0][0] == "embedding.tokens.weight"
    held = [name for *_, names in results for name in names]
    assert sorted(set(held) - {"head.out.weight"}) == sorted(name for name, _ in equality.tied().named_parameters())


def test_any_cut_is_right():
    class Uneven(by_hand.SplitLayers):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, ends=(3, 4))

    def parts():
        strategy = make(equality.tied(), strategy_class=Uneven)
        return [
            type(child).__name__ for child in [strategy.model.embedding, *strategy.model.blocks, strategy.model.head]
        ]

    assert launch(parts, 2) == [["Embedding", "Block", "Block", "Identity"], ["Identity"] * 3 + ["Head"]]
    assert len(equality.prove(Uneven, 2, cases=equality.CASES[:2])) == 2


def to(layer, device):
    """Module.to for fake tensors, which it cannot move."""
    for parameter in layer.parameters():
        parameter.fake_device = device


def on_pretended_gpus():
    """Layers on two GPUs that are not there: where the parameters are, and the bytes moved by a forward and backward
    pass."""
    from course.data_parallel import fake_gpus

    mesh = make_mesh({"data": 1})
    with fake_gpus.pretend_gpus(2, equality.tied) as (devices, inside, meter):
        nn.Module.to = to  # this process ends here
        strategy = layers_on_devices.LayersOnDevices(inside.model, equality.sgd, Setup(mesh), devices=devices)
        inputs = torch.zeros(12, equality.CONTEXT, dtype=torch.int64, device=devices[0])
        meter.moved.clear()
        strategy.forward(inputs, inputs).backward()
        places = {name: p.device.index for name, p in strategy.model.named_parameters()}
        gradients = {name: p.grad.device.index for name, p in strategy.model.named_parameters()}
        return places, gradients, dict(meter.moved)


def test_layers_lie_on_two_devices_and_only_the_boundary_moves():
    ((places, gradients, moved),) = launch(on_pretended_gpus, 1)
    assert places == gradients
    assert {name: place for name, place in places.items() if not name.startswith("blocks")} == {
        "embedding.tokens.weight": 0, "embedding.positions.weight": 0, "head.norm.weight": 1, "head.norm.bias": 1,
    }  # fmt: skip
    assert {place for name, place in places.items() if name.startswith("blocks.0")} == {0}
    assert {place for name, place in places.items() if name.startswith("blocks.1")} == {1}
    boundary, tied, targets = 12 * 8 * 16 * 4, 64 * 16 * 4, 12 * 8 * 8
    assert moved == {(0, 1): boundary + tied + targets, (1, 0): boundary + tied}


@pytest.mark.parametrize("processes, gpus, several", [(1, 3, True), (1, 2, True), (1, 1, False), (2, 3, False)])
def test_one_process_has_all_gpus_and_one_of_several_its_own(processes, gpus, several, monkeypatch, capsys):
    own = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for rank in range(processes):
        monkeypatch.setattr(dist, "get_world_size", lambda: processes)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        expected = [torch.device("cuda", number) for number in range(gpus)] if several else [own, own]
        assert layers_on_devices.devices_of(own) == expected, f"devices of a process of {processes}, on {gpus} GPU(s)"
        note = "note: no two GPUs for the parts of the model; all of them are on 'cuda:1'\n"
        assert capsys.readouterr().err == ("" if several or rank > 0 else note), f"what rank {rank} is told"
