"""Does a way of loading feed the ranks what it should? One check for right and wrong ones alike.

`check_loading` runs it on real ranks, from the beginning and from later steps, and compares every micro-batch with
the order that common/data.py defines. It runs past the end of an epoch, and to the end of a run whose examples do not
fill the last batch.
"""

import itertools

import torch
import torch.distributed as dist

from common.data import Plan, global_batch, micro_batches
from common.lab.equality import NotEqual
from common.lab.launch import RankFailed, launch

BATCH = 24  # divides by 1, 2 and 4 ranks x 1 and 3 micro-batches
SIZE = 50  # two epochs and a bit: batches straddle the epochs
EXAMPLES = 2 * SIZE + 13  # four batches, and 17 more: enough for some of the ranks
STARTS = (0, 1)


class Numbered:
    """Example i is the number i and its negative: a dataset for looking up and for streams."""

    size = SIZE

    def batch(self, indices):
        return indices, -indices

    def record(self, index: int) -> bytes:
        return index.to_bytes(8, "little")

    def decode(self, record: bytes):
        number = torch.tensor(int.from_bytes(record, "little"))
        return number, -number


def plans() -> list[Plan]:
    """This rank's plans, one for each number of micro-batches."""
    place = {"data_rank": dist.get_rank(), "data_size": dist.get_world_size()}
    return [Plan(seed=1, batch_size=BATCH, examples=EXAMPLES, accumulate=accumulate, **place) for accumulate in (1, 3)]


def read(load) -> list[list]:
    """On each rank, for each plan and start: the micro-batches of all steps."""
    return [list(load(Numbered(), plan, start)) for plan, start in itertools.product(plans(), STARTS)]


def check_loading(loads: list, nproc: int, timeout: float = 60.0) -> None:
    """Check the ways of loading `loads` on `nproc` ranks. `timeout` is in seconds, for the launch.

    Raises equality.NotEqual, whose `what` is "count" where ranks do not have as many batches as they should, "order"
    where they have others, "error" where a rank fails.
    """
    try:
        results = launch(lambda: [read(load) for load in loads], nproc, timeout=timeout)
    except RankFailed as failed:
        raise NotEqual("error", str(failed)) from None
    for number, load in enumerate(loads):
        for case, (accumulate, start) in enumerate(itertools.product((1, 3), STARTS)):
            got = [result[number][case] for result in results]
            compare(got, accumulate, start, f"{load.__name__} on {nproc} rank(s), accumulate {accumulate}")


def compare(got: list[list], accumulate: int, start: int, who: str) -> None:
    """The micro-batches of each rank and step from `start` on, against common/data.py's."""
    counts, steps = [len(batches) for batches in got], range(start, EXAMPLES // BATCH)
    if counts != [len(steps)] * len(got):
        raise NotEqual("count", f"{who}: from step {start} on, ranks got {counts} batches, expected {len(steps)} each")
    for step, (rank, batches) in itertools.product(steps, enumerate(got)):
        indices = global_batch(1, step, BATCH, SIZE)
        expected = micro_batches(Numbered(), indices, rank, len(got), accumulate, "cpu")
        pairs = itertools.zip_longest(batches[step - start], expected, fillvalue=())
        for micro, (ours, theirs) in enumerate(pairs):
            if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
                where = f"{who}: from step {start} on, micro-batch {micro} of step {step} on rank {rank}"
                shown = [pair[0].tolist() if pair else None for pair in (ours, theirs)]
                raise NotEqual("order", f"{where} is {shown[0]}, expected {shown[1]}")
