"""What a run makes of its machine: peak memory, and which share of the machine's arithmetic the model uses."""

import sys
import time

import psutil
import torch
import torch.distributed as dist

from common import gpus
from common.model import GPT, VOCABULARY


class Usage:
    """Measures what a run makes of its machine. `__call__(step_seconds)` gives what a step adds to the metrics:

    peak_memory_bytes: the most memory that this rank has held so far: on a GPU what PyTorch had allocated there, on the
                       CPU all of the process
    mfu:               model FLOPs utilization (Chowdhery et al. 2022, appendix B): the operations that the model needs
                       for a step, without any that are done twice, as a share of what all ranks' devices could do. The
                       peak of a GPU is that of common/gpus.csv, whatever the precision; that of a CPU core is what a
                       large matrix multiplication reaches here. None for other GPUs, pictures, and mixtures of experts.
    """

    def __init__(self, config, device: torch.device):
        known = config.task == "text" and config.strategy_class.model_class is GPT
        self.device, self.operations = device, operations(config) if known else 0
        self.peak = peak(device) if known else None
        self.ranks = dist.get_world_size()

    def __call__(self, step_seconds: float) -> dict:
        possible = (self.peak or 0.0) * self.ranks * step_seconds
        return {
            "peak_memory_bytes": peak_memory(self.device),
            "mfu": self.operations / possible if possible else None,
        }


def operations(config) -> int:
    """Floating-point operations of one step of a GPT: 6 per weight of a matrix and token, forward and backward, and
    12 x layers x width x context per token for attention (Chowdhery et al. 2022, appendix B)."""
    matrices = 12 * config.layers * config.width**2 + VOCABULARY * config.width
    attention = 12 * config.layers * config.width * config.context
    return (6 * matrices + attention) * config.batch_size * config.context


def peak(device: torch.device) -> float | None:
    """Operations per second that a rank's device could do."""
    if device.type != "cpu":
        known = gpus.named_by_pytorch(torch.cuda.get_device_name(device))
        return float(known["peak_tflops"]) * 1e12 if known else None
    matrix, times = torch.ones(256, 256), []
    for _ in range(4):
        begin = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - begin)
    return 2 * 256**3 / min(times)


BUSY = 0.25  # share of a machine's processor time that others may take before a measurement is doubted


def busy(seconds: float = 0.5) -> float:
    """The share of this machine's processor time, from 0 to 1, that is in use while this process waits so long."""
    return psutil.cpu_percent(interval=seconds) / 100


def peak_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
