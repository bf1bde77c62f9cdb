"""An optimizer made before fully_shard

says: rank 0: weights moved by 0.0
see:  No message: the loss does not fall. The optimizer has the old parameters, which nobody uses any more.
find: Print the loss of ten steps, or how far a weight has moved after one.
fix:  First the device, then fully_shard, then the optimizer. (DDP keeps the parameters, so there the order is free.)
then: rank 0: weights moved by 0.4
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 1)
mesh, sgd = init_device_mesh("cpu", (2,)), torch.optim.SGD
# right: _, optimizer = fully_shard(model, mesh=mesh), sgd(model.parameters(), lr=0.1)
optimizer, _ = sgd(model.parameters(), lr=0.1), fully_shard(model, mesh=mesh)  # wrong
before = model.weight.full_tensor().clone()
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
print(f"rank {dist.get_rank()}: weights moved by {(model.weight.full_tensor() - before).abs().sum().item():.1f}")
dist.destroy_process_group()
