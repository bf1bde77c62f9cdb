"""`--strategy auto`: the planner picks strategy and mesh for the model, the batch and the number of processes.

Its numbers are those of constants.json, if `python -m planner calibrate` has written that to the current folder, else
those of the GPU's data sheet, or of a laptop's core.
"""

from dataclasses import replace
from pathlib import Path

import torch

from common import gpus
from common.axes import parse_axes
from common.command_line import parse
from common.config import Config
from common.errors import UserError
from common.options import flag
from common.ranks import choose as choose_device
from common.ranks import environment
from course.strategies import BY_AXES, STRATEGIES
from planner import as_course, constants, hardware
from planner.models import course_gpt
from planner.search import Choice, plan

MEASURED = "constants.json"  # what calibrate writes by default
LOOKED_AT = 200  # layouts, from the fastest on, of which the first that the course has is taken
PRECISION = {ours: theirs for theirs, ours in as_course.PRECISION.items()}


def choose(argv: list[str]) -> list[str]:
    """The command line with a strategy, its mesh and what goes with them, in the place of --strategy auto. What it says
    itself stays. Rank 0 prints what was chosen, and why. Raises UserError."""
    picked = {flag(name) for name in ("mesh", "mesh_order", "by_hand", "implementation")}
    given = next((word for word in argv if word.split("=")[0] in picked), None)
    if given:
        raise UserError(f"{given.split('=')[0]}: --strategy auto picks it; leave one of them out")
    asked = parse(STRATEGIES, None, [*argv, "--strategy", "ddp"], BY_AXES)
    if asked.task != "text":
        raise UserError(f"--strategy auto plans GPTs, and this is --task {asked.task}; take --strategy ddp")
    rank, size, _, per_node = environment()
    cluster, measured = machine(asked, size, per_node)
    found = constants.load(MEASURED if measured else None)
    gpt = course_gpt(asked.layers, asked.width, asked.heads, asked.context)
    precision = PRECISION[asked.precision]
    best = plan(gpt, cluster, asked.batch_size, asked.context, precision, count=LOOKED_AT, constants=found)
    for place, one in enumerate(best, 1):
        try:
            line = with_layout(argv, one)
            config = parse(STRATEGIES, None, line, BY_AXES)
        except UserError:
            continue
        if rank == 0:
            print(
                summary(config, one, place, MEASURED if measured else f"the planner's {cluster.gpu.name}"),
                flush=True,
            )
        return line
    raise UserError(f"--strategy auto: the course has none of the {len(best)} fastest layouts; name a --strategy")


def with_layout(argv: list[str], one: Choice) -> list[str]:
    """What the command line itself says comes later, and wins; but for the strategy."""
    settings = as_course.settings(one.estimate.model, one.estimate.layout)
    name = settings.pop("strategy", None) or BY_AXES.get(frozenset(parse_axes(settings["mesh"])), "mesh")
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in settings.items()]
    return [*words, *argv, "--strategy", name]


def machine(config: Config, size: int, per_node: int) -> tuple[hardware.Cluster, bool]:
    """The processes as GPUs of a cluster, and whether it was measured. Raises UserError."""
    if Path(MEASURED).exists() and (here := hardware.read_here(MEASURED)):
        return hardware.cluster(here, size, per_node), True
    if choose_device(config.device, processes=per_node)[0] == "cpu":
        return hardware.cluster("cpu", size, per_node), False
    name = torch.cuda.get_device_name()
    known = gpus.named_by_pytorch(name)
    if known is None:
        raise UserError(
            f"--strategy auto does not know the GPU {name}; run `python -m planner calibrate` here first, or give it a "
            "line in common/gpus.csv"
        )
    found = hardware.cluster(known["name"], size, per_node)
    memory = torch.cuda.get_device_properties(0).total_memory  # of a name there may be GPUs with less
    return replace(found, gpu=replace(found.gpu, memory=min(found.gpu.memory, memory))), False


def summary(config: Config, one: Choice, place: int, source: str) -> str:
    """The line that is printed."""
    found, layout = one.estimate, one.estimate.layout
    mesh = ",".join(f"{axis}={size}" for axis, size in config.axes.items())
    why = "the fastest that fits" if place == 1 else f"place {place}: those before it are not in the course"
    return (
        f"auto: --strategy {config.strategy} --mesh {mesh}, micro-batches of {layout.micro_batch}, recompute "
        f"{layout.recompute}: {why}, by {source}: {1000 * found.seconds:,.3g} ms a step and "
        f"{found.memory.expected / 2**20:,.0f} MiB per process; second to it: {one.loser}"
    )
