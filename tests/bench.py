"""What the shared loop costs.

    python tests/bench.py

Steps per second of the DDP script's loop (data order, metrics, progress bar, agreement on Ctrl-C) against a bare
loop with the same model, batch and DistributedDataParallel: in one run, in turns, on the same two ranks. The figure
is a ratio, and its spread over the rounds; a single time would say more about the machine than about the loop.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.launch import launch
from common.model import cross_entropy
from common.ranks import Ranks
from common.strategies import load
from common.task import make_task
from common.train import train

ROUNDS, STEPS, SKIPPED = 9, 15, 3  # the first steps of a round fill caches


def measure(folder: str) -> list[tuple[float, float]]:
    """For each round the steps per second of the shared loop and of the bare one."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    return [(shared_loop(Path(folder, str(number)), ranks), bare_loop(ranks)) for number in range(ROUNDS)]


def shared_loop(folder: Path, ranks: Ranks) -> float:
    config = Config(strategy="ddp", steps=STEPS, checkpoint_every=0, run_dir=str(folder))
    task = make_task(config)
    strategy = load("ddp", by_hand=False)(task.make_model(), task.make_optimizer, ranks)
    begins, step = [], strategy.step

    def timed_step(micro_batches):
        begins.append(time.perf_counter())
        return step(micro_batches)

    strategy.step = timed_step
    train(strategy, task, config, ranks)
    return rate(begins)


def bare_loop(ranks: Ranks) -> float:
    """What a tutorial shows: one batch in memory, nothing written, nothing counted."""
    config = Config(strategy="ddp")
    task = make_task(config)
    model = DistributedDataParallel(task.make_model())
    optimizer = task.make_optimizer(model.parameters())
    own = torch.arange(config.batch_size).chunk(ranks.size)[ranks.rank]
    inputs, targets = task.dataset.batch(own)
    begins = []
    for _ in range(STEPS):
        begins.append(time.perf_counter())
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    return rate(begins)


def rate(begins: list[float]) -> float:
    """Steps per second, from the time between the beginnings of successive steps: the median one."""
    return 1 / statistics.median(later - earlier for earlier, later in itertools.pairwise(begins[SKIPPED:]))


def main():
    print(f"{ROUNDS} rounds of {STEPS} steps, 2 ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        out, sys.stdout = sys.stdout, nowhere  # what the ranks print
        rounds = launch(measure, 2, (folder,), timeout=600)[0]
        sys.stdout = out
    ratios = sorted(shared / bare for shared, bare in rounds)
    shared, bare = (statistics.median(numbers) for numbers in zip(*rounds, strict=True))
    print(f"shared loop {shared:6.2f} steps/s   bare loop {bare:6.2f} steps/s   (medians)")
    print(f"ratio       {statistics.median(ratios):6.3f}   from {ratios[0]:.3f} to {ratios[-1]:.3f}   (aim: >= 0.97)")


if __name__ == "__main__":
    main()
