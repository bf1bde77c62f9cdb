"""Fully sharded data parallelism: every rank keeps a shard of each parameter, and its part of the optimizer's state.

A block's parameters are gathered just before it computes and freed after; gradients are averaged into shards.

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
from torch.distributed.checkpoint import state_dict as sd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4 if len(sys.argv) < 2 else int(sys.argv[1]) if sys.argv[1].isdigit() else sys.exit("say how many epochs")
CHECKPOINTS = Path("checkpoint-fsdp")  # all ranks write into it: on several nodes, put it on a disk that they share
FROM_RANK_0 = sd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def make_model():
    blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def train(device):
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    # Of a permutation of the images, rank r takes numbers r, r + world_size, ... So the k-th batches of all ranks are
    # together the k-th batch of one process, if world_size divides 96 and the incomplete last batch is dropped.
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 96 // dist.get_world_size(), sampler=sampler, drop_last=True)

    with torch.device("meta"):  # shapes without memory: no rank's GPU ever holds the whole model
        model = make_model()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # On GPUs parameters are gathered and multiplied in 16 bits; shards and sums of gradients stay float32.
    policy = MixedPrecisionPolicy(torch.bfloat16 if device.type == "cuda" else None, reduce_dtype=torch.float32)
    for block in (*model[:-1], model):  # a block is gathered as a whole; `model` takes what is left over
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)  # memory for this rank's shards, with no values yet
    # Rank 0 makes the whole model on its CPU (or reads a pretrained one) and sends each rank its shards. If the ranks
    # initialised their own shards, the weights would depend on the number of ranks; on CPUs with one seed, they would
    # even repeat from rank to rank.
    torch.manual_seed(0)
    sd.set_model_state_dict(model, make_model().state_dict() if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # after fully_shard: for this rank's shards
    # A folder for each epoch. Its .metadata is written last, and so marks a complete checkpoint.
    done = max((int(file.parent.name) for file in CHECKPOINTS.glob("*/.metadata")), default=0)
    if done:
        if dist.get_rank() == 0:
            print(f"{CHECKPOINTS}: {done} epochs are done, of {EPOCHS}; delete it to begin anew")
        weights, momenta = sd.get_state_dict(model, optimizer)
        # In place. Each rank reads its own shards, whatever number of ranks has saved them.
        dcp.load({"model": weights, "optimizer": momenta}, checkpoint_id=CHECKPOINTS / str(done))
        sd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)

    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        total = 0.0
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch.to(device)).float(), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks; each rank keeps its shards
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks' shards
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)  # until here, each rank knows only the loss of its own images
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total / len(loader) / dist.get_world_size():.4f}")
        weights, momenta = sd.get_state_dict(model, optimizer)
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
