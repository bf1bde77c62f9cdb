"""Names that were typed: found in a table, or refused in one line with the nearest that there is."""

from typing import TypeVar

from common.did_you_mean import did_you_mean
from common.errors import UserError

Entry = TypeVar("Entry")


def lookup(name: str, table: dict[str, Entry], what: str, aliases: dict[str, str] | None = None) -> Entry:
    """table[name], also by an alias. Raises UserError with the nearest name."""
    aliases = aliases or {}
    if name in table or name in aliases:
        return table[aliases.get(name, name)]
    advice = did_you_mean(name, [*table, *aliases], cutoff=0.4)
    if not advice or len(table) < 10:  # a long list would hide the hint
        advice = f"{advice} there are {', '.join(table)}".strip()
    raise UserError(f"unknown {what} '{name}'; {advice}")
