"""Two sends that face each other

says: some rank: Timed out waiting 3000ms for send operation
see:  Both ranks wait in `send` until the timeout; with NCCL small messages may even pass, and larger ones hang.
find: The stacks: both ranks stand in the same line, which is a send.
fix:  Start one of the two with isend, or both in one batch_isend_irecv.
then: rank 0: received 1 | rank 1: received 0
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=3))

rank, other = dist.get_rank(), 1 - dist.get_rank()
mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
# right: sent = dist.isend(mine, other)
dist.send(mine, other)  # wrong
dist.recv(theirs, other)
print(f"rank {rank} received {theirs[0].item():.0f}")
dist.barrier()
dist.destroy_process_group()
