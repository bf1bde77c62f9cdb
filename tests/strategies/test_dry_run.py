"""--dry-run: what it says of each rank is what ranks hold, read and send when they train; and nothing is trained."""

import math
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from forks import Fork, torchrun
from helpers import SMALL, configure, launcher

from common import ROOT
from common.errors import UserError
from common.lab.launch import launch
from common.lab.ledger import Ledger, LedgerEntry
from common.mesh import make_mesh
from common.task import make_task
from course import dry_run

SCRIPT = ROOT / "distributed_training.py"
LINES = {  # by the number of ranks
    2: ["--strategy ddp", "--strategy fsdp --by-hand --accumulation-steps 3"],
    4: [
        "--by-hand --mesh pipeline=2,tensor=2 --microbatches 3",
        "--by-hand --mesh pipeline=2,data=2 --microbatches 3 --accumulation-steps 2",
        "--mesh pipeline=2,data=2 --microbatches 3",
    ],
}


def seen(configs) -> list[dry_run.Foreseen]:
    """What this rank holds, reads and sends in a second step."""
    found = []
    for config in configs:
        task, mesh = make_task(config), make_mesh(config.axes, "cpu")
        strategy = config.strategy_class(task.make_model(), task.make_optimizer, config.setup(mesh))
        strategy.step(task.micro_batches(0, strategy))
        with Ledger() as ledger:
            strategy.step(task.micro_batches(1, strategy))
        place = dict(zip(config.axes, mesh.get_coordinate(), strict=True))
        examples = config.batch_size // strategy.data_size
        reads = strategy.data_rank * examples, (strategy.data_rank + 1) * examples
        parts = strategy.parts()
        shapes = {part.name: dry_run.described(part.where) for part in parts}
        numbers = sum(part.tensor.numel() for part in parts)
        sent = dry_run.along_axes(ledger, config.axes)
        assert dist.get_rank() in range(math.prod(config.axes.values()))
        found.append(dry_run.Foreseen(place, reads, shapes, numbers, 0, 0, sent))
    return found


@pytest.mark.parametrize("size", LINES)
def test_what_is_foreseen_is_what_ranks_do(size, tmp_path):
    ranks = launch(seen, size, ([configure(line, size, **SMALL, run_dir=tmp_path / "run") for line in LINES[size]],))
    for number, line in enumerate(LINES[size]):
        config = configure(f"{line} --dry-run", size, **SMALL)
        for rank, foreseen in dry_run.foresee(config, (0, size - 1)).items():
            real = ranks[rank][number]
            for what in ("place", "slice", "shapes", "numbers"):
                assert getattr(foreseen, what) == getattr(real, what), f"{line}, rank {rank}: {what}"
            assert foreseen.sent == pytest.approx(real.sent, rel=1e-3), f"{line}, rank {rank}: sent"
            assert foreseen.sent and foreseen.state >= 4 * 3 * foreseen.numbers, "AdamW has two numbers for each"
            assert foreseen.peak > foreseen.state + 4 * foreseen.numbers


def small(line: str) -> list[str]:
    return [*line.split(), *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())]


