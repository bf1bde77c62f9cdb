"""Options of fully_shard: meshes, models on the meta device, accumulation, offloading, recomputation."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import configure, launcher
from torch import nn

from common import state as states
from common.config import Config
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, in_order, make_mesh
from common.model import GPT
from common.recompute import RECOMPUTE
from common.strategy import Setup
from common.task import make_task
from course.fsdp import batch_size, by_hand_zero1, by_hand_zero23, fsdp_setup, memory
from course.fsdp.hsdp import SyncOnce
from course.strategies import load


def make(kind, model: nn.Module, make_optimizer, axes=None, options=None, **kwargs):
    """A strategy, by default on the mesh of its preset, over all ranks there are."""
    return kind(model, make_optimizer, Setup(make_mesh(in_order(axes or kind.preset)), options, **kwargs))


def micro_batches(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(equality.VOCABULARY, (count, 2, equality.CONTEXT + 1))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


MESHES = [
    ("hsdp", False, {"data": 2, "shard": 2}),
    ("hsdp", True, {"data": 2, "shard": 2}),
    ("tensor+fsdp", False, {"shard": 2, "tensor": 2}),
    ("hsdp", False, {"data": 4, "shard": 1}),
    ("hsdp", True, {"data": 4, "shard": 1}),
    ("tensor+fsdp", False, {"shard": 1, "tensor": 4}),
]


def meshes() -> list:
    """Who reads what on a mesh, which part of an MLP's weight a rank holds, and in which groups something is sent."""
    found = []
    for name, by_hand, axes in MESHES:
        torch.manual_seed(dist.get_rank())
        strategy = make(load(name, by_hand), equality.tied(), equality.sgd, axes)
        with Ledger() as ledger:
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
        assert readers == [(rank, 4), (rank, 4), (rank // 2, 2), (rank, 4), (rank, 4), (0, 1)]
        # Messages stay in a row; what is whole on every rank is not gathered.
        assert [own[3] for own in found] == [{2}, {2}, {2}, set(), set(), set()]
    held = [[own[number][2] for own in outcomes] for number in range(len(MESHES))]
    assert (
        held[0] == [1 / 2] * 4 and held[2] == [1 / 4] * 4 and held[3] == held[4] == [1] * 4 and held[5] == [1 / 4] * 4
    )
    assert held[1][:2] == held[1][2:] and sum(held[1]) == 2  # flat shards are cut anywhere; replicas hold the same


def go_on(versions, state, make_optimizer=equality.adamw, precision="fp32") -> dict:
    """A step by each of these strategies, which hand on their state, and what the last one leaves on rank 0."""
    for number, (name, by_hand) in enumerate(versions):
        torch.manual_seed(number)
        batch = micro_batches()  # the same on every rank
        strategy = make(load(name, by_hand), equality.frozen(), make_optimizer, precision=precision)
        if state is not None:
            strategy.load_full_state(state)
        strategy.step(batch)
        state = strategy.full_state()
    return state


def test_states_are_handed_on_between_meshes():
    versions = [("hsdp", True), ("hsdp", False), ("tensor+fsdp", False), ("hsdp", True)]
    four = equality.flatten(launch(go_on, 4, (versions, None))[0])
    alone = equality.flatten(launch(go_on, 1, ([("single", False)] * len(versions), None))[0])
    assert alone.keys() == four.keys()
    assert not {name for name in alone if equality.difference(four[name], alone[name]) > equality.TOLERANCE}


@pytest.mark.parametrize("name, by_hand", [("tensor+fsdp", False), ("hsdp", True)])
def test_mixed_precision_on_a_mesh(name, by_hand):
    state = launch(go_on, 4, ([(name, by_hand)] * 2, None, equality.sgd, "bf16"))[0]
    alone = launch(go_on, 1, ([("single", False)] * 2, None, equality.sgd, "bf16"))[0]
    for parameter, tensor in alone["model"].items():
        assert state["model"][parameter].dtype is torch.float32
        assert equality.difference(state["model"][parameter], tensor) < 5e-2, parameter


def cut_by_tensor() -> tuple[bool, int]:
    """A layer of which each rank along "tensor" has some rows, in flat shards along "shard": are its parts, put
    together, the whole layer? And how many elements does this rank hold?"""
    mesh = make_mesh({"shard": 2, "tensor": 2})
    rows, shards = axis(mesh, "tensor"), axis(mesh, "shard")
    whole = nn.Linear(3, 10)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(30.0).view(10, 3))
        whole.bias.copy_(torch.arange(10.0))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(2, 2))
    model[0].weight.data, model[0].bias.data = (t.detach().chunk(2)[rows.rank].clone() for t in whole.parameters())
    cut = {model[0].weight: (0, rows), model[0].bias: (0, rows)}
    flats = [flat for _, unit in by_hand_zero23.units_of(model, shards) for flat in unit.flats]
    parts = by_hand_zero1.parts_of(model, flats, lambda parameter: states.where_of(parameter, cut))
    full = states.gather(parts, {})["model"]
    together = not full or (torch.equal(full["0.weight"], whole.weight) and torch.equal(full["0.bias"], whole.bias))
    return together, sum(part.tensor.numel() for part in parts if part.name.startswith("0."))


