"""Evaluating the DDP model on rank 0

says: some rank: Timed out waiting 3000ms for
see:  A model with buffers hangs in the first evaluation, or rank 0's broadcast of buffers meets another collective of
      rank 1.
find: The stacks: rank 0 is in the forward pass of the evaluation, rank 1 in the next step of training.
fix:  Call the model itself where only one rank evaluates: DDP's forward pass broadcasts buffers.
then: rank 0: trained on
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
ddp = nn.parallel.DistributedDataParallel(model)
ddp(torch.randn(8, 4)).sum().backward()
if dist.get_rank() == 0:
    # right: model(torch.randn(8, 4))
    ddp(torch.randn(8, 4))  # wrong
ddp(torch.randn(8, 4)).sum().backward()
print("trained on")
dist.barrier()
dist.destroy_process_group()
