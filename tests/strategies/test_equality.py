"""Equality and teeth: every strategy of the table equals one process, and every planted bug is refused."""

import dataclasses
import itertools
import re
import shlex
import types

import pytest
import torch
from helpers import FULL
from proofs import Job, prove_all, prove_each

from common.lab import equality
from common.lab.equality import ALL_CASES, CASES, COVERING, Case, NotEqual, agree, prove
from common.lab.launch import RankFailed
from common.state import whole
from course.data_parallel.classroom.bugs import BUGS as DATA_PARALLEL_BUGS
from course.ddp.classroom.bugs import BUGS as DDP_BUGS
from course.ddp.classroom.check_loading import check_loading
from course.fsdp.classroom.bugs import BUGS as FSDP_BUGS
from course.model_parallel.classroom.bugs import BUGS as MODEL_PARALLEL_BUGS
from course.pipeline.classroom.bugs import BUGS as PIPELINE_BUGS
from course.strategies import STRATEGIES, load

OPPOSITE = [dataclasses.replace(case, steps=2) for case in (CASES[2], CASES[5])]  # they have no level in common


def cases_at(sizes: tuple[int, ...], implementation: str, nproc: int) -> list[Case]:
    """The cases of a proof: the covering ones are dealt out to the world sizes, so that a strategy meets all of them:
    the largest two sizes get two each, which differ in model and optimizer. What is there for four ranks alone, and is
    made of what is proved elsewhere, gets three, with both levels of each factor. PyTorch's, whose rules each rank
    works out anew, get two with these, and are proved on up to two ranks else. With FULL=1 each world size has all.
    """
    if FULL:
        return ALL_CASES
    if sizes == (4,):
        return COVERING[:3] if implementation == "by-hand" else OPPOSITE
    if implementation == "pytorch":
        sizes = (2, 1) if sizes == (1, 2, 4) else sizes[:1]
    hands = [COVERING[0:4:3], COVERING[1:3], COVERING[4:]]
    return [case for number, hand in enumerate(hands) for case in hand if sizes[::-1][number % len(sizes)] == nproc]


PROOFS = [
    (name, implementation, nproc, cases)
    for name, entry in STRATEGIES.items()
    if name != "mesh"
    for implementation in entry.implementations
    for nproc in entry.sizes(implementation)
    if (cases := cases_at(entry.sizes(implementation), implementation, nproc))
]


@pytest.mark.parametrize("nproc", (1, 2, 4))
def test_every_strategy_equals_one_process(nproc):
    rows = [(name, kind, cases) for name, kind, size, cases in PROOFS if size == nproc]
    rows.sort(key=lambda row: row[0] == "model")  # the last: some ranks have groups more, and PyTorch counts them
    jobs = [Job(f"{name}, {kind}", load(name, kind), cases) for name, kind, cases in rows]
    for (strategy, implementation, cases), proofs in zip(rows, prove_all(jobs, nproc), strict=True):
        assert [proof.case for proof in proofs] == cases
        # Nothing is added up in another order, unless there are micro-batches, devices, parts of sums, blocks, experts,
        # or shards, over which the norm by which gradients are clipped is taken.
        shards = implementation == "by-hand" and strategy in ("zero1", "zero2", "fsdp")
        if nproc == 1 and not shards and strategy not in ("dp", "tensor", "sequence", "context", "expert", "pipeline"):
            once = [proof.bitwise for proof in proofs if proof.case.accumulate == 1]
            assert once == [True] * len(once) and once, f"{strategy}, {implementation}: the same to the last bit"


# On how many ranks each implementation is proved: not what the table says, but what is promised.
SIZES = {
    "single": (1,), "dp": (1,), ("model", "pytorch"): (1,), "hsdp": (4,), "tensor+fsdp": (4,),
    "pipeline+ddp": (2, 4), "pipeline+fsdp": (2, 4), "mesh": (2, 4, 8),
}  # fmt: skip


