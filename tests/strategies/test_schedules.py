"""Schedules are what the literature and PyTorch say they are, and what is no schedule is refused with a reason."""

import re
from fractions import Fraction

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from course.pipeline import schedules, simulator, torch_schedules

SCHEDULES, Action, build, parse = schedules.SCHEDULES, schedules.Action, schedules.build, schedules.parse
IllegalSchedule, Times, MESSAGES = simulator.IllegalSchedule, simulator.Times, simulator.MESSAGES
simulate, with_messages = simulator.simulate, simulator.with_messages

HALF = Fraction(1, 2)
UNIT = Times(1, HALF, HALF)  # forward and backward take one unit each
GRID = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 8, 12, 13)]


# What the literature says


def test_gpipe_and_1f1b_have_one_bubble_and_other_peaks():
    for p, m in GRID:
        for times in (UNIT, Times(Fraction(2), 3, 4)):
            gpipe, one = (simulate(build(name, p, m), times) for name in ("gpipe", "1f1b"))
            assert gpipe.bubble == one.bubble == Fraction(p - 1, m + p - 1)
            assert gpipe.peaks == [m] * p
            assert one.peaks == [min(p - rank, m) for rank in range(p)]


def test_interleaving_divides_the_bubble_by_the_stages_per_rank():
    for name in ("interleaved", "looped-bfs"):
        for p, m in [(2, 4), (2, 6), (4, 4), (4, 8), (4, 16), (8, 8)]:
            for v in (2, 3, 4):
                timeline = simulate(build(name, p, m, v), UNIT)
                ideal = m * v * 2
                assert (timeline.makespan - ideal) / ideal == Fraction(p - 1, v * m)
                assert timeline.makespan * (1 - timeline.bubble) == ideal


def test_zero_bubble_h1_fills_the_bubble_with_weight_gradients():
    # Qi et al. 2023, table 1: (p-1)(F+I-W) instead of (p-1)(F+I+W), and the first rank's memory on all
    for p, m in [(2, 2), (2, 5), (4, 4), (4, 8), (8, 16)]:
        for f, i, w in [(1, 1, 1), (2, 3, 2), (4, 4, 3)]:
            timeline = simulate(build("zb-h1", p, m), Times(f, i, w))
            assert timeline.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
            assert timeline.peaks == [p] * p


def test_v_schedules_never_wait_once_they_began():
    # Equal times: a rank waits for its first input, and for the others at the end, nothing else.
    for name, more in [("zbv", 0), ("dualpipev", 1)]:
        for p in (2, 4, 8):
            m = 3 * p
            timeline = simulate(build(name, p, m), Times(1, 1, 1))
            assert timeline.makespan == 6 * m + p - 1, name
            assert timeline.peaks == [2 * p + more] * p  # of half the size: 1F1B's first rank holds p whole ones
    for events in simulate(build("zbv", 4, 12), Times(1, 1, 1)).ranks:
        assert events[-1].end - events[0].start == 6 * 12


# What PyTorch says


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "dualpipev"])
def test_sends_what_pytorch_sends(name):
    v = SCHEDULES[name].stages_per_rank or 2
    if name == "gpipe":  # PyTorch puts messages into lists of schedules with several stages only
        theirs = {f"{s}{kind}{m}" for kind in ("SEND_F", "RECV_B") for s in range(3) for m in range(8)}
        theirs |= {f"{s}{kind}{m}" for kind in ("RECV_F", "SEND_B") for s in range(1, 4) for m in range(8)}
    else:
        lists = get_schedule_ops(torch_schedules.TORCH_SCHEDULES[name], 4, 8, v, with_comms=True)
        theirs = {str(a) for actions in lists for a in actions if a.computation_type.value[:4] in ("SEND", "RECV")}
    ours = {
        str(action) for actions in with_messages(build(name, 4, 8)) for action in actions if action.kind in MESSAGES
    }
    assert ours == theirs


# How it runs: test_any_size.py


