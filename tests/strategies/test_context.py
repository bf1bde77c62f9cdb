"""Context parallelism: ring attention and Ulysses are plain attention, both ways, and send what they should."""

import pytest
import torch
import torch.distributed as dist
from helpers import FULL
from torch.nn import functional as F

from common import data
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.model import cross_entropy
from common.strategy import Setup
from course.intro import by_hand
from course.model_parallel import by_hand_ring_attention as ring
from course.model_parallel import by_hand_tensor as tensor
from course.model_parallel import by_hand_ulysses as ulysses
from course.pipeline.executor import All

VERSIONS = {  # name -> (attention, order of the chunks)
    "zig-zag ring": (ring.ring_attention, ring.zigzag),
    "contiguous ring": (ring.ring_attention, ring.contiguous),
    "ulysses": (ulysses.ulysses_attention, ring.contiguous),
}
SHAPES = [(2, 12, 24, 4), (1, 12, 48, 8), (3, 24, 72, 2)]  # batch, heads, time, d; for 1 to 4 ranks


def example(shape) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output. Scores up to ten or so: a block's weights differ by large factors."""
    torch.manual_seed(sum(shape))
    q, k, v, grad = (torch.randn(shape) for _ in range(4))
    return [2 * q, k + 1, v, grad]


def plain(shape, causal) -> list[torch.Tensor]:
    """Output and gradients of q, k, v of PyTorch's attention on one process."""
    *inputs, grad = example(shape)
    inputs = [x.requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs)]


def differences() -> dict:
    """How far this rank's part is off, relative to the largest element, for each version, shape and mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    off = {}
    for name, (attention, order) in VERSIONS.items():
        for shape in SHAPES:
            for causal in (True, False):
                where = ring.positions(rank, size, shape[2], order)
                *inputs, grad = (x[:, :, where] for x in example(shape))
                inputs = [x.requires_grad_() for x in inputs]
                out = attention(*inputs, dist.group.WORLD, causal, order)
                out.backward(grad)
                got = [out.detach(), *(x.grad for x in inputs)]
                expected = [x[:, :, where] for x in plain(shape, causal)]
                off[name, shape, causal] = [equality.difference(a, b) for a, b in zip(got, expected, strict=True)]
    return off


@pytest.mark.parametrize("nproc", [1, 2, 3, 4] if FULL else [3, 4])
def test_attention_equals_plain_attention(nproc):
    for rank, off in enumerate(launch(differences, nproc)):
        assert len(off) == 3 * 3 * 2
        for case, numbers in off.items():
            assert max(numbers) < equality.TOLERANCE, (rank, case, numbers)
    masked, full = plain(SHAPES[0], True), plain(SHAPES[0], False)
    assert all(equality.difference(a, b) > 0.1 for a, b in zip(masked, full, strict=True))  # the mask matters


def with_one_handle() -> tuple[list, list]:
    """NCCL has one Work for all messages of a batch. What a ring then attends to, and what an all-reduce adds up."""
    start = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda messages: [All(start(messages))]  # this process ends with the test
    sums = [torch.arange(5.0) for _ in range(2)]
    by_hand.ring(sums[0])
    by_hand.recursive_doubling(sums[1])
    return list(differences().values()), sums


def test_a_batch_of_messages_may_have_one_handle():
    for off, sums in launch(with_one_handle, 2):
        assert max(map(max, off)) < equality.TOLERANCE
        assert all(torch.equal(found, 2 * torch.arange(5.0)) for found in sums)


def messages() -> list[tuple]:
    """What attention alone sends, forward and backward, by the ring and by Ulysses; bytes of this rank's part of k."""
    return [messages_of(*VERSIONS[name]) for name in ("zig-zag ring", "ulysses")]


def messages_of(attention, order) -> tuple:
    rank, size = dist.get_rank(), dist.get_world_size()
    where = ring.positions(rank, size, 24, order)
    *inputs, grad = (x[:, :, where] for x in example(SHAPES[0]))
    inputs = [x.requires_grad_() for x in inputs]
    with Ledger() as forward:
        out = attention(*inputs, dist.group.WORLD, True, order)
    with Ledger() as backward:
        out.backward(grad)
    return forward, backward, 4 * inputs[1].numel()