def test_every_strategy_is_proved_on_the_sizes_that_are_promised():
    for name, entry in STRATEGIES.items():
        for implementation in entry.implementations:
            expected = SIZES.get((name, implementation)) or SIZES.get(name, (1, 2, 4))
            assert entry.sizes(implementation) == expected, f"world sizes of {name}, {implementation}"


def factors(case: Case) -> tuple:
    return case.make_optimizer, case.accumulate, case.make_model, case.max_norm


def pairs_of(cases) -> set:
    return {
        (i, j, factors(case)[i], factors(case)[j]) for case in cases for i, j in itertools.combinations(range(4), 2)
    }


def test_every_pair_of_factors_meets_for_every_strategy():
    """In the cases that really run, taken from the list by which the proofs are made."""
    assert {name for name, *_ in PROOFS} == set(STRATEGIES) - {"mesh"}
    assert {nproc for _, _, nproc, _ in PROOFS} == {1, 2, 4}
    for name, implementation in {(name, implementation) for name, implementation, *_ in PROOFS}:
        ran = [case for n, i, _, cases in PROOFS if (n, i) == (name, implementation) for case in cases]
        if FULL or STRATEGIES[name].sizes(implementation) != (4,):
            assert pairs_of(ran) == pairs_of(ALL_CASES), (name, implementation)
        assert [{*levels} for levels in zip(*map(factors, ran), strict=True)] == [
            {*levels} for levels in zip(*map(factors, ALL_CASES), strict=True)
        ], (name, implementation)
    for _, _, nproc, cases in PROOFS:
        assert nproc == 1 or {case.make_optimizer for case in cases} == {equality.sgd, equality.adamw}
        assert nproc == 1 or {case.make_model for case in cases} == {equality.tied, equality.frozen}
    for case in COVERING:
        assert pairs_of({*COVERING} - {case}) != pairs_of(ALL_CASES), "one case fewer would not do"


CHAPTERS = {
    "02_data_parallel": DATA_PARALLEL_BUGS,
    "03_ddp": DDP_BUGS,
    "04_model_parallel": MODEL_PARALLEL_BUGS,
    "05_pipeline": PIPELINE_BUGS,
    "06_fsdp": FSDP_BUGS,
}
BUGS = [  # those of a program to copy are refused by what it saves and prints, in test_standalone.py
    (chapter, name) for chapter, bugs in CHAPTERS.items() for name in bugs if bugs[name].file != "standalone.py"
]
# Two steps are enough to refuse them all; FULL=1 takes as many as the proofs do.
TELLING, ON_THREE = (
    [dataclasses.replace(c, steps=c.steps if FULL else 2) for c in CASES if factors(c)[:2] == (equality.sgd, n)]
    for n in (3, 1)
)


def bugs_that_end() -> dict[int, list[tuple[str, str]]]:
    """By the number of ranks: those that train, and give wrong numbers."""
    found: dict[int, list[tuple[str, str]]] = {}
    for chapter, name in BUGS:
        bug = CHAPTERS[chapter][name]
        if not ends_the_launch(bug) and bug.refused_by not in ("count", "order", "error"):
            found.setdefault(bug.ranks, []).append((chapter, name))
    return found


def ends_the_launch(bug) -> bool:
    return bug.refused_by == "timeout" or bug.refused_by.startswith("error: ")


