"""Hello from every rank, and one all-reduce: the smallest program in which several processes work together.

torchrun starts the same file once per rank; the ranks meet in a process group and add up a tensor.

    python standalone.py
    torchrun --standalone --nproc_per_node=4 standalone.py
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 standalone.py  # on each node
"""

import os
import socket

import torch
import torch.distributed as dist


def main():
    # torchrun counts the processes of this node: LOCAL_RANK picks the GPU. (RANK counts those of all nodes.)
    local_rank, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    gpu = gpus >= processes  # NCCL wants a GPU for each of them
    device = torch.device(f"cuda:{local_rank}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)  # before anything allocates: the default is GPU 0, for every process
    elif gpus and local_rank == 0:
        print(f"{gpus} GPU(s) for {processes} processes, where NCCL wants one for each: using the CPU, with gloo")
    group = {"backend": "nccl" if gpu else "gloo", "device_id": device if gpu else None}
    if "RANK" not in os.environ:  # plain `python`: torchrun has not told this process where to meet others
        group |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**group)

    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world_size}: process {os.getpid()} on {socket.gethostname()}, {device}, {group['backend']}")

    value = torch.tensor(rank + 1.0, device=device)  # NCCL sends tensors that are on the GPU
    dist.all_reduce(value)  # in place; afterwards every rank has the sum of all ranks' values
    expected = world_size * (world_size + 1) / 2
    print(f"rank {rank}: 1 + ... + {world_size} is {value.item():.0f}, expected {expected:.0f}")
    if value.item() != expected:
        raise SystemExit(1)  # torchrun sees the exit code and ends the other ranks

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
