"""Training stops when the best loss so far is to be saved, with every GPU at 100% and no error.

thread: https://github.com/pytorch/pytorch/issues/76527
        https://github.com/alan-turing-institute/autocast/pull/386
        https://github.com/Lightning-AI/pytorch-lightning/issues/19045
net:    --check-collectives, at the first call that differs
cause:  `reduce` gives the sum to rank 0 alone. What is left on the others is theirs, or a part of the sum: gloo
        leaves intermediate results there. Each rank then compares its own number with its own best, and rank 0 goes
        to save while rank 1 goes on to the next epoch.
"""

import torch
import torch.distributed as dist

from common.lab.launch import launch
from course.fsdp.museum import Seen

RANKS, REPORTED, EXPECTED = 2, (0.0, 3.0), 4.0
EPOCHS, WAIT = 4, 2.0  # seconds that a rank waits for the others
# What each rank measures on its part of the validation set. The mean of both falls in every epoch; rank 1's does not.
LOSSES = [[1.00, 0.80, 0.60, 0.40], [1.00, 1.10, 0.90, 0.95]]


def validate(epoch):
    """The mean of all ranks' validation losses."""
    loss = torch.tensor([LOSSES[dist.get_rank()][epoch]])
    # right: dist.all_reduce(loss)
    dist.reduce(loss, dst=0)  # wrong
    return loss.item() / dist.get_world_size()


def on_rank():
    torch.manual_seed(3)
    model, best, seen = torch.nn.Linear(4, 4), float("inf"), Seen()
    for epoch in range(EPOCHS):
        model(torch.full((2, 4), 1.0 + epoch)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        model.zero_grad()
        loss = validate(epoch)
        seen.numbers |= {f"loss {epoch}": torch.tensor(loss)}
        seen.norms.append(norm.item())
        if loss < best:
            best = loss
            save(model)
    return seen


def save(model):
    """All ranks save together, and nobody goes on before all have done so."""
    dist.barrier()


def alone():
    """One process, which validates on both parts."""
    return Seen({f"loss {epoch}": torch.tensor(sum(part[epoch] for part in LOSSES) / 2) for epoch in range(EPOCHS)})


def epochs():
    """For each rank, what `validate` gives in each epoch, with nothing saved."""
    return launch(lambda: [validate(epoch) for epoch in range(EPOCHS)], RANKS)


def decisions():
    """For each rank, the epochs in which it would save."""
    found = []
    for losses in epochs():
        best = [min(losses[:epoch], default=float("inf")) for epoch in range(EPOCHS)]
        found.append([epoch + 1 for epoch in range(EPOCHS) if losses[epoch] < best[epoch]])
    return found


def effect(*_):
    """In how many epochs all ranks decide alike."""
    found = decisions()
    return float(sum((epoch in found[0]) == (epoch in found[1]) for epoch in range(1, EPOCHS + 1)))
