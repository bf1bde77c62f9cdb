"""The controls that the course's sliders use, as values: page_sliders.py writes them as fields of a form."""


class Style:
    description_width = ""


class Layout:
    display = None


class Widget:
    def __init__(self, description="", value=None):
        self.description, self._value, self.watching, self.disabled = description, value, [], False
        self.style, self.layout = Style(), Layout()

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, new):
        changed, self._value = new != self._value, new
        for handler in self.watching if changed else ():
            handler()

    def observe(self, handler, _name):
        self.watching.append(handler)


class Choice(Widget):
    """One of some values, each with a name."""

    def __init__(self, options, value, description="", continuous_update=True):
        pairs = options.items() if isinstance(options, dict) else options
        self.options = [pair if isinstance(pair, tuple) else (str(pair), pair) for pair in pairs]
        super().__init__(description, value)

    @property
    def place(self):
        return [value for _, value in self.options].index(self.value)


class SelectionSlider(Choice):
    pass


class Dropdown(Choice):
    pass


class FloatSlider(Widget):
    def __init__(self, value, min=0.0, max=1.0, step=0.1, description=""):
        self.min, self.max, self.step = min, max, step
        super().__init__(description, value)


class IntSlider(FloatSlider):
    def __init__(self, value, min=0, max=100, step=1, description=""):
        super().__init__(value, min, max, step, description)


class FloatLogSlider(FloatSlider):
    """From 10**min to 10**max."""

    def __init__(self, value, min=0.0, max=1.0, step=0.1, description="", readout_format=""):
        self.readout_format = readout_format
        super().__init__(value, min, max, step, description)


class Checkbox(Widget):
    def __init__(self, value, description=""):
        super().__init__(description, value)


class Label(Widget):
    def __init__(self, value=""):
        super().__init__(value=value)


HTML = Label


class Image(Widget):
    def __init__(self, format="", width=0):
        super().__init__()


class VBox(Widget):
    def __init__(self, children=()):
        super().__init__()


HBox = VBox
