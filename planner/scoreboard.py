"""How good the planner is: each published source predicted with constants that were fitted on all others."""

from dataclasses import dataclass, replace
from itertools import combinations

from planner import constants as constants_
from planner import fit, memory
from planner.constants import Constants
from planner.published import Run, runs

GIB = 2**30


@dataclass(frozen=True)
class Line:
    """One run: predicted over measured, minus one; None where the one or the other was not measured."""

    run: Run
    seconds: float
    gib: float
    time_error: float | None
    memory_error: float | None
    fits: bool


def predict(run: Run, constants: Constants) -> Line:
    seconds = fit.seconds(run, constants)
    needed = memory.estimate(run.model, run.layout, constants)
    gib = needed.expected / GIB
    return Line(
        run, seconds, gib, seconds / run.seconds - 1 if run.seconds else None, gib / run.gib - 1 if run.gib else None,
        needed.expected <= run.cluster.gpu.memory,
    )  # fmt: skip


def refit_all(all_runs: list[Run] | None = None) -> dict[str, Constants]:
    """Source -> constants fitted on all other sources."""
    all_runs = all_runs or runs()
    sources = dict.fromkeys(run.source for run in all_runs)
    return {source: fit.fit([run for run in all_runs if run.source != source]) for source in sources}


def leave_one_out(left_out: dict[str, Constants] | None = None) -> list[Line]:
    """Every run, predicted with the constants that were fitted without its source; by default the stored ones."""
    left_out = left_out or constants_.load_left_out()
    return [predict(run, left_out[run.source]) for run in runs()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))] if ordered else float("nan")


def summary(errors: list[float]) -> dict[str, float]:
    """Of relative errors: mean and 90th percentile of their sizes, bias, and how many."""
    sizes = [abs(error) for error in errors]
    return {"runs": len(errors), "mean": mean(sizes), "p90": percentile(sizes, 0.9), "bias": mean(errors)}


def kendall(predicted: list[float], measured: list[float]) -> float:
    """Kendall's tau-a: pairs in the same order less pairs in the opposite order, over all pairs."""
    pairs = list(combinations(range(len(predicted)), 2))
    signs = [(predicted[a] - predicted[b]) * (measured[a] - measured[b]) for a, b in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs) if pairs else float("nan")


def rankings(lines: list[Line]) -> dict[str, tuple[int, float]]:
    """By source, for its layouts of one model on as many GPUs with sequences of one length: (pairs, Kendall's tau of
    the time per token)."""
    found = {}
    for source in dict.fromkeys(line.run.source for line in lines):
        pairs, agree = 0, 0.0
        groups: dict[tuple, list[Line]] = {}
        for line in lines:
            run = line.run
            if run.source == source and run.seconds:
                key = (run.model.name, run.cluster.gpus, run.cluster.gpu.name, run.layout.sequence)
                groups.setdefault(key, []).append(line)
        for group in groups.values():
            number = len(group) * (len(group) - 1) // 2
            if number:
                tokens = [line.run.layout.batch_size * line.run.layout.sequence for line in group]
                predicted = [line.seconds / n for line, n in zip(group, tokens, strict=True)]
                measured = [(line.run.seconds or 0.0) / n for line, n in zip(group, tokens, strict=True)]
                agree += number * kendall(predicted, measured)
                pairs += number
        if pairs:
            found[source] = (pairs, agree / pairs)
    return found


def out_of_memory(lines: list[Line]) -> dict[str, float]:
    """How often "does not fit" is right where it is said (precision), and said where it is true (recall)."""
    said = [line for line in lines if not line.fits]
    true = [line for line in lines if line.run.out_of_memory]
    right = [line for line in said if line.run.out_of_memory]
    return {
        "runs": len(lines), "said": len(said), "true": len(true),
        "precision": len(right) / len(said) if said else float("nan"),
        "recall": len(right) / len(true) if true else float("nan"),
    }  # fmt: skip


def scores(lines: list[Line]) -> dict:
    """Everything the scoreboard says, as numbers."""
    sources = list(dict.fromkeys(line.run.source for line in lines))
    by_source = {}
    for source in sources:
        own = [line for line in lines if line.run.source == source]
        by_source[source] = {
            "time": summary([line.time_error for line in own if line.time_error is not None]),
            "memory": summary([line.memory_error for line in own if line.memory_error is not None]),
        }
    ranked = rankings(lines)
    pairs = sum(number for number, _ in ranked.values())
    return {
        "sources": by_source,
        "time": summary([line.time_error for line in lines if line.time_error is not None]),
        "memory": summary([line.memory_error for line in lines if line.memory_error is not None]),
        "ranking": {source: {"pairs": n, "tau": tau} for source, (n, tau) in ranked.items()},
        "tau": sum(number * tau for number, tau in ranked.values()) / pairs if pairs else float("nan"),
        "out_of_memory": out_of_memory(lines),
    }


def text(found: dict, lines: list[Line] | None = None) -> str:
    """The scoreboard for a terminal."""

    def row(s):
        if not s["runs"]:
            return f"{'-':>4} {'-':>6} {'-':>6} {'-':>6}"
        return f"{s['runs']:4} {s['mean']:6.1%} {s['p90']:6.1%} {s['bias']:+6.1%}"

    out = ["Each source predicted with constants fitted on the other sources.", "",
           f"{'':22} {'step time':>26}   {'memory':>26}   {'order':>11}",
           f"{'source':22} {'runs':>4} {'mean':>6} {'90th':>6} {'bias':>6}   {'runs':>4} {'mean':>6} {'90th':>6} "
           f"{'bias':>6}   {'pairs':>5} {'tau':>5}"]  # fmt: skip
    for source, kinds in found["sources"].items():
        ranked = found["ranking"].get(source)
        order = f"{ranked['pairs']:5} {ranked['tau']:5.2f}" if ranked else f"{'-':>5} {'-':>5}"
        out.append(f"{source:22} {row(kinds['time'])}   {row(kinds['memory'])}   {order}")
    out.append(f"{'all':22} {row(found['time'])}   {row(found['memory'])}   {'':5} {found['tau']:5.2f}")
    oom = found["out_of_memory"]
    out += ["", f"out of memory: of {oom['runs']} runs {oom['true']} were, {oom['said']} are said to be: precision "
            f"{oom['precision']:.0%}, recall {oom['recall']:.0%}"]  # fmt: skip
    for line in lines or []:
        run = line.run
        time = (
            f"{line.seconds:9.2f} s, {run.seconds:9.2f} measured, {line.time_error:+6.1%}"
            if run.seconds
            else (f"out of memory; predicted to {'fit' if line.fits else 'not fit'}")
        )
        gib = f"{line.gib:7.1f} GiB, {run.gib:6.1f} measured, {line.memory_error:+6.1%}" if run.gib else ""
        out.append(f"{run.source:20} {run.name[:88]:88} {time}   {gib}")
    return "\n".join(out)


def refit() -> tuple[Constants, dict[str, Constants]]:
    """Constants fitted on all sources, with intervals as wide as 90% of the errors on sources left out; and those of
    each source left out. Takes minutes."""
    left_out = refit_all()
    found = scores(leave_one_out(left_out))
    spread, wide = found["time"]["p90"], found["memory"]["p90"]
    fitted = fit.fit(runs())
    fitted = replace(
        fitted, step_low=1 / (1 + spread), step_high=1 + spread, allocator_low=fitted.allocator / (1 + wide),
        allocator_high=fitted.allocator * (1 + wide), source="fitted on all sources of planner/published",
    )  # fmt: skip
    return fitted, left_out
