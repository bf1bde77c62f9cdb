"""Layers split over ranks and over devices: the cut, the messages, tied and frozen weights, resumed runs."""

import itertools
import json
import random

import pytest
import torch
import torch.distributed as dist
from course.strategies import load
from torch import nn

from common.config import Config, parse
from common.errors import UserError
from common.lab import equality
from common.lab.guard import CheckCollectives
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.model import GPT, cross_entropy
from common.ranks import Ranks
from common.task import make_task
from common.train import train
from course.model_parallel import by_hand_layers as by_hand

CPU = torch.device("cpu")


def here() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), CPU)


def largest(costs, ends) -> float:
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *ends)))


def test_the_cut_is_the_best_of_all():
    numbers = random.Random(0)
    for _ in range(50):
        costs = [numbers.randrange(10) for _ in range(numbers.randrange(1, 8))]
        for parts in range(1, len(costs) + 1):
            ends = by_hand.cut(costs, parts)
            ways = itertools.combinations(range(1, len(costs)), parts - 1)
            assert len(ends) == parts and ends[-1] == len(costs) and ends == tuple(sorted(set(ends)))
            assert largest(costs, ends) == min(largest(costs, (*way, len(costs))) for way in ways)
    assert by_hand.cut([1] * 200, 8)[-1] == 200  # of some 10^12 ways


def test_more_ranks_than_layers(monkeypatch):
    told = r"4 ranks are more than 3 layers \(embedding, 1 blocks, head\).* start at most 3 ranks, or make --layers 2"
    with pytest.raises(UserError, match=told):
        by_hand.cut([1, 1, 1], 4)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    line = "--distributed --strategy model --by-hand --layers"
    with pytest.raises(UserError, match=told):  # before the ranks meet
        parse(argv=f"{line} 1".split())
    assert parse(argv=f"{line} 2".split()).layers == 2
    with pytest.raises(UserError, match="--task images: .*'model'.* --task text"):
        parse(argv=f"{line} 2 --task images".split())


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(UserError, match="layers of a Linear are not cut"):
        by_hand.layers_of(nn.Linear(2, 2))


def batches(count: int, size: int = 4):
    tokens = torch.randint(equality.VOCABULARY, (count, size, equality.CONTEXT + 1), generator=torch.Generator())
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def one_step(make_model, micro_batches: int):
    """What a rank sends in a step, in order; and its tied weight, its own parameters' names, after three steps."""
    strategy = by_hand.SplitLayers(make_model(), equality.adamw, here(), max_norm=0.3)
    for _ in range(2):
        strategy.step(batches(micro_batches))
    with Ledger() as ledger:
        strategy.step(batches(micro_batches))
    return (
        [(e.operation, e.payload, e.peer) for e in ledger.entries],
        strategy.tied,
        dict(strategy.model.named_parameters()),
    )


@pytest.mark.parametrize("nproc", [2, 4])
def test_what_crosses_the_boundary_and_what_stays_equal(nproc):
    """4 x 8 x 16 activations of 4 bytes, each way, for each micro-batch; and the tied gradient between the ends."""
    boundary, tied = 4 * 8 * 16 * 4, 64 * 16 * 4
    results = launch(one_step, nproc, (equality.tied, 3))
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


def test_untied_weights_are_not_added():
    for entries, tied, _ in launch(one_step, 2, (equality.frozen, 1)):
        assert tied is None and [e[0] for e in entries].count("all_reduce") == 1


def first_layers_frozen(model_class=GPT) -> nn.Module:
    model = equality.lively(model_class(layers=2, width=16, heads=4, context=8, vocabulary=64, tied=False))
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def tied_frozen(model_class=GPT) -> nn.Module:
    model = equality.tied(model_class)
    model.embedding.requires_grad_(False)
    return model


CASES = [equality.Case(make, equality.sgd, 3, 0.3) for make in (first_layers_frozen, tied_frozen)]


@pytest.mark.parametrize("nproc", [2, 4])
def test_frozen_layers_before_the_cut(nproc):
    """Nobody needs the gradient that comes back. Whoever sends it must find somebody who takes it."""
    equality.prove_class(by_hand.SplitLayers, nproc, "frozen", CASES)


def test_any_cut_is_right():
    class Uneven(by_hand.SplitLayers):
        def __init__(self, *args, **options):
            super().__init__(*args, **options, ends=(3, 4))

    def parts():
        strategy = Uneven(equality.tied(), equality.sgd, here())
        return [
            type(child).__name__ for child in [strategy.model.embedding, *strategy.model.blocks, strategy.model.head]
        ]

    assert launch(parts, 2) == [["Embedding", "Block", "Block", "Identity"], ["Identity"] * 3 + ["Head"]]
    equality.prove_class(Uneven, 2, "uneven", equality.CASES[:2])


