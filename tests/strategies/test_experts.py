"""Expert parallelism: what it sends and holds, what it drops, and that the proof of equality has something to prove."""

import copy

import pytest
import torch
import torch.distributed as dist
from gpu_waits import Copies, Shapes

from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import Axis, axis, make_mesh
from common.model import cross_entropy
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


def test_equals_one_process_with_one_choice_and_without_drops():
    """The harness proves two choices and drops; Switch has one, and its gate is not made to be 1."""
    for options in ({"top_k": 1}, {"capacity_factor": EXPERTS / 2}):

        def model_class(*args, options=options, **kwargs):
            return mixture.MixtureGPT(*args, **kwargs, **options)

        cases = [equality.Case(lambda _, make=model_class: equality.tied(make), equality.sgd, 3, 0.3)]
        rows = equality.prove(by_hand.ExpertParallel, 2, cases=cases)
        assert len(rows) == 1


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
    with pytest.raises(UserError) as error:
        mixture.MixtureGPT(1, 64, 4, 16, experts=4, top_k=5)
    assert str(error.value) == "a token cannot go to 5 of 4 experts; choose top-k of at most 4"


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


def uneven():
    """Rank r sends r + 1 rows, all to rank 0, forward and backward, which don't lie in one piece."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((2, rank + 1), float(rank)).t().requires_grad_()
    sent = [rank + 1] + [0] * (size - 1)
    received = [source + 1 for source in range(size)] if rank == 0 else [0] * size
    result = by_hand.AllToAll.apply(rows, dist.group.WORLD, sent, received)
    result.backward(torch.arange(float(len(result))).expand(2, -1).t())
    return result.detach(), rows.grad


def test_all_to_all_with_uneven_splits_and_its_way_back():
    (first, _), (none, back), *_ = results = launch(uneven, 4)
    assert first[:, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3] and none.shape == (0, 2)
    assert back[:, 0].tolist() == [1, 2]  # rank 1's rows were the second and third there
    assert torch.cat([grad[:, 0] for _, grad in results]).tolist() == list(range(10))


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


def first_half():
    strategy = make()
    for step in range(2):
        strategy.step(own_batches(strategy, step))
    state = copy.deepcopy(strategy.full_state())
    return state, [number.item() for number in strategy.step(own_batches(strategy, 2))]


def second_half(state):
    strategy = make()
    strategy.load_full_state(state if dist.get_rank() == 0 else {})
    again = copy.deepcopy(strategy.full_state())  # of rank 0
    return again, [number.item() for number in strategy.step(own_batches(strategy, 2))]


def test_resumed_on_another_number_of_ranks():
    state, numbers = launch(first_half, 4)[0]
    for nproc in (1, 2):
        (again, resumed), *others = launch(second_half, nproc, (state,))
        assert resumed == pytest.approx(numbers, rel=equality.TOLERANCE)
        assert all(other == resumed for _, other in others)
        flat, expected = equality.flatten(again), equality.flatten(state)
        assert flat.keys() == expected.keys() and all(torch.equal(flat[name], expected[name]) for name in flat)


def overflow():
    strategy = make(precision="fp16")
    scale = strategy.scaler.get_scale()
    if dist.get_rank() == 1:  # its experts' gradients are more than float16 holds, and nobody else's
        strategy.model.blocks[1].mlp.experts.up.register_hook(lambda gradient: gradient * float("inf"))
    before = [parameter.clone() for parameter in strategy.model.parameters()]
    _, norm = strategy.step(own_batches(strategy))
    same = all(torch.equal(p, b) for p, b in zip(strategy.model.parameters(), before, strict=True))
    return same, strategy.scaler.get_scale() / scale, norm.isfinite().item()


def test_one_ranks_overflow_skips_the_step_on_all():
    assert launch(overflow, 2) == [(True, 0.5, False)] * 2


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


def routed(dtype):
    """Type of the router's logits and how many tokens choose other experts than in float32, for both mixtures."""
    torch.manual_seed(0)
    layer, results = mixture.Mixture(WIDTH, EXPERTS, top_k=2, capacity_factor=1.25, std=0.02), []
    x = torch.randn(4, 64, WIDTH)
    chosen = layer.router(x).topk(2).indices
    for router in (layer.router, by_hand.ParallelMixture(layer, Axis(dist.group.WORLD, 0, 1)).router):
        with torch.autocast("cpu", dtype):
            logits = router(x)
        results.append((logits.dtype, (logits.topk(2).indices != chosen).sum().item()))
    return results


def test_the_router_is_float32_under_autocast():
    for dtype in (torch.bfloat16, torch.float16):
        assert launch(routed, 1, (dtype,)) == [[(torch.float32, 0)] * 2]


def moved_and_kept():
    """Elements of the model when it is moved to the device, and those that the strategy keeps."""
    sizes = []

    def to(module, device):
        sizes.append(sum(p.numel() for p in module.parameters()))
        return module

    torch.nn.Module.to = to  # this process ends here
    strategy = make()
    return sizes, sum(p.numel() for p in strategy.model.parameters())


def test_a_rank_moves_its_own_experts_only():
    whole = sum(p.numel() for p in make_model().parameters())
    for moved, kept in launch(moved_and_kept, 4):
        assert moved == [kept] and kept < whole / 2


def norms_only():
    """The gradient norm of a step in which no expert is trained, and that of one process."""
    torch.manual_seed(0)
    model, whole = make_model(), make_model()
    whole.load_state_dict(model.state_dict())
    for gpt in (model, whole):
        for name, parameter in gpt.named_parameters():
            parameter.requires_grad_("norm" in name)
    strategy = by_hand.ExpertParallel(model, equality.sgd, Setup(make_mesh({"expert": -1})))
    _, norm = strategy.step(own_batches(strategy))
    tokens = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
    (cross_entropy(whole(tokens[:, :-1]), tokens[:, 1:]) + whole.auxiliary_loss()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.requires_grad])
    return norm.item(), expected.item()


def test_only_norms_are_trained():
    for norm, expected in launch(norms_only, 2):
        assert norm == pytest.approx(expected, rel=1e-5) and norm > 0.01


def beside_another_axis():
    """Experts in two groups of two ranks: the largest error of a gradient over all four ranks' slices."""
    mesh = make_mesh({"data": 2, "expert": 2})
    data, expert = axis(mesh, "data"), axis(mesh, "expert")
    tokens = equality.Batches().tokens[:8]
    torch.manual_seed(0)
    whole, model = make_model(), make_model()
    model.load_state_dict(whole.state_dict())
    (cross_entropy(whole(tokens[:, :-1]), tokens[:, 1:]) + whole.auxiliary_loss()).backward()
    cut = by_hand.apply_expert_parallel(model, expert)
    own = tokens.chunk(4)[axis(mesh, "data", "expert").rank]
    ((cross_entropy(model(own[:, :-1]), own[:, 1:]) + model.auxiliary_loss()) / 4).backward()
    off = []
    for parameter, reference in zip(model.parameters(), whole.parameters(), strict=True):
        expected = reference.grad.chunk(2)[expert.rank] if parameter in cut else reference.grad
        for group in [data.group] if parameter in cut else [data.group, expert.group]:
            dist.all_reduce(parameter.grad, group=group)
        off.append(equality.difference(parameter.grad, expected))
    return max(off), len(cut)


def test_groups_beside_each_other_do_not_mix():
    for off, cut in launch(beside_another_axis, 4):
        assert off < equality.TOLERANCE and cut == 4 * LAYERS
