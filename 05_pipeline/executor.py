"""Runs a schedule by hand: this rank's list of actions, with tensors, messages and gradients.

schedules.py says in which order, simulator.with_messages where sends and receives belong.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.random_state import random_state, set_random_state
from course.pipeline import simulator, split
from course.pipeline.schedules import Action, Schedule
from course.pipeline.split_backward import backward_for_input

Place = tuple[int, str, int]  # stage, "F" or "B", micro-batch


class Executor:
    """Runs this rank's part of a schedule. Any modules will do as stages; they may talk to other ranks themselves.

    A stage may take several tensors, and hand on a tuple of as many as the next one takes: what it has computed, a
    mask, what a later stage adds to its own (a skip connection). Gradients come back for those of floating point. The
    backward pass of such a stage is done in one piece, also where the schedule cuts it in two.

    schedule:  without messages; ranks are counted within `group`
    stages:    this rank's: number -> module
    group:     the process group of the pipeline; None: all ranks
    recompute: keep nothing but the input of a stage, and do its forward again before its backward
    context:   makes the context in which a stage and the loss compute forward, such as autocast
    dtype:     of what one stage hands to the next

    Each run leaves `events`, what was done when (simulator.Event, in seconds of time.perf_counter, without the time
    that an action waited for its input), and `peak`, the most activations that were kept at once. On a GPU, events say
    when the device computed an action's kernels; asking for them waits until it has done all of its work.
    Raises IllegalSchedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup | None,
        recompute: bool = False,
        context: Callable[[], AbstractContextManager] = contextlib.nullcontext,
        dtype: torch.dtype = torch.float32,
    ):
        self.rank_of = simulator.placement(schedule)
        self.actions = simulator.with_messages(schedule)[dist.get_rank(group)]
        self.stages, self.group, self.recompute, self.context = stages, group, recompute, context
        self.dtype, self.last = dtype, len(self.rank_of) - 1

    def run(self, inputs: Sequence[torch.Tensor], loss: Callable, shape: Sequence[int]) -> torch.Tensor:
        """Add the gradients of all micro-batches to the parameters'.

        inputs: a tensor for each micro-batch, or a tuple of tensors, for the first stage
        loss:   (output of the last stage, micro-batch) -> scalar
        shape:  of what one stage hands to the next, for one micro-batch; or, for stages with several tensors, a dict:
                stage -> [(shape, dtype) of each tensor that it takes], of all stages but the first

        Returns the sum of the losses, 0 where the last stage is not. Raises UserError where a stage hands on another
        shape or dtype than was told.
        """
        self.loss, self.device = loss, tuple_of(inputs[0])[0].device
        self.taken = shape if isinstance(shape, dict) else dict.fromkeys(range(1, self.last + 1), [(shape, self.dtype)])
        # (for stage, direction, micro-batch) -> (work, what it brings)
        self.inbox: dict[Place, tuple[Any, Any]] = {}
        if 0 in self.stages:  # on other ranks nothing would take the inputs out again
            self.inbox |= {(0, "F", m): (None, x) for m, x in enumerate(inputs)}
        if self.last in self.stages:
            self.inbox |= {(self.last, "B", m): (None, None) for m in range(len(inputs))}
        self.outbox: dict[Place, torch.Tensor] = {}
        self.sends: dict[Place, tuple[Any, torch.Tensor]] = {}  # the work and what it sends
        self.kept: dict[tuple[int, int], Any] = {}  # (stage, micro-batch) -> what backward needs
        self.marks: list[tuple[Any, Any, Action]] = []  # begin and end of each action, as `mark` gives them
        self.peak, self.total = 0, torch.zeros((), device=self.device)
        for are_messages, actions in itertools.groupby(self.actions, lambda a: a.kind in simulator.MESSAGES):
            if are_messages:
                self.exchange(list(actions))
            else:
                for action in actions:
                    self.compute(action)
        for work, _ in self.sends.values():
            work.wait()
        self.sends.clear()
        del self.loss  # and with it the targets
        return self.total

    def exchange(self, actions: Iterable[Action]) -> None:
        """Start messages that come one after the other. Nobody waits for them here.

        Each is started by itself, as in PyTorch's own runtime for lists of actions, so an action waits for its own
        message alone. NCCL has one Work for all that batch_isend_irecv starts, and whoever waits for one of them
        waits for all; the price is that NCCL lets messages of a batch pass at the same time, and others one after the
        other. Two ranks that send to each other do not need a batch here: with_messages gives both one order.
        """
        for stage, kind, m in actions:
            peer = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            if kind.startswith("SEND"):
                tensors = self.outbox.pop((peer, kind[-1], m))
                works = [dist.isend(x, group=self.group, group_dst=self.rank_of[peer]) for x in tuple_of(tensors)]
                self.sends[peer, kind[-1], m] = All(works), tensors
            else:
                buffers = [
                    torch.empty(shape, dtype=dtype, device=self.device)
                    for shape, dtype in self.incoming(stage, kind[-1])
                ]
                works = [dist.irecv(x, group=self.group, group_src=self.rank_of[peer]) for x in buffers]
                self.inbox[stage, kind[-1], m] = All(works), buffers[0] if len(buffers) == 1 else tuple(buffers)
        self.release_gradients(len(self.rank_of))

    def incoming(self, stage, direction):
        """(shape, dtype) of each tensor that a stage waits for: activations, or gradients of what it has handed on."""
        if direction == "F":
            return self.taken[stage]
        return [(shape, dtype) for shape, dtype in self.taken[stage + 1] if dtype.is_floating_point]

    def release_gradients(self, most):
        """Wait for the oldest gradients that were sent, until at most `most` are on their way.

        What was sent must stay until it has arrived. Activations have once their gradient comes back, but nothing comes
        back for a gradient. Waiting for an old one cannot deadlock: with_messages gives an order in which it would not
        even if each send waited for its receive.
        """
        gradients = [key for key in self.sends if key[1] == "B"]
        for key in gradients[: max(0, len(gradients) - most)]:
            work, _ = self.sends.pop(key)
            work.wait()

    def compute(self, action: Action) -> None:
        stage, kind, m = action
        arrived = None if kind == "W" else self.receive(stage, "F" if kind == "F" else "B", m)
        begin = self.mark()
        {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}[kind](
            stage, m, arrived
        )
        self.marks.append((begin, self.mark(), action))

    def mark(self):
        """This moment: the host's clock, or on a GPU an event, which the device passes when it comes to this point."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    @property
    def events(self) -> list[simulator.Event]:
        if self.device.type == "cpu":
            return list(itertools.starmap(simulator.Event, self.marks))
        now = self.mark()
        split.synchronize(self.device)
        clock = time.perf_counter()  # the device has just passed `now`; events know how many milliseconds lie between
        return [
            simulator.Event(clock - begin.elapsed_time(now) / 1e3, clock - end.elapsed_time(now) / 1e3, action)
            for begin, end, action in self.marks
        ]

    def receive(self, stage, direction, m):
        """Wait for what an action needs."""
        work, tensor = self.inbox.pop((stage, direction, m))
        if work is not None:
            work.wait()
        if direction == "B" and (sent := self.sends.pop((stage + 1, "F", m), None)):
            sent[0].wait()  # it has arrived, for its gradient is here: its memory is free
        return tensor

    def forward(self, stage, m, x):
        if stage > 0:  # what comes from another process has no history: here the gradient's way back begins
            for tensor in of_floats(x):
                tensor.requires_grad_()
        state = random_state(self.device) if self.recompute else None
        with torch.set_grad_enabled(not self.recompute):
            y = self.call(stage, m, x)
        self.kept[stage, m] = x, None if self.recompute else y, state
        self.peak = max(self.peak, len(self.kept))
        if stage == self.last:
            self.total += y.detach()
        self.give(stage + 1, "F", m, each(torch.Tensor.detach, y))

    def call(self, stage, m, x):
        """What a stage makes of its input; the last one a loss."""
        with self.context():
            y = self.stages[stage](*tuple_of(x))
            return self.loss(y, m) if stage == self.last else y

    def backward(self, stage, m, gradient):
        x, y = self.recall(stage, m)
        gradients = [None] if gradient is None else tuple_of(gradient)
        pairs = [pair for pair in zip(of_floats(y), gradients, strict=True) if pair[0].requires_grad]
        if pairs:  # all of the first stage may be frozen
            torch.autograd.backward(*zip(*pairs, strict=True))
        self.give(stage - 1, "B", m, gradients_of(x) if stage > 0 else None)

    def backward_input(self, stage, m, gradient):
        if any(isinstance(kept, tuple) for kept in self.kept[stage, m][:2]):
            self.backward(stage, m, gradient)
            self.kept[stage, m] = []  # nothing is left for W
            return
        x, y = self.recall(stage, m)
        if x.requires_grad:
            gradient, self.kept[stage, m] = backward_for_input(x, y, gradient)
            self.give(stage - 1, "B", m, gradient)
        else:  # the first stage: nobody wants the gradient of tokens
            self.kept[stage, m] = [([y], [gradient], None)] if y.requires_grad else []

    def backward_weight(self, stage, m, _):
        for outputs, gradients, parameters in self.kept.pop((stage, m)):
            torch.autograd.backward(outputs, gradients, inputs=parameters)

    def recall(self, stage, m):
        """Input and output of a forward, whose output is computed again where only the input was kept."""
        x, y, state = self.kept.pop((stage, m))
        if self.recompute:
            with with_random_state(state, self.device):  # so dropout drops the same elements
                y = self.call(stage, m, x)
        return x, y

    def give(self, stage, direction, m, tensors):
        """Hand something to a stage of this rank, or lay it out for sending."""
        if stage in self.stages:
            self.inbox[stage, direction, m] = None, tensors
        elif 0 <= stage <= self.last:
            expected = ", ".join(f"{dtype} of shape {tuple(shape)}" for shape, dtype in self.incoming(stage, direction))
            found = ", ".join(f"{x.dtype} of shape {tuple(x.shape)}" for x in tuple_of(tensors))
            if found != expected:
                raise UserError(
                    f"stage {stage} expects {expected}, and what its neighbour hands on is {found}: tell the executor"
                )
            self.outbox[stage, direction, m] = each(torch.Tensor.contiguous, tensors)


class All:
    """Messages that are waited for together."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


