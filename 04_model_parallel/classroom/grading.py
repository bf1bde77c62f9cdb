"""How the exercises of chapter 04 are graded: the table EXERCISES at the end, and the checks that it names.

A check is given a world size and yields cases: the arguments of each rank, what each must return, and a pattern
that looks at the messages (common/grading/patterns.py). Expected values come from whole tensors, as one process has
them, without any message, or were worked out by hand.
"""

import itertools
import math

import torch
from torch.nn import functional as F

from common.grading.engine import ExerciseCase, Wrong, exercise
from common.grading.patterns import (
    calculated,
    calls_in_words,
    collectives,
    exactly,
    messages_of,
    nothing_sent,
    numbered,
    sends_at_most,
)
from common.lab.ledger import wire_bytes


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Odd numbers from -5 to 5: their sums and products are exact, and odd many of them do not add up to zero."""
    return 2 * torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype) + 1


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


# --- layers split over ranks ---------------------------------------------------------------------


def balanced_cut(size):
    """Expected: every cut tried, and a single one is best."""
    rows = []
    for costs, parts in (
        ([5, 1, 1, 1, 1, 3], 2),
        ([7, 2, 5, 10, 8], 2),
        ([9, 2, 2, 2, 2, 2, 7], 3),
        ([4, 3, 4, 1], 2),
        ([10, 1, 1, 1], 4),
        ([4, 2, 8], 1),
    ):
        ways = {}
        for cut in itertools.combinations(range(1, len(costs)), parts - 1):
            ends = list(itertools.pairwise((0, *cut, len(costs))))
            ways.setdefault(max(sum(costs[a:b]) for a, b in ends), []).append([b - a for a, b in ends])
        (best,) = ways[min(ways)]
        rows.append((costs, parts, best))
    yield from calculated(size, "balanced_cut", rows)


def frozen_step(size):
    for batch, widths, frozen in ((2, (3, 2, 4, 3, 2), 0), (1, (1, 3, 1, 2, 4), 1), (2, (2, 3, 2, 1, 3), size - 1)):
        weights = [normal(10 * batch + rank, *widths[rank : rank + 2]).requires_grad_() for rank in range(size)]
        inputs, targets = normal(5, batch, widths[0]), normal(6, batch, widths[size])
        outputs = inputs
        for weight in weights:
            outputs = torch.tanh(outputs @ weight)
        gradients = torch.autograd.grad((outputs - targets).square().sum(), weights[frozen:])
        ends = [inputs if rank == 0 else None for rank in range(size)], [*[None] * (size - 1), targets]
        arguments = [(weight.detach(), *end, batch, frozen) for weight, *end in zip(weights, *ends, strict=True)]
        forward = [[(rank + 1, 8 * batch * widths[rank + 1])] if rank < size - 1 else [] for rank in range(size)]
        backward = [[(rank - 1, 8 * batch * widths[rank])] if rank > frozen else [] for rank in range(size)]
        pattern = exactly([there + back for there, back in zip(forward, backward, strict=True)])
        what = f"a batch of {batch}, widths {widths[: size + 1]}, {frozen} frozen"
        yield ExerciseCase(what, arguments, [*[None] * frozen, *gradients], pattern)


def tied_gradient(size):
    for what, shape in (("a weight of 300 x 1,000", (300, 1000)), ("a weight of 262,145 elements", (262_145,))):
        elements = math.prod(shape)
        first, last = (numbered(rank, elements).view(shape) for rank in (0, 1))
        nobody, total = [None] * (size - 2), first + last
        pattern = exactly([[(size - 1, 4 * elements)], *([[]] * (size - 2)), [(0, 4 * elements)]])
        yield ExerciseCase(what, [(x,) for x in (first, *nobody, last)], [total, *nobody, total], pattern)


def naive_utilisation(size):
    rows = [
        ([1.0, 1.0], [2.0, 2.0], 0.0, [6.0, [0.5, 0.5]]),
        ([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 1.0, [16.0, [0.1875, 0.375, 0.1875]]),  # 12 s, and 4 messages
        ([1.0] * 4, [3.0] * 4, 0.5, [19.0, [4 / 19] * 4]),
        ([1.0], [2.0], 1.0, [3.0, [1.0]]),
    ]
    yield from calculated(size, "naive_utilisation", rows)


# --- tensor and sequence parallel ----------------------------------------------------------------


def mlp(size: int, hidden: int, width: int = 3, tokens: int = 4):
    """Whole `up` and `down`, and their parts for each rank: columns of the one, rows of the other."""
    up, down = integers(1, width, hidden * size), integers(2, hidden * size, width)
    parts = [(u.contiguous(), d) for u, d in zip(up.chunk(size, 1), down.chunk(size), strict=True)]
    return integers(3, tokens, width), up, down, parts


def parallel_mlp_backward(size):
    for hidden in (2, 5):
        x, up, down, parts = mlp(size, hidden)
        grad = integers(6, 4, 3)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
        (torch.relu(leaves[0] @ leaves[1]) @ leaves[2]).backward(grad)
        of_x, of_up, of_down = (leaf.grad for leaf in leaves)
        expected = [[of_x, u, d] for u, d in zip(of_up.chunk(size, 1), of_down.chunk(size), strict=True)]
        what = f"{hidden} hidden features on each rank"
        yield ExerciseCase(what, [(x, *part, grad) for part in parts], expected, collectives(("all_reduce", nbytes(x))))


def parallel_embedding(size):
    for rows, width, shape in ((3, 2, (2, 5)), (1, 3, (1, 4))):
        table = numbered(0, rows * size * width).view(-1, width)
        table[1] *= -1  # a maximum over the ranks is no sum
        tokens = torch.randint(0, rows * size, shape, generator=torch.Generator().manual_seed(0))
        tokens[0, :2] = torch.tensor([rows * size - 1, 0])
        expected = F.embedding(tokens, table)
        pattern = collectives(("all_reduce", nbytes(expected)))
        arguments = [(tokens, part) for part in table.chunk(size)]
        yield ExerciseCase(f"{rows} row{'s' * (rows > 1)} on each rank", arguments, [expected] * size, pattern)


def parallel_cross_entropy(size):
    for what, tokens, each, more in (
        ("small logits", 5, 30, 0.0),
        ("each token with a logit of 10,000 on the last rank", 4, 40, 10_000.0),
        ("each token with a logit of -10,000 on the last rank", 3, 20, -10_000.0),
        ("the first token alone with a logit of 10,000 on the last rank", 3, 20, 10_000.0),
    ):
        whole = normal(7, tokens, each * size)
        whole[: 1 if "alone" in what else tokens, -1] += more
        targets = torch.tensor([each * size - 1, 0, each, each - 1, 2 * each - 1])[:tokens]
        expected = F.cross_entropy(whole, targets)
        limit = round(wire_bytes("all_reduce", 3 * 8 * tokens, size))
        arguments = [(part.contiguous(), targets) for part in whole.chunk(size, 1)]
        yield ExerciseCase(what, arguments, [expected] * size, sends_at_most(limit))


def gradient_norm(size):
    """The squares of the parts of both sharded parameters add up to 64 over the ranks, those of the other to 36."""
    parts = {
        2: ([6, 2, 2, 2], [2, 2, 2, 2]),
        3: ([4, 2, 2, 2], [4, 0, 2, 2], [2, 2, 2, 0]),
        4: ([4, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 0], [2, 0, 2, 0]),
    }[size]
    replicated, pattern = torch.tensor([[4.0], [4], [2]]), collectives(("all_reduce", 8), at_most=True)
    for what, others, norm in (("two sharded parameters", [], 8.0), ("one replicated beside them", [replicated], 10.0)):
        gradients = [[*torch.tensor(part).float().chunk(2), *others] for part in parts]
        arguments = [(own, [True, True] + [False] * len(others)) for own in gradients]
        yield ExerciseCase(what, arguments, [norm] * size, pattern)


def tensor_ranks(size):
    """Worked out by hand, with a width of 10, 1,000 tokens and 7,200 FLOP/s: 16 GPUs compute 62.5 s.

    Along tensor 4 * 2 (t - 1) / t * 20,000 t / 16 bytes, which is 10,000 (t - 1), along data 2 (d - 1) / d * 2,400 / t.
    On 16 GPUs with 1,000 and 100 bytes/s: t = 1 takes 62.5 + 45 s, t = 2 10 + 21, t = 4 30 + 9, t = 16 15 * 100. With
    10 bytes/s between t = 2 takes 10 + 210 s, t = 4 30 + 90, t = 8 70 + 30.
    """
    rows = [
        (10, 1000, 16, 1, 7200.0, 1000.0, 100.0, [2, 93.5]),
        (10, 1000, 16, 4, 7200.0, 1000.0, 100.0, [4, 101.5]),
        (10, 1000, 16, 1, 7200.0, 1000.0, 10.0, [8, 162.5]),
        (10, 1000, 16, 16, 7200.0, 1000.0, 100.0, [16, 1562.5]),
        (10, 1000, 8, 1, 7200.0, 1000.0, 1.0, [1, 129.2]),
        (10, 1000, 1, 1, 7200.0, 1000.0, 100.0, [1, 1000.0]),
    ]
    yield from calculated(size, "tensor_ranks", rows)


def parallel_dropout(size):
    for dimension, shape in ((None, (3, 4)), (0, (2 * size, 3)), (1, (3, 4 * size, 2))):
        whole = integers(8, *shape)
        for probability, seed in ((0.5, 3), (0.25, 4)):
            mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= probability
            dropped = whole * mask / (1 - probability)
            parts = [[x] * size if dimension is None else x.chunk(size, dimension) for x in (whole, dropped)]
            arguments = [(part.contiguous(), probability, seed, dimension) for part in parts[0]]
            what = f"probability {probability}, dimension {dimension}"
            yield ExerciseCase(what, arguments, list(parts[1]), nothing_sent)


# --- long contexts -------------------------------------------------------------------------------


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp; for a row of minus infinities zeros, and minus infinity."""
    return torch.nan_to_num(scores.softmax(-1)) @ values, scores.logsumexp(-1)


