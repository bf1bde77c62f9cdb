"""A GPT with mixtures of experts, as one process computes it: the definition that expert parallelism must equal.

Every token goes through every expert, and all but top_k of the results get weight zero (Shazeer et al. 2017,
equation 1): that computes far too much, and is easy to believe. by_hand_experts.py sends each token to its experts
only, and shares none of this arithmetic but the experts' own.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from common.errors import UserError
from common.model import GPT, VOCABULARY, initialise


class MixtureGPT(GPT):
    """The GPT with a mixture of experts in place of each block's MLP.

    capacity_factor: the capacity of an expert, relative to an even share of an example's choices (Fedus et al. 2021,
                     section 2.2); experts / top_k is enough for all
    balance:         weight of the load-balancing loss (the alpha of their section 2.2)
    """

    def __init__(
        self, layers, width, heads, context, vocabulary=VOCABULARY, tied=True,
        experts=8, top_k=2, capacity_factor=1.25, balance=0.01,
    ):  # fmt: skip
        super().__init__(layers, width, heads, context, vocabulary, tied)
        self.balance = balance
        for block in self.blocks:
            block.mlp = Mixture(width, experts, top_k, capacity_factor, std=0.02 / (2 * layers) ** 0.5)

    def auxiliary_loss(self) -> torch.Tensor:
        """What the last forward pass adds to the loss that is minimised: a mean over examples, like the loss."""
        return self.balance * sum(block.mlp.imbalance for block in self.blocks)  # type: ignore[union-attr, misc]  # Mixtures


class Experts(nn.Module):
    """`number` MLPs of the same shape, their weights stacked: weight [number, to, from], bias [number, to]."""

    def __init__(self, number: int, width: int, std: float):
        super().__init__()
        self.up = nn.Parameter(0.02 * torch.randn(number, 4 * width, width))
        self.up_bias = nn.Parameter(torch.zeros(number, 4 * width))
        self.down = nn.Parameter(std * torch.randn(number, width, 4 * width))
        self.down_bias = nn.Parameter(torch.zeros(number, width))

    def forward(self, inputs):
        """One tensor [..., width] for each expert -> one of the same shape from each."""
        weights = zip(inputs, self.up, self.up_bias, self.down, self.down_bias, strict=True)
        return [F.linear(F.gelu(F.linear(x, up, a)), down, b) for x, up, a, down, b in weights]


class Router(nn.Linear):
    """Activations [..., width] -> logits [..., experts], in float32 also under autocast: exponentials of 16-bit logits
    are unstable, and two experts that are nearly as probable would be chosen by rounding (Fedus et al. 2021, section
    2.4)."""

    def __init__(self, width: int, experts: int):
        super().__init__(width, experts, bias=False)
        initialise(self)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight.float())


class Mixture(nn.Module):
    """[batch, time, width] -> the same shape; leaves, as tensors, the `imbalance` of its last input, and the number of
    choices that it `dropped`."""

    def __init__(self, width: int, experts: int, top_k: int, capacity_factor: float, std: float):
        super().__init__()
        if top_k > experts:
            raise UserError(f"a token cannot go to {top_k} of {experts} experts; choose top-k of at most {experts}")
        self.number, self.top_k, self.capacity_factor = experts, top_k, capacity_factor
        self.experts = Experts(experts, width, std)
        self.router = Router(width, experts)

    def capacity(self, time: int) -> int:
        """How many tokens of an example of `time` tokens an expert takes (GShard, section 2.2, for groups of one
        example): it depends on nothing but the example, however the batch is divided."""
        return math.ceil(self.capacity_factor * self.top_k * time / self.number)

    def forward(self, x):
        probabilities = self.router(x).softmax(dim=-1)  # [batch, time, experts], as are the next four
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(self.top_k).indices, 1.0)
        gates = probabilities * chosen
        if self.top_k > 1:  # with one choice, a gate of 1 would leave the router without a gradient (Switch)
            gates = gates / gates.sum(dim=-1, keepdim=True)
        kept = chosen * (chosen.cumsum(dim=1) <= self.capacity(x.shape[1]))  # first come, first served
        # experts x share of the choices x mean probability, summed: 1 when all is even (Switch, equations 4 to 6)
        shares = chosen.mean(dim=1) / self.top_k
        self.imbalance = self.number * (shares * probabilities.mean(dim=1)).sum(dim=-1).mean()
        self.dropped = (chosen.sum() - kept.sum()).long()
        outputs = self.experts([x] * self.number)
        return sum((gates * kept)[..., number, None] * output for number, output in enumerate(outputs)).to(x.dtype)
