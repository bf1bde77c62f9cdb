"""Names that were typed: found in a table, or refused in one line with the nearest that there is."""

import difflib
from typing import TypeVar

from common.errors import UserError

Entry = TypeVar("Entry")


def lookup(name: str, table: dict[str, Entry], what: str, aliases: dict[str, str] | None = None) -> Entry:
    """table[name], also by an alias. Raises UserError with the nearest name."""
    aliases = aliases or {}
    if name in table or name in aliases:
        return table[aliases.get(name, name)]
    near = difflib.get_close_matches(name, [*table, *aliases], n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(table)}"
    raise UserError(f"unknown {what} '{name}'; {hint}")
