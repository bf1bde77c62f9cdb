"""A rank that decides alone to stop

says: some rank: Timed out waiting 3000ms for | rank 1: stopped after step 2
see:  One rank leaves the loop a step before the others, which wait for it in the next all-reduce.
find: Print the step before the barrier; the flight recorder shows that one rank has made fewer calls.
fix:  Decide from numbers that are equal on all ranks: all-reduce or broadcast first, then `if`.
then: rank 0: stopped after step 2 | rank 1: stopped after step 2
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

for step in range(4):
    loss = torch.tensor(3.0 - step - 0.5 * dist.get_rank())
    mean = loss.clone()
    dist.all_reduce(mean)
    # right: if mean / 2 < 1:
    if loss < 1:  # wrong
        break
print(f"rank {dist.get_rank()} stopped after step {step}")
dist.barrier()
dist.destroy_process_group()
