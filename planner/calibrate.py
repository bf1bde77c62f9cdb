"""Measure this machine: matrix products, the memory, and collectives; and write constants and a GPU called "here".

On the CPU with gloo, or on GPUs with NCCL where there are any.
"""

import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import UserError, writing
from common.meter import BUSY, busy
from planner.constants import PRIOR, Constants
from planner.hardware import GPU, here
from planner.layer_time import of_layer
from planner.layout import Layout
from planner.models import course_gpt

SIDE = 1024  # of a square matrix, on the CPU; 16 times as large on a GPU
SIZES = (2**14, 2**17, 2**20, 2**23)  # bytes of messages
BLOCK = {"width": 128, "heads": 4, "sequence": 128, "micro_batch": 8}  # of the course's GPT by default, on two ranks


def best_of(work, times: int = 5) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    import torch

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    work(), wait()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work(), wait()
        found.append(time.perf_counter() - begin)
    return min(found)


def products(device, dtype) -> tuple[float, float]:
    """(FLOP/s of a large product, seconds that a product takes at least)."""
    import torch

    side = SIDE * (16 if device.type == "cuda" else 1)
    large, tiny = (torch.ones(n, n, device=device, dtype=dtype) for n in (side, 8))
    start = best_of(lambda: [tiny @ tiny for _ in range(100)]) / 100
    return 2 * side**3 / best_of(lambda: large @ large), start


def memory_rate(device) -> float:
    """Bytes per second of element-wise work, read and written."""
    import torch

    tensor = torch.ones(2**24 if device.type == "cpu" else 2**28, device=device)
    return 2 * 4 * tensor.numel() / best_of(lambda: tensor.mul_(1.0))


def block(device, times: int = 20) -> float:
    """Seconds of a block of this course's GPT, forward and backward, on one micro-batch of the shape BLOCK."""
    import torch

    from common.model import Block

    torch.manual_seed(0)
    layer = Block(BLOCK["width"], BLOCK["heads"]).to(device)
    x = torch.randn(BLOCK["micro_batch"], BLOCK["sequence"], BLOCK["width"], device=device, requires_grad=True)
    return best_of(lambda: layer(x).sum().backward(), times)


