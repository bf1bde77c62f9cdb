"""Training through model.module, and the weights drift apart

says: rank 0: gradient [1.0, 1.0], expected [2.0, 2.0] | rank 1: gradient [3.0, 3.0], expected [2.0, 2.0]
see:  No message: DDP prepares its averaging in its own forward pass, which is not called.
find: Compare a fingerprint of the weights over ranks after the first step.
fix:  Train through the DDP object; `.module` is for saving and for evaluation.
then: rank 0: gradient [2.0, 2.0], expected | rank 1: gradient [2.0, 2.0], expected
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
batch = torch.ones(1, 2) * (1 + 2 * dist.get_rank())
# right: ddp(batch).sum().backward()
ddp.module(batch).sum().backward()  # wrong
print(f"rank {dist.get_rank()}: gradient {ddp.module.weight.grad[0].tolist()}, expected [2.0, 2.0]")
dist.destroy_process_group()
