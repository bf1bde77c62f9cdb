"""What the shared loop costs, and how the strategies by hand compare with PyTorch's.

    python tools/bench.py

1. Milliseconds per step that the scripts' loop (data order, metrics, progress bar, agreement on Ctrl-C) adds to a bare
   loop with the same model, batch and DistributedDataParallel. See below for what they buy.
2. Steps per second of a strategy by hand against PyTorch's, same model and batches: DDP at the default batch and at
   batch 8, tensor parallelism, FSDP, and pipelines under each schedule that both have.
3. How long ranks wait in a pipeline whose stages sleep, at 4 and 8 ranks, against the simulator: the bubble measured
   is within 5% of it, on a machine that does nothing else.
4. Seconds from the command to the first step on two ranks, beside those of a program that only imports torch.

Contenders take turns step by step, or round by round, in one run on the same two ranks. The figure is a ratio or a
difference, and its spread over the rounds; a single time would say more about the machine than about the code.

What the scripts' loop does and a bare one does not, in microseconds of the main thread's processor time: with warm
caches, where each is called again and again, and in the loop, after a step of four layers has filled the caches with
something else (medians of 70 steps on a busy machine; both loops took turns):

    what                                                             warm  in the loop
    reads the step's own examples; the bare loop has one batch         17          170
    averages the loss over the ranks; sees whether each gradient
        is there; precision and scaling can be chosen                  54  200 to 350
    writes a line of metrics.jsonl, which a crash cannot lose,
        and moves the progress bar (on rank 0)                          8          180
    all ranks agree on whether somebody was asked to stop              30          130

One launch; in a busier one the second was 550 to 700. What a line takes in the loop beyond its warm figure is probably
caches, which shorter code would miss too; it was not counted. By the clock a step of 140 ms takes 1.0 to 1.4 ms longer
(400 pairs of steps on a quiet machine): 0.3 for the loss's average, 0.2 to see whether each gradient is there, 0.1 to
0.2 for precision and scaling, 0.5 for the line of metrics and the vote; the data cannot be told from nothing. A message
costs more by the clock than the main thread computes: gloo's threads want one of the two cores. To vote or to write at
every tenth step only would take less; but SIGTERM leaves 30 seconds, and steps may take several.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common import ROOT
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import cross_entropy
from common.run import Run
from common.task import make_task
from tests.helpers import configure

ROUNDS, STEPS, SKIPPED = 9, 15, 3  # the first steps of a round fill caches
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-h1", "zbv", "dualpipev")
# Seconds of forward, backward for input, backward for weight of a sleeping rank's stages: so long that the part of a
# millisecond that a message and waking up cost on two cores is little even beside the smallest bubbles.
SLEEP = (0.4, 0.4, 0.4)


def loops(config) -> list[tuple[float, float]]:
    """For each round the seconds per step of the scripts' loop and of the bare one, which take turns step by step."""
    task = make_task(config)
    mesh = make_mesh(config.axes)
    strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
    bare = bare_loop(config, task)
    rounds = []
    pair: tuple[list[float], list[float]] = ([], [])
    with Run(config, strategy, task) as run:
        batches, steps = run.batches(), run.steps()
        next(steps)
        for number in range(ROUNDS * STEPS):
            for which in (0, 1) if number % 2 else (1, 0):  # who goes first has its data in no cache
                dist.barrier()
                begin = time.perf_counter()
                if which:
                    bare()
                else:
                    strategy.set_learning_rate(run.learning_rate(number))
                    run.log(number, *strategy.step(next(batches)))
                    next(steps, None)
                pair[which].append(time.perf_counter() - begin)
            if len(pair[0]) == STEPS:
                rounds.append((statistics.median(pair[0][SKIPPED:]), statistics.median(pair[1][SKIPPED:])))
                pair = ([], [])
    return rounds


