"""ZeRO by hand and PyTorch's: messages, memory, overlap, loss scaling, resumed runs, and what is refused."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from helpers import FULL
from pipelines import micro_batches
from proofs import Job, prove_all
from torch import nn

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.model import GPT
from common.strategy import Setup
from course.fsdp import compare, memory
from course.strategies import load

VERSIONS = [(name, by_hand) for name in ("zero1", "zero2", "fsdp") for by_hand in (False, True)]
STAGES = ("zero1", "zero2", "fsdp")
PRECISIONS = {"fp32": "float32", "bf16": "mixed, float32 gradients"}  # of the stages by hand, in memory.formula


def make(name: str, by_hand: bool, model: nn.Module, make_optimizer, mesh=None, **kwargs):
    """A strategy, by default on the mesh of its preset, over all ranks there are."""
    kind = load(name, by_hand)
    return kind(model, make_optimizer, Setup(mesh or make_mesh(kind.preset), **kwargs))


def padded(numel: int, size: int) -> int:
    return -(-numel // size) * size


def sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(trained, frozen) elements of embedding, blocks and head; a tied weight is the embedding's."""
    parts = {"embedding": model.embedding, **dict(model.blocks.named_children()), "head": model.head}
    seen, counted = set(), {}
    for name, part in parts.items():
        own = [p for p in part.parameters() if p not in seen]
        seen.update(own)
        counted[name] = tuple(sum(p.numel() for p in own if p.requires_grad is kind) for kind in (True, False))
    return counted


def counted_steps(tied: bool, accumulate: int) -> dict:
    counted = {}
    for name in STAGES:
        model = equality.tied() if tied else equality.frozen()
        counted["sizes"] = sizes(model)
        strategy = make(name, True, model, equality.sgd)
        if name == "zero2":
            counted["buckets"] = [flat.length for flat in strategy.trained]
        strategy.step(micro_batches())
        with Ledger() as ledger:
            strategy.step(micro_batches(accumulate))
        small = [entry for entry in ledger.entries if entry.operation == "all_reduce"]
        counted[name] = ledger.calls, ledger.sent - sum(entry.sent for entry in small), [e.payload for e in small]
    return counted


@pytest.mark.parametrize(
    "nproc, accumulate, tied", [(2, 1, True), (4, 3, False), *([(2, 1, False), (4, 3, True)] if FULL else [])]
)
def test_volume_is_2p_2p_3p(tied, nproc, accumulate):
    """Bytes that a rank sends, by the formulas of Rajbhandari et al., section 7; P with its padding."""
    share = 4 * (nproc - 1) / nproc  # of the bytes of float32
    for counted in launch(counted_steps, nproc, (tied, accumulate)):
        trained = padded(sum(own for own, _ in counted["sizes"].values()), nproc)
        assert counted["zero1"] == (
            {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1},
            share * 2 * trained,
            [4, 4],
        )

        buckets = sum(padded(length, nproc) for length in counted["buckets"])
        assert sum(counted["buckets"]) == sum(trained for trained, _ in counted["sizes"].values())
        calls = {"all_reduce": 2, "reduce_scatter": accumulate * len(counted["buckets"])}
        calls["all_gather"] = len(counted["buckets"])
        assert counted["zero2"] == (calls, share * (1 + accumulate) * buckets, [4, 4])

        units = dict(counted["sizes"])
        last = "head"
        if tied:  # one unit of embedding and head
            units["embedding"] = tuple(map(sum, zip(units["embedding"], units.pop("head"), strict=True)))
            last = "embedding"
        gathered = reduced = volume = 0
        for name, (trained, frozen) in units.items():
            times = 1 if name == last else 2  # the backward pass begins with the last unit, which is not freed between
            gathered += times * ((trained > 0) + (frozen > 0))
            reduced += trained > 0
            volume += times * (padded(trained, nproc) + padded(frozen, nproc)) + padded(trained, nproc)
        calls = {"all_reduce": 2, "all_gather": accumulate * gathered, "reduce_scatter": accumulate * reduced}
        assert counted["fsdp"] == (calls, share * accumulate * volume, [4, 4])


