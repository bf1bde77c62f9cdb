"""The loss is right, and so is every gradient but the router's.

thread: https://github.com/huggingface/transformers/pull/48205
        https://github.com/huggingface/transformers/issues/48687
net:    types, before any rank starts; replicas that are compared, after one step; equality with one process
cause:  Every rank has all tokens and adds up what its own experts give. On the way back, a rank knows how the loss
        depends on the gates of its own experts alone: the gates are where one value goes to several ranks, so their
        gradients have to be summed there, as f does for x. It was forgotten for the gates, which hold the only path
        to the router.
"""

import torch
from torch.nn import functional as F

from common.lab.launch import launch
from common.mesh import axis, make_mesh
from common.model import GPT, cross_entropy
from course.fsdp.museum import Seen, difference
from course.model_parallel.by_hand_tensor import f, g
from course.model_parallel.moe_model import MixtureGPT

RANKS, REPORTED, EXPECTED = 2, (0.05, 10.0), 0.0
STEPS, BATCH, CONTEXT, VOCABULARY, EXPERTS = 3, 8, 8, 32, 4


def mixture(layer, place, x):
    """A mixture whose experts are divided over the ranks, all of which have all tokens x [batch, time, width]."""
    gates = layer.router(x).softmax(dim=-1)
    chosen = torch.zeros_like(gates).scatter(-1, gates.topk(layer.top_k).indices, 1.0)
    gates = gates * chosen
    x = f(x, place.group)
    # right: gates = f(gates, place.group)
    gates = gates.contiguous()  # wrong
    here = range(EXPERTS * place.rank // place.size, EXPERTS * (place.rank + 1) // place.size)
    outputs = layer.experts([x] * len(here))
    return g(sum(gates[..., number, None] * output for number, output in zip(here, outputs, strict=True)), place.group)


def make_model():
    torch.manual_seed(3)
    return MixtureGPT(layers=1, width=16, heads=2, context=CONTEXT, vocabulary=VOCABULARY, experts=EXPERTS)


def divided(model, place):
    """Each rank keeps its experts, and everything else whole."""
    for block in model.blocks:
        layer = block.mlp
        for parameter in layer.experts.parameters():
            parameter.data = parameter.data.chunk(place.size)[place.rank].clone()
        layer.forward = lambda x, layer=layer: mixture(layer, place, x)
    return model


def batch(step):
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def train(model, seen, rank=0, size=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        seen.numbers[f"loss {step}"] = loss.detach()
        if step == 0:
            for name, parameter in model.named_parameters():
                record(seen, f"gradient of {name}", parameter.grad, rank, size)
        optimizer.step()
    for name, parameter in model.named_parameters():
        record(seen, name, parameter.detach(), rank, size)
    return seen


def record(seen, name, value, rank, size):
    """Experts by the rank that has them, which is 0 and 1 on one process."""
    if ".experts." not in name:
        seen.numbers[name] = value.clone()
        if not name.startswith("gradient"):
            seen.copies[name] = value.clone()
    else:
        for number, part in enumerate([value] if size > 1 else value.chunk(RANKS)):
            seen.numbers[f"{name}, part {rank + number}"] = part.clone()


def on_rank():
    place = axis(make_mesh({"tensor": -1}), "tensor")
    return train(divided(make_model(), place), Seen(), place.rank, place.size)


class Whole(torch.nn.Module):
    """The mixture as one process computes it: all experts for all tokens."""

    def __init__(self, layer):
        super().__init__()
        self.router, self.experts, self.top_k = layer.router, layer.experts, layer.top_k

    def forward(self, x):
        logits = self.router(x)
        kept = logits >= logits.topk(self.top_k, dim=-1).values[..., -1:]
        weights = F.softmax(logits, dim=-1) * kept
        return torch.einsum("bte,ebtw->btw", weights, torch.stack(self.experts([x] * EXPERTS)))


def alone():
    model: GPT = make_model()
    for block in model.blocks:
        block.mlp = Whole(block.mlp)
    return train(model, Seen())


def wrong_by():
    """For each gradient of the first step: its largest difference from one process, over the ranks."""
    one, ranks = launch(alone, 1)[0], launch(on_rank, RANKS)
    found = {}
    for name, expected in one.numbers.items():
        got = [rank.numbers[name] for rank in ranks if name in rank.numbers]
        found[name] = max(((value - expected).abs().max() / expected.abs().max()).item() for value in got)
    return found


def routers():
    """The router's gradient in the first step: of one process, rank 0, rank 1, and the ranks' sum."""
    name = "gradient of blocks.0.mlp.router.weight"
    one, ranks = launch(alone, 1)[0].numbers[name], [rank.numbers[name] for rank in launch(on_rank, RANKS)]
    return [one, *ranks, sum(ranks)]


def of_each_rank():
    """The lengths of these."""
    return [gradient.norm().item() for gradient in routers()]


def effect(*_):
    """By how much of its largest element the router's gradient is wrong. Raises AssertionError where the ranks'
    gradients are neither parts of the right one, which is their sum, nor all of them right."""
    one, *ranks, total = routers()
    wrong = max(difference(gradient, one) for gradient in ranks)
    assert min(wrong, difference(total, one)) < 1e-4, wrong
    return wrong
