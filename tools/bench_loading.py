"""Who should read? A training on JPEG files, which are read and decoded as it goes: on 1, 2 and 4 ranks, where each
reads its own (--loading shard) and where rank 0 reads for all (--loading dispatch).

    python -m tools.bench_loading

Writes 03_ddp/loading.csv, which 03_ddp/09_ddp_in_practice.ipynb shows. Both ways take turns, round by round, in one
launch, each with a model of its own, so what else the machine does meets both.

rate:            examples per second of all ranks together, the median of the rounds; and the lowest and highest
ms_rank_0:       processor time of a step on rank 0 in milliseconds, however long it waited for a core
ms_others:       the same, of the busiest other rank
rate_with_cores: what the busiest rank's processor time allows, if each rank has a core to itself and waits for nothing
"""

import csv
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from common import ROOT
from common.data import Plan, shard
from common.errors import Parser, one_line_errors
from common.lab.launch import launch
from course.ddp.loading import dispatch

FILE = ROOT / "03_ddp" / "loading.csv"
RANKS, WAYS = (1, 2, 4), {"shard": shard, "dispatch": dispatch}
ROUNDS, STEPS, BATCH = 9, 8, 32
PICTURES, SIDE, SEEN = 512, 256, 48  # files; their side, and that of what the model sees


class Jpegs:
    """Crops of scikit-learn's two photographs in files; which of the two it is has to be told."""

    size = PICTURES

    def __init__(self, folder: str):
        self.folder = folder

    def make(self) -> int:
        """Write the files. Returns the mean of their bytes."""
        photographs, random = load_sample_images().images, torch.Generator().manual_seed(0)
        for number in range(self.size):
            photograph = photographs[number % 2]
            top, left = (int(torch.randint(n - SIDE, (), generator=random)) for n in photograph.shape[:2])
            Image.fromarray(photograph[top : top + SIDE, left : left + SIDE]).save(self.file(number), quality=90)
        return sum(self.file(number).stat().st_size for number in range(self.size)) // self.size

    def file(self, number: int) -> Path:
        return Path(self.folder, f"{number}.jpg")

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [n] -> pixels [n, 3, SEEN, SEEN] in 0..1, and which photograph [n]."""
        pictures = []
        for number in indices.tolist():
            with Image.open(self.file(number)) as picture:
                small = picture.convert("RGB").resize((SEEN, SEEN), Image.Resampling.BILINEAR)
            pictures.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SEEN, SEEN, 3))
        return torch.stack(pictures).permute(0, 3, 1, 2).float() / 255, indices % 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise((3, 16, 32, 64))]
    return nn.Sequential(*(nn.Sequential(c, nn.ReLU()) for c in convolutions), nn.Flatten(), nn.Linear(2304, 2))


def train(folder: str) -> list[dict]:
    """On a rank: for each round and way, seconds of a step, this rank's processor time in it, and the last loss."""
    dataset, rank, size = Jpegs(folder), dist.get_rank(), dist.get_world_size()
    plan = Plan(0, BATCH, (ROUNDS + 1) * STEPS * BATCH, rank, size)
    models = {way: DistributedDataParallel(make_model()) for way in WAYS}
    optimizers = {way: torch.optim.SGD(model.parameters(), lr=0.01) for way, model in models.items()}
    fed = {way: load(dataset, plan) for way, load in WAYS.items()}
    found = []
    for number in range(ROUNDS + 1):  # the first one warms up
        for way in [*WAYS][:: 1 if number % 2 else -1]:
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            for ((inputs, targets),) in itertools.islice(fed[way], STEPS):
                loss = cross_entropy(models[way](inputs), targets)
                optimizers[way].zero_grad()
                loss.backward()
                optimizers[way].step()
            used = time.process_time() - used
            mean = loss.detach() / size
            dist.all_reduce(mean)
            seconds = time.perf_counter() - begin
            found.append({"way": way, "seconds": seconds / STEPS, "used": used / STEPS, "loss": mean.item()})
    return found[len(WAYS) :]


def main() -> int:
    Parser(description=__doc__.splitlines()[0]).asked()  # it has no options
    rows, losses, before = [], {}, os.getloadavg()[0]  # of others: this program's own ranks are not there yet
    with tempfile.TemporaryDirectory() as folder:
        size = Jpegs(folder).make()
        for ranks in RANKS:
            all_of_them = launch(train, ranks, (folder,), timeout=600)
            for way in WAYS:
                own = [[one for one in found if one["way"] == way] for found in all_of_them]
                losses[ranks, way] = [one["loss"] for one in own[0]]
                slowest = (max(one["seconds"] for one in turn) for turn in zip(*own, strict=True))
                rates = sorted(BATCH / seconds for seconds in slowest)
                used = [statistics.median(one["used"] for one in of) for of in own]
                rows.append({
                    "ranks": ranks,
                    "loading": way,
                    "rate": statistics.median(rates),
                    "lowest": rates[0],
                    "highest": rates[-1],
                    "ms_rank_0": 1000 * used[0],
                    "ms_others": 1000 * max(used[1:]) if ranks > 1 else "",
                    "rate_with_cores": BATCH / max(used),
                })  # fmt: skip
                print(*(round(it, 1) if isinstance(it, float) else it for it in rows[-1].values()), sep="\t")
    furthest = max(abs(a / b - 1) for other in losses.values() for a, b in zip(other, losses[1, "shard"], strict=True))
    if furthest > 1e-4:
        print(f"error: losses that should be equal differ by {furthest:.1e}", file=sys.stderr)
        return 1
    with FILE.open("w", newline="") as file:
        print(
            f"# by `python -m tools.bench_loading`: {PICTURES} JPEG files of {size:,} bytes on average, in the page "
            f"cache; {ROUNDS} rounds of {STEPS} steps of {BATCH} examples; {os.cpu_count()} cores, load average "
            f"{before:.1f} before it began; losses differ by {furthest:.0e}",
            file=file,
        )
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])
    print(f"written to {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
