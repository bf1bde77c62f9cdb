"""The equality harness, without ranks: what is bitwise, of what a difference is a share, and when ranks agree."""

import dataclasses

import pytest
import torch

from common.lab import equality
from common.lab.equality import Case, NotEqual, Outcome, Proof
from common.state import Where

CASE = Case(equality.tied, equality.sgd, accumulate=3, max_norm=100.0, steps=2)
WEIGHT, AVERAGE = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[0.5, 0.5], [0.5, 1.0]])


def outcome(rank: int = 0) -> Outcome:
    """Of one of two ranks, each of which holds a row; rank 0 alone puts the full state together."""
    state = {"model/w": WEIGHT.clone(), "optimizer/w/average": AVERAGE.clone(), "optimizer/w/step": torch.tensor(2.0)}
    row = Where((2, 2), (rank, 0), (1, 2), 0, 2)
    own = [("model/w", row, WEIGHT[rank].clone()), ("optimizer/w/average", row, AVERAGE[rank].clone()),
           ("optimizer/w/step", None, torch.tensor([2.0]))]  # fmt: skip
    return Outcome([4.0, 2.0], [3.0, 5.0], state if rank == 0 else {}, own)


def test_equal_outcomes_are_proved_bit_by_bit():
    proof = equality.compare(CASE, outcome(), [outcome(0), outcome(1)], "x")
    assert proof.bitwise and (proof.case, proof.loss, proof.optimizer) == (CASE, 0.0, 0.0)
    for field in ("loss", "grad_norm", "parameters", "optimizer"):
        assert not dataclasses.replace(proof, **{field: 1e-9}).bitwise, f"a difference of the {field}"


def test_a_difference_of_a_part_is_relative_to_the_whole_tensors_largest_element():
    """Rank 0 has the row with the smaller numbers."""
    first = outcome(0)
    first.own[0][2][1] += 1.2e-4
    proof = equality.compare(CASE, outcome(), [first, outcome(1)], "x")
    assert proof.parameters == pytest.approx(1.2e-4 / 8, rel=0.01), "of 8, not of 2"


def test_a_difference_is_relative_to_the_largest_element():
    assert equality.difference(torch.tensor([1.0, 6.0]), torch.tensor([2.0, -8.0])) == 14 / 8, "of what is expected"
    assert equality.difference(torch.ones(2), torch.zeros(2), torch.tensor(4.0)) == 0.25, "of what is given"
    assert equality.difference(torch.ones(2), torch.ones(2, 1)) == float("inf"), "tensors of other shapes"
    assert equality.difference(torch.ones(0), torch.ones(0)) == 0.0, "nothing differs from nothing"
    assert equality.difference(torch.zeros(2), torch.zeros(2)) == 0.0, "zeros, by which nothing can be divided"


def agreement(monkeypatch, first: dict, second: dict) -> tuple[str, str]:
    ranks = [[Outcome([], [], {}, [(name, None, values) for name, values in own.items()])] for own in (first, second)]
    monkeypatch.setattr(equality, "launch", lambda *about: ranks)
    try:
        equality.agree(Proof, 3, "mine")
    except NotEqual as refused:
        return refused.what, str(refused)
    return "agreed", ""


def test_ranks_agree_when_all_that_they_hold_is_equal(monkeypatch):
    mean, off = torch.full((16,), 0.5), torch.full((16,), 0.5)
    off[3] = 0.25
    both = dict.fromkeys(("model/norm.running_mean", "model/w", "optimizer/w/momentum_buffer"), mean)
    assert agreement(monkeypatch, both, both)[0] == "agreed", "ranks that hold the same"
    for name in both:
        what, said = agreement(monkeypatch, both, both | {name: off})
        assert what == "agreement" and name in said and "0.5" in said
        what, said = agreement(monkeypatch, both, {other: mean for other in both if other != name})
        assert what == "agreement" and name in said
    still = {"model/norm.running_mean": torch.zeros(16)}
    for nothing in ({"model/w": mean}, still):
        assert agreement(monkeypatch, nothing, nothing)[0] == "nothing changed", "a check of nothing"
