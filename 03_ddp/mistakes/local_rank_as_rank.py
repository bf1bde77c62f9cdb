"""The local rank instead of the rank

says: rank 0: 4 of 8 examples are read
see:  No message: both nodes read the same examples, and as many are never read.
find: Gather the indices of a step over all ranks once, and count different ones.
fix:  LOCAL_RANK picks the GPU and nothing else; for everything else there is get_rank().
then: rank 0: 8 of 8 examples are read
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

os.environ["LOCAL_RANK"] = "0"  # as on two nodes with one process each
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
# right: rank = dist.get_rank()
rank = int(os.environ["LOCAL_RANK"])  # wrong
mine = torch.tensor(list(DistributedSampler(range(8), num_replicas=2, rank=rank, shuffle=False)))
read = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(read, mine)
print(f"{len(set(torch.cat(read).tolist()))} of 8 examples are read")
dist.destroy_process_group()
