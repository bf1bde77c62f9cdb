"""What the planner's constants are fitted to, and what the scoreboard counts."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from planner import constants, fit, hardware, published, scope, scoreboard
from planner.constants import PRIOR
from planner.estimate import estimate
from planner.hardware import cluster
from planner.layout import make_layout
from planner.models import find

GIB = 2**30


def run(source: str, seconds: float | None = None, gib: float | None = None, **more) -> SimpleNamespace:
    return SimpleNamespace(
        source=source, seconds=seconds, gib=gib, crashed=False, assumed=False, out_of_memory=seconds is None, **more
    )


def line(source: str, seconds: float | None, measured: float | None, *, fits=True, tensor=1, micro_batch=1, **more):
    layout = make_layout(find("gpt2"), cluster("a100-80gb", tensor), {"tensor": tensor}, batch_size=8, sequence=128,
                         micro_batch=micro_batch)  # fmt: skip
    nodes = SimpleNamespace(gpus=8, gpu=SimpleNamespace(name="g"))
    one = run(source, measured, model=SimpleNamespace(name="m"), cluster=nodes, layout=layout)
    return SimpleNamespace(run=one, seconds=seconds, fits=fits, recommended=fits, error=0.1, **more)


def test_every_project_has_one_voice_in_a_fit(monkeypatch):
    """Errors of a factor e and 1 in one project, and of e in another: whatever number of runs."""
    monkeypatch.setattr(fit, "seconds", lambda one, constants, quick: one.predicted)
    one = run("a x", 1.0, predicted=math.e), run("a y", 1.0, predicted=1.0)
    two = run("b", 1.0, predicted=math.e)
    error = math.sqrt(1 + fit.SOFT**2) - fit.SOFT
    assert fit.loss([*one, two], PRIOR) == pytest.approx((error / 2 + error) / 2)
    assert fit.loss([*one, two, two, two], PRIOR) == fit.loss([*one, two], PRIOR), "more of the same says nothing new"


def test_some_runs_of_a_source_are_spread_over_its_table():
    for number in (1, 7, 20, 33):
        places = [one.place for one in fit.some([run("a", place=place) for place in range(number)], 7)]
        steps = {after - before for before, after in pairwise([*places, number])}
        assert places[0] == 0 and len(places) == min(7, number) and max(steps) - min(steps) <= 1


def test_no_project_is_in_both_halves():
    first, second = fit.halves(published.runs())
    assert first and second and not first & second
    stored = constants.load_halves()
    assert {frozenset(own) for own, _ in stored} == {frozenset(first), frozenset(second)}, (
        "constants.json is of other sources: python -m planner scoreboard --refit"
    )
    twice, thrice = (replace(PRIOR, step=times) for times in (2.0, 3.0))
    for one in scoreboard.lines(halves=[(first, twice), (second, thrice)], source="torchtitan"):
        own, other = (2.0, 3.0) if "torchtitan" in first else (3.0, 2.0)
        plain = fit.seconds(one.run, PRIOR)
        assert one.seconds == pytest.approx(other * plain), "by the half that its project is not in"
        assert not one.run.seconds or one.fitted_error == pytest.approx(own * plain / one.run.seconds - 1)


def test_a_fit_finds_constants_again():
    """Runs whose times another planner made up are predicted better than before."""
    true = replace(PRIOR, matmul=0.75, passes=3.0)
    runs = [one for one in published.torchtitan() if one.source == "torchtitan 2024-04" and one.seconds]
    made_up = [replace(one, seconds=fit.seconds(one, true)) for one in runs]
    found = fit.fit(made_up)
    assert fit.loss(made_up, found) < fit.loss(made_up, PRIOR) / 2


def test_the_cost_of_a_choice():
    """The planner takes the simplest of what it can't tell from the fastest; the rule least tensor x pipeline, then the
    largest micro-batch."""
    group = [line("a", 1.0, 12.0, tensor=2), line("a", 2.0, 10.0), line("a", 3.0, 15.0, micro_batch=4)]
    assert scoreboard.choices(group, scoreboard.fastest)["regret"] == pytest.approx(0.2)
    assert scoreboard.choices(group, scoreboard.first)["regret"] == pytest.approx(0.2), "twice as slow is no tie"
    tied = [line("a", 1.0, 12.0, tensor=2), line("a", 1.09, 10.0), line("a", 3.0, 15.0)]
    assert scoreboard.choices(tied, scoreboard.first)["regret"] == 0, "the simplest of what it can't tell apart"
    assert scoreboard.choices(group, scoreboard.simplest)["regret"] == pytest.approx(0.5)
    failed = [*group, line("a", 0.5, None)]
    assert scoreboard.choices(failed, scoreboard.fastest)["failed"] == 1, "what it chose did not run"


def test_precision_and_recall_of_what_does_not_fit():
    found = [line("a", 1, None, fits=False)] * 2 + [line("a", 1, 1.0, fits=False)] + [line("a", 1, None)] * 2
    for more in ({"crashed": True}, {"assumed": True}):  # of these nobody knows
        found.append(line("a", 1, None, fits=False))
        vars(found[-1].run).update(more)
    assert scoreboard.out_of_memory(found + [line("a", 1, 1.0)] * 5) == {
        "runs": 10, "predicted": 3, "true": 4, "precision": 2 / 3, "recall": 2 / 4}  # fmt: skip


def test_measures():
    found = scoreboard.summary([0.1, -0.3])
    assert (found["mean"], found["median"], found["p90"], found["bias"]) == pytest.approx((0.2, 0.2, 0.3, -0.1))
    lines = [line(source, 1.0, 1.0, in_scope=inside, time_error=error) for source, inside, error in (
        ("a", True, -0.5), ("a", True, None), ("b", True, 0.1), ("b", True, 0.3), ("b", False, 9.0))]  # fmt: skip
    assert scoreboard.over_sources(lines, max) == pytest.approx((0.5 + 0.3) / 2), "what is out of scope has no part"
    assert scoreboard.kendall([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3), "one pair of three is wrong"


def test_a_run_fits_if_what_is_expected_does():
    """As is said of it, and not by the interval's lower end; "recommended" leaves room, too."""
    rows = [scoreboard.predict(one, PRIOR, PRIOR) for one in published.runs()[::25]]
    assert len({(row.fits, row.recommended) for row in rows}) == 3, "some fit, and some of these with a reserve"
    for row in rows:
        assert row.fits == (row.gib * GIB <= row.run.cluster.gpu.memory) >= row.recommended, row.run.name
    sizes = (84, 99), (86, 99), (84, 101)  # expected, and with the framework that needs most, of 100
    assert [scope.recommended(*size, 100) for size in sizes] == [True, False, False]


