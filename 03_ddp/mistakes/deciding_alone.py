"""A rank that looks for the checkpoint alone

says: rank 0: did steps 2 to 3 | some rank: Timed out waiting 3000ms for
see:  The ranks go on from different steps. It ends in a hang when the first is through, long after the cause.
find: Print the first step on every rank. The flight recorder shows different numbers of calls.
fix:  Let rank 0 look, broadcast what it found, and fail if a rank then lacks the file.
then: rank 0: did steps 2 to 3 | rank 1: did steps 2 to 3
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
found = torch.tensor(int(dist.get_rank() == 0))  # as if the checkpoint were on the disk of rank 0's node only
# right: dist.broadcast(found, src=0)
# right: first_step = 2 * found
first_step = 2 * found  # wrong
for _ in range(first_step, 4):
    dist.all_reduce(torch.ones(1))
print(f"rank {dist.get_rank()} did steps {first_step} to 3")
dist.barrier()
dist.destroy_process_group()
