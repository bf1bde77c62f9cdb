"""How the exercises of chapter 01 are graded: the table EXERCISES at the end, and the checks that it names.

A check is given a world size and yields cases: the arguments of each rank, what each must return, and a pattern
that looks at the messages (the general ones are in common/grading/patterns.py). Expected values are computed from the
arguments of all ranks at once, without any message.
"""

import torch

from common.grading.engine import Exercise, ExerciseCase, Wrong
from common.grading.patterns import collectives, exactly, in_words, messages_of, nothing_sent, numbered

LENGTHS = (10, 8, 2)  # on 3 and 4 ranks: uneven, even on 2 and 4, fewer elements than ranks


def sizes_of_chunks(elements: int, size: int) -> list[int]:
    return [elements // size + (rank < elements % size) for rank in range(size)]


# --- patterns: what is asked of the messages ------------------------------------------------------------------


def one_all_reduce(entries):
    for rank, own in enumerate(entries):
        operations = [entry.operation for entry in own]
        if operations != ["all_reduce"]:
            raise Wrong("one all_reduce and nothing else", ", ".join(operations) or "nothing sent", rank)
        if own[0].payload > 16:
            raise Wrong("an all_reduce of two numbers", f"an all_reduce of {own[0].payload} bytes", rank)


def binomial_tree(root: int, nbytes: int):
    """Every rank but the root receives once, whole tensors travel, and the last arrives in round ceil(log2(size)).

    A rank that has the tensor since round t sends its first message in round t + 1, its second in t + 2, and so on.
    """

    def pattern(entries):
        messages = messages_of(entries)
        received = [0] * len(messages)
        for rank, sent in enumerate(messages):
            for peer, size in sent:
                received[peer] += 1
                if size != nbytes:
                    raise Wrong(f"messages of {nbytes} bytes", in_words(sent), rank)
        for rank, times in enumerate(received):
            if times != (rank != root):
                raise Wrong(f"the tensor received {int(rank != root)} time(s)", f"{times} time(s)", rank)
        arrival, reached = {root: 0}, [root]
        for rank in reached:
            for round_, (peer, _) in enumerate(messages[rank], start=arrival[rank] + 1):
                arrival[peer] = round_
                reached.append(peer)
        needed, rounds = (len(messages) - 1).bit_length(), max(arrival.values())
        if rounds != needed:
            who = "; ".join(f"rank {rank}: {in_words(sent)}" for rank, sent in enumerate(messages) if sent)
            raise Wrong(f"{needed} rounds, as in a binomial tree", f"{rounds} rounds: {who}")

    return pattern


def halving_doubling(elements: int, itemsize: int):
    """Partners at distance size/2, ..., 1, 1, ..., size/2. How an odd part is halved is free, but the two halves of
    a pair always add up to the part, so the bytes of all ranks together are 2 (size - 1) * elements * itemsize."""

    def pattern(entries):
        messages = messages_of(entries)
        size = len(messages)
        distances = [size >> step for step in range(1, size.bit_length())]
        for rank, sent in enumerate(messages):
            want, got = [rank ^ d for d in distances + distances[::-1]], [peer for peer, _ in sent]
            if got != want and elements >= size:  # else some messages are empty
                raise Wrong(f"messages to ranks {want}", f"to ranks {got}", rank)
        want, got = 2 * (size - 1) * elements * itemsize, sum(nbytes for sent in messages for _, nbytes in sent)
        if got != want:
            raise Wrong(f"{want} bytes sent by all ranks together", f"{got} bytes")

    return pattern


# --- checks: the cases of each exercise -----------------------------------------------------------------------


def ring_shift(size):
    for what, shape, dtype in (
        ("4 elements", (4,), torch.float32),
        ("a float64 matrix of 3 x 2", (3, 2), torch.float64),
        ("300,000 elements", (300_000,), torch.float32),
    ):
        inputs = [torch.full(shape, float(rank + 1), dtype=dtype) for rank in range(size)]
        nbytes = inputs[0].numel() * inputs[0].itemsize
        pattern = exactly([[((rank + 1) % size, nbytes)] for rank in range(size)])
        yield ExerciseCase(what, [(x,) for x in inputs], [inputs[rank - 1] for rank in range(size)], pattern)


def global_mean(size):
    for counts in ((1, 3, 4, 2), (2, 2, 2, 2), (3, 0, 1, 0)):
        counts = counts[:size]
        inputs = [numbered(rank, count) for rank, count in enumerate(counts)]
        mean = torch.cat(inputs).mean()
        what = f"{', '.join(map(str, counts))} values on the ranks"
        yield ExerciseCase(what, [(x,) for x in inputs], [mean] * size, one_all_reduce)


def repaired_training(size):
    """One process with the examples of all ranks. Of the gradients of weights[0] and weights[1], even ranks have the
    first as the longer one, odd ranks the second."""
    for what, alike, steps in (("the same examples", True, 1), ("a step", False, 1), ("several steps", False, 4)):
        inputs = []
        for rank in range(size):
            own = torch.randn(4, 3, generator=torch.Generator().manual_seed(0 if alike else rank), dtype=torch.float64)
            inputs.append(own * (4.0 if rank % 2 and not alike else 0.25))
        targets = [torch.arange(4.0, dtype=torch.float64) - (0 if alike else rank) for rank in range(size)]
        weights = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64) / 4]
        leaves = [weight.clone().requires_grad_() for weight in weights]
        for _ in range(steps):
            x = torch.cat(inputs)
            loss = (x @ leaves[0] + x.square() @ leaves[1] - torch.cat(targets)).square().mean()
            slopes = torch.autograd.grad(loss, leaves)
            leaves = [(w - 0.001 * slope).detach().requires_grad_() for w, slope in zip(leaves, slopes, strict=True)]
        arguments = [(weights, *own, 0.001, steps) for own in zip(inputs, targets, strict=True)]
        pattern = collectives(*[("all_reduce", 24)] * (2 * steps))
        yield ExerciseCase(what, arguments, [[w.detach() for w in leaves]] * size, pattern)


