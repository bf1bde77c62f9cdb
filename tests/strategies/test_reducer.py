"""The reducer of chapter 03: bit by bit what DistributedDataParallel computes, and clear about what it cannot."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_waits import Copies
from helpers import FULL, code_of_page, definitions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.errors import UserError
from common.lab import equality
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.model import GPT, cross_entropy
from common.strategy import Setup
from course.ddp import by_hand, distributed_training, first_buckets

CAP = 0.02  # MiB: a few buckets for a small model
VERSIONS = {"pytorch": distributed_training.DDP, "by hand": by_hand.DDPByHand}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=32, heads=2, context=16)


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def backward(model, tokens) -> None:
    cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()


def own_tokens(steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(256, (steps, 4, 17), generator=generator)


def order_of_arrival(model) -> list[nn.Parameter]:
    order = []
    hooks = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    backward(model, torch.zeros(1, 17, dtype=torch.int64))
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return order


def both_ways(in_place: bool, accumulate: int, options: dict) -> tuple[list[int], str, list[int]]:
    """How many gradients differ in each step; and the bytes of the buckets, PyTorch's and ours."""
    torchs, ours = gpt(), gpt()
    parallel = DistributedDataParallel(torchs, bucket_cap_mb=CAP, **options)
    order = order_of_arrival(ours)
    reducer = by_hand.Reducer(ours, world(), order=order, bucket_mb=CAP)
    different = []
    for tokens in own_tokens(steps=4):
        torchs.zero_grad()
        (reducer if in_place else ours).zero_grad()
        *first, last = tokens.chunk(accumulate)
        with parallel.no_sync(), reducer.no_sync():
            for part in first:
                backward(parallel, part)
                backward(ours, part)
        backward(parallel, last)
        backward(ours, last)
        reducer.finish()
        assert all(p.grad is reducer.views[index] for index, p in enumerate(reducer.parameters))
        pairs = zip(torchs.parameters(), ours.parameters(), strict=True)
        different.append(sum(not torch.equal(one.grad, other.grad) for one, other in pairs))
    sizes = parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return different, sizes, [flat.numel() * flat.element_size() for flat in reducer.flat]


WAYS = [(True, 1), (True, 2), (False, 2)]
SIZES = (
    [(nproc, *way) for nproc in (2, 3, 4) for way in WAYS] if FULL else [(2, *WAYS[0]), (3, *WAYS[2]), (4, *WAYS[1])]
)


@pytest.mark.parametrize("nproc, in_place, accumulate", SIZES)
def test_gradients_are_pytorchs_bit_by_bit(nproc, in_place, accumulate):
    """From its second step on: before, DistributedDataParallel has one bucket, and orders the sums by that. So also
    where something else than the reducer sets gradients to None."""
    options = {"gradient_as_bucket_view": in_place}
    for different, torchs, ours in launch(both_ways, nproc, (in_place, accumulate, options)):
        assert different[1:] == [0, 0, 0], (
            f"how many of {len(list(gpt().parameters()))} gradients differ from DDP's, step by step"
        )
        assert torchs == ", ".join(map(str, ours)) and len(ours) > 2
        if nproc == 2:  # a sum of two has only one order
            assert different[0] == 0


class Branches(nn.Module):
    """Only one of two layers is used, as the caller says; a third never is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, branch):
        return self.layers[branch](x)


def branch_by_rank(in_place: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = Branches()
    each = 1e-6  # MiB: a bucket for each layer, complete in another order on each rank
    reducer = by_hand.Reducer(model, world(), bucket_mb=each, find_unused=True)
    for step in range(2):
        (reducer if in_place else model).zero_grad()
        model(torch.ones(1, 4), (dist.get_rank() + step) % 2).sum().backward()
        reducer.finish()
    return [layer.weight.grad for layer in model.layers]


def reads_of_unused_flags() -> int:
    model = nn.Linear(4, 4)
    reducer = by_hand.Reducer(model, world(), find_unused=True)
    reducer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with Copies() as copies:
        reducer.finish()
    return len(copies.found)


def test_who_has_used_all_parameters_does_not_wait_for_the_gpu():
    assert launch(reads_of_unused_flags, 2) == [0, 0]


@pytest.mark.parametrize("in_place", [False, True])
def test_unused_parameters(in_place):
    """Each of two layers gets a gradient of ones from one rank of two: on average one half. The third gets none."""
    for gradients in launch(branch_by_rank, 2, (in_place,)):
        found = [None if gradient is None else gradient.unique().tolist() for gradient in gradients]
        assert found == [[0.5], [0.5], None], "the layers' gradients; with zeros in place of None, momentum would go on"


class Sometimes(nn.Module):
    """Tokens [batch, time] -> logits. An example whose first token is below 8 goes through a branch, too: so one
    process, with the whole batch, always uses the branch, and a micro-batch need not."""

    def __init__(self):
        super().__init__()
        self.embedding, self.branch, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if (tokens[:, 0] < 8).any():
            pairs = zip(tokens, x, strict=True)
            x = torch.stack([part + self.branch(part) if own[0] < 8 else part for own, part in pairs])
        return self.head(x)


# For each of two ranks: does its first, does its second micro-batch use the branch?
PATTERNS = {
    "in the first on rank 0, in the last on rank 1": ((True, False), (False, True)),
    "in the first alone": ((True, False), (True, False)),
    "in the first on rank 0, never on rank 1": ((True, False), (False, False)),
    "in the last alone": ((False, True), (False, True)),
    "always": ((True, True), (True, True)),
    "never": ((False, False), (False, False)),
}
LEFT_OUT = [name for name, pattern in PATTERNS.items() if not all(last for *_, last in pattern)]


def micro_batches(rank: int, pattern) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for used in pattern[rank]:
        tokens = torch.randint(8, 16, (3, 5), generator=generator)
        tokens[1, 0] = 1 if used else 9
        batches.append((tokens, tokens.roll(1, 1)))
    return batches


def sometimes() -> Sometimes:
    torch.manual_seed(0)
    return Sometimes()


def trained_by(strategy_class, patterns: list) -> dict[str, torch.Tensor]:
    strategy = strategy_class(sometimes(), equality.sgd, Setup(make_mesh({"data": -1})))
    for pattern in patterns:
        strategy.step(micro_batches(dist.get_rank(), pattern))
    return {name: parameter.detach() for name, parameter in strategy.model.named_parameters()}


def trained_alone(patterns: list) -> dict[str, torch.Tensor]:
    model = sometimes()
    optimizer = equality.sgd(model.parameters())
    for pattern in patterns:
        batches = [batch for rank in (0, 1) for batch in micro_batches(rank, pattern)]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Finds(by_hand.DDPByHand):
    """The version by hand, told to look for unused parameters."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.reducer.find_unused = True


