"""What a message costs: the alpha-beta model, t(n) = alpha + n / bandwidth, and collectives in rings by it."""

import csv
from collections.abc import Sequence
from pathlib import Path

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
