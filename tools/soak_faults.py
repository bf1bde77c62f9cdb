"""Disturb runs in every way, resume them, and compare what comes out with the undisturbed run: bit for bit.

    python tools/soak_faults.py                  120 faults, which takes some minutes
    python tools/soak_faults.py --faults 1000    more of them
    python tools/soak_faults.py --seed 7         others

Each fault hits one rank of a run, in a step or while a checkpoint is written, moved into place or removed. The ranks
that are left end, and the run is started again, as torchrun --max-restarts does. Exit code 0 when every run ended as
the undisturbed one.
"""

import errno
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from common import manifest
from common.checkpoint import Writer, whole_tensors
from common.errors import Parser
from common.lab.launch import RankFailed, launch
from common.record import Record
from common.run_dir import RunDirectory
from tests.helpers import SMALL, configure, do_not_draw, metrics, numbers

STEPS = 12
RUNS = [
    "--strategy ddp",
    "--strategy fsdp --by-hand",
    "--strategy ddp --by-hand --async-checkpoint",
    "--strategy tensor",
]
KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP", "out of memory", "full disk", "read-only disk", "lost file")
# Where they hit: in a step; before and after a rank writes its files; and on rank 0 before the manifest is written,
# when the folder has just been moved into place, when an old one is removed, and when metrics are written.
MOMENTS = ("step", "before writing", "after writing", "manifest", "moved", "removing", "metrics")
OF_RANK_0 = ("manifest", "moved", "removing", "metrics")


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when: the `nth` time (from 1) in an attempt that the rank gets to `moment`."""

    kind: str
    rank: int
    moment: str
    nth: int


def any_fault(choose: random.Random, size: int) -> Fault:
    kind, moment = choose.choice(KINDS), choose.choice(MOMENTS)
    if kind == "lost file":
        moment = "after writing"
    rank = 0 if moment in OF_RANK_0 else choose.randrange(size)
    return Fault(kind, rank, moment, choose.randint(1, 6 if moment in ("step", "metrics") else 2))


def happen(kind: str, files: list[Path]) -> None:
    """`files` are those that the rank has written."""
    if kind == "SIGSTOP":  # nothing wakes it up again; whoever watches kills it
        stopped = os.getpid()
        if os.fork() == 0:
            time.sleep(0.2)
            os.kill(stopped, signal.SIGKILL)
            os._exit(0)
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif kind == "out of memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    elif kind == "lost file":
        for path in files:
            path.unlink()
    else:
        number = errno.ENOSPC if kind == "full disk" else errno.EROFS
        raise OSError(number, os.strerror(number))


def disturb(fault: Fault) -> None:
    """Have the fault happen to this process, which is its rank, by hooks at every moment."""
    seen: Counter[str] = Counter()
    mine = fault.rank == dist.get_rank()

    def reached(moment: str, files=()) -> None:
        seen[moment] += 1
        if mine and moment == fault.moment and seen[moment] == fault.nth:
            happen(fault.kind, list(files))

    def before(owner, name: str, moment: str, applies=lambda *_args: True) -> None:
        original = getattr(owner, name)

        def hooked(*args, **kwargs):
            reached(moment) if applies(*args) else None
            return original(*args, **kwargs)

        setattr(owner, name, hooked)

    write_data = Writer.write_data

    def writing(writer, plan, planner):
        reached("before writing")
        written = write_data(writer, plan, planner)
        reached("after writing", writer.path.glob(f"{plan.storage_data.prefix}*"))
        return written

    Writer.write_data = writing  # type: ignore[method-assign]  # the hook is the point
    before(Record, "log", "step")
    before(RunDirectory, "log", "metrics")
    before(manifest, "seal", "manifest")
    before(manifest, "sync", "moved", lambda path: not path.name.startswith(".") and path.name != manifest.MANIFEST)
    before(manifest, "remove", "removing")


def attempt(line: str, folder: Path, size: int, fault: Fault | None, number: int) -> None:
    """On a rank: begin the run in `folder`, or go on with it, as an attempt of torchrun does."""
    do_not_draw()
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder.parent / "none_soak" / f"attempt_{number}" / "0" / "error.json")
    options = f"{line} --steps {STEPS} --checkpoint-every 2 --run-dir {folder}"
    config = configure(options, size, dist.get_rank(), **SMALL)
    if fault:
        disturb(fault)
    config.main(config)


def endure(line: str, folder: Path, faults: list[Fault], size: int = 2) -> Counter:
    """Start a run again and again, each time with the next fault, until it is done. How often which kind hit it.
    Raises AssertionError where a checkpoint is lost or not whole."""
    hits: Counter = Counter()
    best = 0
    for number, fault in enumerate([*faults, None]):
        try:
            launch(attempt, size, (line, folder, size, fault, number), timeout=120)
        except RankFailed as error:
            assert fault, f"undisturbed, and yet: {error}"
            hits[fault.kind] += 1
            there = manifest.checkpoints(folder)
            wrong = [why for why in map(manifest.damage, there) if why]
            assert not wrong, f"after {fault}: {wrong[0]}"
            newest = manifest.step_of(there[-1]) if there else 0
            assert newest >= best, f"after {fault}: step {newest} is the newest, and there was {best}"
            best = newest
        else:
            break
    return hits


def compare(folder: Path, undisturbed: Path) -> list[str]:
    """What differs from the undisturbed run."""
    steps = [record["step"] for record in metrics(folder)]
    found = [] if steps == list(range(1, STEPS + 1)) else [f"steps {steps}"]
    found += [] if numbers(folder) == numbers(undisturbed) else ["losses or gradient norms"]
    one, other = (whole_tensors(path / manifest.name_of(STEPS), "") for path in (folder, undisturbed))
    found += [] if one.keys() == other.keys() else ["names of tensors"]
    found += [name for name in one if name in other and not torch.equal(one[name], other[name])]
    left = [path.name for path in manifest.unfinished(folder)]
    return found + [f"left: {left}" for _ in left[:1]]


def soak(number: int, seed: int, runs: list[str] = RUNS, size: int = 2) -> tuple[Counter, list[str]]:
    """Disturb runs until there have been `number` faults: how many of each kind, and what differed."""
    choose, wrong = random.Random(seed), []
    hits: Counter = Counter()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        for line in runs:
            launch(attempt, size, (line, Path(name, "undisturbed", str(runs.index(line))), size, None, 0), timeout=120)
        turn = 0
        while hits.total() < number:
            line, folder = runs[turn % len(runs)], Path(name, str(turn), "run")
            begin = time.time()
            faults = [any_fault(choose, size) for _ in range(min(10, number - hits.total()))]
            found = endure(line, folder, faults, size)
            differs = compare(folder, Path(name, "undisturbed", str(turn % len(runs))))
            wrong += [f"{line}, {faults}: {what}" for what in differs]
            hits, turn = hits + found, turn + 1
            print(
                f"{line:<50}{found.total():>4} faults{len(differs):>4} wrong{time.time() - begin:>7.0f} s", flush=True
            )
    return hits, wrong


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.asked()
    hits, wrong = soak(asked.faults, asked.seed)
    print(", ".join(f"{kind}: {hits[kind]}" for kind in KINDS))
    print("\n".join([*wrong, f"{hits.total()} faults, {len(wrong)} wrong"]))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
