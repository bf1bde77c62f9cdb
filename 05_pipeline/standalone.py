"""Pipeline parallelism: every rank has some of the layers, and passes its outputs on to the next rank.

A batch is cut into micro-batches that follow each other, so that the ranks compute at the same time.

    python standalone.py
    torchrun --standalone --nproc_per_node=2 standalone.py
    torchrun --standalone --nproc_per_node=4 standalone.py 8     # until epoch 8; goes on from the checkpoint
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 standalone.py  # on each node
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4 if len(sys.argv) < 2 else int(sys.argv[1]) if sys.argv[1].isdigit() else sys.exit("say how many epochs")
CHECKPOINTS = Path("checkpoint-pipeline")  # all ranks write into it: on several nodes, put it on a disk that they share
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # else the ranks' parameter groups overwrite each other


def train(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    # All ranks together are one replica of the model, so they read the same batches: the first rank needs the images
    # of a batch and the last rank its labels. By default, a sampler takes each rank for a replica.
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=96, sampler=sampler, drop_last=True)  # a stage's shapes must never change

    torch.manual_seed(0)  # every rank makes the same model and keeps its part, under the same names as in the whole
    blocks = [nn.Sequential(nn.Linear(width, 128), nn.ReLU()) for width in (64, 128, 128)]
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    if world_size > len(model):
        sys.exit(f"the {len(model)} blocks cannot be divided among {world_size} ranks: start fewer")
    part = model[len(model) * rank // world_size : len(model) * (rank + 1) // world_size].to(device)
    # Examples of a micro-batch that comes in and goes out. Without them the first step runs each stage once more, to
    # find the shapes, on memory with anything in it, which is what BatchNorm's running statistics would then see.
    comes = torch.empty(96 // 8, 64 if rank == 0 else 128, device=device, requires_grad=rank > 0)
    goes = torch.empty(96 // 8, 10 if rank == world_size - 1 else 128, device=device, requires_grad=True)
    stage = PipelineStage(part, rank, world_size, device, input_args=comes, output_args=goes)
    # The loss is a mean, so the schedule averages the gradients of the micro-batches (scale_grads=True, the default).
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    # A folder for each epoch. Its .metadata is written last, and so marks a complete checkpoint.
    done = max((int(file.parent.name) for file in CHECKPOINTS.glob("*/.metadata")), default=0)
    if done:
        if stage.is_last:
            print(f"{CHECKPOINTS}: {done} epochs are done, of {EPOCHS}; delete it to begin anew")
        weights, momenta = get_state_dict(part, optimizer, options=BY_NAME)
        # In place. Each rank reads its own layers, whatever number of ranks has saved them.
        dcp.load({"model": weights, "optimizer": momenta}, checkpoint_id=CHECKPOINTS / str(done))
        set_state_dict(part, optimizer, model_state_dict=weights, optim_state_dict=momenta, options=BY_NAME)

    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses, of_epoch = [], []
        for batch, targets in loader:
            inputs = [batch.to(device)] if stage.is_first else []  # other stages get theirs from the rank before
            target = targets.to(device) if stage.is_last else None
            optimizer.zero_grad()
            # All forward and backward passes. By default the last rank would keep the outputs of all micro-batches.
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            optimizer.step()
            of_epoch += [loss.detach() for loss in losses]  # of this batch's micro-batches; only the last rank has any
        if stage.is_last:
            print(f"epoch {epoch + 1}: loss {torch.stack(of_epoch).mean():.4f}")
        weights, momenta = get_state_dict(part, optimizer, options=BY_NAME)
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
