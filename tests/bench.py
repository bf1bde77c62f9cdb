"""What the shared loop costs, and how the strategies by hand compare with PyTorch's.

    python tests/bench.py

1. Steps per second of the DDP script's loop (data order, metrics, progress bar, agreement on Ctrl-C) against a bare
   loop with the same model, batch and DistributedDataParallel.
2. Steps per second of `--strategy ddp --by-hand` against `--strategy ddp`, same model and batches.
3. The same for `--strategy fsdp`: parameters gathered for each block by hand, and by fully_shard.
4. The same for pipelines: the executor by hand against PyTorch's class for the same schedule, on the same stages.
5. How long ranks wait in a pipeline whose stages sleep, at 4 and 8 ranks, against the simulator: the bubble measured
   is within 5% of it, on a machine that does nothing else.

Each in one run, in turns, on the same two ranks. The figure is a ratio, and its spread over the rounds; a single time
would say more about the machine than about the code.
"""

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from course.strategies import load
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.config import Config
from common.lab.launch import launch
from common.model import cross_entropy
from common.ranks import Ranks
from common.task import make_task
from common.train import train

ROUNDS, STEPS, SKIPPED = 9, 15, 3  # the first steps of a round fill caches
# Seconds of forward, backward for input, backward for weight of a sleeping rank's stages: so long that the part of a
# millisecond that a message and waking up cost on two cores is little even beside the smallest bubbles.
SLEEP = (0.4, 0.4, 0.4)


def loops(folder: str) -> list[tuple[float, float]]:
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


def by_hand_and_torch(strategy: str, **options) -> list[tuple[float, float]]:
    """For each round the steps per second of a strategy by hand and of PyTorch's, which take turns step by step."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    task = make_task(Config(strategy=strategy))
    pair = [
        load(strategy, by_hand)(task.make_model(), task.make_optimizer, ranks, **options) for by_hand in (True, False)
    ]
    rounds = []
    for _ in range(ROUNDS):
        seconds = ([], [])
        for step in range(STEPS):
            turn = list(zip(pair, seconds, strict=True))
            for trained, times in turn if step % 2 else turn[::-1]:  # who goes first has its data in no cache
                batches = task.micro_batches(step, trained)
                dist.barrier()
                begin = time.perf_counter()
                trained.step(batches)[0].item()
                times.append(time.perf_counter() - begin)
        rounds.append(tuple(1 / statistics.median(times[SKIPPED:]) for times in seconds))
    return rounds


def pipelines(schedule: str) -> list[tuple[float, float]]:
    return by_hand_and_torch("pipeline", schedule=schedule, microbatches=8)


def bubbles() -> None:
    from course.pipeline import sleeping
    print(f"{'bubble of sleeping stages':30}{'measured':>10}{'simulated':>10}{'ratio':>8}   (aim: 0.95 to 1.05)")
    for ranks, name in itertools.product((4, 8), sleeping.schedules.SCHEDULES):
        microbatches = 2 * ranks
        events = launch(sleeping.run, ranks, (name, microbatches, SLEEP), timeout=600)
        measured, simulated = sleeping.bubbles(events, name, microbatches, SLEEP)
        print(f"{f'{name}, {ranks} ranks':30}{measured:10.4f}{simulated:10.4f}{measured / simulated:8.3f}")


def rate(begins: list[float]) -> float:
    """Steps per second, from the time between the beginnings of successive steps: the median one."""
    return 1 / statistics.median(later - earlier for earlier, later in itertools.pairwise(begins[SKIPPED:]))


def report(names: tuple[str, str], rounds: list[tuple[float, float]], aim: str) -> None:
    ratios = sorted(first / second for first, second in rounds)
    rates = [statistics.median(numbers) for numbers in zip(*rounds, strict=True)]
    print("   ".join(f"{name} {rate:.2f} steps/s" for name, rate in zip(names, rates, strict=True)) + "   (medians)")
    print(f"ratio {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}   (aim: {aim})")


def main():
    print(f"{ROUNDS} rounds of {STEPS} steps, 2 ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere):  # what the ranks print
            rounds = launch(loops, 2, (folder,), timeout=600)[0]
    report(("shared loop", "bare loop"), rounds, ">= 0.97")
    for strategy, name in (("ddp", "DistributedDataParallel"), ("fsdp", "fully_shard")):
        rounds = launch(by_hand_and_torch, 2, (strategy,), timeout=600)[0]
        report((f"{strategy} by hand", name), rounds, ">= 1")
    for schedule in ("1f1b", "interleaved", "interleaved-zb"):
        rounds = launch(pipelines, 2, (schedule,), timeout=600)[0]
        report((f"{schedule} by hand", "PyTorch's"), rounds, ">= 1")
    bubbles()


if __name__ == "__main__":
    main()
