"""Arguments that no submission has seen, for the exercises of chapter 02 that calculate."""


def slice_sizes(random):
    return random.randint(1, 200), random.randint(2, 9)


def mean_of_slices(random):
    counts = [random.randint(1, 9) for _ in range(random.randint(2, 5))]
    return [random.randint(1, 40) / 8 for _ in counts] + [None], counts + [0]


def bytes_held(random):
    devices = random.randint(2, 8)
    return random.choice([0, devices - 1]), devices, *(random.randint(1, 10_000) for _ in range(3))


def bytes_copied(random):
    devices = random.randint(2, 8)
    trainable, frozen = random.randint(1, 10_000), random.randint(1, 10_000)
    return devices, trainable, frozen, devices * random.randint(1, 900), devices * random.randint(1, 900)


def best_devices(random):
    """Nowhere are two equal: 2 k + 1 work is not n times n' starts."""
    return random.randint(10, 500), 2.0, random.choice([7.0, 23.0, 51.0, 103.0, 399.0]), random.randint(3, 16)


ARGUMENTS = {call.__name__: call for call in (slice_sizes, mean_of_slices, bytes_held, bytes_copied, best_devices)}
CASES = {}
