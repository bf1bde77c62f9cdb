"""`--profile N`: what torch.profiler records of N steps on each rank: operations with their shapes, memory and Python
stacks, in files that Perfetto (ui.perfetto.dev) opens, and TensorBoard with the package torch-tb-profiler."""

from contextlib import nullcontext
from pathlib import Path

import torch

from common.constants import BEFORE_PROFILE
from common.errors import writing


def profiler(steps: int, folder: Path, rank: int):
    """A context whose `step()` is called at the end of every step; without steps to record it is none. Raises UserError
    where the folder cannot be made."""
    if not steps:
        return nullcontext()
    with writing(folder):  # where PyTorch makes it, at the end, it says RuntimeError
        folder.mkdir(parents=True, exist_ok=True)
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=BEFORE_PROFILE - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}"),
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
    )
