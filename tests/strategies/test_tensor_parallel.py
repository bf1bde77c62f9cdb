"""Tensor and sequence parallelism beyond equality: the operators alone, what is sent, what is held, what is refused."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.model import cross_entropy as whole_cross_entropy
from common.strategy import Setup
from course.model_parallel import by_hand_tensor as by_hand
from course.model_parallel import torch_tensor
from course.strategies import load

LAYERS, WIDTH, TIME, BATCH, VOCABULARY = 2, 16, 8, 6, 64  # of the harness's models; BATCH is a micro-batch
VERSIONS = [("tensor", False), ("tensor", True), ("sequence", True)]


def build(strategy: str, hand: bool, model=None, precision="fp32", make_optimizer=equality.adamw):
    torch.manual_seed(dist.get_rank())
    mesh = make_mesh({"tensor": -1})
    return load(strategy, hand)(model or equality.tied(), make_optimizer, Setup(mesh, precision=precision))


def tokens(steps: int = 1, batch: int = BATCH):
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(VOCABULARY, (steps, batch, TIME + 1), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in data]


# The vocabulary-parallel cross-entropy


def own_columns(logits, targets):
    """Losses and this rank's columns of the logits' gradient."""
    columns = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    with Ledger() as ledger:
        losses = by_hand.VocabularyParallelCrossEntropy.apply(columns, targets, dist.group.WORLD)
        (losses * torch.arange(len(targets))).sum().backward()
    return losses.detach(), columns.grad, [entry.payload for entry in ledger.entries]


def test_cross_entropy_of_columns_is_that_of_the_whole():
    torch.manual_seed(0)
    logits = torch.randn(16, VOCABULARY) * 100  # exp() of these would overflow
    targets = torch.randint(VOCABULARY, (16,))
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none")
    (expected * torch.arange(16)).sum().backward()
    results = launch(own_columns, 4, (logits, targets))
    for losses, _, payloads in results:
        torch.testing.assert_close(losses, expected.detach())
        assert payloads == [16 * 4, 2 * 16 * 4]  # the largest; target and sum
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in results], -1), whole.grad)
    assert whole.grad.abs().max() > 1


def test_an_all_reduce_leaves_what_autograd_handed_it(monkeypatch):
    """It may be the gradient of something else, too."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    for x in (torch.ones(3, 2), torch.ones(2, 3).t()):
        summed = by_hand.all_reduce(x, "tensor")
        assert torch.equal(x, torch.ones(3, 2)), "the tensor itself has been summed"
        assert torch.equal(summed, 2 * torch.ones(3, 2)) and summed.is_contiguous()


def test_words_of_other_ranks_are_in_no_row():
    """Rank 2 of those that have three words each has 6, 7 and 8."""
    row, mine = by_hand.find(torch.tensor([0, 5, 6, 8, 9]), rows=3, rank=2)
    assert (row.tolist(), mine.tolist()) == ([0, 0, 0, 2, 0], [False, False, True, True, False]), "rows, and whose"


# What is sent


def sent_in_a_step(strategy, hand, accumulate):
    training = build(strategy, hand)
    with Ledger() as ledger:
        training.step(tokens(accumulate))
    return Counter((entry.operation, entry.payload) for entry in ledger.entries), ledger.sent


def expected_calls(strategy, hand, accumulate):
    activations, per_token = BATCH * TIME * WIDTH * 4, BATCH * TIME * 4
    times = 4 * LAYERS + 2  # twice forward and twice backward in each layer; after the embedding; before the logits
    operations = ("reduce_scatter", "all_gather") if strategy == "sequence" else ("all_reduce",)
    calls = Counter({(operation, activations): times * accumulate for operation in operations})
    if hand:
        calls += Counter({("all_reduce", per_token): accumulate, ("all_reduce", 2 * per_token): accumulate})
        calls["all_reduce", 4] += 1  # of the gradient norm
    else:
        calls["all_reduce", per_token] += 3 * accumulate  # largest, sum and target one by one
        calls["all_reduce", 4 * len(list(equality.tied().parameters()))] += 1
    if strategy == "sequence":  # weight and bias of five norms, two biases in each layer, and positions
        calls["all_reduce", 4 * (WIDTH * (5 * 2 + 2 * LAYERS) + TIME * WIDTH)] += 1
    return calls


