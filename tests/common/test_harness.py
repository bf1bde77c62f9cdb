"""What the equality harness says, without ranks: every refusal word for word, its table, the difference of two tensors,
and what it asks of a launch."""

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


def refusal(change) -> tuple[str, str]:
    """What is said where `change` has changed one of two ranks' outcomes."""
    ranks = [outcome(0), outcome(1)]
    change(*ranks)
    try:
        equality.compare(CASE, outcome(), ranks, "x on 2 rank(s)")
    except NotEqual as refused:
        return refused.what, str(refused).removeprefix("x on 2 rank(s), sgd, accumulate 3, tied, unclipped: ")
    return "", ""


def holds(index: int, **what):
    """Rank 1 holds something else at this place of its list."""

    def change(_, second):
        name, where, values = second.own[index]
        own = {"name": name, "where": where, "values": values} | what
        second.own[index] = own["name"], own["where"], own["values"]

    return change


def puts_together(name: str, tensor: torch.Tensor):
    return lambda first, second: first.state.update({name: tensor})


def says(rank: int, what: str, step: int, value: float):
    return lambda *ranks: getattr(ranks[rank], what).__setitem__(step, value)


REFUSALS = {
    "loss": (says(1, "losses", 1, 3.0), "loss", "loss of step 2 on rank 1 is 3, one process has 2 (ratio 1.5)"),
    "norm": (says(0, "grad_norms", 0, 1.5), "grad_norm",
             "grad_norm of step 1 on rank 0 is 1.5, one process has 3 (ratio 0.5)"),
    "part": (holds(0, values=torch.tensor([4.0, 6.0])), "parameters",
             "model/w from [1, 0], as rank 1 holds it, differs by 0.25 of its largest element: 6, one process has 8"),
    "type": (holds(1, values=AVERAGE[1].double()), "optimizer",
             "optimizer/w/average from [1, 0], as rank 1 holds it, is torch.float64, one process has torch.float32"),
    "scalar": (holds(2, values=torch.tensor([1.0])), "optimizer",
               "optimizer/w/step, as rank 1 holds it, differs by 0.5 of its largest element"),
    "name": (holds(2, name="optimizer/v"), "optimizer", "rank 1 holds optimizer/v, one process does not"),
    "shape": (holds(0, where=Where((2, 4), (1, 0), (1, 2), 0, 2)), "parameters",
              "model/w on rank 1 is part of a tensor of shape [2, 4], one process has [2, 2]"),
    "missing": (lambda first, second: first.state.pop("model/w"), "parameters",
                "rank 0 and one process do not both hold model/w"),
    "full": (puts_together("optimizer/w/average", AVERAGE * 2), "optimizer", "optimizer/w/average on rank 0 differs by "
             "1 of its largest element: 2, one process has 1"),
}  # fmt: skip


@pytest.mark.parametrize("change, what, text", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_word_for_word(change, what, text):
    got_what, got = refusal(change)
    assert (got_what, got[: len(text)]) == (what, text), "what the harness says"


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


TABLE = """\
largest difference in                                   loss      norm    params     optim
sgd, accumulate 3, tied, unclipped                   1.0e-07  bitwise    2.5e-06  bitwise \n\
adamw, accumulate 1, frozen, clipped                bitwise    3.0e-05  bitwise    1.2e-06"""


def test_the_table_of_proofs_is_this():
    clipped = Case(equality.frozen, equality.adamw, accumulate=1, max_norm=0.3)
    rows = [Proof(CASE, 1e-7, 0.0, 2.5e-6, 0.0), Proof(clipped, 0.0, 3e-5, 0.0, 1.2e-6)]
    assert equality.table(rows) == TABLE, "the table of two proofs"


def test_a_difference_is_relative_to_the_largest_element():
    assert equality.difference(torch.tensor([1.0, 6.0]), torch.tensor([2.0, -8.0])) == 14 / 8, "of what is expected"
    assert equality.difference(torch.ones(2), torch.zeros(2), torch.tensor(4.0)) == 0.25, "of what is given"
    assert equality.difference(torch.ones(2), torch.ones(2, 1)) == float("inf"), "tensors of other shapes"
    assert equality.difference(torch.ones(0), torch.ones(0)) == 0.0, "nothing differs from nothing"
    assert equality.difference(torch.zeros(2), torch.zeros(2)) == 0.0, "zeros, by which nothing can be divided"


def test_a_proof_says_who_was_proved_and_asks_for_what_it_was_given(monkeypatch):
    asked, told = [], []
    monkeypatch.setattr(equality, "references", lambda cases, model_class: [outcome()] * len(cases))
    monkeypatch.setattr(equality, "check_something_happened", lambda *about: None)
    monkeypatch.setattr(equality, "launch", lambda *about: asked.append(about) or [[outcome(0)], [outcome(1)]])
    monkeypatch.setattr(equality, "compare", lambda case, reference, ranks, who: told.append((case, len(ranks), who)))
    equality.prove(Proof, 2, cases=[CASE])
    equality.prove(Proof, 2, {"data": 2, "tensor": 1}, "options", [CASE], 7.0, "mine")
    assert asked == [
        (equality.on_ranks, 2, (Proof, [CASE], None, None), 60.0),
        (equality.on_ranks, 2, (Proof, [CASE], {"data": 2, "tensor": 1}, "options"), 7.0),
    ], "function, ranks, arguments and seconds"
    assert told == [(CASE, 2, "Proof on 2 rank(s)"), (CASE, 2, "mine on 2 rank(s), mesh data=2,tensor=1")]


def agreement(monkeypatch, first: dict, second: dict) -> str:
    ranks = [[Outcome([], [], {}, [(name, None, values) for name, values in own.items()])] for own in (first, second)]
    asked = []
    monkeypatch.setattr(equality, "launch", lambda *about: asked.append(about) or ranks)
    try:
        equality.agree(Proof, 3, "mine")
    except NotEqual as refused:
        return f"{refused.what}: {refused}"
    except KeyError as error:
        return f"looked for {error}, which a rank does not hold"
    ((function, nproc, (proved, cases)),) = asked
    assert (function, nproc, proved) == (equality.on_ranks, 3, Proof) and len(cases) == 1, "what the ranks are to do"
    return "agreed"


def test_ranks_agree_when_all_that_they_hold_is_equal(monkeypatch):
    mean, off = torch.full((16,), 0.5), torch.full((16,), 0.5)
    off[3] = 0.25
    both = {"model/norm.running_mean": mean, "model/w": torch.ones(2)}
    assert agreement(monkeypatch, both, both) == "agreed", "what ranks say that hold the same"
    assert agreement(monkeypatch, both, both | {"model/norm.running_mean": off}) == (
        "agreement: mine: model/norm.running_mean on rank 1 differs by 0.5 of its largest element on rank 0"
    )
    assert agreement(monkeypatch, both, {"model/norm.running_mean": mean}) == (
        "agreement: mine: rank 0 and rank 1 do not both hold model/w"
    )
    nothing = "nothing changed: mine: rank 0 does not hold the running mean"
    assert agreement(monkeypatch, {"model/w": mean}, {"model/w": mean}) == nothing
    still = {"model/norm.running_mean": torch.zeros(16)}
    assert agreement(monkeypatch, still, still) == "nothing changed: mine: the running mean is as it was made"
