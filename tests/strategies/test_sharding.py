"""Options of fully_shard: meshes, models on the meta device, accumulation, offloading, recomputation."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from helpers import FULL, configure, refused
from pipelines import micro_batches
from torch import nn

from common.config import Config
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import in_order, make_mesh
from common.model import GPT
from common.recompute import RECOMPUTE
from common.strategy import Setup
from common.task import make_task
from course.fsdp import batch_size, fsdp_setup, memory
from course.fsdp.compare import pretend
from course.fsdp.hsdp import SyncOnce
from course.strategies import STRATEGIES, load


def make(kind, model: nn.Module, make_optimizer, axes=None, options=None, **kwargs):
    """A strategy, by default on the mesh of its preset, over all ranks there are."""
    return kind(model, make_optimizer, Setup(make_mesh(in_order(axes or kind.preset)), options, **kwargs))


MESHES = [
    ("hsdp", False, {"data": 2, "shard": 2}),
    ("hsdp", True, {"data": 2, "shard": 2}),
    ("tensor+fsdp", False, {"shard": 2, "tensor": 2}),
    ("hsdp", True, {"data": 4, "shard": 1}),
]


def meshes() -> list:
    """Who reads what on a mesh, which part of an MLP's weight a rank holds, and in which groups something is sent. (A
    step of tensor+fsdp takes seconds for DTensor's rules, and test_equality.py has it: here its parts alone.)"""
    found = []
    for name, by_hand, axes in MESHES:
        torch.manual_seed(dist.get_rank())
        strategy = make(load(name, by_hand), equality.tied(), equality.sgd, axes)
        with Ledger() as ledger:
            if name != "tensor+fsdp":
                strategy.step(micro_batches())
        name = "blocks.0.mlp.up.weight"
        shares = [part.tensor.numel() / torch.Size(part.where.shape).numel() for part in strategy.parts()]
        names = [part.name for part in strategy.parts()]
        gathered = [e for e in ledger.entries if e.operation in ("all_gather", "reduce_scatter")]
        groups = {entry.ranks for entry in gathered if entry.sent}
        held = dict(zip(names, shares, strict=True)).get(name, 0.0)
        found.append((strategy.data_rank, strategy.data_size, held, groups))
    return found


