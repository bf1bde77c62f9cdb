"""What our own machinery costs one rank when there are many: meshes, groups, votes, reports, the plan of a checkpoint.

    python tools/scale.py [MOST REAL RANKS]

Real ranks, 2 to 64 of them, train a model of one tiny layer by gloo on this machine, and tell what it took rank 0:
processor time of its main thread, which does not depend on how many ranks share a core, bytes read from files, and
bytes of Python objects that it has sent or received. What rank 0 alone computes for 1,024 and 16,384 ranks is run with
as many pretended answers, and a mesh of so many ranks with PyTorch's fake process group.

Written to docs/scale.md: tables, and the power of n with which each row grows between its last two columns (1.0:
in proportion to the ranks). The picture is docs/scale.png.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan
from torch.testing._internal.distributed.fake_pg import FakeStore

from common import ROOT, per_rank
from common.checkpoint import Saver, load
from common.errors import Parser
from common.lab import plotting
from common.lab.launch import launch
from common.mesh import axis, make_mesh
from common.per_rank import PerRank, Report
from common.pieces import Piece, SavePieces
from common.run import Run
from common.task import make_task
from tests.helpers import configure

HEAD = """What the course's own machinery costs a rank, as ranks become more; `python tools/scale.py` writes this page.
Nothing here should grow faster than n log n on one rank, and no step sends Python objects. A last column of "n^1.0" is
growth in proportion. Real ranks share two cores, so the clock says nothing: the figure is processor time of the main
thread of rank 0. PyTorch's own part (groups, DCP's plans) is counted in."""
REAL, PRETENDED = (2, 4, 8, 16, 32, 64), (64, 1_024, 16_384)
STEPS = 10


class Cost:
    """Processor time of this thread, bytes read from files, and bytes of pickled objects, within a block."""

    def __enter__(self):
        self.objects = 0
        self.patched = dist.distributed_c10d._object_to_tensor

        def counted(*args, **more):
            found = self.patched(*args, **more)
            self.objects += found[0].numel()
            return found

        dist.distributed_c10d._object_to_tensor = counted
        self.read = read_so_far()
        self.began = time.thread_time()
        return self

    def __exit__(self, *error):
        self.seconds = time.thread_time() - self.began
        self.read = read_so_far() - self.read
        dist.distributed_c10d._object_to_tensor = self.patched


def read_so_far() -> int:
    """Bytes that this process has read from files, pipes and sockets."""
    return int(Path("/proc/self/io").read_text().split()[1])


def of_one_rank(folder: str) -> dict[str, tuple[float, int]]:
    """What this rank pays for each part: (seconds of its main thread, bytes)."""
    size, found = dist.get_world_size(), {}
    line = "--layers 1 --width 16 --heads 2 --context 8 --checkpoint-every 0 --log-every 1000000 --by-hand"
    config = configure(
        line, size, dist.get_rank(), strategy="ddp", steps=STEPS + 1, batch_size=size, run_dir=f"{folder}/run"
    )
    with Cost() as cost:
        mesh = make_mesh({"data": size // 2, "tensor": 2})
        axis(mesh, "data"), axis(mesh, "tensor")
    found["a mesh with two axes, and its groups"] = cost.seconds, cost.objects
    task = make_task(config)
    strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(make_mesh(config.axes)))
    with Run(config, strategy, task) as run:
        batches = run.batches()
        seconds, objects = [], []
        for _ in run.steps:
            loss, norm = strategy.step(next(batches))
            with Cost() as cost:
                run.end_step(loss, norm)
            seconds.append(cost.seconds)
            objects.append(cost.objects)
        # the last one writes a checkpoint, too
        found["a step's metrics, and the vote on stopping"] = sorted(seconds[:-1])[STEPS // 2], sum(objects[:-1])
    reporter = PerRank(strategy.device)
    for _ in range(STEPS):
        dist.all_reduce(torch.zeros(1))
        reporter.step_ended()
    with Cost() as cost:
        reporter.report()
    found["a report of all ranks"] = cost.seconds, cost.objects
    place = Path(folder, "checkpoint-000001")
    with Cost() as cost:
        Saver().save(place, strategy, {"step": 1})
    found["a checkpoint is written"] = cost.seconds, cost.objects
    with Cost() as cost:
        load(place, strategy)
    found["a checkpoint is read"] = cost.seconds, cost.objects
    found["of which bytes of files"] = math.nan, cost.read
    return found


def pretended(size: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """What rank 0 computes alone for as many ranks as are pretended: (name, the work, Python objects it is given)."""

    def mesh_with_groups():
        mesh = make_mesh({"data": size // 64, "pipeline": 8, "tensor": 8})
        for name in ("data", "pipeline", "tensor"):
            axis(mesh, name)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield "a mesh with three axes, and its groups", mesh_with_groups, 0
    finally:
        dist.destroy_process_group()
    most = min(per_rank.MOST, max(20, per_rank.ALL // size))
    launches = {(step, ("0", "world"), step): 0.01 * step for step in range(most)}
    reports = [Report(f"host-{rank // 8}", 2**30, 0.5, 0.1, 0.01, launches) for rank in range(size)]

    def outliers():
        return per_rank.straggler(reports), per_rank.memory_outliers(reports)

    yield "who is late, and who holds too much, from all reports", outliers, size * most
    plans: list[SavePlan] = []
    for rank in range(size):  # two rows of each of four tensors on each rank
        own = [Piece(f"model.{name}", (2 * size, 8), (2 * rank, 0), torch.zeros(2, 8)) for name in range(4)]
        local = SavePieces(own, size)
        local.state_dict = {piece.key: piece.tensor for piece in own}
        plans.append(local.create_local_plan())
    planner = SavePieces([], size)
    yield "the plan of a checkpoint, from all ranks' plans", lambda: planner.create_global_plan(plans), 4 * size


def priced(size: int) -> dict[str, tuple[float, int]]:
    """Seconds of each of these, and how many Python objects it is given."""
    found = {}
    for name, work, objects in pretended(size):
        with Cost() as cost:
            work()
        found[name] = cost.seconds, objects
    return found


def table(columns: dict[int, dict[str, tuple[float, int]]], unit: str, which: int) -> list[str]:
    """A table in Markdown: a row for each part, a column for each number of ranks, and the power of the last two."""
    sizes = list(columns)
    lines = [f"| {unit} | " + " | ".join(f"{size:,}" for size in sizes) + " | grows as |"]
    lines.append("| --- " * (len(sizes) + 2) + "|")
    for name in columns[sizes[0]]:
        values = [columns[size][name][which] for size in sizes]
        if any(math.isnan(value) for value in values) or not any(values):
            continue
        shown = [f"{1e3 * value:.2f}" if which == 0 else f"{value:,.0f}" for value in values]
        lines.append(f"| {name} | " + " | ".join(shown) + f" | {power(sizes, values)} |")
    return lines


def power(sizes: list[int], values: list[float]) -> str:
    """The power of n with which a figure grows between the last two numbers of ranks."""
    if values[-2] <= 0 or values[-1] <= 0:
        return "no growth"
    return f"n^{math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2]):.1f}"


def drawn(real: dict, far: dict):
    """Milliseconds of rank 0 against ranks, on logarithmic axes, real ranks on the left and pretended ones right."""
    figure, panels = plotting.plt.subplots(1, 2, figsize=(12, 4.5))
    for panel, columns, title in ((panels[0], real, "real ranks, gloo"), (panels[1], far, "pretended ranks")):
        sizes = list(columns)
        for name in columns[sizes[0]]:
            values = [1e3 * columns[size][name][0] for size in sizes]
            if not any(math.isnan(value) for value in values):
                panel.plot(sizes, values, marker="o", label=name)
        first = 1e3 * max(columns[sizes[0]][name][0] for name in columns[sizes[0]] if columns[sizes[0]][name][0] > 0)
        panel.plot(sizes, [first * size / sizes[0] for size in sizes], "k:", linewidth=1, label="in proportion to n")
        panel.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms on rank 0", title=title)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("most", type=int, nargs="?", default=64, help="ranks that are started, at most (default: 64)")
    most = parser.asked(argv).most
    real, far = {}, {}
    for size in (size for size in REAL if size <= most):
        with tempfile.TemporaryDirectory() as folder:
            real[size] = launch(of_one_rank, size, (folder,), timeout=600)[0]
        print(
            size, "ranks:", {name: f"{1e3 * seconds:.2f} ms" for name, (seconds, _) in real[size].items()}, flush=True
        )
    for size in PRETENDED:
        far[size] = priced(size)
        print(size, "pretended:", {name: f"{1e3 * found[0]:.1f} ms" for name, found in far[size].items()}, flush=True)
    text = ["# Many ranks", "", HEAD, "", f"Measured on {date.today()} with torch {torch.__version__.split('+')[0]}."]
    text += ["", "## Milliseconds of rank 0's main thread, real ranks", "", *table(real, "milliseconds", 0)]
    text += ["", "## Bytes of Python objects that rank 0 sends or makes", "", *table(real, "bytes", 1)]
    text += ["", "## What rank 0 computes for pretended ranks", "", *table(far, "milliseconds", 0)]
    text += ["", "![Time of rank 0 against the number of ranks, on logarithmic axes](scale.png)", ""]
    (ROOT / "docs" / "scale.md").write_text("\n".join(text))
    (ROOT / "docs" / "scale.png").write_bytes(plotting.png(drawn(real, far), dpi=110))
    return 0


if __name__ == "__main__":
    sys.exit(main())
