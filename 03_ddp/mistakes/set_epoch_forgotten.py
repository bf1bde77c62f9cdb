"""One order of the data in every epoch

says: rank 0: 1 different orders in 3 epochs
see:  No message: the model sees the same batches in every epoch, and learns a little worse.
find: Print the first indices of each epoch.
fix:  sampler.set_epoch(epoch) before each epoch.
then: rank 0: 3 different orders in 3 epochs
"""

import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
sampler = DistributedSampler(range(8), seed=1)
epochs = []
for epoch in range(3):
    # right: sampler.set_epoch(epoch)
    # wrong
    epochs.append(list(sampler))
print(f"rank {dist.get_rank()}: {len({str(order) for order in epochs})} different orders in 3 epochs")
dist.barrier()
dist.destroy_process_group()
