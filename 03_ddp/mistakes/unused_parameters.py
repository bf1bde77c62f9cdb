"""Parameters that a step does not use

says: rank 0: Expected to have finished reduction in the prior iteration before starting a new one. | rank 0:
      Parameter indices which did not receive grad for rank 0: 2 3
see:  The first step passes, the second one raises on all ranks.
find: TORCH_DISTRIBUTED_DEBUG=INFO names the parameters. So does DETAIL, but not with gloo, where it crashes in DDP's
      constructor.
fix:  Use every parameter, or remove it; find_unused_parameters=True where it differs from step to step.
then: rank 0: did two steps
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.ModuleDict({"used": nn.Linear(4, 1), "spare": nn.Linear(4, 1)})
model.forward = lambda batch: model["used"](batch)
# right: unused = True
unused = False  # wrong
ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
for _ in range(2):
    ddp(torch.randn(8, 4)).sum().backward()
print(f"rank {dist.get_rank()} did two steps")
dist.destroy_process_group()