@pytest.mark.parametrize("strategy, hand", VERSIONS)
def test_ledger_is_the_formula(strategy, hand):
    for accumulate in (1, 3):
        for calls, _ in launch(sent_in_a_step, 2, (strategy, hand, accumulate)):
            assert calls == expected_calls(strategy, hand, accumulate)


def test_sequence_parallelism_sends_as_many_bytes_of_activations():
    (tensor, sent), (sequence, sent_too) = (
        launch(sent_in_a_step, 4, (strategy, True, 1))[0] for strategy in ("tensor", "sequence")
    )
    of_gradients = 2 * 3 / 4 * 4 * (14 * WIDTH + TIME * WIDTH)
    assert sent_too == sent + of_gradients
    assert tensor != sequence


# What is held


def held(strategy, hand):
    """Elements of parameters, bytes of the optimizer's state, bytes kept for the backward pass."""
    training = build(strategy, hand)
    local = [getattr(p, "_local_tensor", p) for p in training.model.parameters()]
    kept = {}

    def keep(tensor):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage.data_ptr()] = storage  # held on to, so that no address comes twice
        return tensor

    inputs, targets = tokens()[0]
    if hand:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = by_hand.cross_entropy(training.model(inputs), targets, training.group)
        loss.backward()
    ours = {p.untyped_storage().data_ptr() for p in local}
    return sum(p.numel() for p in local), sum(s.nbytes() for address, s in kept.items() if address not in ours)


def test_memory_of_a_rank():
    model = equality.tied()
    cut = sum(p.numel() for name, p in model.named_parameters() if any(map(name.endswith, by_hand.CUT)))
    whole = sum(p.numel() for p in model.parameters()) - cut
    assert cut > whole > 0
    kept = {}
    for size in (1, 4):
        for strategy, hand in VERSIONS:
            elements, kept[strategy, size] = launch(held, size, (strategy, hand))[0]
            assert elements == cut / size + whole
    assert kept["tensor", 1] > 2 * kept["tensor", 4] > 2.4 * kept["sequence", 4]


# The full state goes from any of them to any other


def train_and_give(strategy, hand):
    training = build(strategy, hand)
    for batch in tokens(2):
        training.step([batch])
    return training.full_state()


def take_and_go_on(strategy, hand, state):
    training = build(strategy, hand)
    training.load_full_state(state if dist.get_rank() == 0 else {})
    taken = equality.flatten(training.full_state())  # of rank 0
    loss, grad_norm = training.step(tokens(3)[-1:])
    return taken, loss.item(), grad_norm.item()


@pytest.mark.parametrize("giver, taker", [(0, 1), (1, 2), (2, 0)])
def test_a_full_state_is_taken_up_on_another_number_of_ranks(giver, taker):
    state = launch(train_and_give, 2, VERSIONS[giver])[0]
    (reference, loss, norm), *others = (launch(take_and_go_on, n, (*VERSIONS[taker], state))[0] for n in (1, 4))
    given = equality.flatten(state)
    assert any(name.endswith("exp_avg") for name in given)
    for taken, *numbers in [(reference, loss, norm), *others]:
        assert taken.keys() == given.keys()
        assert all(torch.equal(taken[name], given[name]) for name in given)
        assert numbers == pytest.approx([loss, norm], rel=1e-5)


# An overflow on one rank is an overflow on all


def spoil(parameter):
    getattr(parameter.grad, "_local_tensor", parameter.grad)[0] = torch.inf


def overflow(strategy, hand):
    """The names of what a step has changed here, when rank 1's part of a gradient overflows in it."""
    training = build(strategy, hand, precision="fp16")
    before = {part.name: part.tensor.clone() for part in training.parts()}
    if dist.get_rank() == 1:
        training.model.embedding.tokens.weight.register_post_accumulate_grad_hook(spoil)
    training.step(tokens())
    return [part.name for part in training.parts() if not torch.equal(part.tensor, before[part.name])]


@pytest.mark.parametrize("strategy, hand", VERSIONS)
def test_all_ranks_skip_a_step_that_overflowed_on_one(strategy, hand):
    assert launch(overflow, 2, (strategy, hand)) == [[], []]


