"""Sliders, whole: their places, the picture that follows them, and what a page shows where no kernel runs."""

import io

import ipywidgets as widgets
import matplotlib.pyplot as plt
from PIL import Image

from common.lab.sliders import Sliders


class Bars(Sliders):
    """As wide as one of them says; none for 0."""

    def __init__(self, *below):
        self.drawn = []
        super().__init__({name: widgets.IntSlider(2, 0, 5) for name in ("a", "b", "c", "d", "e")}, *below)

    def draw(self, a, b, c, d, e):
        self.drawn.append((a, b, c, d, e))
        return plt.figure(figsize=(a, 1)) if a else None


def test_a_picture_follows_its_sliders():
    below = widgets.HTML("below")
    bars = Bars(below)
    columns, *rest = bars.children
    assert rest == [below, bars.picture] and bars.drawn == [(2, 2, 2, 2, 2)], "drawn once before anybody moves a slider"
    shown = [control for column in columns.children for control in column.children]
    assert shown == list(bars.controls.values()), "each slider once, in order"
    before = Image.open(io.BytesIO(bars.picture.value)).size
    bars.controls["a"].value = 3
    after = Image.open(io.BytesIO(bars.picture.value)).size
    assert (2 * after[0], after[1]) == (3 * before[0], before[1]) and bars.drawn[-1] == (3, 2, 2, 2, 2)
    kept = bars.picture.value
    bars.controls["a"].value = 0
    assert (bars.picture.value, bars.picture.layout.display) == (kept, "none"), "no blank space where is no picture"
    bars.controls["a"].value = 4
    assert bars.picture.layout.display is None and len(bars.drawn) == 4
