"""The equality harness: does a strategy train exactly as one process does?

`prove(DDPByHand, nproc=4)` trains small models both ways, on the same global batches, and compares the loss and
gradient norm of every step on every rank, and at the end each rank's own elements of the parameters and the optimizer
state, and the full state that rank 0 puts together. It does so with SGD with momentum and with AdamW (which alone
would hide gradients of the wrong scale), with and without accumulation, with tied weights, with frozen parameters, with
gradient clipping at work and idle, and with a different seed on every rank but rank 0, whose weights count.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.utils import clip_grad_norm_

from common import data
from common.lab.launch import launch
from common.mesh import in_order, make_mesh, resolve
from common.model import GPT, cross_entropy
from common.state import Where, optimizer_tensors
from common.strategy import Setup

# Float32 has 24 bits, 6e-8; sums of a few hundred terms in another order differ by some tens of that. Differences
# are relative to the largest element of the tensor.
TOLERANCE = 3e-5
STEPS = 4
BATCH, CONTEXT, VOCABULARY = 24, 8, 64
SEED = 7


def tied(model_class=GPT) -> nn.Module:
    return scaled_up(model_class(layers=2, width=16, heads=4, context=CONTEXT, vocabulary=VOCABULARY, tied=True))


def frozen(model_class=GPT) -> nn.Module:
    """Untied, with a whole embedding and single weights of a block frozen."""
    model = scaled_up(model_class(layers=2, width=16, heads=4, context=CONTEXT, vocabulary=VOCABULARY, tied=False))
    model.get_submodule("embedding.positions").requires_grad_(False)
    next(model.get_submodule("blocks.1.mlp").parameters()).requires_grad_(False)
    return model


def scaled_up(model: nn.Module) -> nn.Module:
    """Ten times larger weights: so narrow a model would else hardly move in a few steps, and hide what is wrong."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adamw(parameters) -> torch.optim.Optimizer:
    """With a larger eps than usual: a gradient that is zero but for rounding must not become a full step. (With 1e-5
    experts on several ranks differ by 3.1e-5, with 1e-4 by 4e-6, though not a line differs: it is rounding.)"""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


@dataclass(frozen=True)
class Case:
    """One way to train. `max_norm` 0.3 clips every step of the models here, 100 none.

    make_model: from the class of GPT that the strategy trains, its `model_class`
    steps:      optimizer steps
    """

    make_model: Callable[[type], nn.Module]
    make_optimizer: Callable
    accumulate: int
    max_norm: float
    steps: int = STEPS

    def __str__(self):
        clipped = "clipped" if self.max_norm < 1 else "unclipped"
        return f"{self.make_optimizer.__name__}, accumulate {self.accumulate}, {self.make_model.__name__}, {clipped}"


CASES = [
    Case(make_model, make_optimizer, accumulate, max_norm)
    for make_optimizer, accumulate, (make_model, max_norm) in itertools.product(
        (sgd, adamw), (1, 3), ((tied, 0.3), (frozen, 100.0))
    )
]
ALL_CASES = [
    Case(make_model, make_optimizer, accumulate, max_norm)
    for make_optimizer, accumulate, make_model, max_norm in itertools.product(
        (sgd, adamw), (1, 3), (tied, frozen), (0.3, 100.0)
    )
]
# Five of these sixteen, in which every two levels of any two factors meet. Two steps show what one leaves behind for
# the next, three that it goes on (DDP makes its buckets anew after the first).
COVERING = [
    Case(tied, sgd, 1, 0.3, steps=3),
    Case(tied, adamw, 3, 100.0, steps=2),
    Case(frozen, sgd, 3, 0.3, steps=2),
    Case(frozen, adamw, 1, 0.3, steps=3),
    Case(frozen, sgd, 1, 100.0, steps=3),
]


@dataclass
class Outcome:
    """What training gave: per step the loss and gradient norm, at the end parameters and optimizer state by name.

    own: this rank's elements: (name, where in the whole tensor, values); where is None for a scalar
    """

    losses: list[float]
    grad_norms: list[float]
    state: dict[str, torch.Tensor]
    own: list[tuple[str, Where | None, torch.Tensor]] = field(default_factory=list)


