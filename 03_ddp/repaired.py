"""The four things that break the first buckets (02_reducer.ipynb), with `Reducer`, beside one process with all data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.lab.launch import launch
from course.ddp.by_hand import Reducer
from course.ddp.first_buckets import flatten, loss_on_my_part, make_model

GRADIENTS = {"a": 1, "b": 10, "c": 100}  # of three layers, of which rank 1 leaves out b


def reducer(model, **options):
    """With a bucket for each parameter."""
    return Reducer(model, dist.group.WORLD, bucket_mb=1e-6, **options)


def train(model):
    """Ten steps."""
    averaging, optimizer = reducer(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        averaging.zero_grad()
        loss_on_my_part(model, step).backward()
        averaging.finish()
        optimizer.step()


def seeded_by_rank():
    torch.manual_seed(dist.get_rank())
    model = make_model()
    train(model)
    return flatten(model.parameters())


def two_backward_passes():
    torch.manual_seed(0)
    model = make_model()
    averaging = reducer(model)
    with averaging.no_sync():
        loss_on_my_part(model, 0).backward()
    loss_on_my_part(model, 1).backward()
    averaging.finish()
    return flatten(parameter.grad for parameter in model.parameters())


def without_b_on_rank_1():
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in GRADIENTS})
    averaging = reducer(layers, find_unused=True)
    shares = ["abc", "ac"] if dist.get_world_size() == 1 else [["abc", "ac"][dist.get_rank()]]  # one process has both
    outputs = [GRADIENTS[name] * layers[name](torch.ones(1)) for share in shares for name in share]
    (sum(outputs) / len(shares)).backward()
    averaging.finish()
    return flatten(layer.weight.grad for layer in layers.values())


def normalizing_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def with_batch_norm():
    model = normalizing_model()
    train(model)
    return model[1].running_mean


def with_batch_norm_and_pytorch():
    ddp = DistributedDataParallel(normalizing_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        loss_on_my_part(ddp, step).backward()
        optimizer.step()
    return ddp.module[1].running_mean


REPAIRED = {
    seeded_by_rank: "weights",
    two_backward_passes: "gradients",
    without_b_on_rank_1: "gradients",
    with_batch_norm: "running means",
}  # what each returns


def compare():
    """Print by how much two ranks differ from each other, and from one process."""

    def all_cases():
        return [case() for case in REPAIRED]

    (alone,), (first, second) = launch(all_cases, nproc=1), launch(all_cases, nproc=2)
    results = zip(REPAIRED.values(), alone, first, second, strict=True)
    for number, (what, expected, ours, others) in enumerate(results, start=1):
        apart, off = ((result - ours).abs().max() for result in (others, expected))
        means = "; gradients {:g}, {:g}, {:g} (right: 1, 5, 100)".format(*ours.tolist()) if number == 3 else ""
        print(f"{number}. {what} of ranks 0 and 1 differ by {apart:.0e} (right: 0);", end=" ")
        print(f"rank 0 and one process: largest difference {off:.0e}{means}")
    first, second = launch(with_batch_norm_and_pytorch, nproc=2)
    apart = (first - second).abs().max()
    print(f"4. with DistributedDataParallel, running means of ranks 0 and 1 differ by {apart:.0e}")
