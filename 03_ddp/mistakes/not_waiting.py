"""Using a tensor before wait()

says: rank 0: reads 1, expected 2
see:  No message: a rank reads its own number, or a sum that is half done. It depends on who is late.
find: Search for `async_op=True`, and follow each handle to its wait().
fix:  Call wait() before the tensor is read or written; on NCCL it orders the streams.
then: rank 0: reads 2, expected 2
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
total = torch.ones(1)
time.sleep(dist.get_rank())  # rank 1 comes a second later
work = dist.all_reduce(total, async_op=True)
# right: work.wait()
# wrong
print(f"rank {dist.get_rank()} reads {total.item():.0f}, expected 2")
work.wait()
dist.destroy_process_group()