def ring_bytes(size):
    """Counted step by step, as the chunks travel: chunk c starts at rank c + 1, collects on its way round the ring
    and ends at rank c, then goes round once more."""
    if size > 2:
        return  # nothing is sent: once is enough
    for ranks, elements, itemsize in ((4, 8, 4), (4, 10, 4), (3, 2, 8), (8, 1003, 2)):
        sent = [0] * ranks
        for chunk, length in enumerate(sizes_of_chunks(elements, ranks)):
            for hop in range(ranks - 1):
                sent[(chunk + 1 + hop) % ranks] += length * itemsize
                sent[(chunk + hop) % ranks] += length * itemsize
        for rank in range(ranks):
            arguments = (rank, ranks, elements, itemsize)
            yield ExerciseCase(f"ring_bytes{arguments}", [arguments] * size, [sent[rank]] * size, nothing_sent)


def all_reduce_seconds(size):
    """Expected values worked out by hand, with a latency of 2 s and a bandwidth of 10 bytes/s.

    ring on 4 ranks, 80 bytes: 6 messages of 20 bytes, 6 * (2 + 2) = 24. On 3 ranks, 90 bytes: 4 * (2 + 3) = 20.
    tree on 4 ranks, 80 bytes: 4 messages of 80 bytes, 4 * (2 + 8) = 40. On 5 ranks 3 rounds each way: 60.
    halving-doubling on 4 ranks, 80 bytes: 40, 20, 20, 40 bytes, (2+4) + (2+2) + (2+2) + (2+4) = 20. On 8 ranks:
    40, 20, 10 and back, 2 * (6 + 4 + 3) = 26. One rank sends nothing.
    """
    if size > 2:
        return
    for algorithm, ranks, nbytes, seconds in (
        ("ring", 4, 80, 24.0),
        ("ring", 3, 90, 20.0),
        ("tree", 4, 80, 40.0),
        ("tree", 5, 80, 60.0),
        ("halving-doubling", 4, 80, 20.0),
        ("halving-doubling", 8, 80, 26.0),
        ("ring", 1, 80, 0.0),
        ("tree", 1, 80, 0.0),
        ("halving-doubling", 1, 80, 0.0),
    ):
        arguments = (algorithm, ranks, float(nbytes), 2.0, 10.0)
        yield ExerciseCase(f"all_reduce_seconds{arguments}", [arguments] * size, [seconds] * size, nothing_sent)


