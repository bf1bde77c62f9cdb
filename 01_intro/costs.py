"""What a message costs: the alpha-beta model, t(n) = alpha + n / bandwidth, and collectives in rings by it."""

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from common.lab.wire_bytes import wire_bytes

H100 = Path(__file__).parent / "nccl_h100_all_reduce.csv"  # measured; the file says where and by whom


def published() -> dict[int, dict[int, float]]:
    """Seconds of NCCL's all-reduce on nodes of eight H100, by the number of nodes and the bytes of the tensor."""
    lines = [line for line in H100.read_text().splitlines() if not line.startswith("#")]
    found: dict[int, dict[int, float]] = {}
    for row in csv.DictReader(lines):
        found.setdefault(int(row["nodes"]), {})[int(row["bytes"])] = 1e-6 * float(row["microseconds"])
    return found


def steps(operation: str, size: int) -> int:
    """Messages that follow each other in a collective: around a ring, twice for an all-reduce. A broadcast or reduce
    is cut into small pieces that travel one behind the other, so its last piece takes size - 1 steps too."""
    return {"all_reduce": 2 * (size - 1), "send": 1, "recv": 0, "barrier": 0}.get(operation, size - 1)


def collective_seconds(operation: str, payload: float, size: int, alpha: float, bandwidth: float) -> float:
    """Seconds of a collective over a full payload of `payload` bytes (as in wire_bytes) on `size` ranks in a ring.

    alpha: seconds per message; bandwidth: bytes per second that a rank sends while it receives as many. Each step of
    the ring costs alpha; the bytes of all steps together are wire_bytes' (Thakur, Rabenseifner and Gropp 2005,
    section 4).
    """
    return steps(operation, size) * alpha + wire_bytes(operation, payload, size) / bandwidth


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """alpha in seconds and beta in seconds per byte of t(n) = alpha + beta n, with the least squared relative error.

    sizes: bytes of the messages; times: their seconds
    """
    import numpy as np  # takes a while, and whoever only predicts does not need it

    n, t = np.array(sizes, dtype=float), np.array(times, dtype=float)
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(n)), rcond=None)
    return float(alpha), float(beta)


def durations(call: Callable, *arguments, repeats: int = 15) -> list[float]:
    """On a rank: seconds of each of `repeats` calls, which the ranks begin at about one time, after a barrier."""
    import torch.distributed as dist

    for _ in range(3):
        call(*arguments)  # warm up
    found = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        call(*arguments)
        found.append(time.perf_counter() - begin)
    return found


def there_and_back(sizes: Sequence[int]) -> list[float]:
    """On each of two ranks: half the median seconds for a message of each size, in bytes, and one of that size back."""
    import torch
    import torch.distributed as dist

    def exchange(tensor):
        for turn in range(2):
            if dist.get_rank() == turn:
                dist.send(tensor, 1 - turn)
            else:
                dist.recv(tensor, turn)

    tensors = [torch.zeros(size // 4) for size in sizes]
    found: list[list[float]] = [[] for _ in sizes]
    for _ in range(11):  # rounds through all sizes, so that a busy moment does not fall on one of them
        for times, tensor in zip(found, tensors, strict=True):
            times += [seconds / 2 for seconds in durations(exchange, tensor, repeats=3)]
    return [median(times) for times in found]
