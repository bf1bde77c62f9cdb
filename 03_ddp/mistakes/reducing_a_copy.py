"""Reducing a copy

says: rank 0: [3, 4], expected [6, 8]
see:  No message: the sum is in a temporary tensor, and the one that is used has this rank's numbers.
find: Compare a sum with what you expect, on two ranks, once.
fix:  Collectives write into the tensor that they get: give them the tensor itself, not `.float()`, `.cpu()` or `x *
      1` of it.
then: rank 0: [6, 8], expected [6, 8]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

counts = torch.tensor([3, 4])
# right: dist.all_reduce(counts)
dist.all_reduce(counts.float())  # wrong
print(f"rank {dist.get_rank()}: {counts.tolist()}, expected [6, 8]")
dist.destroy_process_group()
