"""Options of fully_shard: meshes, models on the meta device, accumulation, offloading, recomputation."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from course.strategies import load
from torch import nn

from common.config import Config
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.ranks import Ranks
from common.task import Task, make_task
from course.fsdp import batch_size, memory
from course.fsdp import fsdp_setup as sharding
from course.fsdp.hsdp import SyncOnce


def here() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def micro_batches(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(equality.VOCABULARY, (count, 2, equality.CONTEXT + 1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


def meshes() -> dict:
    """Who reads what on a mesh, which part of an MLP's weight a rank holds, and what is sent in a step."""
    found = {}
    for name, mesh in (("hsdp", "2x2"), ("tensor+fsdp", "2x2"), ("hsdp", "4x1"), ("tensor+fsdp", "1x4")):
        torch.manual_seed(dist.get_rank())
        model = equality.tied()
        strategy = load(name, by_hand=False)(model, equality.sgd, here(), mesh=mesh)
        strategy.step(micro_batches())
        with Ledger() as ledger:
            strategy.step(micro_batches())
        weight = model.blocks[0].mlp.up.weight
        groups = {entry.ranks for entry in ledger.entries if entry.operation in ("all_gather", "reduce_scatter")}
        found[name, mesh] = strategy.data_rank, strategy.data_size, weight.to_local().numel() / weight.numel(), groups
    return found


def test_meshes():
    for rank, found in enumerate(launch(meshes, 4)):
        assert found == {
            ("hsdp", "2x2"): (rank, 4, 1 / 2, {2}),  # replicas double what each rank holds, and messages stay in a row
            ("tensor+fsdp", "2x2"): (rank // 2, 2, 1 / 4, {2}),
            ("hsdp", "4x1"): (rank, 4, 1, set()),  # what is whole on every rank is not gathered
            ("tensor+fsdp", "1x4"): (0, 1, 1 / 4, set()),
        }


def go_on(versions, state, make_optimizer=equality.adamw, precision="fp32") -> dict:
    """A step by each of these strategies, which hand on their state, and what the last one leaves on rank 0."""
    for number, (name, by_hand) in enumerate(versions):
        torch.manual_seed(number)
        batch = micro_batches()  # the same on every rank
        strategy = load(name, by_hand)(equality.frozen(), make_optimizer, here(), precision)
        if state:
            strategy.load_full_state(state)
        strategy.step(batch)
        state = strategy.full_state()
    return state


def test_states_are_handed_on_between_meshes():
    versions = [("hsdp", False), ("tensor+fsdp", False), ("fsdp", True), ("hsdp", False), ("tensor+fsdp", False)]
    four = equality.flatten(launch(go_on, 4, (versions, None))[0])
    alone = equality.flatten(launch(go_on, 1, ([("single", False)] * len(versions), None))[0])
    assert alone.keys() == four.keys()
    assert not {name for name in alone if equality.difference(four[name], alone[name]) > equality.TOLERANCE}


def test_mixed_precision_on_a_mesh():
    state = launch(go_on, 4, ([("tensor+fsdp", False)] * 2, None, equality.sgd, "bf16"))[0]
    alone = launch(go_on, 1, ([("single", False)] * 2, None, equality.sgd, "bf16"))[0]
    for name, tensor in alone["model"].items():
        assert state["model"][name].dtype is torch.float32
        assert equality.difference(state["model"][name], tensor) < 5e-2, name


def from_meta(strategy_class) -> dict:
    """Rank 0's model, on the others with shapes only."""
    torch.manual_seed(0)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = equality.tied()
        model.extra = nn.BatchNorm1d(2)  # it has buffers
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    strategy = strategy_class(model, equality.sgd, here())
    after = strategy.full_state()["model"]
    tied = strategy.model.head.out.weight is strategy.model.embedding.tokens.weight
    return before, after, tied


def test_a_model_on_the_meta_device():
    outcomes = launch(from_meta, 2, (load("fsdp", False),))
    before = outcomes[0][0]
    for _, after, tied in outcomes:
        assert tied and before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def accumulated(strategy_class) -> tuple:
    torch.manual_seed(0)
    strategy = strategy_class(equality.tied(), equality.sgd, here())
    batches = [micro_batches(3), micro_batches(3)]
    strategy.step(batches[0])
    with Ledger() as ledger, memory.Timeline(strategy) as timeline:
        strategy.step(batches[1])
    return ledger.calls, timeline.peak


def test_gradients_may_wait_for_the_last_micro_batch():
    """Three units: a reduce-scatter for each in every micro-batch, or in the last; until then gradients are whole."""
    assert len(equality.prove_class(SyncOnce, 2, "syncing once")) == len(equality.CASES)
    (often, small), (once, large) = (launch(accumulated, 2, (c,))[0] for c in (load("fsdp", False), SyncOnce))
    assert (often["reduce_scatter"], once["reduce_scatter"]) == (9, 3)
    assert often["all_gather"] == once["all_gather"]
    parameters = sum(p.numel() for p in equality.tied().parameters())
    assert large - small > 4 * parameters / 3  # the other rank's half too, though the peak need not be at the end


def trained(name: str, by_hand: bool, ways: list[dict]) -> list[tuple]:
    """For each way, which is options of the strategy and how much is recomputed: loss and norm of three steps, and the
    most that was alive in activations."""
    found = []
    for way in ways:
        config = Config(strategy=name, by_hand=by_hand, layers=3, width=16, context=64, **way)
        options = sharding.options(config)
        strategy = load(name, by_hand)(Task(None, config).make_model(), equality.adamw, here(), **options)
        torch.manual_seed(dist.get_rank())
        numbers = []
        for _ in range(3):
            tokens = torch.randint(256, (8, config.context + 1))
            with memory.Timeline(strategy) as timeline:
                numbers.append(torch.stack(strategy.step([(tokens[:, :-1], tokens[:, 1:])])))
        found.append((torch.stack(numbers), max(line["activations"] for line in timeline.bytes)))
    return found


@pytest.mark.parametrize("name, by_hand", [("single", False), ("ddp", True), ("fsdp", False), ("fsdp", True)])
def test_recomputation_changes_memory_and_nothing_else(name, by_hand):
    ways = [{"recompute": kind} for kind in recompute.KINDS]
    found = launch(trained, 1 if name == "single" else 2, (name, by_hand, ways))[0]
    for numbers, _ in found[1:]:
        torch.testing.assert_close(numbers, found[0][0], rtol=1e-6, atol=0)
    none, selective, full = (peak for _, peak in found)
    assert none > 1.2 * selective and selective > 1.2 * full


def test_offloading_changes_nothing():
    (offloaded, _), (expected, _) = launch(trained, 2, ("fsdp", False, [{"offload": True}, {}]))[0]
    assert torch.equal(offloaded, expected)


def test_offloading_without_enough_memory(monkeypatch):
    config = Config(strategy="fsdp", offload=True, layers=1, width=16, context=16)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Task(None, config).make_model().parameters())
    # Two ranks of two on this node offload all 16P bytes to it; two of four, half of that.
    monkeypatch.setattr(sharding.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * parameters))
    sharding.require_host_memory(config, 4, 2)
    with pytest.raises(
        UserError, match=r"^--offload: the shards of 2 rank\(s\), .* and 0\.0 are free; start more nodes"
    ):
        sharding.require_host_memory(config, 2, 2)


