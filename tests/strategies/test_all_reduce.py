"""The all-reduces of chapter 01: equal to PyTorch's, costing what the formulas say; and every bug is refused."""

from fractions import Fraction

import pytest

from course.intro import by_hand
from course.intro.classroom import bugs
from course.intro.classroom import check_all_reduce as proof

# Of 4 ranks it is proved on a group of three as well. 6 = 4 and two extra ones: the folding step of recursive doubling
# with more than one helper.
CASES = [(name, size) for name in by_hand.ALGORITHMS for size in (1, 2, 4)] + [("recursive_doubling", 6)]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_right_ones_pass(name, size):
    difference = proof.prove(by_hand.ALGORITHMS[name], by_hand.COSTS[name], size)
    # Two numbers are rounded once, whatever the order; more of them need not come out with the same bits.
    expected = difference == 0 if size <= 2 else 0 < difference < 1e-6
    assert expected, f"{name} on {size} ranks: relative to the sum, {difference:.3g} off PyTorch's"


@pytest.mark.parametrize("name", bugs.BUGS)
def test_bugs_are_refused(name):
    bug = bugs.BUGS[name]
    with pytest.raises(proof.Refused) as refused:
        proof.prove(bugs.BUGS.plant(name), by_hand.COSTS[bug.target], bug.ranks, timeout=3)
    assert refused.value.check == bug.refused_by, refused.value


@pytest.mark.parametrize("name", bugs.BUGS)
def test_bugs_are_one_place_away_and_can_be_read(name):
    bug = bugs.BUGS[name]
    assert bug.wrong in bugs.BUGS.excerpt(name)
    assert bugs.BUGS.source(name).count("\n") == (bugs.BUGS.folder / bug.file).read_text().count("\n")
    assert bug.refused_by in ("error", "timeout", "result", "messages", "bytes", "pattern")


def nothing(tensor, group=None):
    pass


def one_rank_is_off(tensor, group=None):
    by_hand.ring(tensor, group)
    if by_hand.dist.get_rank(group) == 1 and tensor.is_floating_point() and tensor.numel():
        tensor.view(-1)[-1] *= 1 + 2**-23  # within the tolerance, but not the bits of the others


@pytest.mark.parametrize(
    ("algorithm", "cost", "check"),
    [
        (nothing, by_hand.cost_of_ring, "result: rank 0 of 4, torch.int64"),
        (one_rank_is_off, by_hand.cost_of_ring, "result: rank 1 of 4, torch.float32 .* not the same bits as on rank 0"),
        (by_hand.recursive_doubling, by_hand.cost_of_ring, "messages: rank 0 of 4, .* 2 sent, expected 6"),
        (by_hand.dist.all_reduce, by_hand.cost_of_ring, "error: .*TypeError"),  # its second argument is no group
    ],
)
def test_other_things_are_refused_too(algorithm, cost, check):
    with pytest.raises(proof.Refused, match=check):
        proof.prove(algorithm, cost, 4)


def test_costs_agree_with_the_literature():
    for size in range(1, 17):
        for numel in (0, 1, 5, 16, 100, 5040):
            of = {name: [cost(rank, size, numel, 4) for rank in range(size)] for name, cost in by_hand.COSTS.items()}
            for costs in of.values():  # whatever is sent is received, and nobody talks to itself
                assert sum(cost.sent for cost in costs) == sum(cost.received for cost in costs)
                assert all(rank not in cost.peers for rank, cost in enumerate(costs))
            total = 4 * numel
            assert of["gather_and_broadcast"][0].sent == (size - 1) * total
            # The average over ranks is the bound of Patarasuk & Yuan, even where chunks are uneven.
            assert sum(cost.sent for cost in of["ring"]) == Fraction(2 * (size - 1), size) * total * size
            assert all(cost.messages == 2 * (size - 1) for cost in of["ring"])
            if size & (size - 1) == 0:
                steps = size.bit_length() - 1
                assert all(cost[:3] == (steps, steps * total, steps * total) for cost in of["recursive_doubling"])