def crowded_block() -> float:
    """On each rank, while the others do the same: there are more ranks than cores, so it is the mean that counts."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin, times = time.perf_counter(), 40
    for _ in range(times):
        block(torch.device("cpu"), times=1)
    return (time.perf_counter() - begin) / (2 * times)  # one to warm up, and one that is timed


def one_rank() -> dict[str, float]:
    """On each rank, while the others do the same: ranks of a machine share its caches, memory and clock."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.barrier()
    peak, kernel = products(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    dist.barrier()
    hbm = memory_rate(device)
    dist.barrier()
    return {"peak": peak, "kernel": kernel, "hbm": hbm, "block": block(device)}


def messages() -> list[float]:
    """On each rank: seconds that an all-reduce of each of SIZES adds to work that goes before it.

    In a training, ranks come to a message one after the other, and with more ranks than cores some have yet to be given
    a core: so a message costs more there than in a row of messages. Medians: the best case is not the usual one.
    """
    import torch
    import torch.distributed as dist

    a = torch.ones(512, 512)

    def usual(work) -> float:
        found = []
        for _ in range(15):
            begin = time.perf_counter()
            work()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    seconds = []
    for size in SIZES:
        tensor = torch.ones(size // 4)
        dist.barrier()
        alone = usual(lambda: a @ a)
        dist.barrier()
        seconds.append(max(1e-6, usual(lambda tensor=tensor: (a @ a, dist.all_reduce(tensor))) - alone))
    return seconds


def links(ranks: int) -> tuple[float, float]:
    """(seconds per message, bytes per second) between processes of this machine, from all-reduces in a ring."""
    from common.lab.launch import launch
    from common.lab.wire_bytes import wire_bytes
    from course.intro.costs import fit, steps

    seconds = [max(times) for times in zip(*launch(messages, ranks, timeout=120), strict=True)]
    sent = [wire_bytes("all_reduce", size, ranks) for size in SIZES]
    alpha, beta = fit(sent, seconds)
    beta = beta if beta > 0 else seconds[-1] / sent[-1]  # a busy machine was slower with small messages
    return max(1e-9, alpha / steps("all_reduce", ranks)), 1 / beta


def measure(ranks: int) -> dict[str, float]:
    """The machine's numbers, by their names in planner/hardware.py and planner/constants.py; `passes` is left to find.

    On the CPU as many processes as there are cores compute at once; with more ranks they take turns (`cores`).
    """
    import torch

    from common.lab.launch import launch

    cores = 0 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
    at_once = min(ranks, cores or 1)
    found = launch(one_rank, at_once, timeout=300)
    alpha, link = links(ranks) if ranks > 1 else (1e-5, 1e9)
    usual = {name: statistics.median(rank[name] for rank in found) for name in found[0]}
    if 0 < cores < ranks:
        crowded = statistics.median(launch(crowded_block, ranks, timeout=300))
        usual["crowding"] = max(1.0, crowded / (usual["block"] * ranks / cores))
    return usual | {"alpha_link": alpha, "link": link, "cores": cores}


def passes(here: GPU, constants: Constants, seconds: float) -> float:
    """How often a block's activations go through the memory in the forward pass, so that a block takes `seconds`.

    A GPU's is fitted on published runs. A processor computes element-wise work (GELU, norms, softmax) more slowly than
    its memory would allow, and this is where that goes.
    """
    layout = Layout((("data", 1),), BLOCK["micro_batch"], BLOCK["micro_batch"], BLOCK["sequence"], fused=False,
                    precision="float32", sequence_parallel=False)  # fmt: skip
    model = course_gpt(1, BLOCK["width"], BLOCK["heads"], BLOCK["sequence"])
    one = of_layer(model, here, layout, False, replace(constants, passes=1.0))
    products_and_core = one.products + one.core + one.backward_products + one.backward_core
    return max(0.1, (seconds - products_and_core) / (one.elementwise + one.backward_elementwise))


def calibrate(path: Path | str, ranks: int) -> str:
    """Measure, and write a file for `--constants`; the text says what was found. Raises UserError."""
    if ranks < 1:
        raise UserError(f"--ranks must be at least 1, not {ranks}")
    if ranks > 16 * (os.cpu_count() or 1):
        raise UserError(f"--ranks {ranks} are more than 16 for each of {os.cpu_count()} cores; take fewer")
    before = busy()
    found = measure(ranks)
    constants: dict[str, Any] = {
        "matmul": 1.0, "link": 1.0, "memory_rate": 1.0, "kernel": found["kernel"], "alpha_link": found["alpha_link"],
        "source": "measured on this machine by calibrate",
    }  # fmt: skip
    if found["cores"]:
        constants["kept"] = 0.0  # a processor that copies a message does not compute meanwhile
        constants["passes"] = passes(here(found), replace(PRIOR, **constants), found["block"])
    with writing(path):
        Path(path).write_text(json.dumps({"constants": constants, "here": found}, indent=1) + "\n")
    doubt = f"\nnote: {before:.0%} of this machine's cores were busy before: measure again when it is quiet"
    return (
        f"products     {found['peak'] / 1e9:,.1f} GFLOP/s, {found['kernel'] * 1e6:,.0f} us before each begins\n"
        f"memory       {found['hbm'] / 1e9:,.1f} GB/s\n"
        f"messages     {found['alpha_link'] * 1e6:,.0f} us each, {found['link'] / 1e9:,.2f} GB/s, with {ranks} ranks\n"
        f"written to {path}: use --gpu here --constants {path}{doubt if before > BUSY else ''}"
    )