def memory_between_steps(precision: str) -> dict:
    """What is counted with each strategy by hand after its first two steps, by kind, and the lengths of its vectors."""
    counted, mesh = {}, make_mesh({"shard": -1})
    for name in STAGES:
        batches = [micro_batches(), micro_batches(3)]
        known = memory.live()
        model = equality.tied()
        strategy = make(name, True, model, equality.adamw, mesh, precision=precision)
        for batch in batches:
            strategy.step(batch)
        counted[name] = memory.held(strategy, known), [len(flat.vector) for flat in strategy.flats]
        assert memory.held(strategy, memory.live()) == counted[name][0] | {"other": 0}, "its own, wherever it lies"
        del model, strategy
    return counted


@pytest.mark.parametrize(
    "nproc, precision",
    [(2, "fp32"), (4, "bf16"), *([(1, "fp32"), (1, "bf16"), (2, "bf16"), (4, "fp32")] if FULL else [])],
)
def test_memory_between_steps(nproc, precision):
    """Live tensors against the formulas of Rajbhandari et al., section 5, in mixed precision and in float32; but what
    gradients add up to is float32 here in both."""
    for counted in launch(memory_between_steps, nproc, (precision,)):
        for name, (held, vectors) in counted.items():
            expected = memory.formula(name, sum(vectors), nproc, PRECISIONS[precision])
            expected["optimizer"] += 4 * len(vectors)  # AdamW counts its steps: one number for each vector
            assert held == expected | {"other": 0}, name


def test_sizes_that_do_not_divide():
    """3 ranks cut nothing here without padding."""
    cases = [case for case in equality.COVERING if case.accumulate == 1]
    prove_all([Job(name, load(name, "by-hand"), cases if FULL else cases[:2]) for name in STAGES], 3)
    flats = launch(lambda: [make(name, True, equality.tied(), equality.sgd).flats[0].length for name in STAGES], 3)
    assert all(length % 3 for length in flats[0])


class Known(torch.autograd.Function):
    """A linear layer whose weight's gradient is 1 in the first micro-batch of rank 0, and 1/1024 in all others."""

    first = True

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (weight,), large = ctx.saved_tensors, Known.first and dist.get_rank() == 0
        Known.first = False
        return gradient.to(weight.dtype) @ weight, torch.full_like(weight, 1 if large else 1 / 1024)


class Head(nn.Linear):
    def forward(self, x):
        return Known.apply(x, self.weight.to(x.dtype))


def small_gradients(name: str, by_hand: bool) -> torch.Tensor:
    """How far a step of SGD moves a weight whose gradient is small but for one rank's first micro-batch of nine."""
    model, weight, Known.first = equality.frozen(), "head.out.weight", True
    model.head.out = Head(*reversed(model.head.out.weight.shape), bias=False)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
    strategy = make(name, by_hand, model, sgd, precision="bf16", max_norm=1e9)
    before = {**strategy.full_state().get("model", {})}.get(weight, torch.empty(0)).clone()
    strategy.step(micro_batches(9))
    return before - strategy.full_state().get("model", {}).get(weight, torch.empty(0))


def test_micro_batches_and_ranks_are_added_up_in_float32():
    """1/1024 is less than half of what 16 bits tell apart at 1: rounded to bf16 on the way, small gradients would leave
    no trace in the sum."""
    for step in launch(lambda: [small_gradients(*who) for who in VERSIONS], 2, timeout=600)[0]:
        torch.testing.assert_close(step, torch.full_like(step, (1 + 17 / 1024) / 2), rtol=1e-6, atol=1e-6)


def zero2_buckets() -> list[int]:
    """Bytes of the gradients that each reduce-scatter of a step of ZeRO-2 by hand takes, for 840,960 parameters."""
    strategy = load("zero2", True)(GPT(4, 128, 4, 16), equality.sgd, Setup(make_mesh({"shard": -1})))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with Ledger() as ledger:
        strategy.step([(tokens, tokens)])
    return [entry.payload for entry in ledger.entries if entry.operation == "reduce_scatter"]


