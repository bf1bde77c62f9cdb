"""The programs that train wrongly, one in each chapter: each has the symptoms that its exercise tells of."""

import pytest
import torch
import torch.distributed as dist

from common.lab.launch import launch
from course.data_parallel import faulty as data_parallel
from course.ddp import faulty as ddp
from course.fsdp import faulty as fsdp
from course.intro import faulty as intro
from course.model_parallel import faulty as model_parallel
from course.pipeline import faulty as pipeline


def near(a, b, atol=1e-10):
    return torch.allclose(a, b, rtol=0, atol=atol)


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- chapter 01 -----------------------------------------------------------------------------------------------


def descent(weights, inputs, targets, rate, steps):
    """One process, with all examples: (the weights after each step, the losses)."""
    weights, found, losses = [weight.clone().requires_grad_() for weight in weights], [], []
    for _ in range(steps):
        loss = (inputs @ weights[0] + inputs.square() @ weights[1] - targets).square().mean()
        slopes = torch.autograd.grad(loss, weights)
        weights = [(w - rate * slope).detach().requires_grad_() for w, slope in zip(weights, slopes, strict=True)]
        found.append([weight.detach() for weight in weights])
        losses.append(loss.item())
    return found, losses


def in_another_order(alike):
    """(is the step right, the sum of both changes, this rank's weights after it, its loss after 40, the right one)."""
    data = [normal(0 if alike else rank, 6, 3) * (0.9 if rank and not alike else 0.3) for rank in range(2)]
    targets = [x.sum(1) + x.square().sum(1) for x in data]
    weights = [torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    rank = dist.get_rank()
    right = descent(weights, torch.cat(data), torch.cat(targets), 0.01, 1)[0][0]
    found = intro.faulty_training(weights, data[rank], targets[rank], 0.01, 1)
    later = intro.faulty_training(weights, data[rank], targets[rank], 0.01, 40)
    ends = later, descent(weights, torch.cat(data), torch.cat(targets), 0.01, 40)[0][-1]
    losses = [descent(at, torch.cat(data), torch.cat(targets), 0.01, 1)[1][0] for at in ends]
    return near(found[0], right[0]), near(found[1], right[1]), near(sum(found), sum(right)), found, losses


def test_training_in_another_order():
    for first, second, together, *_ in launch(in_another_order, 2, (True,)):
        assert first and second and together
    ranks = launch(in_another_order, 2, (False,))
    for first, second, together, _, (wrong, right) in ranks:
        assert not first and not second and together and wrong > right
    (*_, on_0, _), (*_, on_1, _) = ranks
    assert not near(on_0[0], on_1[0])


# --- chapter 02 -----------------------------------------------------------------------------------------------


def test_training_with_old_replicas():
    inputs = normal(0, 12, 4)
    targets, start = inputs.sum(1), torch.zeros(4, dtype=torch.float64)

    def loss(weight):
        return (inputs @ weight - targets).square().mean().item()

    def after(devices, steps):
        return data_parallel.faulty_training(start, inputs, targets, devices, 0.05, steps)

    right = [loss(after(1, steps)) for steps in range(41)]
    assert (
        right == sorted(right, reverse=True) and near(after(3, 1), after(1, 1)) and not near(after(3, 2), after(1, 2))
    )
    curves = {devices: [loss(after(devices, steps)) for steps in range(81)] for devices in (2, 3, 4)}
    turns = []
    for curve in curves.values():
        lowest = curve.index(min(curve))
        assert min(a - b for a, b in zip(curve[1 : lowest + 1], right[1:], strict=False)) < 0, "below the right one"
        assert curve[80] > curve[lowest], "and up again"
        turns.append(lowest)
    assert turns == sorted(turns, reverse=True), "the sooner the more devices"


# --- chapter 03 -----------------------------------------------------------------------------------------------


def reduced():
    """Steps 0, 1 and 2 of three gradients: rank 1 lacks the second one in step 1, nobody has the third in step 2."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes, reducer = [(2,), (3,), ()], ddp.FaultyReducer([(2,), (3,), ()])
    gradients = [[[normal(100 * r + 10 * k + i, *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]
                  for r in range(size)] for k in range(3)]  # fmt: skip
    gradients[1][1][1] = None
    for own in gradients[2]:
        own[2] = None
    found = [reducer.average(step[rank]) for step in gradients]
    expected = [
        [sum(torch.zeros(shape) if own[i] is None else own[i] for own in step) / size for i, shape in enumerate(shapes)]
        for step in gradients
    ]
    right = [[near(a, b, 1e-6) for a, b in zip(*row, strict=True)] for row in zip(found, expected, strict=True)]
    return right, near(found[2][2], found[1][2], 1e-6), found


def test_a_reducer_that_keeps_what_was_there():
    ranks = launch(reduced, 2)
    for right, again, found in ranks:
        assert right == [[True, True, True], [True, False, True], [True, True, False]]
        assert again, "exactly the average of the step before"
        assert all(
            torch.equal(a, b) for x, y in zip(found, ranks[0][2], strict=True) for a, b in zip(x, y, strict=True)
        )


# --- chapter 04 -----------------------------------------------------------------------------------------------


def attended(scale, ones=False, turned=0):
    size = dist.get_world_size()
    q, k, v = (normal(seed, 2, 4 * size, 3) for seed in range(3))
    v, k = torch.ones_like(v) if ones else v, k.roll(turned, 1)
    whole = torch.nn.functional.scaled_dot_product_attention(scale * q, k, v)
    own = [x.chunk(size, 1)[dist.get_rank()] for x in (scale * q, k, v, whole)]
    return (model_parallel.faulty_attention(*own[:3]) - own[3]).abs().amax(-1) if not ones else (
        model_parallel.faulty_attention(*own[:3])[..., 0]
    )  # fmt: skip


def test_attention_whose_sum_is_not_scaled():
    assert launch(attended, 1, (3.0,))[0].max() < 1e-12
    small, large = (torch.cat(launch(attended, 4, (scale,)), 1) for scale in (0.01, 3.0))
    assert 0 < small.max() < 0.02 < large.max()
    rows = [torch.cat(launch(attended, 4, (3.0, True, turned)), 1) for turned in (0, 4)]
    right = [(row - 1).abs() < 1e-12 for row in rows]
    assert all(0 < mask.sum() < mask.numel() and row.max() < 1 + 1e-12 for mask, row in zip(right, rows, strict=True))
    assert not torch.equal(*right), "other queries"


# --- chapter 05 -----------------------------------------------------------------------------------------------


def with_symptoms(microbatches):
    """For this rank: are the gradients of weight and bias those of a process that has all layers?"""
    torch.manual_seed(0)
    rank, size, batch = dist.get_rank(), dist.get_world_size(), 2 * microbatches
    layers = [[torch.randn(*shape).requires_grad_() for shape in ((3, 3), (3,))] for _ in range(size)]
    inputs, targets = torch.randn(batch, 3), torch.randn(batch, 3)
    x = inputs
    for weight, bias in layers:
        x = torch.tanh(x @ weight + bias)
    expected = torch.autograd.grad((x - targets).square().mean(), layers[rank])
    own = [None if rank else inputs, targets if rank == size - 1 else None]
    found = pipeline.faulty_step(*(p.detach() for p in layers[rank]), *own, batch, microbatches)
    return [near(a, b, 1e-6) for a, b in zip(found, expected, strict=True)]


def test_a_pipeline_with_one_buffer():
    assert launch(with_symptoms, 3, (1,)) == [[True, True]] * 3
    assert launch(with_symptoms, 3, (4,)) == [[True, True], [False, True], [False, True]]


# --- chapter 06 -----------------------------------------------------------------------------------------------


def off(lengths):
    """[rank whose shard it is in, element of its parameter] of each element that is off, and by how much at most beside
    rate * decay * value."""
    size = dist.get_world_size()
    parameters = [normal(seed, length) for seed, length in enumerate(lengths)]
    gradients, decays = [normal(50 + dist.get_rank(), length) for length in lengths], [True, False] * 99
    average = [sum(normal(50 + rank, length) for rank in range(size)) / size for length in lengths]
    decays = decays[: len(lengths)]
    expected = [p - 0.1 * (g + 0.5 * on * p) for p, g, on in zip(parameters, average, decays, strict=True)]
    found = fsdp.faulty_step(parameters, gradients, decays, 0.1, 0.5)
    each, start, places, beside = -(-sum(lengths) // size), 0, [], 0.0
    for p, a, b in zip(parameters, found, expected, strict=True):
        wrong = (~torch.isclose(a, b, rtol=0, atol=1e-12)).nonzero().flatten()
        places += [[(start + i) // each, i] for i in wrong.tolist()]
        beside = max([beside, *((a - b).abs() - 0.05 * p.abs())[wrong].abs().tolist()])
        start += len(p)
    return places, beside


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_decay_by_a_mask_that_is_cut_elsewhere(ranks):
    lengths = [40, 10, 40, 10] * 12
    for places, _ in launch(off, ranks, (lengths,)):
        assert places == []
    found = launch(off, ranks, ([*lengths, 1],))
    assert all(one == found[0] for one in found), "all ranks agree"
    places, beside = found[0]
    assert beside < 1e-12, "by rate * decay * value"
    assert {rank for rank, _ in places} == set(range(1, ranks)), "not in rank 0's shard"
    assert {(rank, element) for rank, element in places} == {(r, e) for r in range(1, ranks) for e in range(r)}
