"""no_sync around every backward pass

says: rank 0: gradient [4.0, 6.0, 8.0, 10.0], expected [5.0, 7.0, 9.0, 11.0]
see:  No message: nothing is averaged, and the copies of the model drift apart.
find: Compare a fingerprint of the weights over ranks; in a profile there is no all-reduce.
fix:  The last micro-batch, with its forward pass, is outside of no_sync.
then: rank 0: gradient [5.0, 7.0, 9.0, 11.0], expected [5.0, 7.0, 9.0, 11.0]
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
batches = torch.arange(8.0).view(2, 1, 4) + dist.get_rank()
for number in range(2):
    # right: without = ddp.no_sync() if number == 0 else nullcontext()
    without = ddp.no_sync()  # wrong
    with without:
        ddp(batches[number]).sum().backward()
print(f"rank {dist.get_rank()}: gradient {ddp.module.weight.grad[0].tolist()}, expected [5.0, 7.0, 9.0, 11.0]")
dist.destroy_process_group()
