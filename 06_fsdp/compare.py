"""What the pages of this chapter train, and how a class of theirs is held against one process and against formulas."""

import warnings
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.lab.launch import launch
from common.lab.layouts import forget_layouts
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.model import GPT, cross_entropy
from common.strategy import Setup
from course.fsdp import memory
from course.fsdp.formulas import formula
from course.strategies import load

TOKENS = torch.randint(256, (48, 33), generator=torch.Generator().manual_seed(1))  # a global batch of 48 sequences

adamw = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)  # with a tiny eps it would step by the sign of rounding errors
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"SGD": (sgd, float("inf")), "AdamW": (adamw, float("inf")), "SGD, clipped": (sgd, 0.2)}


def make_model(layers=2, width=64, **options):
    """A small GPT, with the same weights on every rank. Embedding and head share a weight unless tied=False."""
    torch.manual_seed(0)
    return GPT(layers=layers, width=width, heads=2, context=32, **options)


def loss_of(model, tokens):
    """The mean loss of each token's prediction from those before it."""
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def my_part(micro_batches=1):
    """This rank's equal part of the global batch, as a list of micro-batches."""
    return TOKENS.chunk(dist.get_world_size())[dist.get_rank()].chunk(micro_batches)


def flat_parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_alone(make_optimizer, steps, max_norm=float("inf"), **options):
    """Train in one process, with options of the model. Returns the losses and all parameters in one vector."""
    model, losses = make_model(**options), []
    optimizer = make_optimizer(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, TOKENS)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, flat_parameters(model)


def train_on_ranks(version, make_optimizer, max_norm):
    """Three steps of a class of 01_zero.ipynb, which takes (model, make_optimizer, max_norm) and has `step` and
    `flats`; all parameters, put together from the shards."""
    trained, weights = version(make_model(tied=False), make_optimizer, max_norm), {}
    for _ in range(3):
        trained.step(my_part(2))
    for flat in trained.flats:
        whole = torch.empty(len(flat.vector))
        dist.all_gather_single(whole, flat.shard.detach())
        weights.update(zip(flat.parameters, flat.views(whole), strict=True))
    return torch.cat([weights[parameter].flatten() for parameter in trained.model.parameters()])


def compare(version, worlds=(4, 3), allowed=1e-3):
    """Print how far a class's parameters are from those of one process, over the largest change in training: by SGD,
    by AdamW, and clipped; on so many ranks. Raises AssertionError where that is more than `allowed`."""
    start = train_alone(sgd, 0, tied=False)[1]
    expected = {case: train_alone(how, 3, norm, tied=False)[1] for case, (how, norm) in OPTIMIZERS.items()}
    for nproc in worlds:
        results = launch(lambda: [train_on_ranks(version, *case) for case in OPTIMIZERS.values()], nproc)
        for number, (case, weights) in enumerate(expected.items()):
            change = (weights - start).abs().max()
            worst = max((own[number] - weights).abs().max() / change for own in results).item()
            name = f"{version.__name__}, {nproc} ranks, {case}:"
            print(f"{name:32} largest difference {worst:.1e} (allowed {allowed:.0e})")
            assert worst < allowed


def two_halves():
    """What this rank has before, between and after the two halves of a mean over the ranks of one number for each rank:
    tensors [ranks], NaN where it has nothing. Only `narrow` is told the rank, which pretended ranks can do."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 1)
    gradient, mine = torch.linspace(0, 9, ranks).sin() + 0.5 * torch.randn(ranks), torch.empty(1)
    dist.reduce_scatter_single(mine, gradient)
    mine /= ranks
    between = torch.full_like(gradient, torch.nan)
    between.narrow(0, rank, 1).copy_(mine)
    whole = torch.empty_like(gradient)
    dist.all_gather_single(whole, mine)
    return gradient, between, whole


def strategy_of(version, layers, width=64, precision="fp32"):
    """A strategy of this chapter by hand, by its name, or a class of 01_zero.ipynb; the same model, optimizer and call:
    (strategy, step), where `step` takes a list of micro-batches of tokens. Neither's embedding shares its weight."""
    model = make_model(layers, width, tied=False)
    if not isinstance(version, str):
        strategy = version(model, adamw)
        return strategy, strategy.step
    kind = load(version, "by-hand")
    strategy = kind(model, adamw, Setup(make_mesh(kind.preset), precision=precision))
    return strategy, lambda parts: strategy.step([(tokens[:, :-1], tokens[:, 1:]) for tokens in parts])