def test_units_of_parameters_that_are_cut_by_tensor_parallelism():
    outcomes = launch(cut_by_tensor, 4)
    assert [together for together, _ in outcomes] == [True] * 4
    assert sum(held for _, held in outcomes) == 40


def from_meta(name: str, by_hand: bool) -> tuple:
    """Rank 0's model, on the others with shapes only."""
    torch.manual_seed(0)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = equality.tied()
        model.extra = nn.BatchNorm1d(2)  # it has buffers
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    strategy = make(load(name, by_hand), model, equality.sgd)
    own = sum(part.tensor.numel() for part in strategy.parts())
    tied = strategy.model.head.out.weight is strategy.model.embedding.tokens.weight
    return before, strategy.full_state(), tied, own


@pytest.mark.parametrize(
    "name, by_hand", [("fsdp", False), ("fsdp", True), ("zero1", False), ("zero1", True), ("hsdp", True)]
)
def test_a_model_on_the_meta_device(name, by_hand):
    outcomes = launch(from_meta, 4, (name, by_hand))
    before, state, *_ = outcomes[0]
    assert state["model"].keys() == before.keys()
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in before.items())
    assert all(tied and own > 0 for _, _, tied, own in outcomes)


def test_a_parameter_without_memory_is_trained_or_frozen_as_before(monkeypatch):
    sent = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, group, group_src: sent.append((tensor.shape, group_src)))
    with torch.device("meta"):
        unit = nn.BatchNorm1d(3)
        unit.bias.requires_grad_(False)
    fsdp_setup.materialise(unit, torch.device("cpu"), "everyone")
    trained = {name: tensor.requires_grad for name, tensor in unit.named_parameters()}
    assert trained == {"weight": True, "bias": False}, "which parameters are trained"
    assert {tensor.device.type for tensor in unit.state_dict().values()} == {"cpu"}
    assert sent == [((3,), 0)] * 4 + [((), 0)] and type(unit.weight) is nn.Parameter, "of each tensor rank 0's values"


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
    assert launch(whole_during_a_step, 2, (False,))[0] == {False: [False, False], True: [False, True]}
    assert launch(whole_during_a_step, 2, (True,))[0] == {False: [True, True], True: [True, True]}


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
    assert len(equality.prove(SyncOnce, 2, cases=equality.COVERING)) == len(equality.COVERING)
    (often, small), (once, large) = (launch(accumulated, 2, (c,))[0] for c in (load("fsdp"), SyncOnce))
    assert (often["reduce_scatter"], once["reduce_scatter"]) == (9, 3)
    assert often["all_gather"] == once["all_gather"]
    parameters = sum(p.numel() for p in equality.tied().parameters())
    assert large - small > 4 * parameters / 3  # the other rank's half too, though the peak need not be at the end


