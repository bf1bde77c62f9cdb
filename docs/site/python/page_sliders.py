"""The sliders of a page, live: the page's own cell runs here, on the course's own modules, and draws what it is asked.

The site keeps of each cell with sliders the lines that they need, in live_cells/ (tools/site_cells.py). `reply` runs
these, sets the values that the form has, and answers with the picture as SVG and the line of text below the sliders.
"""

import json
import math
from html import escape
from pathlib import Path

import ipywidgets as widgets

from common.errors import UserError
from common.lab import sliders

CELLS = Path(__file__).with_name("live_cells")
LABS: dict = {}  # cell -> its sliders


class Shown(Exception):
    """Carries the sliders out of the cell that shows them."""


def shown(lab, alt):
    lab.alt = alt
    raise Shown(lab)


sliders.png = lambda figure, dpi: figure
sliders.Sliders.show = shown


def of(cell: str):
    """The sliders of a cell, as the page first shows them."""
    if cell not in LABS:
        path = CELLS / f"{cell}.py"
        try:
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__live__"})
        except Shown as carried:
            LABS[cell] = carried.args[0]
    return LABS[cell]


def reply(text: str) -> str:
    """text: JSON of {"cell", "values"}: name of a control -> text of its field."""
    asked = json.loads(text)
    try:
        lab = of(asked["cell"])
        for name, given in asked.get("values", {}).items():
            read(lab.controls[name], given)
    except UserError as error:
        return json.dumps({"error": str(error)})
    drawn = lab.picture.value if lab.picture.layout.display is None else None
    text = getattr(lab, "text", None)
    words = text.value if text is not None else ""
    picture = drawn.svg(description_of(lab)) if drawn is not None else ""
    html = f"<p>{escape(words)}</p>{picture}"
    closed = [name for name, control in lab.controls.items() if control.disabled]
    readouts = {name: readout(control) for name, control in lab.controls.items()}
    return json.dumps({"html": html, "closed": closed, "readouts": readouts})


def description_of(lab) -> str:
    """What the sliders are at, in words, for who can't see the picture."""
    return "; ".join(f"{control.description} {readout(control)}" for control in lab.controls.values())


def read(control, given: str) -> None:
    """Set a control to what its field has."""
    if isinstance(control, widgets.Choice):
        control.value = control.options[int(given)][1]
    elif isinstance(control, widgets.Checkbox):
        control.value = given == "true"
    elif isinstance(control, widgets.FloatLogSlider):
        control.value = 10 ** float(given)
    else:
        control.value = int(given) if isinstance(control, widgets.IntSlider) else float(given)


def readout(control) -> str:
    if isinstance(control, widgets.Choice):
        return control.options[control.place][0]
    if isinstance(control, widgets.FloatLogSlider):
        return format(control.value, control.readout_format)
    return str(control.value)


def form(cell: str) -> str:
    """The controls as fields, for the page as it is stored."""
    found = []
    for name, control in of(cell).controls.items():
        label = escape(control.description)
        if isinstance(control, widgets.Dropdown):
            chosen = [" selected" * (number == control.place) for number in range(len(control.options))]
            options = "".join(f'<option value="{number}"{chosen[number]}>{escape(text)}</option>'
                              for number, (text, _) in enumerate(control.options))  # fmt: skip
            found.append(f'<label>{label} <select name="{name}">{options}</select></label>')
            continue
        if isinstance(control, widgets.Checkbox):
            found.append(f'<label>{label} <input type="checkbox" name="{name}"{" checked" * control.value}></label>')
            continue
        if isinstance(control, widgets.Choice):
            limits = 0, len(control.options) - 1, 1, control.place
        elif isinstance(control, widgets.FloatLogSlider):
            limits = control.min, control.max, control.step, math.log10(control.value)
        else:
            limits = control.min, control.max, control.step, control.value
        least, most, step, value = (f"{number:.4g}" for number in limits)
        found.append(f'<label>{label} <span><input type="range" name="{name}" min="{least}" max="{most}" step="{step}" '
                     f'value="{value}" aria-valuetext="{escape(readout(control))}"> <output>{escape(readout(control))}'
                     f"</output></span></label>")  # fmt: skip
    return f'<form class="sliders">{"".join(found)}</form>'
