"""What the chapter's pages try things on: eight small layers, a batch of handwritten digits, and the gradients that one
process computes for them."""

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, BATCH = 64, 96
ALLOWED = 3e-5  # float32 has about seven digits, and sums in another order are rounded differently

_digits = load_digits()  # comes with scikit-learn
IMAGES = torch.tensor(_digits.data[:BATCH] / 16, dtype=torch.float32)
LABELS = torch.tensor(_digits.target[:BATCH])


def make_model() -> nn.Sequential:
    """Seven blocks of two linear layers, and an output layer; the same weights on every rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in range(7)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def part(stage: int, stages: int) -> nn.Module:
    """One of several equal stages of the model. A slice of an nn.Sequential keeps the names of its layers."""
    model = make_model()
    return model[len(model) * stage // stages : len(model) * (stage + 1) // stages]


def gradients(layers: nn.Module) -> dict[str, torch.Tensor]:
    """name -> gradient, of the parameters that have one."""
    return {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


def compare(what: str, ranks: Sequence[dict[str, torch.Tensor]]) -> None:
    """Print how the gradients of all ranks together compare with those of one process that has the whole model.

    Two numbers: the length (norm) of ours divided by that of the expected ones, and the largest difference between two
    elements, relative to the largest expected element. Raises AssertionError where a parameter has no gradient.
    """
    model = make_model()
    cross_entropy(model(IMAGES), LABELS).backward()
    expected, found = gradients(model), {name: g for some in ranks for name, g in some.items()}
    assert found.keys() == expected.keys(), f"without gradient: {sorted(expected.keys() - found.keys())}"
    largest = max(gradient.abs().max() for gradient in expected.values())
    off = max((found[name] - gradient).abs().max() for name, gradient in expected.items()) / largest
    lengths = [torch.cat([some[name].flatten() for name in expected]).norm() for some in (found, expected)]
    print(f"{what}: {lengths[0] / lengths[1]:.4f} times the right length; largest relative difference {off:.1e}")


def receive_buffers(stage) -> tuple[int, int]:
    """Bytes in which a `torch.distributed.pipelining.PipelineStage` receives: activations, and gradients."""
    both = stage.args_recv_info, stage.grad_recv_info  # for each micro-batch, where it is received
    sizes = [[i.buffer.nbytes for infos in each.values() for i in infos if i.buffer is not None] for each in both]
    return sum(sizes[0]), sum(sizes[1])
