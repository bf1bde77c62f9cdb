"""The simulated step of ZeRO's stage 3, and the pictures of one."""

import itertools

import matplotlib.pyplot as plt
import pytest
import torch

from common.lab import recordings
from course.fsdp.formulas import layer_bytes
from course.fsdp.memory import Peak
from course.fsdp.sharding_pictures import (
    StreamLab,
    computing,
    exposed,
    length,
    simulate,
    snapshot_bands,
    snapshot_of_step,
)


@pytest.mark.parametrize(
    "gather, reduce, ahead, seconds",
    [
        (0, 0, 0, 9),  # three units: 3 forward, 6 backward
        (1, 0, 0, 14),  # each unit waits for its own, but for the last one's second, which never left: 3 + 2
        (1, 0, 1, 10),  # hidden, but for the first
        (1, 2, 1, 13),  # and the last reduce-scatter; the first one holds up the gather behind it by 1
        (2, 0, 1, 13),  # forward ends at 7, after three gathers and a unit; backward, the gathers are just in time
    ],
)
def test_steps_worked_out_by_hand(gather, reduce, ahead, seconds):
    spans = simulate([1.0] * 3, [gather] * 3, [reduce] * 3, ahead)
    assert length(spans) == seconds
    assert exposed(spans) == seconds - 9


def test_no_unit_computes_before_it_is_gathered_and_messages_do_not_overlap():
    for ahead in (0, 1, 2):
        spans = simulate([1.0, 3.0, 1.0, 2.0], [2.0, 1.0, 5.0, 0.5], [1.0] * 4, ahead)
        sent = [span for span in spans if span not in computing(spans)]
        for first, second in zip(sent, sent[1:], strict=False):
            assert second.start >= first.end
        for span in computing(spans):
            gathers = [other for other in sent if other.kind == "gather" and other.unit == span.unit]
            assert min(other.end for other in gathers) <= span.start
        assert [span.unit for span in computing(spans)] == [0, 1, 2, 3, 3, 2, 1, 0]
        gathers = [span.unit for span in sent if span.kind == "gather"]
        assert gathers == [0, 1, 2, 3, 2, 1, 0]  # not the last one again
        assert sorted(span.unit for span in sent if span.kind == "reduce") == [0, 1, 2, 3]


def test_more_tokens_hide_messages_in_the_lab():
    lab = StreamLab()

    def waits(**values):
        fig = lab.draw(**{"tokens": 4096, "bandwidth": 50, "ahead": 1, "larger": 1} | values)
        return float(fig.axes[0].get_title(loc="left").split("idle ")[1].split(" ms")[0])

    assert waits(tokens=16384) < waits() / 4
    assert waits(bandwidth=300) < waits() / 4
    assert waits(larger=4) > waits()
    nothing, one = lab.controls["ahead"].options[:2]
    assert waits(ahead=nothing, tokens=16384) > 2 * waits(ahead=one, tokens=16384), "for each unit's own gather"
    plt.close("all")


@pytest.mark.parametrize("step", range(3))
def test_a_recorded_backward_pass_gathers_a_unit_while_the_one_after_it_is_whole(step):
    """The answer to a question of 02_fully_shard.ipynb: a unit's message is there before the one after it has computed,
    its parameters are not; and the gradients of the one after that are being reduced."""
    events = snapshot_of_step(recordings.read("trace_memory_fsdp2_debug_3steps"), step)
    last = max(start for line, unit, start, _ in events if unit == 8 and line == "whole parameters")  # of backward
    found = {(line, unit): (start, end) for line, unit, start, end in events if start >= last - 2}
    for unit in range(2, 7):
        begin, end = found["whole parameters", unit + 1]
        assert begin < found["message of a gather", unit][0] < end < found["message of a gather", unit][1]
        assert end < found["whole parameters", unit][0]
        assert found["whole gradients", unit + 2][1] > begin


def test_layers_of_the_recording_that_ran_out_of_memory_keep_what_the_formula_says():
    """In turn a layer that keeps everything and one that keeps its input: 03_fitting_in.ipynb."""
    rows = recordings.read("trace_memory_fsdp2_llama3_8b_4xa100_oom")
    for row, bands in zip(rows, snapshot_bands(rows), strict=True):
        assert sum(bands.values()) - bands["asked for"] == pytest.approx(row["allocated_bytes"], rel=2e-3)
    gathers = [row for row in rows if row["action"] == "alloc" and row["stream"] == "gather"]
    held = [row["allocated_bytes"] - row["bytes"] for row in gathers[2:]]
    added = [after - before for before, after in itertools.pairwise(held)]
    tokens = 4 * 2048
    for number, size in enumerate(added):
        expected = tokens * layer_bytes(
            4096, 4096, 4096, 14336, gated=4, recompute="full" if number % 2 == 0 else "none"
        )
        assert size == pytest.approx(expected, rel=2e-3), f"layer {number + 2}"


@pytest.mark.parametrize("how, extra", [({"foreach": True}, 1), ({"fused": True}, 0)])
def test_what_adamw_takes_during_its_step(how, extra):
    parameters = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, **how)
    for _ in range(2):  # the first step makes the moments
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with Peak() as peak:
            optimizer.step()
    assert peak.bytes == pytest.approx(extra * sum(p.nbytes for p in parameters), abs=1000)
