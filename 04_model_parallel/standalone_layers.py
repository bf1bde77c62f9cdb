"""Layers split over ranks: each rank has some of the layers. Activations go forward, and their gradients come back.

Only one rank computes at any moment; chapter 05's standalone.py changes that by micro-batches.

    python standalone_layers.py
    torchrun --standalone --nproc_per_node=2 standalone_layers.py
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 standalone_layers.py  # each
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

EPOCHS, BATCH, WIDTH = 4, 96, 128


def train(device):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

    torch.manual_seed(0)  # every rank makes the same four blocks, and keeps its share of them
    blocks = [nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU()) for width in (64, WIDTH, WIDTH)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 10))
    if last >= len(model):
        sys.exit(f"the {len(model)} blocks cannot be divided among {last + 1} ranks: start fewer")
    part = model[len(model) * rank // (last + 1) : len(model) * (rank + 1) // (last + 1)].to(device)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))  # equal on all ranks
        total, batches = 0.0, order[: len(order) // BATCH * BATCH].split(BATCH)
        for batch in batches:
            optimizer.zero_grad()
            if rank == 0:
                x = images[batch].to(device)
            else:
                x = torch.empty(BATCH, WIDTH, device=device)
                dist.recv(x, rank - 1)  # what the layers before have computed
                x.requires_grad_()  # it has no history here; now autograd computes its gradient, too
            y = part(x)
            if rank == last:
                loss = nn.functional.cross_entropy(y, labels[batch].to(device))
                loss.backward()
                total += loss.detach()
            else:
                dist.send(y.detach(), rank + 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, rank + 1)  # of the loss with respect to y
                y.backward(gradient)
            if rank > 0:
                dist.send(x.grad, rank - 1)
            optimizer.step()
        if rank == last:
            print(f"epoch {epoch + 1}: loss {total / len(batches):.4f}")
    torch.save(part.state_dict(), f"layers-{rank}.pt")  # under the names that they have in the whole model


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
    dist.barrier()  # nobody leaves while another rank still works
    dist.destroy_process_group()