def tuple_of(tensors) -> tuple:
    """A tensor, as what several are given as."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def each(function, tensors):
    """What a function makes of a tensor, or of each of several."""
    return tuple(function(x) for x in tensors) if isinstance(tensors, tuple) else function(tensors)


def of_floats(tensors) -> list[torch.Tensor]:
    """Those of one tensor, or of several, that can have a gradient."""
    return [x for x in tuple_of(tensors) if x.is_floating_point()]


def gradients_of(x):
    """The gradients of what a stage took; zero where it has not used it."""
    found = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in of_floats(x))
    return found if isinstance(x, tuple) and len(found) != 1 else found[0]


@contextlib.contextmanager
def with_random_state(states, device):
    """Draw what was drawn from these states on; afterwards go on as if nothing had been drawn."""
    before = random_state(device)
    set_random_state(states, device)
    try:
        yield
    finally:
        set_random_state(before, device)


def timeline(events: Sequence[list[simulator.Event]]) -> simulator.Timeline:
    """What the ranks' executors noted, `events` of each in the order of ranks, as a timeline that begins at 0.

    The ranks must share a clock: that of one machine."""
    begin = min(rank[0].start for rank in events)
    return simulator.Timeline([[simulator.Event(s - begin, e - begin, a) for s, e, a in rank] for rank in events])