@pytest.mark.parametrize("nproc", sorted(bugs_that_end()))
def test_bugs_that_train_are_refused_by_the_number_that_is_wrong(nproc):
    """All of one world size in one launch, for a single step, which shows most of them. Those that it lets pass, or
    that show in another number at first, meet all steps of the first case, then of the second."""
    left = {f"{chapter}, {name}": CHAPTERS[chapter][name] for chapter, name in bugs_that_end()[nproc]}
    planted = {f"{chapter}, {name}": CHAPTERS[chapter].plant(name) for chapter, name in bugs_that_end()[nproc]}
    wrong, number = [], len(left)
    short = dataclasses.replace(telling(nproc)[0], steps=1)
    for case in (*[short] * (not FULL), *telling(nproc)):
        refusals = prove_each([Job(who, planted[who], [case]) for who in left], nproc)
        for who, refusal in zip(list(left), refusals, strict=True):
            if isinstance(refusal, Exception):
                right = isinstance(refusal, NotEqual) and refusal.what == left[who].refused_by
                if right or case is not short:
                    wrong += [] if right else [f"{who}, by {left[who].refused_by}: {refusal}"]
                    del left[who]
    for who, bug in left.items():
        try:
            agree(planted[who], nproc, who)
            wrong.append(f"{who} is let pass")
        except NotEqual as refusal:
            wrong += [f"{who}, by {bug.refused_by}: {refusal}"] if refusal.what != bug.refused_by else []
    assert number and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "chapter, name", [bug for bug in BUGS if bug not in itertools.chain(*bugs_that_end().values())]
)
def test_bug_is_refused(chapter, name):
    bugs = CHAPTERS[chapter]
    bug, waits = bugs[name], bugs[name].refused_by == "timeout"
    error = bug.refused_by.removeprefix("error: ") if bug.refused_by.startswith("error: ") else None
    with pytest.raises(RankFailed if waits or error else NotEqual) as refusal:
        examine(bugs.plant(name), bug.ranks, name, timeout=5.0 if waits else 60.0)
    if error:
        assert error in str(refusal.value), str(refusal.value)
    elif waits:
        # whichever rank's time is up first
        assert re.search(r"rank \d .*\bwait\w* .*\b(reduce|recv)\b", str(refusal.value)), str(refusal.value)
    else:
        assert refusal.value.what == bug.refused_by, str(refusal.value)


def telling(nproc: int) -> list[Case]:
    return TELLING if equality.BATCH % (3 * nproc) == 0 else ON_THREE


def examine(strategy_class, nproc, who, timeout=60.0):
    """Raise unless it trains as one process does and all ranks agree. A function is a way of loading: unless it loads
    what it should."""
    if isinstance(strategy_class, types.FunctionType):
        return check_loading([strategy_class], nproc)
    proofs = []
    for case in telling(nproc):  # one by one: most bugs show in the first
        proofs += prove(strategy_class, nproc, cases=[case], timeout=timeout, who=who)
    agree(strategy_class, nproc, who)
    return proofs


def test_without_a_bug_the_cases_that_refuse_bugs_pass():
    assert len(examine(load("ddp", True), 2, "ddp")) == len(TELLING) == 2


def test_adamw_of_the_proofs_makes_no_steps_of_rounding():
    """With PyTorch's eps of 1e-8 a gradient that is 0 but for rounding moves its parameter by the learning rate."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), 1e-9)
    equality.adamw([parameter]).step()
    assert abs(parameter.item()) < 1e-6, "how far a gradient of 1e-9 moves a parameter"


def test_adamw_alone_would_not_see_a_wrong_scale():
    """Why the cases have SGD: AdamW's steps are the same for gradients of half the size, so the loss is too."""
    wrong = DDP_BUGS.plant("too_small")
    case = equality.Case(equality.tied, equality.adamw, accumulate=1, max_norm=100.0)
    outcome = equality.launch(equality.on_ranks, 2, (wrong, [case]))[0][0]
    (reference,) = equality.references((case,))
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-2)
    assert outcome.grad_norms[0] == pytest.approx(reference.grad_norms[0] / 2, rel=1e-2)


class DoesNothing:
    """A strategy in which nothing trains, and which reports what one process would if nothing trained there."""

    data_rank, data_size = 0, 1

    def __init__(self, model, make_optimizer, setup):
        self.model = model

    def step(self, micro_batches):
        return torch.zeros(()), torch.zeros(())

    def full_state(self):
        return {"model": self.model.state_dict()}

    def parts(self):
        return []

    def optimizer_state(self):
        return {}


def test_a_proof_about_nothing_is_refused():
    with pytest.raises(NotEqual) as refusal:
        prove(DoesNothing, 1, cases=CASES[:1])
    assert refusal.value.what == "loss"


def test_a_reference_that_does_not_train_is_refused():
    still = equality.Case(equality.tied, lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9), accumulate=1, max_norm=0.3)
    with pytest.raises(NotEqual) as refusal:
        prove(load("single"), 1, cases=[still])
    assert refusal.value.what == "nothing changed"


