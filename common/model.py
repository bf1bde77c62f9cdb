"""The two models of the course: a GPT on bytes, and a small ResNet on images.

The GPT's parts are a plain sequence, embedding, block, block, ..., head, so that later chapters can cut it
between any two of them.
"""

import torch
from torch import nn
from torch.nn import functional as F

from common.constants import VOCABULARY


class GPT(nn.Module):
    """Tokens [batch, time] int64 -> logits [batch, time, vocabulary].

    A decoder-only transformer with the pre-norm blocks of GPT-2 (Radford et al. 2019, section 2.3). With `tied`,
    the output layer's weight *is* the embedding's (Press & Wolf 2017).
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int = VOCABULARY, tied=True):
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = Head(width, vocabulary)
        self.apply(initialise)
        for block in blocks:  # keeps the variance of the residual sum independent of depth (GPT-2)
            nn.init.normal_(block.attention.out.weight, std=0.02 / (2 * layers) ** 0.5)
            nn.init.normal_(block.mlp.down.weight, std=0.02 / (2 * layers) ** 0.5)
        if tied:
            self.head.out.weight = self.embedding.tokens.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Embedding(nn.Module):
    """Tokens [batch, time] -> activations [batch, time, width]: what each token is plus where it stands."""

    def __init__(self, vocabulary: int, context: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """[batch, time, width] -> the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Causal self-attention over `heads` heads.

    No biases before the softmax: a bias on the keys has a gradient of exactly zero (it shifts all scores of a
    row alike), and AdamW would blow the rounding noise in its place up to full-sized steps.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        # [batch, time, width] -> [batch, heads, time, width / heads]
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    """[batch, time, width] -> logits [batch, time, vocabulary]."""

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def initialise(module: nn.Module) -> None:
    """GPT-2's start: weights from a normal distribution of standard deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_resnet(channels: int, classes: int) -> nn.Module:
    """Images [batch, channels, height, width] -> logits [batch, classes].

    torchvision's ResNet with one block a stage, for small pictures: a 3x3 stem without pooling (He et al. 2016,
    section 4.2). GroupNorm (Wu & He 2018) stands in for BatchNorm, whose result for one example depends on which
    others share its micro-batch: with it, no two ways to split a batch train alike.
    """
    from common.vision import torchvision

    model = torchvision.models.ResNet(
        torchvision.models.resnet.BasicBlock,
        [1, 1, 1, 1],
        num_classes=classes,
        norm_layer=lambda width: nn.GroupNorm(8, width),
    )
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss over all predictions: logits [..., classes] against targets [...] int64. A scalar."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def children_or_items(model: nn.Module) -> list[nn.Module]:
    """The children of a model, or the items of lists, such as blocks, wherever these are. Those without parameters are
    left out."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += child
        else:
            within = any(isinstance(module, nn.ModuleList) for module in child.modules())
            found += children_or_items(child) if within else [child]
    return [part for part in found if any(True for _ in part.parameters())]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The items of a model's longest list of modules, which are its blocks; none where it has no list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [*max(lists, key=len)] if lists else []