def round_the_ring(total: int):
    """All messages go to the next rank, `total` bytes from each."""

    def pattern(entries):
        messages = messages_of(entries)
        for rank, sent in enumerate(messages):
            following, sum_sent = (rank + 1) % len(messages), sum(size for _, size in sent)
            if any(peer != following for peer, _ in sent):
                raise Wrong(f"messages to rank {following}", f"to ranks {sorted({peer for peer, _ in sent})}", rank)
            if sum_sent != total:
                raise Wrong(f"{total} bytes to the next rank", f"{sum_sent} bytes", rank)

    return pattern


def repaired_attention(size):
    """In the second case the scores of a key grow with its rank, so that the largest comes last to some and first to
    others."""
    for what, heads, each, d, growth in (
        ("scores close to 0", 2, 3, 4, 0.0),
        ("keys that grow with the rank", 1, 2, 2, 1.0),
        ("scores as large as 1,000", 1, 1, 2, 300.0),
    ):
        q, k, v = (normal(11 + n, heads, each * size, d) for n in range(3))
        if growth:
            q, k = q.abs() + 0.5, k.abs() * (1 + growth * torch.arange(each * size).view(1, -1, 1) // each)
        else:
            q = q / 100
        whole = F.scaled_dot_product_attention(q, k, v)
        arguments = [tuple(x.chunk(size, 1)[rank].contiguous() for x in (q, k, v)) for rank in range(size)]
        pattern = round_the_ring((size - 1) * 2 * nbytes(arguments[0][1]))
        yield ExerciseCase(what, arguments, list(whole.chunk(size, 1)), pattern)


def ring_pairs(size):
    """On 2 ranks with 4 tokens each, in order: 10 pairs in turn 0, 16 on rank 1 in turn 1. In zig-zag order: 10 and 8.
    In the third row the ranks have 3 3 3, 0 4 2 and 0 2 4 pairs in the three turns.
    """
    rows = [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 26),
        ([[0, 1, 6, 7], [2, 3, 4, 5]], 18),
        ([[0, 1], [2, 5], [4, 3]], 3 + 4 + 4),
        ([[0, 1, 2]], 6),
    ]
    yield from calculated(size, "ring_pairs", rows)


