"""What 01_ddp.ipynb has built by its end; the page after it begins with it."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

digits = load_digits()
IMAGES, LABELS = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_on_my_part(model, step):
    """The loss on the rank's part of the batch of 96 images that belongs to the step."""
    mine = torch.arange(96 * step, 96 * (step + 1))[dist.get_rank() :: dist.get_world_size()]
    return nn.functional.cross_entropy(model(IMAGES[mine]), LABELS[mine])


def flatten(tensors):
    """The tensors' numbers in one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Buckets:
    """Averages gradients over the ranks, bucket by bucket, as long as every backward pass reaches every parameter once.

    model: has the same weights on all ranks
    cap:   a bucket is full when it holds this many bytes
    """

    def __init__(self, model, cap=1):  # in bytes; with 1, each parameter has a bucket of its own
        self.buckets = [[]]
        for parameter in reversed(list(model.parameters())):
            if self.buckets[-1] and sum(p.nbytes for p in self.buckets[-1]) >= cap:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.flat = [torch.zeros(sum(p.numel() for p in bucket)) for bucket in self.buckets]
        self.zero_grad()

    def zero_grad(self):
        """Gradients become zeros in their places in the buckets, where the backward pass adds to them."""
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            flat.zero_()
            for parameter, place in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = place.view_as(parameter)
        self.missing = [set(bucket) for bucket in self.buckets]
        self.works = []

    def ready(self, parameter):
        """Autograd calls this when the parameter's gradient is complete."""
        its_bucket = next(missing for missing in self.missing if parameter in missing)
        its_bucket.remove(parameter)
        self.send_complete()

    def send_complete(self):
        """Send complete buckets, in the order of their numbers."""
        while len(self.works) < len(self.flat) and not self.missing[len(self.works)]:
            self.works.append(self.send(self.flat[len(self.works)]))

    def send(self, flat):
        """Start to replace the bucket by its mean over the ranks."""
        flat /= dist.get_world_size()
        return dist.all_reduce(flat, async_op=True)

    def finish(self):
        """Wait for all buckets that have been sent."""
        for work in self.works:
            work.wait()
