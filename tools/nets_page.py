"""What docs/nets.md says of docs/nets.csv: counts, and a picture. Called by tools/nets.py; needs no type checker."""

import csv
import fcntl
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
KINDS = (("planted", "incident"), ("right",), ("sought",))
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
    with Path(__file__).open() as lock:  # several commands may run beside each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        _put(row, file)


def _put(row: dict[str, str], file: Path) -> None:
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
    mistakes, right, sought = ([r for r in rows if r["kind"] in kinds] for kinds in KINDS)
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
    slip = [row["mistake"] for row in sought if not caught(row, *NETS)]
    lines += [
        f"Of {len(sought)} more, which we sought because we thought that they slip through, {len(slip)} do: "
        f"{', '.join(slip) or 'none'}.",
        "",
    ]
    lines += [f"Where they speak first: {early(mistakes)}.", ""]
    seconds = [float(r["types_seconds"]) for r in rows if r["types"] != "-"]
    runs = [float(r["run_seconds"]) for r in rows if float(r["run_seconds"])]
    lines.append(
        f"Processor time: types {sum(seconds) / max(1, len(seconds)):.2f} s for a class, before a rank starts; a run "
        f"of two steps under the guards {sum(runs) / max(1, len(runs)):.2f} s, all ranks together."
    )
    return "\n".join(lines)


COLUMNS = 4  # of the picture
EMPTY, CAUGHT, CANNOT, NOTHING = range(4)  # let through, caught, the net cannot look, no cell


def early(mistakes: list[dict[str, str]]) -> str:
    """In how many of its findings each of the nets that look at steps has found it by the end of the first step."""
    found = []
    for net in ("proof", "ledger", "copies", "norms"):
        steps = [step for row in mistakes for step in re.findall(r"(?:step (\d+)|before step (1))", row[net])[:1]]
        first = sum("1" in step for step in steps)
        found.append(f"{NETS[net]} by the end of step 1 in {first} of {len(steps)}")
    calls = [int(n) for row in mistakes for n in re.findall(r"collective (\d+)", row["collectives"])] or [0]
    return "; ".join([*found, f"{NETS['collectives']} at collective {min(calls)} to {max(calls)}"])


def draw(rows: list[dict[str, str]]) -> None:
    """Each mistake with its name and a cell for each net, chapter by chapter, in columns that a page is wide enough
    for."""
    lines: list[tuple[str, list[int]]] = []
    for chapter in dict.fromkeys(row["chapter"] for row in rows if row["kind"] in KINDS[0]):
        lines.append((chapter.replace("_", " "), []))
        for row in rows:
            if row["chapter"] == chapter and row["kind"] in KINDS[0]:
                lines.append((row["mistake"], [CANNOT if row[net] == "-" else int(caught(row, net)) for net in NETS]))
    height = -(-len(lines) // COLUMNS)
    fig, axes = plt.subplots(1, COLUMNS, figsize=(8.6, 0.9 + 0.138 * height), layout="none")
    for place, ax in enumerate(axes):
        mine = lines[place * height : (place + 1) * height]
        grid = [cells or [NOTHING] * len(NETS) for _, cells in mine]
        grid += [[NOTHING] * len(NETS)] * (height - len(mine))
        colours = ListedColormap(["white", BLUE, "#d9d9d9", "white"])
        ax.pcolormesh(grid, cmap=colours, vmin=EMPTY, vmax=NOTHING, edgecolors="#bbbbbb", lw=0.4)
        ax.invert_yaxis()
        for line, (name, cells) in enumerate(mine):
            ax.text(-0.25, line + 0.5, name, ha="right", va="center", fontsize=7, weight="normal" if cells else "bold")
            if not cells:
                ax.fill_between([0, len(NETS)], line, line + 1, color="white", zorder=2)
        ax.fill_between([-0.05, len(NETS) + 0.05], len(mine), height + 0.1, color="white", zorder=2)
        ax.xaxis.tick_top()
        names = [name.removeprefix("check-") for name in NETS.values()]
        ax.set_xticks([n + 0.5 for n in range(len(NETS))], names, rotation=90, fontsize=7)
        ax.set_yticks([])
        ax.tick_params(length=0, pad=1)
        ax.spines[:].set_visible(False)
    fig.suptitle("Blue: the net catches it. White: it lets it through. Grey: it cannot look", fontsize=9, y=0.995)
    fig.subplots_adjust(left=0.155, right=0.995, top=1 - 0.75 / fig.get_figheight(), bottom=0.005, wspace=2.25)
    PICTURE.write_bytes(png(fig, dpi=130))


def page(rows: list[dict[str, str]]) -> str:
    """docs/nets.md with the summary between its marks."""
    text = PAGE.read_text()
    return re.sub(f"(?s){BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{summary(rows)}\n\n{END}", text)


def write() -> None:
    rows = read()
    PAGE.write_text(page(rows))
    draw(rows)
