"""The simulated step of ZeRO's stage 3, and the pictures of one."""

import matplotlib.pyplot as plt
import pytest

from course.fsdp.sharding_pictures import StreamLab, computing, draw_streams, exposed, length, simulate, step_by_step


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


def test_two_units_ahead_help_where_units_are_unequal():
    forward, gather = [1.0, 4.0] * 4, [1.0, 4.0] * 4  # the large one is gathered while a small one computes
    one, two = (exposed(simulate(forward, gather, [0.0] * 8, ahead)) for ahead in (1, 2))
    assert two < one


def test_frames_follow_the_events():
    events = [("gather", 0), ("gather", 1), ("forward", 0), ("forward", 1), ("free", 1), ("gather", 1)]
    events += [("backward", 1), ("reduce", 1), ("backward", 0), ("reduced", 1), ("step", 0)]
    found = step_by_step(events, ["first", "second"], ranks=2)
    assert [caption for _, caption in found] == [
        "Forward pass of first. Meanwhile second is gathered.",
        "Forward pass of second.",
        "Backward pass of second.",
        "Backward pass of first. The gradients of second are reduce-scattered.",
        "The optimizer steps the shards; all other memory has been given back.",
    ]
    words = [[text.get_text() for text in fig.axes[0].texts] for fig, _ in found]
    assert words[0].count("whole") == 1 and words[0].count("gathering") == 1 and words[3].count("reducing") == 1
    plt.close("all")


def test_a_picture_of_two_streams_says_what_is_exposed():
    fig = draw_streams({"on demand": simulate([1e-3] * 3, [1e-3] * 3, [0.0] * 3, ahead=0)})
    assert "14.0 ms, of which the GPU does not compute 5.0 ms" in fig.axes[0].get_title(loc="left")
    plt.close(fig)


def test_more_tokens_hide_messages_in_the_lab():
    def waits(**values):
        fig = StreamLab().draw(**{"tokens": 4096, "bandwidth": 50, "ahead": 1, "larger": 1} | values)
        return float(fig.axes[0].get_title(loc="left").split("compute ")[1].split(" ms")[0])

    assert waits(tokens=16384) < waits() / 4
    assert waits(bandwidth=300) < waits() / 4
    assert waits(larger=4) > waits()
    plt.close("all")
