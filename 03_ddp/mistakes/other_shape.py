"""Tensors of other shapes

says: rank 0: [2.0, 6.0, 5.0, 9.0, 8.0, 12.0]
see:  No message: elements are added in the order in which they lie in memory, so 2 is added to 4.
find: TORCH_DISTRIBUTED_DEBUG=DETAIL names both shapes.
fix:  Same shape, same layout, on all ranks.
then: rank 0: [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

rank = dist.get_rank()
gradient = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
if rank == 1:
    # right: pass
    gradient = gradient.t().contiguous()  # wrong
dist.all_reduce(gradient)
print(f"rank {rank}: {gradient.flatten().tolist()}")
dist.destroy_process_group()