def test_zero2_reduces_bucket_by_bucket():
    """A bucket ends with the parameter that makes it 1 MiB or more. From the head backwards: one of two blocks' second
    half and what is between, ..., so three of them; in one bucket all gradients would be whole at once."""
    for buckets in launch(zero2_buckets, 2):
        assert len(buckets) >= 3, f"{len(buckets)} bucket(s): nothing is sent before the backward pass is over"
        assert all(2**20 <= size < 2 * 2**20 for size in buckets[:-1]) and buckets[-1] < 2 * 2**20


def test_formulas_of_the_paper():
    """Section 1: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    sums = [sum(memory.formula(name, 7_500_000_000, 64, "mixed").values()) for name in ("ddp", *STAGES)]
    assert [round(size / 1e9, 1) for size in sums] == [120.0, 31.4, 16.6, 1.9]


def timelines() -> dict:
    """A step as a timeline of memory, and what is held after it."""
    found, mesh = {}, make_mesh({"shard": -1})
    for name, by_hand in [("zero1", True), ("zero2", True), ("fsdp", True), ("fsdp", False)]:
        batches, known = [micro_batches() for _ in range(3)], memory.live()
        model = equality.tied()
        strategy = make(name, by_hand, model, equality.adamw, mesh)
        for batch in batches[:2]:
            strategy.step(batch)
        with memory.MemoryTimeline(strategy) as timeline:
            strategy.step(batches[2])
        found[name, by_hand] = timeline.bytes, memory.held(strategy, known), timeline.peak
        del model, strategy, timeline
    return found


def test_timeline_of_memory():
    for found in launch(timelines, 2):
        for who, (lines, held, peak) in found.items():
            kept = {kind: held[kind] for kind in ("parameters", "optimizer")}
            assert not [line for line in lines if line | kept != line], f"{who}: always there are {kept}"
            assert lines[-1]["gradients"] == held["gradients"] and peak == max(sum(line.values()) for line in lines)
            assert max(line["activations"] for line in lines) > 0
        model = equality.tied()
        units = [4 * padded(sum(sizes(model)[name]), 2) for name in ("0", "1")]
        units.append(4 * padded(sum(sizes(model)[name][0] for name in ("embedding", "head")), 2))
        # gathered: all units, since there are three only; a gradient of two units, and two shards of that
        for by_hand in (True, False):
            buffers = max(line["buffers"] for line in found["fsdp", by_hand][0])
            assert sum(units) <= buffers <= 2.5 * sum(units), f"by_hand {by_hand}: {buffers} of {sum(units)}"


class SendsGradients:
    """Sums each gradient over the ranks where autograd has left it, and keeps none."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.optimizer, self.at_the_end = torch.optim.SGD(self.model.parameters(), lr=0.1), 0

    def step(self, timeline):
        self.model(torch.ones(2, 64)).sum().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.at_the_end = len(timeline.sizes)
        self.optimizer.zero_grad()


def gradients_that_are_sent() -> tuple[dict, int]:
    strategy = SendsGradients()
    with memory.MemoryTimeline(strategy) as timeline:
        strategy.step(timeline)
        torch.zeros(1) + 1  # a line without them
    return timeline.bytes[strategy.at_the_end - 1], timeline.bytes[-1]["gradients"]


def test_gradients_in_a_message_are_gradients_still():
    """4 bytes for each parameter when the backward pass is over, and of no other kind."""
    for line, after in launch(gradients_that_are_sent, 2):
        assert (line["gradients"], line["buffers"], after) == (4 * 2 * (64 * 64 + 64), 0, 0)


def test_the_first_backward_pass_of_a_step_begins_before_there_are_gradients():
    strategy = SendsGradients()

    def step():
        strategy.optimizer.zero_grad()
        for _ in range(3):
            strategy.model(torch.ones(2, 64)).sum().backward()
        strategy.optimizer.step()

    lines, backward, stepping = memory.over_a_step(strategy, step)
    first = next(number for number, line in enumerate(lines) if line["gradients"])
    assert 0 < backward <= first < stepping < len(lines), "operators before each of these"


def test_gradients_that_nobody_has_looked_at_are_alive():
    layer = torch.nn.Linear(64, 64)
    before = memory.live()
    layer(torch.ones(2, 64)).sum().backward()
    assert sum(size for place, size in memory.live().items() if place not in before) == 4 * (64 * 64 + 64)


