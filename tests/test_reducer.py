"""The reducer of chapter 03: bit by bit what DistributedDataParallel computes, and clear about what it cannot."""

import pytest
import torch
import torch.distributed as dist
from course.strategies import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.lab import equality
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from common.model import GPT, cross_entropy
from common.ranks import Ranks
from course.ddp import by_hand

CAP = 0.02  # MiB: a few buckets for a small model


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=2, width=32, heads=2, context=16)


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


def both_ways() -> tuple[list[int], str, list[int]]:
    """How many gradients differ in each step; and the bytes of the buckets, PyTorch's and ours."""
    torchs, ours = gpt(), gpt()
    parallel = DistributedDataParallel(torchs, bucket_cap_mb=CAP)
    order = order_of_arrival(ours)
    reducer = by_hand.Reducer(ours, order=order, bucket_mb=CAP)
    different = []
    for tokens in own_tokens(steps=4):
        torchs.zero_grad()
        ours.zero_grad()
        backward(parallel, tokens)
        backward(ours, tokens)
        reducer.finish()
        pairs = zip(torchs.parameters(), ours.parameters(), strict=True)
        different.append(sum(not torch.equal(one.grad, other.grad) for one, other in pairs))
    sizes = parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return different, sizes, [flat.numel() * flat.element_size() for flat in reducer.flat]


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_gradients_are_pytorchs_bit_by_bit(nproc):
    """From its second step on: before, DistributedDataParallel has one bucket, and orders the sums by that."""
    for different, torchs, ours in launch(both_ways, nproc):
        assert different[1:] == [0, 0, 0]
        assert torchs == ", ".join(map(str, ours)) and len(ours) > 2
        if nproc == 2:  # a sum of two has only one order
            assert different[0] == 0


def test_buckets_are_cut_as_pytorch_cuts_them():
    parameters = list(gpt().parameters())
    for cap in (1, 4096, 20_000, 10**9):
        torchs, _ = dist._compute_bucket_assignment_by_size(parameters, [cap])
        assert by_hand.assign(parameters, cap) == torchs


class Branches(nn.Module):
    """Only one of two layers is used, as the caller says; a third never is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, branch):
        return self.layers[branch](x)


def branch_by_rank(find_unused: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = Branches()
    each = 1e-6  # MiB: a bucket for each layer, complete in another order on each rank
    reducer = by_hand.Reducer(model, bucket_mb=each, find_unused=find_unused)
    for step in range(2):
        model.zero_grad()
        model(torch.ones(1, 4), (dist.get_rank() + step) % 2).sum().backward()
        reducer.finish()
    return [layer.weight.grad for layer in model.layers]


def test_unused_parameters():
    """Each of two layers gets a gradient of ones from one rank of two: on average one half. The third gets none."""
    for first, second, third in launch(branch_by_rank, 2, (True,)):
        assert torch.equal(first, torch.full((4, 4), 0.5)) and torch.equal(second, first)
        assert third is None  # not zero: a zero gradient would let weight decay and momentum go on


def test_a_parameter_without_a_gradient_is_named():
    with pytest.raises(RankFailed, match=r"UserError: parameter layers.1.weight and 1 more got no gradient") as failure:
        launch(branch_by_rank, 2, (False,), timeout=10)
    assert failure.value.rank in (0, 1)


def unused_in_step(by_hand: bool) -> str:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    model = equality.tied()
    model.extra = nn.Linear(2, 2)
    strategy = load("ddp", by_hand)(model, equality.sgd, ranks)
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    with pytest.raises(UserError) as refusal:
        strategy.step([(tokens[:, :-1], tokens[:, 1:])])
    return str(refusal.value)


@pytest.mark.parametrize("by_hand", [False, True])
def test_both_versions_name_it(by_hand):
    for line in launch(unused_in_step, 1, (by_hand,)):
        assert line.startswith("parameter extra.weight and 1 more got no gradient in this step: ")
        assert len(line.splitlines()) == 1


def unequal(kind: str) -> str:
    last = dist.get_rank() == 1
    layers = [nn.Linear(4, 5 if kind == "shape" and last else 4)]
    layers += [nn.Linear(4, 4)] if kind == "more" and last else []
    with pytest.raises(UserError) as refusal:
        by_hand.Reducer(nn.Sequential(*layers))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", "0.weight is of shape [4, 4], torch.float32 on rank 0 and of shape [5, 4], torch.float32 on rank 1"),
        ("more", "1.weight is missing on rank 0 and of shape [4, 4], torch.float32 on rank 1"),
    ],
)
def test_unequal_models_are_named_on_every_rank(kind, told):
    for line in launch(unequal, 2, (kind,)):
        assert line == f"the ranks' models differ: {told}; build the same model on every rank"


def messages() -> tuple[list[dict], int, list[int]]:
    """Collectives of three backward passes, two of them without synchronisation; the buckets that are still
    incomplete at each launch."""
    model, incomplete = gpt(), []
    reducer = by_hand.Reducer(model, bucket_mb=CAP)
    launch_buckets = reducer.launch

    def launch_and_note():
        before = len(reducer.works)
        launch_buckets()
        incomplete.extend([sum(map(bool, reducer.missing))] * (len(reducer.works) - before))

    reducer.launch = launch_and_note
    calls = []
    for tokens in own_tokens(steps=2):
        with Ledger() as ledger, reducer.no_sync():
            backward(model, tokens)
        calls.append(ledger.calls)
    with Ledger() as ledger:
        backward(model, own_tokens(steps=1)[0])
        reducer.finish()
    calls.append((ledger.calls, ledger.sent, sum(4 * p.numel() for p in model.parameters())))
    return calls, len(reducer.buckets), incomplete


def test_messages_are_buckets_and_overlap_the_backward_pass():
    for (*local, (calls, sent, size)), buckets, incomplete in launch(messages, 4):
        assert local == [{}, {}]
        assert calls == {"all_reduce": buckets} and buckets > 2
        assert sent == 2 * 3 / 4 * size
        assert incomplete == list(range(buckets - 1, -1, -1))  # each leaves while those behind it are not complete
