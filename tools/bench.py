"""What the shared loop costs, and how the strategies by hand compare with PyTorch's.

    make bench                         prints each figure, its interval, and what it was at the last release
    python tools/bench.py --release    writes each to tools/bench.csv as well, as that of a release
    python tools/bench.py --rounds 3   fewer rounds than the 9 of each, and wider intervals

1. What the scripts' loop (data order, metrics, progress bar, agreement on Ctrl-C) costs per step: the processor time of
   its own work on rank 0 of two, without what others wait for; and milliseconds by the clock that it adds to the steps
   of the same strategy in a loop that does nothing else, and to a bare loop with the same model, batch and
   DistributedDataParallel, which besides does not average the loss over the ranks, look whether each gradient is there,
   or choose precision and scaling. These belong to the strategy's step, which is the lesson, and cost 0.06 ms of
   processor time; by the clock ranks wait for the average, too. The differences are those of a model so small that
   its step takes 15 ms; the ratio of speeds is that of the scripts' own model. (A busy machine makes
   processor time longer, too: with 15 to 30 processes for each core three runs gave 0.21, 0.26 and 0.75 ms. In the
   first, 0.08 was for reading the step's examples, 0.06 for the line of metrics, which a crash cannot lose, with the
   progress bar, and 0.07 for the vote on stopping.)
2. Steps per second of a strategy by hand against PyTorch's, same model and batches: DDP at the default batch and at
   batch 8, tensor parallelism, FSDP, and pipelines under each schedule that both have.
3. How long ranks wait in a pipeline whose stages sleep, at 4 and 8 ranks, against the simulator: the bubble measured
   is within 5% of it, on a machine that does nothing else.
4. Seconds from the command to the end of the first step on two ranks, against those of a program that takes one step
   of DistributedDataParallel and does nothing else. (A program that only joins a group is no measure: in torch 2.13
   whoever makes an optimizer imports torch._dynamo, by `torch._disable_dynamo` around Optimizer.add_param_group, and
   DistributedDataParallel's constructor asks it for its mode: 1.3 s on a quiet machine. By processor time of one
   process and a tiny model the two cannot be told apart, 2.8 s each in the median of three.)

Contenders take turns step by step, or round by round, in one run on the same two ranks. The figure is the median of
ratios or differences over the rounds; its interval has the middle nine tenths of 2,000 medians of as many rounds drawn
with replacement. A single time would say more about the machine than about the code. bench.csv has with each figure how
many rounds it is of and the machine's load then, in processes that would like to run for each core: ratios of a busy
machine are ratios still, but bubbles and milliseconds aren't what a quiet one has.
"""

import csv
import itertools
import json
import os
import random
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
from common.errors import Parser
from common.lab.launch import launch
from common.mesh import make_mesh
from common.model import cross_entropy
from common.run import Run
from common.task import make_task
from tests.helpers import configure

ROUNDS, STEPS, SKIPPED = 9, 15, 3  # the first steps of a round fill caches
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zb", "zb-h1", "zbv", "dualpipev")
# A model whose step takes 15 ms, not 200: what the loop adds is the same, and differences of 0.3 ms can be seen.
SMALL, SMALL_ROUNDS = "--layers 1 --width 16 --heads 2", 5
# Seconds of forward, backward for input, backward for weight of a sleeping rank's stages: so long that the part of a
# millisecond that a message and waking up cost on two cores is little even beside the smallest bubbles.
SLEEP = (0.4, 0.4, 0.4)
RELEASED = ROOT / "tools" / "bench.csv"  # each figure at the last release: name, median, low, high


def loops(config, rounds: int) -> list[tuple[float, ...]]:
    """For each round the seconds per step of the scripts' loop, of the strategy's steps alone, and of the bare loop,
    which take turns step by step."""
    task = make_task(config)
    mesh = make_mesh(config.axes)
    strategies = [config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh)) for _ in range(2)]
    with Run(config, strategies[0], task) as run:
        batches = run.batches()
        alone, batch = strategies[1], task.micro_batches(0, strategies[1])
        numbers = itertools.count()

        def in_the_loop():
            number = next(numbers)
            strategies[0].set_learning_rate(run.learning_rate(number))
            run.end_step(*strategies[0].step(next(batches)))

        return take_turns([in_the_loop, lambda: alone.step(batch)[0].item(), bare_loop(config, task)], rounds)


