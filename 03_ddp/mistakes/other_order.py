"""The same collectives in another order

says: rank 0: losses 101.0, norms 101.0; expected 2 and 200
see:  No message: the sums are mixed. Both tensors become 101.
find: Compare a sum with what you expect. DETAIL compares shapes, which agree. `--check-collectives` compares lines too,
      and finds it where each order is written out, but not where one loop calls both, as here.
fix:  Iterate in one order on all ranks: over a list, or sorted, and never over a set.
then: rank 0: losses 2.0, norms 200.0; expected 2 and 200
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

rank = dist.get_rank()
losses, norms = torch.full((1,), 1.0), torch.full((1,), 100.0)
# right: order = [losses, norms]
order = [losses, norms] if rank == 0 else [norms, losses]  # wrong
for tensor in order:
    dist.all_reduce(tensor)
print(f"rank {rank}: losses {losses.item()}, norms {norms.item()}; expected 2 and 200")
dist.destroy_process_group()