@dataclass
class Proof:
    """The largest difference from one process, over all ranks, steps and tensors of a case."""

    case: Case
    loss: float
    grad_norm: float
    parameters: float
    optimizer: float

    @property
    def bitwise(self) -> bool:
        return self.loss == self.grad_norm == self.parameters == self.optimizer == 0.0


class NotEqual(AssertionError):
    """A strategy does not train as one process does. `what` is "loss", "grad_norm", "parameters", "optimizer",
    "agreement" or "nothing changed"; for data that is loaded, "count", "order" or "error"."""

    def __init__(self, what: str, text: str):
        super().__init__(text)
        self.what = what


class WithBatchNorm(nn.Module):
    """A model whose buffers change with what a rank reads: the running statistics of BatchNorm."""

    def __init__(self, _model_class=GPT):
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(VOCABULARY, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, VOCABULARY),
        )

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).flatten(0, 1))).unflatten(0, tokens.shape)


class Batches:
    """The examples of a proof: random tokens, the same for everyone."""

    size = BATCH * STEPS

    def __init__(self):
        generator = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(VOCABULARY, (self.size, CONTEXT + 1), generator=generator)

    def batch(self, indices):
        return self.tokens[indices, :-1], self.tokens[indices, 1:]


def model_class_of(strategy_class) -> type:
    return getattr(strategy_class, "model_class", GPT)