def test_a_rank_without_actions_stores_nothing_and_waits_all_the_time():
    idle = simulate([parse("0F0 0B0"), []])
    assert (idle.peaks, idle.makespan, idle.bubble) == ([1, 0], 3, 0.5)


def test_a_schedule_that_gets_stuck_tells_how_far_it_came():
    with pytest.raises(IllegalSchedule) as refused:
        simulate([parse("0F0 0B0 0F1 0B1"), parse("1F0 1F1 1B0 1B1")], UNIT)
    assert simulator.rows(refused.value.so_far) == "rank 0  F0 .   1 stored\nrank 1  .  F0  1 stored"
    for first, so_far in {
        "0F0": None,  # which is seen before anything is done
        "0F0 0F1 0B1 0B0 0W0": None,
        "0F0 0W0 0I0": "rank 0  F0  1 stored\nrank 1  .   0 stored",
        "0F0 0RECV_B0 0B0": None,
        "0F0 0SEND_F0 0B0 0RECV_B0": "rank 0  F0  1 stored\nrank 1  .   0 stored",
        "0F0 0SEND_F0 0B0": "rank 0  F0  1 stored\nrank 1  .   0 stored",
    }.items():
        second = ("1RECV_F0 1F0 1B0" + " 1SEND_B0" * ("RECV" in first)) if "_" in first else "1F0 1B0"
        with pytest.raises(IllegalSchedule) as refused:
            simulate([parse(first), parse(second)])
        came = refused.value.so_far and simulator.rows(refused.value.so_far)
        assert came == so_far, f"how far it came, told of {first}"


# What is no schedule is refused

GOOD = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
SENT = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
]
SENT_APART = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0I0 0W0 0SEND_F2 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0W2",
    "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1I2 1SEND_B2 1W2",
]
SPLIT = ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1W0 1I1 1W1"]
V = ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]
ILLEGAL = {  # lists, (rank, from, to), the refusal
    "swapped": (GOOD, (1, "1F0 1B0", "1B0 1F0"), "wrong order: rank 1 does 1B0 before 1F0"),
    "order on one rank of a V": (V, (1, "1F0 2F0", "2F0 1F0"), "wrong order: rank 1 does 2F0 before 1F0"),
    "weight before input": (SPLIT, (0, "0I1 0W1", "0W1 0I1"), "wrong order: rank 0 does 0W1 before 0I1"),
    "no backward": (GOOD, (0, " 0B1", ""), "missing: stage 0 on micro-batch 1 has no backward (B)"),
    "no forward": (GOOD, (1, "1F1 ", ""), "missing: stage 1 on micro-batch 1 has no forward (F)"),
    "no weight part": (SPLIT, (1, "1W0 ", ""), "missing: stage 1 on micro-batch 0 has no backward for weight (W)"),
    "no input part": (SPLIT, (1, "1I0 ", ""), "missing: stage 1 on micro-batch 0 has no backward for input (I)"),
    "no stage": (V, (1, "1F0 2F0 2B0 1B0", "2F0 2B0"), "missing: no rank has stage 1, and there is a stage 3"),
    "duplicate": (GOOD, (0, "0B0", "0B0 0B0"), "twice: 0B0 comes 2 times"),
    "both backwards": (GOOD, (0, "0B1", "0B1 0I1"), "twice: stage 0 on micro-batch 1 goes backward whole (B)"),
    "a stage on two ranks": (GOOD, (1, "1F0", "0F0"), "stage 0 is on ranks 0 and 1, not on one"),
    "deadlock of two": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        None,
        "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0",
    ),
    "deadlock beyond a third": (
        ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"],
        None,
        "deadlock: rank 1 waits at 1B0 for 2B0 of rank 2; rank 2 waits at 2F1 for 1F1 of rank 1",
    ),
    "deadlock of ranks 1 and 2": (  # for which rank 0 waits: its stage is the last
        ["2F0 2B0 2F1 2B1", "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        None,
        "deadlock: rank 1 waits at 0B0 for 1B0 of rank 2; rank 2 waits at 1F1 for 0F1 of rank 1",
    ),
    "not sent": (SENT, (0, "0SEND_F1 ", ""), "missing: of 0SEND_F1 and its receive only one is there"),
    "not received": (SENT, (0, "0RECV_B1 ", ""), "missing: of 1SEND_B1 and its receive only one is there"),
    "message left out": (
        [SENT[0].replace("0SEND_F1 ", ""), SENT[1].replace("1RECV_F1 ", "")],
        None,
        "missing: 1RECV_F1",
    ),
    "sent too early": (SENT, (0, "0F0 0SEND_F0", "0SEND_F0 0F0"), "wrong order: rank 0 does 0SEND_F0 before 0F0"),
    "received too late": (SENT, (0, "0RECV_B0 0B0", "0B0 0RECV_B0"), "wrong order: rank 0 does 0B0 before 0RECV_B0"),
    "sends in another order": (
        SENT,
        (0, "0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0SEND_F0"),
        "mixed up: message 0 from rank 0 to rank 1 is 0SEND_F1 for rank 0, but 0SEND_F0 for rank 1",
    ),
    "messages in a circle": (  # rank 0 has something to compute between its send and its receive, and rank 1 too
        SENT_APART,
        None,
        "deadlock: rank 0 waits at 0SEND_F1 for 1RECV_F1 of rank 1; rank 1 waits at 1SEND_B0 for 0RECV_B0 of rank 0",
    ),
    "sent to nobody": (
        SENT,
        (1, "1F1", "1F1 1SEND_F1"),
        "no message: 1SEND_F1 on rank 1, but no other rank has a stage 2",
    ),
    "sent to oneself": (  # both stages are on rank 1
        [
            "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
            "1RECV_F0 1F0 1SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
        ],
        None,
        "no message: 1SEND_F0 on rank 1, but no other rank has a stage 2",
    ),
    "nothing": (["", ""], None, "the schedule is empty"),
}


