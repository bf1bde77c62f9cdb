"""A pipeline by hand: every rank has some stages of the model, and works through its list of actions.

schedules.py says in which order, simulator.with_messages where sends and receives belong. The same interface as
distributed_training.py; start it with --by-hand.
"""

import contextlib
import functools
import itertools
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from common.errors import UserError
from common.model import cross_entropy
from common.strategy import Strategy
from course.model_parallel import by_hand_layers as layers
from course.pipeline import schedules, simulator, split


class Executor:
    """Runs this rank's part of a schedule, with tensors, messages and gradients.

    schedule:  without messages; ranks are counted within `group`
    stages:    this rank's: number -> module
    group:     the process group of the pipeline, by default of all ranks
    recompute: keep nothing but the input of a stage, and do its forward again before its backward
    context:   makes the context in which a stage computes forward

    Each run leaves `events`, what was done when (simulator.Event, in seconds of time.perf_counter, without the time
    that an action waited for its input), and `peak`, the most activations that were kept at once.
    Raises IllegalSchedule.
    """

    def __init__(self, schedule, stages, group=None, recompute=False, context=contextlib.nullcontext):
        self.rank_of = simulator.placement(schedule)
        self.actions = simulator.with_messages(schedule)[dist.get_rank(group)]
        self.stages, self.group, self.recompute, self.context = stages, group, recompute, context
        self.last = len(self.rank_of) - 1

    def run(self, inputs, loss, shape):
        """Add the gradients of all micro-batches to the parameters'.

        inputs: a tensor for each micro-batch, for the first stage
        loss:   (output of the last stage, micro-batch) -> scalar
        shape:  of what one stage hands to the next, for one micro-batch

        Returns the sum of the losses, 0 where the last stage is not.
        """
        self.loss, self.shape, self.device = loss, shape, inputs[0].device
        self.inbox = {(0, "F", m): (None, x) for m, x in enumerate(inputs)}  # (for stage, direction, micro-batch)
        self.inbox |= {(self.last, "B", m): (None, None) for m in range(len(inputs))}
        self.outbox, self.sends, self.kept = {}, {}, {}
        self.events, self.peak, self.total = [], 0, torch.zeros((), device=self.device)
        for are_messages, actions in itertools.groupby(self.actions, lambda a: a.kind in simulator.MESSAGES):
            if are_messages:
                self.exchange(list(actions))
            else:
                for action in actions:
                    self.compute(action)
        for work, _ in self.sends.values():
            work.wait()
        return self.total

    def exchange(self, actions):
        """Start messages that come one after the other, all at once: so two that face each other pass. Nobody waits."""
        operations, keys = [], []
        for stage, kind, m in actions:
            peer = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
            to = peer if kind.startswith("SEND") else stage
            keys.append((to, kind[-1], m))
            tensor = self.outbox.pop(keys[-1]) if to == peer else torch.empty(self.shape, device=self.device)
            start = dist.isend if to == peer else dist.irecv
            operations.append(dist.P2POp(start, tensor, group=self.group, group_peer=self.rank_of[peer]))
        works = dist.batch_isend_irecv(operations)
        works = works if len(works) == len(operations) else works * len(operations)  # NCCL has one for all of them
        for key, operation, work in zip(keys, operations, works, strict=True):
            (self.inbox if operation.op is dist.irecv else self.sends)[key] = work, operation.tensor

    def compute(self, action):
        stage, kind, m = action
        arrived = None if kind == "W" else self.receive(stage, "F" if kind == "F" else "B", m)
        begin = time.perf_counter()
        {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}[kind](
            stage, m, arrived
        )
        self.events.append(simulator.Event(begin, time.perf_counter(), action))

    def receive(self, stage, direction, m):
        """Wait for what an action needs."""
        work, tensor = self.inbox.pop((stage, direction, m))
        if work is not None:
            work.wait()
        if direction == "B" and (sent := self.sends.pop((stage + 1, "F", m), None)):
            sent[0].wait()  # it has arrived, for its gradient is here: its memory is free
        return tensor

    def forward(self, stage, m, x):
        if stage > 0:
            x.requires_grad_()  # what comes from another process has no history: here the gradient's way back begins
        with torch.set_grad_enabled(not self.recompute):
            y = self.call(stage, m, x)
        self.kept[stage, m] = x, y
        self.peak = max(self.peak, len(self.kept))
        if stage == self.last:
            self.total += y.detach()
        self.give(stage + 1, "F", m, y.detach())

    def call(self, stage, m, x):
        """What a stage makes of its input; the last one a loss."""
        with self.context():
            y = self.stages[stage](x)
            return self.loss(y, m) if stage == self.last else y

    def backward(self, stage, m, gradient):
        x, y = self.recall(stage, m)
        if y.requires_grad:  # all of the first stage may be frozen
            y.backward(gradient)
        self.give(stage - 1, "B", m, x.grad)

    def backward_input(self, stage, m, gradient):
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
        x, y = self.kept.pop((stage, m))
        return x, self.call(stage, m, x) if self.recompute else y

    def give(self, stage, direction, m, tensor):
        """Hand something to a stage of this rank, or lay it out for sending."""
        if stage in self.stages:
            self.inbox[stage, direction, m] = None, tensor
        elif 0 <= stage <= self.last:
            self.outbox[stage, direction, m] = tensor.contiguous()


