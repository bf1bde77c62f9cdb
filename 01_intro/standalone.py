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
    if torch.cuda.is_available():
        # LOCAL_RANK counts the processes of this node, so it is the number of the GPU. RANK counts over all nodes.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)  # before anything allocates: the default is GPU 0, for every rank
        group = {"backend": "nccl", "device_id": device}
    else:
        device = torch.device("cpu")
        group = {"backend": "gloo"}
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
