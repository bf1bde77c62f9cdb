"""Run a schedule that you have drawn: one list of actions for each rank, on as many real ranks.

    python -m course.pipeline.play "0F0 0F1 0B0 0B1" "1F0 1B0 1F1 1B1"

The ranks train a small model for a step, and its gradients are compared with those of one process. Then the same lists
are run on stages that sleep instead of computing, which takes as long as on as many devices, beside what the simulator
says. What cannot run is refused in one line: the circle of ranks that wait, or the action that is missing.
"""

import sys

from common import installed
from common.errors import UserError, one_line_errors

if __name__ == "__main__":
    installed.at_start()

from course.pipeline import schedules, simulator
from course.pipeline.schedules import Schedule

# What needs PyTorch is imported where it is used: most lists that cannot run are refused before.
MOST_RANKS, UNIT = 8, 0.03  # the model has eight layers; seconds that a forward sleeps


def step(schedule: Schedule) -> dict:
    """One step of the toy model by a schedule, with the course's executor on all ranks of this launch: the gradients of
    this rank's layers, by name."""
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from course.pipeline import toy
    from course.pipeline.executor import Executor

    rank_of = simulator.placement(schedule)
    microbatches = 1 + max(action.microbatch for own in schedule for action in own)
    stages = {n: toy.part(n, len(rank_of)) for n, rank in enumerate(rank_of) if rank == dist.get_rank()}
    labels = toy.LABELS.chunk(microbatches)
    executor = Executor(schedule, stages, dist.group.WORLD)
    shape = len(labels[0]), toy.WIDTH  # of what a stage hands on
    executor.run(toy.IMAGES.chunk(microbatches), lambda out, m: cross_entropy(out, labels[m]) / microbatches, shape)
    return {key: grad for stage in stages.values() for key, grad in toy.gradients(stage).items()}


def checked(texts: list[str]) -> Schedule:
    """The lists, once the simulator has let them through. Raises UserError, which names what is wrong."""
    schedule = [schedules.parse(text) for text in texts]
    if not schedule or not all(schedule):
        raise UserError('give one list of actions for each rank, as "0F0 0F1 0B0 0B1"; a rank has at least one')
    simulator.simulate(schedule)
    stages = len(simulator.placement(schedule))
    microbatches = 1 + max(action.microbatch for own in schedule for action in own)
    if stages > MOST_RANKS:
        raise UserError(f"{stages} stages: the model has {MOST_RANKS} layers; draw at most as many stages")
    from course.pipeline import toy

    if toy.BATCH % microbatches:
        raise UserError(f"{microbatches} micro-batches: a batch of {toy.BATCH} does not divide into them")
    return schedule


def main(argv: list[str]) -> None:
    with one_line_errors():
        schedule = checked(argv)
        from common.lab.launch import launch
        from course.pipeline import sleeping, toy
        from course.pipeline.executor import timeline

        toy.compare(f"{len(schedule)} ranks", launch(step, nproc=len(schedule), args=(schedule,)))
        times = (UNIT, UNIT, UNIT)
        ran = timeline(launch(sleeping.run_lists, nproc=len(schedule), args=(schedule, times)))
        predicted = simulator.simulate(schedule, simulator.Times(*times))
        print(f"stages that sleep: {ran.makespan:.2f} s, by the simulator {predicted.makespan:.2f} s; idle for "
              f"{ran.bubble:.0%}, by the simulator {predicted.bubble:.0%}")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
