"""Expert parallelism: what it sends and holds, what it drops, and that the proof of equality has something to prove."""

import pytest
import torch
import torch.distributed as dist
from gpu_waits import Copies, Shapes

from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.strategy import Setup
from course.model_parallel import by_hand_experts as by_hand
from course.model_parallel import moe_model as mixture

LAYERS, WIDTH, EXPERTS = 2, 16, 8


def make_model(**options) -> mixture.MixtureGPT:
    return equality.scaled_up(mixture.MixtureGPT(LAYERS, WIDTH, heads=4, context=8, vocabulary=64, **options))


def make(make_optimizer=equality.adamw, precision="fp32", **options) -> by_hand.ExpertParallel:
    torch.manual_seed(dist.get_rank())
    mesh = make_mesh({"expert": -1})
    return by_hand.ExpertParallel(make_model(**options), make_optimizer, Setup(mesh, precision=precision))


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
    for block in model.blocks:
        block.mlp.router.weight.data.zero_()  # all experts are as probable: an imbalance of 1 in each layer
    model(tokens)
    assert model.auxiliary_loss().item() == pytest.approx(0.01 * LAYERS), "Switch adds each layer's to the loss"


def test_one_token_at_a_time_by_hand():
    """Width 2, two experts that answer with their unit vector, and a router that reads the first number."""
    layer = mixture.Mixture(2, experts=2, top_k=1, capacity_factor=1.0, std=0.02)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        for parameter in layer.experts.parameters():
            parameter.zero_()
        layer.experts.down_bias.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[[2.0, 0.0], [1.0, 0.0], [3.0, 0.0], [-1.0, 0.0]]])
    y = layer(x)[0]
    gate = torch.tensor([2.0, 1.0, 1.0]).mul(2).sigmoid()  # softmax of (a, -a)
    # expert 0 has a capacity of two, and three tokens choose it: the third is dropped
    expected = [[gate[0], 0], [gate[1], 0], [0, 0], [0, gate[2]]]
    torch.testing.assert_close(y, torch.tensor(expected))
    assert layer.dropped == 1
    p = torch.tensor([2.0, 1.0, 3.0, -1.0]).mul(2).sigmoid().mean()
    torch.testing.assert_close(layer.imbalance, 2 * (0.75 * p + 0.25 * (1 - p)))


@pytest.mark.parametrize("time, factor, capacity", [(8, 1.0, 2), (7, 1.25, 3), (1, 1.25, 1), (128, 1.25, 40)])
def test_capacity_is_rounded_up(time, factor, capacity):
    """Of 8 experts, of which each token goes to 2: factor x 2 x time / 8."""
    assert mixture.Mixture(4, 8, 2, factor, std=0.02).capacity(time) == capacity, "places of an expert"


def test_how_a_mixture_begins_and_computes():
    """Of three layers: 0.02, and 0.02 / sqrt(6) where a block adds to what passes by; the router in float32."""
    torch.manual_seed(0)
    block = mixture.MixtureGPT(3, 64, 4, 16, experts=4, top_k=4).blocks[0]  # every expert may be chosen
    layer, experts = block.mlp, block.mlp.experts
    spreads = {name: p.std().item() for name, p in layer.named_parameters()}
    assert spreads == pytest.approx({
        "experts.up": 0.02, "experts.up_bias": 0, "experts.down": 0.0082, "experts.down_bias": 0, "router.weight": 0.02,
    }, rel=0.15), "standard deviations of the first weights"  # fmt: skip
    x = torch.randn(2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts([x] * 4)[0].dtype == torch.bfloat16, "experts compute in the run's precision"
        assert layer.router(x.bfloat16()).dtype == torch.float32, "the router computes in float32"
        for kind in (torch.bfloat16, torch.float32):
            assert layer(x.to(kind)).dtype == kind, "what comes out is of the type of what goes in"
    assert layer.dropped.dtype == torch.int64, "choices are counted in whole numbers"


def test_no_token_looks_ahead():
    """The earliest tokens are kept, so what comes later changes nothing before it."""

    def run():
        model = make(capacity_factor=0.5).model
        tokens = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(1))
        changed = tokens.clone()
        changed[0, 5:] = (changed[0, 5:] + 1) % 64
        layer = model.blocks[0].mlp
        return [model(t)[0] for t in (tokens, changed)], layer.dropped.item(), layer.load.sum().item()

    (one, other), dropped, sent = launch(run, 1)[0]
    assert dropped > 0 and dropped + sent == 8 * 2, "choices of 8 tokens: what is dropped and what is sent"
    torch.testing.assert_close(one[:5], other[:5])
    assert not torch.allclose(one[5:], other[5:])


def count(accumulate, precision):
    strategy = make(precision=precision)
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


@pytest.mark.parametrize(
    "nproc, accumulate, precision, nbytes", [(2, 1, "fp32", 4), (4, 2, "fp32", 4), (2, 1, "bf16", 2)]
)
def test_ledger_and_memory(nproc, accumulate, precision, nbytes):
    whole = make_model()
    in_experts = sum(p.numel() for block in whole.blocks for p in block.mlp.experts.parameters())
    others = sum(p.numel() for p in whole.parameters()) - in_experts
    results = launch(count, nproc, (accumulate, precision))
    loads = torch.stack([result[3] for result in results])  # [rank, layer and micro-batch, expert]
    for rank, (calls, payload, flat, _, held) in enumerate(results):
        layers = LAYERS * accumulate
        assert calls == {"all_to_all": 5 * layers, "all_reduce": 3}
        sent, received = loads[rank].sum(), loads.chunk(nproc, dim=2)[rank].sum()
        # counts, 8 bytes each; rows of the type that is computed in go out and back, and so do their gradients
        assert payload == 8 * EXPERTS * layers + nbytes * WIDTH * 2 * (sent + received)
        assert flat == 4 * others
        assert held == 4 * (others + in_experts // nproc)  # parameter, gradient and AdamW's two means


def waits():
    """What a forward and what a backward pass of one mixture waits for; and whether the lists above see anything."""
    layer = make().model.blocks[0].mlp
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    with Copies() as copies, Shapes() as shapes:
        y = layer(x)
    forward = copies.found + shapes.found
    with Copies() as copies, Shapes() as shapes:
        y.sum().backward()
    backward = copies.found + shapes.found
    with Copies() as copies, Shapes() as shapes:
        mask = x.detach() > 0
        mask.any().item(), x.detach()[mask], torch.arange(2).repeat_interleave(torch.ones(2, dtype=torch.int64))
    return forward, backward, copies.found + shapes.found


@pytest.mark.parametrize("nproc", [1, 4])
def test_a_mixture_waits_for_the_gpu_once(nproc):
    """For the lengths of what is sent, received and computed."""
    for forward, backward, seen in launch(waits, nproc):
        assert forward == ["tolist"] and backward == []
        assert {"item", "index", "repeat_interleave"} <= {*seen}
