"""Expert parallelism: what it sends and holds, what it drops, and that the proof of equality has something to prove."""

import copy

import pytest
import torch
import torch.distributed as dist
from course.strategies import load

from common.config import Config, check_experts, parse
from common.errors import UserError
from common.lab import equality
from common.lab.launch import RankFailed, launch
from common.lab.ledger import Ledger
from common.ranks import Ranks
from common.task import make_task
from course.model_parallel import by_hand_experts as by_hand
from course.model_parallel import moe_model as mixture

LAYERS, WIDTH, EXPERTS = 2, 16, 8


def ranks_here() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def make(make_optimizer=equality.adamw, precision="fp32", **options) -> by_hand.ExpertParallel:
    torch.manual_seed(dist.get_rank())
    model = equality.lively(mixture.MixtureGPT(LAYERS, WIDTH, heads=4, context=8, vocabulary=64, **options))
    return by_hand.ExpertParallel(model, make_optimizer, ranks_here(), precision)


def own_batches(strategy, step=0, accumulate=1):
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(strategy.data_size)[strategy.data_rank]
    return [(part[:, :-1], part[:, 1:]) for part in mine.chunk(accumulate)]


def test_the_proof_drops_tokens_and_has_something_to_balance():
    """Else equality with one process would hold for a strategy that has no capacity, or no auxiliary loss."""
    torch.manual_seed(equality.SEED)
    model = equality.tied(mixture.MixtureGPT)
    tokens, _ = equality.Batches().batch(torch.arange(equality.BATCH))
    model(tokens)
    assert [0 < block.mlp.dropped < tokens.numel() for block in model.blocks] == [True] * 2
    model.auxiliary_loss().backward()
    assert all(block.mlp.router.weight.grad.norm() > 1e-3 for block in model.blocks)


def test_equals_one_process_with_one_choice_and_without_drops():
    """The harness proves two choices and drops; Switch has one, and its gate is not made to be 1."""
    for options in ({"top_k": 1}, {"capacity": EXPERTS / 2}):

        def model_class(*args, options=options, **kwargs):
            return mixture.MixtureGPT(*args, **kwargs, **options)

        cases = [equality.Case(lambda _, make=model_class: equality.tied(make), equality.sgd, 3, 0.3)]
        rows = equality.prove_class(by_hand.ExpertParallel, 2, str(options), cases)
        assert len(rows) == 1


def test_one_token_at_a_time_by_hand():
    """Width 2, two experts that answer with their unit vector, and a router that reads the first number."""
    layer = mixture.Mixture(2, experts=2, top_k=1, capacity=1.0, std=0.02)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        for parameter in layer.experts.parameters():
            parameter.zero_()
        layer.experts.down_bias.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [-1.0, 0.0]]])
    y = layer(x)[0]
    gate = torch.tensor([2.0, 1.0, 1.0]).mul(2).sigmoid()  # softmax of (a, -a)
    # expert 0 has two places, and three tokens want one: the third gets nothing
    expected = [[gate[0], 0], [gate[1], 0], [0, 0], [0, gate[2]]]
    torch.testing.assert_close(y, torch.tensor(expected))
    assert layer.dropped == 1
    p = torch.tensor([2.0, 1.0, 3.0, -1.0]).mul(2).sigmoid().mean()
    torch.testing.assert_close(layer.imbalance, 2 * (0.75 * p + 0.25 * (1 - p)))


def test_no_token_looks_ahead():
    """Places go to the earliest tokens, so what comes later changes nothing before it."""

    def run():
        model = make(capacity=0.5).model
        tokens = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(1))
        changed = tokens.clone()
        changed[0, 5:] = (changed[0, 5:] + 1) % 64
        return [model(t)[0] for t in (tokens, changed)], model.blocks[0].mlp.dropped

    (one, other), dropped = launch(run, 1)[0]
    assert dropped > 0
    torch.testing.assert_close(one[:5], other[:5])
    assert not torch.allclose(one[5:], other[5:])


