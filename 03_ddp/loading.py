"""Five ways to feed the ranks: who reads, who decodes and who sends. What a step learns from is always the same.

A way is called as load(dataset, plan, start) and gives this rank's micro-batches of step `start`, of the next, and so
on, on the slices that common/data.py defines. Start one with

    torchrun --nproc_per_node=2 distributed_training.py --distributed --loading stream

`dispatch` and `shard` need a dataset that finds any example by its number: size, batch(indices). The other three read
a stream, as from a file or a socket: size, record(index) for the raw bytes, decode(record).
"""

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from common import ROOT
from common.data import Plan, epoch_order, global_batch, shard

WORKERS = 2  # processes per rank
# Workers are forked where that works: at once, and whatever the dataset is. They are made while no collective is
# under way and call none, so they never miss the threads of gloo and NCCL, which do not exist in them.
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def dispatch(dataset, plan: Plan, start: int = 0) -> Iterator[list]:
    """Rank 0 loads whole global batches and sends every rank its slice; all take part in each step. On GPUs the slices
    travel from rank 0's GPU to the others', by NCCL."""
    described, group = None, dist.group.WORLD  # data parallelism alone: all ranks read slices of each batch
    for step in range(start, plan.steps):
        batch = []
        if plan.data_rank == 0:
            batch = dataset.batch(global_batch(plan.seed, step, plan.batch_size, dataset.size))
        if described is None:  # once: what the tensors are that the others shall receive
            described = [[(tensor.shape[1:], tensor.dtype) for tensor in batch]]
            dist.broadcast_object_list(described, group=group, group_src=0)
        mine = [torch.empty(plan.slice_size, *shape, dtype=dtype, device=plan.device) for shape, dtype in described[0]]
        for number, part in enumerate(mine):
            whole = batch[number].to(plan.device).chunk(plan.data_size) if batch else None
            slices = [piece.contiguous() for piece in whole] if whole else None
            dist.scatter(part, slices, group=group, group_src=0)
        yield plan.cut(*mine)


def records(dataset, plan: Plan) -> Iterator[bytes]:
    """The stream: the run's records, raw, one after the other. The only way is from the front."""
    stream = (
        dataset.record(index)
        for epoch in itertools.count()
        for index in epoch_order(plan.seed, epoch, dataset.size).tolist()
    )
    return itertools.islice(stream, plan.examples)


def stream(dataset, plan: Plan, start: int = 0) -> Iterator[list]:
    """Every rank reads and decodes every example, and keeps its slice."""
    batch = []
    for record in itertools.islice(records(dataset, plan), start * plan.batch_size, None):
        batch.append(dataset.decode(record))
        if len(batch) == plan.batch_size:
            first = plan.data_rank * plan.slice_size
            yield plan.cut(*default_collate(batch[first : first + plan.slice_size]))
            batch = []


def shard_stream(dataset, plan: Plan, start: int = 0) -> Iterator[list]:
    """Every rank reads every record, and decodes those of its slice."""
    for inputs, targets in slices(dataset, plan, start):
        yield plan.cut(inputs, targets)


def slices(dataset, plan: Plan, start: int, worker: int = 0, workers: int = 1) -> Iterator[list]:
    """This rank's slices (inputs, targets) of the stream; of several workers, each makes some."""
    mine = []
    for position, record in enumerate(records(dataset, plan)):
        step, place = divmod(position, plan.batch_size)
        if step < start or (step - start) % workers != worker:
            continue
        if place // plan.slice_size == plan.data_rank:
            mine.append(dataset.decode(record))
        if place == plan.batch_size - 1:  # all ranks have their slices of this batch, or none has
            yield default_collate(mine)
            mine = []


class Slices(IterableDataset):
    """`slices`, divided between the workers of a DataLoader, which takes from them in turn."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __iter__(self):
        worker = get_worker_info()
        return slices(*self.arguments, worker.id, worker.num_workers)


def shard_stream_workers(dataset, plan: Plan, start: int = 0) -> Iterator[list]:
    """The same in processes beside the rank, which read and decode ahead while the rank computes."""
    if START_METHOD == "spawn" and str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # a spawned worker imports this file by its full name
    loader = DataLoader(
        Slices(dataset, plan, start),
        batch_size=None,  # the slices are batches already
        num_workers=WORKERS,
        multiprocessing_context=START_METHOD,
        worker_init_fn=leave_signals_to_the_rank,
        generator=torch.Generator(),  # the workers' seeds shall not be drawn from the model's random numbers
    )
    for inputs, targets in loader:
        yield plan.cut(inputs, targets)


def leave_signals_to_the_rank(_worker: int) -> None:
    """A terminal sends Ctrl-C to a rank's whole process group, and torchrun SIGTERM: a worker that heard them would end
    before the rank has finished its step and saved. The rank ends its workers, and they end by themselves without it:
    PyTorch's look every 5 seconds whether it lives. On Linux the system tells them at once, since a forked worker has
    the rank's connections, too, and while one is open the other ranks wait for a rank that is dead.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    else:  # on Windows
        signal.signal(signal.SIGINT, signal.SIG_IGN)


LOADING = {
    "dispatch": dispatch,
    "shard": shard,  # what every strategy does by default, so it stands in common/data.py
    "stream": stream,
    "shard-stream": shard_stream,
    "shard-stream-workers": shard_stream_workers,
}
