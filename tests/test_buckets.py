"""The page that grows the reducer of chapter 03 grows the one of by_hand.py; and its pictures of buckets."""

from pathlib import Path

import pytest
from helpers import code_of_page, definitions

from course.ddp import buckets, by_hand

METHODS = ("begin", "put", "send_complete", "average_bucket", "finish", "no_sync")


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
    assert [bucket.end for bucket in sent] == [4.0, 7.0]


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


def test_exposed_is_what_follows_the_slowest_rank():
    run = buckets.Pass([(0.0, 2.0), (0.5, 3.0)], [(1.0, 2.0), (3.0, 3.5)])
    assert (run.backward, run.exposed, run.first_leaves) == (3.0, 0.5, 1 / 3)
    early = buckets.Pass([(0.0, 2.0)], [(1.0, 1.5)])
    assert early.exposed == 0


def test_the_sliders_move_the_picture():
    lab = buckets.BucketLab()
    before = lab.picture.value
    lab.controls["bucket_mb"].value = 100
    after = lab.picture.value
    assert after != before
    lab.controls["bucket_mb"].value = 25
    assert lab.picture.value == before