def test_a_reference_that_is_clipped_otherwise_than_it_says_is_refused():
    for case in (CASES[0], dataclasses.replace(CASES[0], max_norm=100.0)):
        (reference,) = equality.references((CASES[0],))
        norms = [0.2, 101.0][case.max_norm > 1]
        wrong = dataclasses.replace(reference, grad_norms=[*reference.grad_norms[:-1], norms])
        equality.check_something_happened(case, reference)
        with pytest.raises(NotEqual, match="clipping at .* met norms"):
            equality.check_something_happened(case, wrong)
            pytest.fail(f"clipping at {case.max_norm} is taken for at work or idle where a norm is {norms}")


def with_a_still_embedding(model_class):
    model = equality.tied(model_class)
    model.embedding.positions.requires_grad_(False)
    return model


def test_a_reference_in_which_something_frozen_moves_is_refused():
    (reference,) = equality.references((CASES[0],))
    with pytest.raises(NotEqual, match="embedding.positions.weight moved by"):
        equality.check_something_happened(dataclasses.replace(CASES[0], make_model=with_a_still_embedding), reference)
        pytest.fail("a frozen parameter has moved, and nobody says so")


def test_a_missing_tensor_is_refused():
    (reference,) = equality.references((CASES[0],))
    short = equality.Outcome(reference.losses, reference.grad_norms, dict(list(reference.state.items())[1:]))
    with pytest.raises(NotEqual, match="do not both hold"):
        equality.compare(CASES[0], reference, [short], "short")
    nothing = equality.Outcome(reference.losses, reference.grad_norms, {})
    with pytest.raises(NotEqual, match="rank 0 and one process do not both hold"):
        equality.compare(CASES[0], reference, [nothing], "nothing")
        pytest.fail("rank 0 has put nothing together, and it is taken for equal")
    wrong = dict(reference.state)
    name = next(name for name in wrong if name.startswith("optimizer/"))
    wrong[name] = wrong[name] * 1.001
    with pytest.raises(NotEqual) as refusal:
        equality.compare(CASES[0], reference, [equality.Outcome(reference.losses, reference.grad_norms, wrong)], "off")
    assert refusal.value.what == "optimizer"


def test_what_another_rank_than_0_holds_is_compared():
    (reference,) = equality.references((CASES[0],))
    numbers = reference.losses, reference.grad_norms
    name, expected = "model/blocks.0.mlp.up.weight", reference.state["model/blocks.0.mlp.up.weight"]

    def held(values, name=name):
        ranks = [equality.Outcome(*numbers, reference.state), equality.Outcome(*numbers, {})]
        ranks[1].own.append((name, whole(values), values.flatten()))
        return ranks

    equality.compare(CASES[0], reference, held(expected), "right")
    for wrong in (1.01 * expected[3, 5] + 0.01, float("nan")):
        off = expected.clone()
        off[3, 5] = wrong
        with pytest.raises(NotEqual, match=r"as rank 1 holds it, differs by .* one process has") as refusal:
            equality.compare(CASES[0], reference, held(off), "off")
            pytest.fail(f"{wrong} is taken for equal")
        assert refusal.value.what == "parameters"
    near = equality.compare(CASES[0], reference, held(expected + 1e-5 * expected.abs().max()), "near")
    assert near.parameters == pytest.approx(1e-5, rel=0.1), "the largest difference, told of all ranks"
    with pytest.raises(NotEqual, match="rank 1 holds model/other, one process does not"):
        equality.compare(CASES[0], reference, held(expected, "model/other"), "other")
        pytest.fail("a tensor that one process does not have is taken for equal")
    with pytest.raises(NotEqual, match="on rank 1 is part of a tensor of shape"):
        equality.compare(CASES[0], reference, held(expected.T.contiguous()), "turned")
        pytest.fail("a tensor of another shape is taken for equal")


