"""Controls in a notebook, and a picture that follows them."""

import base64

import ipywidgets as widgets
from IPython.display import display

from common.lab.plotting import png


class Sliders(widgets.VBox):
    """Controls in two columns, what stands below them, and a picture. The picture is a widget too, so it changes
    without running a cell.

    controls: name of an argument of `draw` -> widget. A subclass has that method; it gives the picture, or None where
              there is none for these values
    """

    def __init__(self, controls: dict[str, widgets.Widget], *below: widgets.Widget):
        self.controls, self.picture = controls, widgets.Image(format="png", width=860)
        for control in controls.values():
            control.style.description_width = "100px"  # a long one in full
            control.observe(self.redraw, "value")
        self.redraw()
        all_of_them, half = list(controls.values()), len(controls) // 2
        columns = [widgets.VBox(all_of_them[:half]), widgets.VBox(all_of_them[half:])]
        super().__init__([widgets.HBox(columns), *below, self.picture])

    def redraw(self, _change=None) -> None:
        fig = self.draw(**{name: control.value for name, control in self.controls.items()})
        self.picture.layout.display = None if fig else "none"  # no blank space in its place
        if fig:
            self.picture.value = png(fig, dpi=130)

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