@pytest.mark.parametrize("nproc", [1, 4])
def test_what_attention_sends(nproc):
    """S bytes of keys on each rank. Ring: keys and values make N-1 hops, and again in backward, where their gradients
    make N-1 too: 6 (N-1) S in all, to the next rank alone. Ulysses: four all-to-alls each way, 8 (N-1)/N S."""
    hops = nproc - 1
    for rank, ((forward, backward, part), by_ulysses) in enumerate(launch(messages, nproc)):
        following = (rank + 1) % nproc
        assert forward.messages == [(following, 2 * part)] * hops
        assert backward.messages == [(following, 2 * part)] * (2 * hops)
        assert forward.received == forward.sent and backward.received == backward.sent
        assert set(forward.calls) | set(backward.calls) == ({"send", "recv"} if hops else set())
        assert forward.sent + backward.sent == 6 * hops * part
        forward, backward, part = by_ulysses
        assert forward.calls == {"all_to_all": 4} and backward.calls == {"all_to_all": 4}
        assert forward.sent == backward.sent == 4 * hops / nproc * part


def steps(accumulate) -> list[tuple]:
    return [a_step(strategy_class, accumulate) for strategy_class in (ring.ContextParallel, ulysses.Ulysses)]


def a_step(strategy_class, accumulate) -> tuple:
    """Calls and bytes of one step, and how many elements are trained."""
    model = equality.frozen()
    strategy = strategy_class(model, equality.sgd, Setup(make_mesh({"context": -1})))
    batch = data.global_batch(0, 0, equality.BATCH, equality.Batches.size)
    with Ledger() as ledger:
        strategy.step(data.micro_batches(equality.Batches(), batch, 0, 1, accumulate, "cpu"))
    return ledger.calls, ledger.sent, sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("nproc, accumulate", [(2, 1), (4, 3)])
def test_what_a_step_sends(nproc, accumulate):
    """Attention's messages in both layers for every micro-batch; then the gradients and the loss, once."""
    keys = 4 * equality.BATCH * equality.CONTEXT * 16 // nproc  # of all micro-batches: 4 bytes x tokens x width
    hops = 2 * 3 * (nproc - 1) * accumulate
    expected = [
        (6 * (nproc - 1) * keys, {"send": hops, "recv": hops, "all_reduce": 2}),
        (8 * (nproc - 1) / nproc * keys, {"all_to_all": 2 * 8 * accumulate, "all_reduce": 2}),
    ]
    for counted in launch(steps, nproc, (accumulate,)):
        for (attention, calls), (called, sent, trained) in zip(expected, counted, strict=True):
            assert called == calls
            assert sent == 2 * attention + 2 * (nproc - 1) / nproc * 4 * (trained + 1)


def saved(times) -> list[tuple[int, int]]:
    """For each length, the bytes that attention keeps for its backward pass, and those of its largest tensor."""
    rank, size, totals = dist.get_rank(), dist.get_world_size(), []
    for time in times:
        where = ring.positions(rank, size, time, ring.zigzag)
        q, k, v, _ = (x[:, :, where].contiguous().requires_grad_() for x in example((1, 2, time, 4)))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(4 * x.numel()) or x, lambda x: x
        ):
            ring.ring_attention(q, k, v, dist.group.WORLD)
        totals.append((sum(kept), max(kept)))
    return totals


