"""Buckets of chapter 03: the simulator of what they expose, its pictures, and the program that measures how fast ranks
train."""

import pytest

from course.ddp import buckets


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


def test_the_sliders_move_the_picture():
    lab = buckets.BucketLab()
    before = lab.picture.value
    lab.controls["bucket_mb"].value = 100
    after = lab.picture.value
    assert after != before
    lab.controls["bucket_mb"].value = 25
    assert lab.picture.value == before
