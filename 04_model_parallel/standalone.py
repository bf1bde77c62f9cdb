"""Tensor parallelism: every rank has a part of each weight, and all ranks compute on the same batch.

The first layer is split by its outputs and the second by its inputs: one all-reduce adds up the ranks' results.

    python standalone.py
    torchrun --standalone --nproc_per_node=2 standalone.py
    torchrun --standalone --nproc_per_node=4 standalone.py 8     # until epoch 8; goes on from the checkpoint
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 standalone.py  # on each node
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4 if len(sys.argv) < 2 else int(sys.argv[1]) if sys.argv[1].isdigit() else sys.exit("say how many epochs")
CHECKPOINTS = Path("checkpoint-tensor")  # all ranks write into it: on several nodes, put it on a disk that they share


def train(device):
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    # All ranks together are one replica of the model, so they read the same batches. The sampler's default is a
    # replica on each rank, and different batches: the parts of a layer would then work on different images.
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=96, sampler=sampler, drop_last=True)
    test_images, test_labels = images[1500:].to(device), labels[1500:].to(device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if 128 % dist.get_world_size():
        sys.exit(f"the 128 features between the layers cannot be divided by {dist.get_world_size()} ranks")
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # splits rank 0's weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # after the split: for this rank's parts
    # A folder for each epoch. Its .metadata is written last, and so marks a complete checkpoint.
    done = max((int(file.parent.name) for file in CHECKPOINTS.glob("*/.metadata")), default=0)
    if done:
        if dist.get_rank() == 0:
            print(f"{CHECKPOINTS}: {done} epochs are done, of {EPOCHS}; delete it to begin anew")
        weights, momenta = get_state_dict(model, optimizer)
        # In place. Each rank reads its own parts, whatever number of ranks has saved them.
        dcp.load({"model": weights, "optimizer": momenta}, checkpoint_id=CHECKPOINTS / str(done))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)

    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        total = 0.0
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        with torch.no_grad():
            correct = (model(test_images).argmax(1) == test_labels).sum()
        if dist.get_rank() == 0:  # all ranks have the same outputs
            print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}, {correct} of 297 test images right")
        weights, momenta = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": momenta}, checkpoint_id=CHECKPOINTS / str(epoch + 1))


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
    train(device)
    # Not in a `finally`: a rank that failed must exit at once, so that torchrun ends the others, which wait for it.
    dist.barrier()  # nobody leaves while another rank still works
    dist.destroy_process_group()