def sequence_to_heads(size):
    for each, heads, d in ((3, 1, 2), (1, 2, 1), (2, 3, 4)):
        whole = numbered(0, each * size * heads * size * d).view(each * size, heads * size, d)
        arguments = [(part,) for part in whole.chunk(size)]
        pattern = collectives(("all_to_all", nbytes(arguments[0][0])))
        what = f"{each} token{'s' * (each > 1)} on each rank, {heads * size} heads"
        yield ExerciseCase(what, arguments, [part.contiguous() for part in whole.chunk(size, 1)], pattern)


# --- experts -------------------------------------------------------------------------------------


def apply_capacity(size):
    """Worked out by hand. Choices of the five tokens: 0 1, 0 2, 0 1, 1 0, 0 2."""
    if size > 2:
        return
    probabilities = torch.tensor([[6, 3, 1], [7, 1, 2], [5, 4, 1], [2, 7, 1], [7.5, 0.5, 2]]) / 10
    for k, capacity, expected in (
        (1, 2, [[0, 1], [3], []]),
        (2, 1, [[0], [0], [1]]),
        (2, 2, [[0, 1], [0, 2], [1, 4]]),
        (2, 5, [[0, 1, 2, 3, 4], [0, 2, 3], [1, 4]]),
        (1, 5, [[0, 1, 2, 4], [3], []]),
    ):
        what = f"5 tokens, k {k}, capacity {capacity}"
        yield ExerciseCase(what, [(probabilities, k, capacity)] * size, [expected] * size, nothing_sent)


