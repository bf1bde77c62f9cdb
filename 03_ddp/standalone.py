"""DistributedDataParallel: every rank has a copy of the model and trains it on its own part of each batch.

In the backward pass the ranks average their gradients, so that all copies take the same step and stay equal.

    python standalone.py
    torchrun --standalone --nproc_per_node=2 standalone.py
    torchrun --standalone --nproc_per_node=2 standalone.py 8     # until epoch 8; goes on from the checkpoint
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 standalone.py  # on each node
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4 if len(sys.argv) < 2 else int(sys.argv[1]) if sys.argv[1].isdigit() else sys.exit("say how many epochs")
BATCH_SIZE = 96  # of all ranks together
CHECKPOINT = "checkpoint-ddp.pt"  # all ranks load it: on several nodes, put it on a disk that they share


def train(model, optimizer, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        sys.exit(f"a batch of {BATCH_SIZE} cannot be divided among {world_size} ranks: change BATCH_SIZE")
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    # Rank r takes entries r, r + world_size, ... of a permutation. So the k-th batches of all ranks are together the
    # k-th batch of one process, as long as the incomplete last batch is dropped.
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    # No sampler for testing: it would give all ranks equally many images, by counting some of them twice.
    test_images, test_labels = (part[1500:][rank::world_size].to(device) for part in (images, labels))

    ddp = DistributedDataParallel(model)  # starts all ranks from rank 0's weights
    done = 0
    found = torch.tensor(int(os.path.exists(CHECKPOINT)), device=device)
    dist.broadcast(found, src=0)  # rank 0 decides for all; a rank that has no such file then fails, and says so
    if found:
        state = torch.load(CHECKPOINT, map_location=device)  # without it, onto the GPU number 0 that rank 0 saved from
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
        if rank == 0:
            print(f"{CHECKPOINT}: {done} epochs are done, of {EPOCHS}; delete it to begin anew")

    # This model is the same in training and testing. One with dropout or BatchNorm needs model.train() at the beginning
    # of each epoch, and model.eval() before the test.
    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        total = 0.0
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(ddp(batch.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            total += loss.detach()
        with torch.no_grad():
            correct = (model(test_images).argmax(1) == test_labels).sum()
        metrics = torch.stack([total / len(loader) / world_size, correct])
        dist.all_reduce(metrics)  # until here, each rank knows only about its own images
        if rank == 0:  # the copies are equal, so one rank saves; `model`, since names in `ddp` begin with "module."
            print(f"epoch {epoch + 1}: loss {metrics[0]:.4f}, {metrics[1]:.0f} of 297 test images right")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
            torch.save(state, CHECKPOINT + ".part")
            os.replace(CHECKPOINT + ".part", CHECKPOINT)  # a crash while saving leaves the old checkpoint


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # torchrun sets RANK and says where the ranks meet. Started by plain `python`, this is a group of one process.
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    train(model, optimizer, device)
    # Not in a `finally`: a rank that failed must exit at once, so that torchrun ends the others, which wait for it.
    dist.barrier()  # nobody leaves while another rank still works
    dist.destroy_process_group()
