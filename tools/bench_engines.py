"""What a step costs with each engine, against PyTorch's own, and what else 06_fsdp/07_engines.ipynb shows; two ranks.

    python tools/bench_engines.py              # or: make bench-engines
    python tools/bench_engines.py loading      # this part alone

Writes 06_fsdp/engines.json. An engine and PyTorch take turns, step by step, in one launch, on the same batches from the
same weights; the figure is the ratio of their median times in a round, and its spread over the rounds. The Trainer,
whose loop is its own, is compared run by run.
"""

import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common import ROOT, engine_files, installed
from common.data import shard
from common.errors import Parser
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import make_mesh
from common.task import make_task
from course.ddp.loading import dispatch
from course.strategies import STRATEGIES
from tests.helpers import configure, do_not_draw, metrics

ROUNDS, STEPS, SKIPPED = 5, 8, 2
PACKAGES = ("torch", "accelerate", "lightning", "deepspeed", "transformers", "peft", "bitsandbytes")
LOADED = 60  # steps


OF = {name: entry.engines for name, entry in STRATEGIES.items() if entry.engines}


def turns(configs) -> tuple[list[tuple[float, float]], float, list[int]]:
    """For each round the seconds per step of PyTorch and of an engine; the largest relative difference of their losses;
    the bytes that each passes to collectives in a step."""
    task, mesh = make_task(configs[0]), make_mesh(configs[0].axes)
    pair = [c.strategy_class(task.make_model(), task.make_optimizer, c.setup(mesh)) for c in configs]
    rounds, largest = [], 0.0
    for number in range(ROUNDS):
        seconds: tuple[list[float], list[float]] = ([], [])
        for step in range(number * STEPS, (number + 1) * STEPS):
            turn = list(enumerate(pair))
            losses = {}
            for which, trained in turn if step % 2 else turn[::-1]:
                batches = task.micro_batches(step, trained)
                dist.barrier()
                begin = time.perf_counter()
                losses[which] = trained.step(batches)[0].item()
                seconds[which].append(time.perf_counter() - begin)
            largest = max(largest, abs(losses[1] / losses[0] - 1))
        rounds.append((statistics.median(seconds[0][SKIPPED:]), statistics.median(seconds[1][SKIPPED:])))
    sent: list[int] = []
    for trained in pair:
        batches = task.micro_batches(0, trained)
        with Ledger() as ledger:
            trained.step(batches)
        sent.append(ledger.sent)
    return rounds, largest, sent


def row(strategy: str, engine: str, folder: str) -> dict:
    line = f"--strategy {strategy} --checkpoint-every 0 --log-every 1000 --steps {ROUNDS * STEPS}"
    configs = [
        configure(line, 2, implementation=kind, run_dir=f"{folder}/{strategy}-{engine}-{kind}")
        for kind in ("pytorch", engine)
    ]
    if engine == "trainer":
        rounds, largest, sent = [], 0.0, [0, 0]
        for number in range(2):
            runs = []
            for kind in ("pytorch", engine):
                where = Path(folder, f"{number}-{kind}")
                config = configure(line, 2, implementation=kind, run_dir=where)
                launch(alone, 2, (config,), timeout=600)
                runs.append(metrics(where))
            for at in range(SKIPPED, len(runs[0]), STEPS):
                rounds.append(tuple(statistics.median(r["step_seconds"] for r in run[at : at + STEPS]) for run in runs))
            differences = [abs(b["loss"] / a["loss"] - 1) for a, b in zip(*runs, strict=True)]
            largest = max(largest, *differences)
    else:
        rounds, largest, sent = launch(turns, 2, (configs,), timeout=600)[0]
    ratios = sorted(engine_seconds / ours for ours, engine_seconds in rounds)
    return {
        "strategy": strategy,
        "engine": engine,
        "milliseconds of PyTorch": 1000 * statistics.median(ours for ours, _ in rounds),
        "milliseconds of the engine": 1000 * statistics.median(its for _, its in rounds),
        "ratio": statistics.median(ratios),
        "ratio, lowest and highest": [ratios[0], ratios[-1]],
        "largest difference of a loss": largest,
        "bytes in collectives": sent,
    }