def test_out_of_scope_is_said_and_the_interval_is_wide():
    model = find("llama-7b")

    def asked(gpu, **fields):
        gpus = cluster(gpu, 8)
        return estimate(model, gpus, make_layout(model, gpus, {"shard": 8}, batch_size=64, zero_stage=3, **fields))

    inside, outside = asked("h100-80gb"), asked("rtx-4090")
    assert not inside.out_of_scope and outside.out_of_scope
    assert outside.seconds_high / outside.seconds >= scope.WIDE > inside.seconds_high / inside.seconds


def test_every_gpu_and_network_of_the_table_can_be_one():
    """Shares are shares, rates are rates: a line more of data breaks nothing here."""
    for gpu in hardware.GPUS.values():
        assert 0 < gpu.achievable <= 1 and 0 < gpu.attention <= 1 and gpu.source, gpu.name
        assert min(gpu.peak, gpu.memory, gpu.hbm, gpu.link, gpu.pcie) > 0, gpu.name
    for name, one in hardware.NETWORKS.items():
        assert one.rate == int(name.rpartition("-")[2]) / 8 * 1e9 and one.alpha > 0 and one.source, name


def test_every_fitted_constant_has_bounds_and_a_prior_within():
    for name in constants.FITTED:
        low, high = fit.BOUNDS[name]
        assert low <= getattr(PRIOR, name) <= high and low <= getattr(constants.load(), name) <= high, name
