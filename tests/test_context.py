"""Context parallelism: ring attention and Ulysses are plain attention, both ways, and send what they should."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from common import data
from common.errors import UserError
from common.lab import equality
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.model import GPT
from common.ranks import Ranks
from course.model_parallel import by_hand_ring_attention as ring
from course.model_parallel import by_hand_ulysses as ulysses

VERSIONS = {  # name -> (attention, order of the chunks)
    "zig-zag ring": (ring.ring_attention, ring.zigzag),
    "contiguous ring": (lambda q, k, v, causal: ring.ring_attention(q, k, v, causal, ring.contiguous), ring.contiguous),
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
                out = attention(*inputs, causal)
                out.backward(grad)
                got = [out.detach(), *(x.grad for x in inputs)]
                expected = [x[:, :, where] for x in plain(shape, causal)]
                off[name, shape, causal] = [equality.difference(a, b) for a, b in zip(got, expected, strict=True)]
    return off


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_attention_equals_plain_attention(nproc):
    for rank, off in enumerate(launch(differences, nproc)):
        assert len(off) == 3 * 3 * 2
        for case, numbers in off.items():
            assert max(numbers) < equality.TOLERANCE, (rank, case, numbers)
    masked, full = plain(SHAPES[0], True), plain(SHAPES[0], False)
    assert all(equality.difference(a, b) > 0.1 for a, b in zip(masked, full, strict=True))  # the mask matters


@pytest.mark.parametrize("nproc", [1, 2, 3, 4, 64])
def test_every_token_has_one_place(nproc):
    for order in (ring.zigzag, ring.contiguous):
        where = torch.cat([ring.positions(rank, nproc, 4 * nproc, order) for rank in range(nproc)])
        assert where.sort().values.tolist() == list(range(4 * nproc))
    assert ring.positions(1, 4, 16, ring.zigzag).tolist() == [2, 3, 12, 13]
    assert ring.positions(1, 4, 16, ring.contiguous).tolist() == [4, 5, 6, 7]


def work(rank, size, order, causal=True) -> float:
    """Blocks that a rank computes; one on the diagonal is half a block."""
    sources = range(size)
    blocks = [b for s in sources for b in ring.pairs(order(rank, size), order(s, size), causal)]
    return sum(0.5 if diagonal else 1.0 for _, _, diagonal in blocks)


@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_zigzag_gives_every_rank_the_same_work(size):
    """2N chunks: (2N)^2 / 2 blocks below the diagonal, 2N for each rank. Without zig-zag the last has nearly twice."""
    assert [work(rank, size, ring.zigzag) for rank in range(size)] == [2 * size] * size
    assert [work(rank, size, ring.contiguous) for rank in range(size)] == [4 * rank + 2 for rank in range(size)]
    assert [work(rank, size, ring.zigzag, causal=False) for rank in range(size)] == [4 * size] * size


def messages() -> list[tuple]:
    """What attention alone sends, forward and backward, by the ring and by Ulysses; bytes of this rank's part of k."""
    return [messages_of(*VERSIONS[name]) for name in ("zig-zag ring", "ulysses")]


def messages_of(attention, order) -> tuple:
    rank, size = dist.get_rank(), dist.get_world_size()
    where = ring.positions(rank, size, 24, order)
    *inputs, grad = (x[:, :, where] for x in example(SHAPES[0]))
    inputs = [x.requires_grad_() for x in inputs]
    with Ledger() as forward:
        out = attention(*inputs, True)
    with Ledger() as backward:
        out.backward(grad)
    return forward, backward, 4 * inputs[1].numel()


@pytest.mark.parametrize("nproc", [1, 2, 4])
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
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    model = equality.frozen()
    strategy = strategy_class(model, equality.sgd, ranks)
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
            ring.ring_attention(q, k, v)
        totals.append((sum(kept), max(kept)))
    return totals


@pytest.mark.parametrize("nproc", [1, 4])
def test_scores_are_never_kept(nproc):
    """q, k, v, the output, and one log-sum-exp for each query: linear in the tokens of this rank."""
    parts = [4 * 1 * 2 * (time // nproc) * 4 for time in (64, 256)]
    assert launch(saved, nproc, ((64, 256),)) == [[(4 * part + part // 4, part) for part in parts]] * nproc


def test_16_bit_precision():
    """Keys and values come in bf16 under autocast, and gradients go back as bf16."""

    def work():
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
        batch = data.micro_batches(equality.Batches(), torch.arange(24), 0, 1, 1, "cpu")
        torch.manual_seed(0)
        return [
            strategy_class(GPT(2, 16, 4, equality.CONTEXT), equality.sgd, ranks, precision).step(batch)[1].item()
            for strategy_class in (ring.ContextParallel, ulysses.Ulysses)
            for precision in ("fp32", "bf16")
        ]

    for numbers in launch(work, 2):
        for full, half in (numbers[:2], numbers[2:]):
            assert half != full
            assert half == pytest.approx(full, rel=0.5)


BAD = [
    (ring.ContextParallel, GPT(1, 16, 4, context=12), 4, r"--context 12 does not divide into 8 chunks, .* is 16"),
    (ulysses.Ulysses, GPT(1, 16, 2, context=16), 4, r"--heads 2 does not divide by 4 ranks"),
]


@pytest.mark.parametrize("strategy_class, model, nproc, line", BAD, ids=["context", "heads"])
def test_bad_input(strategy_class, model, nproc, line):
    with pytest.raises(UserError, match=line) as error:  # no process group: nothing was sent before it was said
        strategy_class(model, equality.sgd, Ranks(0, nproc, 0, torch.device("cpu")))
    assert len(str(error.value).splitlines()) == 1


def test_a_mistake_in_a_method_is_shown_with_its_class():
    from course.model_parallel.classroom.bugs import BUGS as bugs
    for name in ("gradients_stay", "wrong_way_round", "own_gradients", "not_rescaled"):
        assert bugs[name].wrong in bugs.excerpt(name) and len(bugs.excerpt(name)) < len(bugs.source(name))
    assert bugs["gradients_stay"].right not in bugs.excerpt("gradients_stay")
