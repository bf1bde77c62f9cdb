"""Ranks with different models

says: rank 1: params[0] in this process with sizes [4, 8] appears not to match sizes of the same param in process 0.
see:  DDP's constructor compares shapes: one rank is told the parameter, the other only that a connection is closed.
find: Read the messages of all ranks: only one of them is the cause.
fix:  Sizes come from a setting or a file that is equal everywhere, not from a rank's own data.
then: rank 0: has 4 rows | rank 1: has 4 rows
"""

import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
words = ["a b c", "a b c d"][dist.get_rank()].split()  # the text of each rank's part
# right: vocabulary = 4
vocabulary = len(words)  # wrong
ddp = nn.parallel.DistributedDataParallel(nn.Embedding(vocabulary, 8))
print(f"rank {dist.get_rank()} has {vocabulary} rows")
dist.destroy_process_group()