def own_work(config, rounds: int) -> list[float]:
    """For each round the seconds of processor time that a step of the scripts' loop takes on this rank for what is not
    the strategy's: reading, logging and voting, the median of STEPS steps."""
    task = make_task(config)
    strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
    loss, seconds = torch.ones(()), []
    with Run(config, strategy, task) as run:
        batches = run.batches()
        for number in run.steps:
            seconds.append(time.thread_time())
            next(batches)
            strategy.set_learning_rate(run.learning_rate(number))
            run.end_step(loss, loss)
    seconds = [after - before for before, after in itertools.pairwise(seconds)]  # with the vote
    return [statistics.median(seconds[k * STEPS : (k + 1) * STEPS][SKIPPED:]) for k in range(rounds)]


def take_turns(contenders, how_many: int) -> list[tuple[float, ...]]:
    """For each of the rounds the seconds that each contender takes, the median of STEPS calls but the first."""
    rounds = []
    for _ in range(how_many):
        times: list[list[float]] = [[] for _ in contenders]
        for step in range(STEPS):
            turn = list(zip(contenders, times, strict=True))
            for contender, seconds in turn if step % 2 else turn[::-1]:  # who goes first has its data in no cache
                dist.barrier()
                begin = time.perf_counter()
                contender()
                seconds.append(time.perf_counter() - begin)
        rounds.append(tuple(statistics.median(seconds[SKIPPED:]) for seconds in times))
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


def by_hand_and_torch(configs, rounds: int) -> list[tuple[float, ...]]:
    """For each round the seconds per step of a strategy by hand and of PyTorch's, which take turns step by step."""
    task = make_task(configs[0])
    mesh = make_mesh(configs[0].axes)
    pair = [c.strategy_class(task.make_model(), task.make_optimizer, c.setup(mesh)) for c in configs]
    batches = [task.micro_batches(0, strategy) for strategy in pair]
    return take_turns(
        [
            lambda strategy=strategy, batch=batch: strategy.step(batch)[0].item()
            for strategy, batch in zip(pair, batches, strict=True)
        ],
        rounds,
    )


COLUMNS = "name", "median", "low", "high", "rounds", "load per core"


class Figures:
    """Figures as they are found, each beside that of the last release. With `release` each is written down at once in
    that one's place, so that a run that is stopped has not been in vain."""

    def __init__(self, release: bool):
        self.release = release
        self.rows: dict[str, dict] = {}
        if RELEASED.exists():
            with open(RELEASED, newline="") as file:
                self.rows = {row["name"]: row for row in csv.DictReader(file)}
        print(f"{'':64}{'now':>8}  {'interval':18}{'at the last release':24}aim")

    def add(self, name: str, values: list[float], aim: str) -> None:
        middle, (low, high) = statistics.median(values), interval(values)
        spread, before = f"({low:.3f} to {high:.3f})", self.rows.get(name)
        released = f"{before['median']} ({before['low']} to {before['high']})" if before else "-"
        print(f"{name:64}{middle:8.3f}  {spread:18}{released:24}{aim}", flush=True)
        if self.release:
            load = f"{os.getloadavg()[0] / (os.cpu_count() or 1):.1f}"
            numbers = [*(f"{number:.3f}" for number in (middle, low, high)), len(values), load]
            self.rows[name] = dict(zip(COLUMNS, [name, *numbers], strict=True))
            with open(RELEASED, "w", newline="") as file:
                rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                rows.writeheader()
                rows.writerows(self.rows.values())


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The middle nine tenths of the medians of as many values, drawn with replacement."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 20], medians[-draws // 20 - 1]


