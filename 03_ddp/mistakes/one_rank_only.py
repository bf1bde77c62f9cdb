"""A collective on one rank only

says: some rank: Timed out waiting 3000ms for
see:  Rank 0 waits in its all-reduce, rank 1 already in the barrier behind it, until the timeout ends both.
find: The stacks (py-spy) show two ranks in two different lines; monitored_barrier and DETAIL say so as well.
fix:  Call collectives on all ranks, and put only the printing under `if rank == 0`.
then: rank 0: mean loss 2.5
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

loss = torch.tensor(2.0 + dist.get_rank())
# right: dist.all_reduce(loss)
# right: if dist.get_rank() == 0:
if dist.get_rank() == 0:  # wrong
    dist.all_reduce(loss)  # wrong
    print(f"mean loss {loss / 2}")
dist.barrier()
dist.destroy_process_group()
