"""Small models that learn digits on one process, with several batches and learning rates (05_training_well.ipynb)."""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

from common.lab import plotting

digits = load_digits()
IMAGES, LABELS = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
TRAINED, EPOCHS = 1536, 6  # images of 1,797; the other 261 are the test
SGD = partial(torch.optim.SGD, momentum=0.9)
BASE = {"SGD": (SGD, 0.02), "AdamW": (torch.optim.AdamW, 0.002)}  # good rates for a batch of 16
FACTORS = {"1/4": 0.25, "1": 1, "√8": 8**0.5, "8": 8, "24": 24, "64": 64}  # of those rates
BATCHES = (16, 128, 768)


def make_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def side_by_side(make_optimizer, batch, rates, seeds=range(4)):
    """The test loss of each model after six epochs: [rates, seeds], from the best seed to the worst.

    Models of one shape are slices of the same tensors, so all rates and seeds are trained at once.
    """
    starts, orders = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        starts.append([p.detach() for p in make_model().parameters()])
        orders.append(torch.cat([torch.randperm(TRAINED) for _ in range(EPOCHS)]))
    tensors = [torch.stack(same) for same in zip(*starts, strict=True)]  # [seeds, ...]
    groups = [{"params": [t.clone().requires_grad_() for t in tensors], "lr": rate} for rate in rates]
    optimizer = make_optimizer(groups)

    def losses(rows):  # of images, [seeds, batch]
        w1, b1, w2, b2 = (torch.stack(same) for same in zip(*(g["params"] for g in groups), strict=True))
        hidden = torch.relu(IMAGES[rows] @ w1.mT + b1.unsqueeze(-2))
        scores = hidden @ w2.mT + b2.unsqueeze(-2)  # [rates, seeds, batch, 10]
        labels = LABELS[rows].expand(scores.shape[:-1])
        return nn.functional.cross_entropy(scores.movedim(-1, 1), labels, reduction="none").mean(-1)

    for rows in torch.stack(orders).split(batch, dim=1):
        optimizer.zero_grad()
        losses(rows).sum().backward()  # each model has gradients of its own loss only
        optimizer.step()
    with torch.no_grad():
        return losses(torch.arange(TRAINED, len(LABELS)).expand(len(seeds), -1)).sort().values


def all_losses():
    """(optimizer, batch) -> test losses [rates, seeds]."""
    return {
        (name, batch): side_by_side(make, batch, [factor * rate for factor in FACTORS.values()])
        for name, (make, rate) in BASE.items()
        for batch in BATCHES
    }


def medians(losses):
    """Over the four seeds: the two in the middle."""
    return losses[:, 1:3].mean(-1)


def draw(losses):
    """The median over the rate, one curve for each batch, with a band from the best seed to the worst and a ring around
    the lowest median."""
    fig, axes = plotting.plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for ax, (name, (_, rate)) in zip(axes, BASE.items(), strict=True):
        rates = [factor * rate for factor in FACTORS.values()]
        for batch, colour in zip(BATCHES, plotting.PALETTE, strict=False):
            found = losses[name, batch]
            middle = medians(found)
            best = int(middle.argmin())
            ax.plot(rates, middle, "o-", color=colour)
            ax.fill_between(rates, found[:, 0], found[:, -1], color=colour, alpha=0.2, lw=0)
            ax.plot(rates[best], middle[best], "o", ms=15, mfc="none", mec=colour, mew=2.5)
            ax.text(rates[best], middle[best] - 0.17, f"{middle[best]:.2f}", color=colour, ha="center", va="top")
            if batch == 128:  # beside its slope, where the others have their beginnings
                place, height = 1.2 * (rates[0] * rates[1]) ** 0.5, middle[:2].mean()
            else:
                place, height = rates[0], middle[0] + 0.08
            ax.text(place, height, f"batch {batch}", color=colour, va="bottom")
        for times, text in (("1", "old rate"), ("√8", "× √8"), ("8", "× 8")):
            ax.axvline(FACTORS[times] * rate, color="grey", lw=0.8, ls=":")
            ax.text(FACTORS[times] * rate, 2.78, text, ha="center", va="bottom", color="grey")
        ax.set(xscale="log", xlabel="learning rate", ylim=(0, 2.75))
        ax.set_title(name, pad=22)
    axes[0].set_ylabel("test loss after six epochs")
    return fig
