"""Tensors of other lengths

says: rank 1: Connection ... by peer
see:  One rank fails, the other prints numbers that are wrong or fails a little later.
find: TORCH_DISTRIBUTED_DEBUG=DETAIL names both shapes before anything is sent.
fix:  Agree on a length first, for instance by an all-reduce with MAX, and pad.
then: rank 0: sum [2.0, 2.0, 1.0, 1.0] | rank 1: sum [2.0, 2.0, 1.0, 1.0]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

rank = dist.get_rank()
words = torch.ones(2 + 2 * rank)  # 2 on rank 0, 4 on rank 1
# right: padded = torch.cat([words, torch.zeros(4 - len(words))])
padded = words  # wrong
dist.all_reduce(padded)
print(f"sum {padded.tolist()}")
dist.destroy_process_group()
