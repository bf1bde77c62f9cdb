"""Arguments that no submission has seen, for the exercises of chapter 06 that calculate."""

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def own_pieces(random):
    world = random.randint(2, 5)
    return [random.randint(1, 20) for _ in range(random.randint(2, 6))], random.randrange(world), world


def kept_bytes(random):
    ranks = random.choice([2, 8, 16])
    return random.choice(STRATEGIES), ranks * random.randint(100, 9999), ranks, random.random() < 0.5


def sent_in_a_step(random):
    ranks = random.choice([2, 4, 8])
    return random.choice(STRATEGIES), ranks * random.randint(100, 9999), ranks, random.randint(1, 5)


def gathered_peak(random):
    return [random.randint(1, 30) for _ in range(random.randint(3, 7))], random.randint(0, 3), random.random() < 0.5


def mesh_groups(random):
    sizes = [random.randint(2, 4) for _ in range(random.randint(2, 3))]
    ranks = 1
    for size in sizes:
        ranks *= size
    return sizes, random.randrange(ranks)


def recomputed(random):
    every, segments = random.randint(1, 6), random.randint(1, 6)
    activations = random.randint(20, 200)
    return every * segments, every, activations, random.randint(1, activations), random.randint(1, 8) / 4


def micro_batch_for(random):
    ranks, kept, example = random.choice([1, 2, 4]), random.randint(50, 900), random.randint(20, 200)
    return 1000, kept, example, ranks * random.randint(2, 48), ranks


def fewest_ranks(random):
    parameters = random.randint(1, 90) * 10**8
    return random.choice(STRATEGIES), parameters, random.randint(0, 40) * 10**9, random.choice([24, 40, 80]) * 10**9


def tokens_to_hide(random):
    flops, bandwidth = random.randint(1, 9) * 100e12, random.choice([10e9, 25e9, 50e9, 400e9])
    return random.choice(["ddp", "zero1", "fsdp"]), random.randint(1, 8), flops, bandwidth


def best_offer(random):
    gpus = random.sample(["a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200"], 3)
    offers = [(gpu, random.choice([8, 16]), random.randint(50, 400) / 100) for gpu in gpus]
    return random.choice(["llama-7b", "llama-13b"]), offers, random.choice([2048, 4096])


ARGUMENTS = {
    call.__name__: call
    for call in (
        own_pieces, kept_bytes, sent_in_a_step, gathered_peak, mesh_groups, recomputed, micro_batch_for, fewest_ranks,
        tokens_to_hide, best_offer,
    )
}  # fmt: skip
CASES = {"fit_on_four_cards": lambda random, size: ()}  # without arguments: what the planner takes is earned
