"""How good the planner is: published sources, each predicted with constants fitted on the half that it is not in."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

from common.constants import GIB
from planner import constants as constants_
from planner import fit, scope, search
from planner.constants import Constants
from planner.estimate import estimate
from planner.published import Run, runs

MOST = 60  # runs of a source that are predicted, evenly spread over its table, unless all are asked for


@dataclass(frozen=True)
class Line:
    """One run. Errors are predicted over measured, minus one, and None where nothing was measured.

    inside: the measured time is in the stated interval; fitted_error: with constants that were fitted on its own half
    fits:   the expected memory is less than the GPU's; recommended: with the default reserve as well;
    error:  of a time, as the constants say it (planner/constants.py)
    """

    run: Run
    seconds: float
    gib: float
    time_error: float | None
    fitted_error: float | None
    memory_error: float | None
    inside: bool | None
    memory_inside: bool | None
    fits: bool
    recommended: bool
    in_scope: bool
    error: float


def predict(run: Run, other: Constants, own: Constants) -> Line:
    """other, own: constants fitted on the half of the sources that the run's is not in, and on its own half."""
    found = estimate(run.model, run.cluster, run.layout, other)
    gib, timed = found.memory.expected / GIB, run.seconds
    limit = run.cluster.gpu.memory
    return Line(
        run,
        found.seconds,
        gib,
        found.seconds / timed - 1 if timed else None,
        fit.seconds(run, own) / timed - 1 if timed else None,
        gib / run.gib - 1 if run.gib else None,
        found.seconds_low <= timed <= found.seconds_high if timed else None,
        found.memory.low <= run.gib * GIB <= found.memory.high if run.gib else None,
        found.memory.expected <= limit,
        scope.recommended(found.memory.expected, found.memory.worst, limit),
        not scope.reasons(run.model, run.cluster, run.layout),
        other.error,
    )


def lines(
    every: bool = False, halves: list[tuple[set[str], Constants]] | None = None, source: str = ""
) -> list[Line]:  # fmt: skip
    """Runs (every one, or some of each source), predicted with the constants of both halves. source: how those begin
    that are looked at."""
    halves = halves or constants_.load_halves()
    found = []
    for run in (run for run in (runs() if every else fit.some(runs(), MOST)) if run.source.startswith(source)):
        fitted = fit.project(run.source) in halves[0][0]
        other, own = (halves[1][1], halves[0][1]) if fitted else (halves[0][1], halves[1][1])
        found.append(predict(run, other, own))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else float("nan")


def summary(errors: list[float]) -> dict[str, float]:
    """Mean, median and 90th percentile of the sizes of relative errors, their bias, and how many there are."""
    sizes = [abs(error) for error in errors]
    return {"runs": len(errors), "mean": mean(sizes), "median": median(sizes) if sizes else float("nan"),
            "p90": percentile(sizes, 0.9), "bias": mean(errors)}  # fmt: skip


