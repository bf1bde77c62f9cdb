"""How the exercises of chapter 06 are graded: the table EXERCISES at the end, and the checks that it names.

A check is given a world size and yields cases: the arguments of each rank, what each must return, and a pattern
that looks at the messages (common/grading/patterns.py). Expected values come from whole tensors, as one process has
them, without any message, or were worked out by hand.
"""

import itertools
import math

import torch

from common.grading.engine import ExerciseCase, Wrong, exercise
from common.grading.patterns import calculated, collectives, exactly, numbered
from course.fsdp.classroom.grading_choosing import best_offer, fit_on_four_cards

SHAPES = ((2, 3), (), (4,))


def tensors(rank: int, shapes=SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor of each shape, cut from rank `rank`'s numbers."""
    lengths = [math.prod(shape) for shape in shapes]
    pieces = numbered(rank, sum(lengths), dtype).split(lengths)
    return [piece.reshape(shape).clone() for piece, shape in zip(pieces, shapes, strict=True)]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded(vector: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([vector, vector.new_zeros(-len(vector) % size)])


# --- ZeRO by hand --------------------------------------------------------------------------------


def own_pieces(size):
    """Worked out by hand."""
    rows = [
        ([3, 4, 1], 0, 2, [[0, 0, 3], [1, 0, 1]]),
        ([3, 4, 1], 1, 2, [[1, 1, 4], [2, 0, 1]]),
        ([10, 2], 1, 3, [[0, 4, 8]]),
        ([5, 4], 3, 4, []),  # three elements a rank: nothing is left but padding
        ([1, 1, 7, 2], 1, 4, [[2, 1, 4]]),
        ([4, 4], 0, 2, [[0, 0, 4]]),
    ]
    yield from calculated(size, "own_pieces", rows)


def sharded_step(size):
    for each, step, scale in ((2, 1, 1.0), (3, 10, 1.0), (2, 1, 1e-7)):
        vector, moment = normal(1, each * size), normal(2, each * size) / 10
        square = normal(3, each * size).square()
        gradients = [scale * normal(4 + rank, each * size) for rank in range(size)]
        if step == 1:
            moment, square = 0 * moment, 0 * square
        optimizer = torch.optim.AdamW([torch.nn.Parameter(vector.clone())], lr=0.1, weight_decay=0.01)
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.stack(gradients).mean(0)
        state = {"step": torch.tensor(step - 1.0), "exp_avg": moment.clone(), "exp_avg_sq": square.clone()}
        optimizer.state[parameter] = state
        optimizer.step()
        shards = [x.chunk(size) for x in (moment, square, state["exp_avg"], state["exp_avg_sq"])]
        arguments = [(vector, gradients[rank], shards[0][rank], shards[1][rank], step) for rank in range(size)]
        expected = [[parameter.detach(), shards[2][rank], shards[3][rank]] for rank in range(size)]
        nbytes = 8 * len(vector)
        pattern = collectives(("reduce_scatter", nbytes), ("all_gather", nbytes))
        small = ", gradients as small as AdamW's 1e-8" * (scale < 1)
        yield ExerciseCase(f"{each} elements for each rank, step {step}{small}", arguments, expected, pattern)


def repaired_decay(size):
    """In the first case nothing is padded. In the second, shards begin elsewhere than at a multiple of 7 // size."""
    for what, lengths, decays in (
        ("nothing to pad", (2 * size, size), (True, False)),
        ("7 and 6 elements, of which the last decay", (7, 6), (False, True)),
        ("a bias of 1 between weights", (3, 1, 3, 1, 3), (True, False, True, False, True)),
    ):
        parameters = [normal(n, length).view(1, -1) for n, length in enumerate(lengths)]
        own = [[normal(10 * rank + n + 20, length).view(1, -1) for n, length in enumerate(lengths)]
               for rank in range(size)]  # fmt: skip
        expected = [
            p - 0.1 * (torch.stack(g).sum(0) / size + 0.5 * on * p)
            for p, on, *g in zip(parameters, decays, *own, strict=True)
        ]
        whole = 8 * (sum(lengths) + -sum(lengths) % size)
        pattern = collectives(("reduce_scatter", whole), ("all_gather", whole))
        arguments = [(parameters, gradients, list(decays), 0.1, 0.5) for gradients in own]
        yield ExerciseCase(what, arguments, [expected] * size, pattern)


def global_norm(size):
    """Elements of 2 and of 3, and in the padding 100."""
    pattern = collectives(("all_reduce", 8), at_most=True)
    for what, lengths, tied in (
        ("two units that need no padding", [size, 2 * size], False),
        ("two units with padding", [size + 1, 3], False),
        ("a unit that two modules share", [2 * size + 1, 2], True),
    ):
        shards = []
        for value, length in zip((2.0, 3.0), lengths, strict=True):
            vector = torch.full((length + -length % size,), 100.0)
            vector[:length] = value
            shards.append(vector.chunk(size))
        own = [[unit[rank].clone() for unit in shards] for rank in range(size)]
        arguments = [([*x, x[0]], [*lengths, lengths[0]]) if tied else (x, lengths) for x in own]
        yield ExerciseCase(what, arguments, [math.sqrt(4 * lengths[0] + 9 * lengths[1])] * size, pattern)


def accumulated_shard(size):
    for count, keep_whole in ((3, True), (3, False), (1, False)):
        inputs = [[numbered(rank, 2 * size) * (k + 1) for k in range(count)] for rank in range(size)]
        mean = torch.stack([gradient for own in inputs for gradient in own]).sum(0) / (size * count)
        pattern = collectives(*[("reduce_scatter", 8 * size)] * (1 if keep_whole else count))
        what = f"{count} micro-batch{'es' * (count > 1)}, keep_whole {keep_whole}"
        yield ExerciseCase(what, [(x, keep_whole) for x in inputs], [x.clone() for x in mean.chunk(size)], pattern)


def kept_bytes(size):
    """The last four rows are those of the paper's figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    p, n = 7_500_000_000, 64
    rows = [
        ("ddp", 1000, 4, False, [4000, 4000, 8000]),
        ("zero1", 1000, 4, False, [4000, 4000, 2000]),
        ("zero2", 1000, 4, False, [4000, 1000, 2000]),
        ("fsdp", 1000, 4, False, [1000, 1000, 2000]),
        ("ddp", p, n, True, [15e9, 15e9, 90e9]),
        ("zero1", p, n, True, [15e9, 15e9, 90e9 / 64]),
        ("zero2", p, n, True, [15e9, 15e9 / 64, 90e9 / 64]),
        ("fsdp", p, n, True, [15e9 / 64, 15e9 / 64, 90e9 / 64]),
    ]
    yield from calculated(size, "kept_bytes", rows)


def sent_in_a_step(size):
    rows = [
        ("ddp", 1000, 2, 1, 4000),
        ("ddp", 1000, 4, 3, 6000),
        ("zero1", 1000, 4, 3, 6000),
        ("zero2", 1000, 4, 1, 6000),
        ("zero2", 1000, 4, 3, 12_000),
        ("fsdp", 1000, 4, 1, 9000),
        ("fsdp", 1000, 4, 3, 27_000),
        ("fsdp", 1000, 1, 3, 0),
    ]
    yield from calculated(size, "sent_in_a_step", rows)


# --- fully_shard ---------------------------------------------------------------------------------


def gathered_peak(size):
    """Worked out by hand. In the first row the backward pass of unit 1 holds 4 + 4 and, gathered ahead, 2; in the
    fourth the backward pass of unit 1 holds 8 + 8, which is less than 9 + 9 in that of unit 0."""
    rows = [
        ([2, 4, 1], 1, True, 10),
        ([2, 4, 1], 0, True, 8),
        ([2, 4, 1], 1, False, 10),  # backward of unit 1: units 0 and 1, and its gradients
        ([9, 8], 0, True, 18),
        ([1, 5, 6], 1, True, 17),
        ([1, 1, 1, 1, 1, 3], 1, False, 11),
        ([10, 1, 12], 2, True, 35),
        ([3, 4, 3, 2], 2, True, 13),  # unit 2, ahead of which 1 and 0: 3 + 4 + 3 and its gradients
        ([7], 1, True, 14),
    ]
    yield from calculated(size, "gathered_peak", rows)


def full_state(size):
    for what, shapes in (
        ("rows that N divides", [(2 * size, 3), (size,)]),
        ("5 rows, and 2", [(5, 2), (2,)]),
        ("1 row", [(1, 4)]),
    ):
        whole = tensors(0, shapes)
        shards = []
        for rank in range(size):
            cuts = [(rank * -(-len(x) // size), (rank + 1) * -(-len(x) // size)) for x in whole]
            shards.append([x[first:end].clone() for x, (first, end) in zip(whole, cuts, strict=True)])
        messages = [[(0, 4 * x.numel()) for x in own] if rank else [] for rank, own in enumerate(shards)]
        expected = [whole, *[None] * (size - 1)]
        yield ExerciseCase(what, [(own, shapes) for own in shards], expected, exactly(messages))


def checkpoint_sources(size):
    """Worked out by hand. In the last row but two, rank 1 needs rows 8 to 15, and rank s * 4 + t has three from
    6 * t + 3 * s on: 6 to 8 are on rank 1, 9 to 11 on rank 5, 12 to 14 on rank 2, 15 to 17 on rank 6."""
    rows = [
        (8, (2, 2), (2, 2), 1, [1]),
        (8, (2, 2), (4, 1), 1, [2]),
        (8, (2, 2), (2, 1), 0, [0, 2]),
        (8, (4, 1), (1, 2), 1, [2, 3]),
        (8, (2, 2), (1, 1), 0, [0, 1, 2, 3]),
        (24, (2, 4), (3, 1), 1, [1, 2, 5, 6]),
        (24, (1, 2), (2, 4), 6, [1]),
        (12, (3, 2), (2, 3), 4, [1]),
    ]
    yield from calculated(size, "checkpoint_sources", rows)


def inside_then_across(columns: int, replicas: int, whole: int):
    def pattern(entries):
        want = [("reduce_scatter", whole, columns), ("all_reduce", whole // columns, replicas)]
        for rank, own in enumerate(entries):
            got = [(entry.operation, entry.payload, entry.ranks) for entry in own]
            if got != want:
                words = [
                    ", ".join(f"{name} of {size} bytes among {n} ranks" for name, size, n in calls) or "nothing sent"
                    for calls in (want, got)
                ]
                raise Wrong(*words, rank)

    return pattern


def hybrid_gradient(size):
    if size < 4:
        return
    for elements in (2, 6):
        inputs = [numbered(rank, elements) for rank in range(size)]
        halves = (torch.stack(inputs).sum(0) / size).chunk(2)
        expected = [halves[rank % 2].clone() for rank in range(size)]
        pattern = inside_then_across(2, 2, 4 * elements)
        yield ExerciseCase(f"{elements} elements, 2 replicas", [(x, 2) for x in inputs], expected, pattern)
    inputs = [numbered(rank, size) for rank in range(size)]
    expected = [shard.clone() for shard in (torch.stack(inputs).sum(0) / size).chunk(size)]
    yield ExerciseCase("1 replica", [(x, 1) for x in inputs], expected, inside_then_across(size, 1, 4 * size))


# --- fitting it in -------------------------------------------------------------------------------


def scaled_step(size):
    bad = {"infinite": math.inf, "not a number": math.nan, "minus infinity": -math.inf}
    pattern = collectives(("all_reduce", 8), at_most=True)
    fine = [numbered(rank, 3) for rank in range(size)]
    for rank, (what, value) in zip(itertools.cycle((size - 1, 0)), bad.items(), strict=False):
        inputs = [own.clone() for own in fine]
        inputs[rank][1] = value
        arguments = [(own, 256.0, 9, 10) for own in inputs]
        yield ExerciseCase(f"an element of rank {rank} is {what}", arguments, [[None, 128.0, 0]] * size, pattern)
    for good, interval, scale, then in ((3, 10, 1024.0, [1024.0, 4]), (9, 10, 1024.0, [2048.0, 0])):
        expected = [[own / scale, *then] for own in fine]
        what = f"all finite, scale {scale:g}, good {good}, interval {interval}"
        yield ExerciseCase(what, [(own, scale, good, interval) for own in fine], expected, pattern)
    largest = [torch.full((4,), 3e38) for _ in range(size)]  # finite, and their sum is not
    yield ExerciseCase(
        "elements of 3e38", [(own, 2.0, 0, 10) for own in largest], [[own / 2, 2.0, 1] for own in largest], pattern
    )


def recomputed(size):
    """Worked out by hand. Second row: 12 inputs are kept; the last block's other 90 bytes come on top. Third row: 3
    inputs, and of the last segment 4 blocks' activations, of which its own input is one of the 3."""
    rows = [
        (12, 0, 100, 10, 1.0, [1200, 36.0]),
        (12, 1, 100, 10, 1.0, [210, 48.0]),
        (12, 4, 100, 10, 1.0, [420, 48.0]),
        (12, 12, 100, 10, 0.5, [1200, 24.0]),
        (4, 2, 50, 50, 1.0, [150, 16.0]),
    ]
    yield from calculated(size, "recomputed", rows)


def micro_batch_for(size):
    rows = [
        (1000, 200, 100, 32, 1, [8, 4]),
        (1000, 200, 100, 24, 2, [6, 2]),  # 8 would fit, but does not divide 12
        (1000, 200, 100, 8, 4, [2, 1]),
        (1000, 950, 100, 8, 4, [0, 0]),
        (1000, 900, 100, 14, 2, [1, 7]),
        (1000, 1200, 100, 8, 1, [0, 0]),
    ]
    yield from calculated(size, "micro_batch_for", rows)


def fewest_ranks(size):
    """80 GB of memory: 7.5 billion parameters keep 120, 75, 52.5 and 41.25 GB on 1, 2, 4 and 8 ranks in stage 1."""
    p, gb = 7_500_000_000, 10**9
    rows = [
        ("ddp", p, 0, 80 * gb, 0),
        ("ddp", p // 10, 0, 12 * gb, 1),
        ("zero1", p, 0, 80 * gb, 2),
        ("zero1", p, 10 * gb, 80 * gb, 4),
        ("zero1", p, 50 * gb, 80 * gb, 0),  # parameters and gradients alone are 30 GB
        ("zero2", p, 50 * gb, 80 * gb, 8),
        ("fsdp", p, 50 * gb, 80 * gb, 4),
        ("fsdp", p, 20 * gb, 80 * gb, 2),
        ("fsdp", p, 80 * gb, 80 * gb, 0),
    ]
    yield from calculated(size, "fewest_ranks", rows)


# --- what a class is asked, which nobody has seen: arguments of a call, or whole cases ---------------------------


STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def draw_own_pieces(random):
    world = random.randint(2, 5)
    return [random.randint(1, 20) for _ in range(random.randint(2, 6))], random.randrange(world), world


def draw_kept_bytes(random):
    ranks = random.choice([2, 8, 16])
    return random.choice(STRATEGIES), ranks * random.randint(100, 9999), ranks, random.random() < 0.5


def draw_sent_in_a_step(random):
    ranks = random.choice([2, 4, 8])
    return random.choice(STRATEGIES), ranks * random.randint(100, 9999), ranks, random.randint(1, 5)


def draw_gathered_peak(random):
    return [random.randint(1, 30) for _ in range(random.randint(3, 7))], random.randint(0, 3), random.random() < 0.5


def draw_checkpoint_sources(random):
    saved, loaded = ((random.randint(1, 4), random.randint(1, 4)) for _ in range(2))
    ranks = loaded[0] * loaded[1]
    return saved[0] * saved[1] * ranks * random.randint(1, 3), saved, loaded, random.randrange(ranks)


def draw_recomputed(random):
    every, segments = random.randint(1, 6), random.randint(1, 6)
    activations = random.randint(20, 200)
    return every * segments, every, activations, random.randint(1, activations), random.randint(1, 8) / 4


def draw_micro_batch_for(random):
    ranks, kept, example = random.choice([1, 2, 4]), random.randint(50, 900), random.randint(20, 200)
    return 1000, kept, example, ranks * random.randint(2, 48), ranks


def draw_fewest_ranks(random):
    parameters = random.randint(1, 90) * 10**8
    return random.choice(STRATEGIES), parameters, random.randint(0, 40) * 10**9, random.choice([24, 40, 80]) * 10**9


def draw_best_offer(random):
    gpus = random.sample(["a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200"], 3)
    offers = [(gpu, random.choice([8, 16]), random.randint(50, 400) / 100) for gpu in gpus]
    return random.choice(["llama-7b", "llama-13b"]), offers, random.choice([2048, 4096])


EXERCISES = [
    exercise(
        own_pieces,
        points=2,
        dots=2,
        hint="The shard is an interval of places of the vector. Each parameter is an interval too. Where do they "
        "overlap, and what are those places counted from the parameter's beginning?",
        draw=draw_own_pieces,
    ),
    exercise(
        sharded_step,
        points=3,
        dots=3,
        hint="Reduce-scatter gives the shard of the gradient, chunk(N)[rank] that of the vector. The rest is AdamW on "
        "short vectors, and then everybody needs everybody's result.",
        mistakes={
            "0.52069601] as item 0, got [0.7613": (
                "The parameters don't decay. AdamW's decay, 0.1 * 0.01 * vector, is subtracted by itself: added "
                "to the gradient instead, it is divided away again by sqrt(s)."
            ),
            "0.52069601] as item 0, got [0.7351": (
                "`step` counts from 1 here: 1 - 0.9**step is 0.1 in the first step."
            ),
            "0.52069601] as item 0, got [0.76059082": ("What decays is the vector as it was before the step."),
            "step 10, rank 0: ... as item 0, got [0.66341787": (
                "The corrections are those of the first step in every step: they depend on `step`."
            ),
            "0.52069601] as item 0, got [0.97691849": (
                "The moments begin at zero and are too small at first: m and s, divided by 1 - 0.9**step and "
                "1 - 0.999**step, take their place in the step."
            ),
            "as item 1, got [-1.0460285": (
                "These are m and s. What is kept for the next step are the moments without the correction."
            ),
            "got all_reduce of 32 bytes": (
                "An all-reduce gives all of the average to all ranks, but each needs its shard only: "
                "reduce_scatter_single(shard, vector) sends half as much."
            ),
            "as item 0, got a tensor of shape (2,)": (
                "Every rank has stepped its own shard. An all-gather of the shards makes the whole vector again."
            ),
            "got [0.76069082, 0.36665717, 0.0616": (
                "The other ranks have stepped their shards, and here they are the old ones: all-gather what each "
                "of them has stepped."
            ),
        },
    ),
    exercise(
        repaired_decay,
        points=2,
        dots=2,
        hint="Which element of the vector is the first one of rank 1's shard, and which element of the mask is used "
        "for it? Print both for 7 elements on 2 ranks.",
        mistakes={
            "7 and 6 elements, of which the last decay, rank 0: ... as item 1, got": "Mask and vector are cut at "
            "different places: cut both after padding, or a rank decays another element than its mask means.",
        },
    ),
    exercise(
        global_norm,
        points=3,
        dots=3,
        hint="Shard r begins at place r * len(shard) of its vector: how many of its elements lie before the end? Go "
        "by id(tensor) to see one for the second time. Squares add up, norms do not.",
    ),
    exercise(
        accumulated_shard,
        points=2,
        dots=2,
        hint="The mean over the batch is the mean over all micro-batches of all ranks. Sums may be taken before or "
        "after they are cut: the result is the same, memory and messages are not.",
    ),
    exercise(
        kept_bytes,
        points=1,
        dots=1,
        hint="Each stage cuts one more of the three by the number of ranks: first the optimizer, then gradients, then "
        "parameters.",
        draw=draw_kept_bytes,
    ),
    exercise(
        sent_in_a_step,
        points=1,
        dots=1,
        hint="Count in units of 4 * P * (N - 1) / N, which is one all-gather or one reduce-scatter. Which of them "
        "come once in a step, and which in each micro-batch?",
        draw=draw_sent_in_a_step,
    ),
    exercise(
        gathered_peak,
        points=3,
        dots=3,
        hint="Make a list of moments, one for each unit in each pass, and take its maximum. Without resharding, what "
        "is still there when the backward pass comes to unit u?",
        draw=draw_gathered_peak,
    ),
    exercise(
        full_state,
        points=3,
        dots=3,
        hint="How many rows rank r has of a parameter follows from its shape: min(each, rows - r * each), at least 0. "
        "So rank 0 knows which messages to expect, and of which shape.",
    ),
    exercise(
        checkpoint_sources,
        points=2,
        dots=2,
        hint="Write a function for the rows that a rank of any mesh has: which tensor part is its own, and which shard "
        "of that? Then call it for both meshes.",
        mistakes={
            "checkpoint_sources(8, (2, 2), (4, 1), 1), rank 0: expected [2], got [1]": "Rows don't follow the ranks: "
            "tensor parallelism cuts first, so on (2, 2) rank 1 has the third quarter, and rank 2 the second.",
        },
        draw=draw_checkpoint_sources,
    ),
    exercise(
        hybrid_gradient,
        points=3,
        dots=3,
        hint="In the mesh of shape (replicas, N / replicas) dimension 0 goes along a column, dimension 1 along a row. "
        "The average is over all N ranks.",
    ),
    exercise(
        scaled_step,
        points=3,
        dots=3,
        hint="A rank whose own shard is fine must hear of the others'. torch.isfinite, and one flag of which the sum "
        "or the maximum is taken; not the sum of the elements, which may overflow by itself.",
    ),
    exercise(
        recomputed,
        points=3,
        dots=3,
        hint="The worst moment is the beginning of the backward pass: all inputs of segments are still there, and the "
        "last segment is whole again. Whose input would be counted twice?",
        draw=draw_recomputed,
    ),
    exercise(
        micro_batch_for,
        points=2,
        dots=2,
        hint="Every rank has batch // ranks examples in a step. Try their divisors, the largest first.",
        draw=draw_micro_batch_for,
    ),
    exercise(
        fewest_ranks,
        points=2,
        dots=2,
        hint="Some bytes stay however many ranks there are. If those fit, try 1, 2, 4, ... in "
        "turn; and mind the budget that they fill to the last byte, with nothing else to keep, or with something.",
        draw=draw_fewest_ranks,
    ),
    exercise(
        fit_on_four_cards,
        points=2,
        dots=2,
        hint="13 billion parameters x 16 bytes / 4 cards is more than 24 GB: something has to leave the cards. What "
        "is then slow happens once a step or once a micro-batch. Which of the five numbers makes it rarer?",
    ),
    exercise(
        best_offer,
        points=3,
        dots=3,
        hint="make_layout(model, cluster, {'shard': gpus}, batch_size=gpus, ...) and estimate(...) have "
        "tokens_per_second, of all GPUs together, and fits. Dollars are for one GPU.",
        draw=draw_best_offer,
    ),
]
