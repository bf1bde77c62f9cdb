from matplotlib.figure import Bars


class Rectangle(Bars):
    def __init__(self, corner, width, height, **style):
        super().__init__([(corner[0], width, corner[1], height)], **{"lw": 0.5} | style)


class Missing:
    """What no picture under sliders draws."""

    def __init__(self, *_arguments, **_fields):
        raise TypeError("docs/site/python/matplotlib does not draw this")


Circle = Ellipse = FancyArrowPatch = FancyBboxPatch = Polygon = Missing
