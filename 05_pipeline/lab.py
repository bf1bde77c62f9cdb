"""The sliders of the schedule lab: a schedule, its numbers and times, and its picture, which follows them."""

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
