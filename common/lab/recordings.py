"""Recordings of real GPU runs (common/recordings/*.csv), read so that they stand beside our own measurements.

Each file is a table of facts from a public trace, memory snapshot or log; `sources()` says from where, at which commit
and under which licence. A page reads one, turns a stretch of it into events, and draws them like its own:

    rows = recordings.read("trace_ddp_resnet50_2xa100")
    step = recordings.events(rows, between=recordings.stretch(rows, "ProfilerStep#5"), join_us=50)
    show(timeline(step), alt=...)
    recordings.hidden(step, "allreduce", under="compute")  # the share of the all-reduces behind which the GPU computes

The duration of a NCCL or RCCL kernel is waiting for the slowest rank plus the transfer. A table of one rank cannot
separate the two; a table of all ranks can (`trace_alltoall_dlrm_8xv100_all_ranks`, `trace_fsdp_llama70b_8xmi300x`).
"""

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import UserError

RECORDINGS = Path(__file__).parents[1] / "recordings"

Cell = int | float | str | None
Row = dict[str, Cell]
Span = tuple[float, float]  # start, end
Event = tuple[str, str, float, float]  # lane, kind, start, end: what `common.lab.plotting.timeline` draws


def sources() -> dict[str, dict[str, str]]:
    """Name of each recording -> where it is from: address, commit, licence, what it shows, what its columns mean."""
    with open(RECORDINGS / "sources.csv", newline="", encoding="utf-8") as file:
        return {row["file"].removesuffix(".csv"): row for row in csv.DictReader(file)}


def read(name: str) -> list[Row]:
    """The rows of a recording, in the file's order, as column -> value.

    A column in which every value is a number holds numbers (int where all are whole, else float), every other one
    strings; an empty cell is None. Raises UserError for a name that is not in `sources()`.
    """
    path = RECORDINGS / f"{name}.csv"
    if name not in sources() or not path.is_file():
        raise UserError(f"there is no recording {name!r}; there are: {', '.join(sorted(sources()))}")
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        lines = list(reader)
    converters = {column: _converter([line[column] for line in lines if line[column]]) for column in columns}
    return [
        {column: converters[column](line[column]) if line[column] else None for column in columns} for line in lines
    ]


def _converter(texts: list[str]) -> Callable[[str], Cell]:
    """What turns every text of a column into a value: int, float, or str where neither can."""
    for converter in (int, float):
        try:
            for text in texts:
                converter(text)
        except ValueError:
            continue
        return converter
    return str


# --- Events of a profiler's table -------------------------------------------------------------------------------------


def kind(row: Row) -> str:
    """What a row of a profiler's table is, in one word: host, or its kind, else its collective, its phase, compute."""
    if row.get("where") == "cpu":
        return "host"
    return str(row.get("kind") or row.get("collective") or row.get("phase") or "compute")


def lane(row: Row) -> str:
    """The line of a timeline on which a row belongs: its stream, with its rank where the table holds several."""
    names = [f"{column} {row[column]}" for column in ("rank", "stream") if row.get(column) is not None]
    return ", ".join(names) or ("host" if row.get("where") == "cpu" else "GPU")


def stretch(rows: Iterable[Row], name: str, occurrence: int = 0) -> Span:
    """Start and end in microseconds of the row called `name` (the n-th such row), to hand to `events(between=)`."""
    found = [row for row in rows if row["name"] == name]
    if not -len(found) <= occurrence < len(found):
        raise UserError(f"the recording has {len(found)} rows called {name!r}; number {occurrence} was asked for")
    return _span(found[occurrence])


def events(
    rows: Iterable[Row],
    between: Span | None = None,
    kind: Callable[[Row], str | None] = kind,
    lane: Callable[[Row], str] = lane,
    join_us: float = 0.0,
) -> list[Event]:
    """Rows of a profiler's table as events (lane, kind, start, end) in seconds, sorted by lane and start.

    between: from and to, in microseconds; what begins earlier or ends later is cut off there. Without it: all rows.
    kind:    function from a row to the name under which it is drawn and counted; rows for which it returns None, and
             by default the host's rows, are left out
    lane:    function from a row to the line on which it is drawn
    join_us: two events of one kind on one lane with a gap of at most so many microseconds become one. Thousands of
             kernels can't be seen one by one; leave it 0 for counting, and for any sum of times.
    """
    found: dict[tuple[str, str], list[Span]] = {}
    for row in rows:
        start, end = _span(row)
        if between:
            start, end = max(start, between[0]), min(end, between[1])
        name = kind(row)
        if end > start and name is not None and name != "host":
            found.setdefault((lane(row), name), []).append((start, end))
    if join_us:
        found = {key: merged(spans, join_us) for key, spans in found.items()}
    named = [(*key, start / 1e6, end / 1e6) for key, spans in found.items() for start, end in spans]
    return sorted(named, key=lambda event: (_natural(event[0]), *event[2:]))


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which "stream 7" comes before "stream 40"."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", text)]


def _span(row: Row) -> Span:
    """Start and end of a row in microseconds."""
    start, duration = row["start_us"], row["duration_us"]
    if not isinstance(start, int | float) or not isinstance(duration, int | float):
        raise UserError(f"a row without a start and a duration is no event: {row}")
    return start, start + duration


# --- Arithmetic of intervals ------------------------------------------------------------------------------------------


def merged(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """The same stretches of time as disjoint intervals in order; gaps of at most `gap` are filled."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1] + gap:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def shared(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """The stretches of time that are both in `first` and in `second`, as disjoint intervals in order."""
    result, ours, theirs = [], merged(first), merged(second)
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < end:
            result.append((start, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(spans: Iterable[Span]) -> float:
    """How much time the intervals cover; what lies in two of them counts once."""
    return sum(end - start for start, end in merged(spans))


def spans(events: Iterable[Event], *kinds: str) -> list[Span]:
    """Start and end of the events of these kinds (of all, where none is named), for the functions above."""
    return [(start, end) for _, name, start, end in events if not kinds or name in kinds]


def totals(events: Iterable[Event]) -> dict[str, tuple[int, float]]:
    """For each kind: how many events there are, and the seconds that they cover on all lanes together.

    Two events at the same moment count once, so that the seconds of a kind can't exceed the time that has passed.
    """
    events = list(events)
    kinds = dict.fromkeys(name for _, name, _, _ in events)
    return {name: (len(spans(events, name)), length(spans(events, name))) for name in kinds}


def hidden(events: Iterable[Event], kind: str, under: str | Iterable[str] | None = None) -> float:
    """The share (0 to 1) of the time of one kind of event during which another kind is under way: 1 - exposed.

    events: of one rank; what runs on another rank hides nothing
    under:  the kind or kinds that hide; by default every other one

    Raises UserError where no event is of this kind: a share of nothing would be any number.
    """
    events = list(events)
    ours = spans(events, kind)
    if not ours:
        raise UserError(
            f"no event of kind {kind!r}; there are: {', '.join(sorted({name for _, name, _, _ in events}))}"
        )
    if under is None:
        names = {name for _, name, _, _ in events} - {kind}
    else:
        names = {under} if isinstance(under, str) else set(under)
    others = [(start, end) for _, name, start, end in events if name in names]
    return length(shared(ours, others)) / length(ours)
