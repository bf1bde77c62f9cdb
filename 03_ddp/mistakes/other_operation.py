"""A sum on one rank, a maximum on the other

says: rank 0: [2.0, 4.0, 3.0, 4.0]; expected [2.0, 4.0, 6.0, 8.0]
see:  No message: each rank reduces a half of the elements with its own operation, so half is a sum and half a
      maximum.
find: DETAIL does not compare operations; `--check-collectives` does.
fix:  No branch by rank around arguments of a collective.
then: rank 0: [2.0, 4.0, 6.0, 8.0]; expected [2.0, 4.0, 6.0, 8.0]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

rank = dist.get_rank()
losses = torch.tensor([1.0, 2.0, 3.0, 4.0])
op = dist.ReduceOp.SUM
if rank == 1:
    # right: pass
    op = dist.ReduceOp.MAX  # wrong
dist.all_reduce(losses, op=op)
print(f"rank {rank}: {losses.tolist()}; expected [2.0, 4.0, 6.0, 8.0]")
dist.destroy_process_group()