def kendall(predicted: list[float], measured: list[float]) -> float:
    """Kendall's tau-a: pairs in the same order less pairs in the opposite order, over all pairs."""
    pairs = list(combinations(range(len(predicted)), 2))
    signs = [(predicted[a] - predicted[b]) * (measured[a] - measured[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs) if pairs else float("nan")


def groups(found: list[Line]) -> list[list[Line]]:
    """Lines between which somebody could have chosen: one model, GPUs, and batch of one source. At least three ran."""
    by_key = defaultdict(list)
    for line in found:
        run = line.run
        by_key[(run.source, run.model.name, run.cluster.gpus, run.cluster.gpu.name, run.layout.batch_size,
                run.layout.sequence)].append(line)  # fmt: skip
    return [group for group in by_key.values() if sum(line.run.seconds is not None for line in group) >= 3]


def fastest(group: list[Line]) -> Line | None:
    """What is predicted to take least time, of what is recommended."""
    fits = [line for line in group if line.recommended] or [line for line in group if line.fits]
    return min(fits, key=lambda line: line.seconds, default=None)


def first(group: list[Line]) -> Line | None:
    """What the planner puts first: the simplest of those that it cannot tell from the fastest (planner/search.py)."""
    fits = [line for line in group if line.recommended] or [line for line in group if line.fits]
    least = min((line.seconds for line in fits), default=0.0)
    near = [line for line in fits if search.tied(line.seconds, least, line.error)]
    return min(near, key=lambda line: (search.simplicity(line.run.layout), line.seconds), default=None)


def simplest(group: list[Line]) -> Line | None:
    """The rule that the planner has to beat: least tensor x pipeline that fits, then the largest micro-batch."""
    fits = [line for line in group if line.fits]
    return min(fits, default=None, key=lambda line: (
        line.run.layout.tensor * line.run.layout.pipeline, -line.run.layout.micro_batch))  # fmt: skip


def choices(found: list[Line], choose: Callable[[list[Line]], Line | None]) -> dict[str, float]:
    """What a choice costs: the time of what was chosen over the best time of its group, minus one; `failed`: of all
    groups, those whose choice did not run."""
    regrets, failed, of = [], 0, groups(found)
    for group in of:
        best = min(line.run.seconds for line in group if line.run.seconds)
        chosen = choose(group)
        if chosen is None or not chosen.run.seconds:
            failed += 1
        else:
            regrets.append(chosen.run.seconds / best - 1)
    return {"groups": len(of), "regret": mean(regrets), "regret_p90": percentile(regrets, 0.9),
            "failed": failed / len(of) if of else float("nan")}  # fmt: skip


def tau(found: list[Line]) -> float:
    """Kendall's tau of the times in all groups, each pair counted once."""
    pairs = agree = 0.0
    for group in groups(found):
        ran = [line for line in group if line.run.seconds]
        number = len(ran) * (len(ran) - 1) / 2
        agree += number * kendall([line.seconds for line in ran], [line.run.seconds or 0.0 for line in ran])
        pairs += number
    return agree / pairs if pairs else float("nan")


def out_of_memory(found: list[Line]) -> dict[str, float]:
    """How often "does not fit", with the default reserve, is right where it is said (precision), and said where it is
    true (recall)."""
    known = [line for line in found if not line.run.crashed and not line.run.assumed]
    refused = [line for line in known if not line.recommended]
    true = [line for line in known if line.run.out_of_memory]
    right = [line for line in refused if line.run.out_of_memory]
    return {
        "runs": len(known), "predicted": len(refused), "true": len(true),
        "precision": len(right) / len(refused) if refused else float("nan"),
        "recall": len(right) / len(true) if true else float("nan"),
    }  # fmt: skip


def share(values: list[bool | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def over_sources(found: list[Line], middle: Callable[[list[float]], float]) -> float:
    """Mean over sources of the middle of the sizes of their errors of the time, of runs in scope."""
    sizes = defaultdict(list)
    for line in found:
        if line.in_scope and line.time_error is not None:
            sizes[line.run.source].append(abs(line.time_error))
    return mean([middle(own) for own in sizes.values()])


def scores(found: list[Line]) -> dict:
    """Everything the scoreboard says, as numbers. Means over sources give each source one voice."""
    by_source: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(line.run.source for line in found):
        own = [line for line in found if line.run.source == source]
        by_source[source] = {
            "time": summary([line.time_error for line in own if line.time_error is not None]),
            "fitted": summary([line.fitted_error for line in own if line.fitted_error is not None]),
            "memory": summary([line.memory_error for line in own if line.memory_error is not None]),
            "inside": share([line.inside for line in own]),
        }
    timed = [kinds for kinds in by_source.values() if kinds["time"]["runs"]]
    kept = [kinds for kinds in by_source.values() if kinds["memory"]["runs"]]
    return {
        "sources": by_source,
        "time": mean([kinds["time"]["mean"] for kinds in timed]),
        "median": mean([kinds["time"]["median"] for kinds in timed]),
        "fitted": mean([kinds["fitted"]["mean"] for kinds in timed]),
        "time_in_scope": over_sources(found, mean),
        "memory": mean([kinds["memory"]["mean"] for kinds in kept]),
        "memory_bias": mean([kinds["memory"]["bias"] for kinds in kept]),
        "inside": share([line.inside for line in found]),
        "inside_in_scope": share([line.inside for line in found if line.in_scope]),
        "memory_inside": share([line.memory_inside for line in found]),
        "in_scope": share([line.in_scope for line in found]),
        "tau": tau(found),
        "choice": choices(found, first),
        "fastest": choices(found, fastest),
        "simplest": choices(found, simplest),
        "out_of_memory": out_of_memory(found),
    }


def text(found: dict, listed: list[Line] | None = None) -> str:
    """The scoreboard for a terminal."""

    def row(s):
        if not s["runs"]:
            return f"{'-':>5} {'-':>6} {'-':>6} {'-':>6}"
        return f"{s['runs']:5} {s['mean']:6.1%} {s['median']:6.1%} {s['bias']:+6.1%}"

    out = ["Each source predicted with constants fitted on the half of the sources that it is not in (out), and on the",
           "half that it is in (fitted).", "",
           f"{'':36} {'step time, out':>27} {'fitted':>7} {'inside':>7}   {'memory':>27}",
           f"{'source':36} {'runs':>5} {'mean':>6} {'median':>6} {'bias':>6} {'mean':>8} {'':7}   {'runs':>5} "
           f"{'mean':>6} {'median':>6} {'bias':>6}"]  # fmt: skip
    for source, kinds in found["sources"].items():
        fitted = (
            f"{kinds['fitted']['mean']:7.1%} {kinds['inside']:7.0%}" if kinds["time"]["runs"] else f"{'-':>7}{'':8}"
        )
        out.append(f"{source[:36]:36} {row(kinds['time'])} {fitted}   {row(kinds['memory'])}")
    oom, ours, fast, rule = (found[name] for name in ("out_of_memory", "choice", "fastest", "simplest"))
    out += [
        f"{'mean over sources':36} {'':5} {found['time']:6.1%} {found['median']:6.1%} {'':6} {found['fitted']:8.1%} "
        f"{found['inside']:7.0%}   {'':5} {found['memory']:6.1%} {'':6} {found['memory_bias']:+6.1%}",
        "",
        f"in scope: {found['in_scope']:.0%} of the runs, whose time is off by {found['time_in_scope']:.1%} in the mean "
        f"over sources; the stated 90% interval holds {found['inside_in_scope']:.0%} of them, and of all "
        f"{found['inside']:.0%}; that of the memory {found['memory_inside']:.0%}",
        f"order of the layouts of a group: Kendall's tau {found['tau']:.2f}",
        f"first choice, {ours['groups']} groups: {ours['regret']:.1%} slower than the best measured layout in the mean,"
        f" {ours['regret_p90']:.1%} at the 90th percentile; did not run: {ours['failed']:.0%}",
        f"what is predicted to be fastest: {fast['regret']:.1%}, {fast['regret_p90']:.1%}; did not run: "
        f"{fast['failed']:.0%}",
        f"least tensor x pipeline that fits, largest micro-batch: {rule['regret']:.1%}, {rule['regret_p90']:.1%}; did "
        f"not run: {rule['failed']:.0%}",
        f"out of memory, with the default reserve: of {oom['runs']} runs {oom['true']} were, {oom['predicted']} "
        f"are said to be: precision {oom['precision']:.0%}, recall {oom['recall']:.0%}",
    ]
    for line in listed or []:
        run = line.run
        time = (
            f"{line.seconds:9.2f} s, {run.seconds:9.2f} measured, {line.time_error:+6.1%}"
            if run.seconds
            else (f"did not run; predicted to {'fit' if line.fits else 'not fit'}")
        )
        gib = f"{line.gib:7.1f} GiB, {run.gib:6.1f} measured, {line.memory_error:+6.1%}" if run.gib else ""
        out.append(f"{run.source[:20]:20} {run.name[:88]:88} {time}   {gib}")
    return "\n".join(out)


def middle(pairs: list[tuple[str, float]], at: float) -> float:
    """The quantile of values of several sources, each of which has one voice however many values it has."""
    number: defaultdict[str, int] = defaultdict(int)
    for source, _ in pairs:
        number[source] += 1
    ordered = sorted((value, 1 / number[source]) for source, value in pairs)
    below = 0.0
    for value, weight in ordered:
        below += weight
        if below >= at * len(number):
            return value
    return ordered[-1][0]


def intervals(found: list[Line], constants: Constants) -> Constants:
    """Constants with intervals that hold 90% of what was measured, of sources that the fit had not seen, each of which
    has one voice: for the time a factor and its inverse, in scope, since nobody knows on which side of its prediction
    the next source is; for the memory from the 5th to the 95th percentile."""
    times = [(line.run.source, abs(math.log(line.run.seconds / line.seconds))) for line in found
             if line.run.seconds and line.in_scope]  # fmt: skip
    sizes = [(line.run.source, line.run.gib / line.gib) for line in found if line.run.gib and line.in_scope]
    wide = math.exp(middle(times, 0.9))
    constants = replace(
        constants, step_low=1 / wide, step_high=wide, error=over_sources(found, median),
        source="fitted on all sources of planner/published",
    )  # fmt: skip
    if not sizes:
        return constants
    return replace(
        constants, allocator_low=constants.allocator * min(1.0, middle(sizes, 0.05)),
        allocator_high=constants.allocator * max(1.0, middle(sizes, 0.95)),
    )  # fmt: skip


def refit() -> tuple[Constants, list[tuple[set[str], Constants]]]:
    """Constants fitted on all sources, and those of each half. Takes a minute or two."""
    timed = [run for run in runs() if fit.fitted_on(run)]
    halves = []
    for own in fit.halves(timed):
        halves.append((own, fit.fit([run for run in fit.some(timed) if fit.project(run.source) in own])))
    return with_intervals(fit.fit(fit.some(timed)), halves)


def with_intervals(constants: Constants, halves: list) -> tuple[Constants, list[tuple[set[str], Constants]]]:
    """The intervals of each half are those that were found on the other sources: what is printed of a source does not
    know its errors."""
    found = lines(halves=halves)
    halves = [
        (own, intervals([line for line in found if fit.project(line.run.source) in own], fitted))
        for own, fitted in halves
    ]
    return intervals(found, constants), halves
