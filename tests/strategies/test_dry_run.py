"""--dry-run: what it says of each rank is what ranks hold, read and send when they train; and nothing is trained."""

import os

import pytest
import torch.distributed as dist
from forks import Fork, torchrun
from helpers import SMALL, as_options, configure

from common import ROOT
from common.lab.launch import launch
from common.lab.ledger import Ledger
from common.mesh import axis, make_mesh
from common.task import make_task
from course import dry_run

SCRIPT = ROOT / "distributed_training.py"
LINES = {  # by the number of ranks
    2: ["--strategy ddp", "--strategy fsdp --by-hand --accumulation-steps 3"],
    4: [
        "--by-hand --mesh pipeline=2,tensor=2 --microbatches 3",
        "--mesh pipeline=2,data=2 --microbatches 3 --accumulation-steps 2",
    ],
}


def seen(configs) -> list[dry_run.Forecast]:
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
        for name in config.axes:  # the messages of an axis are those of its group
            group = tuple(dist.get_process_group_ranks(axis(mesh, name).group))
            assert sent.get(name, 0) == sum(entry.sent for entry in ledger.entries if entry.group == group)
        found.append(dry_run.Forecast(place, reads, shapes, numbers, 0, 0, sent))
    return found


@pytest.mark.parametrize("size", LINES)
def test_what_is_foreseen_is_what_ranks_do(size, tmp_path, capfd):
    ranks = launch(seen, size, ([configure(line, size, **SMALL, run_dir=tmp_path / "run") for line in LINES[size]],))
    for number, line in enumerate(LINES[size]):
        config = configure(f"{line} --dry-run", size, **SMALL)
        forecast = dry_run.forecast(config, (0, size - 1)[bool(number) :])  # of the first line two, one after the other
        assert not capfd.readouterr().err, "a rank that is pretended has nothing to say"
        for rank, foreseen in forecast.items():
            real = ranks[rank][number]
            for what in ("place", "slice", "shapes", "numbers"):
                assert getattr(foreseen, what) == getattr(real, what), f"{line}, rank {rank}: {what}"
            assert foreseen.sent == pytest.approx(real.sent, rel=1e-3), f"{line}, rank {rank}: sent"
            assert foreseen.sent and foreseen.state >= 4 * 3 * foreseen.numbers, "AdamW has two numbers for each"
            assert foreseen.peak > foreseen.state + 4 * foreseen.numbers


def small(line: str) -> list[str]:
    return [*line.split(), *as_options(SMALL)]


def test_it_prints_the_ranks_of_a_mesh_and_trains_nothing(tmp_path):
    process = Fork(SCRIPT, *small("--dry-run --mesh shard=2"), cwd=tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []
    lines = [line.split() for line in said.splitlines()]
    ranks = [line for line in lines if line and line[0].isdigit()]
    assert [line[:5] for line in ranks] == [[f"{r}", f"{r}", f"{6 * r}", "to", f"{6 * r + 5}"] for r in range(2)]
    assert sum(int(line[5].replace(",", "")) for line in ranks) == 33_984, "each number once"
    assert [line for line in said.splitlines() if "mlp.up.weight" in line and "[64, 32] of [128, 32]" in line]
    process = Fork(SCRIPT, *small("--dry-run --mesh data=5"), cwd=tmp_path)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2 and "--batch-size 12" in said and "Traceback" not in said


def test_ranks_that_torchrun_has_started_say_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "forecast", lambda config, ranks: foreseen(ranks))  # with FULL=1 they are no forks
    line = small("--dry-run --distributed --strategy ddp")
    process = torchrun("--standalone", "--nproc_per_node=2", SCRIPT, *line, cwd=tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and said.count("a dry run") == 1 and list(tmp_path.iterdir()) == []


def foreseen(ranks, held=lambda rank: {}) -> dict[int, dry_run.Forecast]:
    """Rank r reads examples 4 r to 4 r + 3, holds 1,000 + r numbers, and sends 2 KiB, but for rank 0."""
    return {
        rank: dry_run.Forecast({"data": rank}, (4 * rank, 4 * rank + 4), held(rank), 1000 + rank, 3 * 2**19, 5 * 2**20,
                               {"data": 2048.0} if rank else {})
        for rank in ranks
    }  # fmt: skip


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line[0].isdigit()]


def test_a_rank_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(dry_run, "send_forecast", lambda *_: os._exit(1))
    monkeypatch.setattr(dry_run, "make_task", lambda config: None)
    with pytest.raises(RuntimeError, match="rank 3"):
        dry_run.forecast(configure("--dry-run --mesh data=4 --batch-size 4", 4), [3])


def test_of_many_ranks_the_first_and_the_last_are_looked_at(monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "forecast", lambda config, ranks: foreseen(ranks))
    dry_run.dry_run(configure("--dry-run --mesh data=20 --batch-size 20", 20))
    printed = capsys.readouterr().out
    looked_at = [int(row[0]) for row in rows(printed)]
    assert looked_at == [0, 19] and " 18 ranks" in printed
    assert dry_run.looked_at({"data": 4}) == [0, 1, 2, 3], "few are all looked at"
    assert dry_run.spans([*"0123578"]) == "0 to 3, 5, 7, 8" and dry_run.size_of(3 * 2**29) == "1.50 GiB"
    deep = dry_run.looked_at({"pipeline": 12, "data": 4})
    assert {rank // 4 for rank in deep} == {*range(12)} and {3, 47} <= {*deep}, "of each stage its first and last rank"
