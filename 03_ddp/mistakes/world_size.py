"""A wrong WORLD_SIZE

says: rank 0: Timed out after 4 seconds waiting for clients. 2/3 clients joined.
see:  All ranks wait for one that nobody has started; then the message counts who is there.
find: The message. Is the sum of all nodes' processes the world size?
fix:  Start with torchrun, which counts; if you set the variables yourself, count processes and not nodes.
then: rank 0: 0 of 2 is there | rank 1: 1 of 2 is there
"""

import os
from datetime import timedelta

import torch.distributed as dist

# right: pass
os.environ["WORLD_SIZE"] = "3"  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
print(f"rank {dist.get_rank()} of {dist.get_world_size()} is there")
dist.barrier()
dist.destroy_process_group()