def named(text: str) -> list[str]:
    """The actions, stages, ranks and micro-batches that a refusal names, in order, whatever words are between."""
    return re.findall(r"\d+(?:[A-Z_]+\d+)?", text)


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_schedules_are_refused(case):
    texts, change, refusal = ILLEGAL[case]
    texts = list(texts)
    if change:
        rank, old, new = change
        assert texts[rank].count(old) == 1
        texts[rank] = texts[rank].replace(old, new)
    schedule = [parse(text) for text in texts]
    with pytest.raises(IllegalSchedule) as refused:
        simulate(schedule)
    said = str(refused.value)
    assert named(said)[: len(named(refusal))] == named(refusal) and "\n" not in said, said


def test_messages_that_are_started_together_may_stand_in_any_order():
    """batch_isend_irecv: "the relative ordering of sends vs. receives in the list does not matter". Here two messages
    that face each other, in one batch on each rank, stand with the send first on both; and with the receive first."""
    for rank, old, new in [
        (1, "1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1"),
        (0, "0SEND_F1 0RECV_B0", "0RECV_B0 0SEND_F1"),
    ]:
        texts = list(SENT)
        assert texts[rank].count(old) == 1
        texts[rank] = texts[rank].replace(old, new)
        assert simulate([parse(text) for text in texts]).peaks == [2, 1]


def test_what_the_illegal_ones_were_made_of_is_legal():
    waits = ["0F0 0B0 0F1 0B1", GOOD[1]]  # and comes to its end
    for texts in (GOOD, SENT, SPLIT, V, waits):
        simulate([parse(text) for text in texts])


@pytest.mark.parametrize(
    "action, what", [(Action(0, "X", 0), " X "), (Action(0, "F", -1), " 0F-1"), (Action(-1, "F", 0), " -1F0")]
)
def test_what_is_no_action(action, what):
    with pytest.raises(IllegalSchedule) as refused:
        simulate([[Action(0, "F", 0), action, Action(0, "B", 0)]])
    assert str(refused.value).startswith("unknown") and what in str(refused.value)