def backward_for_input(x, y, gradient):
    """The gradient of x alone, where y came from it, and what is left to do for the parameters.

    The graph of autograd leads from y to x and, on branches, to the parameters. Where a branch begins, a hook keeps
    the gradient that comes by. From there the second half can start later: a list of (outputs, their gradients,
    parameters) for torch.autograd.backward. As in PyTorch's pipelining, and Qi et al. 2023, section 2.

    Raises UserError for a parameter that is used twice.
    """
    goal = get_gradient_edge(x).node
    above, nodes = defaultdict(list), [y.grad_fn]
    for node in nodes:  # grows while we go through it
        for child in {child for child, _ in node.next_functions if child is not None}:
            if child not in above:
                nodes.append(child)
            above[child].append(node)
    way = closure([goal], above)
    branches = defaultdict(list)
    for leaf in (node for node in nodes if hasattr(node, "variable") and node is not goal):
        begins = {node for below in closure([leaf], above, way) for node in above[below] if node in way}
        if len(begins) > 1:
            raise UserError("a parameter is used twice in one stage: its backward pass cannot be cut in two")
        branches[begins.pop()].append(leaf.variable)
    passed = {}
    hooks = [node.register_prehook(functools.partial(passed.__setitem__, node)) for node in branches]
    (gradient,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    later = []
    for node, parameters in branches.items():
        known = [number for number, tensor in enumerate(passed[node]) if tensor is not None]
        later.append(([GradientEdge(node, n) for n in known], [passed[node][n] for n in known], parameters))
    return gradient, later


def closure(nodes, above, without=()):
    """The nodes, and all that lie above them."""
    found = dict.fromkeys(nodes)
    for node in nodes:  # grows
        for parent in above[node]:
            if parent not in found and parent not in without:
                found[parent] = None
                nodes.append(parent)
    return found


class Pipeline(layers.SplitLayers):
    """Every rank has some stages of the GPT; each batch goes through them in micro-batches, by a schedule.

    What --accumulate makes of a batch goes through the pipeline one after the other; each is cut into `microbatches`.

    schedule:        a name of schedules.SCHEDULES
    stages_per_rank: by default what the schedule needs
    split_spec:      where to cut, as in split.py
    recompute:       compute each forward again before its backward, and store only inputs of stages
    replicas:        so many equal pipelines, for hybrid.py; ranks [replica, place in its pipeline]
    """

    def __init__(
        self,
        model,
        make_optimizer,
        ranks,
        precision="fp32",
        max_norm=1.0,
        schedule="1f1b",
        microbatches=4,
        stages_per_rank=None,
        split_spec="auto",
        recompute=False,
        replicas=1,
    ):
        Strategy.__init__(self, ranks, precision, max_norm)
        # GradScaler skips a step whose gradients overflow; this one does so on all ranks if it does on any.
        self.scaler = ShardedGradScaler(ranks.device.type, enabled=precision == "fp16")
        self.scaler.scale(torch.zeros((), device=ranks.device))  # begins its work on ranks without a loss, too
        parts = layers.layers_of(model)
        self.microbatches, self.width = microbatches, model.embedding.tokens.embedding_dim
        grid = torch.arange(ranks.size).view(replicas, -1)
        self.data_rank, place = divmod(ranks.rank, grid.shape[1])
        self.data_size = replicas
        self.group, _ = dist.new_subgroups_by_enumeration(grid.tolist())
        self.schedule = schedules.build(schedule, grid.shape[1], microbatches, stages_per_rank)
        self.rank_of = simulator.placement(self.schedule)
        self.first, self.last = (place == self.rank_of[end] for end in (0, -1))
        for tensor in [*model.parameters(), *model.buffers()]:  # ranks may have been seeded differently
            dist.broadcast(tensor.detach(), src=0)
        where = [self.rank_of[0], self.rank_of[-1]]
        tied = model.head.out.weight is model.embedding.tokens.weight and where[0] != where[1]
        self.tied = model.embedding.tokens.weight if tied else None
        self.ends_group = dist.new_subgroups_by_enumeration(grid[:, where].tolist())[0] if tied else None
        self.stages = split.stages_of(model, len(self.rank_of), split_spec)
        own = {s: names for s, names in enumerate(self.stages) if self.rank_of[s] == place}
        for name in parts.keys() - itertools.chain(*own.values()):
            model.set_submodule(name, nn.Identity())  # what is left keeps its names
        self.model = model.to(ranks.device)
        self.recompute = recompute
        modules = {s: nn.Sequential(*(parts[name] for name in names)) for s, names in own.items()}
        self.executor = self.make_executor(schedule, self.spread(modules))
        self.optimizer = make_optimizer(self.model.parameters())

    def spread(self, modules):
        """What a hybrid does to this rank's stages for its replicas."""
        return modules

    def make_executor(self, name, modules):
        return Executor(self.schedule, modules, self.group, self.recompute, self.autocast)

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.ranks.device)
        for inputs, targets in micro_batches:
            loss += self.run(inputs, targets, len(micro_batches))
        self.add_tied_gradients()
        dist.broadcast(loss, group=self.group, group_src=self.rank_of[-1])
        self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def run(self, inputs, targets, batches):
        """Once through the pipeline with one of `batches` equal parts of the batch whose mean we want."""
        self.require_divisible(inputs)
        inputs, targets = inputs.chunk(self.microbatches), targets.chunk(self.microbatches)

        def loss(logits, m):
            return self.scaler.scale(cross_entropy(logits.float(), targets[m]) / (self.microbatches * batches))

        return self.executor.run(inputs, loss, (*inputs[0].shape, self.width)) / self.scaler.get_scale()

    def require_divisible(self, inputs):
        if len(inputs) % self.microbatches:
            raise UserError(f"{len(inputs)} examples cannot be cut into {self.microbatches} equal micro-batches")

    def clip(self):
        """Clip by the norm of the whole model, in which a tied weight counts once."""
        twice = self.tied if self.last else None
        own = [p.grad for p in self.model.parameters() if p.grad is not None and p is not twice]
        square = get_total_norm(own).to(self.ranks.device) ** 2
        dist.all_reduce(square, group=self.group)
        clip_grads_with_norm_(self.model.parameters(), self.max_norm, square.sqrt())
        return square.sqrt()


def timeline(events) -> simulator.Timeline:
    """What the ranks' executors noted, `events` of each in the order of ranks, as a timeline that begins at 0.

    The ranks must share a clock: that of one machine."""
    begin = min(rank[0].start for rank in events)
    return simulator.Timeline([[simulator.Event(s - begin, e - begin, a) for s, e, a in rank] for rank in events])
