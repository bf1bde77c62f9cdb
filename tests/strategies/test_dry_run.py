"""--dry-run: what it says of each rank is what ranks hold, read and send when they train; and nothing is trained."""

import math
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forks import Fork, torchrun
from helpers import SMALL, configure, launcher

from common import ROOT
from common.errors import UserError
from common.lab.launch import launch
from common.lab.ledger import Ledger, LedgerEntry
from common.mesh import make_mesh
from common.strategy import Setup
from common.task import make_task
from course import dry_run

SCRIPT = ROOT / "distributed_training.py"
LINES = {  # by the number of ranks
    2: ["--strategy ddp", "--strategy fsdp --by-hand --accumulation-steps 3"],
    4: ["--by-hand --mesh pipeline=2,tensor=2 --microbatches 3"],
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


def test_a_rank_is_looked_at_in_a_second_step(monkeypatch):
    """Rank 5 of eight: 24 examples in parts of 4, each a pipeline's two micro-batches; by a strategy that notes."""
    noted, zeros = [], torch.zeros

    class Strategy:
        data_axes, data_rank, data_size = ("data",), 1, 2
        step = staticmethod(lambda parts: noted.append([tuple(part.shape for part in pair) for pair in parts]))

        def __init__(self, *given):
            noted.append(given)

        def parts(self):
            where = SimpleNamespace(start=0, stop=6, size=(2, 3), shape=(4, 3))
            return [SimpleNamespace(name="w", where=where, tensor=zeros(2, 3))]

    @contextmanager
    def pretend(*given):
        noted.append(given)
        begin = lambda name: noted.append(name) or SimpleNamespace(peak={"first": 70, "second": 90}[name])  # noqa: E731
        yield "mesh", SimpleNamespace(begin=begin, now=[50, 60])

    def on_gpu(*shape, dtype, device=None):
        noted.append((device, dtype)) if device else None
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(dry_run, "torch", SimpleNamespace(zeros=on_gpu, long=torch.long))
    monkeypatch.setattr(dry_run, "pretend", pretend)
    monkeypatch.setattr(dry_run, "check_batch", lambda *given: noted.append("checked"))
    axes, options = {"pipeline": 2, "data": 2, "tensor": 2}, SimpleNamespace(microbatches=2)
    config = SimpleNamespace(axes=axes, options=options, batch_size=24, accumulation_steps=3, context=16, width=32,
                             strategy_class=Strategy)  # fmt: skip
    example = zeros(1, 16, dtype=torch.uint8), zeros(1, dtype=torch.int32)
    dataset = SimpleNamespace(batch=lambda numbers: example)
    task = SimpleNamespace(dataset=dataset, make_model=lambda: "model", make_optimizer="optimizer")
    found = dry_run.as_rank(config, task, 5)
    a_step = [("gpu", torch.uint8), ("gpu", torch.int32), [((4, 16), (4,))] * 3]
    assert noted == [
        (axes, 5, 8, 1, (2, 16, 32)), ("model", "optimizer", Setup("mesh", options)), "checked",
        "first", *a_step, "second", *a_step,
    ], "mesh, rank, ranks, nodes and a message's shape; the strategy; two steps on this rank's examples"  # fmt: skip
    place = {"pipeline": 1, "data": 0, "tensor": 1}
    assert found == dry_run.Foreseen(place, (12, 24), {"w": "[2, 3] of [4, 3]"}, 6, 50, 90, {}), "of the second step"


def small(line: str) -> list[str]:
    return [*line.split(), *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items())]


