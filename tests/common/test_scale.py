"""What our own machinery costs rank 0 as ranks become more, counted in instructions: no clock decides."""

import math
import sys

from common.lab.launch import launch
from tools import scale

FEW, MANY = 1024, 2048  # so many that what each rank costs outweighs what is paid once


def instructions(work) -> int:
    """How many instructions of Python's virtual machine `work` runs."""
    count = 0

    def another(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return another

    sys.settrace(another)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def counted(size: int) -> dict[str, int]:
    return {name: instructions(work) for name, work, _ in scale.pretended(size)}


def test_nothing_grows_faster_than_n_log_n():
    few, many = counted(FEW), counted(MANY)
    allowed = MANY * math.log(MANY) / (FEW * math.log(FEW))
    assert {name: many[name] / few[name] for name in few if many[name] > allowed * few[name]} == {}


def test_no_step_sends_python_objects(tmp_path):
    sent = {
        name: objects for name, (_, objects) in launch(scale.of_one_rank, 2, (str(tmp_path),), timeout=300)[0].items()
    }
    assert sent["a step's metrics, and the vote on stopping"] == 0
    assert sent["a checkpoint is written"] > 0  # so they are counted
