"""The experts' gradients are twice too large, and the loss curve looks the same.

thread: https://github.com/pytorch/pytorch/issues/160285 https://github.com/NVIDIA/Megatron-LM/pull/5956
        https://github.com/databricks/megablocks/pull/20
net:    equality with one process, in the first step
cause:  The backward all-to-all has already brought each expert the gradients of all ranks' tokens, so an expert's
        gradient is a sum over the whole batch. But it is divided by the number of the expert's replicas, 1 here,
        where every other gradient is divided by the number of ranks that read a part of the batch, 2 here.
"""

import torch
from torch.nn.utils import clip_grad_norm_

from common.collectives import all_reduce_together
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import cross_entropy
from common.strategy import Setup
from course.fsdp.museum import Seen
from course.model_parallel.by_hand_experts import ExpertParallel
from course.model_parallel.moe_model import MixtureGPT

RANKS, REPORTED, EXPECTED = 2, (1.999, 2.001), 1.0
STEPS, BATCH, CONTEXT, VOCABULARY = 3, 8, 8, 32


class Experts(ExpertParallel):
    """Each rank reads a slice of the batch, and holds half of the experts."""

    def average_gradients(self):
        """Make the gradients those of the mean over all ranks' slices."""
        experts, others = self.gradients()
        all_reduce_together(others, self.readers.group)
        all_reduce_together(experts, self.replicas.group)
        for gradient in others:
            gradient /= self.data_size
        for gradient in experts:
            # right: gradient /= self.data_size
            gradient /= self.replicas.size  # wrong


def make_model():
    torch.manual_seed(3)
    return MixtureGPT(layers=1, width=16, heads=2, context=CONTEXT, vocabulary=VOCABULARY, experts=4)


def make_optimizer(name):
    if name == "AdamW":
        return lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1)


def batch(step):
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def on_rank(steps=STEPS, optimizer="SGD"):
    strategy = Experts(make_model(), make_optimizer(optimizer), Setup(make_mesh({"expert": -1}), None, max_norm=100.0))
    seen = Seen()
    for step in range(steps):
        inputs, targets = (part.chunk(strategy.data_size)[strategy.data_rank] for part in batch(step))
        loss, norm = strategy.step([(inputs, targets)])
        seen.numbers |= {f"loss {step}": loss, f"norm {step}": norm}
        seen.norms.append(norm.item())
    seen.copies = {name: p.detach() for name, p in strategy.model.named_parameters() if p not in strategy.cut}
    seen.numbers |= seen.copies
    for name, part in strategy.model.named_parameters():
        if part in strategy.cut:
            place = strategy.cut[part][1]
            seen.numbers[f"{name} of rank {place.rank}"] = part.detach()
            seen.numbers[f"gradient of {name} of rank {place.rank}"] = part.grad
    return seen


def alone(steps=STEPS, optimizer="SGD"):
    model, seen = make_model(), Seen()
    stepping = make_optimizer(optimizer)(model.parameters())
    for step in range(steps):
        inputs, targets = batch(step)
        stepping.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        (loss + model.auxiliary_loss()).backward()
        seen.numbers |= {f"loss {step}": loss.detach(), f"norm {step}": clip_grad_norm_(model.parameters(), 100.0)}
        stepping.step()
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            seen.numbers[name] = parameter.detach()
            continue
        for rank, (part, gradient) in enumerate(zip(parameter.chunk(RANKS), parameter.grad.chunk(RANKS), strict=True)):
            seen.numbers[f"{name} of rank {rank}"] = part.detach()
            seen.numbers[f"gradient of {name} of rank {rank}"] = gradient
    return seen


def effect(*_):
    """How many times too long the experts' gradients are, in the first step."""
    ranks, one = launch(lambda: on_rank(1), RANKS), launch(lambda: alone(1), 1)[0]
    names = [name for name in one.numbers if name.startswith("gradient")]
    found = [
        rank.numbers[name].norm().item() / one.numbers[name].norm().item()
        for rank in ranks
        for name in names
        if name in rank.numbers
    ]
    return sum(found) / len(found)


def losses(optimizer, steps=60):
    """The loss of every tenth step, on the ranks and on one process."""
    ranks, one = launch(lambda: on_rank(steps, optimizer), RANKS)[0], launch(lambda: alone(steps, optimizer), 1)[0]
    return [
        (step, ranks.numbers[f"loss {step}"].item(), one.numbers[f"loss {step}"].item()) for step in range(9, steps, 10)
    ]
