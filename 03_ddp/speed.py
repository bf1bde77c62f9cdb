"""How many examples per second does DistributedDataParallel train, on one rank and on several?

python speed.py 1024
torchrun --standalone --nproc_per_node=2 speed.py 1024    # the batch of all ranks together: strong scaling
torchrun --standalone --nproc_per_node=2 speed.py 2048    # 1024 for each rank: weak scaling
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256


def make_model(device):
    """Six layers, and their optimizer."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def make_step(model, optimizer, batch_size, device, **options):
    """A training step on this rank's part of the batch."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(model, **options)
    examples = torch.randn(batch_size // dist.get_world_size(), WIDTH, device=device)

    def step():
        optimizer.zero_grad()
        ddp(examples).square().mean().backward()
        optimizer.step()

    return step


def seconds_per_step(step, device, warm_up=3, steps=10):
    """Measure the seconds per step of the slowest rank; all ranks return the same number."""
    for _ in range(warm_up):  # the first steps allocate memory, open connections and arrange DDP's buckets
        step()
    finish(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish(device)
    seconds = torch.tensor((time.perf_counter() - start) / steps, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def finish(device):
    """Wait until all that was begun is done, on this rank's device and on all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU's operations go on after their calls have returned
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Milliseconds for a step of DDP, on the slowest rank.", usage=argparse.SUPPRESS
    )
    parser.add_argument("batch_size", type=int, help="examples on all ranks together")
    batch_size = parser.parse_args().batch_size
    # torchrun counts the processes of this node: LOCAL_RANK picks the GPU. (RANK counts those of all nodes.)
    local_rank, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    gpu = gpus >= processes  # NCCL wants a GPU for each of them
    device = torch.device(f"cuda:{local_rank}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)  # before anything allocates: the default is GPU 0, for every process
    elif gpus and local_rank == 0:
        print(f"{gpus} GPU(s) for {processes} processes, where NCCL wants one for each: using the CPU, with gloo")
    model, optimizer = make_model(device)
    # torchrun sets RANK and says where the ranks meet. Started by plain `python`, this is a group of one process.
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    seconds = seconds_per_step(make_step(model, optimizer, batch_size, device), device)
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()}, batch {batch_size}:", end=" ")
        print(f"~{1e3 * seconds:.1f} ms for a step, ~{batch_size / seconds:.0f} examples/s")
    dist.barrier()  # nobody leaves while another rank still works
    dist.destroy_process_group()