def on_one_process(case: Case, model_class: type) -> Outcome:
    """The reference: whole batches, no micro-batches, no strategy, nothing that could be shared with one."""
    torch.manual_seed(SEED)
    model = case.make_model(model_class)
    optimizer = case.make_optimizer(model.parameters())
    losses, grad_norms = [], []
    for step in range(case.steps):
        inputs, targets = Batches().batch(data.global_batch(SEED, step, BATCH, Batches.size))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        # a mixture of experts minimises more than it reports
        (loss + getattr(model, "auxiliary_loss", float)()).backward()
        grad_norms.append(clip_grad_norm_(model.parameters(), case.max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return Outcome(losses, grad_norms, flatten({"model": model_state, "optimizer": optimizer_state}))


@functools.cache
def references(cases: tuple[Case, ...], model_class: type = GPT) -> list[Outcome]:
    """The reference of each case, computed as every rank computes, with one thread: so "bitwise" can be asked."""
    return launch(lambda: [on_one_process(case, model_class) for case in cases], nproc=1)[0]


def on_ranks(strategy_class, cases: list[Case], axes: dict[str, int] | None = None, options=None) -> list[Outcome]:
    """Train every case on the ranks of the current process group; this rank's outcomes.

    axes:    of the mesh, by default the strategy's preset
    options: an instance of the strategy's Options, by default their defaults
    """
    # Rank 0's weights count: what a script does that forgets to seed all ranks alike.
    size, outcomes = dist.get_world_size(), []
    mesh = make_mesh(in_order(resolve(axes or getattr(strategy_class, "preset", {"data": -1}), size)))
    for case in cases:
        torch.manual_seed(SEED + dist.get_rank())
        model = case.make_model(model_class_of(strategy_class))
        strategy = strategy_class(model, case.make_optimizer, Setup(mesh, options, max_norm=case.max_norm))
        losses, grad_norms = [], []
        for step in range(case.steps):
            indices = data.global_batch(SEED, step, BATCH, Batches.size)
            place = (strategy.data_rank, strategy.data_size)
            loss, norm = strategy.step(data.micro_batches(Batches(), indices, *place, case.accumulate, "cpu"))
            losses.append(loss.item())
            grad_norms.append(norm.item())
        outcomes.append(Outcome(losses, grad_norms, flatten(strategy.full_state()), own_elements(strategy)))
    return outcomes


def own_elements(strategy) -> list[tuple[str, Where | None, torch.Tensor]]:
    """What this rank holds of the model and of the optimizer's state."""
    own = []
    for part in strategy.parts():
        own.append((f"model/{part.name}", part.where, part.tensor.detach().reshape(-1).clone()))
        for key, values in optimizer_tensors(part, strategy.optimizer_state()).items():
            where = part.where if values.dim() else None
            own.append((f"optimizer/{part.name}/{key}", where, values.reshape(-1).clone()))
    return own


def flatten(state: dict) -> dict[str, torch.Tensor]:
    """{"model/NAME": tensor, "optimizer/NAME/KEY": tensor}, copied."""
    flat = {f"model/{name}": tensor.clone() for name, tensor in state.get("model", {}).items()}
    for name, values in state.get("optimizer", {}).get("state", {}).items():
        flat |= {f"optimizer/{name}/{key}": torch.as_tensor(value).clone() for key, value in values.items()}
    return flat


def compare(case: Case, reference: Outcome, outcomes: list[Outcome], who: str) -> Proof:
    """The outcomes of a case on all ranks against the reference. Raises NotEqual with the first that differs."""
    largest = {"loss": 0.0, "grad_norm": 0.0, "parameters": 0.0, "optimizer": 0.0}
    for step in range(case.steps):
        for what, numbers in (("loss", "losses"), ("grad_norm", "grad_norms")):
            expected = getattr(reference, numbers)[step]
            for rank, outcome in enumerate(outcomes):
                got = getattr(outcome, numbers)[step]
                off = abs(got - expected)
                if not off <= TOLERANCE * abs(expected):
                    at = f"{who}, {case}: {what} of step {step + 1} on rank {rank}"
                    ratio = f"(ratio {got / expected:.6g})"
                    raise NotEqual(what, f"{at} is {got:.6g}, one process has {expected:.6g} {ratio}")
                largest[what] = max(largest[what], off / abs(expected) if off else 0.0)
    for rank, outcome in enumerate(outcomes):
        if rank > 0 and not outcome.state:
            continue  # rank 0 alone puts the full state together
        if outcome.state.keys() != reference.state.keys():
            names = sorted(outcome.state.keys() ^ reference.state.keys())
            raise NotEqual(kind_of(names[0]), f"{who}, {case}: rank {rank} and one process do not both hold {names[0]}")
        for name, expected in reference.state.items():
            off = refuse(name, outcome.state[name], expected, f"{who}, {case}: {name} on rank {rank}")
            largest[kind_of(name)] = max(largest[kind_of(name)], off)
    for rank, outcome in enumerate(outcomes):
        for name, where, values in outcome.own:
            if name not in reference.state:
                raise NotEqual(kind_of(name), f"{who}, {case}: rank {rank} holds {name}, one process does not")
            expected = reference.state[name]
            if where is not None and where.shape != tuple(expected.shape):
                text = f"{who}, {case}: {name} on rank {rank} is part of a tensor of shape {list(where.shape)}"
                raise NotEqual(kind_of(name), f"{text}, one process has {list(expected.shape)}")
            place = "" if where is None or values.numel() == expected.numel() else f" from {list(where.offset)}"
            elements = expected.reshape(-1) if where is None else where.take(expected)
            scale = expected.abs().max()
            off = refuse(name, values, elements, f"{who}, {case}: {name}{place}, as rank {rank} holds it,", scale)
            largest[kind_of(name)] = max(largest[kind_of(name)], off)
    return Proof(case, **largest)


def kind_of(name: str) -> str:
    return "parameters" if name.startswith("model/") else "optimizer"


def refuse(name: str, got: torch.Tensor, expected: torch.Tensor, what: str, scale: torch.Tensor | None = None) -> float:
    """The difference of two tensors. Raises NotEqual unless it is within TOLERANCE of the largest element."""
    if got.dtype != expected.dtype:
        raise NotEqual(kind_of(name), f"{what} is {got.dtype}, one process has {expected.dtype}")
    off = difference(got, expected, scale)
    if not off <= TOLERANCE:
        text = f"{what} differs by {off:.3g} of its largest element"
        worst = int((got - expected).abs().argmax()) if got.shape == expected.shape and got.numel() else None
        if worst is not None:
            text += f": {got.flatten()[worst]:.7g}, one process has {expected.flatten()[worst]:.7g}"
        raise NotEqual(kind_of(name), text)
    return off


def difference(tensor: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """The largest difference of an element, relative to `scale`, by default the largest element expected."""
    if tensor.shape != expected.shape:
        return float("inf")
    if not tensor.numel():
        return 0.0
    scale = (expected.abs().max() if scale is None else scale).clamp(min=torch.finfo(torch.float32).tiny)
    return ((tensor - expected).abs().max() / scale).item()


def check_something_happened(case: Case, reference: Outcome, model_class: type = GPT) -> None:
    """A proof about training in which nothing trains proves nothing. Raises NotEqual."""
    torch.manual_seed(SEED)
    for name, parameter in case.make_model(model_class).named_parameters():
        moved = difference(reference.state[f"model/{name}"], parameter.detach())
        if (moved > 30 * TOLERANCE) != parameter.requires_grad:
            raise NotEqual("nothing changed", f"{case}: {name} moved by {moved:.3g} of its largest element")
    if any((norm > case.max_norm) != (case.max_norm < 1) for norm in reference.grad_norms):
        raise NotEqual("nothing changed", f"{case}: clipping at {case.max_norm} met norms {reference.grad_norms}")


def prove(
    strategy_class,
    nproc: int,
    axes: dict[str, int] | None = None,
    options=None,
    cases: list[Case] = CASES,
    timeout: float = 60.0,
    who: str = "",
) -> list[Proof]:
    """Prove that a strategy equals one process on `nproc` ranks; a Proof for each case.

    axes, options: as for `on_ranks`
    who:           its name in messages

    Raises NotEqual with the first difference beyond TOLERANCE, and RankFailed, of launch, for ranks that wait for each
    other longer than `timeout` seconds.
    """
    outcomes = launch(on_ranks, nproc, (strategy_class, cases, axes, options), timeout)
    return judge(strategy_class, outcomes, axes, cases, who)


def judge(
    strategy_class, outcomes: list[list[Outcome]], axes: dict[str, int] | None, cases: list[Case], who: str = ""
) -> list[Proof]:
    """The same, of what `on_ranks` gave on each rank. Raises NotEqual."""
    mesh = f", mesh {','.join(f'{name}={size}' for name, size in axes.items())}" if axes else ""
    who = f"{who or strategy_class.__name__} on {len(outcomes)} rank(s){mesh}"
    model_class = model_class_of(strategy_class)
    proofs = []
    for number, (case, reference) in enumerate(zip(cases, references(tuple(cases), model_class), strict=True)):
        check_something_happened(case, reference, model_class)
        proofs.append(compare(case, reference, [outcome[number] for outcome in outcomes], who))
    return proofs


def agree(strategy_class, nproc: int, who: str) -> None:
    """Prove that all ranks hold the same model and optimizer state after some steps, bit by bit, buffers included.

    No process alone could be compared with: each rank's BatchNorm sees its own slice. Raises NotEqual.
    """
    case = Case(WithBatchNorm, sgd, accumulate=1, max_norm=100.0)
    first, *others = (
        {name: values for name, _, values in outcomes[0].own}
        for outcomes in launch(on_ranks, nproc, (strategy_class, [case]))
    )
    if "model/norm.running_mean" not in first:
        raise NotEqual("nothing changed", f"{who}: rank 0 does not hold the running mean")
    if torch.equal(first["model/norm.running_mean"], WithBatchNorm().state_dict()["norm.running_mean"]):
        raise NotEqual("nothing changed", f"{who}: the running mean is as it was made")
    for rank, other in enumerate(others, start=1):
        if other.keys() != first.keys():
            names = ", ".join(sorted(other.keys() ^ first.keys())[:3])
            raise NotEqual("agreement", f"{who}: rank 0 and rank {rank} do not both hold {names}")
        for name, expected in first.items():
            if not torch.equal(other[name], expected):
                text = f"{who}: {name} on rank {rank} differs by {difference(other[name], expected):.3g}"
                raise NotEqual("agreement", f"{text} of its largest element on rank 0")


def table(rows: list[Proof]) -> str:
    """The rows as text: the largest difference of each kind, relative to the largest element."""
    lines = [f"{'largest difference in':50}  {'loss':>8}  {'norm':>8}  {'params':>8}  {'optim':>8}"]
    for row in rows:
        numbers = (row.loss, row.grad_norm, row.parameters, row.optimizer)
        lines.append(
            f"{row.case!s:50}  " + "  ".join(f"{number:8.1e}" if number else "bitwise ".rjust(8) for number in numbers)
        )
    return "\n".join(lines)