def overflow():
    """fp16's loss scaling: the gradient of one rank alone is infinite. Scale, and whether the step was skipped."""
    strategy = by_hand.SplitLayers(equality.frozen(), equality.sgd, here(), precision="fp16")
    strategy.step(batches(1))
    before = [parameter.clone() for parameter in strategy.model.parameters()]
    scale = strategy.scaler.get_scale()
    if strategy.last:
        strategy.model.head.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    _, norm = strategy.step(batches(1))
    same = all(torch.equal(a, b) for a, b in zip(before, strategy.model.parameters(), strict=True))
    return same, strategy.scaler.get_scale() / scale, norm.isfinite().item()


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert launch(overflow, 2) == [(True, 0.5, False)] * 2


def checked():
    strategy = by_hand.SplitLayers(equality.tied(), equality.sgd, here())
    with CheckCollectives(timeout=20):
        return strategy.step(batches(2))[0].item()


def test_ranks_mean_the_same():
    first, *others = launch(checked, 4)
    assert others == [first] * 3


TEXT = {"layers": 2, "width": 32, "heads": 4, "context": 16, "batch_size": 12, "checkpoint_every": 2}


def train_all(configs):
    for config in configs:
        task = make_task(config)
        strategy = load(config.strategy, config.by_hand)(
            task.make_model(), task.make_optimizer, here(), config.precision
        )
        train(strategy, task, config, here())


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumed_on_another_number_of_ranks(optimizer, tmp_path):
    """From one process to four ranks, to two, to the devices of one process: as if it had never stopped."""

    def config(steps, strategy="model", hand=True, folder="parts", **more):
        options = TEXT | {"optimizer": optimizer, "steps": steps, "strategy": strategy, "by_hand": hand} | more
        return Config(**options, run_dir=str(tmp_path / folder))

    single = [config(8, "single", False, "whole"), config(2, "single", False)]
    launch(train_all, 1, (single,))
    launch(train_all, 4, ([config(4, resume=True)],))
    launch(train_all, 2, ([config(6, resume=True, accumulate=3)],))
    launch(train_all, 1, ([config(8, hand=False, resume=True)],))
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=2e-5)
    states = [torch.load(tmp_path / name / "checkpoint-000008.pt") for name in ("whole", "parts")]
    for whole, parts in zip(*(equality.flatten(state).items() for state in states), strict=True):
        assert whole[0] == parts[0]
        assert equality.difference(parts[1], whole[1]) < equality.TOLERANCE * 10, whole[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near(precision, tmp_path):
    both = [
        Config(**TEXT, steps=4, strategy="model", by_hand=True, precision=p, run_dir=str(tmp_path / p))
        for p in ("fp32", precision)
    ]
    launch(train_all, 2, (both,))
    full, half = (losses(tmp_path / p) for p in ("fp32", precision))
    assert half == pytest.approx(full, rel=0.01) and half != full


def to(layer, device):
    """Module.to for fake tensors, which it cannot move."""
    for parameter in layer.parameters():
        parameter.fake_device = device


def on_pretended_gpus():
    """Layers on two GPUs that are not there: where the parameters are, and the bytes moved by a forward and backward
    pass."""
    from course.data_parallel import fake_gpus as pretend
    from course.model_parallel import layers_on_devices as layers
    with pretend.pretend_gpus(2, equality.tied) as (devices, inside, meter):
        nn.Module.to = to  # this process ends here
        ranks = Ranks(0, 1, 0, devices[0])
        strategy = layers.LayersOnDevices(inside.model, equality.sgd, ranks, devices=devices)
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


def test_one_process_per_device_is_told_so(capsys):
    from course.model_parallel import layers_on_devices as layers
    assert layers.devices_of(Ranks(0, 1, 0, CPU)) == [CPU, CPU]
    assert "note: no two GPUs for the parts of the model" in capsys.readouterr().err


class Forgets(by_hand.SplitLayers):
    """Keeps whatever it had when it is told to load."""

    def load_full_state(self, state):
        pass


def loaded(strategy_class):
    strategy = strategy_class(equality.tied(), equality.adamw, here())
    strategy.step(batches(1))
    state = strategy.full_state()
    other = strategy_class(equality.tied(), equality.adamw, here())
    other.load_full_state(state)
    losses = [s.step(batches(2)[1:])[0].item() for s in (strategy, other)]
    return losses[0] == losses[1], torch.equal(
        strategy.model.head.out.weight, other.model.head.out.weight
    ) if strategy.last else None


def test_a_state_that_is_not_loaded_would_be_seen():
    assert launch(loaded, 2, (by_hand.SplitLayers,)) == [(True, None), (True, True)]
    assert launch(loaded, 2, (Forgets,)) == [(False, None), (False, False)]


def test_the_loss_is_that_of_the_whole_model():
    inputs, targets = batches(1)[0]

    def loss():
        torch.manual_seed(dist.get_rank())
        model = equality.tied()
        expected = cross_entropy(model(inputs), targets).item()
        return by_hand.SplitLayers(model, equality.sgd, here()).step([(inputs, targets)])[0].item(), expected

    (first, expected), (second, other) = launch(loss, 2)
    assert first == second == expected != other
