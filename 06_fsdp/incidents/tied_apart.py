"""The loss of a pipeline jumps at a restart, and falls back in a few steps.

thread: https://github.com/bigscience-workshop/bigscience/blob/9e64edec/train/tr11-176B-ml/chronicles-prequel.md
net:    replicas that are compared, after one step; equality with one process, in the first step
cause:  A tied weight is one tensor in the model and two on the ranks of a pipeline, one as embedding and one as
        output layer. Each sees the gradient of its own place. Without their sum, the two drift apart from the first
        step on, and training goes on with two weights. A checkpoint keeps one of them, and the restart puts it in
        both places.
"""

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import GPT, cross_entropy
from common.strategy import Setup
from course.fsdp.museum import Seen
from course.model_parallel.by_hand_layers import SplitLayers

RANKS, REPORTED, EXPECTED = 2, (1.2, 10.0), 1.0
STEPS, BATCH, CONTEXT, VOCABULARY = 3, 8, 8, 32
TIED = "embedding.tokens.weight"


class Stages(SplitLayers):
    """Two stages. The embedding is on the first, the output layer on the last: one weight, on two ranks."""

    def add_tied_gradients(self):
        # right: super().add_tied_gradients()
        pass  # wrong


def make_model():
    torch.manual_seed(3)
    return GPT(layers=2, width=16, heads=2, context=CONTEXT, vocabulary=VOCABULARY, tied=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def batch(step):
    """Text in which a token tells much of the next one: its double, plus noise."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(CONTEXT):
        noise = torch.randint(2, (BATCH, 1), generator=generator)
        tokens = torch.cat([tokens, (2 * tokens[:, -1:] + noise) % VOCABULARY], dim=1)
    return tokens[:, :-1], tokens[:, 1:]


def make_stages(dtype=torch.float32):
    torch.set_default_dtype(dtype)
    stages = Stages(make_model(), sgd, Setup(make_mesh({"pipeline": -1}), None, max_norm=100.0))
    stages.dtype = dtype  # in which activations are sent
    return stages


def train(strategy, steps, first=0):
    seen = Seen()
    for step in range(first, first + steps):
        loss, norm = strategy.step([batch(step)])
        seen.numbers |= {f"loss {step}": loss, f"norm {step}": norm}
        seen.norms.append(norm.item())
    return seen


def on_rank(steps=STEPS):
    strategy = make_stages()
    seen = train(strategy, steps)
    seen.copies = {"tied weight": strategy.tied.detach().clone()}
    seen.numbers |= seen.copies
    return seen


def alone(steps=STEPS):
    model, seen = make_model(), Seen()
    optimizer = sgd(model.parameters())
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": clip_grad_norm_(model.parameters(), 100.0)}
        optimizer.step()
    seen.numbers["tied weight"] = model.get_parameter(TIED).detach()
    return seen


def restarted(before=60, after=20):
    """The losses before and after a restart. A checkpoint has one tied weight, that of the first stage.

    In float64: in float32, after so many long steps, a processor that adds in another order has other losses.
    """

    def run():
        strategy = make_stages(torch.float64)
        losses = train(strategy, before).numbers
        saved = {name: tensor.clone() for name, tensor in strategy.model.state_dict().items()}
        dist.broadcast(saved[TIED if strategy.first else "head.out.weight"], src=0)
        again = make_stages(torch.float64)
        again.model.load_state_dict(saved)
        losses |= train(again, after, before).numbers
        return [losses[f"loss {step}"].item() for step in range(before + after)]

    return launch(run, RANKS)[0]


def apart(steps=60):
    """After every tenth step, how far the two copies are apart, relative to the weight."""

    def run():
        strategy, found = make_stages(), []
        for first in range(0, steps, 10):
            train(strategy, 10, first)
            found.append(strategy.tied.detach().clone())
        return found

    return [((a - b).norm() / a.norm()).item() for a, b in zip(*launch(run, RANKS), strict=True)]


def parts():
    """The length of the tied weight's gradient in the first step: of each stage, and of one process."""
    model = make_model()
    inputs, targets = batch(0)
    cross_entropy(model(inputs), targets).backward()
    found = launch(lambda: (s := make_stages(), train(s, 1))[0].tied.grad.norm().item(), RANKS)
    return [*found, model.get_parameter(TIED).grad.norm().item()]


def effect(*_):
    """How many times as high the loss is just after the restart as just before, each a mean over three steps. Raises
    AssertionError where twenty steps later it hasn't fallen back by half."""
    losses = restarted()
    before, after = sum(losses[57:60]) / 3, sum(losses[60:63]) / 3
    assert min(losses[63:]) < (before + after) / 2, losses[57:]
    return after / before