# What cannot be cut


# Only this rank's part is moved to the device


def moved_and_kept(strategy, hand):
    """Elements of what is moved to the device, at each move, and those that the strategy keeps."""
    sizes = []

    def to(module, device):
        sizes.append(sum(getattr(p, "_local_tensor", p).numel() for p in module.parameters()))
        return module

    nn.Module.to = to  # this process ends here
    training = build(strategy, hand)
    return sizes, sum(getattr(p, "_local_tensor", p).numel() for p in training.model.parameters())


@pytest.mark.parametrize("strategy, hand", VERSIONS)
def test_a_rank_cuts_first_and_then_moves(strategy, hand):
    whole = sum(p.numel() for p in equality.tied().parameters())
    for moved, kept in launch(moved_and_kept, 4, (strategy, hand)):
        assert all(size == kept for size in moved) and kept < whole / 3
        assert len(moved) == hand  # DTensor moves each parameter by itself


# Models of which little is trained


def norms_only() -> nn.Module:
    torch.manual_seed(0)
    model = equality.tied()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def norm_of_norms(strategy, hand):
    return build(strategy, hand, norms_only(), make_optimizer=equality.sgd).step(tokens())[1].item()


@pytest.mark.parametrize("strategy, hand", VERSIONS)
def test_only_norms_are_trained(strategy, hand):
    """No parameter that is trained is cut."""
    model = norms_only()
    ((inputs, targets),) = tokens()
    whole_cross_entropy(model(inputs), targets).backward()
    expected = get_total_norm([p.grad for p in model.parameters() if p.requires_grad]).item()
    assert launch(norm_of_norms, 2, (strategy, hand)) == pytest.approx([expected] * 2, rel=1e-5)


# On a mesh with another axis, each group by itself


def two_groups(hand, sequence):
    """Largest error of a gradient where each of two groups of two ranks reads its own batch."""
    mesh = make_mesh({"data": 2, "tensor": 2})
    place, data = axis(mesh, "tensor"), axis(mesh, "data")
    inputs, targets = tokens(2)[data.rank]
    torch.manual_seed(data.rank)
    whole, model = equality.tied(), equality.tied()
    model.load_state_dict(whole.state_dict())
    loss = whole_cross_entropy(whole(inputs), targets)
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    if not hand:
        torch_tensor.apply_tensor_parallel(model, mesh["tensor"])
        with torch_tensor.tp.loss_parallel():
            got = whole_cross_entropy(model(inputs), targets)
            got.backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        got = got.full_tensor()
    else:
        cut = by_hand.apply_tensor_parallel(model, place, sequence)
        got = by_hand.cross_entropy(model(inputs), targets, place.group)
        got.backward()
        for parameter in by_hand.partial_gradients(model, cut, sequence):
            dist.all_reduce(parameter.grad, group=place.group)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if parameter in cut:
                dim, along = cut[parameter]
                assert along is place and parameter.shape != expected[name].shape
                expected[name] = expected[name].chunk(2, dim)[place.rank]
    assert gradients.keys() == expected.keys()
    off = max(equality.difference(gradients[name], expected[name]) for name in expected)
    return off, abs(got.item() - loss.item()), loss.item()


@pytest.mark.parametrize("hand, sequence", [(True, False), (True, True), (False, False)])
def test_groups_beside_each_other_do_not_mix(hand, sequence):
    results = launch(two_groups, 4, (hand, sequence))
    assert all(off < equality.TOLERANCE and error < 1e-5 for off, error, _ in results)
    assert results[0][2] == results[1][2] != results[2][2]


def gradient_of_the_words():
    """Where the gradient of an untied embedding lies; and the numbers of it that this rank keeps."""
    training = build("tensor", False, equality.frozen())
    training.step(tokens())
    words = training.model.embedding.tokens.weight
    return words.grad.placements == words.placements, words.grad.to_local().numel()


def test_dtensor_keeps_only_its_words_of_an_embeddings_gradient():
    assert launch(gradient_of_the_words, 4) == [(True, VOCABULARY * WIDTH // 4)] * 4
