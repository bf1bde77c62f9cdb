"""The sliders of the schedule lab: a schedule, its numbers and times, and its picture, which follows them."""

import base64
import io

import ipywidgets as widgets
import matplotlib.pyplot as plt
from IPython.display import display

from common.errors import UserError
from common.lab import plotting
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


class Lab(widgets.VBox):
    """Controls, a line of text and a picture. The picture is a widget too, so it changes without running a cell."""

    def __init__(self):
        self.controls = {
            "name": widgets.Dropdown(options=list(schedules.SCHEDULES), value="1f1b", description="schedule"),
            "ranks": self.number("ranks", 4, 8),
            "microbatches": self.number("micro-batches", 8, 32),
            "stages_per_rank": self.number("stages/rank", 2, 4),
            "forward": self.time("forward", 1),
            "backward_input": self.time("bwd. input", 1),
            "backward_weight": self.time("bwd. weight", 1),
            "message": self.time("message", 0),
        }
        self.text, self.picture = widgets.Label(), widgets.Image(format="png", width=860)
        for control in self.controls.values():
            control.style.description_width = "100px"  # "micro-batches" in full
            control.observe(self.redraw, "value")
        self.redraw()
        four = list(self.controls.values())
        super().__init__([widgets.HBox([widgets.VBox(four[:4]), widgets.VBox(four[4:])]), self.text, self.picture])

    @staticmethod
    def number(what, value, most):
        return widgets.IntSlider(value, 1, most, description=what, continuous_update=False)

    @staticmethod
    def time(what, value):
        least = 0.5 if value else 0.0
        return widgets.FloatSlider(value, min=least, max=3, step=0.5, description=what, continuous_update=False)

    def redraw(self, change=None):
        chosen = {key: control.value for key, control in self.controls.items()}
        fixed = schedules.SCHEDULES[chosen["name"]].stages_per_rank
        self.controls["stages_per_rank"].disabled = fixed is not None
        if fixed:
            chosen["stages_per_rank"] = fixed
        try:
            timeline = run(**chosen)
        except UserError as error:
            self.text.value, self.picture.layout.visibility = str(error), "hidden"
            return
        self.text.value = f"{caption(chosen['name'], timeline)}, activations stored: {timeline.peaks}"
        self.picture.layout.visibility, png = "visible", io.BytesIO()
        fig = plotting.pipeline({caption(chosen["name"], timeline): timeline})
        fig.savefig(png, format="png", dpi=130)
        plt.close(fig)
        self.picture.value = png.getvalue()

    def show(self, alt: str) -> None:
        """Display the sliders; where no kernel runs, and on pages that know no widgets, the picture alone."""
        data = {
            "text/plain": "Sliders: run this cell to move them.",
            "image/png": base64.b64encode(self.picture.value).decode(),
            "application/vnd.jupyter.widget-view+json": {
                "version_major": 2, "version_minor": 0, "model_id": self.model_id,
            },
        }  # fmt: skip
        display(data, metadata={"image/png": {"alt": alt, "width": 860}}, raw=True)