def go_on(versions, begin, state) -> list[dict]:
    """A step by each of these strategies, which hand on their state; what each leaves on rank 0."""
    torch.manual_seed(0)
    batches = [micro_batches() for _ in range(begin + len(versions))][begin:]  # the same on every rank
    states = []
    for number, (batch, (name, by_hand)) in enumerate(zip(batches, versions, strict=True), start=begin):
        torch.manual_seed(1 + number)  # begins with other weights, frozen ones too, than those that it takes up
        strategy = make(name, by_hand, equality.frozen(), equality.adamw, max_norm=float("inf"))
        if state is not None:
            strategy.step(micro_batches())  # something to be overwritten
            strategy.load_full_state(state)
        strategy.step(batch)
        state = strategy.full_state()
        states.append(state)
    return states


def test_states_are_handed_on(tmp_path):
    """From version to version and from 2 ranks to 4, against one process alone: bit for bit, since all ranks read the
    same batch, and the mean of equal gradients is one of them. (Their norms are rounded in another order, so nothing is
    clipped.) Once in thousands of runs the third differed by a hundredth: then all tensors are in a file."""
    versions = [("ddp", True), *VERSIONS, ("single", False)]
    two = launch(go_on, 2, (versions[:5], 0, None))[0]
    four = launch(go_on, 4, (versions[5:], 5, two[-1]))[0]
    alone = launch(go_on, 1, ([("single", False)] * len(versions), 0, None))[0]
    found, expected = ([equality.flatten(state) for state in states] for states in (two + four, alone))
    for number, (version, state, right) in enumerate(zip(versions, found, expected, strict=True)):
        assert state.keys() == right.keys(), version
        wrong = {name: equality.difference(state[name], tensor) for name, tensor in right.items()}
        wrong = {name: float(difference) for name, difference in wrong.items() if difference}
        if wrong:
            torch.save({"versions": versions, "found": found, "expected": expected}, tmp_path / "states.pt")
        kept = f"all of them are in {tmp_path / 'states.pt'}"
        assert not wrong, (
            f"after the step of {version}, number {number}, which took up the state of the one before; {kept}"
        )


# --- what pages compare with ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", compare.OPTIMIZERS)
def test_pages_compare_with_one_process(case):
    make_optimizer, max_norm = compare.OPTIMIZERS[case]

    def alone():
        model, batch = compare.make_model(tied=False), [(compare.TOKENS[:, :-1], compare.TOKENS[:, 1:])]
        strategy = make("single", False, model, make_optimizer, max_norm=max_norm)
        return [float(strategy.step(batch)[0]) for _ in range(3)], compare.flat_parameters(model)

    ((losses, parameters),) = launch(alone, 1)
    found = compare.train_alone(make_optimizer, 3, max_norm, tied=False)
    assert found[0] == losses and torch.equal(found[1], parameters) and losses[0] != losses[2]


def test_pages_refuse_what_differs_on_any_rank_in_any_case(monkeypatch, capsys):
    monkeypatch.setattr(compare, "train_alone", functools.cache(compare.train_alone))
    start = compare.train_alone(compare.sgd, 0, tied=False)[1]
    for wrong, factor in itertools.product(itertools.product(range(2), range(3)), (0.5, 1.5)):
        ranks = [[compare.train_alone(how, 3, norm, tied=False)[1].clone() for how, norm in compare.OPTIMIZERS.values()]
                 for _ in range(2)]  # fmt: skip
        off = ranks[wrong[0]][wrong[1]]
        off[77] += factor * 1e-3 * (off - start).abs().max()
        monkeypatch.setattr(compare, "launch", lambda function, nproc, ranks=ranks: ranks)
        with pytest.raises(AssertionError) if factor > 1 else contextlib.nullcontext():
            compare.compare(SendsGradients, worlds=(2,))
    for row, right in (((16, 4, 4), True), ((18, 4, 4), False), ((16, 4.2, 4), False), ((16, 4, 4.2), False)):
        monkeypatch.setattr(compare, "launch", lambda function, nproc, row=row: [[row]])
        with contextlib.nullcontext() if right else pytest.raises(AssertionError, match="as it is"):
            compare.print_kept_and_sent({"as it is": ("ddp", "ddp")})