def inner_axis(size):
    """Worked out by hand, with a latency of 1 s inside and 2 s between, and 10 and 1 bytes/s.

    In the first row a ring of 4 ranks takes 6 * (1 + 20 / 10) = 18 s inside and 6 * (2 + 20) = 132 s between, one of 2
    ranks 2 * (1 + 40 / 10) = 10 s and 2 * (2 + 40) = 84 s. Twice tensor inside and once data between are 120 s; the
    other way round they are 10 s and 2 * 132 s. In the second, data makes more of them, in the third tensor has more
    ranks than a node, and along both axes something is sent between nodes: 14 * (2 + 10) and 2 * (1 + 4), or 14 * 12
    and 2 * (2 + 40). In the fourth all is in one node; in the last there is nothing to send along tensor.
    """
    if size > 2:
        return
    for tensor, data, node, expected in (
        ((4, 2, 80), (2, 1, 80), 4, ["tensor", 120.0]),
        ((4, 1, 80), (2, 9, 80), 4, ["data", 222.0]),
        ((8, 1, 80), (2, 1, 80), 4, ["data", 178.0]),
        ((2, 1, 80), (2, 1, 80), 4, ["tensor", 20.0]),
        ((1, 5, 80), (4, 1, 80), 2, ["tensor", 132.0]),
        ((2, 1, 80), (4, 1, 80), 4, ["data", 102.0]),
    ):
        arguments = (tensor, data, node, (1.0, 10.0), (2.0, 1.0))
        yield ExerciseCase(f"inner_axis{arguments}", [arguments] * size, [expected] * size, nothing_sent)


def all_to_all(size):
    for what, dtype, length in (
        ("float32 parts", torch.float32, lambda source, target: 1 + (2 * source + target) % 4),
        ("int64 parts, some empty", torch.int64, lambda source, target: (source + target) % 3),
    ):
        parts = [
            [torch.full((length(s, t),), 10 * s + t, dtype=dtype) for t in range(size)]  # 23: from rank 2 to rank 3
            for s in range(size)
        ]
        arguments = [(parts[r], [length(s, r) for s in range(size)]) for r in range(size)]
        expected = [[parts[s][r] for s in range(size)] for r in range(size)]
        messages = [[(t, parts[r][t].numel() * dtype.itemsize) for t in range(size) if t != r] for r in range(size)]
        yield ExerciseCase(what, arguments, expected, exactly(messages, any_order=True))


def tree_broadcast(size):
    for root, elements, dtype in ((0, 5, torch.float32), (1, 3, torch.int64), (size - 1, 100_000, torch.float32)):
        inputs = [torch.full((elements,), 10**rank, dtype=dtype) for rank in range(size)]
        pattern = binomial_tree(root, elements * dtype.itemsize)
        arguments = [(x, root) for x in inputs]
        yield ExerciseCase(f"root {root}, {elements} elements", arguments, [inputs[root]] * size, pattern)


def halving_doubling_all_reduce(size):
    if size not in (2, 4):
        return
    for elements, dtype in ((8, torch.float32), (10, torch.float64), (3, torch.float32), (1, torch.float32)):
        inputs = [numbered(rank, elements, dtype) for rank in range(size)]
        total = torch.stack(inputs).sum(0)
        what = f"{elements} element{'s' * (elements > 1)}"
        yield ExerciseCase(what, [(x,) for x in inputs], [total] * size, halving_doubling(elements, dtype.itemsize))


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


def draw_ring_bytes(random):
    size = random.randint(2, 9)
    return random.randrange(size), size, random.randint(1, 5000), random.choice([1, 2, 4, 8])


def draw_all_reduce_seconds(random):
    algorithm = random.choice(["ring", "tree", "halving-doubling"])
    size = 2 ** random.randint(1, 5) if algorithm == "halving-doubling" else random.randint(2, 12)
    return algorithm, size, 10.0 * random.randint(1, 500), random.choice([0.5, 1.0, 3.0]), random.choice([4.0, 20.0])


def draw_inner_axis(random):
    def axis():
        return 2 ** random.randint(1, 3), random.randint(1, 20), 80 * random.randint(1, 50)

    return axis(), axis(), random.choice([4, 8]), (0.5, 20.0), (random.choice([1.0, 3.0]), random.choice([1.0, 5.0]))


