"""A barrier in finally

says: rank 1: ValueError: bad record 17...During handling of the above exception, another exception occurred | some
      rank: Timed out waiting 3000ms for
see:  The error of rank 1 appears when the timeout is over: it waits in the barrier, for a rank that waits for it.
find: The stack of rank 1 stands in a `finally`; the true error is above `During handling of the above exception`.
fix:  Nothing collective in `finally` or `except`, only what concerns this rank: a rank that failed exits, and torchrun
      ends the others.
then: rank 0: closing files | rank 1: closing files...ValueError: bad record 17
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

try:
    if dist.get_rank() == 1:
        raise ValueError("bad record 17")
    dist.all_reduce(torch.ones(1))
finally:
    # right: print("closing files")
    dist.barrier()  # wrong
dist.destroy_process_group()