@pytest.mark.parametrize("nproc", [1, 4])
def test_scores_are_never_kept(nproc):
    """q, k, v, the output, and one log-sum-exp for each query: linear in the tokens of this rank."""
    parts = [4 * 1 * 2 * (time // nproc) * 4 for time in (64, 256)]
    assert launch(saved, nproc, ((64, 256),)) == [[(4 * part + part // 4, part) for part in parts]] * nproc


def in_16_bits(dtype) -> dict:
    """For each version: types and bytes of what is sent, and how far output and gradients are off."""
    rank, size, results = dist.get_rank(), dist.get_world_size(), {}
    for name, (attention, order) in VERSIONS.items():
        where = ring.positions(rank, size, 24, order)
        *inputs, grad = (x[:, :, where].to(dtype) for x in example(SHAPES[0]))
        inputs = [x.requires_grad_() for x in inputs]
        with Ledger() as ledger:
            out = attention(*inputs, dist.group.WORLD, True, order)
            out.backward(grad)
        got = [out.detach(), *(x.grad for x in inputs)]
        expected = [x[:, :, where] for x in plain(SHAPES[0], True)]
        off = [equality.difference(a.float(), b) for a, b in zip(got, expected, strict=True)]
        types = {entry.dtype for entry in ledger.entries}
        results[name] = (types, ledger.sent / inputs[1].nbytes, {x.dtype for x in got}, max(off))
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_sent_as_16_bits(dtype):
    """Keys and values travel in the type that they have, and sums of their gradients, on the ring, in float32: 8 (N -
    1) and 8 (N - 1) / N times as many bytes as a rank's keys have. Numbers of 8 or 11 bits are off by some times 2^-8
    or 2^-11."""
    for results in launch(in_16_bits, 4, (dtype,)):
        for name, (types, times, given, off) in results.items():
            assert types == ({dtype} if name == "ulysses" else {dtype, torch.float32}) and given == {dtype}
            assert times == (8 * 3 / 4 if name == "ulysses" else 8 * 3)
            assert torch.finfo(dtype).eps / 8 < off < 8 * torch.finfo(dtype).eps, name


# On a mesh with other axes


def with_other_axes(axes, way, sequence):
    """Largest errors of loss and gradients, with context parallelism by `way` along one axis, tensor parallelism along
    another, and other data along a third."""
    mesh = make_mesh(axes)
    context, place, batch = (axis(mesh, name) for name in ("context", "tensor", "data"))
    tokens = equality.Batches().tokens[4 * batch.rank : 4 * batch.rank + 4]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    torch.manual_seed(batch.rank)
    whole, model = equality.tied(), equality.tied()
    model.load_state_dict(whole.state_dict())
    expected_loss = cross_entropy(whole(inputs), targets)
    expected_loss.backward()
    order, cut = ring.contiguous if way == "ulysses" else ring.zigzag, {}
    if way == "tensor first":
        cut = tensor.apply_tensor_parallel(model, place, sequence)
    ulysses.apply_ulysses(model, context) if way == "ulysses" else ring.apply_context_parallel(model, context)
    if way != "tensor first":
        cut = tensor.apply_tensor_parallel(model, place, sequence)
    inputs, targets = (ring.local_tokens(x, context, order) for x in (inputs, targets))
    loss = tensor.cross_entropy(model(inputs), targets, place.group) / context.size
    loss.backward()
    for parameter in tensor.partial_gradients(model, cut, sequence):
        dist.all_reduce(parameter.grad, group=place.group)
    loss = loss.detach()
    dist.all_reduce(loss, group=context.group)
    off = [abs(loss.item() - expected_loss.item())]
    for parameter, reference in zip(model.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad, group=context.group)
        expected = reference.grad
        if parameter in cut:
            expected = expected.chunk(place.size, cut[parameter][0])[place.rank]
        off.append(equality.difference(parameter.grad, expected))
    return max(off), expected_loss.item()


def test_context_inside_of_tensor_parallelism():
    """In the order of the strategy of meshes, test_mesh.py has it; here in others, with Ulysses, and beside data."""
    ways = [("context first", True), ("tensor first", False), ("tensor first", True), ("ulysses", True)]
    inside = [({"context": 2, "tensor": 2}, *way) for way in ways]
    rows = [*inside, ({"data": 2, "context": 2}, "ulysses", False)]
    for results in launch(lambda: [with_other_axes(*row) for row in rows], 4, timeout=600):
        assert max(off for off, _ in results) < equality.TOLERANCE


# What cannot be cut


def test_ulysses_masks_in_the_order_of_the_sequence_only():
    with pytest.raises(ValueError, match="use the contiguous one"):
        ulysses.ulysses_attention(*example(SHAPES[0])[:3], None, True, ring.zigzag)


def test_a_mistake_in_a_method_is_shown_with_its_class():
    from course.model_parallel.classroom.bugs import BUGS as bugs

    for name in ("gradients_stay", "wrong_way_round", "own_gradients", "not_rescaled"):
        assert bugs[name].wrong in bugs.excerpt(name) and len(bugs.excerpt(name)) < len(bugs.source(name))
    assert bugs["gradients_stay"].right not in bugs.excerpt("gradients_stay")