def equals_alone(strategy_class, patterns: list) -> None:
    alone = trained_alone(patterns)
    first, second = launch(trained_by, 2, (strategy_class, patterns), timeout=100)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6)
        before = sometimes().get_parameter(name)
        used = any(uses for pattern in patterns for rank in pattern for uses in rank)
        assert torch.equal(before, expected) != (used or not name.startswith("branch"))


def test_a_branch_that_comes_and_goes():
    """Looking for unused parameters: equal to one process, whichever rank and micro-batch uses the branch. Step by step
    other patterns, and momentum in between: what is left of a step must not come up in the next."""
    equals_alone(Finds, list(PATTERNS.values()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in LEFT_OUT])
def test_the_last_micro_batch_has_to_use_everything_and_then_all_is_well(name, version):
    equals_alone(VERSIONS[version], [PATTERNS[name]] * 2)


def refusal_of(strategy_class, pattern) -> str:
    """The line of the UserError with which the launch ended; "" if it ended otherwise."""
    try:
        launch(trained_by, 2, (strategy_class, [pattern]), timeout=10)
    except RankFailed as failure:
        found = re.findall("UserError: (.*)", str(failure))
        return found[0] if found else ""
    return ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", LEFT_OUT if FULL else LEFT_OUT[:3:2])
def test_a_branch_that_the_last_micro_batch_leaves_out_is_named(name, version):
    """If not, ranks go on with different weights, or send the loss while another rank sends a bucket (SIGABRT)."""
    refusal = refusal_of(VERSIONS[version], PATTERNS[name])
    assert "branch.weight and 1 more" in refusal, refusal


def unequal(kind: str) -> str:
    last = dist.get_rank() == 1
    layers = [nn.Linear(4, 5 if kind == "shape" and last else 4)]
    layers += [nn.Linear(4, 4)] if kind == "more" and last else []
    model = nn.Sequential(*layers)
    if kind == "frozen" and last:
        model[0].bias.requires_grad_(False)
    if kind == "buffer":
        model.register_buffer("mask", torch.zeros(3 if last else 2), persistent=False)
    if kind == "order":
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("ba" if last else "ab")})
    with pytest.raises(UserError) as refusal:
        by_hand.Reducer(model, world())
    return str(refusal.value)


DIFFERENT = {  # what is named: the tensor, and what tells it apart from rank 0's
    "shape": ("0.weight", "[4, 4]", "[5, 4]"),
    "more": ("1.weight", "missing", "[4, 4]"),
    "frozen": ("0.bias", "[4]", "frozen"),
    "buffer": ("mask", "[2]", "[3]", "buffer"),
    "order": ("a.weight", "b.weight"),
}


def test_unequal_models_are_named_on_every_rank():
    for lines in launch(lambda: [unequal(kind) for kind in DIFFERENT], 2, timeout=100):
        for line, words in zip(lines, DIFFERENT.values(), strict=True):
            assert not [word for word in ("rank 0", "rank 1", *words) if word not in line], line


def messages() -> tuple[list, int, list[int]]:
    """Collectives of three backward passes, two of them without synchronisation; how many messages of the last one have
    been sent when each of its gradients appears."""
    model, calls = gpt(), []
    for name in ("mean", "variance"):
        model.register_buffer(name, torch.zeros(2))
    reducer = by_hand.Reducer(model, world(), bucket_mb=CAP)
    for tokens in own_tokens(steps=2):
        with Ledger() as ledger, reducer.no_sync():
            backward(model, tokens)
        calls.append(ledger.calls)
    under_way = []  # messages, when each gradient appears
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: under_way.append(len(ledger.entries)))
    with Ledger() as ledger:
        backward(model, own_tokens(steps=1)[0])
        reducer.finish()
    sent = sum(entry.sent for entry in ledger.entries if entry.operation == "all_reduce")
    calls.append((ledger.calls, sent, sum(4 * p.numel() for p in model.parameters())))
    return calls, len(reducer.buckets), under_way


def test_messages_are_buckets_and_overlap_the_backward_pass():
    for (*local, (calls, sent, size)), count, under_way in launch(messages, 4):
        assert local == [{}, {}] and calls == {"all_reduce": count, "broadcast": 1} and count > 2
        assert sent == 2 * 3 / 4 * size
        assert under_way == sorted(under_way) and under_way[-1] >= count - 2, "buckets leave while others are computed"


def test_the_first_buckets_are_those_that_the_page_builds():
    built = {}
    for cell in code_of_page("03_ddp/01_ddp.ipynb"):
        built |= definitions(cell)
    for name, code in definitions(Path(first_buckets.__file__).read_text()).items():
        assert built[name] == code, f"{name} differs between the page and first_buckets.py"