def test_meshes():
    outcomes = launch(meshes, 4)
    for rank, found in enumerate(outcomes):
        readers = [(own[0], own[1]) for own in found]
        assert readers == [(rank, 4), (rank, 4), (rank // 2, 2), (rank, 4)]
        # Messages stay in a row; what is whole on every rank is not gathered.
        assert [own[3] for own in found] == [{2}, {2}, set(), set()]
    held = [[own[number][2] for own in outcomes] for number in range(len(MESHES))]
    assert held[0] == [1 / 2] * 4 and held[2] == [1 / 4] * 4 and held[3] == [1] * 4
    assert held[1][:2] == held[1][2:] and sum(held[1]) == 2  # flat shards are cut anywhere; replicas hold the same


def from_meta(name: str, by_hand: bool) -> tuple:
    """Rank 0's model, on the others with shapes only."""
    torch.manual_seed(0)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = equality.tied()
        model.extra = nn.BatchNorm1d(2)  # it has buffers
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    strategy = make(load(name, by_hand), model, equality.sgd)
    frozen = [name for name, parameter in strategy.model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["blocks.0.mlp.up.weight"], "what is trained"
    own = sum(part.tensor.numel() for part in strategy.parts())
    tied = strategy.model.head.out.weight is strategy.model.embedding.tokens.weight
    return before, strategy.full_state(), tied, own


def test_a_model_on_the_meta_device():
    versions = [("fsdp", False), ("fsdp", True), ("zero1", False), ("zero1", True), ("hsdp", True)]
    found = launch(lambda: [from_meta(*who) for who in versions], 4, timeout=600)
    for who, outcomes in zip(versions, zip(*found, strict=True), strict=True):
        before, state, *_ = outcomes[0]
        assert state["model"].keys() == before.keys(), who
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in before.items()), who
        assert all(tied and own > 0 for _, _, tied, own in outcomes), who


def whole_during_a_step(tied: bool) -> dict:
    """Which of embedding and head are gathered while a block computes, forward: (number of elements in memory)."""
    model = equality.tied() if tied else equality.frozen()
    found = {}
    for by_hand in (False, True):
        strategy = make(load("fsdp", by_hand), equality.tied() if tied else equality.frozen(), equality.sgd)
        model, seen = strategy.model, []

        def look(*_, model=model, seen=seen):
            tensors = (model.embedding.tokens.weight, model.head.out.weight)
            seen.append([memory.storage(tensor).nbytes() >= 4 * tensor.numel() for tensor in tensors])

        model.blocks[1].mlp.register_forward_hook(look)
        strategy.step(micro_batches())
        found[by_hand] = seen[0]
    return found


def test_an_untied_embedding_is_not_gathered_while_blocks_compute():
    """By hand the head's unit is on its way when the last block computes: it is asked for ahead."""
    untied, tied = launch(lambda: [whole_during_a_step(tied) for tied in (False, True)], 2, timeout=600)[0]
    assert untied == {False: [False, False], True: [False, True]}
    assert tied == {False: [True, True], True: [True, True]}


def accumulated(strategy_class) -> tuple:
    torch.manual_seed(0)
    strategy = make(strategy_class, equality.tied(), equality.sgd)
    batches = [micro_batches(3), micro_batches(3)]
    strategy.step(batches[0])
    with Ledger() as ledger, memory.MemoryTimeline(strategy) as timeline:
        strategy.step(batches[1])
    return ledger.calls, timeline.peak


def test_gradients_may_wait_for_the_last_micro_batch():
    """Three units: a reduce-scatter for each in every micro-batch, or in the last; until then gradients are whole."""
    cases = equality.COVERING if FULL else equality.COVERING[1:2]
    assert len(equality.prove(SyncOnce, 2, cases=cases)) == len(cases)
    (often, small), (once, large) = launch(lambda: [accumulated(c) for c in (load("fsdp"), SyncOnce)], 2, timeout=600)[
        0
    ]
    assert (often["reduce_scatter"], once["reduce_scatter"]) == (9, 3)
    assert often["all_gather"] == once["all_gather"]
    parameters = sum(p.numel() for p in equality.tied().parameters())
    assert large - small > 4 * parameters / 3  # the other rank's half too, though the peak need not be at the end


def trained(name: str, by_hand: bool, ways: list[dict]) -> list[tuple]:
    """For each way, which is options of the strategy: loss and norm of two steps, and the most that was alive in
    activations in the second."""
    found, kind = [], load(name, by_hand)
    for way in ways:
        torch.manual_seed(0)
        strategy = make(kind, GPT(3, 16, 4, 64), equality.adamw, options=kind.Options(**way))
        torch.manual_seed(dist.get_rank())
        numbers = []
        for step in range(2):
            tokens = torch.randint(256, (8, 65))
            with memory.MemoryTimeline(strategy) if step else contextlib.nullcontext() as timeline:
                numbers.append(torch.stack(strategy.step([(tokens[:, :-1], tokens[:, 1:])])))
        found.append((torch.stack(numbers), max(line["activations"] for line in timeline.bytes)))
    return found


def recomputed(name: str, by_hand: bool) -> list[tuple]:
    """With each --recompute, and for PyTorch's fully_shard with --offload, too."""
    offload = [{"offload": True}] if (name, by_hand) == ("fsdp", False) else []
    return trained(name, by_hand, [*({"recompute": kind} for kind in RECOMPUTE), *offload])


@pytest.mark.parametrize("name, by_hand", [("single", False), ("fsdp", False), ("fsdp", True)])
def test_recomputation_and_offloading_change_memory_and_no_number(name, by_hand):
    found = launch(recomputed, 1 if name == "single" else 2, (name, by_hand))[0]
    for numbers, _ in found[1:]:  # of fully_shard by PyTorch, fused kernels round in another order
        torch.testing.assert_close(numbers, found[0][0], rtol=1e-5 if len(found) > 3 else 1e-6, atol=0)
    none, selective, full = (peak for _, peak in found[:3])
    peaks = f"activations with --recompute none {none:,}, selective {selective:,}, full {full:,} bytes"
    assert none > 1.2 * selective and selective > 1.2 * full, f"{peaks}: each should be a fifth more than the next"


def offloading(cores):
    """With so many cores: how the optimizer steps, by how many threads; what a checkpoint says of that, and what a run
    without offloading, or with it, does after it has read the other's."""
    fsdp_setup.os.sched_getaffinity = lambda _: set(range(cores))  # this process ends with the test
    kind = load("fsdp")
    one, other = (
        make(kind, equality.tied(), equality.adamw, options=kind.Options(offload=offload)) for offload in (True, False)
    )
    (group,), (plain,) = one.optimizer.param_groups, other.optimizer.param_groups
    threads, states = torch.get_num_threads(), (one.global_state(), other.global_state())
    one.load_global_state(states[1])
    other.load_global_state(states[0])
    return group["fused"], threads, states[0]["optimizer"]["fused"], bool(plain["fused"])


@pytest.mark.parametrize("cores, threads", [(1, 1), (9, 4)])
def test_the_host_steps_in_one_pass_with_its_share_of_the_cores(cores, threads):
    assert launch(offloading, 2, (cores,)) == [(True, threads, None, False)] * 2


def measured(config: Config, examples: int) -> int:
    task = make_task(config)
    kind = config.strategy_class
    strategy = kind(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
    batch = [task.dataset.batch(torch.arange(examples)) for _ in range(config.accumulation_steps)]
    strategy.step(batch)
    with memory.MemoryTimeline(strategy) as timeline:
        strategy.step(batch)
    return timeline.peak


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero2", "recompute": "full"},
        *[{"precision": "bf16", "accumulation_steps": 2, "recompute": "selective"}] * FULL,
    ],
)
def test_memory_is_foretold(options, tmp_path):
    """PyTorch's tracker, on fake tensors and one rank, against a count of what two ranks really hold. And ranks
    that are started afterwards train as ever: they inherit nothing of those that were not there."""
    settings = {"strategy": "fsdp", "layers": 2, "width": 64, "context": 64, "run_dir": tmp_path / "run"}
    config = configure(size=2, **(settings | options))
    foretold = batch_size.predict(config, 2, 6)
    assert foretold["Total"] == pytest.approx(launch(measured, 2, (config, 6))[0], rel=0.01)
    assert foretold["Activation"] > 0 and foretold["OptState"] > 0
    assert equality.prove(load("fsdp"), 2, cases=equality.COVERING[1:2])
    with pretend(2):
        make(load("fsdp"), equality.tied(), equality.adamw).step(micro_batches())
    assert equality.prove(load("fsdp"), 2, cases=equality.COVERING[1:2])


def test_the_largest_batch(monkeypatch, capsys):
    """4 GiB, and 0.3 for each example."""
    asked = []
    monkeypatch.setattr(
        batch_size, "predict", lambda config, ranks, n: asked.append(n) or {"Total": (4 + 0.3 * n) * 2**30}
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    config = configure("--find-batch-size", 4, strategy="fsdp", accumulation_steps=2, memory_budget=10.0)
    batch_size.find(config)
    found = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", capsys.readouterr().out)]
    assert {160, 20, 2, 4, 10, 168, 10.3} <= {*found}, "examples of all, of a rank; micro-batches, ranks; GiB; the next"
    assert max(asked) == 32  # and never far beyond the budget
    config.options.memory_budget = 4.2
    with refused("--memory-budget 4.2", "4.3 GiB", "4"):
        batch_size.find(config)
    monkeypatch.setenv("RANK", "1")
    batch_size.find(config)
    assert capsys.readouterr().out == ""
    options = {name: {*entry.declared(next(iter(entry.places))).names} for name, entry in STRATEGIES.items()}
    having = {STRATEGIES[name].main for name, names in options.items() if "find_batch_size" in names}
    assert having == {batch_size.main}, "whoever has the option does as it says"
    called = []
    monkeypatch.setattr(batch_size, "find", lambda config: called.append("find"))
    monkeypatch.setattr(batch_size.distributed_training, "main", lambda config: called.append("train"))
    for asked in (True, False):
        config.options.find_batch_size = asked
        batch_size.main(config)
    assert called == ["find", "train"], "--find-batch-size trains nothing"