def test_it_prints_the_ranks_of_a_mesh_and_trains_nothing(tmp_path):
    process = Fork(SCRIPT, *small("--dry-run --mesh shard=3"), cwd=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []
    lines = [line.split() for line in said.splitlines()]
    ranks = [line for line in lines if line and line[0].isdigit()]
    assert [line[:5] for line in ranks] == [[f"{r}", f"{r}", f"{4 * r}", "to", f"{4 * r + 3}"] for r in range(3)]
    assert sum(int(line[5].replace(",", "")) for line in ranks) == 33_984, "each number once"
    assert [line for line in said.splitlines() if "mlp.up.weight" in line and "[43, 32] of [128, 32]" in line]
    process = Fork(SCRIPT, *small("--dry-run --mesh data=5"), cwd=tmp_path)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "--batch-size 12" in said and "Traceback" not in said


def test_ranks_that_torchrun_has_started_say_it_once(tmp_path):
    line = small("--dry-run --distributed --strategy ddp")
    process = torchrun("--standalone", "--nproc_per_node=2", SCRIPT, *line, cwd=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and said.count("a dry run") == 1 and list(tmp_path.iterdir()) == []


def test_shapes_in_words():
    from common.state import Where

    assert dry_run.described(Where((4, 6), (0, 0), (4, 6), 0, 24)) == "[4, 6]"
    assert dry_run.described(Where((4, 6), (2, 0), (2, 6), 0, 12)) == "[2, 6] of [4, 6]"
    assert dry_run.described(Where((4, 6), (0, 0), (4, 6), 5, 17)) == "elements 5 to 17 of [4, 6]"
    assert dry_run.described(Where((4, 6), (2, 0), (2, 6), 1, 7)) == "elements 1 to 7 of [2, 6] of [4, 6]"
    ranks = LedgerEntry("all_reduce", 100, 4, group=(0, 1, 6, 7)), LedgerEntry("send", 7, 12, group=tuple(range(12)))
    ledger = SimpleNamespace(entries=[*ranks, ranks[0], LedgerEntry("barrier", 0, 12, group=(0, 1))])
    axes = {"pipeline": 2, "data": 3, "tensor": 2}
    assert dry_run.along_axes(ledger, axes) == {"pipeline+tensor": 2 * 150.0, "pipeline+data+tensor": 7.0}, "sums"
    assert [dry_run.coordinates(axes, rank) for rank in (0, 1, 2, 11)] == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 2, 1]]
    with pytest.raises(UserError, match="--mesh data=2"):
        configure("--mesh data=2")  # it is for a dry run only that nobody has to be started


def foreseen(ranks, held=lambda rank: {}) -> dict[int, dry_run.Foreseen]:
    """Rank r reads examples 4 r to 4 r + 3, holds 1,000 + r numbers, and sends 2 KiB, but for rank 0."""
    return {
        rank: dry_run.Foreseen({"data": rank}, (4 * rank, 4 * rank + 4), held(rank), 1000 + rank, 3 * 2**19, 5 * 2**20,
                               {"data": 2048.0} if rank else {})
        for rank in ranks
    }  # fmt: skip


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line[0].isdigit()]


def test_what_is_said_of_each_rank(monkeypatch, capsys):
    """Two of three ranks hold the same; blocks that are alike are told once."""
    same = {"blocks.0.w": "[4]", "blocks.1.w": "[4]", "head": "[2]"}
    monkeypatch.setattr(
        dry_run, "foresee", lambda config, ranks: foreseen(ranks, [same, same, {"head": "[3]"}].__getitem__)
    )
    settings = "--dry-run --strategy ddp --batch-size 12 --accumulation-steps 2"
    dry_run.dry_run(configure(settings, 3))
    printed = capsys.readouterr().out
    assert rows(printed) == [
        f"{rank} {rank} {4 * rank} to {4 * rank + 3} 1,00{rank} 1.5 MiB 5.0 MiB {sent}".split()
        for rank, sent in enumerate(["nothing", "data 2.0 KiB", "data 2.0 KiB"])
    ], "bytes between steps, and at most"
    holds = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    assert [line[:2] for line in holds] == [["blocks.*.w", "[4]"], ["head", "[2]"], ["head", "[3]"]]
    for more, word in (("--precision bf16", "bf16"), ("--strategy expert --by-hand --experts 6", "router")):
        assert word not in printed
        dry_run.dry_run(configure(f"{settings} {more}", 3))
        assert word in capsys.readouterr().out, f"what is not counted with {more}"
    with launcher(1, 2):
        dry_run.dry_run(configure("--dry-run --strategy ddp --batch-size 12", 2, rank=1))
    assert capsys.readouterr().out == "", "rank 0 alone says it"


def test_a_rank_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(dry_run, "be", lambda *_: os._exit(1))
    monkeypatch.setattr(dry_run, "make_task", lambda config: None)
    with pytest.raises(RuntimeError, match="the process that was rank 3 has died"):
        dry_run.foresee(None, [3])


def test_of_many_ranks_the_first_and_the_last_are_looked_at(monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "foresee", lambda config, ranks: foreseen(ranks))
    dry_run.dry_run(configure("--dry-run --mesh data=20 --batch-size 20", 20))
    printed = capsys.readouterr().out
    looked_at = [int(row[0]) for row in rows(printed)]
    assert looked_at == [*range(dry_run.MOST - 1), 19] and f" {20 - dry_run.MOST} ranks" in printed