EXERCISES = [
    Exercise(
        name="ring_shift",
        points=1,
        difficulty="●○○○○",
        check=ring_shift,
        hint="If every rank first waits until its message is taken, nobody is left to take one. isend starts a send "
        "and lets you go on; wait for it after the receive. A receive buffer has the shape and type of what comes.",
    ),
    Exercise(
        name="global_mean",
        points=1,
        difficulty="●○○○○",
        check=global_mean,
        hint="A mean of means counts a rank with one value as much as a rank with a thousand. Sums can be added, and "
        "so can counts: put both into one tensor.",
        mistakes={
            "1, 3 values ... expected 15.25, got 10.5": "A mean of means: a rank with one value counts as much as "
            "one with three.",
            "1, 3 values ... expected 15.25, got 30.5": "The sum over all ranks is divided by this rank's own "
            "number of values.",
            "got all_reduce, all_reduce": "Put sum and number into one tensor: then one message carries both.",
        },
    ),
    Exercise(
        name="repaired_training",
        points=2,
        difficulty="●●○○○",
        check=repaired_training,
        hint="Which all-reduce of rank 0 meets which of rank 1? Print, on each rank, in which order the two gradients "
        "are sent. Collectives pair by the order in which they are called, and by nothing else.",
        mistakes={
            "a step, rank 0: ... got [-0.1336": "The gradients still meet in another order on each rank, so that sums "
            "of two different weights come out. Any order will do that doesn't depend on what only this rank knows.",
        },
    ),
    Exercise(
        name="ring_bytes",
        points=2,
        difficulty="●●●○○",
        check=ring_bytes,
        draw=draw_ring_bytes,
        hint="In each of the two phases a rank sends every chunk but one. Which one does it keep to itself in the "
        "reduce-scatter, and which one does its right neighbour already have in the all-gather?",
    ),
    Exercise(
        name="all_reduce_seconds",
        points=2,
        difficulty="●●○○○",
        check=all_reduce_seconds,
        draw=draw_all_reduce_seconds,
        hint="Write down the messages that one rank sends after one another: how many, and of how many bytes each? "
        "Add latency + bytes / bandwidth for each. In halving-doubling the sizes are n/2, n/4, ..., and back again.",
    ),
    Exercise(
        name="inner_axis",
        points=3,
        difficulty="●●●○○",
        check=inner_axis,
        draw=draw_inner_axis,
        hint="For each of the two orders ask of each axis: do the ranks of one of its groups lie in one node? The "
        "inner group spans as many ranks as it has, the outer one as many as both axes together. Then it's arithmetic: "
        "calls * 2 (ranks - 1) * (latency + bytes / ranks / bandwidth).",
    ),
    Exercise(
        name="all_to_all",
        points=2,
        difficulty="●●○○○",
        check=all_to_all,
        hint="Start all receives and all sends without waiting (irecv, isend), then wait for every one of them. Your "
        "own part needs no message.",
    ),
    Exercise(
        name="tree_broadcast",
        points=3,
        difficulty="●●●○○",
        check=tree_broadcast,
        hint="Number the ranks from the root: place = (rank - root) % size. In the round with distance d = 1, 2, 4, "
        "... the places below d have the tensor, and place p sends to place p + d if there is one.",
        mistakes={
            "got 3 rounds: rank 0: 20 bytes to rank 1, 20 bytes to rank 2": (
                "The root sends to everybody itself. Whoever has received the tensor can send as well, from the "
                "next round on."
            ),
            "rank 1: 20 bytes to rank 2; rank 2": (
                "Each rank sends to one other only. In every round all ranks that have the tensor should send it."
            ),
            "root 1, 3 elements, rank 0: expected [10, 10, 10], got [1, 1, 1]": (
                "The tree starts at rank 0, which isn't the root here. Number the ranks from the root: place = "
                "(rank - root) % size."
            ),
            "root 1 ... not connected": (
                "The place in the tree is taken for a rank. Place p belongs to rank (p + root) % size."
            ),
            "size 3, root 0, 5 elements, rank 2: expected [1, 1, 1, 1, 1], got [100": (
                "Nothing has come to the last rank: there has to be a round for each distance 1, 2, 4, ... below "
                "the size."
            ),
            "root 0, 5 elements: ... a deadlock": (
                "A rank sends in a round in which it has yet to receive. In the round with distance d only the "
                "places below d have the tensor."
            ),
            "got a call of broadcast": ("The exercise is to build the broadcast out of dist.send and dist.recv."),
        },
    ),
    Exercise(
        name="halving_doubling_all_reduce",
        points=4,
        difficulty="●●●●●",
        check=halving_doubling_all_reduce,
        hint="Keep two numbers, low and high: the part of the tensor you are responsible for. In each step the partner "
        "with the smaller rank keeps the first half. Remember what you gave to whom: the way back is the same "
        "list in reverse.",
    ),
]
