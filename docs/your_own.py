"""A model of your own on several processes, in three ways; docs/your-own.md explains it line by line.

python docs/your_own.py
torchrun --standalone --nproc_per_node=2 docs/your_own.py ddp
torchrun --standalone --nproc_per_node=2 docs/your_own.py fsdp
torchrun --standalone --nproc_per_node=2 docs/your_own.py pipeline
"""

import os
import sys

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    how = " ".join(sys.argv[1:]) or "one process"
    if how not in ("ddp", "fsdp", "pipeline") and (how != "one process" or "RANK" in os.environ):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"not a way for several processes to train: {how!r}; say ddp, fsdp or pipeline", file=sys.stderr)
        sys.exit(2)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


# --- yours ---
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 3)
        self.layers = nn.ModuleList(Layer(64) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def batch_of(step):
    """The whole batch of a step, the same on every process: inputs [32, 8], targets [32]."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :3].argmax(1)


# --- what is distributed ---
def train(how, device, steps=20):
    """Loss of each step, of the whole batch; in a pipeline, on the last process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model().to(device)
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how == "fsdp":
        mesh = init_device_mesh(device.type, (size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "pipeline":
        parts = [model.first, *model.layers, model.last]  # what the forward pass calls, in its order
        model = nn.Sequential(*parts[len(parts) * rank // size : len(parts) * (rank + 1) // size])
        schedule = Schedule1F1B(PipelineStage(model, rank, size, device), n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = (tensor.to(device) for tensor in batch_of(step))
        optimizer.zero_grad()
        if how == "pipeline":
            of_parts = []
            given = [inputs] if rank == 0 else []  # the others get theirs from the process before
            schedule.step(*given, target=targets, losses=of_parts, return_outputs=False)
            loss = sum(part.detach() for part in of_parts) / 4
        else:
            inputs, targets = inputs.chunk(size)[rank], targets.chunk(size)[rank]  # this process' slice
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            loss = loss.detach() / size
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(float(loss))
    return losses


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
    alone: dict = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None, **alone)
    losses = train(how, device)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"{how}: loss {losses[0]:.6f} at first, {losses[-1]:.6f} at the end")
    dist.barrier()  # nobody leaves while another rank still works
    dist.destroy_process_group()
