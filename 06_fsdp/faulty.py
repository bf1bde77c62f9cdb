"""A sharded step that trains wrongly. The exercise `repaired_decay` says what has been seen; the mistake is to be
found."""

import torch
import torch.distributed as dist


def faulty_step(parameters, gradients, decays, rate, decay):
    """All parameters after a step; arguments as in the exercise `repaired_decay`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    vector, gradient = (torch.cat([t.flatten() for t in tensors]) for tensors in (parameters, gradients))
    # For each element, whether it decays.
    mask = torch.cat([torch.full_like(p.flatten(), float(on)) for p, on in zip(parameters, decays, strict=True)])
    mask = mask[rank * (len(vector) // size) :]
    padding = (0, -len(vector) % size)
    vector, gradient = (torch.nn.functional.pad(flat, padding) for flat in (vector, gradient))
    shard = vector.chunk(size)[rank].clone()
    own = torch.empty_like(shard)
    dist.reduce_scatter_single(own, gradient)
    shard -= rate * (own / size + decay * mask[: len(shard)] * shard)
    dist.all_gather_single(vector, shard)
    pieces = vector[: len(vector) - padding[1]].split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
