"""Feeding the ranks with DistributedSampler and DataLoader: which examples does each rank read?

python feeding.py
torchrun --standalone --nproc_per_node=2 feeding.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH_SIZE, EPOCHS = 8, 2  # the batch of all ranks together


class Numbers(Dataset):
    """Stands for images or texts: example i is the number i."""

    def __len__(self):
        return 26

    def __getitem__(self, index):
        return torch.tensor(index)


def main(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        sys.exit(f"a batch of {BATCH_SIZE} cannot be divided among {world_size} ranks: change BATCH_SIZE")
    data = Numbers()
    sampler = DistributedSampler(data, seed=0, drop_last=True)  # which examples are this rank's
    loader = DataLoader(
        data,
        BATCH_SIZE // world_size,  # this rank's part of a batch
        sampler=sampler,  # in place of shuffle=True
        drop_last=True,  # all batches have the same size
        num_workers=1,  # processes beside this one, which load ahead
        persistent_workers=True,  # and are kept from one epoch to the next
        pin_memory=device.type == "cuda",  # in memory from which a GPU can copy by itself
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # a new order for each epoch, and the same order on all ranks
        for step, batch in enumerate(loader):
            batch = batch.to(device, non_blocking=True)  # Python need not wait for it
            # Here a training would call the model, backward() and the optimizer. We show who has read what.
            read = [torch.empty_like(batch) for _ in range(world_size)]
            dist.all_gather(read, batch)
            if rank == 0:
                print(f"epoch {epoch}, step {step}:", *(f"rank {r} {part.tolist()}" for r, part in enumerate(read)))


if __name__ == "__main__":
    # torchrun counts the processes of this node: LOCAL_RANK picks the GPU. (RANK counts those of all nodes.)
    local_rank, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    gpu = gpus >= processes  # NCCL wants a GPU for each of them
    device = torch.device(f"cuda:{local_rank}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)  # before anything allocates: the default is GPU 0, for every process
    elif gpus and local_rank == 0:
        print(f"{gpus} GPU(s) for {processes} processes, where NCCL wants one for each: using the CPU, with gloo")
    # torchrun sets RANK and says where the ranks meet. Started by plain `python`, this is a group of one process.
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    main(device)
    dist.destroy_process_group()