def test_it_prints_the_ranks_of_a_mesh_and_trains_nothing(tmp_path):
    process = Fork(SCRIPT, *small("--dry-run --mesh shard=3"), cwd=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []
    lines = said.splitlines()
    assert lines[0] == "fsdp (pytorch) on 3 rank(s), mesh shard=3; a dry run: nothing is trained"
    assert lines[2].split("  ")[-1] == "sends in a step"
    assert [line.split()[:5] for line in lines[3:6]] == [
        ["0", "0", "0", "to", "3"], ["1", "1", "4", "to", "7"], ["2", "2", "8", "to", "11"]
    ]  # fmt: skip
    assert sum(int(line.split()[5].replace(",", "")) for line in lines[3:6]) == 33_984, "each number once"
    assert "  blocks.*.mlp.up.weight           [43, 32] of [128, 32]  (blocks 0, 1)" in lines
    process = Fork(SCRIPT, *small("--dry-run --mesh data=5"), cwd=tmp_path)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and "--batch-size 12 does not divide by 5 data-parallel rank(s)" in said


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
    with pytest.raises(UserError, match="--mesh data=2 is 2 rank"):
        configure("--mesh data=2")  # it is for a dry run only that nobody has to be started


def test_what_is_said_of_each_rank(monkeypatch, capsys):
    """Two of three ranks hold the same."""
    same = {"blocks.0.w": "[4]", "blocks.1.w": "[4]", "head": "[2]"}
    held = [same, same, {"head": "[3]"}]
    found = {
        rank: dry_run.Foreseen({"data": rank}, (4 * rank, 4 * rank + 4), held[rank], 1000 + rank, 3 * 2**19, 5 * 2**20,
                               {"data": 2048.0} if rank else {})
        for rank in range(3)
    }  # fmt: skip
    monkeypatch.setattr(dry_run, "foresee", lambda config, ranks: found)
    dry_run.dry_run(configure("--dry-run --strategy ddp --batch-size 12 --accumulation-steps 2 --precision bf16", 3))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "a step: 12 examples of 128 tokens over all ranks; --accumulation-steps 2"
    assert [line.split() for line in lines[3:6]] == [
        f"{rank} {rank} {4 * rank} to {4 * rank + 3} 1,00{rank} 1.5 MiB 5.0 MiB {sent}".split()
        for rank, sent in enumerate(["nothing", "data 2.0 KiB", "data 2.0 KiB"])
    ], "bytes between steps, and at most"
    assert lines[6:10] == ["ranks 0, 1 each hold:", "  blocks.*.w  [4]  (blocks 0, 1)", "  head        [2]",
                           "rank 2 holds:"]  # fmt: skip
    notes = "They are counted as in fp32: what --precision bf16 saves", "Without numbers the router"
    assert [any(line.startswith(note) for line in lines) for note in notes] == [True, False]
    dry_run.dry_run(configure("--dry-run --strategy expert --by-hand --batch-size 12 --experts 6", 3))
    said = capsys.readouterr().out
    assert [note in said for note in notes] == [False, True], "notes of a mixture in fp32"


def test_a_dry_run_word_for_word(monkeypatch, capsys):
    held = [({"w": "[4]"}, 1536, 100 * 1024), ({}, 0, 3 * 2**20)]
    found = {
        rank: dry_run.Foreseen({"data": rank}, (6 * rank, 6 * rank + 6), shapes, 1234 * rank, state, peak, {})
        for rank, (shapes, state, peak) in enumerate(held)
    }
    monkeypatch.setattr(dry_run, "foresee", lambda config, ranks: found)
    config = configure("--dry-run --strategy ddp --by-hand --batch-size 12 --context 16", 2)
    dry_run.dry_run(config)
    assert capsys.readouterr().out.splitlines() == [
        "ddp (by-hand) on 2 rank(s), mesh data=2; a dry run: nothing is trained",
        "a step: 12 examples of 16 tokens over all ranks; --accumulation-steps 1",
        "rank  data  reads examples  numbers held  between steps  at most    sends in a step",
        "0     0     0 to 5          0             1.5 KiB        100.0 KiB  nothing",
        "1     1     6 to 11         1,234         0.0 KiB        3.0 MiB    nothing",
        "rank 0 holds:",
        "  w  [4]",
        "rank 1 holds no parameters",
        "Bytes are those of tensors on a rank's device; what PyTorch and its kernels take is not among them.",
    ]
    with launcher(1, 2):
        dry_run.dry_run(config)
    assert capsys.readouterr().out == "", "rank 0 alone says it"


def test_a_rank_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(dry_run, "be", lambda *_: os._exit(1))
    monkeypatch.setattr(dry_run, "make_task", lambda config: None)
    with pytest.raises(RuntimeError, match="the process that was rank 3 has died"):
        dry_run.foresee(None, [3])


def test_of_many_ranks_the_first_and_the_last_are_looked_at(monkeypatch, capsys):
    asked = []

    def foresee(config, ranks):
        asked.extend(ranks)
        return {rank: dry_run.Foreseen({"data": rank}, (rank, rank + 1), {}, 0, 0, 0, {}) for rank in ranks}

    monkeypatch.setattr(dry_run, "foresee", foresee)
    dry_run.dry_run(configure("--dry-run --mesh data=20 --batch-size 20", 20))
    assert asked == [*range(15), 19], "ranks that are looked at"
    printed = capsys.readouterr().out
    assert "(the other 4 ranks are like these)" in printed
    told = [line.split()[:3] for line in printed.splitlines() if line[0].isdigit()]
    assert told == [[str(rank), str(rank), str(rank)] for rank in asked], "rank, place along data, first example"
