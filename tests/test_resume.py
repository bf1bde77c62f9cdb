"""Runs that stop and go on: bit for bit, from which checkpoint, and what is refused in one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import SMALL, configure, metrics, numbers, train

from common import checkpoint, manifest
from common.errors import UserError
from common.lab.launch import RankFailed, launch
from common.lock import Lock
from common.run import Run
from course.ddp.loading import LOADING

TEXT = SMALL | {"checkpoint_every": 2, "keep": 9}


def with_dropout(lines: list[str], folder: Path) -> None:
    """On each rank, for each line: train five steps, and three and then two; with a mask on the embedding's output that
    every rank draws for itself, as dropout does."""
    enter = Run.__enter__

    def seeded(run):
        torch.manual_seed(100 + dist.get_rank())
        run.strategy.model.embedding.register_forward_hook(
            lambda module, args, output: torch.nn.functional.dropout(output, 0.2)
        )
        return enter(run)

    Run.__enter__ = seeded
    for number, line in enumerate(lines):
        for end in (f"whole-{number} --steps 5", f"parts-{number} --steps 3", f"parts-{number} --steps 5 --resume"):
            line_of_run = f"{line} --run-dir {folder}/{end}"
            train([configure(line_of_run, dist.get_world_size(), dist.get_rank(), **TEXT)])
            dist.barrier()


@pytest.mark.parametrize(
    ("size", "lines"),
    [
        (2, [f"--strategy ddp --loading {name} --accumulation-steps 3" for name in LOADING]),
        (4, [f"--strategy {name}{kind}" for name in ("ddp", "fsdp") for kind in ("", " --by-hand")]),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(size, lines, tmp_path):
    """Losses, gradient norms, parameters, the optimizer's state and the ranks' random numbers, in every bit."""
    launch(with_dropout, size, (lines, tmp_path), timeout=180)
    for number, line in enumerate(lines):
        whole, parts = tmp_path / f"whole-{number}", tmp_path / f"parts-{number}"
        assert len(set(numbers(whole))) == 10
        assert numbers(parts) == numbers(whole), line
        one, other = (checkpoint.whole_tensors(folder / "checkpoint-000005", "") for folder in (whole, parts))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), line
    masks = [one[f"random.{rank}.0"] for rank in range(size)]
    assert not torch.equal(masks[0], masks[1])
