"""Arguments that no submission has seen, for the exercises of chapter 04 that calculate."""

import itertools


def balanced_cut(random):
    """One cut is best."""
    while True:
        costs, parts = [random.randint(1, 60) for _ in range(random.randint(5, 9))], random.randint(2, 4)
        cuts = ((0, *cut, len(costs)) for cut in itertools.combinations(range(1, len(costs)), parts - 1))
        largest = sorted(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
        if largest[0] < largest[1]:
            return costs, parts


def naive_utilisation(random):
    ranks = random.randint(2, 6)
    forward, backward = ([random.randint(1, 16) / 4 for _ in range(ranks)] for _ in range(2))
    return forward, backward, random.choice([0.0, 0.25, 0.5, 2.0])


def ring_pairs(random):
    ranks, each = random.randint(2, 5), random.randint(2, 6)
    positions = list(range(ranks * each))
    random.shuffle(positions)
    return ([positions[each * rank : each * (rank + 1)] for rank in range(ranks)],)


ARGUMENTS = {call.__name__: call for call in (balanced_cut, naive_utilisation, ring_pairs)}
CASES = {}