def test_the_numbers_of_every_rank_and_step_are_compared():
    """A thousandth off, on the last rank and in the last step, is seen; what rounding makes is not; nan is."""
    (reference,) = equality.references((CASES[0],))

    def ranks(**off):
        outcomes = [equality.Outcome(list(reference.losses), list(reference.grad_norms), {}) for _ in range(3)]
        outcomes[0].state = reference.state
        for numbers, factor in off.items():
            getattr(outcomes[2], numbers)[-1] *= factor
        return outcomes

    near = equality.compare(CASES[0], reference, ranks(losses=1 + 1e-5, grad_norms=1 - 2e-5), "near")
    assert (near.loss, near.grad_norm) == pytest.approx((1e-5, 2e-5), rel=0.1), "the largest differences, of all ranks"
    assert not near.bitwise and near.parameters == 0
    (_, row, other) = equality.table([near, dataclasses.replace(near, parameters=3e-5, optimizer=4e-5)]).splitlines()
    assert re.fullmatch(r"sgd, accumulate 1, tied, clipped +1\.0e-05 +2\.0e-05 +bitwise +bitwise ", row)
    assert other.split()[-4:] == ["1.0e-05", "2.0e-05", "3.0e-05", "4.0e-05"]
    step = len(reference.losses)
    for numbers, what in (("losses", "loss"), ("grad_norms", "grad_norm")):
        for factor in (1.001, 0.999, float("nan")):
            try:
                equality.compare(CASES[0], reference, ranks(**{numbers: factor}), "off")
            except NotEqual as refusal:
                assert refusal.what == what and f"{what} of step {step} on rank 2 is" in str(refusal)
            else:
                pytest.fail(f"{what} of the last step on rank 2, times {factor}, is taken for equal")


def test_the_cases_are_what_they_say():
    """Weights at two places that are one, and frozen ones: of a layer all, of a layer some."""
    tied, frozen = equality.tied(), equality.frozen()
    assert tied.head.out.weight is tied.embedding.tokens.weight and frozen.head.out.weight.requires_grad
    assert frozen.head.out.weight is not frozen.embedding.tokens.weight
    still = [name for name, parameter in frozen.named_parameters() if not parameter.requires_grad]
    assert still == ["embedding.positions.weight", "blocks.1.mlp.up.weight"], "what is frozen"
    assert [name for name, parameter in tied.named_parameters() if not parameter.requires_grad] == []
    group = equality.sgd([torch.zeros(1, requires_grad=True)]).param_groups[0]
    assert (group["momentum"], group["lr"]) == (0.9, 0.5), "SGD with momentum"
    (reference,) = equality.references((CASES[0],))
    assert CASES[0].max_norm == 0.3 < min(reference.grad_norms), "every step is clipped"


def test_a_failure_shows_the_element_that_is_farthest_off():
    with pytest.raises(NotEqual, match="w differs by 0.5 of its largest element: 4, one process has 8$"):
        equality.refuse("model/w", torch.tensor([1.5, 4.0, 2.0]), torch.tensor([1.0, 8.0, 2.0]), "w")


def test_ranks_begin_with_seeds_of_their_own():
    name = "model/embedding.tokens.weight"
    first, second = equality.launch(equality.on_ranks, 2, (DoesNothing, CASES[:1]))
    assert not torch.equal(first[0].state[name], second[0].state[name]), "rank 1 begins with rank 0's weights"


def test_a_failure_says_which_case_failed_and_how_to_run_it_again(request, monkeypatch):
    def fail():
        examine(DDP_BUGS.plant("too_small"), 2, "ddp by hand")

    def told(function) -> str:
        call = pytest.CallInfo.from_call(function, "call")
        return request.config.hook.pytest_runtest_makereport(item=request.node, call=call).longreprtext

    monkeypatch.setenv("FULL", "1")
    assert f"\nFULL=1 python -m pytest {shlex.quote(request.node.nodeid)}" in told(lambda: 1 / 0), "how to run it again"
    monkeypatch.delenv("FULL")
    text = told(fail)
    assert "ddp by hand on 2 rank(s), sgd, accumulate 3, tied, clipped: grad_norm of step 1 on rank 0 is " in text
    assert f"\npython -m pytest {shlex.quote(request.node.nodeid)}" in text, "how to run it again"
