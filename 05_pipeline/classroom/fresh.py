"""Arguments that no submission has seen, for the exercises of chapter 05 that calculate or make a schedule."""

from course.pipeline import schedules, simulator
from course.pipeline.classroom import grading, solutions


def microbatches_for(random):
    return random.randint(2, 16), random.randint(1, 4), random.randint(3, 40)


def peak_megabytes(random):
    ranks = random.randint(2, 4)
    schedule = schedules.build(random.choice(["1f1b", "zb-h1", "gpipe"]), ranks, random.randint(ranks, 8))
    actions = grading.text_of(schedule)[random.randrange(ranks)]
    return actions, {stage: random.randint(1, 20) for stage in range(ranks)}


def makespan(random):
    ranks = random.randint(2, 4)
    schedule = schedules.build(random.choice(["1f1b", "gpipe"]), ranks, random.randint(ranks, 8))
    return grading.text_of(schedule), random.randint(1, 5), random.randint(1, 9), random.randint(0, 4)


def quickest_microbatches(random):
    """One number is best."""
    while True:
        batch, ranks = random.choice([24, 36, 48, 60]), random.randint(2, 6)
        overhead, example = random.randint(1, 200), random.randint(1, 20)
        divisors = [m for m in range(1, batch + 1) if batch % m == 0]
        steps = sorted((m + ranks - 1) * (overhead + batch // m * example) for m in divisors)
        if steps[0] < steps[1]:
            return batch, ranks, overhead, example, batch


def loss_factors(random):
    replicas, microbatches = random.randint(1, 4), random.randint(1, 4)
    return ([[random.randint(1, 30) for _ in range(microbatches)] for _ in range(replicas)],)


def one_forward_one_backward(random, size):
    yield from grading.one_forward_one_backward(size, [(random.randint(2, 6), random.randint(3, 10))])


def short_of_memory(random, size):
    ranks, microbatches = random.randint(3, 5), random.randint(5, 9)
    limit = random.randint(1, ranks - 1)
    best = grading.read(solutions.short_of_memory(ranks, microbatches, limit), ranks)
    span = simulator.simulate(best, grading.UNIT).makespan
    yield from grading.short_of_memory(size, [(ranks, microbatches, limit, span)])


def interleave(random, size):
    ranks = random.randint(2, 5)
    yield from grading.interleave(size, [(ranks, ranks * random.randint(1, 3), random.randint(2, 4))])


def place_weight_gradients(random, size):
    ranks = random.randint(2, 5)
    yield from grading.place_weight_gradients(size, [(ranks, random.randint(ranks, 9))])


def mend(random, size):
    """A backward before its forward, on the last rank; and one so early on the first that ranks wait for each other,
    which takes fewer micro-batches than ranks: with more, other ranks need not wait for rank 0's next forward."""
    ranks, few, microbatches = random.randint(3, 5), random.choice([3, 5, 6]), random.randint(5, 8)
    late = ("1f1b", ranks, microbatches, ranks - 1, 2 * random.randrange(microbatches))
    yield from grading.mend(size, [late, ("1f1b", few, few - 1, 0, few - 2)])


def blocks_per_stage(random, size):
    costs = random.randint(0, 9), random.randint(1, 5), random.randint(3, 30)
    yield from grading.blocks_per_stage(size, [(*costs, random.randint(8, 12), random.randint(3, 4))])


ARGUMENTS = {
    call.__name__: call for call in (microbatches_for, peak_megabytes, makespan, quickest_microbatches, loss_factors)
}
CASES = {
    check.__name__: check
    for check in (
        one_forward_one_backward, short_of_memory, interleave, place_weight_gradients, mend, blocks_per_stage,
    )
}  # fmt: skip
