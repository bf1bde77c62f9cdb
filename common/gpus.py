"""The GPUs that have a name: a line of common/gpus.csv each, read by a run's own meter and by the planner.

Its columns are the fields of planner.hardware.GPU, in the units that they name, and
aliases: further names on the planner's command line
device:  words that `torch.cuda.get_device_name()` has for it; a line with more such words wins
"""

import csv
import re
from pathlib import Path

FILE = Path(__file__).with_name("gpus.csv")


def rows(file: Path = FILE) -> list[dict[str, str]]:
    """The lines of a table with names of columns, as text."""
    with open(file, newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def named_by_pytorch(device_name: str) -> dict[str, str] | None:
    """The line of the GPU that PyTorch calls so, as in "NVIDIA H100 80GB HBM3"; None where there is none."""
    words = set(re.split(r"[\s-]+", device_name.upper()))
    found = [row for row in rows() if row["device"] and words.issuperset(row["device"].upper().split())]
    return max(found, key=lambda row: len(row["device"].split()), default=None)
