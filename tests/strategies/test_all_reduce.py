"""The all-reduces of chapter 01: equal to PyTorch's, costing what the formulas say; and every bug is refused."""

import dataclasses
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from common.lab.launch import RankFailed
from course.intro import by_hand
from course.intro.classroom import bugs
from course.intro.classroom import check_all_reduce as proof

# 6 ranks = 4 and two extra ones: the folding step of recursive doubling with more than one helper.
CASES = [(name, size) for name in by_hand.ALGORITHMS for size in (1, 2, 3, 4)] + [("recursive_doubling", 6)]


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


def test_a_bug_whose_place_is_gone_is_reported(monkeypatch):
    gone = dataclasses.replace(bugs.BUGS["stale_chunk"], right="no such line")
    monkeypatch.setitem(bugs.BUGS, "gone", gone)
    with pytest.raises(ValueError, match="has no 'no such line' in or after"):
        bugs.BUGS.source("gone")


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


def two_ranks(dtype=torch.float32, **of_rank_1) -> list[dict]:
    """What two ranks saw of a right ring of two elements of 4 bytes: 1, 2 and 3, 4. Changes are those of rank 1."""
    seen = []
    for rank in range(2):
        changes = of_rank_1 if rank else {}
        messages = changes.get("messages", [(3 - 2 * rank, 4)] * 2)
        ledger = SimpleNamespace(messages=messages, sent=changes.get("sent", 8), received=changes.get("received", 8))
        mine, want = torch.tensor([1 + 2 * rank, 2 + 2 * rank], dtype=dtype), torch.tensor([4, 6], dtype=dtype)
        got = torch.tensor(changes.get("got", [4, 6]), dtype=dtype)
        seen.append({"mine": changes.get("mine", mine), "got": got, "want": want, "ledger": ledger})
    return seen


EPS = 2.0**-23
HERE = "rank 1 of 2, torch.float32 [2]:"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"got": [4, 7]}, f"result: {HERE} element 1 is 7, should be 6"),
        ({"got": [4 * (1 + 3 * EPS), 6]}, f"result: {HERE} element 0 is 4, should be 4"),
        ({"got": [4 * (1 + EPS), 6]}, f"result: {HERE} not the same bits as on rank 0"),
        ({"messages": [(1, 8)]}, f"messages: {HERE} 1 sent, expected 2"),
        ({"messages": [(1, 4), (2, 4)]}, f"pattern: {HERE} sent to ranks [1, 2], not [1]"),
        ({"sent": 12}, f"bytes: {HERE} sent, received (12, 8), expected (8, 8)"),
        ({"received": 4}, f"bytes: {HERE} sent, received (8, 4), expected (8, 8)"),
    ],
)
def test_what_ranks_saw_is_judged(changes, said):
    """The two are ranks 1 and 3 of the world: so a neighbour is named."""
    assert proof.judge(two_ranks(), [1, 3], by_hand.cost_of_ring) == 0
    with pytest.raises(proof.Refused) as refused:
        proof.judge(two_ranks(**changes), [1, 3], by_hand.cost_of_ring)
    assert str(refused.value) == said
    assert refused.value.check == said.partition(":")[0]


def test_what_is_judged_is_how_far_from_the_sum_and_whole_numbers_exactly():
    both = two_ranks()
    for case in both:
        case["got"] = torch.tensor([4.0, 6 * (1 + 2 * EPS)])  # within 2 * eps, the tolerance of two ranks
    assert proof.judge(both, [1, 3], by_hand.cost_of_ring) == pytest.approx(2 * EPS, rel=0.5)
    whole = two_ranks(torch.int64, got=[4, 7])
    with pytest.raises(proof.Refused, match=r"result: rank 1 of 2, torch.int64 \[2\]: element 1 is 7, should be 6"):
        proof.judge(whole, [1, 3], lambda *about: by_hand.Cost(2, 8, 8, {1 - about[0]}))
    with pytest.raises(AssertionError, match="this case cannot tell a sum from nothing: rank 1 of 2"):
        proof.judge(two_ranks(mine=torch.tensor([4.0, 6.0])), [1, 3], by_hand.cost_of_ring)


def test_a_proof_asks_all_ranks_and_a_group_without_rank_0(monkeypatch):
    asked, judged = [], []

    def launched(function, size, arguments, timeout):
        asked.append((function, size, arguments, timeout))
        return [[f"{rank}.{case}" for case in range(14)] for rank in range(size)]

    def judge(of_ranks, members, cost):
        judged.append((members, of_ranks))
        return 0.8 if len(judged) == 3 else 0.1

    monkeypatch.setattr(proof, "launch", launched)
    monkeypatch.setattr(proof, "judge", judge)
    assert proof.prove("an algorithm", "its cost", 3, shapes=[(2,), (3,)], timeout=7.0) == 0.8, "the largest"
    groups = [[0, 1, 2], [1, 2]]
    assert asked == [(proof.trial, 3, ("an algorithm", groups, [(2,), (3,)], 7.0), 7.0)]
    cases = [(groups[0], [f"{rank}.{case}" for rank in range(3)]) for case in range(4)]
    assert judged[:4] == cases, "all ranks: int64 and float32 of both shapes"
    assert judged[4:6] == [([1, 2], ["1.4", "2.4"]), ([1, 2], ["1.5", "2.5"])] and len(judged) == 8
    asked.clear()
    proof.prove("an algorithm", "its cost", 2)
    assert asked[0][2][1:] == ([[0, 1]], [(), (2,), (3,), (5,), (2, 5), (10, 10, 10), (0,)], 60.0), "by default"
    for text, check in (("Timed out waiting", "timeout"), ("not finished in time", "timeout"), ("KeyError", "error")):
        monkeypatch.setattr(proof, "launch", failing(text))
        with pytest.raises(proof.Refused) as refused:
            proof.prove("an algorithm", "its cost", 2)
        assert refused.value.check == check and str(refused.value).startswith(f"{check}: "), text


def failing(text: str):
    def launched(*about, timeout):
        raise RankFailed(text, 0, [], [])

    return launched


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
