"""Two nodes with one node rank

says: some rank: EADDRINUSE | some rank: Timed out after 4 seconds waiting for clients. 1/2 clients joined.
see:  On one machine the second rank 0 finds the port in use; on two, each waits for the other, and counts one client.
find: Print RANK and the host name on every process.
fix:  --node_rank=0 on one node only. With --rdzv_backend=c10d nobody has to number the nodes.
then: rank 0: rank 0 is there | rank 1: rank 1 is there
"""

import os
from datetime import timedelta

import torch.distributed as dist

# right: pass
os.environ["RANK"] = "0"  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
print(f"rank {dist.get_rank()} is there")
dist.barrier()
dist.destroy_process_group()