def measured(config: Config, examples: int) -> int:
    task = make_task(config)
    ranks = here()
    strategy = load(config.strategy, by_hand=False)(task.make_model(), task.make_optimizer, ranks, config.precision)
    for _ in range(2):
        batch = [task.dataset.batch(torch.arange(examples)) for _ in range(config.accumulate)]
        with memory.Timeline(strategy) as timeline:
            strategy.step(batch)
    return timeline.peak


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "zero2", "recompute": "full"},
        {"precision": "bf16", "accumulate": 2},
        {"recompute": "selective"},
    ],
)
def test_memory_is_foretold(options):
    """PyTorch's tracker, on fake tensors and one rank, against a count of what two ranks really hold."""
    config = Config(**({"strategy": "fsdp", "layers": 2, "width": 64, "context": 64} | options))
    foretold = batch_size.predict(config, 2, 6)
    assert foretold["Total"] == pytest.approx(launch(measured, 2, (config, 6))[0], rel=0.01)
    assert foretold["Activation"] > 0 and foretold["OptState"] > 0


def test_the_largest_batch(monkeypatch, capsys):
    """4 GiB, and 0.3 for each example."""
    asked = []
    monkeypatch.setattr(
        batch_size, "predict", lambda config, ranks, n: asked.append(n) or {"Total": (4 + 0.3 * n) * 2**30}
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    config = Config(strategy="fsdp", accumulate=2, find_batch_size=True, memory_budget=10.0)
    batch_size.find(config)
    assert capsys.readouterr().out == (
        "--batch-size 160: 20 example(s) x 2 micro-batch(es) x 4 rank(s), of which each takes 10.000 GiB of 10; "
        "--batch-size 168 would take 10.300\n"
    )
    assert max(asked) == 32  # and never far beyond the budget
    config.memory_budget = 4.2
    with pytest.raises(
        UserError, match=r"^--memory-budget 4.2: one example in a micro-batch takes 4.3 GiB on each of 4"
    ):
        batch_size.find(config)
    monkeypatch.setenv("RANK", "1")
    batch_size.find(config)
    assert capsys.readouterr().out == ""
