"""Estimates as text for a terminal."""

from common.constants import GIB
from planner.estimate import Estimate
from planner.explain import lines


def seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def explain(found: Estimate) -> str:
    return "\n".join(lines(found))


def heading(found: Estimate) -> str:
    model, layout, cluster = found.model, found.layout, found.cluster
    return (
        f"{model.name}: {model.parameters / 1e9:,.2f} billion parameters; {cluster.gpus} x {cluster.gpu.name} "
        f"({cluster.gpu.memory / GIB:.1f} GiB); {layout.batch_size} sequences of {layout.sequence:,} tokens a step; "
        f"{layout.precision}"
    )


def one_layout(found: Estimate) -> str:
    """An estimate in a few lines."""
    step, memory = found.step, found.memory
    out = [
        heading(found),
        f"layout                 {found.layout.describe()}",
        f"memory per GPU         {memory.expected / GIB:.1f} GiB ({memory.low / GIB:.1f} to {memory.high / GIB:.1f}): "
        f"fits: {found.fits}",
        f"step                   {seconds(found.seconds)} ({seconds(found.seconds_low)} to "
        f"{seconds(found.seconds_high)})",
        f"tokens per second      {found.tokens_per_second:,.0f} ({found.tokens_per_second / found.cluster.gpus:,.0f} "
        "per GPU)",
        f"model FLOP/s per GPU   {found.flops_per_gpu / 1e12:,.1f} TFLOP/s, MFU {found.mfu:.1%}",
        f"bubble                 {step.bubble:.1%}",
        f"exposed messages       {seconds(step.exposed)}",
        f"bound by               {found.binding}",
    ]
    out += [f"sent along {axis:11} {size / 1e9:,.2f} GB per GPU and step" for axis, size in step.links.items()]
    return "\n".join([*out, *(f"note: {note}" for note in found.as_dict()["notes"])])


WITH_CARE = "with care: out of scope, or with less memory to spare than is recommended"  # above what isn't trusted


def table(chosen: list) -> str:
    """The layouts of a plan, a line for each, and under it the nearest one that lost. What can't be trusted as the
    others comes last, below a line that says so."""
    head = f"{'':3}{'step':>9} {'tokens/s':>12} {'MFU':>6} {'bubble':>7} {'memory':>10} {'fits':>5}  layout"
    out = [heading(chosen[0].estimate), "", head]
    trusted = sum(choice.estimate.trusted for choice in chosen)
    for number, choice in enumerate(chosen, 1):
        one = choice.estimate
        if number == trusted + 1:
            out += ["", WITH_CARE]
        out += [
            f"{number:2} {seconds(one.seconds):>9} {one.tokens_per_second:12,.0f} {one.mfu:6.1%} "
            f"{one.step.bubble:7.1%} {one.memory.expected / GIB:6.1f} GiB {one.fits:>5}  {one.layout.describe()}",
            f"   {'':9} bound by {one.binding}; nearest other: {choice.loser}",
            *([f"   {'':9} {choice.why}"] if choice.why else []),
            *(f"   {'':9} {warning}" for warning in one.warnings),
        ]
    best = chosen[0].estimate
    out.append("")
    out += [
        f"layout 1 sends {size / 1e9:,.2f} GB per GPU and step along {axis}" for axis, size in best.step.links.items()
    ]
    return "\n".join([*out, *(f"note: {note}" for note in best.layout.notes)])
