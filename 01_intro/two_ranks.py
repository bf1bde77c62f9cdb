"""The loop of page 1's train.py on two ranks, without DistributedDataParallel: what becomes of the gradients is the
caller's choice."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from common.lab.launch import launch


def two_ranks(
    after_backward: Callable[[Iterable[nn.Parameter]], None],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.1,
) -> list[str]:
    """The losses of steps 5, 10, 15 and 20, with four decimals, of a training on two ranks.

    after_backward: called on each rank between `backward()` and `step()` with the model's parameters
    optimizer, lr:  makes the optimizer, as `optimizer(model.parameters(), lr=lr)`
    """
    return launch(_train, 2, (after_backward, optimizer, lr))[0]


def _train(after_backward, optimizer, lr: float) -> list[str]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    features = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*features, nn.Flatten(), nn.Linear(64 * 64, 10))
    stepper = optimizer(model.parameters(), lr=lr)
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    shuffle = torch.Generator().manual_seed(1)
    for step in range(1, 21):
        mine = torch.randint(len(images), (512,), generator=shuffle)[rank::world_size]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        stepper.zero_grad()
        loss.backward()
        after_backward(model.parameters())
        stepper.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if step % 5 == 0:
            losses.append(f"{mean.item():.4f}")
    return losses
