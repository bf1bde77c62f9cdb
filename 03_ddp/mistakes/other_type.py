"""Tensors of other types

says: rank 0: [1065353217, 1073741826] | rank 1: [1.0000001192092896, 2.000000476837158]
see:  No message: the bits of a float32 are added to those of an int32.
find: TORCH_DISTRIBUTED_DEBUG=DETAIL names both types.
fix:  Give the type where the tensor is made: `torch.tensor(count, dtype=torch.float32)`.
then: rank 0: [2, 4] | rank 1: [2, 4]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

rank = dist.get_rank()
count = torch.tensor([1, 2], dtype=torch.int32)
if rank == 1:
    # right: pass
    count = count.float()  # wrong
dist.all_reduce(count)
print(f"rank {rank}: {count.tolist()}")
dist.destroy_process_group()
