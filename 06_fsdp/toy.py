"""A small model, its data and its steps, for incidents in which neither model nor data matter."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from common.collectives import all_reduce_together
from course.fsdp.museum import Seen

WIDTH, CLASSES, RATE = 6, 3, 0.5


def net() -> torch.nn.Sequential:
    """The same weights on every call."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def examples(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [count, WIDTH] and classes [count] of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, WIDTH, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def mine(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """This rank's slice of each."""
    return [tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in tensors]


def mean(*tensors: torch.Tensor) -> None:
    """Replace each tensor by its mean over all ranks."""
    assert (world := dist.group.WORLD) is not None
    all_reduce_together(list(tensors), world)
    for tensor in tensors:
        tensor /= dist.get_world_size()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def norm(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(gradients(model))


def learn(model, optimizer, inputs, targets, ranks: bool) -> torch.Tensor:
    """One step of data parallelism, or of one process; the loss of the whole batch."""
    if ranks:
        inputs, targets = mine(inputs, targets)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    loss = loss.detach()
    if ranks:
        mean(loss, *gradients(model))
    optimizer.step()
    return loss


def one_process(steps: int) -> Seen:
    """Training on one process, with the whole batch at once: the norm of each step's gradients, and the parameters."""
    model, seen = net(), Seen()
    optimizer = sgd(model)
    for step in range(steps):
        inputs, targets = examples(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        seen.numbers[f"norm {step}"] = norm(model)
        optimizer.step()
    return keep(seen, model)


def keep(seen: Seen, model: torch.nn.Module, copies: bool = True) -> Seen:
    """Note a model's parameters, which are the same on all ranks where they are copies."""
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    seen.numbers |= parameters
    if copies:
        seen.copies |= parameters
    return seen