def uneven():
    """Rank r sends r + 1 rows, all to rank 0; forward and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    sent = [rank + 1] + [0] * (size - 1)
    received = [source + 1 for source in range(size)] if rank == 0 else [0] * size
    result = by_hand.AllToAll.apply(rows, sent, received)
    (result * torch.arange(len(result))[:, None]).sum().backward()
    return result.detach(), rows.grad


def test_all_to_all_with_uneven_splits_and_its_way_back():
    (first, _), (none, back), *_ = results = launch(uneven, 4)
    assert first[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3] and none.shape == (0, 2)
    assert back[:, 0].tolist() == [1, 2]  # rank 1's rows were the second and third there
    assert torch.cat([grad[:, 0] for _, grad in results]).tolist() == list(range(10))


def count(accumulate):
    strategy = make()
    loads = []
    for block in strategy.model.blocks:
        block.mlp.register_forward_hook(lambda layer, *_: loads.append(layer.load))
    strategy.step(own_batches(strategy, 0, accumulate))  # the optimizer's state is there from now on
    loads.clear()
    with Ledger() as ledger:
        strategy.step(own_batches(strategy, 1, accumulate))
    payload = sum(entry.payload for entry in ledger.entries if entry.operation == "all_to_all")
    flat = max(entry.payload for entry in ledger.entries if entry.operation == "all_reduce")
    tensors = [tensor for state in strategy.optimizer.state.values() for tensor in state.values() if tensor.dim()]
    held = sum(p.numel() + p.grad.numel() for p in strategy.model.parameters()) + sum(t.numel() for t in tensors)
    return ledger.calls, payload, flat, torch.stack(loads), held


@pytest.mark.parametrize("nproc, accumulate", [(2, 1), (4, 2)])
def test_ledger_and_memory(nproc, accumulate):
    whole = mixture.MixtureGPT(LAYERS, WIDTH, heads=4, context=8, vocabulary=64)
    in_experts = sum(p.numel() for block in whole.blocks for p in block.mlp.experts.parameters())
    others = sum(p.numel() for p in whole.parameters()) - in_experts
    results = launch(count, nproc, (accumulate,))
    loads = torch.stack([result[3] for result in results])  # [rank, layer and micro-batch, expert]
    for rank, (calls, payload, flat, _, held) in enumerate(results):
        layers = LAYERS * accumulate
        assert calls == {"all_to_all": 5 * layers, "all_reduce": 3}
        sent, received = loads[rank].sum(), loads.chunk(nproc, dim=2)[rank].sum()
        # counts, 8 bytes each; rows of 4 x WIDTH bytes go out and back, and so do their gradients
        assert payload == 8 * EXPERTS * layers + 4 * WIDTH * 2 * (sent + received)
        assert flat == 4 * others
        assert held == 4 * (others + in_experts // nproc)  # parameter, gradient and AdamW's two means


def first_half():
    strategy = make()
    for step in range(2):
        strategy.step(own_batches(strategy, step))
    state = copy.deepcopy(strategy.full_state())
    return state, [number.item() for number in strategy.step(own_batches(strategy, 2))]


def second_half(state):
    strategy = make()
    strategy.load_full_state(state if dist.get_rank() == 0 else {})
    again = copy.deepcopy(strategy.full_state())
    return again, [number.item() for number in strategy.step(own_batches(strategy, 2))]


def test_resumed_on_another_number_of_ranks():
    state, numbers = launch(first_half, 4)[0]
    for nproc in (1, 2):
        for again, resumed in launch(second_half, nproc, (state,)):
            assert resumed == pytest.approx(numbers, rel=equality.TOLERANCE)
            flat, expected = equality.flatten(again), equality.flatten(state)
            assert flat.keys() == expected.keys() and all(torch.equal(flat[name], expected[name]) for name in flat)


def overflow():
    strategy = make(precision="fp16")
    scale = strategy.scaler.get_scale()
    if dist.get_rank() == 1:  # its experts' gradients are more than float16 holds, and nobody else's
        strategy.model.blocks[1].mlp.experts.up.register_hook(lambda gradient: gradient * float("inf"))
    before = equality.flatten(strategy.full_state())
    strategy.step(own_batches(strategy))
    after = equality.flatten(strategy.full_state())
    same = all(torch.equal(after[name], before[name]) for name in before)
    return same, strategy.scaler.get_scale() < scale


def test_one_ranks_overflow_skips_the_step_on_all():
    assert launch(overflow, 2) == [(True, True)] * 2


BAD = {
    (8, 9, 1): r"--top-k 9 is more than --experts 8",
    (2, 2, 4): r"--experts 2 are fewer than 4 ranks; use 4 or a multiple",
    (6, 2, 4): r"--experts 6 do not divide by 4 ranks; use a multiple of 4",
}


@pytest.mark.parametrize("numbers", BAD)
def test_bad_numbers_of_experts(numbers):
    with pytest.raises(UserError, match=BAD[numbers]):
        check_experts(*numbers)


def test_bad_numbers_of_experts_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    launcher = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    line = "--distributed --strategy expert --by-hand"
    with pytest.raises(UserError, match="--experts 6 do not divide by 4 ranks"):
        parse(argv=[*line.split(), "--experts=6"])
    with pytest.raises(UserError, match="--top-k must be at least 1, got 0"):
        parse(argv=[*line.split(), "--top-k=0"])
    assert not any(tmp_path.iterdir())


def test_bad_numbers_of_experts_in_a_notebook():
    with pytest.raises(RankFailed, match="6 experts do not divide by 4 ranks; make it a multiple of 4"):
        launch(lambda: make(experts=6) and None, 4)
    with pytest.raises(UserError, match="a token cannot go to 3 of 2 experts"):
        mixture.MixtureGPT(LAYERS, WIDTH, heads=4, context=8, experts=2, top_k=3)


def test_the_command_lines_model_is_the_mixture():
    config = Config(strategy="expert", by_hand=True, layers=1, width=16, experts=4, top_k=1, context=8)
    (block,) = make_task(config).make_model().blocks
    assert (block.mlp.number, block.mlp.top_k) == (4, 1)
    assert load("expert", by_hand=True) is by_hand.ExpertParallel
