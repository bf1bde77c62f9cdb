"""The page that grows the reducer of chapter 03 grows the one of by_hand.py; its pictures of buckets; and the program
that measures how fast ranks train."""

import threading
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from helpers import code_of_page, definitions

from course.ddp import buckets, by_hand

METHODS = ("begin", "put", "send_complete", "average_bucket", "no_sync")  # of finish the page shows a simple form


def test_the_reducer_that_grows_on_the_page_is_that_of_by_hand():
    """Its last versions; __init__, zero_grad and ready grow by calling their earlier selves."""
    grown = {}
    for cell in code_of_page("03_ddp/01_ddp.ipynb"):
        if cell.startswith("MEBIBYTE") or "class Reducer" in cell:
            grown |= definitions(cell)
    finished = definitions(Path(by_hand.__file__).read_text())
    for name in ("assign", *(f"Reducer.{name}" for name in METHODS)):
        assert grown[name] == finished[name], f"{name} differs between the page and by_hand.py"


@pytest.mark.parametrize(
    "gradients, bucket_bytes, backward, alpha, ends, tail",
    [
        ([1, 1, 1], 1, 3.0, 0.0, [3, 5, 7], 4),  # complete after 1, 2 and 3 s; each travels for 2 s
        ([1, 1, 1], 9, 3.0, 0.0, [9], 6),  # one bucket, which leaves at the end
        ([1, 1, 4], 1, 6.0, 0.0, [12, 14, 16], 10),  # the large one comes first and holds the others up
        ([4, 1, 1], 2, 6.0, 1.0, [7, 16], 10),  # the last two together, from 2 to 7 s; then the first, for 9 s
        ([1, 1], 1, 10.0, 0.5, [7.5, 12.5], 2.5),  # the network waits for the second
    ],
)
def test_simulated_overlap_worked_out_by_hand(gradients, bucket_bytes, backward, alpha, ends, tail):
    sent = buckets.simulate(gradients, bucket_bytes, backward, alpha, bandwidth=0.5, ranks=2)
    assert [bucket.end for bucket in sent] == ends
    assert buckets.exposed(sent, backward) == tail


def test_more_ranks_send_more():
    """2 (N - 1) / N times the bytes: 3 s for each on four ranks."""
    sent = buckets.simulate([2, 2], 2, backward=2.0, alpha=0.0, bandwidth=1.0, ranks=4)
    assert [(bucket.ready, bucket.start, bucket.end) for bucket in sent] == [(1.0, 1.0, 4.0), (2.0, 4.0, 7.0)], (
        "seconds at which a bucket is complete, is sent, and has arrived: the second waits for the first"
    )


def recorded(*passes):
    """Two ranks, each with passes whose buckets are held back and passes whose are not, in turns: (backward, end)."""
    return [[(0.0, backward, [[0.1, end]]) for backward, end in passes] for _ in range(2)]


UNDISTURBED = (1.0, 1.5), (1.1, 1.2)
BETWEEN = (1.0, 1.5), (1.3, 1.4)  # another program has come between
SLOW_MESSAGES = (1.0, 1.2), (1.1, 1.5)  # and here it has slowed down the messages


def test_only_passes_that_can_be_compared_are_drawn():
    pair, share = buckets.comparable(recorded(*SLOW_MESSAGES, *BETWEEN, *UNDISTURBED), rooms=(1.2,))
    assert pair["hooks"].backward == 1.1 and pair["hooks"].exposed == pytest.approx(0.1)
    assert share == pytest.approx(2 / 3)
    with pytest.raises(RuntimeError, match="run the cell again"):
        buckets.comparable(recorded(*BETWEEN, *SLOW_MESSAGES), rooms=(1.2,))
    pair, share = buckets.comparable(recorded(*BETWEEN, *SLOW_MESSAGES), rooms=(1.2, 1.4))
    assert pair["hooks"].backward == 1.3 and share == 0.5


