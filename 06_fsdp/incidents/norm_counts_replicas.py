"""The gradient norm is up to one and a half times too large under tensor parallelism, and the loss is right.

thread: https://github.com/ROCm/TransformerEngine/pull/715 https://github.com/NVIDIA-NeMo/RL/pull/3788
        https://github.com/meta-pytorch/torchtune/issues/2420
net:    types, before any rank starts; equality with one process, in the first step
cause:  All gradients are squared, summed on each rank, and summed over the ranks. That is right for weights that are
        cut. A weight that every rank has whole is counted once for each rank.
"""

import torch
from torch.nn.utils import clip_grad_norm_

from common.collectives import global_norm
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import GPT, cross_entropy
from common.strategy import Setup
from course.fsdp.museum import Seen
from course.model_parallel.by_hand_tensor import CUT, TensorParallelByHand

RANKS, REPORTED, EXPECTED = 4, (1.36, 1.52), 1.0
STEPS, BATCH, CONTEXT, VOCABULARY = 3, 8, 16, 64


class Tensor(TensorParallelByHand):
    """Every rank holds a part of each large weight, and all of the small ones: norms, biases, positions."""

    def grad_norm(self):
        """The 2-norm over the whole model."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parts = [parameter.grad for parameter in trained if parameter in self.cut]
        whole = [parameter.grad for parameter in trained if parameter not in self.cut]
        # right: return global_norm([(parts, [self.group]), (whole, [])], self.device)
        return global_norm([(parts + whole, [self.group])], self.device)  # wrong


def make_model(width=64):
    torch.manual_seed(3)
    return GPT(layers=2, width=width, heads=4, context=CONTEXT, vocabulary=VOCABULARY, tied=False)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def batch(step):
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def on_rank(max_norm=0.1, steps=STEPS):
    strategy, seen = Tensor(make_model(), sgd, Setup(make_mesh({"tensor": -1}), None, max_norm=max_norm)), Seen()
    for step in range(steps):
        loss, norm = strategy.step([batch(step)])
        seen.numbers |= {f"loss {step}": loss, f"norm {step}": norm}
        seen.norms.append(norm.item())
    seen.copies = {name: p.detach() for name, p in strategy.model.named_parameters() if p not in strategy.cut}
    seen.numbers |= seen.copies
    return seen


def alone(max_norm=0.1, steps=STEPS):
    model, seen = make_model(), Seen()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": clip_grad_norm_(model.parameters(), max_norm)}
        optimizer.step()
    whole = [name for name, _ in model.named_parameters() if name not in cut_names()]
    seen.numbers |= {name: model.get_parameter(name).detach() for name in whole}
    return seen


def cut_names():
    return [name for name, _ in make_model().named_parameters() if name.endswith(tuple(CUT))]


def norms(ranks, max_norm=100.0):
    """The logged norm of each step on this many ranks, where nothing is clipped."""
    return launch(lambda: on_rank(max_norm).norms, ranks)[0]


def share(width=64):
    """Which part of the first step's squared norm belongs to what every rank holds whole."""
    model = make_model(width)
    inputs, targets = batch(0)
    cross_entropy(model(inputs), targets).backward()
    squares = {name: p.grad.square().sum().item() for name, p in model.named_parameters()}
    return sum(square for name, square in squares.items() if name not in cut_names()) / sum(squares.values())


def implied_share(ratio, ranks):
    """The share that makes a norm `ratio` times too large on `ranks` ranks, from ratio^2 = 1 + (ranks - 1) share."""
    return (ratio**2 - 1) / (ranks - 1)


def losses(max_norm, steps=30):
    """The loss of every fifth step on the ranks and on one process."""
    ranks, one = launch(lambda: on_rank(max_norm, steps), 2)[0], launch(lambda: alone(max_norm, steps), 1)[0]
    return [
        (step + 1, ranks.numbers[f"loss {step}"].item(), one.numbers[f"loss {step}"].item())
        for step in range(4, steps, 5)
    ]


def effect(*_):
    """How many times too large the norm of the first step is."""
    return norms(RANKS)[0] / launch(lambda: alone(100.0, 1), 1)[0].numbers["norm 0"].item()
