"""new_group on some ranks only

says: some rank: wait timeout after 3000ms
see:  The next group hangs, whose line is right: groups get their names by counting. (Without a timeout of their own,
      groups wait for the backend's default: half an hour, 10 minutes with NCCL.)
find: The stacks: some ranks are in a new_group or in the first collective of another group.
fix:  All ranks make all groups, in one order; or use init_device_mesh, which does.
then: rank 0: the sum is 2 | rank 1: the sum is 2
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

# right: dist.new_group([0], timeout=timedelta(seconds=3))
if dist.get_rank() == 0:  # wrong
    dist.new_group([0], timeout=timedelta(seconds=3))  # wrong
both = dist.new_group([0, 1], timeout=timedelta(seconds=3))
total = torch.ones(1)
dist.all_reduce(total, group=both)
print(f"rank {dist.get_rank()}: the sum is {total.item():.0f}")
dist.destroy_process_group()
