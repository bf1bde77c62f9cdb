"""What one tries in the schedule lab: a schedule by name with its times, one of one's own, and sliders whose picture
follows them."""

import ipywidgets as widgets

from common.errors import UserError
from common.lab import plotting
from common.lab.sliders import Sliders
from course.pipeline import schedules, simulator


def run(name, ranks, microbatches, stages_per_rank=None, forward=1, backward_input=1, backward_weight=1, message=0):
    """The timeline of a schedule, whose times are for all layers of a rank together: each of several stages takes its
    part of them, so that schedules can be compared. Raises UserError for numbers that do not fit the schedule."""
    schedule = schedules.build(name, ranks, microbatches, stages_per_rank)
    stages = len(simulator.placement(schedule)) // ranks
    times = [time / stages for time in (forward, backward_input, backward_weight)]
    return simulator.simulate(schedule, simulator.Times(*times, communication=message))


def judge(text: str) -> None:
    """Print how a schedule runs that is written as a line of actions for each rank, and what 1F1B does with as many
    ranks and micro-batches (par); or, of one that cannot run, how far it comes and why it goes no further. Forward and
    backward passes take one unit each."""
    times = simulator.Times(2, 1, 1)
    lists = [schedules.parse(line) for line in text.strip().splitlines()]
    count = len({action.microbatch for actions in lists for action in actions})
    par = simulator.simulate(schedules.build("1f1b", len(lists), count), times)
    try:
        mine = simulator.simulate(lists, times)
    except simulator.IllegalSchedule as error:
        if error.so_far is not None:
            print(simulator.rows(error.so_far))
        print(f"illegal: {error}")
        return
    print(simulator.rows(mine))
    print(f"done after {mine.makespan // 2}, par {par.makespan // 2}; stored at most {mine.peaks}, par {par.peaks}")


def caption(name, timeline):
    return f"{name}: makespan {float(timeline.makespan):g}, bubble {float(timeline.bubble):.0%}"


class Lab(Sliders):
    """Controls, a line of text and a picture."""

    def __init__(self):
        self.text = widgets.Label()
        controls = {
            "name": widgets.Dropdown(options=list(schedules.SCHEDULES), value="1f1b", description="schedule"),
            "ranks": self.number("ranks", 4, 8),
            "microbatches": self.number("micro-batches", 8, 32),
            "stages_per_rank": self.number("stages/rank", 2, 4),
            "forward": self.time("forward", 1),
            "backward_input": self.time("bwd. input", 1),
            "backward_weight": self.time("bwd. weight", 1),
            "message": self.time("message", 0),
        }
        super().__init__(controls, self.text)

    @staticmethod
    def number(what, value, most):
        return widgets.IntSlider(value, 1, most, description=what)

    @staticmethod
    def time(what, value):
        least = 0.5 if value else 0.0
        return widgets.FloatSlider(value, min=least, max=3, step=0.5, description=what)

    def draw(self, **chosen):
        fixed = schedules.SCHEDULES[chosen["name"]].stages_per_rank
        self.controls["stages_per_rank"].disabled = fixed is not None
        if fixed:
            chosen["stages_per_rank"] = fixed
        try:
            timeline = run(**chosen)
        except UserError as error:
            self.text.value = str(error)
            return None
        self.text.value = f"{caption(chosen['name'], timeline)}, activations stored: {timeline.peaks}"
        return plotting.pipeline({caption(chosen["name"], timeline): timeline})
