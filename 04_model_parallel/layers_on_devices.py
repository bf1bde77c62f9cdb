"""Layers on several devices of one process: `.to(device)` where the next part begins, and autograd does the rest.

PyTorch needs no more than this. Start it with --strategy model, on one process; it takes the GPUs that it finds.
"""

import sys

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from common.model import cross_entropy
from common.strategy import Strategy
from course.model_parallel import by_hand_layers as by_hand


class LayersOnDevices(Strategy):
    """One process reads the whole batch, and holds one part of the GPT on each of its devices."""

    data_axes = ()
    tasks = ("text",)

    def __init__(self, model, make_optimizer, setup, devices=None, ends=None):
        super().__init__(setup)
        self.model = model
        layers = by_hand.layers_of(model)
        self.devices = (devices or devices_of(self.device))[: len(layers)]
        ends = ends or by_hand.cut([by_hand.count(layer) for layer in layers.values()], len(self.devices))
        self.places = [self.devices[sum(end <= number for end in ends)] for number in range(len(layers))]
        self.layers = list(layers.values())
        self.ties_weights = model.head.out.weight is model.embedding.tokens.weight
        for layer, device in reversed(list(zip(self.layers, self.places, strict=True))):
            layer.to(device)  # a tied weight moves with each of its two layers: the embedding, moved last, keeps it
        self.optimizer = make_optimizer(self.model.parameters())

    def step(self, micro_batches):
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.devices[-1])
        for inputs, targets in micro_batches:
            # each micro-batch is one of len(micro_batches) equal parts of the batch whose mean we want
            part = self.forward(inputs, targets) / len(micro_batches)
            self.scaler.scale(part).backward()
            loss += part.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, grad_norm

    def evaluate(self, inputs, targets):
        with torch.no_grad():
            return self.forward(inputs, targets)

    def forward(self, inputs, targets):
        """The loss, on the last device. In the backward pass each `.to` sends the gradient back."""
        x = inputs
        with self.autocast():
            for layer, device in zip(self.layers, self.places, strict=True):
                x = x.to(device)
                if self.ties_weights and layer is self.model.head:
                    # its weight lives with the embedding: a copy for this pass
                    x = functional_call(layer, {"out.weight": layer.out.weight.to(device)}, (x,))
                else:
                    x = layer(x)
            return cross_entropy(x, targets.to(x.device))


def devices_of(device: torch.device) -> list[torch.device]:
    """The GPUs of this machine, if it has several and this process is alone; else its one device, twice, and a note."""
    if device.type == "cuda" and dist.get_world_size() == 1 and torch.cuda.device_count() > 1:
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if dist.get_rank() == 0:
        print(f"note: no two GPUs for the parts of the model; all of them are on '{device}'", file=sys.stderr)
    return [device] * 2