def test_of_undisturbed_passes_the_shortest_two_are_drawn():
    long, short, alike = ((2.0, 2.5), (2.0, 2.01)), ((1.0, 1.5), (1.15, 1.2)), ((1.2, 1.7), (1.21, 1.3))
    pair, share = buckets.comparable(recorded(*long, *short, *alike))
    told = pair["after"].backward, pair["hooks"].backward, share
    assert told == (1.0, 1.15, 1.0), "the shortest two, though with longer ones less is exposed"
    pair, _ = buckets.comparable(recorded((1.0, 1.5), (1.4, 1.5), (3.0, 3.5), (3.3, 3.4)))
    assert pair["after"].backward == 3.0, "the two that are most alike come before shorter ones"
    pair, _ = buckets.comparable(recorded((1.0, 1.5), (1.25, 1.3), (3.0, 3.5), (3.5, 3.6)))
    assert pair["after"].backward == 3.0, "up to a fifth longer than the other is alike"
    pair, _ = buckets.comparable(recorded((1.0, 1.5), (2.9, 3.0)))
    assert pair["hooks"].backward == 2.9, "on a busy computer one pass may take three times as long as the other"
    with pytest.raises(RuntimeError, match="run the cell again"):
        buckets.comparable(recorded((1.0, 1.5), (3.1, 3.2)))


def test_exposed_is_what_follows_the_slowest_rank():
    run = buckets.Pass([(0.0, 2.0), (0.5, 3.0)], [(1.0, 2.0), (3.0, 3.5)])
    assert (run.backward, run.exposed, run.first_leaves) == (3.0, 0.5, 1 / 3)
    early = buckets.Pass([(0.0, 2.0)], [(1.0, 1.5)])
    assert early.exposed == 0


def test_a_pass_with_buckets_held_back_and_one_by_hooks_follow_each_other(monkeypatch):
    """By a reducer that notes what happens: each pass begins on all ranks at once, and what is held back leaves when
    the backward pass is over."""
    clock, noted, made = [0.0], [], []

    class Reducer:
        def __init__(self, model, group, bucket_mb):
            noted.append(bucket_mb)
            made.append(self)

        def zero_grad(self):
            self.waiting = 1

        def send_complete(self):
            if self.waiting:
                noted.append("sent")
                self.waiting -= 1
                self.average_bucket(None)

        def average_bucket(self, bucket):
            done = torch.futures.Future()
            self.sent = done
            return SimpleNamespace(get_future=lambda: done)

        def finish(self):
            noted.append("finished")
            threading.Timer(0.02, self.sent.set_result, [None]).start()  # over a moment later

    class Loss:
        def backward(self):
            made[0].send_complete()
            clock[0] += 1
            noted.append("computed")

    monkeypatch.setattr(buckets.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(buckets.dist, "barrier", lambda: noted.append("all are here"))
    runs = buckets.record(Reducer, None, lambda model: Loss(), 2.5, pairs=1)
    held_back, by_hooks = ["computed", "sent", "finished"], ["sent", "computed", "finished"]
    assert noted == [2.5, "all are here", *held_back, "all are here", *by_hooks], "held back, then by hooks"
    assert [run[:2] for run in runs] == [(0.0, 1.0), (1.0, 2.0)], "start and end of the backward pass alone"
    spans = [run[2] for run in runs]
    assert spans == [[[1.0, 1.0]], [[1.0, 2.0]]], "when each all-reduce was called, and was over, which is waited for"


def test_an_all_reduce_begins_when_the_last_rank_calls_it():
    late = [[(0.0, 1.0, [[0.2, 1.5]]), (0.0, 1.0, [[0.3, 1.1]])], [(0.0, 1.0, [[0.6, 1.5]]), (0.0, 1.0, [[0.5, 1.2]])]]
    pair, _ = buckets.comparable(late)
    assert pair["after"].reduced == [(0.6, 1.5)], "called on the last rank"
    assert pair["hooks"].reduced == [(0.5, 1.2)], "and over on all"


def test_the_simulated_picture_shows_what_is_exposed():
    """All in one bucket: 1,207,959,552 bytes leave after 200 ms and take 2 ms + 2 x 63/64 x 1.208 GB / 25 GB/s."""
    *_, curve, point = buckets.draw_overlap(1200, 200, 2.0, 25).axes[1].lines
    assert curve.get_ydata()[-1] == point.get_ydata()[0] == pytest.approx(97.13, abs=0.01), "ms exposed"
    assert curve.get_ydata()[0] < curve.get_ydata()[-1]
    plt.close("all")


def test_the_sliders_move_the_picture():
    lab = buckets.BucketLab()
    before = lab.picture.value
    lab.controls["bucket_mb"].value = 100
    after = lab.picture.value
    assert after != before
    lab.controls["bucket_mb"].value = 25
    assert lab.picture.value == before