def bubbles(figures: Figures) -> None:
    from course.pipeline import sleeping

    for ranks, name in itertools.product((4, 8), sleeping.schedules.SCHEDULES):
        microbatches = 2 * ranks
        events = launch(sleeping.run, ranks, (name, microbatches, SLEEP), timeout=600)
        measured, simulated = sleeping.bubbles(events, name, microbatches, SLEEP)
        figures.add(f"bubble against the simulator's: {name}, {ranks} ranks", [measured / simulated], "0.95 to 1.05")


ONE_STEP = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
print(f"{time.time()}\\n", end="", flush=True)
del model, optimizer  # what holds the group outlives it otherwise, and gloo's threads may then abort the program
dist.destroy_process_group()
"""


def start_up(rounds: int) -> list[tuple[float, float]]:
    """For each round the seconds from the command to the end of the first step: of the course's DDP script, and of a
    program that does nothing else. They take turns."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bare.py")
            file.write_text(ONE_STEP)
            begin = time.time()
            done = subprocess.run([*launcher, str(file)], capture_output=True, text=True, env=environment, check=False)
            first, second = map(float, done.stdout.split())  # its end, which gloo's threads may abort, is not timed
            bare = max(first, second) - begin
            options = ["--distributed", "--steps=1", "--checkpoint-every=0", f"--run-dir={folder}/run"]
            begin = time.time()
            script = [*launcher, str(ROOT / "distributed_training.py"), *options]
            subprocess.run(script, capture_output=True, env=environment, check=True)
            written = Path(folder, "run", "metrics.jsonl")
            json.loads(written.read_text())
            found.append((written.stat().st_mtime - begin, bare))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="write the figures to tools/bench.csv")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how many of each (default {ROUNDS})")
    options = parser.asked(argv)
    count = max(1, options.rounds)
    print(f"{count} rounds of {STEPS} steps, 2 ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    figures = Figures(options.release)
    starts = [ours / bare for ours, bare in start_up(min(5, count))]
    figures.add("seconds to the first step / a bare step of DDP", starts, "<= 1.2")
    with tempfile.TemporaryDirectory() as folder:
        line = "--strategy ddp --checkpoint-every 0 --log-every 1000"
        config = configure(line, 2, steps=count * STEPS, run_dir=f"{folder}/run")
        own = configure(line, 2, steps=count * STEPS + 1, run_dir=f"{folder}/own")
        work = [1000 * seconds for seconds in launch(own_work, 2, (own, count), timeout=900)[0]]
        figures.add("the scripts' loop: ms of processor time a step, its own work", work, "<= 0.3")
        small = configure(f"{line} {SMALL}", 2, steps=SMALL_ROUNDS * count * STEPS, run_dir=f"{folder}/small")
        rounds = launch(loops, 2, (small, SMALL_ROUNDS * count), timeout=900)[0]
        above = [1000 * (loop - alone) for loop, alone, _ in rounds]
        figures.add("the scripts' loop: ms a step above the strategy's steps", above, "<= 0.3")
        above = [1000 * (loop - bare) for loop, _, bare in rounds]
        figures.add("the scripts' loop: ms a step above a bare loop", above, "<= 0.5")
        rounds = launch(loops, 2, (config, count), timeout=900)[0]
        figures.add("speed of the scripts' loop / of a bare one", [b / loop for loop, _, b in rounds], ">= 0.97")
        lines = {
            "ddp by hand / DistributedDataParallel": "--strategy ddp",
            "ddp by hand / DistributedDataParallel, batch 8": "--strategy ddp --batch-size 8",
            "tensor by hand / DTensor": "--strategy tensor",
            "fsdp by hand / fully_shard": "--strategy fsdp",
        } | {
            f"pipeline by hand / PyTorch's: {name}": f"--strategy pipeline --schedule {name} --microbatches 8"
            for name in SCHEDULES
        }
        for number, (name, line) in enumerate(lines.items()):
            configs = [
                configure(line, 2, implementation=kind, run_dir=f"{folder}/{number}-{kind}")
                for kind in ("by-hand", "pytorch")
            ]
            seconds = launch(by_hand_and_torch, 2, (configs, count), timeout=900)[0]
            figures.add(f"speed of {name}", [torchs / by_hand for by_hand, torchs in seconds], ">= 1")
    bubbles(figures)


if __name__ == "__main__":
    main()
