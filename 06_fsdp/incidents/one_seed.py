"""The model trained with tensor parallelism is worse than its smaller predecessor. Nothing crashes.

thread: https://huggingface.co/spaces/HuggingFaceTB/smol-training-playbook
        https://github.com/pytorch/pytorch/issues/168058 https://github.com/modelscope/ms-swift/pull/7944
net:    two ranks' parts of a weight that are compared, before the first step; equality with one process
cause:  Each rank draws its own parts of the weights, and all ranks draw them from one seed. So the second half of
        every layer is a copy of the first. Tensor parallelism sends both the same input and the same gradient, and
        equal numbers with equal gradients stay equal: a layer of 128 units learns as one of 64, for as long as the
        run lasts.
"""

import functools

import torch
import torch.distributed as dist

from common.data import Text, global_batch
from common.lab.launch import launch
from common.mesh import axis, make_mesh
from common.model import GPT
from common.model import cross_entropy as whole_cross_entropy
from course.fsdp.museum import Seen
from course.model_parallel.by_hand_tensor import CUT, apply_tensor_parallel, cross_entropy

RANKS, REPORTED, EXPECTED = 2, (0.5, 0.5), 1.0
STEPS, BATCH, CONTEXT, SEED, RATE = 3, 16, 16, 7, 3e-3


def seed_of(rank):
    """From which seed a rank of the tensor axis draws its parts of the weights."""
    # right: return SEED + rank
    return SEED  # wrong


def draw(part, seed):
    """Values for one rank's part of a weight, of the standard deviation that all weights have."""
    return 0.02 * torch.randn(part.shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def text():
    """Squares in decimal: the same bytes on every machine, where Python's own library differs between versions."""
    return Text(CONTEXT, text=b" ".join(b"%d" % (number * number) for number in range(10_000)))


def make_model():
    torch.manual_seed(3)
    return GPT(layers=2, width=32, heads=4, context=CONTEXT)


def make_parallel():
    """No rank ever has the whole model: each draws its own parts. What every rank has whole is made from one seed."""
    model, place = make_model(), axis(make_mesh({"tensor": -1}), "tensor")
    for number, part in enumerate(cut := apply_tensor_parallel(model, place)):
        if part.dim() > 1:
            part.data = draw(part, 1000 * number + seed_of(place.rank))
    return model, cut


def make_whole():
    """The same model on one process, where the parts are drawn from different seeds, and put together."""
    model = make_model()
    cut = [(name, p) for name, p in model.named_parameters() if name.endswith(tuple(CUT))]
    for number, (name, parameter) in enumerate(cut):
        if parameter.dim() > 1:
            along = next(dim for suffix, dim in CUT.items() if name.endswith(suffix))
            halves = parameter.data.chunk(RANKS, along)
            parts = [draw(half, 1000 * number + SEED + rank) for rank, half in enumerate(halves)]
            parameter.data = torch.cat(parts, along)
    return model


def train(model, loss_of, steps, seed=SEED):
    optimizer, examples, seen = torch.optim.AdamW(model.parameters(), lr=RATE), text(), Seen()
    for step in range(steps):
        inputs, targets = examples.batch(global_batch(seed, step, BATCH, examples.size))
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        seen.numbers[f"loss {step}"] = loss.detach()
        optimizer.step()
    return seen


def on_rank(steps=STEPS, seed=SEED):
    model, cut = make_parallel()
    seen = train(model, lambda logits, targets: cross_entropy(logits, targets, dist.group.WORLD), steps, seed)
    seen.copies = {name: p.detach() for name, p in model.named_parameters() if p not in cut}
    seen.parts = {name: p.detach() for name, p in model.named_parameters() if p in cut}
    return seen


def alone(steps=STEPS, seed=SEED):
    return train(make_whole(), whole_cross_entropy, steps, seed)


def same_parts(steps):
    """For each cut weight, the largest difference between the two ranks' parts after some steps."""
    first, second = launch(lambda: on_rank(steps).parts, RANKS)
    return {name: (first[name] - second[name]).abs().max().item() for name in first}


def independent_rows(steps):
    """Of a layer's first matrix, put together from both ranks: how many rows there are, and their rank."""
    up = torch.cat([parts["blocks.0.mlp.up.weight"] for parts in launch(lambda: on_rank(steps).parts, RANKS)])
    return len(up), len(torch.unique(up, dim=0))


def last_loss(steps, seed=SEED):
    """The mean loss of the last ten steps, on the ranks."""
    text()  # once here, not in each rank
    numbers = launch(lambda: on_rank(steps, seed), RANKS)[0].numbers
    return sum(numbers[f"loss {step}"].item() for step in range(steps - 10, steps)) / 10


def effect(*_):
    """The share of the rows of a layer's first matrix that are different rows."""
    rows, different = independent_rows(1)
    return different / rows