def by_sgd(strategy: str, engine: str, folder: str) -> dict:
    """How far the losses differ where the optimizer passes a difference on as it is: AdamW divides by its size."""
    line = f"--strategy {strategy} --optimizer sgd --lr 0.01 --checkpoint-every 0 --steps {ROUNDS * STEPS}"
    configs = [
        configure(line, 2, implementation=kind, run_dir=f"{folder}/{strategy}-{engine}-{kind}-sgd")
        for kind in ("pytorch", engine)
    ]
    difference = launch(turns, 2, (configs,), timeout=600)[0][1]
    return {"strategy": strategy, "engine": engine, "largest difference of a loss": difference}


def alone(config) -> None:
    do_not_draw()
    config.main(config)


def loading() -> list[dict]:
    """On a rank: tokens per second and bytes in collectives of each way to load, for all ranks together."""
    from accelerate import Accelerator

    from course.ddp.with_accelerate import FEEDING

    Accelerator(cpu=True)
    config = configure(size=2, run_dir=tempfile.mkdtemp(), steps=LOADED)
    task = make_task(config)
    ways = {"course: shard": shard, "course: dispatch": dispatch}
    ways |= {f"Accelerate: {name}": way for name, way in FEEDING.items()}
    from common.data import Plan

    plan = Plan(0, config.batch_size, LOADED * config.batch_size, dist.get_rank(), 2)
    found = []
    for name, way in ways.items():
        rates = []
        for _ in range(5):
            dist.barrier()
            begin = time.perf_counter()
            read = sum(inputs.numel() for step in way(task.dataset, plan) for inputs, _ in step)
            rates.append(2 * read / (time.perf_counter() - begin))
        with Ledger() as ledger:
            for _ in way(task.dataset, plan):
                pass
        sent = ledger.sent / LOADED
        found.append({"way": name, "tokens per second": statistics.median(rates), "bytes in collectives a step": sent})
    return found


def adapters() -> tuple[list[float], dict[str, int]]:
    """The loss of each step, and this rank's bytes by part."""
    from common.ranks import process_group
    from course.fsdp import with_qlora

    with process_group() as here:
        settings = engine_files.qlora(str(ROOT / "configs" / "engines" / "fsdp_qlora_small.yaml"))
        return with_qlora.train(settings, here.device)[:2]


def seven_billion() -> dict[str, dict[str, int]]:
    from course.fsdp import with_qlora

    model = with_qlora.make_model(engine_files.qlora(str(ROOT / "configs" / "engines" / "fsdp_qlora.yaml")), "meta")
    return {str(ranks): with_qlora.bytes_by_part(model, True, ranks) for ranks in (1, 2, 4, 8)}


def measure_steps() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return [row(strategy, engine, folder) for strategy, of in OF.items() for engine in of]


def measure_sgd() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        of_deepspeed = [strategy for strategy, of in OF.items() if "deepspeed" in of]
        return [by_sgd(strategy, "deepspeed", folder) for strategy in of_deepspeed]


def measure_qlora() -> dict[str, dict]:
    names = ("losses", "bytes")
    return {str(n): dict(zip(names, launch(adapters, n, timeout=300)[0], strict=True)) for n in (1, 2)}


PARTS = {
    "steps": measure_steps,
    "by SGD": measure_sgd,
    "loading": lambda: launch(loading, 2, timeout=300)[0],
    "qlora, small": measure_qlora,
    "qlora, 7B": seven_billion,
}


def main() -> None:
    """Measure the parts that are named, by default all, and write them down beside those that are there."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART", help=", ".join(PARTS))
    parts = parser.asked().parts or PARTS
    file = ROOT / "06_fsdp" / "engines.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    stored["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    stored["machine"] = f"{os.cpu_count()} cores, 2 ranks, gloo; {ROUNDS} rounds of {STEPS} steps"
    for part in parts:
        stored[part] = PARTS[part]()
        file.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    installed.at_start(PACKAGES, "requirements-engines.txt")
    torch.set_num_threads(1)
    main()
