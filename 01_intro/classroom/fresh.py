"""Arguments that no submission has seen, for the exercises of chapter 01 that calculate."""


def ring_bytes(random):
    size = random.randint(2, 9)
    return random.randrange(size), size, random.randint(1, 5000), random.choice([1, 2, 4, 8])


def all_reduce_seconds(random):
    algorithm = random.choice(["ring", "tree", "halving-doubling"])
    size = 2 ** random.randint(1, 5) if algorithm == "halving-doubling" else random.randint(2, 12)
    return algorithm, size, 10.0 * random.randint(1, 500), random.choice([0.5, 1.0, 3.0]), random.choice([4.0, 20.0])


ARGUMENTS = {call.__name__: call for call in (ring_bytes, all_reduce_seconds)}
CASES = {}
