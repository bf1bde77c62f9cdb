"""Tensor and sequence parallelism beyond equality: the operators alone, what is sent, what is held."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from gpu_waits import Alive
from torch.nn import functional as F

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.strategy import Setup
from course.model_parallel import by_hand_tensor as by_hand
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_takes_one_float32_tensor_beside_the_logits(monkeypatch, dtype):
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    hidden, targets = torch.randn(1, 64, 8, dtype=dtype).requires_grad_(), torch.randint(4096, (1, 64))
    with Alive() as alive:
        logits = hidden @ torch.randn(8, 4096, dtype=dtype)
        by_hand.cross_entropy(logits, targets, None).backward()
    of_logits, room = logits.nbytes, 0.3 * logits.nbytes  # for a weight and numbers for each token
    in_float32 = 4 * logits.numel()
    gradient = 0 if dtype == torch.float32 else of_logits  # in the logits' own type it is another tensor
    assert alive.peak < of_logits + in_float32 + gradient + room


def test_an_all_reduce_leaves_what_autograd_handed_it(monkeypatch):
    """It may be the gradient of something else, too."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    for x in (torch.ones(3, 2), torch.ones(2, 3).t()):
        summed = by_hand.all_reduce(x, "tensor")
        assert torch.equal(x, torch.ones(3, 2)), "the tensor itself has been summed"
        assert torch.equal(summed, 2 * torch.ones(3, 2)) and summed.is_contiguous()


# What is sent


def sent_in_a_step(strategy, hand, accumulate):
    training = build(strategy, hand)
    with Ledger() as ledger:
        training.step(tokens(accumulate))
    return Counter((entry.operation, entry.payload) for entry in ledger.entries)


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


def gradient_of_the_words():
    """DTensor's, of an untied embedding: where it lies, and the numbers of it that this rank keeps."""
    training = build("tensor", False, equality.frozen())
    training.step(tokens())
    words = training.model.embedding.tokens.weight
    return words.grad.placements == words.placements, words.grad.to_local().numel()


def test_ledger_is_the_formula_and_gradients_lie_as_their_weights():
    rows = [(*version, accumulate) for version in VERSIONS for accumulate in (1, 3)]
    ranks = launch(lambda: ([sent_in_a_step(*row) for row in rows], gradient_of_the_words()), 2, timeout=600)
    for found, words in ranks:
        for row, calls in zip(rows, found, strict=True):
            assert calls == expected_calls(*row), row
        assert words == (True, VOCABULARY * WIDTH // 2)


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
        found = launch(lambda: {who: held(*who) for who in VERSIONS}, size, timeout=600)[0]
        for strategy, hand in VERSIONS:
            elements, kept[strategy, size] = found[strategy, hand]
            assert elements == cut / size + whole
    assert kept["tensor", 1] > 2 * kept["tensor", 4] > 2.4 * kept["sequence", 4]


def test_words_of_other_ranks_are_in_no_row():
    """Rank 2 of those that have three words each has 6, 7 and 8."""
    row, mine = by_hand.find(torch.tensor([0, 5, 6, 8, 9]), rows=3, rank=2)
    assert (row.tolist(), mine.tolist()) == ([0, 0, 0, 2, 0], [False, False, True, True, False]), "rows, and whose"