def over_a_step(version, sequences=4):
    """Memory over a step of what `strategy_of` gives, on this rank, with so many short sequences a rank: what
    `memory.over_a_step` gives."""
    strategy, step = strategy_of(version, 4, 128)
    batches = [TOKENS[sequences * dist.get_rank() :][:sequences]]
    step(batches)  # AdamW has its moments from now on
    return memory.over_a_step(strategy, partial(step, batches))


def kept_and_sent(version, precision="fp32"):
    """Bytes that this rank keeps between steps, and that it sends in a step of 1 and of 4 micro-batches, for each
    parameter of what `strategy_of` gives."""
    parts = [tokens[:1] for tokens in my_part(4)]  # a sequence: the bytes are those of weights
    known = memory.live()
    strategy, step = strategy_of(version, 6, precision=precision)
    count, found = sum(p.numel() for p in make_model(6, tied=False).parameters()), []
    for micro_batches in (1, 4):
        with Ledger() as ledger:
            step(parts[:micro_batches])
        found.append(sum(entry.sent for entry in ledger.entries if entry.payload > 100) / count)  # not losses and norms
    return sum(memory.held(strategy, known).values()) / count, *found


@contextmanager
def pretend(ranks):
    """In this block, this process is rank 0 of so many ranks that are not there: calls, sizes and types are right, the
    numbers are not."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_layouts()


def counted(model):
    """Run one forward and one backward pass with fully_shard; return the ledger, and the largest share of the model's
    parameters that was whole while some layer computed, in either pass."""
    counts = []

    def note(*_):
        counts.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))

    def after_forward(_part, _inputs, output):
        note()
        output.register_hook(note)  # in the backward pass

    for part in model.modules():
        if list(part.parameters(recurse=False)):
            part.register_forward_hook(after_forward)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # see 08_fsdp_lookup.ipynb
    with Ledger() as ledger:
        loss_of(model, TOKENS[:2]).backward()
    return ledger, max(counts) / sum(p.numel() for p in model.parameters())


def print_kept_and_sent(versions, precision="fp32"):
    """For each of `versions` (title -> (name of a strategy, what `strategy_of` takes)) on two ranks: what is kept and
    sent, counted and by the formulas of 01_zero.ipynb, section 6. Raises AssertionError where the two part."""
    rows = launch(lambda: [kept_and_sent(version, precision) for _, version in versions.values()], 2)[0]
    print(
        f"bytes per parameter, {precision}  kept (formula)   sent, 1 micro-batch (formula)   4 micro-batches (formula)"
    )
    for (title, (name, _)), row in zip(versions.items(), rows, strict=True):
        g = 4 if precision == "fp32" else 2
        recipe = "float32" if g == 4 or name == "ddp" else "mixed, float32 gradients"
        sent = {
            "ddp": (8, 8), "zero1": (4 + g, 4 + g), "zero2": (4 + g, 4 * 4 + g),
            "fsdp": (4 + 2 * g, 4 * (4 + 2 * g)),
        }[name]  # fmt: skip
        expected = sum(formula(name, 1, 2, recipe).values()), sent[0] / 2, sent[1] / 2
        kept, one, four = (f"{found:5.2f} ({what:4.1f})" for found, what in zip(row, expected, strict=True))
        print(f"{title:24} {kept:>18} {one:>23} {four:>27}")
        assert all(0.9 < found / what < 1.02 for found, what in zip(row, expected, strict=True)), title
