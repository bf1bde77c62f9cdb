"""Unequal numbers of batches

says: rank 0: took 3 steps | some rank: Timed out waiting 3000ms for
see:  Rank 0 finishes its epoch, rank 1 waits for it in the all-reduce of one more backward pass.
find: The stacks: one rank is behind the loop, the other in `backward`. Print the number of batches of each rank.
fix:  Give all ranks equally many batches (DistributedSampler, drop_last), or train in `Join`, which joins in for
      those that are through.
then: rank 0: took 3 steps | rank 1: took 4 steps
"""

from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
batches = torch.randn(3 + dist.get_rank(), 8, 4)
# right: with Join([ddp]):
with nullcontext():  # wrong
    for batch in batches:
        ddp(batch).sum().backward()
print(f"rank {dist.get_rank()} took {len(batches)} steps")
dist.barrier()
dist.destroy_process_group()
