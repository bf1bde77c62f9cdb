"""What docs/nets.md says of docs/nets.csv: counts, and a picture. Called by tools/nets.py; needs no type checker."""

import csv
import importlib.util
import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

from common import ROOT
from common.lab.plotting import BLUE, png

FILE, PAGE, PICTURE = (ROOT / "docs" / name for name in ("nets.csv", "nets.md", "nets.png"))
NETS = {
    "types": "types",
    "proof": "proof",
    "collectives": "check-collectives",
    "ledger": "ledger",
    "copies": "copies",
    "norms": "norms",
}
KEY = ("chapter", "mistake", "kind")
GUARDS = ("collectives", "ledger", "copies", "norms")
SEEN_BY_ALL = ("hangs", "timeout", "a rank fails", "error")  # what the proof says where no numbers come
BEGIN, END = "<!-- nets: python -m tools.nets --page -->", "<!-- end of nets -->"


def read(file: Path = FILE) -> list[dict[str, str]]:
    """The rows; "planted" and "incident" are mistakes, "right" are not."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def put(row: dict[str, str], file: Path = FILE) -> None:
    """Put a row in the place of the one with its name, or at the end. Where there is no type checker, what it said
    before stays."""
    rows = read(file) if file.exists() else []
    place = next((n for n, old in enumerate(rows) if all(old[key] == row[key] for key in KEY)), len(rows))
    if place < len(rows) and importlib.util.find_spec("spmd_types") is None:
        row |= {key: rows[place][key] for key in ("types", "types_seconds")}
    rows[place : place + 1] = [row]
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def caught(row: dict[str, str], *nets: str) -> bool:
    """A planted mistake that ends in an error on one process is not a finding of types."""
    return any(row[net] not in ("", "-") and not (net == "types" and row[net].startswith("error")) for net in nets)


def summary(rows: list[dict[str, str]]) -> str:
    """Markdown: by chapter, how many mistakes each net catches of those that it can look at; false alarms below."""
    mistakes, right = ([r for r in rows if (r["kind"] == "right") == is_right] for is_right in (False, True))
    lines = [f"| | {' | '.join(NETS.values())} | any guard | any net | of |", "| --- |" + " ---: |" * (len(NETS) + 3)]
    for chapter in [*dict.fromkeys(row["chapter"] for row in mistakes), "all"]:
        here = [row for row in mistakes if chapter in (row["chapter"], "all")]
        cells = []
        for net in NETS:
            looks = sum(row[net] != "-" for row in here)
            cells.append(f"{sum(caught(row, net) for row in here)} of {looks}" if looks else "-")
        some = sum(caught(row, *GUARDS) for row in here), sum(caught(row, *NETS) for row in here)
        lines.append(f"| {chapter} | {' | '.join(cells)} | {some[0]} | {some[1]} | {len(here)} |")
    alarms = [f"{sum(caught(row, net) for row in right)} of {sum(row[net] != '-' for row in right)}" for net in NETS]
    some = sum(caught(row, *GUARDS) for row in right), sum(caught(row, *NETS) for row in right)
    lines.append(f"| *false alarms* | {' | '.join(alarms)} | {some[0]} | {some[1]} | {len(right)} |")
    missed = [f"{r['mistake']} ({r['chapter']})" for r in mistakes if not caught(r, *NETS)]
    only = {net: [r["mistake"] for r in mistakes if [n for n in NETS if caught(r, n)] == [net]] for net in NETS}
    lines += ["", f"Caught by no net: {', '.join(missed) or 'none'}.", ""]
    shown = "; ".join(f"{NETS[net]} {len(names)}" for net, names in only.items() if names)
    ends = [r["mistake"] for r in mistakes if r["proof"] in SEEN_BY_ALL]
    alone = len(only["proof"]), sum(name in ends for name in only["proof"])
    lines += [f"Caught by one net alone: {shown}.", ""]
    lines += [
        f"Of the {sum(caught(r, 'proof') for r in mistakes)} that the proof catches, {len(ends)} hang or end in an "
        f"error and need no proof. Without these it alone catches {alone[0] - alone[1]} of {len(mistakes)}, "
        f"{(alone[0] - alone[1]) / len(mistakes):.0%}.",
        "",
    ]
    seconds = [float(r["types_seconds"]) for r in rows if r["types"] != "-"]
    runs = [float(r["run_seconds"]) for r in rows if float(r["run_seconds"])]
    lines.append(
        f"Processor time: types {sum(seconds) / max(1, len(seconds)):.2f} s for a class, before a rank starts; a run "
        f"of two steps under the guards {sum(runs) / max(1, len(runs)):.2f} s, all ranks together."
    )
    return "\n".join(lines)


def draw(rows: list[dict[str, str]]) -> None:
    chapters = [*dict.fromkeys(row["chapter"] for row in rows)]
    mistakes = sorted((r for r in rows if r["kind"] != "right"), key=lambda row: chapters.index(row["chapter"]))
    grid = [[2 if row[net] == "-" else int(caught(row, net)) for row in mistakes] for net in NETS]
    fig, ax = plt.subplots(figsize=(10.5, 3.2))
    ax.imshow(
        grid, aspect="auto", cmap=ListedColormap(["white", BLUE, "#e3e3e3"]), vmin=0, vmax=2, interpolation="nearest"
    )
    ax.set_yticks(range(len(NETS)), NETS.values())
    ends = [n for n in range(1, len(mistakes)) if mistakes[n]["chapter"] != mistakes[n - 1]["chapter"]]
    for end in ends:
        ax.axvline(end - 0.5, color="black", lw=1)
    begins = [0, *ends]
    middles = [(a + b - 1) / 2 for a, b in zip(begins, [*ends, len(mistakes)], strict=True)]
    ax.set_xticks(middles, [mistakes[begin]["chapter"].replace("_", "\n") for begin in begins], fontsize=10)
    for place, net in enumerate(NETS):
        ax.text(len(mistakes), place, f" {sum(caught(r, net) for r in mistakes)}", va="center")
    ax.tick_params(length=0)
    ax.set_title(
        f"{len(mistakes)} mistakes, a column each, in the order of nets.csv. "
        "Blue: caught. White: let through. Grey: the net cannot look",
        fontsize=11,
    )
    for line in range(1, len(NETS)):
        ax.axhline(line - 0.5, color="#bbbbbb", lw=0.8)
    PICTURE.write_bytes(png(fig, dpi=110))


def page(rows: list[dict[str, str]]) -> str:
    """docs/nets.md with the summary between its marks."""
    text = PAGE.read_text()
    return re.sub(f"(?s){BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{summary(rows)}\n\n{END}", text)


def write() -> None:
    rows = read()
    PAGE.write_text(page(rows))
    draw(rows)
