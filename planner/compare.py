"""GPUs compared for one job, by time, money and energy: `python -m planner plan` without --gpu.

Prices are inputs: planner/prices.csv has some, each with its date and source, and --price gives others. Energy is that
of the GPUs alone at the power of their data sheets, an upper bound.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from common.constants import GIB
from common.errors import UserError
from common.gpus import rows
from planner import hardware
from planner.estimate import Estimate
from planner.names import lookup

PRICES = {row["gpu"]: (float(row["usd_per_hour"]), row["date"], row["source"]) for row in (
    rows(Path(__file__).with_name("prices.csv")))}  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A GPU's best layout, or why there is none; dollars and kilowatt-hours per 10^9 tokens, None where unknown."""

    gpu: str
    found: Estimate | None
    dollars: float | None = None
    kilowatt_hours: float | None = None
    why: str = ""


def prices(given: list[str]) -> dict[str, float]:
    """Dollars per GPU and hour: the table's, and those given as NAME=DOLLARS, which win. Raises UserError."""
    found = {name: price for name, (price, _, _) in PRICES.items()}
    for text in given:
        name, _, price = text.partition("=")
        gpu = lookup(name.lower(), hardware.GPUS, "GPU", hardware.ALIASES).name
        try:
            found[gpu] = float(price)
        except ValueError:
            raise UserError(f"--price {text}: expected NAME=DOLLARS per GPU and hour, as h100=2.5") from None
        if not 0 < found[gpu] < math.inf:
            raise UserError(f"--price {text}: must be more than 0")
    return found


def offer(gpu: hardware.GPU, found: Estimate, price: float | None) -> Offer:
    hours = found.cluster.gpus * 1e9 / found.tokens_per_second / 3600  # of a GPU, for 10^9 tokens
    return Offer(gpu.name, found, price and price * hours, gpu.watts / 1000 * hours if gpu.watts else None)


def table(offers: list[Offer], by: str = "time") -> str:
    """The offers, best first by time, money or energy; those without a number last."""
    able = [(one, one.found) for one in offers if one.found]

    def key(pair):
        one, found = pair
        value = {"time": found.seconds, "money": one.dollars, "energy": one.kilowatt_hours}[by]
        return value is None, value or found.seconds

    out = [f"{'GPU':12} {'step':>9} {'tokens/s':>12} {'$/10^9 tok':>11} {'kWh/10^9 tok':>13} {'memory':>10}  layout"]
    for one, found in sorted(able, key=key):
        money = f"{one.dollars:11,.0f}" if one.dollars is not None else f"{'no price':>11}"
        energy = f"{one.kilowatt_hours:13,.0f}" if one.kilowatt_hours is not None else f"{'-':>13}"
        mark = " (out of scope)" if found.out_of_scope else ""
        out.append(f"{one.gpu:12} {found.seconds:7.2f} s {found.tokens_per_second:12,.0f} {money} {energy} "
                   f"{found.memory.expected / GIB:6.1f} GiB  {found.layout.describe()}{mark}")  # fmt: skip
    out += [f"{one.gpu:12} {one.why}" for one in offers if not one.found]
    names = {one.gpu for one, _ in able}
    used = sorted({f"{date}: {source}" for gpu, (_, date, source) in PRICES.items() if gpu in names})
    out += [f"prices of {line}" for line in used]
    return "\n".join([*out, "energy: of the GPUs alone, at their data sheets' power"])