def three_all_to_alls(counts: list[list[int]], row: int):
    """`counts[source][target]` tokens of `row` bytes go out and back; before, N numbers of 8 bytes."""

    def pattern(entries):
        for rank, own in enumerate(entries):
            out, back = sum(counts[rank]), sum(source[rank] for source in counts)
            want = [("all_to_all", nbytes) for nbytes in (8 * len(counts), out * row, back * row)]
            got = [(entry.operation, entry.payload) for entry in own]
            if want != got:
                raise Wrong(calls_in_words(want), calls_in_words(got), rank)

    return pattern


def load_balancing_loss(size):
    for what, counts in (("3 tokens on each rank", (3, 3, 3, 3)), ("unequal numbers", (1, 4, 0, 2))):
        parts = [normal(40 + rank, count, 4).mul(2).softmax(-1) for rank, count in enumerate(counts[:size])]
        whole = torch.cat(parts)
        shares = torch.bincount(whole.argmax(-1), minlength=4).double() / len(whole)
        loss = 4 * (shares * whole.mean(0)).sum().item()
        pattern = collectives(("all_reduce", 72), at_most=True)
        yield ExerciseCase(what, [(part,) for part in parts], [loss] * size, pattern)


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


def draw_balanced_cut(random):
    """One cut is best."""
    while True:
        costs, parts = [random.randint(1, 60) for _ in range(random.randint(5, 9))], random.randint(2, 4)
        cuts = ((0, *cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1))
        largest = sorted(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        if largest[0] < largest[1]:
            return costs, parts


def draw_naive_utilisation(random):
    ranks = random.randint(2, 6)
    forward, backward = ([random.randint(1, 16) / 4 for _ in range(ranks)] for _ in range(2))
    return forward, backward, random.choice([0.0, 0.25, 0.5, 2.0])


def draw_tensor_ranks(random):
    gpus, width = random.choice([8, 16, 32]), random.choice([4096, 8192])
    smallest, tokens = random.choice([1, 2, 4]), 1024 * random.randint(4, 64)
    return width, tokens, gpus, smallest, 795e12, random.choice([350e9, 700e9]), random.choice([25e9, 150e9, 300e9])


def draw_ring_pairs(random):
    ranks, each = random.randint(2, 5), random.randint(2, 6)
    positions = list(range(ranks * each))
    random.shuffle(positions)
    return ([positions[each * rank : each * (rank + 1)] for rank in range(ranks)],)


EXERCISES = [
    exercise(
        balanced_cut,
        points=2,
        dots=2,
        hint="Turn the question round: with a limit on every rank's cost, filling rank after rank as full as it goes "
        "needs the fewest ranks. Which is the smallest limit that will do? Or try all cuts: there are few.",
        draw=draw_balanced_cut,
    ),
    exercise(
        frozen_step,
        points=3,
        dots=3,
        hint="Who needs the gradient of x? Only ranks before this one that train. If there are some, call "
        "requires_grad_() on what you receive, so that it is a leaf that gets a gradient; on the way back "
        "outputs.backward(gradient) goes on with what arrived.",
    ),
    exercise(
        tied_gradient,
        points=2,
        dots=2,
        hint="Two ranks that both send first wait for each other as soon as the message is large. dist.isend "
        "returns at once; wait for it after the receive.",
    ),
    exercise(
        naive_utilisation,
        points=1,
        dots=1,
        hint="At every moment at most one rank computes, so the seconds of all add up. N ranks have N - 1 "
        "boundaries, each of which is crossed twice.",
        draw=draw_naive_utilisation,
    ),
    exercise(
        parallel_mlp_backward,
        points=3,
        dots=3,
        hint="Forward: x is copied to all ranks, and the outputs are summed. Backward, a sum copies the gradient to "
        "its summands, and a copy sums the gradients of its copies.",
        mistakes={
            "as item 0, got [[25, -15, -25], [15, -9, -15]": (
                "This is rank 0's summand. `x` went to all ranks, so its gradient is the sum of what comes back "
                "through each rank's hidden features."
            ),
            "as item 0, got [[50, -30, -50], [30, -18, -30]": (
                "`grad_output` was summed, which every rank has whole already; the gradient of `x`, which each "
                "rank has a part of, was not."
            ),
            "as item 0, got [[50, -30, -50], [118": (
                "Both were summed. Every rank has the whole `grad_output` already: only the gradient of `x` is a "
                "sum over the ranks."
            ),
            "as item 0, got [[-4, -88, 20]": (
                "The relu is missing: it lets a gradient through where its input was positive, and nowhere else."
            ),
            "as item 0, got [[-13, -43, 29]": (
                "The relu was applied to the gradient. Its derivative is 1 where x @ up was positive and 0 "
                "elsewhere: a mask."
            ),
            "as item 1, got [[-24, -43]": (
                "The gradient of `up` was summed over the ranks, as in data parallelism. But each rank has other "
                "columns: their gradients stay apart."
            ),
            "expected all_reduce of 48 bytes, got all_reduce of 48 bytes, all_reduce": (
                "One of these all-reduces is too many: the outputs of the forward pass are not needed, only where"
                " x @ up is positive."
            ),
        },
    ),
    exercise(
        parallel_embedding,
        points=2,
        dots=2,
        hint="Subtract the first row that this rank has from the tokens. Look up those that then lie inside the part "
        "(and anything for the others), and set the rows of the others to zero before the sum.",
    ),
    exercise(
        parallel_cross_entropy,
        points=3,
        dots=3,
        hint="log(sum of exp(logit)) - logit of the target. Three numbers for each token cross the ranks: the largest "
        "logit, the sum of exp(logit - largest), and the logit of the target, for which all ranks but one give 0.",
    ),
    exercise(
        gradient_norm,
        points=2,
        dots=2,
        hint="Squares add up, norms don't. The squares of sharded gradients go into the all-reduce; those of "
        "replicated ones, which each rank has already, are added after it.",
    ),
    exercise(
        tensor_ranks,
        points=2,
        dots=2,
        hint="More ranks along tensor: a replica has more tokens to all-reduce, and each GPU fewer gradients. Compute "
        "all three times for t = smallest, 2 * smallest, ..., gpus, and take the least sum.",
        draw=draw_tensor_ranks,
    ),
    exercise(
        parallel_dropout,
        points=2,
        dots=2,
        hint="Draw the mask of the whole activations on every rank, of N times the length along the dimension that is "
        "cut, then take this rank's part of it.",
    ),
    exercise(
        repaired_attention,
        points=3,
        dots=3,
        hint="Take one query and two turns, with one key in each, and compute out and total by hand: first with the "
        "larger score in the first turn, then in the second. What are the summands of total divided by, at the end?",
        mistakes={
            "scores close to 0, rank 0: ... got 0.17427": "The sum of the weights still holds those of earlier turns, "
            "relative to a maximum that has grown since: total needs the factor that out has.",
            "scores as large as 1,000 ... nan": "exp(1,000) overflows: subtract the largest score so far first.",
        },
    ),
    exercise(
        ring_pairs,
        points=2,
        dots=2,
        hint="In turn t rank r has the keys of rank (r - t) % size. Count with two loops over positions. The slowest "
        "rank of one turn need not be that of the next: max inside the sum.",
        draw=draw_ring_pairs,
    ),
    exercise(
        sequence_to_heads,
        points=2,
        dots=2,
        hint="Part p of what is sent must be rank p's heads of all tokens here: x.chunk(N, dim=1), stacked, is "
        "contiguous. Part p of what arrives has the tokens of rank p.",
    ),
    exercise(
        apply_capacity,
        points=2,
        dots=2,
        hint="probabilities.topk(k).indices has a token's choices from left to right. The outer loop is over tokens.",
    ),
    exercise(
        load_balancing_loss,
        points=3,
        dots=3,
        hint="f and P are means over the tokens of all ranks. Find both first, with one all-reduce of counts and "
        "sums, and multiply after that. The sum of the counts tells how many tokens there are.",
    ),
]