class WithDropout(GPT):
    """A GPT that draws random numbers in its blocks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for block in self.blocks:
            block.mlp.down = nn.Sequential(block.mlp.down, nn.Dropout(0.5))


def trained(name: str, by_hand: bool, ways: list[dict], model_class=GPT) -> list[tuple]:
    """For each way, which is options of the strategy: loss and norm of two steps, and the most that was alive in
    activations."""
    found, kind = [], load(name, by_hand)
    for way in ways:
        torch.manual_seed(0)
        strategy = make(kind, model_class(3, 16, 4, 64), equality.adamw, options=kind.Options(**way))
        torch.manual_seed(dist.get_rank())
        numbers = []
        for _ in range(2):
            tokens = torch.randint(256, (8, 65))
            with memory.MemoryTimeline(strategy) as timeline:
                numbers.append(torch.stack(strategy.step([(tokens[:, :-1], tokens[:, 1:])])))
        found.append((torch.stack(numbers), max(line["activations"] for line in timeline.bytes)))
    return found


@pytest.mark.parametrize("name, by_hand", [("single", False), ("ddp", True), ("fsdp", False), ("fsdp", True)])
def test_recomputation_changes_memory_and_nothing_else(name, by_hand):
    ways = [{"recompute": kind} for kind in RECOMPUTE]
    found = launch(trained, 1 if name == "single" else 2, (name, by_hand, ways))[0]
    for numbers, _ in found[1:]:
        torch.testing.assert_close(numbers, found[0][0], rtol=1e-6, atol=0)
    none, selective, full = (peak for _, peak in found)
    peaks = f"activations with --recompute none {none:,}, selective {selective:,}, full {full:,} bytes"
    assert none > 1.2 * selective and selective > 1.2 * full, f"{peaks}: each should be a fifth more than the next"


@pytest.mark.parametrize("name, by_hand", [("fsdp", False), ("fsdp", True), ("zero2", True), ("zero1", True)])
def test_recomputation_drops_the_same_elements(name, by_hand):
    ways = [{"recompute": kind} for kind in RECOMPUTE]
    found = [numbers for numbers, _ in launch(trained, 2, (name, by_hand, ways, WithDropout))[0]]
    for numbers in found[1:]:
        torch.testing.assert_close(numbers, found[0], rtol=1e-5, atol=0)


def test_offloading_changes_nothing():
    (offloaded, _), (expected, _) = launch(trained, 2, ("fsdp", False, [{"offload": True}, {}]))[0]
    assert torch.equal(offloaded, expected), f"losses and norms {offloaded.tolist()}, without {expected.tolist()}"


def test_offloading_without_enough_memory(monkeypatch):
    small = {"layers": 1, "width": 16, "context": 16}
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(1, 16, 4, 16).parameters())
    # Two ranks of two on this node offload all 16P bytes to it; two of four, half of that.
    free = SimpleNamespace(available=8 * parameters)
    monkeypatch.setattr(fsdp_setup.psutil, "virtual_memory", lambda: free)
    config = configure(strategy="fsdp", **small)
    config.options.offload = True
    with launcher(0, 4, 2):
        fsdp_setup.require_memory_options(config, {"shard": 4})
    with (
        launcher(0, 2),
        pytest.raises(
            UserError, match=r"^--offload: the shards of 2 rank\(s\), .* and 0\.0 are free; start more nodes"
        ),
    ):
        fsdp_setup.require_memory_options(config, {"shard": 2})


@pytest.mark.parametrize(
    "line, why",
    [
        ("--strategy fsdp --memory-budget 1", "--memory-budget is what --find-batch-size stops at; add that, or"),
        ("--strategy zero2 --find-batch-size", "--find-batch-size: --memory-budget 0.0 should be the GiB of a rank"),
        ("--strategy fsdp --find-batch-size --offload", "--find-batch-size is for PyTorch's fsdp and zero2, not for "),
        ("--strategy zero1 --offload", "--offload is an option of .*fsdp.*, not of 'zero1'"),
        ("--strategy fsdp --by-hand --offload", "--offload is an option of .*fsdp.*, not of 'fsdp' by hand"),
        ("--strategy hsdp --find-batch-size", "--find-batch-size is an option of zero2 .*, not of 'hsdp'"),
        (
            "--strategy fsdp --task images --recompute full",
            "--recompute full is for the GPT's blocks, not for --task im",
        ),
        ("--strategy tensor+fsdp --heads 3 --width 96", ".*heads"),
        (
            "--strategy tensor+fsdp --task images",
            "--task images: strategy 'tensor\\+fsdp' divides a GPT; use --task text",
        ),
        ("--strategy hsdp --mesh data=3,shard=2", "--mesh data=3,shard=2 is 6 rank"),
        ("--strategy hsdp --mesh tensor=2", "--mesh tensor=2: strategy 'hsdp' has axes data, shard, not 'tensor'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(line, why, tmp_path):
    with pytest.raises(UserError, match=f"^{why}") as refusal:
        configure(line, size=4, run_dir=str(tmp_path / "run"))
    assert "\n" not in str(refusal.value)


def measured(config: Config, examples: int) -> int:
    task = make_task(config)
    kind = config.strategy_class
    strategy = kind(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
    for _ in range(2):
        batch = [task.dataset.batch(torch.arange(examples)) for _ in range(config.accumulation_steps)]
        with memory.MemoryTimeline(strategy) as timeline:
            strategy.step(batch)
    return timeline.peak


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "zero2", "recompute": "full"},
        {"precision": "bf16", "accumulation_steps": 2},
        {"recompute": "selective"},
    ],
)
def test_memory_is_foretold(options, tmp_path):
    """PyTorch's tracker, on fake tensors and one rank, against a count of what two ranks really hold."""
    settings = {"strategy": "fsdp", "layers": 2, "width": 64, "context": 64, "run_dir": tmp_path / "run"}
    config = configure(size=2, **(settings | options))
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
    config = configure("--find-batch-size", 4, strategy="fsdp", accumulation_steps=2, memory_budget=10.0)
    batch_size.find(config)
    assert capsys.readouterr().out == (
        "--batch-size 160: 20 example(s) x 2 micro-batch(es) x 4 rank(s), of which each takes 10.000 GiB of 10; "
        "--batch-size 168 would take 10.300\n"
    )
    assert max(asked) == 32  # and never far beyond the budget
    config.options.memory_budget = 4.2
    with pytest.raises(
        UserError, match=r"^--memory-budget 4.2: one example in a micro-batch takes 4.3 GiB on each of 4"
    ):
        batch_size.find(config)
    monkeypatch.setenv("RANK", "1")
    batch_size.find(config)
    assert capsys.readouterr().out == ""
    called = []
    monkeypatch.setattr(batch_size, "find", lambda config: called.append("find"))
    monkeypatch.setattr(batch_size.distributed_training, "main", lambda config: called.append("train"))
    for asked in (True, False):
        config.options.find_batch_size = asked
        batch_size.main(config)
    assert called == ["find", "train"], "--find-batch-size trains nothing"
