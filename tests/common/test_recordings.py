"""Recordings of GPU runs: every file has a source, and intervals obey their laws."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.lab import recordings

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def moments(spans) -> set[int]:
    """The unit intervals that the spans cover: an oracle that knows nothing of sorting."""
    return {moment for start, end in spans for moment in range(start, end)}


def event(kind):
    return lambda span: ("stream 0", kind, *span)


# --- Properties -------------------------------------------------------------------------------------------------------


@given(SPANS, SPANS)
def test_intervals_are_sets_of_moments(first, second):
    assert recordings.length(first) == len(moments(first))
    assert moments(recordings.merged(first)) == moments(first)
    assert moments(recordings.shared(first, second)) == moments(first) & moments(second)
    assert recordings.shared(first, second) == recordings.shared(second, first)


@given(SPANS, st.integers(1, 5))
def test_merged_intervals_are_disjoint_and_far_enough_apart(spans, gap):
    joined = recordings.merged(spans, gap)
    assert all(later[0] - earlier[1] > gap for earlier, later in zip(joined, joined[1:], strict=False))
    assert moments(joined) >= moments(spans)


@given(SPANS, SPANS, SPANS)
def test_the_hidden_share_counts_moments(ours, theirs, others):
    events = [*map(event("a"), ours), *map(event("b"), theirs), *map(event("c"), others)]
    if not moments(ours):
        return
    share = len(moments(ours) & moments(theirs)) / len(moments(ours))
    assert recordings.hidden(events, "a", under="b") == pytest.approx(share)
    both = len(moments(ours) & (moments(theirs) | moments(others))) / len(moments(ours))
    assert recordings.hidden(events, "a") == recordings.hidden(events, "a", under=["b", "c"]) == pytest.approx(both)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(1, 9)), min_size=1), st.integers(0, 60)
)
def test_events_of_two_stretches_make_up_the_whole(rows, cut):
    table = [{"kind": k, "stream": 7, "start_us": start, "duration_us": lasts} for k, start, lasts in rows]
    whole = recordings.totals(recordings.events(table))
    parts = [recordings.totals(recordings.events(table, between=ends)) for ends in [(0, cut), (cut, 100)]]
    for name, (count, seconds) in whole.items():
        assert count == sum(row[0] == name for row in rows)
        assert seconds == pytest.approx(sum(part.get(name, (0, 0))[1] for part in parts))


# --- The files --------------------------------------------------------------------------------------------------------


def test_every_file_has_a_source_and_every_source_a_file():
    files = {path.stem for path in recordings.RECORDINGS.glob("*.csv")} - {"sources"}
    assert files == set(recordings.sources())
    for name, source in recordings.sources().items():
        assert all(source.values()), f"{name}: a column of sources.csv is empty"


@pytest.mark.parametrize("name", recordings.sources())
def test_every_recording_can_be_read(name):
    rows = recordings.read(name)
    with open(recordings.RECORDINGS / f"{name}.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(rows) == len(lines)
    for column in lines[0]:
        texts = [line[column] for line in lines if line[column]]
        whole = all(text.lstrip("-").isdigit() for text in texts)
        values = {type(row[column]) for row in rows} - {type(None)}
        assert len(values) <= 1 and values <= ({int} if whole else {float, str}), f"{column} holds {values}"
        assert [row[column] is None for row in rows] == [line[column] == "" for line in lines]


def test_a_wrong_name_is_one_line_that_names_the_right_ones():
    with pytest.raises(UserError, match="trace_naive_ddp_2xv100") as raised:
        recordings.read("../sources")
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="compute"):
        recordings.hidden([("stream 7", "compute", 0.0, 1.0)], "all_reduce")
    with pytest.raises(UserError, match="3 rows"):
        recordings.stretch(recordings.read("trace_ddp_resnet50_2xa100"), "forward", 3)
