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


def test_sliders_stand_in_two_columns_above_their_picture():
    below = widgets.HTML("below")
    bars = Bars(below)
    assert bars.children[1:] == (below, bars.picture), "columns, what stands below them, the picture"
    assert bars.drawn == [(2, 2, 2, 2, 2)], "drawn once before anybody moves a slider"
    columns, _, picture = bars.children
    stand = [[bars.controls[name] for name in names] for names in ("ab", "cde")]
    assert [list(column.children) for column in columns.children] == stand, "the first half at the left"
    assert {control.style.description_width for control in bars.controls.values()} == {"100px"}, "room for the names"
    assert (picture.format, picture.width) == ("png", "860"), "how the picture is shown"
    assert Image.open(io.BytesIO(picture.value)).size == (260, 130), "130 dots per inch"
    bars.controls["a"].value = 3
    assert Image.open(io.BytesIO(picture.value)).size == (390, 130) and bars.drawn[-1] == (3, 2, 2, 2, 2)
    before = picture.value
    bars.controls["a"].value = 0
    assert (picture.value, picture.layout.display) == (before, "none"), "where there is no picture, no blank space"
    bars.controls["a"].value = 4
    assert picture.layout.display is None and len(bars.drawn) == 4
