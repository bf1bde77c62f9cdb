"""A rank that skips a bad batch

says: rank 1: is done | some rank: Timed out waiting 3000ms for
see:  One NaN on one rank, much later a hang: that rank is one all-reduce behind from then on.
find: The flight recorder: the ranks have different numbers of calls, so one has skipped some. Log the step.
fix:  Let all ranks skip the step together: all-reduce the loss, which is NaN on all ranks if it is on one.
then: rank 0: is done | rank 1: is done
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

for step in range(3):
    loss = torch.tensor(float("nan") if (step, dist.get_rank()) == (1, 1) else 1.0)
    # right: dist.all_reduce(loss)
    # right: if loss.isnan():
    if loss.isnan():  # wrong
        continue
    dist.all_reduce(torch.ones(2))
print(f"rank {dist.get_rank()} is done")
dist.barrier()
dist.destroy_process_group()
