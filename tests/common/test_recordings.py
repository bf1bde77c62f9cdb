"""Recordings of GPU runs: every file has a source, intervals obey their laws, and the traces say what pages claim."""

import csv
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.lab import recordings
from common.lab.plotting import timeline

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
        values = {type(row[column]) for row in rows} - {type(None)}
        assert len(values) <= 1, f"{column} holds {values}"
        assert [row[column] is None for row in rows] == [line[column] == "" for line in lines]


def test_a_wrong_name_is_one_line_that_names_the_right_ones():
    with pytest.raises(UserError, match="trace_naive_ddp_2xv100") as raised:
        recordings.read("../sources")
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="compute"):
        recordings.hidden([("stream 7", "compute", 0.0, 1.0)], "all_reduce")
    with pytest.raises(UserError, match="3 rows"):
        recordings.stretch(recordings.read("trace_ddp_resnet50_2xa100"), "forward", 3)


def test_a_recording_is_drawn_by_the_function_of_our_own_timelines():
    rows = recordings.read("trace_ddp_resnet50_2xa100")
    step = recordings.events(rows, between=recordings.stretch(rows, "ProfilerStep#5"), join_us=50)
    axes = timeline(step).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stream 7", "stream 40"]


# --- What the traces show ---------------------------------------------------------------------------------------------


def test_naive_ddp_hides_nothing():
    events = recordings.events(recordings.read("trace_naive_ddp_2xv100"))
    spans = recordings.spans(events, "all_reduce")
    assert len(spans) == 404 and recordings.hidden(events, "all_reduce") == 0
    assert spans[-1][1] - spans[0][0] == pytest.approx(130.8e-3, abs=0.05e-3)
    assert recordings.length(spans) == pytest.approx(59.5e-3, abs=0.05e-3)
    assert median(end - start for start, end in spans) == pytest.approx(8e-6)
    assert max(end - start for start, end in spans) == pytest.approx(4.96e-3, abs=0.01e-3)


def test_ddp_of_a_resnet50_has_five_buckets_and_the_last_layer_leaves_first():
    rows = recordings.read("trace_ddp_resnet50_2xa100")
    sizes = [row["elements"] for row in rows if row.get("collective") == "allreduce"]
    assert sizes[:5] == sizes[5:10] == sizes[10:]
    assert sum(sizes[:5]) == 25_557_032, "the parameters of a ResNet-50"
    assert sizes[0] == 2048 * 1000 + 1000, "the matrix and the bias of its last layer"


def test_the_last_bucket_is_exposed():
    events = recordings.events(recordings.read("trace_ddp_actckpt_resnet18_8xmi300x"))
    for number, hides in [(0, 4.0e-3), (1, 0.01e-3)]:
        bucket = recordings.spans(events, "allreduce")[-2:][number]
        compute = recordings.spans(events, "forward", "recompute", "backward", "optimizer", "other", "compute")
        assert recordings.length(recordings.shared([bucket], compute)) == pytest.approx(hides, abs=0.06e-3)
    phases = {name: round(seconds * 1e3, 1) for name, (_, seconds) in recordings.totals(events).items()}
    assert (phases["forward"], phases["recompute"], phases["backward"]) == (6.4, 4.2, 10.4)


def test_tensor_parallelism_on_one_stream_exposes_every_all_reduce():
    events = recordings.events(recordings.read("trace_tp_gptoss120b_prefill_8xb200"))
    count, seconds = recordings.totals(events)["all_reduce"]
    assert count == 36 * 2 + 1 and seconds == pytest.approx(2.12e-3, abs=0.005e-3)
    assert recordings.hidden(events, "all_reduce") == 0
    busy = sum(end - start for start, end in recordings.spans(events))
    assert seconds / busy == pytest.approx(0.18, abs=0.005)


def test_dualpipe_hides_nearly_all_of_dispatch_and_combine():
    def kind(row):
        if row["where"] == "cpu":
            return None
        return "transfer" if row["kind"] in ("ep_dispatch", "ep_combine") else str(row["stream"])

    events = recordings.events(recordings.read("trace_moe_dualpipe_deepseekv3_ep64_h800"), kind=kind)
    assert recordings.totals(events)["transfer"][1] == pytest.approx(80.5e-3, abs=0.05e-3)
    assert recordings.hidden(events, "transfer", under=["7", "23"]) == pytest.approx(0.963, abs=0.001)


def test_a_collective_ends_on_all_ranks_together_and_starts_on_none():
    rows = recordings.read("trace_alltoall_dlrm_8xv100_all_ranks")
    lanes = {f"rank {rank}, stream 84": rank for rank in range(8)}
    events = recordings.events([row for row in rows if row["kind"] == "comm"])
    by_rank = [[span[2:] for span in events if lanes[span[0]] == rank] for rank in range(8)]
    assert {len(spans) for spans in by_rank} == {8}
    for collective in zip(*by_rank, strict=True):
        ends = [end for _, end in collective]
        assert max(ends) - min(ends) < 8e-6
    lasts = [end - start for start, end in next(zip(*by_rank, strict=True))]
    assert min(lasts) == pytest.approx(10e-6, abs=1e-6) and max(lasts) == pytest.approx(7635e-6, abs=1e-6)


def test_fsdp_gathers_every_layer_twice_but_the_last():
    rows = [row for row in recordings.read("trace_fsdp_llama70b_8xmi300x") if row["scope"] == "all ranks"]
    layer = 106_956_800  # numbers of one layer on each of 8 ranks
    counts = {row["collective"]: row["count"] for row in rows if row["in_elements"] in (layer, 8 * layer)}
    assert counts["allgather_base"] == 2 * (80 + 79) and counts["reduce_scatter_base"] == 2 * 80


def test_an_absent_rank_is_seen_by_what_it_enqueued():
    rows = [row for row in recordings.read("nccl_watchdog_timeouts") if row["incident"] == "A"]
    behind = {row["rank"] for row in rows if row["last_enqueued"] == min(row["last_enqueued"] for row in rows)}
    assert behind == {0, 4}, "the ranks that never joined, and did not complain"
