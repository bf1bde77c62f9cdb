"""Ring attention that trains wrongly. The exercise `repaired_attention` says what has been seen; the mistake is to be
found."""

import torch
import torch.distributed as dist


def passed_on(tensor):
    """Send a tensor to the next rank, and return that of the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def faulty_attention(q, k, v):
    """The attention of this rank's queries to all keys; arguments as in the exercise `repaired_attention`."""
    largest = q.new_full((*q.shape[:-1], 1), -torch.inf)  # of the scores so far, so that no exp overflows
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for turn in range(dist.get_world_size()):
        if turn > 0:
            k, v = passed_on(k.contiguous()), passed_on(v.contiguous())
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights = (scores - now).exp()
        out = out * (largest - now).exp() + weights @ v
        total = total + weights.sum(-1, keepdim=True)
        largest = now
    return out / total
