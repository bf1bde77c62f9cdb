"""How the exercises of chapter 03 are graded: the table EXERCISES at the end, and the checks that it names.

A check is given a world size and yields cases: the arguments of each rank, what each must return, and a pattern
that looks at the messages (common/grading/patterns.py). Expected values come from the arguments of all ranks at once,
without any message, or were worked out by hand.
"""

import itertools

import torch
from torch.utils.data import DistributedSampler

from common.grading.engine import ExerciseCase, exercise
from common.grading.patterns import calculated, collectives, numbered, sends_at_most
from common.lab.ledger import wire_bytes

SHAPES = ((2, 3), (), (4,))


def tensors(rank: int, shapes=SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor of each shape, cut from rank `rank`'s numbers."""
    lengths = [torch.Size(shape).numel() for shape in shapes]
    pieces = numbered(rank, sum(lengths), dtype).split(lengths)
    return [piece.reshape(shape).clone() for piece, shape in zip(pieces, shapes, strict=True)]


def mean(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(same).sum(0) / len(ranks) for same in zip(*ranks, strict=True)]


# --- the reducer, and training with it ---------------------------------------------------


def accumulated_gradient(size):
    for count in (3, 1):
        inputs = [[numbered(rank, 4).view(2, 2) * (k + 1) for k in range(count)] for rank in range(size)]
        whole = torch.stack([gradient for own in inputs for gradient in own]).sum(0) / (size * count)
        what = f"{count} micro-batch{'es' * (count > 1)} on each rank"
        yield ExerciseCase(what, [(x,) for x in inputs], [whole] * size, collectives(("all_reduce", 16)))


def learning_rate(size):
    yield from calculated(
        size,
        "learning_rate",
        [
            (0, 0.1, 256, 1024, 5, 0.1),
            (2, 0.1, 256, 1024, 5, 0.22),  # 0.1 + 2/5 of the way to 0.4
            (5, 0.1, 256, 1024, 5, 0.4),
            (100, 0.1, 256, 1024, 5, 0.4),
            (0, 0.1, 256, 768, 0, 0.3),
        ],
    )


def average_gradients(size):
    for what, kinds in (
        ("float32 alone", "fff"),
        ("float32, bfloat16 and float32", "fbf"),
        ("bfloat16 first", "bfbb"),
    ):
        shapes = [(2, 3), (), (4,), (1, 2)][: len(kinds)]
        types = [torch.bfloat16 if kind == "b" else torch.float32 for kind in kinds]
        whole = [x.to(kind) for x, kind in zip(small(shapes), types, strict=True)]
        inputs = [[x * (size * (rank + 1)) for x in whole] for rank in range(size)]
        result = [x * sum(range(1, size + 1)) for x in whole]
        nbytes: dict = {}
        for x in whole:
            nbytes[x.dtype] = nbytes.get(x.dtype, 0) + x.nbytes
        pattern = collectives(*(("all_reduce", of_type) for of_type in nbytes.values()))
        yield ExerciseCase(what, [(x,) for x in inputs], [result] * size, pattern)


def small(shapes):
    """1, 2, 3, ... in tensors of these shapes, which are exact in bfloat16 if multiplied by up to 16."""
    lengths = [torch.Size(shape).numel() for shape in shapes]
    pieces = torch.arange(1.0, sum(lengths) + 1).split(lengths)
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


REBUILT = [  # order on rank 0, bytes of each parameter, caps, and the buckets by hand
    ([3, 2, 1, 0], [5, 1, 4, 2], 2, 5, [[3], [2, 1], [0]]),
    ([1, 3, 0, 2], [5, 1, 4, 2], 2, 5, [[1, 3], [0], [2]]),
    ([0, 1, 2, 3], [5, 1, 4, 2], 1, 3, [[0], [1, 2], [3]]),
    ([2, 0, 3, 1], [5, 1, 4, 2], 100, 1, [[2, 0, 3, 1]]),
]


def rebuilt_buckets(size, rows=REBUILT):
    for order, sizes, first_cap, cap, expected in rows:
        arrived = [order[rank:] + order[:rank] for rank in range(size)]
        what = f"order {order} on rank 0, caps {first_cap} and {cap}"
        pattern = collectives(("broadcast", 8 * len(sizes)))
        yield ExerciseCase(what, [(own, sizes, first_cap, cap) for own in arrived], [expected] * size, pattern)


def bf16_average(size):
    """bfloat16 has 8 significant bits: 1 + 2**-10 becomes 1, and sums of small integers are exact."""
    plain = [size * (rank + 1) * torch.arange(1.0, 9) for rank in range(size)]
    rough = [torch.tensor([[size * (rank + 1) * (1 + 2**-10)], [2.0**127]]) for rank in range(size)]
    third = (torch.tensor(2.0**127) / size).bfloat16()
    large = sum([third] * (size - 1), third).float()
    for what, inputs, average in (
        ("8 elements", plain, torch.stack(plain).sum(0) / size),
        ("1 + 2**-10 times whole numbers, and 2**127", rough, torch.tensor([[size * (size + 1) / 2], [large]])),
    ):
        pattern = collectives(("all_reduce", 2 * average.numel()))
        yield ExerciseCase(what, [(x,) for x in inputs], [average] * size, pattern)


def average_with_unused(size):
    for what, shapes, factor, missing in (
        ("rank r lacks gradient r", [(2,)] * 4, 1, lambda rank, index: rank == index),
        ("nobody has gradient 1, rank 0 alone has gradient 2", [(3,), (2, 2), (), (4,)], 1,
         lambda rank, index: index == 1 or (index == 2 and rank > 0)),
        ("gradient 0 is there, and is zero", [(2,), (3,)], 0, lambda rank, index: False),
    ):  # fmt: skip
        full = [[factor * first, *others] for first, *others in (tensors(rank, shapes) for rank in range(size))]
        absent = [[missing(rank, index) for index in range(len(shapes))] for rank in range(size)]
        zeros = [[x * (not gone) for x, gone in zip(*row, strict=True)] for row in zip(full, absent, strict=True)]
        result = [None if all(gone) else x for x, *gone in zip(mean(zeros), *absent, strict=True)]
        inputs = [[None if gone else x for x, gone in zip(*row, strict=True)] for row in zip(full, absent, strict=True)]
        nbytes = 4 * sum(x.numel() for x in full[0])
        pattern = collectives(("all_reduce", len(shapes)), ("all_reduce", nbytes))
        yield ExerciseCase(what, [(x, shapes) for x in inputs], [result] * size, pattern)


def repaired_reducer(size):
    shapes = [(2,), (2, 2), (), (3,)]
    for what, missing in (
        ("one step, some unused", lambda rank, step, index: step or index == 1 + rank % 3),
        ("all used in two steps", lambda rank, step, index: step == 2),
        ("gradient 1 used by nobody in step 1", lambda rank, step, index: index == 1 and step == 1),
        ("rank 0 alone has gradient 2 in step 2", lambda rank, step, index: index == 2 and step == 2 and rank > 0),
    ):
        count = 1 if "one" in what else 2 if "two" in what else 3
        own = [[[x * (step + 1) for x in tensors(rank, shapes)] for step in range(count)] for rank in range(size)]
        given = [
            [[None if missing(rank, step, index) else x for index, x in enumerate(own[rank][step])]
             for step in range(count)] for rank in range(size)
        ]  # fmt: skip
        expected = []
        for step in range(count):
            present = [[torch.zeros_like(x) if y is None else y for x, y in zip(own[rank][step], given[rank][step],
                        strict=True)] for rank in range(size)]  # fmt: skip
            expected.append(mean(present))
        pattern = collectives(*[("all_reduce", 4 * 10)] * count)
        yield ExerciseCase(what, [(steps, shapes) for steps in given], [expected] * size, pattern)


def first_difference(size):
    weights = torch.arange(10_000.0).view(100, 100)
    raised, swapped = weights.clone(), weights.clone()
    raised[99, 99] += 1
    swapped[7, [3, 4]] = swapped[7, [4, 3]]
    last = size - 1
    for what, changes, first in (
        ("all alike", {}, -1),
        ("one value of parameter 1 on the last rank", {(last, 1): raised}, 1),
        ("two values of parameter 2 swapped on rank 1", {(1, 2): swapped}, 2),
        ("parameter 0 in another shape on the last rank", {(last, 0): weights.view(50, 200)}, 0),
        ("parameter 1 in another type on rank 0", {(0, 1): weights.view(torch.int32)}, 1),
        ("parameter 2 on rank 0, parameter 1 on rank 1", {(0, 2): raised, (1, 1): swapped}, 1),
    ):
        arguments = [([changes.get((rank, index), weights) for index in range(3)],) for rank in range(size)]
        yield ExerciseCase(what, arguments, [first] * size, sends_at_most(4096))


# --- feeding the ranks ---------------------------------------------------------------------------


def sampler_indices(size):
    rows = []
    for examples, epoch, seed, rank, world in (
        (8, 0, 0, 1, 2),
        (10, 3, 7, 3, 4),
        (9, 1, 0, 1, 2),
        (3, 1, 2, 7, 8),
        (7, 2, 1, 0, 3),  # a rank that has no repetition, where others have
    ):
        sampler = DistributedSampler(range(examples), world, rank, seed=seed)
        sampler.set_epoch(epoch)
        rows.append((examples, epoch, seed, rank, world, list(sampler)))
    yield from calculated(size, "sampler_indices", rows)


def exact_accuracy(size, counts=(8, 9, 10, 1), right=lambda number: number % 3 == 0):
    """Every third example is recognised, from example 0 on."""
    for examples in counts:
        each = -(-examples // size)
        dealt = [[(k * size + rank) % examples for k in range(each)] for rank in range(size)]
        arguments = [(torch.tensor([right(number) for number in own]), examples) for own in dealt]
        accuracy = sum(map(right, range(examples))) / examples
        yield ExerciseCase(
            f"{examples} example{'s' * (examples > 1)}",
            arguments,
            [accuracy] * size,
            collectives(("all_reduce", 16), at_most=True),
        )


def examples_of_step(size):
    rows = []
    for step, batch, examples, seed, rank, world in (
        (0, 4, 10, 0, 1, 2),
        (2, 4, 10, 0, 1, 2),  # the batch reaches into the next epoch
        (6, 6, 10, 3, 2, 3),
        (1, 24, 10, 1, 3, 4),  # a batch of more than two epochs
    ):
        generators = [torch.Generator().manual_seed(seed + epoch) for epoch in range(8)]
        endless = [number for g in generators for number in torch.randperm(examples, generator=g).tolist()]
        first, part = step * batch + rank * batch // world, batch // world
        rows.append((step, batch, examples, seed, rank, world, endless[first : first + part]))
    yield from calculated(size, "examples_of_step", rows)


def uneven_steps(size):
    for counts in ((2, 2, 2, 2), (3, 1, 2, 0), (0, 2, 1, 2)):
        counts = counts[:size]
        inputs = [[numbered(rank, 5) * (k + 1) for k in range(count)] for rank, count in enumerate(counts)]
        steps = itertools.zip_longest(*inputs)
        present = [[gradient for gradient in step if gradient is not None] for step in steps]
        expected = [torch.stack(gradients).sum(0) / len(gradients) for gradients in present]
        limit = round(wire_bytes("all_reduce", (len(expected) + 1) * 6 * 4, size))
        what = f"{', '.join(map(str, counts))} gradients on the ranks"
        yield ExerciseCase(what, [(x, 5) for x in inputs], [expected] * size, sends_at_most(limit))


# --- scaling -------------------------------------------------------------------------------------


def speedup_and_efficiency(size):
    yield from calculated(
        size,
        "speedup_and_efficiency",
        [
            ("strong", 4, 8.0, 2.5, [3.2, 0.8]),
            ("strong", 2, 1.0, 1.0, [1.0, 0.5]),
            ("weak", 4, 2.0, 2.5, [3.2, 0.8]),
            ("weak", 2, 1.0, 1.0, [2.0, 1.0]),
        ],
    )


def cheapest_in_time(size):
    """Worked out by hand. 3600 steps, so that a second of a step is an hour, and 100 bytes of gradients.

    A: 24 s on one GPU, nodes of 2, 100 bytes/s inside and 10 between, 1 dollar. 1 GPU takes 24 h, 2 take 12 h (the
    all-reduce of 1 s fits beside 8 s), 4 take 6 h + the 15 - 4 s that are exposed, 17 h, and 8 take 3 + 15.5 h.
    B: 12 s, nodes of 8, 1,000 bytes/s inside, 3 dollars: 2 GPUs take 6 h and 36 dollars, 4 take 3 h, 8 take 1.5 h; on
    16 the network between nodes gives 0.75 + 18.75 / 2 - 0.5 h with 20 bytes/s.
    C: 16 h on one GPU, 8 + (10 - 5.33) h on 2, 4 + (15 - 2.67) on 4.
    """
    one, other = ("A", 24.0, 2, 100.0, 10.0, 1.0), ("B", 12.0, 8, 1000.0, 20.0, 3.0)
    yield from calculated(
        size,
        "cheapest_in_time",
        [
            (3600, 100.0, [one, other], 30.0, ["A", 1, 24.0]),
            (3600, 100.0, [one, other], 20.0, ["A", 2, 24.0]),
            (3600, 100.0, [one, other], 10.0, ["B", 2, 36.0]),
            (3600, 100.0, [one, other], 2.0, ["B", 8, 36.0]),
            (3600, 100.0, [one, other], 1.0, None),
            (3600, 100.0, [("C", 16.0, 1, 100.0, 10.0, 1.0)], 13.0, ["C", 2, 2 * (8 + 10 - 16 / 3)]),
            (3600, 100.0, [("C", 16.0, 1, 100.0, 10.0, 1.0)], 12.0, None),
            (3600, 100.0, [], 10.0, None),
        ],
    )


# --- surviving a crash ---------------------------------------------------------------------------


def common_checkpoint(size):
    return of_disks(
        size,
        [
            ("the last rank lacks the newest one", [[5, 10, 15]] * (size - 1) + [[5, 10]], 10),
            ("ranks lack different ones", [[999, 5, 20]] + [[5, 40, 15]] * (size - 1), 5),
            ("the newest one of step 0", [[0]] * size, 0),
            ("no common one", [[10]] + [[5]] * (size - 1), -1),
            ("none on the last rank", [[5]] * (size - 1) + [[]], -1),
        ],
    )


def of_disks(size, rows):
    for what, kept, expected in rows:
        yield ExerciseCase(what, [(steps,) for steps in kept], [expected] * size, sends_at_most(16_384))


def cheapest_saving(size):
    """Worked out by hand, for a failure every 10,000 s and a restart of 100 s.

    stop: 50 s; every sqrt(2 x 50 x 10,000) = 1,000 s: 0.05 + (500 + 100) / 10,000 = 0.11.
    quick: 2 s; every sqrt(2 x 2 x 10,000) = 200 s, as long as it writes: 0.01 + (100 + 100) / 10,000 = 0.03.
    slow: 2 s, but it writes for 2,000 s: 0.001 + (1,000 + 100) / 10,000 = 0.111. With a failure every 1,000,000 s
    Young's interval is 2,000 s, too, and it loses 0.001 + 0.0011, where stop loses 50 / 10,000 + 0.0051.
    """
    stop, quick, slow = ("stop", 50.0, 50.0), ("quick", 2.0, 200.0), ("slow", 2.0, 2000.0)
    yield from calculated(
        size,
        "cheapest_saving",
        [
            ([stop, quick], 10_000.0, 100.0, ["quick", 200.0, 0.03]),
            ([slow, stop], 10_000.0, 100.0, ["stop", 1000.0, 0.11]),
            ([slow], 10_000.0, 100.0, ["slow", 2000.0, 0.111]),
            ([stop, slow], 1_000_000.0, 100.0, ["slow", 2000.0, 0.0021]),
        ],
    )


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


def draw_learning_rate(random):
    return random.randint(0, 12), random.randint(1, 40) / 64, 256, 256 * random.randint(2, 32), random.randint(4, 10)


def draw_rebuilt_buckets(random, size):
    """Two rows: parameters of a byte or two, in pairs, so that their buckets are known without filling any."""
    for pairs in (random.randint(3, 5), random.randint(6, 9)):
        order = random.sample(range(2 * pairs), 2 * pairs)
        sizes = [0] * len(order)
        for place, parameter in enumerate(order):
            sizes[parameter] = random.randint(1, 3) + 3 * (place % 2)  # the second of a pair has more than three
        expected = [order[:2], *(order[place : place + 2] for place in range(2, len(order), 2))]
        yield from rebuilt_buckets(size, [(order, sizes, 4, 4, expected)])


def draw_common_checkpoint(random, size):
    common = random.randint(100, 500)
    kept = [
        random.sample(range(100), 4) + [common, common + 1 + rank % 2 + 2 * random.randint(0, 200)]
        for rank in range(size)
    ]
    yield from of_disks(size, [("drawn", kept, common)])


def draw_cheapest_saving(random):
    offers = [(name, random.randint(2, 80) / 2, float(random.randint(40, 3000))) for name in ("A", "B", "C")]
    return offers, 1000.0 * random.randint(5, 60), float(random.randint(10, 900))


def draw_sampler_indices(random):
    world = random.randint(2, 6)
    return random.randint(5, 40), random.randint(0, 9), random.randint(0, 99), random.randrange(world), world


def draw_examples_of_step(random):
    world = random.randint(2, 5)
    step, batch = random.randint(1, 9), world * random.randint(1, 6)
    return step, batch, random.randint(8, 30), random.randint(0, 99), random.randrange(world), world


def draw_speedup_and_efficiency(random):
    kind = random.choice(["strong", "weak"])
    return kind, random.randint(2, 64), random.randint(8, 80) / 8, random.randint(8, 80) / 8


def draw_cheapest_in_time(random):
    """Gradients and a step's seconds are of one order, so that some offers expose what they send."""
    offers = [
        (name, random.randint(8, 40) / 2, random.choice([2, 4, 8]), random.choice([50.0, 200.0]),
         random.choice([5.0, 10.0, 20.0]), random.randint(2, 12) / 4)
        for name in ("A", "B", "C")
    ]  # fmt: skip
    return 3600, float(random.randint(5, 60)), offers, random.randint(3, 40) / 4


def draw_exact_accuracy(random, size):
    right = {number for number in range(40) if random.random() < 0.5}
    yield from exact_accuracy(size, [random.randint(11, 40)], right.__contains__)


EXERCISES = [
    exercise(
        accumulated_gradient,
        points=1,
        dots=1,
        hint="Gradients add up locally, at no cost. The mean over the batch is the mean over all micro-batches of all "
        "ranks: how many are those?",
    ),
    exercise(
        learning_rate,
        points=1,
        dots=1,
        hint="Two rates: the one at step 0 and the scaled one. Go from the first to the second by the fraction "
        "step / warmup, never further, and mind a warm-up of no steps.",
        draw=draw_learning_rate,
    ),
    exercise(
        average_gradients,
        points=2,
        dots=2,
        hint="torch.cat of two types gives a tensor of the wider one. Make a list for each type first, and keep in "
        "mind which place of the result each piece belongs to.",
    ),
    exercise(
        rebuilt_buckets,
        points=2,
        dots=2,
        hint="Everything but the order is the same on all ranks already, so the order is all that rank 0 has to tell. "
        "A bucket is closed after a parameter, never before one.",
        draw_cases=draw_rebuilt_buckets,
    ),
    exercise(
        bf16_average,
        points=2,
        dots=2,
        hint="float16 has half the bytes too, but ends at 65504. A sum of large values overflows where the sum of "
        "their shares does not. The result travels as bfloat16 and is returned as float32.",
    ),
    exercise(
        average_with_unused,
        points=3,
        dots=3,
        hint="A rank without a gradient must still take part, or its peers add up tensors that do not belong "
        "together. Add up the bitmaps: an element of 0 says that no rank has that gradient.",
        mistakes={
            "as item 0, got None": "A result is None only where the bitmaps of all ranks add up to 0. Here a rank "
            "has the gradient; one of zeros is a gradient, too.",
            "rank 0: expected [5, 10] as item 0, got [10, 20]": "The sum is divided by the world size, not by the "
            "number of ranks that have the gradient, and not left undivided.",
        },
    ),
    exercise(
        repaired_reducer,
        points=2,
        dots=2,
        hint="What is in the flat tensor at the beginning of the second step? Print it before and after the gradients "
        "are copied in, for a step in which one of them is None.",
        mistakes={
            "gradient 1 used by nobody ... got [[16.5, 22]": "What the step before has left in the flat tensor is "
            "averaged again where this step has no gradient: make it zero first.",
            "one step, some unused ... 'NoneType' object": "A gradient may be None: it counts as zeros of its shape.",
        },
    ),
    exercise(
        first_difference,
        points=3,
        dots=3,
        hint="Python's zlib.crc32 makes a number out of bytes (tensor.numpy().tobytes()), and shape and type can "
        "be put into it as text. Gather everybody's numbers, so that every rank compares the same.",
    ),
    exercise(
        sampler_indices,
        points=2,
        dots=2,
        hint="Make the list as long as the next multiple of world first (how often must it be repeated?), then take "
        "every world-th place of it, from place rank on.",
        draw=draw_sampler_indices,
    ),
    exercise(
        exact_accuracy,
        points=2,
        dots=2,
        hint="Place k of rank r is place k * world + r of the list that was dealt out. Which places are repetitions? "
        "Accuracies of ranks are not to be averaged; numbers of right answers can be added.",
        draw_cases=draw_exact_accuracy,
        mistakes={
            "expected 0.33333333, got 0.44444444": (
                "Repeated examples that were recognised are counted, and the share is taken of fewer. Leave the "
                "repetitions out on the ranks that have them."
            ),
            "expected 0.33333333, got 0.4": (
                "The mean is over ten answers for nine examples: one is a repetition. Rank r has the examples r, "
                "r + world size, ...: which of these are below `size`?"
            ),
            "expected 0.33333333, got 0.325": (
                "A mean of accuracies counts each rank the same, but one has five examples and the other four. "
                "Add up numbers of right answers."
            ),
            "1 example, rank 0: expected 1, got 0": (
                "What doesn't divide is dropped: here rank 0 has an example that counts. How many examples rank r"
                " has depends on r."
            ),
            "expected 0.375, got 0.5": (
                "This is rank 0's share of its own examples: nothing has been added up over the ranks."
            ),
            "8 examples, rank 0: expected 0.375, got 0": (
                "Three of eight, as a whole number: `//` and integer tensors drop the rest. Divide by `/`."
            ),
            "10 examples, rank 0: expected 0.4, got 0.5": (
                "The repetitions are not where they are looked for: examples were dealt out in turns, so with 10 "
                "on 3 ranks the last place of rank 1 and of rank 2 is a repetition."
            ),
            "got all_reduce of 8 bytes, all_reduce of 8 bytes": (
                "Put both numbers into one tensor; or send one only, since every rank knows `size`."
            ),
            "expected float 0.375, got a tensor": (
                "A Python float is asked for: .item() makes one of a tensor without dimensions."
            ),
        },
    ),
    exercise(
        examples_of_step,
        points=3,
        dots=3,
        hint="Give every place in the endless list a number: this rank's part begins at step * batch + rank * "
        "(batch // world). Place p is place p % size of epoch p // size.",
        draw=draw_examples_of_step,
    ),
    exercise(
        uneven_steps,
        points=4,
        dots=4,
        hint="A rank that has run out still takes part, with zeros. Let one more element travel with each gradient: 1 "
        "from a rank that has one, 0 from the others. What does its sum tell, and what if it is 0?",
    ),
    exercise(
        speedup_and_efficiency,
        points=1,
        dots=1,
        hint="Count examples per second on both sides. In weak scaling a step of 4 ranks has 4 times as many examples.",
        draw=draw_speedup_and_efficiency,
    ),
    exercise(
        cheapest_in_time,
        points=2,
        dots=2,
        hint="Two loops, over offers and over numbers of GPUs. More GPUs cost the same as long as all is hidden, "
        "and more from there on; and a step can become longer where the second node begins.",
        draw=draw_cheapest_in_time,
    ),
    exercise(
        common_checkpoint,
        points=2,
        dots=2,
        hint="The oldest of the ranks' newest steps needn't be on every disk. A number for each step, 1 if it is "
        "there, and an all-reduce with ReduceOp.MIN say of each step whether all have it.",
        draw_cases=draw_common_checkpoint,
    ),
    exercise(
        cheapest_saving,
        points=2,
        dots=2,
        hint="For each offer: tau = max(sqrt(2 C M), writing). Then C / tau + (tau / 2 + restart) / M, and the least.",
        draw=draw_cheapest_saving,
    ),
]
