"""Tensor and sequence parallelism beyond equality: the operators alone, what is sent, what is held, what is refused."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from course.strategies import load
from torch.nn import functional as F

from common.config import parse
from common.errors import UserError
from common.lab import equality
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from common.model import GPT
from common.ranks import Ranks
from course.model_parallel import by_hand_tensor as by_hand

LAYERS, WIDTH, TIME, BATCH, VOCABULARY = 2, 16, 8, 6, 64  # of the harness's models; BATCH is a micro-batch
VERSIONS = [("tensor", False), ("tensor", True), ("sequence", True)]


def build(strategy: str, hand: bool, model=None, precision="fp32"):
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    torch.manual_seed(ranks.rank)
    return load(strategy, hand)(model or equality.tied(), equality.adamw, ranks, precision)


def tokens(steps: int = 1, batch: int = BATCH):
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(VOCABULARY, (steps, batch, TIME + 1), generator=generator)
    return [(part[:, :-1], part[:, 1:]) for part in data]


# The vocabulary-parallel cross-entropy


def own_columns(logits, targets):
    """Losses and this rank's columns of the logits' gradient."""
    columns = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    with Ledger() as ledger:
        losses = by_hand.VocabularyParallelCrossEntropy.apply(columns, targets)
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
    if strategy == "sequence":
        norms_and_biases = {
            WIDTH * 4: 5 * 2 + 2 * 2,
            TIME * WIDTH * 4: 1,
        }  # weight and bias of norms, biases; positions
        calls += Counter({("all_reduce", nbytes): count for nbytes, count in norms_and_biases.items()})
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
            loss = by_hand.cross_entropy(training.model(inputs), targets)
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
    taken = equality.flatten(training.full_state())
    loss, grad_norm = training.step(tokens(3)[-1:])
    return taken, loss.item(), grad_norm.item()


@pytest.mark.parametrize("giver, taker", [(0, 1), (1, 2), (2, 0)])
def test_a_full_state_is_taken_up_on_another_number_of_ranks(giver, taker):
    state = launch(train_and_give, 2, VERSIONS[giver])[0]
    (reference, loss, norm), *others = (launch(take_and_go_on, n, (*VERSIONS[taker], state))[-1] for n in (1, 4))
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
    """The names of what a step has changed, when rank 1's part of a gradient overflows in it."""
    training = build(strategy, hand, precision="fp16")
    before = training.full_state()["model"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    if dist.get_rank() == 1:
        training.model.embedding.tokens.weight.register_post_accumulate_grad_hook(spoil)
    training.step(tokens())
    return [name for name, tensor in training.full_state()["model"].items() if not torch.equal(tensor, before[name])]


@pytest.mark.parametrize("strategy, hand", VERSIONS)
def test_all_ranks_skip_a_step_that_overflowed_on_one(strategy, hand):
    assert launch(overflow, 2, (strategy, hand)) == [[], []]


# What cannot be cut


@pytest.mark.parametrize("strategy, hand", VERSIONS)
@pytest.mark.parametrize(
    "changed, refused",
    [({"heads": 2}, "heads 2"), ({"heads": 4, "vocabulary": 66}, "vocabulary 66"), ({"heads": 3}, "heads 3")],
    ids=str,
)
def test_what_does_not_divide_is_refused(strategy, hand, changed, refused):
    options = {"layers": 1, "width": 12, "heads": 4, "context": 8, "vocabulary": 64} | changed
    with pytest.raises(RankFailed, match=f"UserError: {refused} cannot be cut into 4 equal parts; start"):
        launch(lambda: build(strategy, hand, GPT(**options)), 4)


@pytest.mark.parametrize("options", ["--heads 3 --width 96", "--strategy sequence --by-hand --context 99"])
def test_what_does_not_divide_is_refused_before_ranks_meet(options, monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    with pytest.raises(UserError, match=r"--(heads 3|context 99) cannot be cut into 2 equal parts; start a number"):
        parse("tensor", ["--distributed", f"--run-dir={tmp_path}", *options.split()])


def test_a_sequence_that_does_not_divide_is_refused():
    with pytest.raises(RankFailed, match="UserError: context 7 cannot be cut into 2 equal parts; start"):
        launch(lambda: build("sequence", True, GPT(1, 16, 4, 7, 64)), 2)
