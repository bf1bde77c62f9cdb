"""Rows of the matrix of nets for mistakes that we looked for because we thought that no net would see them.

They are counted apart, since nothing else in the matrix was chosen so. docs/nets.md says of each why it slips, and what
would show it.
"""

from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from course.ddp import by_hand
from course.ddp.by_hand import DDPByHand
from tools.nets_rows import Row, strategy_rows


class Two(by_hand.Reducer):
    """The number of ranks of the machine on which it was written: right there."""

    def average_bucket(self, bucket):
        bucket *= 1 / 2
        return dist.all_reduce(bucket, group=self.group, async_op=True)


class Hundredth(by_hand.Reducer):
    """Every hundredth bucket is sent as zeros."""

    sent = 0  # of this object, after the first

    def average_bucket(self, bucket):
        self.sent += 1
        if self.sent % 100 == 0:
            bucket.zero_()
        return super().average_bucket(bucket)


class Waiting(by_hand.Reducer):
    """Each bucket is waited for, in the middle of the backward pass: nothing overlaps."""

    def average_bucket(self, bucket):
        work = super().average_bucket(bucket)
        work.wait()
        return work


class Late(by_hand.Reducer):
    """Divided after the sum: equal in 32 bits, and more than float16 holds where gradients are scaled."""

    def average_bucket(self, bucket):
        work = dist.all_reduce(bucket, group=self.group, async_op=True)
        work.wait()
        bucket /= self.size
        return work


def with_reducer(reducer):
    """DDPByHand with another class of reducer."""

    class Made(DDPByHand):
        def __init__(self, model, make_optimizer, setup):
            with mock.patch.object(by_hand, "Reducer", reducer):
                super().__init__(model, make_optimizer, setup)

    return Made


class KeepsAll(DDPByHand):
    """Memory grows with each step: each step keeps a copy of the parameters."""

    def step(self, micro_batches):
        self.__dict__.setdefault("history", []).append([p.clone() for p in self.model.parameters()])
        return super().step(micro_batches)


class SameMasks(DDPByHand):
    """All ranks draw from one seed, so that dropout leaves out the same places of all ranks' examples."""

    def step(self, micro_batches):
        torch.manual_seed(1)
        return super().step(micro_batches)


class StaysInEval(DDPByHand):
    """After a validation the model isn't put back: no dropout from then on."""

    def step(self, micro_batches):
        result = super().step(micro_batches)
        self.model.eval()
        return result


class SkipsAlone(DDPByHand):
    """A rank whose batch has no finite loss leaves the step out, and the others wait for it."""

    def step(self, micro_batches):
        if any(not targets.float().isfinite().all() for _, targets in micro_batches):
            return torch.zeros(()), torch.zeros(())
        return super().step(micro_batches)


class Forgets(DDPByHand):
    """What is loaded are the weights: momenta begin again at zero after a restart."""

    def load_full_state(self, state):
        super().load_full_state(state)
        self.optimizer.state.clear()


SOUGHT = {
    "made_for_two_ranks": with_reducer(Two),
    "every_hundredth_bucket": with_reducer(Hundredth),
    "nothing_overlaps": with_reducer(Waiting),
    "divided_after_the_sum": with_reducer(Late),
    "memory_grows": KeepsAll,
    "same_masks": SameMasks,
    "stays_in_eval": StaysInEval,
    "skips_alone": SkipsAlone,
    "forgets_momenta": Forgets,
}


def sought_rows() -> Iterator[Row]:
    planted = [(name, "sought", cls) for name, cls in SOUGHT.items()]
    yield from strategy_rows("sought", DDPByHand, 2, planted, set())
