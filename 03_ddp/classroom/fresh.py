"""Arguments that no submission has seen, for the exercises of chapter 03 that calculate."""

from course.ddp.classroom import grading


def learning_rate(random):
    return random.randint(0, 12), random.randint(1, 40) / 64, 256, 256 * random.randint(2, 32), random.randint(4, 10)


def assign_buckets(random):
    sizes = [4 * random.randint(1, 20) for _ in range(random.randint(3, 9))]
    return sizes, random.choice([4, 16, 40]), random.choice([40, 64, 100])


def launch_order(random):
    left, buckets = list(range(random.randint(4, 9)))[::-1], []
    while left:
        size = random.randint(1, 3)
        buckets.append(left[:size])
        left = left[size:]
    ready = [parameter for bucket in buckets for parameter in bucket]
    random.shuffle(ready)
    return buckets, ready


def sampler_indices(random):
    world = random.randint(2, 6)
    return random.randint(5, 40), random.randint(0, 9), random.randint(0, 99), random.randrange(world), world


def examples_of_step(random):
    world = random.randint(2, 5)
    step, batch = random.randint(1, 9), world * random.randint(1, 6)
    return step, batch, random.randint(8, 30), random.randint(0, 99), random.randrange(world), world


def speedup_and_efficiency(random):
    kind = random.choice(["strong", "weak"])
    return kind, random.randint(2, 64), random.randint(8, 80) / 8, random.randint(8, 80) / 8


def overlapped_seconds(random):
    buckets = random.randint(2, 6)
    compute, communicate = ([random.randint(1, 16) / 2 for _ in range(buckets)] for _ in range(2))
    return compute, communicate


def exact_accuracy(random, size):
    right = {number for number in range(40) if random.random() < 0.5}
    yield from grading.exact_accuracy(size, [random.randint(11, 40)], right.__contains__)


ARGUMENTS = {
    call.__name__: call
    for call in (
        learning_rate, assign_buckets, launch_order, sampler_indices, examples_of_step, speedup_and_efficiency,
        overlapped_seconds,
    )
}  # fmt: skip
CASES = {"exact_accuracy": exact_accuracy}
