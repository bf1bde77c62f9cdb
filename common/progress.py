"""How far a run is, and whether somebody has asked it to stop."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and what torchrun and Slurm send


class Progress:
    """The steps of a run: `done` of `steps`, the same on all ranks.

    From `listen` to `close`, SIGINT and SIGTERM do not end the process, but ask the run to stop.
    """

    def __init__(self, done: int, steps: int):
        self.done, self.steps = done, steps
        self.stop_asked = False
        self.votes = torch.zeros((), dtype=torch.int64)  # of the ranks, on the CPU
        self.vote: dist.Work | None = None  # that of the last step, under way
        self.handlers: dict = {}  # what handled the signals before `listen`

    @property
    def complete(self) -> bool:
        return self.done >= self.steps

    def listen(self) -> None:
        self.handlers = {number: signal.signal(number, self.ask_to_stop) for number in SIGNALS}

    def ask_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        """The handler of SIGNALS."""
        self.stop_asked = True

    def stops(self) -> bool:
        """Has any rank been asked to stop by the end of the step before? The same answer on every rank. Collective.

        The ranks' votes travel while they compute the next step, so that nobody waits for them.
        """
        if dist.get_world_size() == 1:
            return self.stop_asked
        asked = self.last_vote()
        self.votes.fill_(self.stop_asked)
        self.vote = dist.all_reduce(self.votes, op=dist.ReduceOp.MAX, async_op=True)
        return asked

    def last_vote(self) -> bool:
        """What came of the vote that is under way; False if there is none."""
        if self.vote is None:
            return False
        work, self.vote = self.vote, None
        work.wait()
        return bool(self.votes.item())

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.handlers = {}