def bare_loop(config, task):
    """A step of what a tutorial shows: one batch in memory, nothing written, nothing counted."""
    model = DistributedDataParallel(task.make_model(), gradient_as_bucket_view=True)
    optimizer = task.make_optimizer(model.parameters())
    own = torch.arange(config.batch_size).chunk(dist.get_world_size())[dist.get_rank()]
    inputs, targets = task.dataset.batch(own)

    def step():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def by_hand_and_torch(configs) -> list[tuple[float, float]]:
    """For each round the steps per second of a strategy by hand and of PyTorch's, which take turns step by step."""
    task = make_task(configs[0])
    mesh = make_mesh(configs[0].axes)
    pair = [c.strategy_class(task.make_model(), task.make_optimizer, c.setup(mesh)) for c in configs]
    rounds = []
    for _ in range(ROUNDS):
        seconds: tuple[list[float], list[float]] = ([], [])
        for step in range(STEPS):
            turn = list(zip(pair, seconds, strict=True))
            for trained, times in turn if step % 2 else turn[::-1]:
                batches = task.micro_batches(step, trained)
                dist.barrier()
                begin = time.perf_counter()
                trained.step(batches)[0].item()
                times.append(time.perf_counter() - begin)
        rounds.append((1 / statistics.median(seconds[0][SKIPPED:]), 1 / statistics.median(seconds[1][SKIPPED:])))
    return rounds


def bubbles() -> None:
    from course.pipeline import sleeping

    print(f"{'bubble of sleeping stages':30}{'measured':>10}{'simulated':>10}{'ratio':>8}   (aim: 0.95 to 1.05)")
    for ranks, name in itertools.product((4, 8), sleeping.schedules.SCHEDULES):
        microbatches = 2 * ranks
        events = launch(sleeping.run, ranks, (name, microbatches, SLEEP), timeout=600)
        measured, simulated = sleeping.bubbles(events, name, microbatches, SLEEP)
        print(f"{f'{name}, {ranks} ranks':30}{measured:10.4f}{simulated:10.4f}{measured / simulated:8.3f}")


def report(name: str, rounds: list[tuple[float, float]], aim: str) -> None:
    ratios = sorted(first / second for first, second in rounds)
    numbers = f"{statistics.median(ratios):8.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    print(f"{name:60}{numbers}   (aim: {aim})", flush=True)


def start_up(rounds: int = 3) -> None:
    """From the command to the end of the first step, and of a program that imports torch and joins a group."""
    bare = (
        "import time, torch, torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); "
        "print(f'{time.time()}\\n', end='', flush=True); dist.destroy_process_group()"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name in ("a program that imports torch and joins a group", "the course's DDP script, to its first step"):
        seconds = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                begin = time.time()
                if name.startswith("a program"):
                    file = Path(folder, "bare.py")
                    file.write_text(bare)
                    done = subprocess.run([*launcher, str(file)], capture_output=True, text=True, env=environment)
                    seconds.append(max(map(float, done.stdout.split())) - begin)
                else:
                    options = ["--distributed", "--steps=1", "--checkpoint-every=0", f"--run-dir={folder}/run"]
                    script = str(ROOT / "distributed_training.py")
                    subprocess.run([*launcher, script, *options], capture_output=True, env=environment, check=True)
                    written = Path(folder, "run", "metrics.jsonl")
                    json.loads(written.read_text())
                    seconds.append(written.stat().st_mtime - begin)
        print(f"{name:60}{statistics.median(seconds):8.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)


def main():
    print(f"{ROUNDS} rounds of {STEPS} steps, 2 ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    start_up()
    with tempfile.TemporaryDirectory() as folder:
        steps = ROUNDS * STEPS
        line = "--strategy ddp --checkpoint-every 0 --log-every 1000"
        config = configure(line, 2, steps=steps, run_dir=f"{folder}/run")
        rounds = launch(loops, 2, (config,), timeout=900)[0]
        more = sorted(1000 * (shared - bare) for shared, bare in rounds)
        name = "the scripts' loop, milliseconds a step above a bare loop"
        print(f"{name:60}{statistics.median(more):8.2f}  ({more[0]:.2f} to {more[-1]:.2f})   (aim: <= 0.5)", flush=True)
        report("the scripts' loop against a bare one (speed)", [(b, s) for s, b in rounds], ">= 0.97")
        lines = {
            "ddp by hand against DistributedDataParallel": "--strategy ddp",
            "the same at batch 8": "--strategy ddp --batch-size 8",
            "tensor by hand against DTensor": "--strategy tensor",
            "fsdp by hand against fully_shard": "--strategy fsdp",
        } | {
            f"pipeline by hand against PyTorch's: {name}": f"--strategy pipeline --schedule {name} --microbatches 8"
            for name in SCHEDULES
        }
        for number, (name, line) in enumerate(lines.items()):
            configs = [
                configure(line, 2, implementation=kind, run_dir=f"{folder}/{number}-{kind}")
                for kind in ("by-hand", "pytorch")
            ]
            report(name, launch(by_hand_and_torch, 2, (configs,), timeout=900)[0], ">= 1")
    bubbles()


if __name__ == "__main__":
    main()
